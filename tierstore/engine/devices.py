"""Who may have how much of the GPUs' memory (`tiers/device_set.py` says which there are).

One budget, bytes a device, for all models and versions, dealt as the host tier's is: a version that replaces another
begins at half of its share while the other is halved in place. Workspaces come off it first. Any thread may call
anything; nothing survives the process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tierstore.config import Settings
from tierstore.engine.budget import Holder, HostBudget, deal
from tierstore.engine.promotion import QUEUE_JOBS, Moment, Offers, Promoter
from tierstore.engine.publisher import Publisher
from tierstore.engine.version import Version
from tierstore.errors import TierstoreError
from tierstore.tiers.device_layout import ABSENT_BYTES, LINE_BYTES, WAYS
from tierstore.tiers.device_set import DeviceSet

MIN_TABLE_BUDGET = 64 << 10
_A_ROW = math.ceil((LINE_BYTES + ABSENT_BYTES) / WAYS)  # bytes of bookkeeping


class Devices:
    """The device tiers of a store's versions."""

    def __init__(self, settings: Settings) -> None:
        self.set = DeviceSet(settings)
        self.budget = HostBudget(self.set.table_bytes)
        self.promoter = Promoter() if self.set.memories else None
        self._lock = threading.Lock()
        self._shares: dict[int, DeviceShare] = {}  # by id of the version, which it keeps

    def admit(self, version: Version, leaving: Sequence[Version], publisher: Publisher) -> None:
        """Give a version that is about to serve its device tables, making room at the cost of `leaving` first."""
        version.devices = self.set
        if self.promoter is None:
            return
        share = DeviceShare(version, self.set, self.promoter, publisher)
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

    def status(self) -> dict[str, Any]:
        document = self.set.status()
        if self.promoter is not None:
            document |= {
                "promotions_waiting": self.promoter.waiting,
                "promotions_limit": QUEUE_JOBS,
                "promotions_dropped": self.promoter.dropped,
            }
        return document

    def close(self) -> None:
        """Once every version is closed."""
        if self.promoter is not None:
            self.promoter.close()
        self.set.close()


class DeviceShare(Holder):
    """What one version has of the devices: its part of the budget, under the names that `HostBudget` calls."""

    def __init__(self, version: Version, devices: DeviceSet, promoter: Promoter, publisher: Publisher) -> None:
        self.version, self._devices, self._promoter, self._publisher = version, devices, promoter, publisher
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
            table.offer = Offers(self._promoter, table, self._with_view)
        self._reserved, self._fraction = budget_bytes, fraction

    def resize_host(self, fraction: float) -> None:
        for table in self.version.tables.values():
            if (device := table.device) is not None:  # another thread may be freeing the version
                device.resize(fraction)
        self._fraction = fraction

    def _with_view(self, work: Callable[[Moment], None]) -> None:
        try:
            view = self._publisher.enter(self.version.number)
        except TierstoreError:  # it is not served, or not any more
            return
        try:
            if view.holder is self.version:
                work(view)
        finally:
            self._publisher.leave(view)
