"""The row store of a version whose rows are on other machines: reads rows, and refuses rows that do not fit the reading
view.

Each read reports up to which seq its rows have every delta, and above which they have none (`Watermarks`): in a
cluster by each tag of a version, upstream by each answer. Any thread may read; `trust` is for the thread that folds,
`reached` and `frozen` for the one that follows the cluster.

If the node has a cache on its SSD, a look-up reads there first. Rows held there are right for every view, so they need
no comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from tierstore.engine.data.dense_head import GONE
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import Beneath, FindPlaces, Place
from tierstore.errors import Closed, Overloaded, StorageError
from tierstore.formats import files
from tierstore.tiers.base import Peek
from tierstore.tiers.joining import REPLACED, JoinedTable
from tierstore.tiers.ssd.cache import SsdCache
from tierstore.tiers.ssd.table import SsdTable
from tierstore.types import Keys, Rows, States, Tier

_TRIES = 3
PLACES_S = 10.0  # after this, other machines are not asked for further keys of one explanation
RETRY_S = 0.1  # usually the longest that a node is behind the cluster


class RemoteRows:
    """Rows of one version that are on other machines. `tables` by id.

    `reached`: the seq that all of its rows have reached, as far as this node knows. `where`: the place of the rows,
    for messages. `line`: see `Pointer`. `cache`: keeps rows on this machine's SSD; `rows` says how many each table has.
    `find_places`: for `explain`.
    """

    disk = None

    def __init__(
        self,
        name: str,
        tables: Mapping[int, JoinedTable],
        reached: int,
        on_failure: Literal["refuse", "default"],
        *,
        where: str = "the cluster",
        line: str = "",
        cache: SsdCache | None = None,
        rows: Mapping[int, int] = {},
        find_places: FindPlaces = lambda table, codes, seq: [Place(error="not known") for _ in codes],
    ) -> None:
        self._name, self._tables, self._on_failure = name, tables, on_failure
        self._where, self.line = where, line
        self._cache, self._cached = cache, dict[int, SsdTable]()
        if cache is not None:
            kept = {number: cache.table(rows[number], table.row_bytes) for number, table in tables.items()}
            self._cached = {number: table for number, table in kept.items() if table is not None}
        self._find_places = find_places
        self._lock = threading.Lock()
        # guarded by _lock
        self.defaulted = 0  # keys that were answered with a default because they could not be read
        # each written by one thread
        self.reached = reached
        self.frozen = False  # nothing is folded: the version's files are those of what takes its place
        self._trusted = reached  # deltas up to this one are not in memory any more
        self._closed = False

    def watermark(self) -> int:
        return self._trusted

    def record(self, name: str) -> None:
        """None: the cluster keeps a version's records in another form."""

    def records(self) -> list[str]:
        """None, likewise."""
        return []

    def trust(self, seq: int) -> None:
        """From now on rows without the deltas up to `seq` are an error."""
        self._trusted = max(self._trusted, seq)

    def fold(self, info: VersionInfo, overlay: Overlay) -> None:
        """The rows have the overlay's deltas: from now on rows without them are an error. Closed if it is frozen."""
        if self.frozen:
            raise Closed(f"{self._name} is opened anew")
        self.trust(overlay.hi)
        for name, head in overlay.heads.items():
            files.publish_bytes(info.where.dense(name), head.graph or GONE)
        info.set_counts({name: count._replace(exact=False) for name, count in info.counts.items()}, overlay.hi)

    def may_fold(self, seq: int) -> bool:
        return seq <= self.reached and not self.frozen

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """See `RowStore`: rows as they are now, and no older than what this node relies on."""
        self._read(table_id, keys, rows, state, None)

    def get_at(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        """See `VersionStore`."""
        cached = self._cached.get(table_id)
        if cached is None:
            self._read_or_default(table_id, keys, rows, state, seq)
            return
        self._check_open()
        cached.lookup(keys, rows, state)
        missing = np.flatnonzero(state == Tier.PENDING)
        if not len(missing):
            return
        others, found = keys[missing], np.zeros(len(missing), np.uint8)
        read = np.empty((len(missing), rows.shape[1]), np.uint8)
        self._read_or_default(table_id, others, read, found, seq)
        there = found == Tier.REMOTE
        fresh = read[there]
        rows[missing[there]], state[missing] = fresh, found
        cached.offer(others[there], fresh, seq)

    def _read_or_default(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        try:
            self._read(table_id, keys, rows, state, seq)
        except Closed:
            raise
        except StorageError:
            if self._on_failure == "refuse":
                raise
            with self._lock:
                self.defaulted += int(np.count_nonzero(state == Tier.PENDING))

    def _read(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int | None) -> None:
        self._check_open()
        trusted, table = self._trusted, self._tables[table_id]
        for _ in range(_TRIES):
            marks = table.fetch(keys, rows, state, upto=seq, floor=trusted)
            if marks.lowest >= trusted:
                break
            state[:] = Tier.PENDING  # a joined read of another thread may have begun before that
        else:
            raise StorageError(
                f"{self._name}: {self._where} has deltas up to {marks.lowest}, and had them up to {trusted}: a server "
                "has lost what it acknowledged; they are applied again from the log if that has them",
                keys=keys.tolist(),
            )
        if marks.highest == REPLACED:
            state[:] = Tier.PENDING
            raise Overloaded(
                f"{self._name}: it is being rolled back, and this node follows; send it again", retry_after_s=RETRY_S
            )
        if seq is not None and marks.highest > seq:
            state[:] = Tier.PENDING
            raise Overloaded(
                f"{self._name}: {self._where} has rows of delta {marks.highest}, this node answers as of {seq} and is "
                "catching up; send it again",
                retry_after_s=RETRY_S,
            )

    def peek(self, table_id: int, row_bytes: int, key: int, seq: int) -> Peek:
        """The other machines' row of a key for a view of `seq`, read beside the cache. StorageError, Overloaded."""
        rows, state = np.empty((1, row_bytes), np.uint8), np.zeros(1, np.uint8)
        self._read(table_id, np.array([key], np.int64), rows, state, seq)
        return Peek(rows.tobytes()) if state[0] == Tier.REMOTE else Peek(absent=True)

    def places(self, table: str, codes: Keys, seq: int) -> Sequence[Place]:
        return self._find_places(table, codes, seq)

    def beneath(self, info: VersionInfo, table: str, code: int, place: Place | None) -> Beneath:
        """The entry of this machine's SSD cache, if there is one, and the report of the machine at `place`."""
        seen, cached = Beneath(newer_than_overlays=True), self._cached.get(info.tables[table]["id"])
        if cached is not None:
            peek = cached.peek(code)
            seen.tiers.append(("ssd_cache", peek, dict(peek.heat)))
        if place is None or place.peek is None:
            seen.errors["remote"] = "not known" if place is None else place.error or "not known"
            return seen
        seen.tiers.append(("remote", place.peek, {"node": place.node}))
        seen.answer = place.peek
        return seen

    def in_order(self, table_id: int, keys: Keys) -> Keys:
        """`keys` as they are: from other machines no order is faster."""
        return keys

    def raise_floor(self, table_id: int, seq: int) -> None:
        """See `VersionStore`."""
        if (cached := self._cached.get(table_id)) is not None:
            cached.raise_floor(seq)

    def forget(self, table_id: int, keys: Keys) -> None:
        """See `VersionStore`."""
        if (cached := self._cached.get(table_id)) is not None:
            cached.forget(keys)

    def cache_stats(self, table_id: int) -> dict[str, int]:
        """Counts of the SSD cache for a table's rows; empty if none are kept."""
        cached = self._cached.get(table_id)
        return {} if cached is None else cached.stats()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")

    def compaction_due(self) -> bool:
        return False

    def compaction_urgent(self) -> bool:
        return False

    def compact(self, info: VersionInfo, give_up: Callable[[], bool]) -> bool:
        """Nothing: changed rows are in no files here."""
        return False

    def read_by(self, table_id: int, row_bytes: int) -> None:
        """None: kernels have no address to read the rows at."""

    def tier_bytes(self, table_id: int, table_bytes: int, of_all: int) -> dict[str, int]:
        return {"disk": self.cache_stats(table_id).get("bytes", 0), "remote": table_bytes}

    def bytes_on_disk(self) -> int:
        """Bytes on this machine's disk."""
        return sum(int(table.stats()["bytes"]) for table in self._cached.values())

    def stats(self) -> dict[str, int]:
        return {"bytes": self.bytes_on_disk(), "files": 0, "defaulted_keys": self.defaulted}

    def close(self) -> None:
        """Close it, once; no look-up may be running."""
        self._closed = True
        if self._cache is not None:
            for table in self._cached.values():
                self._cache.drop(table)
