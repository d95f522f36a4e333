"""Look-ups whose answer stays on a GPU: overlays first, then the device tier, then what lies below it.

On the caller's thread, under the caller's view; any number of threads. The answer is complete when it is returned, so
any stream may read it at once. Nothing survives the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstore.engine.overlay import OverlayTable
from tierstore.engine.table import Table
from tierstore.engine.version import Version
from tierstore.errors import NotReady
from tierstore.tiers.device_backend import Captured
from tierstore.tiers.device_lookup import PADDING, Bags
from tierstore.tiers.device_set import DeviceSet
from tierstore.types import Keys, States, Tier, Vectors


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Rows [n, dim] or [bags, dim] at an address of a device's memory, which `array` keeps."""

    address: int
    array: Any


class DeviceLookup:
    """A look-up into device memory under way, made by `View.begin_on_device`. One thread at a time, as `Lookup`."""

    __slots__ = ("_address_of", "_answer", "found")

    def __init__(self, answer: Callable[[], tuple[Any, np.ndarray]], address_of: Callable[[Any], int]) -> None:
        self._answer, self._address_of = answer, address_of
        self.found = np.empty(0, np.bool_)

    @property
    def pending(self) -> bool:
        """`finish` waits for the device, so always."""
        return True

    def finish(self) -> OnDevice:
        """The answer, complete. To be called once; sets `found`, as of `Lookup`."""
        array, self.found = self._answer()
        return OnDevice(self._address_of(array), array)


def devices_of(version: Version, device: str) -> DeviceSet:
    """Those that the tables of a version that serves are on. Errors say what is missing of `device`."""
    devices = version.devices
    assert devices is not None
    devices.number_of(device)
    return devices


@contextmanager
def _outside_of_captures() -> Iterator[None]:
    try:
        yield
    except Captured as error:
        raise NotReady(str(error)) from error


@_outside_of_captures()
def answer_on_device(
    devices: DeviceSet,
    device: str,
    table: Table,
    overlays: Sequence[OverlayTable],
    seq: int,
    codes: Keys,
    padding: np.ndarray | None,
    dtype: Any,
    bags: Bags | None,
    on_cpu: Callable[[], tuple[Vectors, np.ndarray]],
) -> tuple[Any, np.ndarray]:
    """(vectors on the device, found bool[n] in CPU memory). NotReady within the capture of a CUDA graph.

    `padding` bool[n] or None; `on_cpu` answers the same request in CPU memory, for when the device tier cannot.
    """
    number = devices.number_of(device)
    cache = table.device
    if cache is not None:
        state = np.zeros(len(codes), np.uint8)
        if padding is not None:
            state[padding] = PADDING
        rows_dtype = np.float32 if bags is not None else dtype
        given = _from_overlays(table, overlays, codes, state, rows_dtype)

        def below(keys: Keys, wanted: Any) -> tuple[Vectors, States]:
            return table.below_device(seq, keys, wanted)

        vectors = cache.answer(codes, state, given, dtype, below, bags, number)
        if vectors is not None:
            table.count(state, 0 if padding is None else int(np.count_nonzero(padding)))
            return vectors, state != Tier.ABSENT
    answer, found = on_cpu()
    return devices.upload(answer, number), found


def _from_overlays(table: Table, overlays: Sequence[OverlayTable], codes: Keys, state: States, dtype: Any) -> Vectors:
    """Rows of the keys that deltas answer, in their order; their states are set."""
    if not overlays:
        return np.empty((0, table.spec.dim), dtype)
    rows = np.empty((len(codes), table.spec.dim), dtype)
    for overlay in overlays:
        overlay.lookup(codes, rows, state, table.default)
    given: Vectors = rows[(state != Tier.PENDING) & (state != PADDING)]
    return given
