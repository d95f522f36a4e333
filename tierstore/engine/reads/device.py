"""Look-ups whose answer stays on a GPU: overlays first, then the device tier, then the tiers below it.

On the caller's thread, under the caller's view; any number of threads. A returned answer is complete, so any stream
may read it at once; or, if the caller has named its stream, complete in the order of that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore.engine.data.table_view import DTYPES
from tierstore.engine.reads.feature_view import FeatureView
from tierstore.engine.reads.lookup import BagLookup, Lookup
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, NotReady
from tierstore.formats.key_hash import form_of
from tierstore.tiers.device.backend import Captured, is_gpu_array
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import PADDING, LookUp, PendingLookup, Pooling
from tierstore.types import GpuArray, KeyHash, Keys, KeyType, States, Tier, TrainerHash

Hold = Callable[[], Callable[[], None]]  # holds a view, and returns what releases it
_FILTERS = 4  # filters of deltas take at most one part of so many
_STATE, _ABSENT = np.dtype(np.uint8), np.uint8(Tier.ABSENT)
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)  # of keys of these types


class DeviceLookup:
    """A look-up into device memory. Its kernel may `begin` early; otherwise it begins with `finish`.

    One thread at a time, as `Lookup`. `array`: the answer, [n, dim] or [bags, dim] in device memory, after `finish`.
    """

    __slots__ = ("_bags", "_code", "_codes", "_feature", "_gpu", "_look_up", "_out", "_state", "array")

    def __init__(
        self, gpu: Gpu, feature: FeatureView, codes: Keys | GpuArray, bags: Pooling | None, code: int, out: Any = None
    ) -> None:
        self._gpu, self._feature, self._codes, self._bags, self._code = gpu, feature, codes, bags, code
        self._out: GpuArray | None = None
        if out is not None:
            shape = len(codes) if bags is None else len(bags.offsets), feature.dim
            self._out = room_there(gpu, out, shape, code)
        self._state: States
        self._look_up: LookUp | None = None
        self.array: Any = None

    @property
    def pending(self) -> bool:
        """True: `finish` waits for the device."""
        return True

    @property
    def found(self) -> np.ndarray:
        """See `Lookup.found`."""
        found: np.ndarray = (self._state != _ABSENT) & (self._state != PADDING)
        return found

    @property
    def address(self) -> int:
        """The address of the answer in device memory."""
        assert self._gpu.memory is not None
        return self._gpu.memory.backend.address_of(self.array)

    def begin(self) -> bool:
        """Let the device begin, if that needs no wait. Returns whether it did: then `finish` or `abandon` must follow.

        NotReady while a CUDA graph is captured.
        """
        self._prepare()
        return self._look_up is not None and self._look_up.begin()

    def abandon(self) -> None:
        """Undo `begin`, if `finish` was not called."""
        if self._look_up is not None:
            self._look_up.abandon()

    def finish(self, hold: Hold | None = None) -> None:
        """Complete the answer. Call it once.

        If the device tier cannot answer, CPU memory does, and the answer is uploaded. NotReady while a CUDA graph is
        captured. With `hold` the answer may be complete only in the order of the caller's stream; then `found` is
        undefined, and the view is held until it is.
        """
        if self._look_up is None:
            self._prepare()
        rows, look_up, pending_lookup = self._feature.rows, self._look_up, None
        if hold is not None and rows.table.own is None:  # keys of other nodes are an error, to be raised at once
            pending_lookup = PendingLookup(hold, rows.count_on_device)
        try:
            if look_up is None or not look_up.finish(pending_lookup):
                self._from_below()
                return
        except Captured as error:
            raise NotReady(str(error)) from error
        if pending_lookup is None or not pending_lookup.begun:
            rows.count_on_device(self._codes, self._state)
        self.array = look_up.take()

    def _prepare(self) -> None:
        feature, codes = self._feature, self._codes
        self._state = state = np.zeros(len(codes), _STATE)
        try:
            self._look_up = feature.rows.on_device(
                codes, state, DTYPES[self._code], self._bags, feature.padding, self._out
            )
        except Captured as error:
            raise NotReady(str(error)) from error

    def _from_below(self) -> None:
        feature, codes, bags, code = self._feature, self._codes, self._bags, self._code
        if isinstance(codes, GpuArray):
            codes = self._gpu.to_host(codes)
        if bags is not None:
            assert self._gpu.memory is not None
            bags = bags.here(self._gpu.memory, len(codes))
        lookup = Lookup(feature, codes, code) if bags is None else BagLookup(feature, codes, bags, code)
        self.array = self._gpu.upload(lookup.finish(), self._out)
        self._state = lookup.state


def finish_all(lookups: Sequence[DeviceLookup]) -> None:
    """Finish look-ups, which the device works on at the same time, as far as it has workspaces."""
    try:
        # first those that can begin: whoever waits for a workspace must not hold one
        for lookup in sorted(lookups, key=lambda lookup: not lookup.begin()) if len(lookups) > 1 else lookups:
            lookup.finish()
    finally:
        for lookup in lookups:
            lookup.abandon()


def gpu_of(version: Version, device: str) -> Gpu:
    """The GPU of a served version's tables. Errors say why `device` is not available."""
    gpu = version.gpu
    assert gpu is not None
    gpu.memory_of(str(device))
    return gpu


