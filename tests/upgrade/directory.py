"""A data directory with something of everything, made and checked by the public interface alone, so that any release can run this.

python directory.py make DIR       fills a new directory
python directory.py check DIR      checks what `make` has filled, takes one more delta, checks that, and prints `as it was`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tierstore

SETTINGS: dict[str, Any] = {"host_budget": "4MiB", "disk_threads": 2, "load_workers": 1, "fold_grace_s": 0.0}
ROWS = 200
NEXT = 16  # the delta that `check` brings


def rows(keys: Any, stamp: int) -> np.ndarray:
    """Exact in float16."""
    return np.repeat((np.asarray(keys) % 64 + 64 * stamp)[:, None], 4, axis=1).astype(np.float32)


def snapshot(where: Path, version: int) -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=10) as writer:
        keys = np.arange(ROWS)
        writer.table("item", dim=4, dtype="float16", default="mean").write(keys, rows(keys, version))
        user = writer.table("user", dim=4, ttl_s="36500d", time_column="seen")
        user.write(keys, rows(keys, version), np.full(ROWS, 1_700_000_000))
        writer.table("word", dim=2, key="string").write(["a", "b"], np.full((2, 2), version, np.float32))
        for name in ("item", "user", "word"):
            writer.feature(name, table=name)
    return where


def delta(where: Path, seq: int) -> Path:
    """Rewrites item `seq` and item 1, brings item 1000 + seq and deletes item 50 + seq."""
    with tierstore.DeltaWriter(where, model="ctr", seq=seq, event_time=1_700_000_000.0 + seq) as writer:
        keys = [1, seq, 1000 + seq]
        writer.upsert("item", keys, rows(keys, seq))
        writer.delete("item", [50 + seq])
        writer.upsert("word", [f"w{seq}"], [[seq, seq]])
    return where


def make(data: Path, scratch: Path) -> None:
    """Version 1 active with deltas 11, 12 and 15, 13 and 14 being undone; version 2 the canary."""
    with tierstore.open(data, **SETTINGS) as store:
        store.load_snapshot(snapshot(scratch / "1", 1))
        for seq in (11, 12, 13, 14):
            store.apply_delta(delta(scratch / f"{seq}.arrow", seq))
        store.rollback("ctr", to_seq=12)
        store.load_snapshot(snapshot(scratch / "2", 2), activate=False)
        store.apply_delta(delta(scratch / "15.arrow", 15))
        store.canary("ctr", 2, 0.25)
        store.label("ctr", "holdout", 2)


def check(data: Path, scratch: Path, newest: int = 15) -> None:
    """What `make` has made, and the deltas from 16 to `newest`, is answered; then the next delta is taken and answered."""
    with tierstore.open(data, **SETTINGS) as store:
        _check(store, newest)
        assert store.apply_delta(delta(scratch / f"{newest + 1}.arrow", newest + 1)).applied
        _check(store, newest + 1)
        report = store.verify()
        assert report.ok, report.problems


def _check(store: Any, newest: int) -> None:
    model = store.model("ctr")
    status = store.status("ctr")["models"]["ctr"]
    assert (status["active_version"], status["watermark"], status["undone"]) == (1, newest, [[13, 14]]), status
    assert (status["canary"]["version"], status["canary"]["share"], status["labels"]["holdout"]) == (2, 0.25, 2), status
    for version in (1, 2):
        applied = [11, 12, *range(15, newest + 1)]
        stamps = dict.fromkeys(range(ROWS), version) | {seq: seq for seq in applied} | {1: newest}
        stamps |= {1000 + seq: seq for seq in applied}
        for seq in applied:
            stamps.pop(50 + seq)
        keys = np.arange(1100)
        got, found = model.lookup("item", keys, return_found=True, version=version)
        assert set(keys[found].tolist()) == set(stamps), (version, sorted(set(keys[found].tolist()) ^ set(stamps)))
        there = np.array(sorted(stamps))
        wanted = np.concatenate([rows([key], stamps[key]) for key in there.tolist()])
        assert (got[there] == wanted).all(), version
        seen, found = model.lookup("user", np.arange(ROWS), return_found=True, version=version)
        assert found.all()
        assert (seen == rows(np.arange(ROWS), version)).all()
        words, found = model.lookup("word", ["a", "w12", "w13", f"w{newest}"], return_found=True, version=version)
        assert found.tolist() == [True, True, False, True]
        assert words[:, 0].tolist() == [version, 12, 0, newest]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]), Path(temporary))
    print("as it was")
