"""Loads of a store that are broken off: they go on where they were, or what they left goes in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.engine.store import Store
from tierstore.errors import Conflict, LoadCancelled
from tierstore.ingest import load_plan
from tierstore.types import Progress

ROWS = 200_000
MODEL, TABLE, DIM = "ctr", "item", 8
SETTINGS = {"host_budget": "4MiB", "load_workers": 2, "load_memory": "16MiB", "disk_threads": 2}

# A service that is killed when a load reaches a phase, or has finished so many tasks of it.
PROGRAM = """
import os, signal, sys
import tierstore
from tierstore.ingest import bulkload, helpers, load_plan

helpers._lower_priority = lambda _: None  # else they would wait for the tests of other processes
data, source, phase, count = sys.argv[1:]
load_plan._FILE_BYTES = load_plan.MIN_RANGE_BYTES = 1 << 20
seen = 0

class Journal(bulkload.Journal):
    def note(self, key, result):
        global seen
        super().note(key, result)
        seen += phase == ("read" if "runs" in result else "write" if "rows" in result else "")
        if int(count) and seen >= int(count):
            os.kill(os.getpid(), signal.SIGKILL)

bulkload.Journal = Journal

def die(step):
    if step.phase == phase and not int(count):
        os.kill(os.getpid(), signal.SIGKILL)

with tierstore.open(data, host_budget="4MiB", load_workers=2, load_memory="16MiB", disk_threads=2) as store:
    store.load_snapshot(source, progress=die)
