"""A table in a cluster: the rows of one table of one version. Any thread may call anything."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.tiers.cluster.lookup import Read
from tierstore.tiers.cluster.row_requests import TableLayout
from tierstore.tiers.cluster.topology import Cluster
from tierstore.tiers.joining import Bounds, JoinedTable, Watermarks
from tierstore.types import Keys, Rows, States


class ClusterTable(JoinedTable):
    """One table of one version in a cluster. `tags` are the version's, in the order of its manifest, and the parts of its watermarks."""

    def __init__(
        self,
        cluster: Cluster,
        model: str,
        version: int,
        table: str,
        tags: Sequence[bytes],
        row_bytes: int,
        line: int = 0,
    ) -> None:
        super().__init__(cluster.pools, row_bytes, len(tags))
        # constant after construction
        self._cluster = cluster
        self.layout = TableLayout(model, version, table, tags, row_bytes, line)

    def _read(
        self, codes: Keys, places: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds
    ) -> Watermarks:
        # a cluster has the rows of one moment: the caller refuses rows that do not fit the bounds
        return Read(self._cluster, self.layout, codes, places, rows, state, bounds.floor).run(deadline_s)
