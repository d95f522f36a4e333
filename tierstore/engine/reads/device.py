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

from tierstore.engine.reads.batch import KeyBatch
from tierstore.engine.reads.lookup import begin
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, NotReady
from tierstore.tiers.device.backend import Captured
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import PADDING
from tierstore.types import Tier


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
def of_caller(version: Version, device: str | None, stream: Any) -> Iterator[Callable[[Any], Any]]:
    """Within the block look-ups come after the work in the caller's `stream`, None for the one that it is in.

    Gives what copies arrays that lie on the GPU into CPU memory, and leaves others as they are.
    """
    gpu = gpu_of(version, "gpu" if device in (None, "cpu") else str(device))
    with _outside_of_captures(), gpu.in_stream(stream):
        yield gpu.to_host


@_outside_of_captures()
def answer_on_device(batch: KeyBatch, gpu: Gpu) -> tuple[Any, np.ndarray]:
    """(vectors on the device, found bool[n] in CPU memory).

    Where the device tier cannot answer, CPU memory does, and the answer is uploaded. NotReady within
    the capture of a CUDA graph.
    """
    if batch.out is not None:
        raise InvalidInput("out: an answer on a device is a new array; leave out away")
    state = np.zeros(len(batch.codes), np.uint8)
    if batch.padding is not None:
        state[batch.padding] = PADDING
    vectors = batch.table.lookup_on_device(batch.overlays, batch.seq, batch.codes, state, batch.dtype, batch.bags)
    if vectors is not None:
        batch.table.count(state, batch.skipped)
        return vectors, state != Tier.ABSENT
    lookup = begin(batch)
    return gpu.upload(lookup.finish()), lookup.found