"""


def vectors(stamp: int, keys: np.ndarray) -> np.ndarray:
    return np.repeat((keys % 1000 + stamp).astype(np.float32)[:, None], DIM, axis=1)


def snapshot(where: Path, version: int, stamp: int = 0) -> Path:
    keys = np.random.default_rng(version).permutation(ROWS)
    with tierstore.SnapshotWriter(where, model=MODEL, version=version) as writer:
        writer.table(TABLE, dim=DIM, rows_per_shard=ROWS // 4).write(keys, vectors(stamp, keys))
        writer.warmup(TABLE, np.arange(1000))
    return where


def right(store: Store, stamp: int = 0) -> bool:
    keys = np.arange(ROWS + 5)
    rows, found = store.model(MODEL).lookup(TABLE, keys, return_found=True)
    return bool(
        found[:ROWS].all() and not found[ROWS:].any() and np.array_equal(rows[:ROWS], vectors(stamp, keys[:ROWS]))
    )


def killed(tmp_path: Path, source: Path, phase: str, count: int = 0) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), str(source), phase, str(count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture(autouse=True)
def _many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(load_plan, "MIN_RANGE_BYTES", 1 << 20)


def first_steps(store: Store, source: Path) -> dict[str, Progress]:
    """Load, and tell how far each phase was when it began."""
    steps: dict[str, Progress] = {}
    store.load_snapshot(source, progress=lambda step: steps.setdefault(step.phase, step))  # type: ignore[arg-type,return-value]
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize(("phase", "count"), [("read", 2), ("write", 3), ("ingest", 0), ("verify", 0), ("warm", 0)])
def test_a_service_that_is_killed_while_it_loads_goes_on_when_the_snapshot_is_loaded_again(
    tmp_path, open_store, phase, count
):
    source = snapshot(tmp_path / "s", 2)
    with tierstore.open(tmp_path / "data", **SETTINGS) as store:
        store.load_snapshot(snapshot(tmp_path / "first", 1, stamp=1))
    killed(tmp_path, source, phase, count)
    store = open_store(**SETTINGS)
    model = store.model(MODEL)
    assert model.active_version == 1
    built = phase == "warm"
    unfinished = store.status()["models"][MODEL]["unfinished"]
    assert model.versions == ([1, 2] if built else [1])
    assert list(unfinished) == ([] if built else ["2"])
    assert right(store, stamp=1)
    store.apply_delta(scenes.delta(1, {TABLE: ([7], np.full((1, DIM), 5, np.float32))}))
    steps = first_steps(store, source)
    if built:
        assert not steps.keys() & {"read", "write", "ingest", "verify"}
    else:
        assert steps["read"].done == ROWS or (phase == "read" and steps["read"].done > 0)
        kept = steps["write"].done
        assert kept == ROWS if phase in ("ingest", "verify") else (kept > 0) == (phase == "write")
    assert model.active_version == 2
    assert model.lookup(TABLE, [7])[0, 0] == 5
    store.apply_delta(scenes.delta(2, {TABLE: ([7], vectors(0, np.array([7])))}))
    assert right(store)
    assert store.status()["models"][MODEL]["unfinished"] == {}
    assert not (model.where.version(2).journal).exists()
    assert not model.state.file.document.loads
    assert store.verify().ok
    with pytest.raises(Conflict, match="there already"):
        store.load_snapshot(source)


@pytest.mark.thorough
def test_a_load_of_another_snapshot_with_the_same_version_uses_nothing_that_is_left(tmp_path, open_store):
    killed(tmp_path, snapshot(tmp_path / "s", 1), "write", 3)
    store = open_store(**SETTINGS)
    steps = first_steps(store, snapshot(tmp_path / "other", 1, stamp=3))
    assert steps["read"].done == steps["write"].done == 0
    assert "check" not in steps
    assert right(store, stamp=3)


@pytest.mark.thorough
def test_what_is_left_goes_when_a_newer_snapshot_is_loaded(tmp_path, open_store):
    killed(tmp_path, snapshot(tmp_path / "s", 1), "write", 3)
    store = open_store(**SETTINGS)
    store.load_snapshot(snapshot(tmp_path / "newer", 2))
    assert store.model(MODEL).catalogue.unfinished == {}
    assert not (tmp_path / "data/models/ctr/1").exists()


@pytest.mark.thorough
def test_what_is_left_is_kept_over_restarts_until_its_time_is_over(tmp_path, open_store):
    killed(tmp_path, snapshot(tmp_path / "s", 1), "write", 3)
    unfinished = tmp_path / "data/models/ctr/1"
    store = open_store(**SETTINGS)
    store.model(MODEL).housekeeping.tasks.run()
    size = store.status()["models"][MODEL]["unfinished"]["1"]["bytes"]
    assert size == sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    store.close()
    then = time.time() - 25 * 3600
    os.utime(unfinished / "build/journal", (then, then))
    store = open_store(**SETTINGS)
    assert unfinished.exists()
    store.model(MODEL).housekeeping.tasks.run()
    assert not unfinished.exists()
    assert store.status()["models"][MODEL]["unfinished"] == {}


@pytest.mark.thorough
def test_nothing_is_kept_where_the_setting_says_so(tmp_path, open_store):
    source = snapshot(tmp_path / "s", 1)
    killed(tmp_path, source, "write", 3)
    store = open_store(**SETTINGS, load_retention_s=0)
    assert not (tmp_path / "data/models/ctr/1").exists()
    cancelled = threading.Event()
    with pytest.raises(LoadCancelled):
        store.load_snapshot(
            source, progress=lambda step: step.phase == "write" and cancelled.set(), cancelled=cancelled
        )
    assert not (tmp_path / "data/models/ctr/1").exists()


def test_what_is_left_can_be_dropped(tmp_path, open_store):
    killed(tmp_path, snapshot(tmp_path / "s", 1), "write", 3)
    store = open_store(**SETTINGS)
    store.drop(MODEL, 1)
    assert store.model(MODEL).catalogue.unfinished == {}
    assert not (tmp_path / "data/models/ctr/1").exists()


def test_a_cancelled_load_goes_on_and_so_does_one_that_a_shutdown_ended(tmp_path, open_store):
    source, cancelled = snapshot(tmp_path / "s", 1), threading.Event()
    store = open_store(**SETTINGS)

    def cancel(step: Progress) -> None:
        if step.phase == "write" and step.done:
            cancelled.set()

    with pytest.raises(LoadCancelled):
        store.load_snapshot(source, progress=cancel, cancelled=cancelled)
    assert list(store.model(MODEL).catalogue.unfinished) == [1]

    def close(step: Progress) -> None:
        if step.phase == "verify":
            store.close()

    with pytest.raises(tierstore.Closed):
        store.load_snapshot(source, progress=close)
    store = open_store(**SETTINGS)
    assert list(store.model(MODEL).catalogue.unfinished) == [1]
    steps = first_steps(store, source)
    assert (steps["read"].done, steps["write"].done) == (ROWS, ROWS)
    assert right(store)


@pytest.mark.thorough
def test_a_version_that_was_switched_to_since_is_not_loaded_again(tmp_path, open_store):
    """What broke off was the switch; somebody has made up for it."""
    source = snapshot(tmp_path / "s", 1)
    killed(tmp_path, source, "warm")
    store = open_store(**SETTINGS)
    store.activate(MODEL, 1)
    store.load_snapshot(snapshot(tmp_path / "newer", 2))
    with pytest.raises(Conflict, match="there already"):
        store.load_snapshot(source)
