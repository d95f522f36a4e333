"""The number of rows of a table, updated by every fold.

A fold of few keys looks each of them up in the disk tier, and so counts exactly. For many keys it looks up a random
sample and assumes that the others are alike: then the count is an estimate, and is marked so, until all rows are
counted (`verify`). Counts are recorded in the same atomic step as the rows.

Free functions; `change` is for the thread that folds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.engine.data.overlay import OverlayTable
from tierstore.errors import StorageError
from tierstore.tiers.base import Records, RowStore
from tierstore.types import Keys, Tier

RECORD = "rows"
SAMPLE = 1024  # keys of a table that a fold looks up at most: some milliseconds if none is in the page cache


class RowCount(NamedTuple):
    """`exact` is False for an estimate."""

    rows: int
    exact: bool

    def plus(self, change: RowCount) -> RowCount:
        return RowCount(max(0, self.rows + change.rows), self.exact and change.exact)


def record(watermark: int, counts: Mapping[str, RowCount]) -> dict[str, bytes]:
    """The record of the counts at a watermark."""
    return {RECORD: json.dumps({"watermark": watermark, "tables": counts}).encode()}


def recorded(disk: Records, watermark: int, loaded: Mapping[str, RowCount], delta_seq: int) -> dict[str, RowCount]:
    """The counts at a disk tier's watermark. Its tables had `loaded` rows at `delta_seq`.

    Estimates if the record is of another watermark, because another release has folded.
    """
    try:
        document = json.loads(disk.record(RECORD) or b"{}")
        counts = {name: RowCount(int(rows), bool(exact)) for name, (rows, exact) in document["tables"].items()}
        at = int(document["watermark"])
    except (ValueError, KeyError, TypeError, AttributeError):
        counts, at = {}, delta_seq
    return {
        name: RowCount(count.rows, count.exact and at == watermark)
        for name, count in {**loaded, **counts}.items()
        if name in loaded
    }


def change(disk: RowStore, table_id: int, delta: OverlayTable, seed: int) -> RowCount:
    """The change of a table's row count by a delta that is not in the disk tier yet."""
    rng = np.random.default_rng(seed)
    new, gone = delta.keys[~delta.deleted], delta.keys[delta.deleted]
    most = len(delta.keys) if len(delta.keys) <= SAMPLE else SAMPLE // 2
    there, new_exact = _share_there(disk, table_id, delta.spec.row_bytes, new, most, rng)
    lost, gone_exact = _share_there(disk, table_id, delta.spec.row_bytes, gone, most, rng)
    return RowCount(round(len(new) * (1 - there)) - round(len(gone) * lost), new_exact and gone_exact)


def _share_there(
    disk: RowStore, table_id: int, row_bytes: int, keys: Keys, most: int, rng: np.random.Generator
) -> tuple[float, bool]:
    """The share of keys, ascending and distinct, that the disk tier holds, and whether each of them was looked up."""
    sample = keys if len(keys) <= most else keys[np.sort(rng.choice(len(keys), most, replace=False))]
    if not len(sample):
        return 0.0, not len(keys)
    state: npt.NDArray[np.uint8] = np.zeros(len(sample), np.uint8)
    with contextlib.suppress(StorageError):  # keys that cannot be read are not counted; the fold goes on
        disk.get(table_id, sample, np.empty((len(sample), row_bytes), np.uint8), state)
    answered = int(np.count_nonzero(state != Tier.PENDING))
    there = int(np.count_nonzero(state == Tier.DISK))
    return there / max(1, answered), answered == len(keys)
