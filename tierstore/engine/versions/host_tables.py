"""The host tables of one open version: made within a budget, resized in place, and replaced when rows outgrow them.

A table reserves addresses for the rows that it may hold, so many more rows need another table, which takes over the
rows in memory. Readers of older views may still use the first: it is kept, and counted, until `close_outgrown`.

`resize` and `close` may be called from any thread, while look-ups and folds go on; the budget's owner calls one at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tierstore.engine.data.budget import deal, weights_by_traffic
from tierstore.engine.data.cascade import READ_BATCH, Cascade
from tierstore.engine.versions.info import MIN_TABLE_BUDGET, VersionInfo
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.host.table import HostTable
from tierstore.types import Tier

_OUTGROWN = 1.5  # of what a table was made for: then a set gets as many keys as it has ways


class HostTables:
    """The host tier of a version's `tables`. Changes of rows on disk, and so in memory, hold `writing`."""

    def __init__(self, info: VersionInfo, tables: Mapping[str, Cascade], writing: threading.Lock) -> None:
        self._info, self._tables, self._writing = info, tables, writing
        self._lock = threading.Lock()
        # guarded by _lock
        self.budget_bytes = 0
        self._open = False
        self._limit = 0
        self._weights: list[float] = []  # by which the budget is divided among the tables
        self._weighed: list[int] = []  # their needs then
        self._outgrown: list[tuple[Cascade, HostTable | None]] = []  # None: the table had none

    @property
    def need_bytes(self) -> int:
        """Bytes with which every row of every table would be resident."""
        return sum(self._info.host_needs())

    @property
    def reserved_bytes(self) -> int:
        # a table of few, large sets cannot always be as small as requested
        used = sum(host.bytes_in_use for table in self._tables.values() if (host := table.host) is not None)
        return max(used + sum(host.bytes_in_use for _, host in self._outgrown if host is not None), self.budget_bytes)

    @property
    def are_uneven(self) -> bool:
        """Whether a table has grown so much that the budget should be divided among the tables anew."""
        needs = zip(self._info.host_needs(), self._weighed, strict=False)
        return self._open and any(need > before * _OUTGROWN for need, before in needs)

    def weights(self, needs: Sequence[int], like: Mapping[str, Cascade]) -> list[float]:
        """The weights for dividing a budget: the traffic on the tables `like` these if there is some, else sizes."""
        traffic = [
            like[name].counts.total * table.spec.row_bytes if name in like else 0
            for name, table in self._tables.items()
        ]
        return weights_by_traffic(needs, traffic)

    def attach(self, budget_bytes: int, limit_bytes: int, like: Mapping[str, Cascade], seq: int) -> None:
        """Give every table its host tier; `weights` divides the budget. Rows that were read beneath `seq` are refused.

        Each reserves addresses for its possible part of `limit_bytes`, and may use its part of `budget_bytes`.
        """
        with self._lock:
            self._open, self._limit = True, limit_bytes
            self._weigh(like)
            for table, need, share in self._shares(budget_bytes):
                if (host := self._made(table, min(need, limit_bytes), share)) is not None:
                    host.raise_floor(seq)
                    table.host = host
            self.budget_bytes = budget_bytes

    def _weigh(self, like: Mapping[str, Cascade]) -> None:
        self._weighed = self._info.host_needs()
        self._weights = self.weights(self._weighed, like)

    def _shares(self, budget_bytes: int) -> list[tuple[Cascade, int, int]]:
        """(table, its need, its share)."""
        needs = self._info.host_needs()
        return list(zip(self._tables.values(), needs, deal(budget_bytes, needs, self._weights), strict=True))

    def _made(self, table: Cascade, limit: int, share: int) -> HostTable | None:
        """A host table that may use `share` bytes, and `limit` later; None if it could hold nothing useful."""
        if share < MIN_TABLE_BUDGET / 2:
            return None
        sample = table.counts.insight.sample
        host = HostTable(table.spec, limit, default_vector=table.default, fraction=share / limit, sample=sample)
        if host.bytes_in_use > share:  # its sets are so large that there cannot be so few
            host.close()
            host = HostTable(table.spec, share, default_vector=table.default, sample=sample)
        if host.capacity_rows:
            return host
        host.close()
        return None

    def resize(self, budget_bytes: int) -> None:
        """Shrink or grow to this budget, in place or by larger tables."""
        with self._lock:
            if not self._open:  # another thread has freed the version
                return
            if self.are_uneven:
                self._weigh(self._tables)
            self.budget_bytes = max(self.budget_bytes, budget_bytes)
            shares = self._shares(budget_bytes)
            for table, need, share in sorted(shares, key=_growth):  # tables that shrink come first
                room, host = share - self._outgrown_bytes(table), table.host
                if host is None or room > host.budget_bytes * _OUTGROWN:
                    self._replace(table, need, room)
                else:
                    host.resize(min(1.0, room / host.budget_bytes))
            self.budget_bytes = budget_bytes

    def _replace(self, table: Cascade, need: int, room: int) -> None:
        """Replace a host table by a larger one that takes over its rows, with both within `room`."""
        old = table.host
        kept = 0 if old is None else min(old.bytes_in_use, room // 2)
        limit = min(need, max(self._limit, room), 2 * (room - kept))  # most tables can be half as large as that
        new = self._made(table, limit, room - kept)
        if new is None:
            return
        if old is not None:
            if new.budget_bytes <= old.budget_bytes * _OUTGROWN:  # its sets are so large that it cannot be larger
                new.close()
                return
            old.resize(min(1.0, kept / old.budget_bytes))
            new.resize(min(1.0, (room - old.bytes_in_use) / new.budget_bytes))
        with self._writing:
            new.raise_floor(self._info.watermark)
            if old is not None:
                _copy(old, new)
            self._outgrown.append((table, old))
            table.host = new

    def _outgrown_bytes(self, table: Cascade) -> int:
        return sum(host.bytes_in_use for of, host in self._outgrown if of is table and host is not None)

    @property
    def outgrown(self) -> list[HostTable | None]:
        """Replaced tables that readers of older views may still use; None for a table that had nothing."""
        return [host for _, host in self._outgrown]

    def close_outgrown(self, hosts: Sequence[HostTable | None]) -> None:
        """Free these, which nobody reads any more. The next division of the budget gives their memory to others."""
        with self._lock:
            for host in filter(None, hosts):
                self.budget_bytes -= host.bytes_in_use
                host.close()
            self._outgrown = [each for each in self._outgrown if each[1] not in hosts]

    def close(self) -> None:
        """Free all of it. No look-up may be running."""
        with self._lock:
            self._open = False
            hosts = [*self.outgrown, *(table.host for table in self._tables.values())]
            for table in self._tables.values():
                table.host = None
            for host in filter(None, hosts):
                host.close()
            self._outgrown, self.budget_bytes = [], 0


def _copy(old: HostTable, new: HostTable) -> None:
    """Copy the hottest rows of `old`, which nothing changes meanwhile, to `new`, which nobody reads yet."""
    keys = old.hot_keys(new.capacity_rows)
    for begin in range(0, len(keys), READ_BATCH):
        part = keys[begin : begin + READ_BATCH]
        rows, state = old.stored(part, noted=False)
        there = state == Tier.HOST
        new.warm(part[there], rows[there])
        yield_to_requests()


def _growth(each: tuple[Cascade, int, int]) -> int:
    table, _, share = each
    return share - (0 if table.host is None else table.host.allowed_bytes)
