"""How many rows a table holds, moved on by every fold.

A fold of few keys asks the disk tier for each of them whether it is there, and so counts exactly. Of many keys it asks for
some, drawn at random, and takes the others to be like them: from then on the count is an estimate, and says so, until
somebody counts all rows (`verify`). The counts are recorded in the same atomic step as the rows.

Free functions; `change` is for the one who folds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.engine.overlay import OverlayTable
from tierstore.errors import StorageError
from tierstore.tiers.base import RowStore
from tierstore.tiers.disk import DiskTier
from tierstore.types import Keys, Tier

RECORD = "rows"
ASKED = 1024  # keys of a table that a fold asks for at most: some milliseconds where none is in the system's cache


class RowCount(NamedTuple):
    """`exact` is False for an estimate."""

    rows: int
    exact: bool

    def plus(self, change: RowCount) -> RowCount:
        return RowCount(max(0, self.rows + change.rows), self.exact and change.exact)


def record(watermark: int, counts: Mapping[str, RowCount]) -> dict[str, bytes]:
    """The store's own record of the counts at a watermark."""
    return {RECORD: json.dumps({"watermark": watermark, "tables": counts}).encode()}


def recorded(disk: DiskTier, watermark: int, loaded: Mapping[str, RowCount], delta_seq: int) -> dict[str, RowCount]:
    """The counts at the watermark of a disk tier whose tables had `loaded` rows, at `delta_seq`.

    Where no record is of that watermark, since another release has folded, they are estimates.
    """
    try:
        document = json.loads(disk.record(RECORD) or b"{}")
        known = {name: RowCount(int(rows), bool(exact)) for name, (rows, exact) in document["tables"].items()}
        at = int(document["watermark"])
    except (ValueError, KeyError, TypeError, AttributeError):
        known, at = {}, delta_seq
    return {
        name: RowCount(count.rows, count.exact and at == watermark)
        for name, count in {**loaded, **known}.items()
        if name in loaded
    }


def change(disk: RowStore, table_id: int, delta: OverlayTable, seed: int) -> RowCount:
    """By how many rows a table grows (or shrinks) by a delta that is not in the disk tier yet."""
    rng = np.random.default_rng(seed)
    new, gone = delta.keys[~delta.deleted], delta.keys[delta.deleted]
    most = len(delta.keys) if len(delta.keys) <= ASKED else ASKED // 2
    there, all_asked = _share_there(disk, table_id, delta.spec.row_bytes, new, most, rng)
    lost, all_lost_asked = _share_there(disk, table_id, delta.spec.row_bytes, gone, most, rng)
    return RowCount(round(len(new) * (1 - there)) - round(len(gone) * lost), all_asked and all_lost_asked)


def _share_there(
    disk: RowStore, table_id: int, row_bytes: int, keys: Keys, most: int, rng: np.random.Generator
) -> tuple[float, bool]:
    """Which share of the keys, ascending and distinct, the disk tier holds, and whether each of them was asked for."""
    asked = keys if len(keys) <= most else keys[np.sort(rng.choice(len(keys), most, replace=False))]
    if not len(asked):
        return 0.0, not len(keys)
    state: npt.NDArray[np.uint8] = np.zeros(len(asked), np.uint8)
    with contextlib.suppress(StorageError):  # what could not be read is left as it was: nobody folds the less for it
        disk.get(table_id, asked, np.empty((len(asked), row_bytes), np.uint8), state)
    told = int(np.count_nonzero(state != Tier.PENDING))
    there = int(np.count_nonzero(state == Tier.DISK))
    return there / max(1, told), told == len(keys)
