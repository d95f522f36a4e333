"""Look-ups whose answer stays on a GPU: overlays first, then the device tier, then what lies below it.

On the caller's thread, under the caller's view; any number of threads. The answer is complete when it is returned, so
any stream may read it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.reads.batch import KeyBatch
from tierstore.engine.reads.lookup import begin
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, NotReady
from tierstore.tiers.device.backend import Captured, lies_on_gpu
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import PADDING, KeysThere
from tierstore.types import FeatureSpec, KeyType, Tier


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Rows [n, dim] or [bags, dim] at an address of a device's memory, which `array` keeps."""

    address: int
    array: Any


class DeviceLookup:
    """A look-up into device memory, not begun before `finish`. One thread at a time, as `Lookup`."""

    __slots__ = ("_batch", "_gpu", "found")

    def __init__(self, batch: KeyBatch, gpu: Gpu) -> None:
        self._batch, self._gpu = batch, gpu
        self.found = np.empty(0, np.bool_)

    @property
    def pending(self) -> bool:
        """`finish` waits for the device, so always."""
        return True

    def finish(self) -> OnDevice:
        """The answer, complete. To be called once; sets `found`, as of `Lookup`."""
        array, self.found = answer_on_device(self._batch, self._gpu)
        assert self._gpu.memory is not None
        return OnDevice(self._gpu.memory.backend.address_of(array), array)


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
def of_caller(version: Version, device: str | None, stream: Any) -> Iterator[Gpu]:
    """Within the block look-ups come after the work in the caller's `stream`, None for the one that it is in."""
    gpu = gpu_of(version, "gpu" if device in (None, "cpu") else str(device))
    with _outside_of_captures(), gpu.in_stream(stream):
        yield gpu


def keys_there(
    gpu: Gpu, keys: Any, feature: FeatureSpec, table: Cascade, overlays: Sequence[OverlayTable]
) -> KeysThere | None:
    """Keys that lie on the GPU, to be looked up where they are; None where the CPU has to see them.

    That is for deltas that are not in the tiers yet, for padding, for hashes, and what is no int64[n].
    """
    if feature.hash is not None or feature.padding_key is not None or table.spec.key is not KeyType.INT64 or overlays:
        return None
    if table.device is None or not lies_on_gpu(keys):
        return None
    assert gpu.memory is not None
    mine = gpu.memory.backend.adopt(keys)
    if mine.dtype != np.int64 or len(mine.shape) != 1:
        return None
    return KeysThere(mine, gpu.memory.backend.address_of(mine))


@_outside_of_captures()
def answer_on_device(batch: KeyBatch, gpu: Gpu) -> tuple[Any, np.ndarray]:
    """(vectors on the device, found bool[n] in CPU memory).

    Where the device tier cannot answer, CPU memory does, and the answer is uploaded. NotReady within
    the capture of a CUDA graph.
    """
    if batch.out is not None:
        raise InvalidInput("out: an answer on a device is a new array; leave out away")
    codes = batch.codes if batch.there is None else batch.there
    state = np.zeros(len(codes), np.uint8)
    if batch.padding is not None:
        state[batch.padding] = PADDING
    vectors = batch.table.lookup_on_device(batch.overlays, batch.seq, codes, state, batch.dtype, batch.bags)
    if vectors is not None:
        batch.table.count(state, batch.skipped)
        return vectors, state != Tier.ABSENT
    if batch.there is not None:
        batch = replace(batch, codes=gpu.to_host(batch.there.array), there=None)
    lookup = begin(batch)
    return gpu.upload(lookup.finish()), lookup.found
