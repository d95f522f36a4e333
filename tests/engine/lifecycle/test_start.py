"""A start on a directory that somebody, or a crash, or a failing disk, has left in a strange state: nothing is lost by it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_store import folded
from tests.formats.disks import FailingDisk
from tierstore.engine.deltas.replay import catch_up
from tierstore.engine.serving.document import read_document
from tierstore.errors import Closed, Locked, NotFound, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.files import FileSystem
from tierstore.formats.names import ModelDirectory

pytestmark = pytest.mark.usefixtures("quick_loads")

SMALL = {"user": 20, "item": 30}


def loaded(store: tierstore.Store, root: Path, *versions: int, model: str = "ctr", active: int = 0) -> Path:
    """Loads versions, of which `active`, or else each in turn, is activated. Returns the model's directory."""
    for version in versions:
        where = scenes.write_snapshot(root, version, stamp=version, model=model, rows=SMALL)
        store.load_snapshot(where, activate=active in (0, version))
    return root / "data/models" / model


def item(store: tierstore.Store, key: int, model: str = "ctr") -> float:
    return float(store.model(model).lookup("item_id", [key])[0, 0])


# --- the limit of open files

OPENED = """
import resource, sys, tierstore
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
with tierstore.open(sys.argv[1], host_budget="1MiB") as store:
    store.model("a").lookup("item_id", [1]), store.model("c").lookup("item_id", [1])
    print(len(store.models()), store.status()["problems"])
"""


