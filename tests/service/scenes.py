"""Snapshots and deltas of the model that `fake_store` describes, for a real store."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import tierstore
from tests.service.fake_store import DEFAULT, ITEMS, TABLES, USERS, VERSION, row


def rows(table: str, values: list[float]) -> np.ndarray:
    """float32[n, dim] of the rows for `values`."""
    return np.array([row(table, value) for value in values], np.float32).reshape(len(values), TABLES[table].dim)


def items(keys: np.ndarray) -> np.ndarray:
    """The rows of the table `item` for `keys`, float32 [*keys.shape, dim]."""
    wanted = [ITEMS.get(int(key), DEFAULT) for key in keys.ravel()]
    return rows("item", wanted).reshape(*keys.shape, TABLES["item"].dim)


KEYS = np.array([5, 0, 99, 100, -(1 << 63), (1 << 63) - 1, -1, 5], np.int64)  # some are absent


def write_snapshot(
    root: Path,
    version: int = VERSION,
    *,
    model: str = "ctr",
    shift: float = 0.0,
    delta_seq: int = 0,
    dense: bytes | None = None,
    created_at: float | None = None,
) -> Path:
    """The model of `fake_store`, every value `shift` higher. created_at: seconds since 1970."""
    where = root / f"{model}-{version}"
    with tierstore.SnapshotWriter(
        where, model=model, version=version, delta_seq=delta_seq, created_at=created_at
    ) as writer:
        item = writer.table("item", dim=TABLES["item"].dim, default=row("item", DEFAULT).tolist())
        item.write(np.array(list(ITEMS), np.int64), rows("item", [value + shift for value in ITEMS.values()]))
        user = writer.table("user", dim=TABLES["user"].dim, key="string")
        user.write(list(USERS), rows("user", [value + shift for value in USERS.values()]))
        big = writer.table("big", dim=TABLES["big"].dim, key="uint64")
        big.write(np.array([1 << 63, 5], np.uint64), rows("big", [9.0 + shift, 5.0 + shift]))
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean")
        writer.feature("user", table="user")
        writer.feature("big", table="big")
        if dense is not None:
            writer.dense(dense)
    return where


def write_small(root: Path, model: str, table: str, version: int = VERSION) -> Path:
    """A model of one feature: `item_id` over int64 keys, or `user` over strings."""
    where = root / f"{model}-{version}"
    keys, values = (np.array(list(ITEMS), np.int64), ITEMS) if table == "item" else (list(USERS), USERS)
    with tierstore.SnapshotWriter(where, model=model, version=version) as writer:
        writer.table(table, dim=TABLES[table].dim, key="int64" if table == "item" else "string").write(
            keys, rows(table, list(values.values()))
        )
        writer.feature("item_id" if table == "item" else "user", table=table)
    return where


def delta(seq: int, items: dict[int, float], *, model: str = "ctr", delete: tuple[int, ...] = ()) -> bytes:
    """A delta that sets items to the rows of new values."""
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model=model, seq=seq, event_time=datetime.now(UTC)) as writer:
        if items:
            writer.upsert("item", np.array(list(items), np.int64), rows("item", list(items.values())))
        if delete:
            writer.delete("item", np.array(delete, np.int64))
    return buffer.getvalue()
