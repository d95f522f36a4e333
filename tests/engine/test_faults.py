"""Disks that fail and machines that lose power: what served goes on serving, and what was acknowledged stays.

Each operation is tried with its first file operation failing, then its second, and so on until one run has none
that fails. After every failure the operation must have changed nothing, and then work when it is repeated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.test_store import folded
from tests.formats.disks import FailingDisk
from tierstore.engine.lifecycle.housekeeping import COMPACTING
from tierstore.engine.model import Model
from tierstore.errors import Corruption, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.files import FileSystem

pytestmark = pytest.mark.usefixtures("quick_loads")

KEYS = np.array([*range(0, 1000, 37), 999, 1000, 5000, -1, 2**63 - 1, -(2**63)])
Rows = dict[str, tuple[np.ndarray, np.ndarray]]


def rows_of(store: tierstore.Store) -> Rows:
    with store.model("ctr").view() as view:
        return {name: view.lookup(name, KEYS, return_found=True) for name in ("user_id", "item_id")}


def same(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(a[name][i], b[name][i]) for name in a for i in (0, 1))


def numbers(store: tierstore.Store) -> dict[str, Any]:
    """What must not change when something fails, whether or not the store is opened again."""
    model = store.status()["models"]["ctr"]
    return {
        "active": model["active_version"],
        "versions": [(entry["version"], entry["state"]) for entry in model["versions"]],
        "watermark": model["watermark"],
        "log": model["log"],
        "problem": model["problem"],
    }


class Scene:
    """A store with versions 1 and 2 (active), deltas 1 to 5 that are not folded, and 6 to come."""

    def __init__(self, tmp_path: Path, open_store: Callable[..., tierstore.Store]) -> None:
        self.tmp_path, self._open = tmp_path, lambda: open_store(fold_grace_s=60, keep_versions=99)
        self.store = self._open()
        self.version, self.seq = 2, 0
        self.latest = 2
        for version in (1, 2):
            self.store.load_snapshot(
                scenes.write_snapshot(tmp_path, version, stamp=version, rows={"user": 200, "item": 300})
            )
        for _ in range(5):
            self.delta()

    def delta(self) -> None:
        seq = self.seq + 1
        keys = {"item": [37 * (seq % 8), 1000, seq], "user": [37 * (seq % 8), 5000, seq]}
        gone = {"item": [999], "user": [37 * (seq % 3)]}
        upserts = {table: (of, scenes.vectors(table, seq, of)) for table, of in keys.items()}
        self.store.apply_delta(scenes.delta(seq, upserts, gone))
        self.seq = seq

    def fresh(self, *, behind: int = 0) -> Callable[[], Any]:
        """Load a new snapshot; `behind` may be negative: beyond the log."""
        model = self.store.model("ctr")
        for number in {*model.versions} - {1, 2, model.active_version}:
            self.store.drop("ctr", number)
        self.latest += 1
        version = self.latest
        where = scenes.write_snapshot(
            self.tmp_path,
            version,
            stamp=version,
            delta_seq=self.seq - behind,
            rows={"user": 200, "item": 300},
            dense=scenes.some_dense(),
        )

        def load() -> None:
            self.store.load_snapshot(where)
            self.version = version
            self.seq = max(self.seq, self.seq - behind)

        return load

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()


def apply_delta(scene: Scene) -> Callable[[], Any]:
    return scene.delta


def load(scene: Scene) -> Callable[[], Any]:
    return scene.fresh(behind=3)


def load_beyond_the_log(scene: Scene) -> Callable[[], Any]:
    scene.delta()  # so that the restart has something to forget
    return scene.fresh(behind=-10)


def activate(scene: Scene) -> Callable[[], Any]:
    other = 1 if scene.store.model("ctr").active_version == 2 else 2
    return lambda: scene.store.activate("ctr", other)


def rollback(scene: Scene) -> Callable[[], Any]:
    if scene.store.model("ctr").active_version != 2:
        scene.store.activate("ctr", 2)
    return lambda: scene.store.rollback("ctr")


def drop(scene: Scene) -> Callable[[], Any]:
    scene.fresh()()
    number = scene.version
    scene.store.activate("ctr", 2)
    return lambda: scene.store.drop("ctr", number)


def deactivate(scene: Scene) -> Callable[[], Any]:
    if scene.store.model("ctr").active_version is None:
        scene.store.activate("ctr", 2)
    return lambda: scene.store.deactivate("ctr")


def step_of(prepare: Callable[..., Any]) -> int:
    """Loads have dozens of file operations, of which each try takes a load: with small counts each third fails."""
    return few_or_many(3, 1) if prepare in (load, load_beyond_the_log) else 1


@pytest.mark.thorough
@pytest.mark.parametrize("reopen", [False, True], ids=["goes on", "reopens"])
@pytest.mark.parametrize("prepare", [apply_delta, load, load_beyond_the_log, activate, rollback, deactivate])
def test_whichever_file_operation_fails_nothing_changes_and_a_second_try_works(tmp_path, open_store, prepare, reopen):
    scene = Scene(tmp_path, open_store)
    for fail_at in range(0, 200, step_of(prepare)):
        attempt = prepare(scene)
        before, served = numbers(scene.store), rows_of(scene.store)
        disk = FailingDisk(fail_at)
        try:
            with files.use(disk):
                attempt()
        except TierstoreError:
            if reopen:
                scene.reopen()
            if prepare in (load, load_beyond_the_log) and scene.latest in scene.store.model("ctr").versions:
                scene.store.drop("ctr", scene.latest)  # only the switch to it has failed
            assert numbers(scene.store) == before, f"operation {fail_at} failed"
            assert same(rows_of(scene.store), served)
            attempt()
        if disk.operations <= fail_at:
            break
        problem = scene.store.model("ctr").problem  # of background work that met the failure, which tries again in 30 s
        assert problem is None or problem.startswith(COMPACTING)
    else:
        pytest.fail("never came to an end")
    assert fail_at >= 1
    if scene.store.model("ctr").active_version is None:
        scene.store.activate("ctr", 2)
    expected, versions = rows_of(scene.store), scene.store.model("ctr").versions
    scene.reopen()
    assert same(rows_of(scene.store), expected)
    assert scene.store.model("ctr").versions == versions
    scene.delta()
    report = scene.store.verify()
    assert report.ok, report.problems
    below = tmp_path / "data/models/ctr"
    unfinished = (".tmp-", ".trash-")  # a fold in the background has one for a moment
    scenes.eventually(lambda: not any(path.name.startswith(unfinished) for path in below.rglob("*")), "nothing is left")


@pytest.mark.parametrize("reopen", [False, True], ids=["goes on", "reopens"])
def test_a_drop_that_fails_leaves_the_version_whole_or_gone(tmp_path, open_store, reopen):
    scene = Scene(tmp_path, open_store)
    for fail_at in range(20):
        attempt = drop(scene)
        number, served = scene.version, rows_of(scene.store)
        disk = FailingDisk(fail_at)
        try:
            with files.use(disk):
                attempt()
        except StorageError:
            if reopen:
                scene.reopen()
            if number in scene.store.model("ctr").versions:
                scene.store.activate("ctr", number)
                scene.store.activate("ctr", 2)
                attempt()
        assert scene.store.model("ctr").versions == [1, 2]
        assert not (tmp_path / f"data/models/ctr/{number}").exists()
        assert same(rows_of(scene.store), served)
        if disk.operations <= fail_at:
            return
    pytest.fail("never came to an end")


@pytest.mark.counted
def test_a_first_load_that_fails_leaves_no_model(tmp_path, open_store):
    where = scenes.write_snapshot(tmp_path)
    for fail_at in range(0, 300, few_or_many(9, 1)):
        store = open_store()
        disk = FailingDisk(fail_at)
        try:
            with files.use(disk):
                store.load_snapshot(where)
        except TierstoreError:
            kept = (
                store.models()
            )  # with the version, if only the switch to it has failed; or with a load that can go on
            store.close()
            store = open_store()
            assert store.models() == kept
            remaining = [path.name for path in (tmp_path / "data/models").iterdir() if not path.name.startswith(".")]
            assert remaining == kept
            if kept and store.model("ctr").versions:
                assert store.model("ctr").versions == [1]
                store.activate("ctr", 1)
            elif kept:
                assert store.status()["models"]["ctr"]["unfinished"]
                assert store.load_snapshot(where) == 1
            store.close()
        else:  # that operation was none that a load needs, or there were not so many
            assert store.model("ctr").active_version == 1
            if disk.operations <= fail_at:
                return
            store.close()
        for path in (tmp_path / "data").glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    pytest.fail("never came to an end")


def test_whichever_file_operation_fails_at_start_the_next_start_works(tmp_path, open_store):
    scene = Scene(tmp_path, open_store)
    scene.store.load_snapshot(scenes.write_snapshot(tmp_path, 1, model="other"))
    expected, before = rows_of(scene.store), numbers(scene.store)
    scene.store.close()
    leftover = tmp_path / "data/models/ctr/77/build"
    for fail_at in range(100):
        leftover.mkdir(parents=True, exist_ok=True)
        (leftover.parent.parent / ".tmp-CURRENT-1").write_bytes(b"half")
        disk = FailingDisk(fail_at)
        with contextlib.suppress(TierstoreError), files.use(disk):
            store = open_store(fold_grace_s=60, keep_versions=99)
            if store.model("ctr").ready:
                assert same(rows_of(store), expected)
            else:
                assert store.model("ctr").problem
            store.close()
        store = open_store(fold_grace_s=60, keep_versions=99)
        assert same(rows_of(store), expected)
        assert numbers(store) == before
        assert store.model("other").ready
        store.close()
        if disk.operations <= fail_at:
            return
    pytest.fail("never came to an end")


def test_a_fold_that_fails_is_tried_again_and_nothing_is_wrong_meanwhile(tmp_path, store):
    store.load_snapshot(scenes.write_snapshot(tmp_path))

    class NoBuild(FileSystem):
        failed = threading.Event()

        def mkdir(self, path: Path) -> None:
            if path.name == "build":
                self.failed.set()
                raise OSError(errno.ENOSPC, "injected failure")
            super().mkdir(path)

    with files.use(NoBuild()):
        store.apply_delta(scenes.stamped(1, {"item": [1], "user": [1]}))
        assert NoBuild.failed.wait(20)
        store.apply_delta(scenes.stamped(2, {"item": [2], "user": [1]}))
        assert store.model("ctr").lookup("item_id", [1])[0, 0] == scenes.vector("item", 1, 1)[0]
    folded(store)
    np.testing.assert_array_equal(store.model("ctr").lookup("user_id", [1]), scenes.vectors("user", 2, [1]))
    assert store.status()["overlay_budget"]["used"] == 0
    assert store.status()["models"]["ctr"]["folded_watermark"] == 2


def test_verify_of_a_table_whose_rows_are_all_deleted(tmp_path, store):
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows={"user": 3, "item": 3}))
    store.apply_delta(scenes.delta(1, deletes={"user": range(3)}))
    folded(store)
    report = store.verify()
    assert (report.ok, report.rows) == (True, 3)


# --- damage


def damaged_kept_db(root: Path) -> None:
    (root / "1/db/CURRENT").write_bytes(b"no such manifest\n")


def damaged_kept_record(root: Path) -> None:
    (root / "1/version.json").write_bytes(b"{")


def damaged_hot_keys(root: Path) -> None:
    next((root / "2/hot").glob("*.npy")).write_bytes(b"\x93NUMPY but not really")


@pytest.mark.parametrize("damage", [damaged_kept_db, damaged_kept_record, damaged_hot_keys])
def test_damage_beside_what_serves_does_not_keep_it_from_serving(tmp_path, open_store, damage):
    scene = Scene(tmp_path, open_store)
    expected = rows_of(scene.store)
    scene.store.close()
    damage(tmp_path / "data/models/ctr")
    scene.store = open_store()
    assert scene.store.model("ctr").active_version == 2
    assert same(rows_of(scene.store), expected)
    scene.delta()


def test_a_damaged_log_is_reported_and_another_model_serves(tmp_path, open_store):
    scene = Scene(tmp_path, open_store)
    scene.store.load_snapshot(scenes.write_snapshot(tmp_path, 1, model="other"))
    scene.store.close()
    entry = sorted((tmp_path / "data/models/ctr/log").glob("*.arrow"))[2]
    content = entry.read_bytes()
    entry.write_bytes(content[:-9] + b"x" * 9)
    store = open_store()
    assert store.model("other").ready
    assert entry.name in (store.model("ctr").problem or "")
    assert not store.model("ctr").ready  # better nothing than rows without an acknowledged delta
    store.close()
    entry.write_bytes(content)
    assert open_store().model("ctr").ready


def test_an_open_that_fails_lets_go_of_everything(tmp_path, open_store, monkeypatch):
    scene = Scene(tmp_path, open_store)
    scene.store.load_snapshot(scenes.write_snapshot(tmp_path, 1, model="zzz"))
    expected = rows_of(scene.store)
    scene.store.close()
    threads = threading.active_count()
    start = Model.start

    def failing(model: Model) -> None:
        start(model)
        if model.name == "zzz":
            raise Corruption("injected failure")

    with monkeypatch.context() as patch:
        patch.setattr(Model, "start", failing)
        with pytest.raises(Corruption, match="injected"):
            open_store()
    assert threading.active_count() <= threads
    assert same(rows_of(open_store()), expected)


# --- power


class PowerCut(FileSystem):
    """Loses power at operation number `cut_at`: it and all later ones fail, and `apply` undoes what was not fsynced.

    Names are durable once their directory is fsynced, content once the file is. What RocksDB writes counts as durable.
    """

    def __init__(self, cut_at: int, keep: Path) -> None:
        self.cut_at, self.operations, self._keep = cut_at, 0, keep
        self._undo: list[tuple[Path, Callable[[], object]]] = []  # by directory, in order
        self._unsynced: dict[int, Path] = {}  # inode -> where it was created
        keep.mkdir()

    def _count(self) -> None:
        self.operations += 1
        if self.operations > self.cut_at:
            raise OSError(errno.EIO, "no power")

    def _saved(self, path: Path) -> Path | None:
        if not path.is_file():
            return None
        copy = self._keep / str(len(list(self._keep.iterdir())))
        os.link(path, copy)
        return copy

    def create(self, path):
        self._count()
        file = super().create(path)
        self._unsynced[os.fstat(file.fileno()).st_ino] = path
        self._undo.append((path.parent, lambda: path.unlink(missing_ok=True)))
        return file

    def fsync(self, file):
        self._count()
        super().fsync(file)
        self._unsynced.pop(os.fstat(file.fileno()).st_ino, None)

    def fsync_dir(self, path):
        self._count()
        super().fsync_dir(path)
        self._undo = [(where, undo) for where, undo in self._undo if where != path]

    def rename(self, old, new):
        self._count()
        replaced = self._saved(new)
        super().rename(old, new)

        def undo() -> None:
            if new.exists():
                os.rename(new, old)
            if replaced is not None:
                os.link(replaced, new)

        self._undo.append((new.parent, undo))

    def link(self, old, new):
        self._count()
        super().link(old, new)
        self._undo.append((new.parent, lambda: new.unlink(missing_ok=True)))

    def mkdir(self, path):
        self._count()
        super().mkdir(path)

    def unlink(self, path):
        self._count()
        copy = self._saved(path)
        super().unlink(path)
        if copy is not None:
            self._undo.append((path.parent, lambda: path.exists() or os.link(copy, path)))

    def rmtree(self, path):
        self._count()
        super().rmtree(path)

    def apply(self, root: Path) -> None:
        for _, undo in reversed(self._undo):
            undo()
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                path.write_bytes(b"")


@pytest.mark.thorough
@pytest.mark.parametrize("prepare", [apply_delta, load, load_beyond_the_log, activate, rollback, drop])
def test_whenever_power_goes_everything_acknowledged_is_there_afterwards(tmp_path, open_store, prepare):
    scene = Scene(tmp_path, open_store)
    for cut_at in range(0, 200, step_of(prepare)):
        disk = PowerCut(cut_at, tmp_path / f"kept-{cut_at}")
        with files.use(disk):
            scene_store = scene.store
            disk.cut_at = 1 << 30  # the preparation has power
            attempt = prepare(scene)
            before, served = numbers(scene_store), rows_of(scene_store)
            disk.operations, disk.cut_at = 0, cut_at
            done = True
            try:
                attempt()
            except StorageError:
                done = False
            after, answered = numbers(scene_store), rows_of(scene_store)
            last = disk.operations <= cut_at
            disk.cut_at = 0
            scene.store.close()
        disk.apply(tmp_path / "data")
        scene.store = open_store(fold_grace_s=60, keep_versions=99)
        now = numbers(scene.store)
        assert now["problem"] is None
        if done:
            assert now["active"] == after["active"]
            assert now["log"]["last"] == after["log"]["last"]
            assert same(rows_of(scene.store), answered)
        elif now["active"] == before["active"] and now["log"]["last"] == before["log"]["last"]:
            assert same(rows_of(scene.store), served)
        if not done:
            scene.seq = now["log"]["last"]
        assert scene.store.verify().ok
        if last:
            return
    pytest.fail("never came to an end")
