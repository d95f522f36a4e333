"""The division of the GPU's memory among versions (`tiers/device/gpu.py` says whether there is a GPU).

One budget, in bytes, for all models and versions. It is divided like the host tier's, but tables only halve and
double. Workspaces are subtracted first. Any thread may call anything.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tierstore.config import Settings
from tierstore.engine.data.budget import HostBudget, MemoryUser, deal
from tierstore.engine.data.promotion import RING_KEYS, Offers, Promoter, PromotionView
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.versions.version import Version
from tierstore.errors import TierstoreError
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.layout import ABSENT_BYTES, LINE_BYTES, WAYS

MIN_TABLE_BUDGET = 64 << 10
_A_ROW = math.ceil((LINE_BYTES + ABSENT_BYTES) / WAYS)  # bytes of bookkeeping


class Devices:
    """The device tiers of a store's versions."""

    def __init__(self, settings: Settings) -> None:
        self.gpu, self._is_wanted = Gpu(settings), bool(settings.device_budget)
        self.budget = HostBudget(self.gpu.table_bytes)
        self.promoter = Promoter() if self.gpu.memory is not None else None
        self._lock = threading.Lock()
        self._shares: dict[int, DeviceShare] = {}  # by id of the version, which it keeps

    def admit(self, version: Version, replaced: Sequence[Version], publisher: Publisher) -> None:
        """Give a version that is about to serve its device tables, taking memory from `replaced` first."""
        version.gpu = self.gpu
        if self.promoter is None:
            return
        share = DeviceShare(version, self.gpu, self.promoter, publisher)
        with self._lock:
            before = [self._shares[id(each)] for each in replaced if id(each) in self._shares]
            self._shares[id(version)] = share
        self.budget.admit(share, *before)

    def release(self, version: Version) -> None:
        """Free the share of a version that is closed already."""
        with self._lock:
            share = self._shares.pop(id(version), None)
        if share is not None:
            self.budget.release(share)

    @property
    def _offers(self) -> list[Offers]:
        tables = (table for version in self.versions for table in version.tables.values())
        return [table.offer for table in tables if isinstance(table.offer, Offers)]

    @property
    def versions(self) -> list[Version]:
        """The versions that have device tables, or may get some."""
        return [share.version for share in list(self._shares.values())]

    @property
    def _problem(self) -> str | None:
        """Why there is no device tier, though one is wanted, or why tables are not on the device, or less of them."""
        if self.gpu.memory is None:
            return f"there is no device tier: {self.gpu.reason}" if self._is_wanted else None
        tables = (table for version in self.versions for table in version.tables.values())
        whys = {why: None for table in tables if table.device is not None and (why := table.device.problem)}
        return "; ".join(whys) or None

    def status(self) -> dict[str, Any]:
        document = self.gpu.status() | {"problem": self._problem}
        if self.promoter is not None:
            document |= {
                "promotions_waiting": sum(offers.waiting for offers in self._offers),
                "promotions_limit": RING_KEYS * len(self._offers),
                "promotions_dropped": self.promoter.dropped,
            }
        return document

    def close(self) -> None:
        """Close the GPU, once every version is closed."""
        if self.promoter is not None:
            self.promoter.close()
        self.gpu.close()


class DeviceShare(MemoryUser):
    """One version's part of the device budget, with the methods that `HostBudget` calls."""

    def __init__(self, version: Version, gpu: Gpu, promoter: Promoter, publisher: Publisher) -> None:
        self.version, self._gpu, self._promoter, self._publisher = version, gpu, promoter, publisher
        self._limit = self._reserved = 0

    @property
    def host_need_bytes(self) -> int:
        return sum(self._needs())

    def _needs(self) -> list[int]:
        rows = self.version.info.most_rows
        return [
            max(MIN_TABLE_BUDGET, int(rows[name] * (-(-table.spec.row_bytes // 16) * 16 + _A_ROW) * 1.25))
            for name, table in self.version.tables.items()
        ]

    @property
    def host_reserved_bytes(self) -> int:
        tables = self.version.tables.values()
        used = sum(device.bytes_in_use for table in tables if (device := table.device) is not None)
        return max(used, self._reserved)

    @property
    def request_share(self) -> float:
        return self.version.request_share

    @property
    def looked_up_bytes(self) -> int:
        return self.version.looked_up_bytes

    def attach_host(self, budget_bytes: int, limit_bytes: int, like: MemoryUser | None) -> None:
        # tables double and halve: the later limit is what they can double to
        halvings = (limit_bytes // budget_bytes).bit_length() - 1 if budget_bytes else 0
        fraction, self._limit = 0.5**halvings, budget_bytes << halvings
        tables = self.version.tables.values()
        needs = self._needs()
        weights = self.version.hosts.weights(needs, like.version.tables if isinstance(like, DeviceShare) else {})
        for table, share in zip(tables, deal(self._limit, needs, weights), strict=True):
            cache = self._gpu.cache(table.spec, share, table.default, fraction)
            if not cache.capacity_rows or cache.bytes_in_use > share * fraction:
                cache.close()
                continue
            cache.raise_floor(self.version.watermark)
            table.device = cache
            table.offer = Offers(self._promoter, table, self._with_view)
        self._reserved = budget_bytes

    def resize_host(self, budget_bytes: int) -> None:
        if not self._limit or not budget_bytes:
            return
        fraction = 1.0
        while self._limit * fraction > budget_bytes:
            fraction /= 2
        for table in self.version.tables.values():
            if (device := table.device) is not None:  # another thread may be freeing the version
                device.resize(fraction)
        self._reserved = math.ceil(self._limit * fraction)

    def _with_view(self, work: Callable[[PromotionView], None]) -> None:
        try:
            view = self._publisher.acquire(self.version.number)
        except TierstoreError:  # it is not served, or no longer
            return
        try:
            if view.open_version is self.version:
                work(view)
        finally:
            self._publisher.release(view)
