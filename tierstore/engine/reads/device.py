"""Look-ups whose answer stays on a GPU: overlays first, then the device tier, then the tiers below it.

On the caller's thread, under the caller's view; any number of threads. A returned answer is complete, so any stream
may read it at once; or, if the caller has named its stream, complete in the order of that stream.
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
from tierstore.tiers.device.backend import Captured, lies_on_gpu
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import PADDING, KeysThere, Pooling, Unwaited
from tierstore.types import Keys, KeyType, Tier

Hold = Callable[[], Callable[[], None]]  # holds a view, and returns what releases it


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Rows [n, dim] or [bags, dim] at an address of device memory, which `array` keeps alive."""

    address: int
    array: Any


class DeviceLookup:
    """A look-up into device memory, which begins only with `finish`. One thread at a time, as `Lookup`."""

    __slots__ = ("_gpu", "_what", "found")

    def __init__(
        self, gpu: Gpu, feature: FeatureView, codes: Keys | KeysThere, bags: Pooling | None, code: int
    ) -> None:
        self._gpu, self._what = gpu, (feature, codes, bags, code)
        self.found = np.empty(0, np.bool_)

    @property
    def pending(self) -> bool:
        """True: `finish` waits for the device."""
        return True

    def finish(self, hold: Hold | None = None) -> OnDevice:
        """The answer, complete. Call it once; sets `found`, as for `Lookup`.

        If the device tier cannot answer, CPU memory does, and the answer is uploaded. NotReady while a CUDA graph is
        captured. With `hold` the answer may be complete only in the order of the caller's stream; then `found` is not
        set, and the view is held until it is.
        """
        with _outside_of_captures():
            array = self._answer(hold)
        assert self._gpu.memory is not None
        return OnDevice(self._gpu.memory.backend.address_of(array), array)

    def _answer(self, hold: Hold | None) -> Any:
        feature, codes, bags, code = self._what
        state = np.zeros(len(codes), np.uint8)
        if feature.padding is not None:
            state[codes == feature.padding] = PADDING
        rows, skipped = feature.rows, int(np.count_nonzero(state))
        unwaited = hold and Unwaited(hold, lambda keys, states: rows.count_on_device(keys, states, skipped))
        vectors = rows.on_device(codes, state, DTYPES[code], bags, unwaited)
        if vectors is not None:
            if unwaited is None or not unwaited.begun:
                rows.count_on_device(codes, state, skipped)
                self.found = state != Tier.ABSENT
            return vectors
        if isinstance(codes, KeysThere):
            codes = self._gpu.to_host(codes.array)
        lookup = Lookup(feature, codes, code) if bags is None else BagLookup(feature, codes, bags, code)
        array = self._gpu.upload(lookup.finish())
        self.found = lookup.found
        return array


def gpu_of(version: Version, device: str) -> Gpu:
    """The GPU of a served version's tables. Errors say why `device` is not available."""
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
def of_caller(version: Version, device: str | None, stream: Any) -> Iterator[Gpu]:
    """In the block look-ups come after the work in the caller's `stream`, None for its current one."""
    gpu = gpu_of(version, "gpu" if device in (None, "cpu") else str(device))
    with _outside_of_captures(), gpu.in_stream(stream):
        yield gpu


def keys_there(gpu: Gpu, keys: Any, feature: FeatureView) -> KeysThere | None:
    """Keys on the GPU, to be looked up in place; None if the CPU must see them.

    It must for deltas that are not in the tiers yet, for padding, for hashes, and unless they are int64[n].
    """
    spec, table = feature.spec, feature.rows.table
    if spec.hash is not None or spec.padding_key is not None or table.spec.key is not KeyType.INT64:
        return None
    if feature.rows.overlays or table.device is None or not lies_on_gpu(keys):
        return None
    assert gpu.memory is not None
    mine = gpu.memory.backend.adopt(keys)
    if mine.dtype != np.int64 or len(mine.shape) != 1:
        return None
    return KeysThere(mine, gpu.memory.backend.address_of(mine))
