"""Rows that expire beside look-ups, slow readers, deltas, switches, errors of the disk and kills: no row that lives is lost."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.test_store import folded
from tests.engine.ttl_scenes import (
    DAY,
    NOW,
    ROWS,
    WAIT_S,
    OpenStore,
    check,
    delta,
    expiry_of,
    found,
    rows_of,
    user,
    write,
)
from tierstore.engine.lifecycle import expiry
from tierstore.engine.versions import expiry as steps
from tierstore.errors import StorageError
from tierstore.formats.row_times import TIME_BYTES

pytestmark = pytest.mark.usefixtures("quick_loads")


# --- beside readers


@pytest.mark.counted
def test_look_ups_go_on_and_find_all_that_lives(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(steps, "_MOST_KEYS", 1)  # then the least that a step may have, 1,024
    rows = few_or_many(5_000, 20_000)
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        keys = np.arange(rows)
        table = snapshot.table("user", dim=4, ttl_s="30d", time_column="seen")
        table.write(keys, rows_of(keys, 1), np.where(keys % 2, NOW, NOW - 20 * DAY))
    store = open_store(host_budget=f"{rows // 80}KiB")  # too little for all
    store.load_snapshot(tmp_path / "s")
    ctr, stop, random = store.model("ctr"), threading.Event(), np.random.default_rng(1)
    asked = [np.unique(random.integers(0, rows, 500)) for _ in range(64)]

    def look_up(number: int) -> int:
        done = 0
        while not stop.is_set():
            keys = asked[(number + done) % len(asked)]
            got, there = ctr.lookup("user", keys, return_found=True)
            lives = keys % 2 == 1
            assert there[lives].all(), "what lives is found"
            assert np.array_equal(got[lives], rows_of(keys[lives], 1))
            done += 1
        return done

    seq = 0
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(look_up, number) for number in range(2)]
        try:
            days_later(20)
            for _ in range(3):
                seq += 1
                store.apply_delta(delta(seq, [seq * 2], days=19))
            check(store)
            store.apply_delta(delta(seq + 1, [1000], days=19))
            check(store)
        finally:
            stop.set()
        assert all(future.result(WAIT_S) for future in futures)
    revived = {2, 4, 6, 1000}
    assert ctr.problem is None
    for _ in range(2):  # from disk, and from what the first time has put into memory
        assert found(store, np.arange(rows)) == set(range(1, rows, 2)) | revived


def test_a_row_that_a_slow_reader_brings_into_memory_is_forgotten(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "_READERS_S", 0.05)
    store = open_store()
    store.load_snapshot(write(tmp_path))
    ctr = store.model("ctr")
    days_later(20)
    slow = ctr.view()
    with slow as view:
        table = view.open_version.tables["user"]
        keys = np.array([398, 399])
        read = table.read_rows(keys, view.seq)
        check(store)
        assert "expired rows are not removed: requests that began" in str(ctr.problem)
        table.promote(view.seq, keys, read[0], read[2])
        assert {398, 399} <= found(store), "of memory: the reader has brought them there"
    scenes.housekeep(store)
    assert ctr.problem is None
    assert found(store) == set(range(201))


def test_requests_that_take_long_keep_the_check_of_no_other_model_waiting(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    """The threads of housekeeping are few: while such requests last, they are there for the other models."""
    store = open_store()
    store.load_snapshot(write(tmp_path))
    ctr = store.model("ctr")
    search = expiry_of(store)
    days_later(20)
    with ctr.view():
        check(store)
        assert found(store) == set(range(201))
        assert ctr.problem is None, "it has not lasted for long"
        assert not ctr.housekeeping.tasks._running.locked(), "the thread is free"
        (removed,) = search._to_forget.values()
        waits_for = set(removed.views or ())
        assert len(waits_for) == 1
        with ctr.view():  # one that began later, and lasts longer
            scenes.housekeep(store)
            assert set(removed.views or ()) == waits_for
        del waits_for
    scenes.housekeep(store)
    assert not search._to_forget
    assert ctr.problem is None


def test_a_version_that_goes_while_a_request_reads_it_is_kept_by_no_check(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path, 1))
    search = expiry_of(store)
    days_later(20)
    with store.model("ctr").view() as view:
        check(store)
        assert len(search._to_forget) == 1
        store.load_snapshot(write(tmp_path, 2))
        assert view.version == 1
    del view
    assert store.model("ctr").state.retiring.wait_closed(1, WAIT_S)
    # a thread in the background may have it in hand for a moment
    scenes.eventually(lambda: gc.collect() >= 0 and len(search._to_forget) == 0, "nothing keeps it")


def test_a_key_that_a_delta_revives_meanwhile_is_not_forgotten(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "_READERS_S", 0.05)
    store = open_store()
    store.load_snapshot(write(tmp_path))
    days_later(20)
    ctr = store.model("ctr")
    with ctr.view():
        check(store)
    store.apply_delta(delta(1, [399], days=20))
    folded(store)
    assert 399 in found(store)  # in memory now
    scenes.housekeep(store)
    assert ctr.problem is None
    for _ in range(2):
        assert found(store) == {*range(201), 399}


def test_what_a_delta_writes_between_the_search_and_the_step_lives(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    days_later(20)
    search = steps.old_keys

    def then_a_delta(*arguments: Any) -> Any:
        for keys in search(*arguments):
            if len(keys):
                store.apply_delta(delta(1, [399], days=20))
                folded(store)
            yield keys

    monkeypatch.setattr(expiry, "old_keys", then_a_delta)
    check(store)
    assert found(store) == {*range(201), 399}


def test_a_switch_ends_a_search_and_the_next_version_is_searched(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path, 1))
    store.load_snapshot(write(tmp_path, 2), activate=False)
    days_later(20)
    ctr, search = store.model("ctr"), steps.old_keys

    def then_a_switch(version: Any, *arguments: Any) -> Any:
        for keys in search(version, *arguments):
            if version.number == 1 and len(keys):
                store.activate("ctr", 2)
            yield keys

    monkeypatch.setattr(expiry, "old_keys", then_a_switch)
    ctr.housekeeping.tasks.run()
    assert ctr.problem is None
    assert found(store) == set(range(ROWS)), "the second is not searched yet"
    assert ctr.state.retiring.wait_closed(1, WAIT_S)
    check(store)
    assert found(store) == set(range(201))


# --- failures and crashes


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_step_that_fails_leaves_every_row_whole_and_is_done_next_time(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    disk = store.model("ctr").publisher.current.open_version.disk  # type: ignore[union-attr]
    search, make_change, calls = steps.old_keys, disk.change, [0]

    def in_small_steps(*arguments: Any) -> Any:
        for keys in search(*arguments):
            yield from np.array_split(keys, max(1, len(keys) // 50))

    def failing(*change: Any) -> None:
        calls[0] += 1
        if calls[0] == nth:
            raise StorageError("injected failure")
        make_change(*change)

    monkeypatch.setattr(expiry, "old_keys", in_small_steps)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "change", failing)
        days_later(20)
        check(store)
        assert store.model("ctr").problem == "expired rows are not removed: injected failure"
    left = found(store)
    assert set(range(201)) < left
    assert user(store)["rows"] == len(left)
    assert store.verify().ok
    store.close()
    store = open_store()
    assert found(store) == left
    check(store)
    assert store.model("ctr").problem is None
    assert found(store) == set(range(201))
    assert user(store)["ttl"]["expired_since"] == 199


CRASH = """
    import os, signal, sys
    import numpy as np
    import tierstore
    from types import SimpleNamespace
    from tierstore.engine.lifecycle import expiry
    from tierstore.tiers.disk.tier import DiskTier

    before, search, ingest, calls = sys.argv[2] == "before", expiry.old_keys, DiskTier.ingest, [0]

    def dying(self, files):
        calls[0] += 1
        if calls[0] == 2 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        ingest(self, files)
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    store = tierstore.open(sys.argv[1], host_budget="4MiB", disk_threads=2, fold_grace_s=60, ttl_most_share=1)
    DiskTier.ingest = dying
    expiry.old_keys = lambda *of: (part for keys in search(*of) for part in np.array_split(keys, max(1, len(keys) // 50)))
    expiry.time = SimpleNamespace(time=lambda: float(sys.argv[3]), monotonic=lambda: 0.0)
    store.model("ctr").housekeeping.tasks.run()
"""


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.thorough), "after"])
def test_a_kill_in_the_middle_loses_no_row_that_lives(
    open_store: OpenStore, tmp_path: Path, days_later: Any, moment: str
) -> None:
    store = open_store(fold_grace_s=60)
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [390, 402], days=5))
    store.close()
    program = [sys.executable, "-c", textwrap.dedent(CRASH), str(tmp_path / "data"), moment, str(NOW + 20 * DAY)]
    done = subprocess.run(program, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = open_store()
    folded(store)
    left = found(store)
    assert {*range(201), 390, 402} < left < {*range(ROWS), 402}
    assert store.verify().ok
    days_later(20)
    check(store)
    assert found(store) == {*range(201), 390, 402}
    assert user(store)["rows"] == 203
    assert store.verify().ok


def test_verify_notices_a_row_without_a_time(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    version = store.model("ctr").publisher.current.open_version  # type: ignore[union-attr]
    gone = version.info.times_ids["user"], np.array([5]), np.zeros((1, TIME_BYTES), np.uint8), np.array([True])
    version.disk.change(tmp_path / "data" / "lone.sst", {"watermark": b"0"}, [gone])
    assert store.verify().problems == ("ctr version 1: table 'user' has 400 rows and 399 times of rows",)
    with pytest.raises(tierstore.TierstoreError, match="not of the same keys"):
        store.export("ctr", tmp_path / "out")
