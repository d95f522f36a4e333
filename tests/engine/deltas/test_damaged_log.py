"""A delta log that somebody, or a disk, has damaged: the problem of one model, which serves nothing that it lacks deltas for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.lifecycle.test_start import SMALL, item, loaded
from tests.engine.test_store import folded
from tests.formats.disks import ForgetfulDisk
from tierstore.engine.deltas.log import DeltaLog, NewEntry
from tierstore.engine.serving.state_file import StateFile
from tierstore.errors import Corruption, NotReady, SnapshotError, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory

pytestmark = pytest.mark.usefixtures("quick_loads")


def deltas(store: tierstore.Store, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        store.apply_delta(scenes.stamped(seq, {"item": [seq], "user": [1]}))


def holds(store: tierstore.Store, *seqs: int) -> bool:
    return all(item(store, seq) == scenes.vector("item", seq, seq)[0] for seq in seqs)


def entries(log: Path) -> list[Path]:
    return sorted(log.glob("*.arrow"))


def lose_one(log: Path) -> None:
    entries(log)[1].unlink()


def lose_two(log: Path) -> None:
    for entry in entries(log)[:2]:
        entry.unlink()


def have_one_twice(log: Path) -> None:
    entry = entries(log)[1]
    shutil.copy(entry, entry.with_name(f"{entry.name[:20]}-{'0' * 16}.arrow"))


def forget_start(log: Path) -> None:
    """As where another document was put in place."""
    path = log.parent / "state.json"
    document = json.loads(path.read_text())
    del document["xxh3"]
    path.write_text(json.dumps(document | {"log_start": None}))


def no_directory(log: Path) -> None:
    shutil.rmtree(log)
    log.write_bytes(b"")


DAMAGES = [
    pytest.param(lose_one, "delta 2 is missing, before 00000000000000000003", id="one missing"),
    pytest.param(lose_two, "deltas 1 to 2 are missing", id="two missing"),
    pytest.param(have_one_twice, "have the same seq", id="one twice"),
    pytest.param(forget_start, r"state\.json does not say where the log begins, and there are deltas", id="no start"),
    pytest.param(no_directory, "cannot be used", id="no directory"),
]


def put_back(kept: Path, log: Path) -> None:
    if log.is_dir():
        shutil.rmtree(log)
    else:
        log.unlink()
    shutil.copytree(kept, log)


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_log_is_the_problem_of_one_model_until_it_is_restored(open_store, tmp_path, caplog, damage, why):
    store = open_store(fold_grace_s=60)
    log = loaded(store, tmp_path, 1) / "log"
    loaded(store, tmp_path, 1, model="other")
    deltas(store, 1, 4)
    store.close()
    shutil.copytree(log, tmp_path / "kept")
    shutil.copy(log.parent / "state.json", tmp_path)
    damage(log)
    store = open_store(fold_grace_s=60)
    assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
    ctr = store.model("ctr")
    assert not ctr.ready, "better nothing than rows without an acknowledged delta"
    with pytest.raises(NotReady, match=why):
        item(store, 1)
    with pytest.raises(TierstoreError, match=why):
        store.activate("ctr", 1, force=True)
    for seq in (2, 5):  # one that may be lost, and the next
        with pytest.raises(NotReady, match=why):
            deltas(store, seq, seq)
    status = store.status("ctr")["models"]["ctr"]
    assert status["active_version"] is None
    for words in (status["problem"], "\n".join(store.verify().problems), caplog.text):
        assert re.search(why, words)
    with pytest.raises((SnapshotError, StorageError), match=why):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=1, rows=SMALL))
    store.close()
    put_back(tmp_path / "kept", log)
    shutil.copy(tmp_path / "state.json", log.parent)
    store = open_store()
    assert holds(store, 1, 2, 3, 4)
    assert store.model("ctr").problem is None
    deltas(store, 5, 5)
    folded(store)
    assert store.verify().ok


@pytest.mark.parametrize(("damage", "why"), DAMAGES[:-2])
def test_a_snapshot_beyond_what_is_lost_mends_the_log(open_store, tmp_path, damage, why):
    store = open_store(fold_grace_s=60)
    log = loaded(store, tmp_path, 1) / "log"
    deltas(store, 1, 4)
    store.close()
    damage(log)
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2, delta_seq=4, rows=SMALL))
    with pytest.raises(TierstoreError):
        store.rollback("ctr")  # it lacks what is lost
    deltas(store, 5, 6)
    store.drop("ctr", 1)
    store.close()
    store = open_store()
    assert holds(store, 5, 6)
    assert store.status()["models"]["ctr"]["log"]["last"] == 6


def test_what_is_lost_below_the_watermark_keeps_nothing_from_serving(open_store, tmp_path):
    store = open_store()
    log = loaded(store, tmp_path, 1, 2, active=2) / "log"
    deltas(store, 1, 4)
    folded(store)
    store.close()
    lose_one(log)
    store = open_store(fold_grace_s=60)
    assert holds(store, 1, 2, 3, 4)
    assert "delta 2 is missing" in store.model("ctr").problem
    deltas(store, 5, 5)
    with pytest.raises(Corruption, match="delta 2 is missing"):
        store.activate("ctr", 1, force=True)  # version 1 lacks it
    assert not store.apply_delta(scenes.stamped(2, {"item": [2], "user": [1]})).applied
    store.close()
    store = open_store()
    assert holds(store, 1, 2, 3, 4, 5)
    folded(store)
    store.drop("ctr", 1)
    store.model("ctr").housekeeping.tasks.run()
    assert "delta 2" in (store.model("ctr").problem or ""), "as long as entries from before are kept"
    store.model("ctr").state.log.prune(5)
    assert store.model("ctr").problem is None


def test_a_version_that_holds_all_goes_on_where_the_whole_log_is_gone(open_store, tmp_path):
    store = open_store()
    log = loaded(store, tmp_path, 1) / "log"
    deltas(store, 1, 4)
    folded(store)
    store.close()
    shutil.rmtree(log)
    store = open_store()
    assert "deltas 1 to 4 are missing" in store.model("ctr").problem
    deltas(store, 5, 5)
    assert holds(store, 1, 2, 3, 4, 5)


def test_a_log_that_begins_again_earlier_looks_whole_after_power_failed(tmp_path):
    """Though the system has written what the end was before by itself."""
    where = ModelDirectory(tmp_path / "ctr")
    disk = ForgetfulDisk(tmp_path)
    with files.use(disk):
        files.make_dir(where.log)
        log = DeltaLog(where, StateFile(where, "ctr"))
        log.restart(0)
        for seq in range(1, 6):
            log.append(NewEntry(seq, b"delta", f"{seq:016x}"))
        with open(where.log_end, "rb") as end:
            disk.fsync(end)
        for folder in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
            disk.fsync_dir(folder)
        log.restart(2)
        disk.lose_power()
        again = DeltaLog(where, StateFile(where, "ctr"))
    assert (again.damage, again.last) == ([], 2)
