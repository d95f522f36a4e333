"""The GPU of a store and its memory, or the reason why there is no device tier.

It is the first GPU that CUDA shows: `CUDA_VISIBLE_DEVICES` chooses another. Constant after construction; any thread may call anything. Nothing
survives the process.
"""

from __future__ import annotations

import importlib.util
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tierstore.config import Settings
from tierstore.errors import ConfigError, InvalidInput, MissingExtra, NotReady
from tierstore.tiers.device.backend import Backend, Captured, DeviceError, is_gpu_array
from tierstore.tiers.device.cupy_device import NOT_INSTALLED, CudaDevice, find_devices
from tierstore.tiers.device.driver import Queue
from tierstore.tiers.device.lookup import from_device, to_device
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import WORKSPACES, DeviceMemory
from tierstore.types import GpuArray, TableSpec

log = logging.getLogger(__name__)

MIN_BUDGET = 1 << 20
NAMES = ("gpu", "gpu:0")  # names of the GPU in a caller's `device`


def find_backend() -> tuple[Backend | None, str | None]:
    """(the device, the reason if there is none)."""
    count, why = find_devices()
    return (CudaDevice(0), None) if count else (None, why)


class _Stream:
    """A stream, by its address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


class Gpu:
    """The device of one store, or none; then `reason` says why."""

    def __init__(self, settings: Settings) -> None:
        self.reason: str | None = None
        self.memory: DeviceMemory | None = None
        if not settings.device_budget:
            installed = importlib.util.find_spec("cupy") is not None
            self.reason = "device_budget is 0: no device memory is given" if installed else NOT_INSTALLED
        else:
            self._open(settings)
        if self.reason and settings.device_budget:
            log.warning("there is no device tier: %s", self.reason)

    def _open(self, settings: Settings) -> None:
        if settings.device_budget < MIN_BUDGET:
            raise ConfigError(
                f"device_budget is {settings.device_budget}: give at least {MIN_BUDGET} bytes, or 0 for none"
            )
        backend, self.reason = find_backend()
        if backend is None:
            if self.reason == NOT_INSTALLED:
                raise MissingExtra(
                    "device_budget is set and CuPy is not installed: pip install 'tierstore[gpu]', or "
                    "'tierstore[gpu-cuda13]' where the driver is of release 580 or newer"
                )
            return
        try:
            self.memory = DeviceMemory(backend, settings.device_budget)
        except DeviceError as error:
            self.reason = f"the device cannot be used: {error}"

    def cache(self, spec: TableSpec, budget_bytes: int, default: np.ndarray, fraction: float) -> DeviceTable:
        """A table of `budget_bytes`. There must be a device."""
        assert self.memory is not None
        return DeviceTable(spec, budget_bytes, self.memory, default_vector=default, fraction=fraction)

    @property
    def table_bytes(self) -> int:
        """Bytes for tables."""
        return 0 if self.memory is None else self.memory.table_bytes

    def has(self, device: str) -> bool:
        """Whether `device` names this GPU."""
        return self.memory is not None and device in NAMES

    def memory_of(self, device: str) -> DeviceMemory:
        """The memory of the GPU named `device`. The error says what is missing."""
        name, _, number = device.partition(":")
        if name != "gpu" or (number and not number.isdecimal()):
            raise InvalidInput(f"device {device!r} is unknown: answers are on 'cpu' or 'gpu'")
        if self.memory is None:
            kind = MissingExtra if self.reason == NOT_INSTALLED else NotReady
            raise kind(f"device={device!r}: there is no device tier: {self.reason}")
        if device not in NAMES:
            raise NotReady(f"there is no device {number}: a store uses the first GPU that CUDA_VISIBLE_DEVICES shows")
        return self.memory

    def upload(self, array: np.ndarray, there: GpuArray | None = None) -> Any:
        """A copy of an answer in GPU memory, new or `there`."""
        assert self.memory is not None
        return to_device(self.memory, array, there)

    def to_host(self, values: Any) -> Any:
        """A copy in CPU memory of an array in GPU memory; other arrays unchanged."""
        assert self.memory is not None
        return from_device(self.memory, values) if is_gpu_array(values) else values

    def there(self, array: Any, *, in_place: bool = False) -> GpuArray:
        """An array in GPU memory, of any library; see `Backend.adopt`."""
        if isinstance(array, GpuArray):
            return array
        assert self.memory is not None
        return GpuArray.of(self.memory.backend, self.memory.backend.adopt(array, in_place=in_place))

    def codes(self, keys: GpuArray, form: int, mod: int, bits: int) -> GpuArray | None:
        """Codes int64[n] of integer keys, made on the GPU in the order of the caller's stream; None if that fails.

        `form`, `mod` and `bits` are those of `formats/key_hash.py`.
        """
        assert self.memory is not None
        backend, n = self.memory.backend, len(keys)
        try:
            out = GpuArray.of(backend, backend.empty((n,), np.int64))
            width, is_signed = keys.dtype.itemsize, keys.dtype.kind == "i"
            args = keys.address, width, is_signed, n, form, mod, bits, out.address
            Queue(self.memory.driver, backend.callers()[0], ()).launch("make_codes", n, args)
        except Captured:
            raise
        except DeviceError:
            return None
        return out

    def in_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Say in which stream the caller works, in the block. `stream`: an object with `__cuda_stream__`, an address as an integer, or None for the current stream."""
        assert self.memory is not None
        if stream is None:
            return nullcontext()
        if isinstance(stream, int):
            stream = _Stream(stream)
        if not hasattr(stream, "__cuda_stream__"):
            raise InvalidInput(f"stream: expected one of CuPy or PyTorch, or its address, got {stream!r}")
        return self.memory.backend.in_stream(stream)

    def status(self) -> dict[str, Any]:
        if self.memory is None:
            return {"present": False, "reason": self.reason}
        return {
            "present": True,
            "workspaces": WORKSPACES,
            "workspaces_taken": self.memory.held,
            "workspace_bytes": WORKSPACES * self.memory.workspace_bytes,
            "answers_in_streams": self.memory.finisher is not None,
            "failed_in_streams": 0 if self.memory.finisher is None else self.memory.finisher.failed,
        }

    def close(self) -> None:
        """Free the workspaces. No table may be left on the device."""
        if self.memory is not None:
            self.memory.close()
