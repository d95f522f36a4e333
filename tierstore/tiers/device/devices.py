"""The GPUs of a store: which ones, the memory used of each, and the reason where there is no device tier.

Constant after construction; any thread may call anything. Nothing survives the process.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import numpy as np

from tierstore.config import Settings
from tierstore.errors import ConfigError, InvalidInput, MissingExtra, NotReady
from tierstore.tiers.device.backend import Backend, DeviceError
from tierstore.tiers.device.cache import DeviceCache
from tierstore.tiers.device.cupy_device import NOT_INSTALLED, CudaDevice, find_devices
from tierstore.tiers.device.lookup import to_device
from tierstore.tiers.device.workspaces import WORKSPACES, DeviceMemory
from tierstore.types import TableSpec

log = logging.getLogger(__name__)

MIN_BUDGET = 1 << 20


def find_backends() -> tuple[list[Backend], str | None]:
    """(the devices, the reason where there is none)."""
    count, why = find_devices()
    return [CudaDevice(number) for number in range(count)], why


class DeviceSet:
    """The devices of one store, one of `memories` each. `reason` says why there are none."""

    def __init__(self, settings: Settings) -> None:
        self.reason: str | None = None
        self.memories: list[DeviceMemory] = []
        self._kind = settings.device_layout
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
        backends, self.reason = find_backends()
        if not backends and self.reason == NOT_INSTALLED:
            raise MissingExtra("device_budget is set and CuPy is not installed: pip install 'tierstore[gpu]'")
        try:
            self.memories = [DeviceMemory(backend, settings.device_budget) for backend in backends]
        except DeviceError as error:
            self.reason = f"the device cannot be used: {error}"

    def cache(self, spec: TableSpec, budget_bytes: int, default: np.ndarray, fraction: float) -> DeviceCache:
        """A table of `budget_bytes` on all devices together."""
        return DeviceCache(
            spec, budget_bytes, self.memories, kind=self._kind, default_vector=default, fraction=fraction
        )

    @property
    def copies(self) -> int:
        """How many times each resident row is held."""
        return len(self.memories) if self._kind == "replica" else 1

    @property
    def table_bytes(self) -> int:
        """Bytes for tables. More bytes hold the same rows again on replicas, and other rows on shards."""
        return sum(memory.table_bytes for memory in self.memories)

    def upload(self, array: np.ndarray, number: int | None) -> Any:
        """A copy of an answer on a device (None: the first)."""
        return to_device(self._memory(number), array)

    def has(self, device: str) -> bool:
        """Whether `gpu:<number>` is one of them."""
        return device in {f"gpu:{memory.backend.number}" for memory in self.memories}

    def address_of(self, device: str, array: Any) -> int:
        """Of an answer on that device."""
        return self._memory(self.number_of(device)).backend.address_of(array)

    def _memory(self, number: int | None) -> DeviceMemory:
        for memory in self.memories:
            if number in (None, memory.backend.number):
                return memory
        raise NotReady(f"there is no device {number}; there are {[m.backend.number for m in self.memories]}")

    def number_of(self, device: str) -> int | None:
        """`gpu` → None (whichever is best), `gpu:1` → 1. Errors say what is missing."""
        name, _, number = device.partition(":")
        if name != "gpu" or (number and not number.isdecimal()):
            raise InvalidInput(f"device {device!r} is unknown: answers are on 'cpu', 'gpu' or 'gpu:<number>'")
        if not self.memories:
            kind = MissingExtra if self.reason == NOT_INSTALLED else NotReady
            raise kind(f"device={device!r}: there is no device tier: {self.reason}")
        chosen = int(number) if number else None
        self._memory(chosen)
        return chosen

    def status(self) -> dict[str, Any]:
        if not self.memories:
            return {"present": False, "reason": self.reason}
        return {
            "present": True,
            "devices": [memory.backend.number for memory in self.memories],
            "layout": self._kind,
            "workspaces": WORKSPACES * len(self.memories),
            "workspaces_taken": sum(memory.held for memory in self.memories),
            "workspace_bytes": sum(WORKSPACES * memory.workspace_bytes for memory in self.memories),
        }

    def close(self) -> None:
        """Free the workspaces. No table may be on the devices any more."""
        for memory in self.memories:
            memory.close()
