"""The row store of a version whose rows are on other machines: reads them, and refuses what does not fit the view that asks.

Of what was read it is known up to which seq it has every delta, and above which it has none (`Watermarks`): from a cluster each tag
of a version says it, from nodes upstream each answer. Any thread may read; `trust` is for the thread that
folds, `reached` for the one that follows the cluster.

Where the node has a cache on its SSD, a look-up reads there first. What is held there is right for every view, so that it needs no
comparing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import numpy as np

from tierstore.errors import Closed, InvalidInput, Overloaded, StorageError
from tierstore.tiers.base import Peek
from tierstore.tiers.disk.tier import TableContent
from tierstore.tiers.joining import Watermarks
from tierstore.tiers.ssd.cache import SsdCache
from tierstore.tiers.ssd.table import SsdTable
from tierstore.types import Keys, Rows, States, Tier

_TRIES = 3
PLACES_S = 10.0  # after which other machines are not asked for further keys of one explanation
RETRY_S = 0.1  # a node is so far behind the cluster at most, as a rule


@dataclass(slots=True)
class Place:
    """Where the row of one key is, for a person who wants to know: on which machine, and what that holds of it.

    `explained`: what that machine says itself, an entry of `explain`. `error`: why there is neither.
    """

    node: str | None = None
    partition: tuple[int, int] | None = None  # (its number, of how many)
    peek: Peek | None = None
    error: str | None = None
    explained: dict[str, Any] | None = None


# (table, codes, seq of the view) → one a code
FindPlaces = Callable[[str, Keys, int], Sequence[Place]]


class FetchTable(Protocol):
    """A table of the version: `JoinedTable.fetch`."""

    def fetch(
        self, codes: Keys, rows: Rows, state: States, *, upto: int | None = None, floor: int = 0
    ) -> Watermarks: ...


class RemoteBase:
    """Of one version. `tables` by id. `reached`: the seq that all of its rows have reached, as far as this node has heard.

    `where` the rows are is for messages. `line`: see `Pointer`. `cache`: rows of its tables are kept there.
    """

    def __init__(
        self,
        name: str,
        tables: Mapping[int, FetchTable],
        reached: int,
        on_failure: Literal["refuse", "default"],
        *,
        where: str = "the cluster",
        line: str = "",
        cache: SsdCache | None = None,
    ) -> None:
        self._name, self._tables, self._on_failure = name, tables, on_failure
        self._where, self.line = where, line
        self._cache, self._cached = cache, dict[int, SsdTable]()
        self.places: FindPlaces = lambda table, codes, seq: [
            Place(error="not known") for _ in codes
        ]  # its owner sets it
        self._lock = threading.Lock()
        # guarded by _lock
        self.defaulted = 0  # keys that were answered with a default because they could not be read
        # each written by one thread
        self.reached = reached
        self._trusted = reached  # deltas up to this one are not in memory any more
        self._closed = False

    def watermark(self) -> int:
        return self._trusted

    def record(self, name: str) -> None:
        """The cluster keeps a version's records otherwise."""

    def trust(self, seq: int) -> None:
        """From now on rows without the deltas up to `seq` are an error."""
        self._trusted = max(self._trusted, seq)

    def keep(self, table_id: int, rows: int, row_bytes: int) -> None:
        """Have rows of a table kept on this machine's SSD, where the node has a cache there. Before anything is read."""
        if self._cache is not None and (table := self._cache.table(rows, row_bytes)) is not None:
            self._cached[table_id] = table

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """As in `RowStore`: whatever the rows are by now, and no older than what this node relies on."""
        self._read(table_id, keys, rows, state, None)

    def get_at(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        """As in `SharedRowStore`."""
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
            state[:] = Tier.PENDING  # another thread's read, which was joined, may have begun before that
        else:
            raise StorageError(
                f"{self._name}: {self._where} has deltas up to {marks.lowest}, and had them up to {trusted}: a server has lost what it "
                "acknowledged; they are applied again from the log if that has them",
                keys=keys.tolist(),
            )
        if seq is not None and marks.highest > seq:
            state[:] = Tier.PENDING
            raise Overloaded(
                f"{self._name}: {self._where} has rows of delta {marks.highest}, this node answers as of {seq} and is catching up; send "
                "it again",
                retry_after_s=RETRY_S,
            )

    def peek(self, table_id: int, row_bytes: int, key: int, seq: int) -> Peek:
        """What the other machines hold of a key for a view of `seq`, read beside the cache. StorageError, Overloaded."""
        rows, state = np.empty((1, row_bytes), np.uint8), np.zeros(1, np.uint8)
        self._read(table_id, np.array([key], np.int64), rows, state, seq)
        return Peek(rows.tobytes()) if state[0] == Tier.REMOTE else Peek(absent=True)

    def peek_cached(self, table_id: int, key: int) -> Peek | None:
        """What the cache on this machine's SSD holds of a key; None where there is no such cache."""
        cached = self._cached.get(table_id)
        return None if cached is None else cached.peek(key)

    def raise_floor(self, table_id: int, seq: int) -> None:
        """As in `SharedRowStore`."""
        if (cached := self._cached.get(table_id)) is not None:
            cached.raise_floor(seq)

    def forget(self, table_id: int, keys: Keys) -> None:
        """As in `SharedRowStore`."""
        if (cached := self._cached.get(table_id)) is not None:
            cached.forget(keys)

    def cache_stats(self, table_id: int) -> dict[str, int]:
        """Of a table's rows on this machine's SSD; empty where none are kept."""
        cached = self._cached.get(table_id)
        return {} if cached is None else cached.stats()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._name} was closed")

    def words_at(self, table_id: int, row_bytes: int) -> int:
        """0: kernels have no address to read them at."""
        return 0

    def bytes_on_disk(self) -> int:
        """Of what is kept on this machine."""
        return sum(int(table.stats()["bytes"]) for table in self._cached.values())

    def stats(self) -> dict[str, int]:
        return {"bytes": self.bytes_on_disk(), "files": 0, "defaulted_keys": self.defaulted}

    def scan(self, table_id: int, row_bytes: int, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        self._refuse("exported")

    def verify(self, row_bytes: Mapping[int, int], progress: object = None) -> dict[int, TableContent]:
        self._refuse("verified")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInput(f"{self._name} cannot be {what}: its rows are not on this machine")

    def close(self) -> None:
        """Once; no look-up may be running."""
        self._closed = True
        if self._cache is not None:
            for table in self._cached.values():
                self._cache.drop(table)