@pytest.mark.thorough
def test_a_limit_of_open_files_that_is_too_low_is_one_error_and_nothing_opens(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store()
    for model in "abc":
        loaded(store, tmp_path, 1, model=model)
    store.close()

    def opened(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", OPENED, str(tmp_path / "data"), str(soft), str(hard)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    refused = opened(80, 80)
    assert refused.returncode == 1
    assert re.search(
        r"StorageError: what \S+/data serves needs about \d+ open files, and this process may have 80", refused.stderr
    )
    assert "Too many open files" not in refused.stderr
    assert opened(48, 200).stdout == "3 []\n"  # the soft limit is the process's own to raise


def test_a_model_at_rest_has_no_thread(open_store: Callable[..., tierstore.Store], tmp_path: Path) -> None:
    store = open_store()
    loaded(store, tmp_path, 1)
    one = threading.active_count()
    for model in "abc":
        loaded(store, tmp_path, 1, model=model)
        store.apply_delta(scenes.delta(1, {"item": ([3], scenes.vectors("item", 9, [3]))}, model=model))
        folded(store, model)
    scenes.eventually(lambda: threading.active_count() <= one, "nothing of them runs")


def files_of(store: tierstore.Store) -> list[str]:
    """What is open of its models."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if store.root.models in path.parents:
                found.append(path.name)
    return found


def test_a_model_at_rest_has_no_file_open_and_answers_changes_and_is_checked_as_before(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store(host_budget="1MiB", keep_versions=9)
    for model in "ab":
        loaded(store, tmp_path, 1, model=model)
    store.close()
    store = open_store(host_budget="1KiB")  # every look-up reads the disk
    before = store.status()["models"]["a"]["disk"]
    for seq in range(1, 4):
        for model in "ab":
            assert item(store, 5, model) == scenes.vector("item", 1, 5)[0]
            store.apply_delta(scenes.delta(seq, {"item": ([seq], scenes.vectors("item", 9, [seq]))}, model=model))
            folded(store, model)
            assert files_of(store)
        for model in "ab" * 2:  # the second time finds that nothing was read since the first
            store.model(model).housekeeping.tasks.run()
        scenes.eventually(lambda: not files_of(store), "all is closed")
        assert store.status()["models"]["a"]["disk"].keys() == before.keys()
        assert not files_of(store), "status opens nothing"
        for key in range(1, seq + 1):
            assert item(store, key, "a") == scenes.vector("item", 9, key)[0]
    loaded(store, tmp_path, 2, model="a")
    assert item(store, 3, "a") == scenes.vector("item", 9, 3)[0]
    assert (store.rollback("a"), store.verify().ok) == (1, True)
    for _ in range(2):
        store.model("b").housekeeping.tasks.run()
    (base,) = (tmp_path / "data/models/b/1/db/base").glob("*item*.sealed")
    data = base.read_bytes()
    base.write_bytes(data[:-16] + bytes(8) + data[-8:])
    store.model("b").housekeeping.tasks.run()
    assert "was written over since it was opened" in (store.model("b").problem or "")


# --- the log


class Stubborn(FileSystem):
    """Cannot sync names, nor take them away again."""

    def fsync_dir(self, path):
        raise OSError(errno.EIO, "injected failure")

    def unlink(self, path):
        raise OSError(errno.EIO, "injected failure")


def test_a_delta_that_failed_and_could_not_be_taken_back_does_not_come_back_beside_another(open_store, tmp_path):
    store = open_store()
    log = loaded(store, tmp_path, 1) / "log"
    with files.use(Stubborn()), pytest.raises(StorageError):
        store.apply_delta(scenes.stamped(1, {"item": [1]}))
    assert item(store, 1) == scenes.vector("item", 1, 1)[0], "of the snapshot"
    with files.use(Stubborn()), pytest.raises(StorageError):
        store.apply_delta(scenes.stamped(1, {"item": [2]}))
    store.apply_delta(scenes.delta(1, {"item": ([3], scenes.vectors("item", 9, [3]))}))
    assert len(list(log.glob("*.arrow"))) == 1
    store.close()
    assert item(open_store(), 3) == scenes.vector("item", 9, 3)[0]


def test_the_log_keeps_what_a_stale_version_that_serves_has_not_folded(open_store, tmp_path):
    store = open_store(fold_grace_s=60, log_retention_s=0)
    loaded(store, tmp_path, 1)
    where = scenes.write_snapshot(tmp_path, 2, stamp=2, rows=SMALL, delta_seq=10)
    store.load_snapshot(where)
    store.activate("ctr", 1, force=True)
    for seq in (11, 12):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    ctr = store.model("ctr")
    with ctr.state.switch, ctr.opener.opened(ctr.catalogue.info(2)) as version:
        catch_up(version, ctr.state.log, ctr.dense)
    ctr.housekeeping.tasks.run()
    store.close()
    store = open_store()
    assert store.model("ctr").active_version == 1
    assert [item(store, seq) for seq in (11, 12)] == [scenes.vector("item", seq, seq)[0] for seq in (11, 12)]


# --- versions


def test_what_cannot_be_told_apart_from_a_leftover_is_not_removed(open_store, tmp_path, monkeypatch):
    """The disk does not answer whether version.json is there."""
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    stat = os.stat

    def failing(path, *args, **options):
        if str(path) == str(root / "1/version.json"):
            raise OSError(errno.EIO, "injected failure")
        return stat(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "stat", failing)
        store = open_store()
    ctr = store.model("ctr")
    assert (ctr.versions, ctr.active_version, list(ctr.catalogue.damaged)) == ([2], 2, [1])
    store.close()
    store = open_store()
    store.rollback("ctr")
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_whose_record_is_gone_is_damaged_and_no_leftover(open_store, tmp_path, version):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    record = root / str(version) / "version.json"
    record.rename(tmp_path / "kept")
    store = scenes.swept(open_store())
    assert "version.json is missing" in store.status()["models"]["ctr"]["damaged"][str(version)]
    assert any("version.json is missing" in problem for problem in store.verify().problems)
    store.close()
    (tmp_path / "kept").rename(record)
    store = open_store()
    assert item(store, 1) == scenes.vector("item", 2, 1)[0]
    store.rollback("ctr")
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


@pytest.mark.parametrize("record", ["{", '{"format": 1}', '{"format": 2, "manifest": {}, "tables": {}}', "[]"])
def test_a_version_whose_record_makes_no_sense_is_damaged_and_can_be_dropped(open_store, tmp_path, record):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    (root / "1/version.json").write_text(record)
    store = open_store()
    ctr = store.model("ctr")
    assert (ctr.active_version, list(ctr.catalogue.damaged)) == (2, [1])
    assert "version.json" in store.status()["models"]["ctr"]["damaged"]["1"]
    store.drop("ctr", 1)
    assert store.status()["models"]["ctr"]["damaged"] == {}
    assert not (root / "1").exists()
    assert store.verify().ok
    with pytest.raises(NotFound):
        store.drop("ctr", 1)


def test_a_version_in_another_ones_directory_is_damaged(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1)
    store.close()
    shutil.copytree(root / "1", root / "7")
    store = open_store()
    assert (store.model("ctr").versions, list(store.model("ctr").catalogue.damaged)) == ([1], [7])
    store.drop("ctr", 7)
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_a_verb_that_comes_too_late_changes_nothing_of_a_closed_store(open_store, tmp_path):
    """The directory may be somebody else's by then."""
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    ctr = store.model("ctr")
    store.close()
    for verb in (ctr.switcher.deactivate, lambda: ctr.drops.drop(1)):
        with pytest.raises(Closed):
            verb()
    assert read_document(ModelDirectory(root), "ctr").routes.active == 2
    assert open_store().model("ctr").versions == [1, 2]


def test_a_load_that_fails_does_not_take_a_damaged_version_with_it(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1, active=9)
    store.close()
    record = (root / "1/version.json").read_bytes()
    (root / "1/version.json").write_bytes(b"{")
    store = open_store()
    where = scenes.write_snapshot(tmp_path, 2)
    with files.use(FailingDisk(3)), pytest.raises(TierstoreError):
        store.load_snapshot(where)
    assert store.models() == ["ctr"]
    store.close()
    (root / "1/version.json").write_bytes(record)
    store = open_store()
    store.activate("ctr", 1)
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_what_a_crash_has_left_within_a_version_goes_at_the_next_start(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    remains = [root / "1/build/delta-7.sst", root / "2/.tmp-dense.onnx-00", root / "2/hot/.tmp-user.npy-00"]
    for path in remains:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    store = scenes.swept(open_store())
    assert [path for path in remains if path.exists()] == []
    store.rollback("ctr")
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_rubbish_that_cannot_be_removed_keeps_nothing_from_serving(open_store, tmp_path):
    """A helper of a load whose owner was killed may be writing in it for a moment longer."""

    class Busy(FileSystem):
        def rmtree(self, path):
            raise OSError(errno.ENOTEMPTY, "injected failure")

    store = open_store()
    root = loaded(store, tmp_path, 1)
    store.close()
    for name in ("7/build", ".trash-6-00/build"):
        (root / name).mkdir(parents=True)
    with files.use(Busy()):
        store = scenes.swept(open_store())
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]
    assert not store.model("ctr").catalogue.damaged
    store.close()
    scenes.swept(open_store())
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"1", "log"}


def test_rubbish_that_cannot_be_renamed_makes_no_version_damaged(open_store, tmp_path):
    """Of a load or a fold that was cut off, of a line that no longer counts, and of a load that left nothing."""

    class Held(FileSystem):
        def rename(self, old, new):
            if new.name.startswith(".trash-"):
                raise OSError(errno.EBUSY, "injected failure")
            super().rename(old, new)

    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    remains = [root / "1/build", root / "2/build", root / "2.1", root / "7"]
    for path in remains:
        path.mkdir()
        (path / "x").write_bytes(b"x")
    with files.use(Held()):
        store = scenes.swept(open_store())
        ctr = store.model("ctr")
        assert (ctr.versions, ctr.catalogue.damaged, ctr.problem) == ([1, 2], {}, None)
        assert item(store, 1) == scenes.vector("item", 2, 1)[0]
        store.rollback("ctr")
        assert item(store, 1) == scenes.vector("item", 1, 1)[0]
        store.close()
    scenes.swept(open_store())
    assert [path for path in remains if path.exists()] == []


def test_a_damaged_version_keeps_no_other_one_from_being_caught_up(open_store, tmp_path, monkeypatch):
    store = open_store(keep_versions=9)
    root = loaded(store, tmp_path, 1, 2, 3)
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    folded(store)
    ctr = store.model("ctr")
    for version in (1, 2):
        assert ctr.state.retiring.wait_closed(version, 30)
    (root / "1/db/CURRENT").write_bytes(b"no such manifest\n")
    monkeypatch.setattr("tierstore.engine.lifecycle.tasks.KEPT_LAG", 0)
    ctr.housekeeping.tasks.run()
    assert [info.watermark for info in ctr.catalogue.infos()] == [0, 1, 1]
    assert "kept versions are not caught up: " in ctr.problem
    assert "folded" not in ctr.problem


# --- the document and LOCK


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"one", b"{}", b'{"format": 9}', None])
def test_a_document_that_makes_no_sense_is_the_problem_of_one_model(open_store, tmp_path, content):
    store = open_store()
    root = loaded(store, tmp_path, 1)
    loaded(store, tmp_path, 1, model="other")
    store.close()
    whole = (root / "state.json").read_bytes()
    (root / "state.json").unlink() if content is None else (root / "state.json").write_bytes(content)
    store = open_store()
    assert "state.json" in store.model("ctr").problem
    assert "start that release again" in store.model("ctr").problem or "xxh3" in store.model("ctr").problem
    assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
    with pytest.raises(TierstoreError, match=r"state\.json"):
        store.activate("ctr", 1)
    store.close()
    (root / "state.json").write_bytes(whole)
    store = open_store()
    assert store.model("ctr").problem is None
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_a_store_opens_on_a_full_disk_though_it_cannot_write_its_number(open_store, tmp_path, monkeypatch):
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.engine.lifecycle.directory_lock.os.write", full)
        store = open_store()
    with pytest.raises(Locked, match="open in this process already"):
        open_store()
    store.close()
    open_store()


def test_a_closed_store_can_be_opened_though_a_forked_process_lives_on(open_store):
    store = open_store()
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:  # it does nothing but hold what it has inherited
        os.close(theirs)
        select.select([ours], [], [], 60)
        os._exit(0)
    os.close(ours)
    try:
        store.close()
        open_store()
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
