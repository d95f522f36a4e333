"""The remote tier: a version's rows in a cluster, behind the same protocol as the disk tier.

`RemoteTable` reads one table, `RemoteTier` all tables of a version. Any thread may call anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstore.errors import Closed
from tierstore.tiers.joining import Bounds, JoinedTable, Watermarks
from tierstore.tiers.remote.cluster import Cluster
from tierstore.tiers.remote.lookup import Read
from tierstore.tiers.remote.requests import TableLayout
from tierstore.types import Keys, Rows, States


class RemoteTable(JoinedTable):
    """One table of one version. `tags` are the version's, in the order of its manifest, and the parts of its watermarks."""

    def __init__(
        self, cluster: Cluster, model: str, version: int, table: str, tags: Sequence[bytes], row_bytes: int
    ) -> None:
        super().__init__(cluster, row_bytes, len(tags))
        # constant after construction
        self._cluster = cluster
        self.layout = TableLayout(model, version, table, tags, row_bytes)

    def _read(
        self, codes: Keys, places: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds
    ) -> Watermarks:
        # a cluster has rows of one moment: what a master has that does not fit the bounds is for the caller to refuse
        return Read(self._cluster, self.layout, codes, places, rows, state, bounds.floor).run(deadline_s)


class RemoteTier:
    """All tables of one version, by table id; a `RowStore`. Closing it leaves the cluster connected, which others use too."""

    def __init__(self, tables: Mapping[int, RemoteTable]) -> None:
        self._tables = dict(tables)  # constant after construction
        self._closed = False

    def fetch(
        self, table_id: int, keys: Keys, rows: Rows, state: States, *, deadline_s: float | None = None
    ) -> Watermarks:
        """As `RemoteTable.fetch`; Closed after `close`, also of a read that was under way."""
        self._check_open()
        try:
            return self._tables[table_id].fetch(keys, rows, state, deadline_s=deadline_s)
        finally:
            self._check_open()

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """`fetch` for callers whose rows never change, or that check watermarks elsewhere."""
        self.fetch(table_id, keys, rows, state)

    def words_at(self, table_id: int, row_bytes: int) -> int:
        """0: no kernel reads a cluster by itself."""
        return 0

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the version's remote tier was closed")
