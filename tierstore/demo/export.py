"""From the trainer to the service: snapshots and deltas, by the writers that any trainer would use.

Free functions. A snapshot is there whole or not at all, as its writer promises.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.demo.canary import item_canaries, user_canaries, write_number
from tierstore.demo.clicklog import item_keys, user_keys
from tierstore.demo.graph import can_predict, graph
from tierstore.demo.trainer import DIM, Dense
from tierstore.formats.writers import DeltaWriter, SnapshotWriter
from tierstore.types import Keys, StorageDtype, Vectors

MODEL = "ctr"
USER, ITEM, CLICKED = "user_id", "item_id", "clicked"  # the features; the last two read one table
CHUNK = 65_536
ROW_BYTES = StorageDtype.FLOAT16.row_bytes(DIM)


def write_snapshot(
    directory: Path,
    *,
    version: int,
    delta_seq: int,
    users: Vectors,
    items: npt.NDArray[np.int64],
    item_vectors: Vectors,
    dense: Dense,
) -> None:
    """Write a snapshot of all users ([users, DIM]), of the item rows `items` (ascending) with their vectors, and of `dense`.

    The dense part is left out where it cannot be served, see `graph.can_predict`.
    """
    version_row, seq_row = write_number(version), write_number(delta_seq)
    canaries = np.stack([version_row, seq_row])
    with SnapshotWriter(directory, model=MODEL, version=version, delta_seq=delta_seq) as snapshot:
        for name, batches in (
            ("user", _batches(user_keys(np.arange(len(users))), users)),
            ("item", _batches(item_keys(items), item_vectors)),
        ):
            table = snapshot.table(name, dim=DIM, dtype=StorageDtype.FLOAT16.value)
            table.write(user_canaries() if name == "user" else item_canaries(), canaries)
            for keys, vectors in batches:
                table.write(keys, vectors)
        snapshot.feature(USER, table="user")
        snapshot.feature(ITEM, table="item")
        snapshot.feature(CLICKED, table="item", combiner="mean")
        if can_predict():
            snapshot.dense(graph(dense, user=USER, item=ITEM, bag=CLICKED))


def delta(
    *,
    seq: int,
    event_time: datetime,
    users: npt.NDArray[np.int64],
    user_vectors: Vectors,
    items: npt.NDArray[np.int64],
    item_vectors: Vectors,
    gone: npt.NDArray[np.int32],
    dense: Dense,
) -> bytes:
    """A minute's delta: upserts of the rows that changed in both tables, deletes of the items that are gone, the dense part."""
    seq_row = write_number(seq)[None].astype(np.float16)
    written = io.BytesIO()
    with DeltaWriter(written, model=MODEL, seq=seq, event_time=event_time) as out:
        out.upsert("user", user_keys(users), user_vectors.astype(np.float16))
        out.upsert("user", user_canaries()[1:], seq_row)
        out.upsert("item", item_keys(items), item_vectors.astype(np.float16))
        out.upsert("item", item_canaries()[1:], seq_row)
        out.delete("item", item_keys(gone))
        if can_predict():
            out.dense(graph(dense, user=USER, item=ITEM, bag=CLICKED))
    return written.getvalue()


def _batches(keys: Keys, vectors: Vectors) -> Iterable[tuple[Keys, Vectors]]:
    return ((keys[i : i + CHUNK], vectors[i : i + CHUNK]) for i in range(0, len(keys), CHUNK))
