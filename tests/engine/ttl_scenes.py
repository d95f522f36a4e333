"""A table of users with a ttl, a clock that a test moves on, and what a store then finds."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.engine import scenes
from tierstore.engine.lifecycle import expiry

DAY = 86400
NOW = int(time.time())
ROWS = 400
KEYS = np.arange(ROWS + 10)
WAIT_S = 30.0

OpenStore = Callable[..., tierstore.Store]


def write(root: Path, version: int = 1, *, delta_seq: int = 0, key: str = "int64", **options: Any) -> Path:
    """Row k of `user` was written k / 20 days ago; its ttl is 30 days. `item` has none."""
    where = root / f"s-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as snapshot:
        keys = np.arange(ROWS)
        table = snapshot.table("user", dim=4, key=key, ttl_s="30d", time_column="seen", **options)
        table.write(keys.astype(str) if key == "string" else keys, rows_of(keys, version), NOW - keys * (DAY // 20))
        snapshot.table("item", dim=2).write([1, 2], [[1, 1], [2, 2]])
        snapshot.feature("user", table="user")
        snapshot.feature("item", table="item")
    return where


def rows_of(keys: Any, stamp: int) -> np.ndarray:
    return np.repeat((np.asarray(keys) % 512 + 1024 * (stamp % 2))[:, None], 4, axis=1).astype(np.float32)


def delta(seq: int, keys: Any, *, days: float = 0, gone: Any = (), as_text: bool = False) -> bytes:
    """Upserts rows of `user`, written `days` after NOW."""
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model="ctr", seq=seq, event_time=NOW + days * DAY) as writer:
        if len(keys):
            writer.upsert("user", list(map(str, keys)) if as_text else list(keys), rows_of(keys, seq + 1))
        if len(gone):
            writer.delete("user", list(map(str, gone)) if as_text else list(gone))
    return buffer.getvalue()


def found(store: tierstore.Store, keys: Any = KEYS, *, as_text: bool = False, version: Any = None) -> set[int]:
    asked = list(map(str, keys)) if as_text else np.asarray(keys)
    _, there = store.model("ctr").lookup("user", asked, return_found=True, version=version)
    return set(np.asarray(keys)[there].tolist())


def check(store: tierstore.Store) -> None:
    """A search of housekeeping that is due, however long ago the last one was."""
    search = expiry_of(store)
    for _ in range(2):  # one may have been under way, as of an earlier time: then the next one counts
        serving = [view.open_version for view in store.model("ctr").served.views]
        for version in serving:
            search._checked_s.pop(version, None)
        scenes.housekeep(store)
        ended = [version for version in serving if version in search._checked_s]
        if all(version.info.expiry_checked_s == expiry.time.time() for version in ended):
            return


def expiry_of(store: tierstore.Store) -> expiry.Expiry:
    (task,) = [task for what, task in store.model("ctr").housekeeping.tasks._tasks.items() if "expired" in what]
    return task.__self__  # type: ignore[attr-defined, no-any-return]


def user(store: tierstore.Store) -> dict[str, Any]:
    return store.status()["models"]["ctr"]["tables"]["user"]  # type: ignore[no-any-return]
