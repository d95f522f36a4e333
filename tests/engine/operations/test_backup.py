"""`backup` and `restore`: what a model is at one moment, elsewhere, whole or not at all; beside whatever the store does."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import quick_build, scenes
from tests.formats.disks import FailingDisk
from tierstore.engine.operations import backup as backups
from tierstore.engine.operations.restore import restore
from tierstore.engine.placement import Refusals
from tierstore.engine.placements.refusals import refusals_of
from tierstore.errors import Closed, Conflict, Corruption, InvalidInput, Locked, NotFound, StorageError, TierstoreError
from tierstore.formats import files, one_writer
from tools.backup_check import BackupCheck
from tools.crash_check import Wrong

OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2}
KEYS = {"item_id": np.arange(-3, 1100), "user_id": np.arange(-3, 600)}
Open = Callable[..., tierstore.Store]


@pytest.fixture
def quick() -> Iterator[None]:
    with quick_build.in_process():
        yield


def answers(store: tierstore.Store, version: int | None = None) -> list[np.ndarray]:
    found = store.model("ctr").lookup_many(KEYS, version=version, return_found=True)
    return [part for pair in found.values() for part in pair]


def check_restored(place: Path | str, to: Path, expected: list[np.ndarray], seq: int, **options: Any) -> None:
    """What is restored into the new directory `to` answers as expected, is whole, and takes the next delta."""
    restore(place, to, **options)
    with tierstore.open(to, **OPTIONS) as other:
        for one, two in zip(expected, answers(other), strict=True):
            np.testing.assert_array_equal(one, two)
        assert other.verify().ok
        assert other.status()["models"]["ctr"]["problem"] is None
        assert other.apply_delta(scenes.stamped(seq + 1, {"item": [1]})).applied
    shutil.rmtree(to)


@pytest.fixture
def loaded(open_store: Open, tmp_path: Path, quick: None) -> tierstore.Store:
    """Versions 1 and 2, of which 2 is active, and deltas 1 to 3, of which the last is not folded."""
    store = open_store(fold_grace_s=0.0, keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version, dense=scenes.some_dense()))
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": range(seq, 900, 7), "user": [seq]}))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "they are folded")
    store.model("ctr").folder._grace_s = 60
    store.apply_delta(scenes.delta(3, {"item": ([5000], scenes.vectors("item", 3, [5000]))}, {"user": [7]}))
    return store


# --- beside work


@pytest.mark.thorough
def test_backups_of_a_store_that_works_are_each_of_one_moment(tmp_path: Path) -> None:
    test = BackupCheck(tmp_path, seed=3)
    test.life(2)
    test.life(2)
    assert test.backups == 4
    assert test.done["delta"] > 0
    known, _, report = test._moments[4]
    test._moments[4] = known, [], report
    known.moved_to(known.last + 1000)
    known.unfinished = []  # a delta that was under way may be the last one instead
    with pytest.raises(Wrong):
        test._check(4)


def test_everything_that_is_served_and_kept_comes_back(loaded: tierstore.Store, tmp_path: Path) -> None:
    store, model = loaded, loaded.model("ctr")
    store.canary("ctr", 1, 0.25)
    store.label("ctr", "old", 1)
    report = store.backup("ctr", tmp_path / "out")
    assert (report.model, report.version, report.seq) == ("ctr", 2, 3)
    assert 0 < report.new_bytes <= report.bytes
    store.rollback("ctr", to_seq=1)  # the canary is withdrawn; the line is another one
    undone = answers(store)
    store.backup("ctr", tmp_path / "out", keep=2)
    restore(tmp_path / "out", tmp_path / "first", number=1)
    with tierstore.open(tmp_path / "first", **OPTIONS) as other:
        status = other.status()["models"]["ctr"]
        assert (status["canary"]["version"], status["canary"]["share"]) == (1, 0.25)
        assert status["labels"] == {"stable": 2, "canary": 1, "old": 1}
        assert other.model("ctr").versions == [1, 2]
        other.rollback("ctr", to_seq=1)
        for one, two in zip(undone, answers(other), strict=True):
            np.testing.assert_array_equal(one, two)
    check_restored(tmp_path / "out", tmp_path / "second", undone, 3)
    assert list(model.where.root.glob(".tmp-*")) == []


def test_look_ups_and_deltas_go_on_while_it_is_read_and_sent(loaded, tmp_path, monkeypatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = backups.content_of

    def slow(path: Path) -> tuple[str, int]:
        reading.set()
        assert go_on.wait(30)
        return read(path)

    before = answers(loaded)
    monkeypatch.setattr(backups, "content_of", slow)
    thread = threading.Thread(target=loaded.backup, args=("ctr", tmp_path / "out"))
    thread.start()
    assert reading.wait(30)
    loaded.apply_delta(scenes.stamped(4, {"item": range(900)}))
    loaded.rollback("ctr")
    loaded.drop("ctr", 2)
    go_on.set()
    thread.join(30)
    check_restored(tmp_path / "out", tmp_path / "other", before, 3)


def test_an_entry_that_the_log_does_not_count_is_in_no_backup(loaded, tmp_path) -> None:
    where = loaded.model("ctr").where
    (where.log_entry(4, "0" * 16)).write_bytes(b"an append that failed")
    loaded.backup("ctr", tmp_path / "out")
    restore(tmp_path / "out", tmp_path / "other")
    entries = [path.name for path in (tmp_path / "other/models/ctr/log").glob("*.arrow")]
    assert sorted(entries) == sorted(path.name for path in where.log.glob("*.arrow"))[:3]


# --- what is there already


def test_what_is_there_is_neither_read_nor_written_again(loaded, tmp_path, monkeypatch) -> None:
    first = loaded.backup("ctr", tmp_path / "out")
    loaded.apply_delta(scenes.stamped(4, {"item": [5]}))
    read: list[str] = []
    content_of = backups.content_of
    monkeypatch.setattr(
        backups, "content_of", lambda path: (read.append(path.parent.name + path.suffix), content_of(path))[1]
    )
    second = loaded.backup("ctr", tmp_path / "out")
    assert "base" not in read
    assert read.count("log.arrow") == 1
    assert second.new_bytes < first.bytes / 4
    check_restored(tmp_path / "out", tmp_path / "other", answers(loaded), 4)


def test_those_that_are_not_kept_go_with_what_they_alone_have(loaded, tmp_path) -> None:
    out = tmp_path / "out"
    expected = {3: answers(loaded)}
    loaded.backup("ctr", out)
    for seq in (4, 5, 6):
        loaded.apply_delta(scenes.stamped(seq, {"item": range(seq)}))
        expected[seq] = answers(loaded)
        loaded.backup("ctr", out, keep=2)
    names = sorted(path.name[:6] for path in (out / "ctr").glob("*.json"))
    assert names == ["000003", "000004"]
    for number, seq in ((3, 5), (4, 6)):
        check_restored(out, tmp_path / "other", expected[seq], seq, number=number)
    with pytest.raises(NotFound, match="has no backup 1 of 'ctr'; it has 3, 4"):
        restore(out, tmp_path / "other", number=1)
    records = [json.loads(path.read_text())["files"] for path in (out / "ctr").glob("*.json")]
    wanted = {f"{file['xxh3']}-{file['bytes']}" for each in records for file in each}
    assert {path.name for path in (out / "ctr/files").iterdir()} == wanted


def test_a_file_that_was_cut_off_there_is_written_again(loaded, tmp_path) -> None:
    loaded.backup("ctr", tmp_path / "out")
    largest = max((tmp_path / "out/ctr/files").iterdir(), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()  # it is a hard link to the store's own file
    largest.write_bytes(content[:100])
    assert loaded.backup("ctr", tmp_path / "out").new_bytes >= len(content)
    check_restored(tmp_path / "out", tmp_path / "other", answers(loaded), 3)


# --- broken off


class Dead(FailingDisk):
    """From operation `fail_at` on nothing happens any more, as after a kill: nothing is cleaned up either."""

    def _count(self) -> None:
        self.operations += 1
        if self.fail_at is not None and self.operations > self.fail_at:
            raise OSError(errno.EIO, "it is dead")


@pytest.mark.counted
@pytest.mark.parametrize("disk", [FailingDisk, Dead])
def test_a_backup_that_ends_at_any_step_leaves_the_one_before_or_is_there(
    disk: type[FailingDisk], loaded: tierstore.Store, open_store: Open, tmp_path: Path
) -> None:
    out, seq, done = tmp_path / "out", 3, 0
    loaded.backup("ctr", out)
    for fail_at in range(0, 10_000, few_or_many(37, 9)):
        seq += 1
        loaded.apply_delta(scenes.stamped(seq, {"item": range(seq)}))
        failing = disk(fail_at)
        try:
            with files.use(failing):
                loaded.backup("ctr", out)
        except TierstoreError:
            (restored,) = restore(out, tmp_path / "other")
            assert restored.seq in (done, seq) if done else restored.seq in (3, seq)
            shutil.rmtree(tmp_path / "other")
        else:
            done = seq
        if failing.operations <= fail_at:
            break
    check_restored(out, tmp_path / "other", answers(loaded), seq)
    wanted = {file["xxh3"] for path in (out / "ctr").glob("*.json") for file in json.loads(path.read_text())["files"]}
    assert {path.name[:16] for path in (out / "ctr/files").iterdir() if path.name[0] != "."} == wanted
    loaded.close()
    store = scenes.swept(open_store())
    assert list(store.model("ctr").where.root.glob(".t*")) == []


@pytest.mark.counted
@pytest.mark.parametrize("disk", [FailingDisk, Dead])
def test_a_restore_that_ends_at_any_step_leaves_a_whole_model_or_none(disk, loaded, tmp_path) -> None:
    out, to = tmp_path / "out", tmp_path / "other"
    expected = answers(loaded)
    loaded.backup("ctr", out)
    for fail_at in range(0, 10_000, few_or_many(37, 9)):
        failing = disk(fail_at)
        try:
            with files.use(failing):
                restore(out, to)
        except TierstoreError:
            pass
        if failing.operations <= fail_at:
            break
        if (to / "models/ctr").exists():  # renamed, though not known to be durable
            with tierstore.open(to, **OPTIONS) as other:
                np.testing.assert_array_equal(answers(other)[0], expected[0])
            shutil.rmtree(to)
    with tierstore.open(to, **OPTIONS) as other:
        np.testing.assert_array_equal(answers(scenes.swept(other))[0], expected[0])
    assert list(to.glob(".t*")) == []


def held_up(store: tierstore.Store, place: str | Path) -> tuple[threading.Thread, threading.Event, list[Any]]:
    """A backup that is being sent, until the event is set; then the list has its report, or why there is none."""
    begun, goes_on, ended = threading.Event(), threading.Event(), list[Any]()

    def progress(step: Any) -> None:
        if step.phase == "backup" and not begun.is_set():
            begun.set()
            assert goes_on.wait(60)

    def work() -> None:
        try:
            ended.append(store.backup("ctr", place, progress=progress))
        except TierstoreError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    return thread, goes_on, ended


def test_of_two_backups_at_once_the_second_is_refused_and_the_first_is_whole(loaded, tmp_path) -> None:
    loaded.backup("ctr", tmp_path / "out")
    thread, goes_on, ended = held_up(loaded, tmp_path / "out")
    loaded.apply_delta(scenes.stamped(4, {"item": range(50)}))
    try:
        with pytest.raises(Conflict, match=r"the backup of 'ctr' into .*: another one is under way there"):
            loaded.backup("ctr", tmp_path / "out")
        assert loaded.backup("ctr", tmp_path / "elsewhere").seq == 4
    finally:
        goes_on.set()
        thread.join(60)
    assert ended[0].seq == 3
    restore(tmp_path / "out", tmp_path / "other")
    assert loaded.backup("ctr", tmp_path / "out").seq == 4
    check_restored(tmp_path / "out", tmp_path / "again", answers(loaded), 4)


def test_a_backup_can_be_cancelled(loaded, tmp_path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Closed, match="was cancelled"):
        loaded.backup("ctr", tmp_path / "out", cancelled=cancelled)


# --- refused


def test_a_restore_that_fails_leaves_nothing_behind(loaded, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="empty has no backup; expected the directory"):
        restore(tmp_path / "empty", tmp_path / "new/other")
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    loaded.backup("ctr", tmp_path / "out")
    for damaged in (tmp_path / "out/ctr/files").iterdir():
        damaged.write_bytes(b"")
    with pytest.raises(Corruption, match="is damaged"):
        restore(tmp_path / "out", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["LOCK"]
    with tierstore.open(tmp_path / "there", **OPTIONS) as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path / "again", 1, stamp=1))


def test_a_damaged_file_of_a_backup_is_named_and_nothing_is_restored(loaded, tmp_path) -> None:
    loaded.backup("ctr", tmp_path / "out")
    path = max((tmp_path / "out/ctr/files").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(
        Corruption, match=f"{path.name} is damaged.* it is [12]/db/base/base-item-0000.sealed of model 'ctr'"
    ):
        restore(tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    record = next((tmp_path / "out/ctr").glob("*.json"))
    record.write_bytes(record.read_bytes().replace(b'"seq": 3', b'"seq": 2'))
    with pytest.raises(Corruption, match="does not match its checksum"):
        restore(tmp_path / "out", tmp_path / "other")


def test_a_backup_cannot_lead_out_of_the_model(loaded, tmp_path) -> None:
    loaded.backup("ctr", tmp_path / "out")
    record = next((tmp_path / "out/ctr").glob("*.json"))
    document = json.loads(record.read_text())
    for path in ("../../../outside", "/tmp/outside", "a/../../b"):
        document["files"][0]["path"] = path
        files.publish_record(record, {name: value for name, value in document.items() if name not in ("xxh3",)})
        with pytest.raises(Corruption, match="is invalid"):
            restore(tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_restore_overwrites_nothing_and_needs_the_directory_for_itself(loaded, tmp_path) -> None:
    loaded.backup("ctr", tmp_path / "out")
    with pytest.raises(Locked, match="open in this process"):
        restore(tmp_path / "out", loaded.root.root)
    loaded.close()
    with pytest.raises(Conflict, match="ctr exists already, and a restore overwrites nothing"):
        restore(tmp_path / "out", loaded.root.root)
    with pytest.raises(NotFound, match="no backup of model 'rank'; it has ctr"):
        restore(tmp_path / "out", tmp_path / "other", ["rank"])
    with pytest.raises(NotFound, match="has no backup"):
        restore(tmp_path / "nothing", tmp_path / "other")


def test_what_is_not_whole_or_not_here_is_not_backed_up(loaded, open_store, tmp_path, monkeypatch) -> None:
    with pytest.raises(InvalidInput, match="is in the data directory"):
        loaded.backup("ctr", loaded.root.root / "backups")
    with pytest.raises(InvalidInput, match="keep: expected an integer from 1 to 10000, got 0"):
        loaded.backup("ctr", tmp_path / "out", keep=0)
    with monkeypatch.context() as patch:
        patch.setattr(loaded.placement, "refusals", Refusals(refusals_of("cluster")))
        with pytest.raises(Conflict, match=r"are on other machines.* back up a cluster by the means of its engine"):
            loaded.backup("ctr", tmp_path / "out")
    where = loaded.model("ctr").where
    loaded.close()
    sorted(where.log.glob("*.arrow"))[1].unlink()
    with (
        open_store() as store,
        pytest.raises(Corruption, match=r"is not whole, and is not backed up.*delta 2 is missing"),
    ):
        store.backup("ctr", tmp_path / "out")


# --- object storage


def test_backups_in_object_storage(loaded: tierstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")

    from tests.formats.object_server import BUCKET, ObjectServer, dying, refused

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/backups"
        with pytest.raises(NotFound, match="has no backup"):
            restore(url, tmp_path / "other")
        server.write_faults.append(dying(3))
        first = loaded.backup("ctr", url)
        assert first.new_bytes > 0
        check_restored(url, tmp_path / "other", answers(loaded), 3)
        before = answers(loaded)
        loaded.apply_delta(scenes.stamped(4, {"item": range(50)}))
        server.write_faults[:] = [refused(1000, "403 Forbidden")]
        with pytest.raises(StorageError, match="cannot write"):
            loaded.backup("ctr", url)
        server.write_faults.clear()
        check_restored(url, tmp_path / "other", before, 3)
        server.written.clear()
        assert loaded.backup("ctr", url).new_bytes < first.bytes / 4
        assert not any(str(size) in name for name in server.written for size in [first.bytes])
        assert server.written[-1].endswith("Z.json")
        assert [name[4:10] for name in server.names("backups") if name.endswith(".json")] == ["000002"]
        check_restored(url, tmp_path / "other", answers(loaded), 4)


def test_of_two_backups_at_once_in_object_storage_one_is_whole(
    loaded: tierstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")

    from tests.formats.object_server import BUCKET, ObjectServer

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/backups"
        thread, goes_on, ended = held_up(loaded, url)
        loaded.apply_delta(scenes.stamped(4, {"item": range(50)}))
        try:
            with pytest.raises(Conflict, match=r"another one is under way there, which wrote s3://.*/ctr/WRITER-"):
                loaded.backup("ctr", url)
            with monkeypatch.context() as patched:
                patched.setattr(one_writer, "GONE_S", -1.0)  # the first one counts as gone
                assert loaded.backup("ctr", url).seq == 4
        finally:
            goes_on.set()
            thread.join(60)
        with pytest.raises(Conflict, match="another one took its place"):
            raise ended[0]
        assert not any("WRITER" in name for name in server.names("backups"))
        check_restored(url, tmp_path / "other", answers(loaded), 4)
