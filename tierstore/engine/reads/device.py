"""Look-ups whose answer stays on a GPU: overlays first, then the device tier, then what lies below it.

On the caller's thread, under the caller's view; any number of threads. The answer is complete when it is returned, so
any stream may read it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstore.engine.data.table_view import DTYPES
from tierstore.engine.reads.feature_view import FeatureView
from tierstore.engine.reads.lookup import BagLookup, Lookup
from tierstore.engine.versions.version import Version
from tierstore.errors import NotReady
from tierstore.tiers.device.backend import Captured
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import PADDING, Pooling
from tierstore.types import Keys, Tier


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Rows [n, dim] or [bags, dim] at an address of a device's memory, which `array` keeps."""

    address: int
    array: Any


class DeviceLookup:
    """A look-up into device memory, not begun before `finish`. One thread at a time, as `Lookup`."""

    __slots__ = ("_gpu", "_what", "found")

    def __init__(self, gpu: Gpu, feature: FeatureView, codes: Keys, bags: Pooling | None, code: int) -> None:
        self._gpu, self._what = gpu, (feature, codes, bags, code)
        self.found = np.empty(0, np.bool_)

    @property
    def pending(self) -> bool:
        """`finish` waits for the device, so always."""
        return True

    def finish(self) -> OnDevice:
        """The answer, complete. To be called once; sets `found`, as of `Lookup`.

        Where the device tier cannot answer, CPU memory does, and the answer is uploaded. NotReady within the capture of
        a CUDA graph.
        """
        with _outside_of_captures():
            array = self._answer()
        assert self._gpu.memory is not None
        return OnDevice(self._gpu.memory.backend.address_of(array), array)

    def _answer(self) -> Any:
        feature, codes, bags, code = self._what
        state = np.zeros(len(codes), np.uint8)
        if feature.padding is not None:
            state[codes == feature.padding] = PADDING
        vectors = feature.rows.on_device(codes, state, DTYPES[code], bags)
        if vectors is not None:
            feature.rows.table.count(state, feature.skipped(codes))
            self.found = state != Tier.ABSENT
            return vectors
        lookup = Lookup(feature, codes, code) if bags is None else BagLookup(feature, codes, bags, code)
        array = self._gpu.upload(lookup.finish())
        self.found = lookup.found
        return array


def gpu_of(version: Version, device: str) -> Gpu:
    """The one that the tables of a version that serves are on. Errors say what is missing of `device`."""
    gpu = version.gpu
    assert gpu is not None
    gpu.memory_of(device)
    return gpu


@contextmanager
def _outside_of_captures() -> Iterator[None]:
    try:
        yield
    except Captured as error:
        raise NotReady(str(error)) from error


@contextmanager
def of_caller(version: Version, device: str | None, stream: Any) -> Iterator[Callable[[Any], Any]]:
    """Within the block look-ups come after the work in the caller's `stream`, None for the one that it is in.

    Gives what copies arrays that lie on the GPU into CPU memory, and leaves others as they are.
    """
    gpu = gpu_of(version, "gpu" if device in (None, "cpu") else str(device))
    with _outside_of_captures(), gpu.in_stream(stream):
        yield gpu.to_host
