"""The GPUs of a store: who may have how much of their memory, and why there is no device tier where there is none.

One budget, bytes a device, for all models and versions, dealt as the host tier's is: a version that replaces another
begins at half of its share while the other is halved in place. Workspaces come off it first. Any thread may call
anything; nothing survives the process.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.config import Settings
from tierstore.engine.budget import Holder, HostBudget, deal
from tierstore.engine.promotion import QUEUE_JOBS, Offers, Promoter
from tierstore.errors import ConfigError, InvalidInput, MissingExtra, NotReady, TierstoreError
from tierstore.tiers.device import NOT_INSTALLED, CudaDevice, find_devices
from tierstore.tiers.device_backend import Backend, DeviceError
from tierstore.tiers.device_group import DeviceCache
from tierstore.tiers.device_layout import ABSENT_BYTES, LINE_BYTES, WAYS
from tierstore.tiers.device_lookup import to_device
from tierstore.tiers.device_memory import WORKSPACES, DeviceMemory

if TYPE_CHECKING:
    from tierstore.engine.publisher import Publisher
    from tierstore.engine.version import Version
    from tierstore.engine.view import View

log = logging.getLogger(__name__)

MIN_BUDGET = 1 << 20
MIN_TABLE_BUDGET = 64 << 10
_A_ROW = math.ceil((LINE_BYTES + ABSENT_BYTES) / WAYS)  # bytes of bookkeeping


def find_backends() -> tuple[list[Backend], str | None]:
    """The devices there are, and why there is none."""
    count, why = find_devices()
    return [CudaDevice(number) for number in range(count)], why


class Devices:
    """What a store has of device tiers. `reason` says why that is nothing."""

    def __init__(self, settings: Settings) -> None:
        self.reason: str | None = None
        self.memories: list[DeviceMemory] = []
        self._kind = settings.device_layout
        if not settings.device_budget:
            installed = importlib.util.find_spec("cupy") is not None
            self.reason = "device_budget is 0: no device memory is given" if installed else NOT_INSTALLED
        elif settings.workers > 1:
            self.reason = "the device tier is of one process: set workers to 1"
        else:
            self._open(settings)
        if self.reason and settings.device_budget:
            log.warning("there is no device tier: %s", self.reason)
        # a replica's bytes buy the same rows once more, a shard's buy others
        each = sum(memory.table_bytes for memory in self.memories)
        self.budget = HostBudget(each)
        self.promoter = Promoter() if self.memories else None
        self._lock = threading.Lock()
        self._shares: dict[int, DeviceShare] = {}  # by id of the version, which it keeps

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

    def cache(self, spec: Any, budget_bytes: int, default: np.ndarray, fraction: float) -> DeviceCache:
        """A table of `budget_bytes`, of all devices together."""
        return DeviceCache(
            spec, budget_bytes, self.memories, kind=self._kind, default_vector=default, fraction=fraction
        )

    @property
    def copies(self) -> int:
        """How many times each resident row is held."""
        return len(self.memories) if self._kind == "replica" else 1

    def admit(self, version: Version, leaving: Sequence[Version], publisher: Publisher) -> None:
        """Give a version that is about to serve its device tables, making room at the cost of `leaving` first."""
        version.devices = self
        if not self.memories:
            return
        share = DeviceShare(version, self, publisher)
        with self._lock:
            before = [self._shares[id(each)] for each in leaving if id(each) in self._shares]
            self._shares[id(version)] = share
        self.budget.admit(share, before[0] if before else None, *before[1:])

    def release(self, version: Version) -> None:
        """Take back what a version had; it is closed already."""
        with self._lock:
            share = self._shares.pop(id(version), None)
        if share is not None:
            self.budget.release(share)
            self.budget.settle()

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
            raise InvalidInput(f"device {device!r} is not known: answers are on 'cpu', 'gpu' or 'gpu:<number>'")
        if not self.memories:
            kind = MissingExtra if self.reason == NOT_INSTALLED else NotReady
            raise kind(f"device={device!r}: there is no device tier: {self.reason}")
        chosen = int(number) if number else None
        self._memory(chosen)
        return chosen

    def status(self) -> dict[str, Any]:
        if not self.memories or self.promoter is None:
            return {"present": False, "reason": self.reason}
        return {
            "present": True,
            "devices": [memory.backend.number for memory in self.memories],
            "layout": self._kind,
            "workspaces": WORKSPACES * len(self.memories),
            "workspaces_taken": sum(memory.taken for memory in self.memories),
            "workspace_bytes": sum(WORKSPACES * memory.workspace_bytes for memory in self.memories),
            "promotions_waiting": self.promoter.waiting,
            "promotions_limit": QUEUE_JOBS,
            "promotions_dropped": self.promoter.dropped,
        }

    def close(self) -> None:
        """Once every version is closed."""
        if self.promoter is not None:
            self.promoter.close()
        for memory in self.memories:
            memory.close()


class DeviceShare(Holder):
    """What one version has of the devices: its part of the budget, under the names that `HostBudget` calls."""

    def __init__(self, version: Version, devices: Devices, publisher: Publisher) -> None:
        self.version, self._devices, self._publisher = version, devices, publisher
        self._fraction, self._reserved = 1.0, 0

    @property
    def host_need_bytes(self) -> int:
        return sum(self._needs())

    def _needs(self) -> list[int]:
        copies = self._devices.copies
        return [
            copies * max(MIN_TABLE_BUDGET, int(table.rows * (-(-table.spec.row_bytes // 16) * 16 + _A_ROW) * 1.25))
            for table in self.version.tables.values()
        ]

    @property
    def host_reserved_bytes(self) -> int:
        tables = self.version.tables.values()
        used = sum(device.bytes_in_use for table in tables if (device := table.device) is not None)
        return max(used, math.ceil(self._reserved * self._fraction))

    @property
    def host_fraction(self) -> float:
        return self._fraction

    def attach_host(self, budget_bytes: int, fraction: float, like: Holder | None) -> None:
        tables = self.version.tables.values()
        needs = self._needs()
        weights = self.version.weights(needs, like.version if isinstance(like, DeviceShare) else None)
        for table, share in zip(tables, deal(budget_bytes, needs, weights), strict=True):
            cache = self._devices.cache(table.spec, share, table.default, fraction)
            if not cache.capacity_rows or cache.bytes_in_use > share * fraction:
                cache.close()
                continue
            cache.raise_floor(self.version.watermark)
            table.device = cache
            if self._devices.promoter is not None:
                table.offer = Offers(self._devices.promoter, table, self._with_view)
        self._reserved, self._fraction = budget_bytes, fraction

    def resize_host(self, fraction: float) -> None:
        for table in self.version.tables.values():
            if (device := table.device) is not None:  # another thread may be freeing the version
                device.resize(fraction)
        self._fraction = fraction

    def _with_view(self, work: Callable[[View], None]) -> None:
        try:
            view = self._publisher.enter(self.version.number)
        except TierstoreError:  # it is not served, or not any more
            return
        try:
            if view.holder is self.version:
                work(view)
        finally:
            self._publisher.leave(view)