class OfCaller:
    """In the block, which gets the GPU, look-ups come after the caller's work in `stream`; None: its current one."""

    __slots__ = ("_gpu", "_inside")

    def __init__(self, version: Version, device: str | None, stream: Any) -> None:
        self._gpu = gpu_of(version, "gpu" if device in (None, "cpu") else device)
        self._inside = self._gpu.in_stream(stream)

    def __enter__(self) -> Gpu:
        self._inside.__enter__()
        return self._gpu

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._inside.__exit__(kind, error, trace)
        if isinstance(error, Captured):
            raise NotReady(str(error)) from error


def keys_there(gpu: Gpu, keys: Any, feature: FeatureView) -> GpuArray | None:
    """Codes of keys on the GPU, to be looked up there; None if the CPU must see the keys.

    It must if they may be out of range or are hashed as a trainer does, or if deltas that are not in the tiers yet are
    so many that their filters take much of a workspace.
    """
    rows, key = feature.rows, feature.spec.key_type(feature.rows.table.spec)
    cache = rows.table.device
    if key is KeyType.STRING or isinstance(feature.spec.hash, TrainerHash):
        return None
    if cache is None or rows.filters > cache.device.workspace_bytes // _FILTERS:
        return None
    mine = there(gpu, keys, _INT64 if key is KeyType.INT64 else _UINT64, feature.spec.hash)
    return mine if mine is None else replace(mine, dtype=_INT64)


def there(gpu: Gpu, array: Any, dtype: np.dtype[Any], how: KeyHash | None = None) -> GpuArray | None:
    """An array [n] of `dtype` on the GPU, to be read in place; None if it is none.

    Of narrower integers, and where there is a hash, their codes int64[n].
    """
    if not is_gpu_array(array):
        return None
    mine = gpu.there(array)
    if len(mine.shape) != 1:
        return None
    if mine.dtype == dtype and how is None:
        return mine
    kinds = mine.dtype.kind + dtype.kind
    return gpu.codes(mine, *form_of(how)) if set(kinds) <= {"i", "u"} and np.can_cast(mine.dtype, dtype) else None


def room_there(gpu: Gpu, out: Any, shape: tuple[int, int], code: int) -> GpuArray:
    """The caller's `out` on the GPU, checked for an answer of that shape. InvalidInput."""
    got = "one in CPU memory" if isinstance(out, np.ndarray) else repr(type(out).__name__)
    if is_gpu_array(out):
        mine = gpu.there(out, in_place=True)
        if mine.shape == shape and mine.dtype == DTYPES[code]:
            return mine
        got = f"{mine.dtype} of shape {mine.shape}"
    raise InvalidInput(
        f"out: expected a C-contiguous {DTYPES[code]} array of shape {shape} on the GPU, where the answer is, got {got}"
    )
