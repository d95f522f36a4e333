"""An open version: its files, and its parts in memory.

Look-ups come from any thread through a view; `fold`, `attach_host` and `close` come from one thread at a time (the
model ensures that). RocksDB holds the watermark in the same atomic step as the rows of a delta.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore.engine.data.budget import MemoryUser
from tierstore.engine.data.cascade import Cascade, LookupCounts
from tierstore.engine.data.dense_head import Heads, with_brought
from tierstore.engine.data.overlay import Overlay, encode_delta
from tierstore.engine.versions.host_tables import HostTables
from tierstore.engine.versions.hot_keys import distinct_keys, load_keys, save_keys
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import VersionRows
from tierstore.errors import Closed
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.delta.reader import Delta
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys, Tier


class Version:
    """An open version of a model. `tables` are its cascades, by name."""

    def __init__(self, info: VersionInfo, rows: VersionRows, counts: Callable[[str], LookupCounts]) -> None:
        """`counts` gives the model's counts for a table. `attach_host` adds host tables."""
        self.info, self.rows = info, rows
        self.number = info.number
        self.specs, self.features = info.specs, info.features
        self.tables = {
            name: Cascade(
                spec,
                info.tables[name]["id"],
                np.asarray(info.tables[name]["default"], np.float32),
                rows,
                counts(name),
                info.own,
            )
            for name, spec in info.specs.items()
        }
        info.learn(rows)
        self.watermark = rows.watermark() or 0  # not the record's, which may move on while rows are on other machines
        self.writing = threading.Lock()  # held by writers of the disk tier, a fold or `expiry.py`
        self.request_share = 1.0  # of the requests to its model that name no version; set by the routing
        self.hosts = HostTables(info, self.tables, self.writing)
        self.heads: Heads = {}  # the dense parts as of the watermark, once they are opened; replaced as a whole
        self._moved: tuple[int, int] | None = None  # at the last `let_files_go`
        self.gpu: Gpu | None = None  # set once its device tables are attached

    @property
    def disk(self) -> DiskTier:
        """The version's files on this machine, for work that reads or keeps them whole; a placement without files
        refuses that.
        """
        assert self.rows.disk is not None
        return self.rows.disk

    @property
    def colliding(self) -> Mapping[str, CollidingKeys]:
        """The colliding keys as of the watermark, by table, if there are some."""
        return self.info.colliding

    def encode(self, delta: Delta, colliding: Mapping[str, CollidingKeys]) -> Overlay:
        """A delta as an overlay of this version, see `encode_delta`; `colliding` are its colliding keys before it."""
        for_it, info = delta.base_version in (None, self.number), self.info
        strings = info.strings_ids
        return encode_delta(delta, self.specs, colliding, for_this_version=for_it, own=info.own, with_strings=strings)

    # host tier

    @property
    def host_need_bytes(self) -> int:
        """Bytes with which every row of every table would be resident."""
        return self.hosts.need_bytes

    @property
    def host_reserved_bytes(self) -> int:
        return self.hosts.reserved_bytes

    @property
    def host_is_uneven(self) -> bool:
        return self.hosts.are_uneven

    @property
    def looked_up_bytes(self) -> int:
        """Bytes of rows that were looked up so far, over all versions of its model."""
        return sum(table.counts.total * table.spec.row_bytes for table in self.tables.values())

    def attach_host(self, budget_bytes: int, limit_bytes: int, like: MemoryUser | None) -> None:
        """See `HostTables.attach`."""
        self.hosts.attach(budget_bytes, limit_bytes, like.tables if isinstance(like, Version) else {}, self.watermark)

    def resize_host(self, budget_bytes: int) -> None:
        self.hosts.resize(budget_bytes)

    def warm(self, like: Version | None, progress: Callable[[int, int], None]) -> None:
        """Fill the caches: with the hot keys of `like`, else with the keys saved when last served, then the
        snapshot's own.
        """
        plans: list[tuple[Cascade, Tier, Keys]] = []
        for name, table in self.tables.items():
            for tier, cache in table.caches.items():
                sources = self.kept_hot_keys(name, tier)
                if like is not None and name in like.tables and like.specs[name].key == table.spec.key:
                    sources.insert(0, like.tables[name].hot_keys(tier, cache.capacity_rows))
                plans.append((table, tier, distinct_keys(sources, cache.capacity_rows)))
        total, done = sum(len(keys) for *_, keys in plans), 0
        for table, tier, keys in plans:
            table.warm(tier, keys, lambda n, base=done: progress(base + n, total))  # type: ignore[misc]
            done += len(keys)

    def kept_hot_keys(self, table: str, tier: Tier) -> list[Keys]:
        """The keys to warm a tier's cache of a table with, best first: what it held when last served, or what the
        other tier's held; then the snapshot's own.
        """
        where = self.info.where
        other = Tier.DEVICE if tier is Tier.HOST else Tier.HOST
        kept = load_keys(where.hot(table, tier)) or load_keys(where.hot(table, other))
        return [*kept, *load_keys(where.warmup(table))]

    def save_hot_keys(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Save the resident keys, hottest first, for the next start, while look-ups and folds go on. StorageError.

        `give_up` is called often; once it returns True, Closed.
        """

        def checked(parts: Iterator[list[Keys]]) -> Iterator[list[Keys]]:
            for part in parts:
                if give_up():
                    raise Closed("hot keys are not saved: the store is being closed")
                yield part

        for name, table in self.tables.items():
            for tier, cache in table.caches.items():
                if cache.rows_resident:
                    save_keys(self.info.where.hot(name, tier), checked(cache.hot_keys_by_part()))

    def let_files_go(self, once_unread: Callable[[Callable[[], None]], None]) -> None:
        """Close its files on this machine, if they were neither read nor changed since the last call.

        Reads and folds open them again. `once_unread` as for `DiskTier.close_idle_files`. On one thread.
        """
        counts = [table.counts.as_dict() for table in self.tables.values()]
        moved = self.watermark, sum(each["disk"] + each["absent"] for each in counts)
        if moved == self._moved and self.rows.disk is not None:
            self.rows.disk.close_idle_files(once_unread)
        self._moved = moved

    # deltas

    def fold(self, overlay: Overlay) -> None:
        """Move an overlay into the tiers: disk first, in one atomic step with the watermark, then resident rows.

        No request may use a view older than `overlay.hi`. From `raise_floor` on, a row that was read before cannot be
        promoted any more, so no replaced row returns.
        """
        with self.writing:
            self._fold(overlay)

    def compact(self, give_up: Callable[[], bool]) -> bool:
        """Merge the files of changed rows, on the thread that folds; `give_up` is called often. Returns whether there
        are other files now. StorageError, Corruption.
        """
        with self.writing:
            return self.rows.compact(self.info, give_up)

    def _fold(self, overlay: Overlay) -> None:
        for name in overlay.tables:
            self.tables[name].raise_floor(overlay.hi)
        self.rows.fold(self.info, overlay)
        if overlay.says_of_dense:
            self.info.fold_heads(overlay)
            self.heads = {
                name: replace(head, graph=None) for name, head in with_brought(self.heads, overlay.heads).items()
            }
        for name, rows in overlay.tables.items():
            yield_to_requests()
            self.tables[name].update_caches(rows.keys, rows.rows, rows.deleted)
        self.watermark = self.info.watermark = overlay.hi

    # memory

    def drop_caches(self) -> None:
        """Free the host and device tables. No look-up may be running."""
        self.hosts.close()
        for table in self.tables.values():
            device, table.device, table.offer = table.device, None, None
            if device is not None:
                device.close()

    def close(self) -> None:
        """Free all memory and close the files. No look-up may be running."""
        self.heads = {}
        self.drop_caches()
        self.rows.close()

    def status(self, colliding: Mapping[str, CollidingKeys]) -> dict[str, Any]:
        """By table: rows as of the folded watermark, colliding keys, where keys were answered, bytes that a tier
        holds and may hold.
        """
        tables = {}
        counts = self.info.counts
        all_bytes = sum(counts[name].rows * t.spec.row_bytes for name, t in self.tables.items()) or 1
        for name, table in self.tables.items():
            host, device = table.host, table.device
            table_bytes = counts[name].rows * table.spec.row_bytes
            tables[name] = {
                "key": table.spec.key.value,
                "dim": table.spec.dim,
                "dtype": table.spec.dtype.value,
                "rows": counts[name].rows,
                "rows_exact": counts[name].exact,
                "colliding_keys": len(colliding.get(name, ())),
                "ttl": self.info.ttl_status(table.spec),
                "lookup_keys": table.counts.as_dict(),
                "tier_bytes": {
                    "device": device.bytes_in_use if device else 0,
                    "host": host.bytes_in_use if host else 0,
                    **self.rows.tier_bytes(table.table_id, table_bytes, all_bytes),
                },
                "tier_budget_bytes": {
                    "device": device.allowed_bytes if device else 0,
                    "host": host.allowed_bytes if host else 0,
                },
                "host": host.stats() if host else {},
                "cache": table.counts.insight.status(),
                "device": device.stats() if device else {},
                "ssd_cache": self.rows.cache_stats(table.table_id),
            }
        return tables
