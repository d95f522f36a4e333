"""Small models for engine tests: rows are a function of (version, seq, table, key), so any answer can be checked."""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tierstore

DIM = {"user": 4, "item": 8}
ROWS = {"user": 500, "item": 1000}


def vector(table: str, stamp: int, key: int) -> np.ndarray:
    """float32[dim], exact in float16: every element names the stamp and the key."""
    return np.full(DIM[table], (stamp % 16) * 64 + key % 64, np.float32)


def vectors(table: str, stamp: int, keys: Iterable[int]) -> np.ndarray:
    keys = np.asarray(list(keys), np.int64)
    return np.repeat(((stamp % 16) * 64 + keys % 64).astype(np.float32)[:, None], DIM[table], axis=1)


def warmed(store: tierstore.Store) -> tierstore.Store:
    """The store, once what was hot before its start is in memory."""
    eventually(lambda: store.warming() is None, "it is warm")
    return store


def swept(store: tierstore.Store) -> tierstore.Store:
    """The store, once it has removed what crashes have left."""
    eventually(lambda: not store._sweeping.is_alive(), "what crashes have left is removed")
    return store


def eventually(happened: Callable[[], bool], what: str, timeout_s: float = 30.0, pause_s: float = 0.002) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(pause_s)


def housekeep(store: tierstore.Store, name: str = "ctr") -> None:
    """Deal memory again and do every housekeeping task of a model, once the versions that were replaced are closed and nothing else switches."""
    model = store.model(name)
    eventually(lambda: not model.state.retiring, "what was replaced is closed")
    with model.state.switch:
        store.shared.memory.run()
        model.housekeeping.tasks.run()


def write_snapshot(
    root: Path,
    version: int = 1,
    *,
    stamp: int = 0,
    delta_seq: int = 0,
    dtype: str = "float32",
    default: object = "zeros",
    model: str = "ctr",
    rows: dict[str, int] = ROWS,
    dense: bytes | None = None,
    heads: Mapping[str, bytes] = {},
    requests: Iterable[dict[str, Any]] = (),
) -> Path:
    """Tables `user` and `item`; features `user_id`, `item_id`, and `clicked`, bags over items (mean, padding key 0)."""
    where = root / f"{model}-{version}"
    with tierstore.SnapshotWriter(where, model=model, version=version, delta_seq=delta_seq) as writer:
        for table in ("user", "item"):
            keys = np.arange(rows[table], dtype=np.int64)
            writer.table(table, dim=DIM[table], dtype=dtype, default=default).write(keys, vectors(table, stamp, keys))
        writer.feature("user_id", table="user")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean", padding_key=0)
        writer.warmup("item", np.arange(32, dtype=np.int64))
        if dense is not None:
            writer.dense(dense)
        for head, graph in heads.items():
            writer.dense(graph, head=head)
        for request in requests:
            writer.request(request)
    return where


def some_dense() -> bytes:
    """A dense part that every version takes; any bytes where the extra `dense` is not installed, and nothing looks."""
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        return b"d"
    from tests.predict import onnx_models

    return onnx_models.linear({"user_id": np.ones(DIM["user"])})


def delta(
    seq: int,
    upserts: dict[str, tuple[Iterable[int], np.ndarray]] | None = None,
    deletes: dict[str, Iterable[int]] | None = None,
    *,
    base_version: int | None = None,
    model: str = "ctr",
    event_time: datetime | None = None,
    dense: bytes | None = None,
    heads: Mapping[str, bytes | None] = {},
) -> bytes:
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(
        buffer, model=model, seq=seq, event_time=event_time or datetime.now(UTC), base_version=base_version
    ) as writer:
        for table, (keys, rows) in (upserts or {}).items():
            writer.upsert(table, np.asarray(list(keys), np.int64), rows)
        for table, keys in (deletes or {}).items():
            writer.delete(table, np.asarray(list(keys), np.int64))
        if dense is not None:
            writer.dense(dense)
        for head, graph in heads.items():
            writer.dense(graph, head=head)
    return buffer.getvalue()


def stamped(seq: int, keys: dict[str, Iterable[int]], **options: object) -> bytes:
    """A delta that rewrites `keys` of each table with the stamp `seq`."""
    lists = {table: list(of) for table, of in keys.items()}
    return delta(seq, {table: (of, vectors(table, seq, of)) for table, of in lists.items()}, **options)  # type: ignore[arg-type]
