"""A published file is there whole or not at all, whatever fails and whenever the power goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.disks import FailingDisk, ForgetfulDisk
from tierstore.errors import Corruption, DiskFull, NotFound, StorageError
from tierstore.formats import files


def test_a_published_file_has_its_content_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    files.publish_bytes(tmp_path / "a", b"one")
    files.publish_bytes(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_file_is_not_seen_before_the_block_ends(tmp_path: Path) -> None:
    with files.publish(tmp_path / "a") as file:
        file.write(b"part")
        file.flush()
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"part"


def test_an_error_in_the_block_publishes_nothing(tmp_path: Path) -> None:
    files.publish_bytes(tmp_path / "a", b"old")

    def write_and_fail() -> None:
        with files.publish(tmp_path / "a") as file:
            file.write(b"new")
            raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        write_and_fail()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_errors_of_the_disk_are_storage_errors_that_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot create .*missing/a: No such file"):
        files.publish_bytes(tmp_path / "missing" / "a", b"")

    def disk_full() -> None:
        with files.publish(tmp_path / "a"):
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match=r"cannot write .*a: the disk is full; free some space .*No space left"):
        disk_full()


def _operations(action: Callable[[], object]) -> int:
    disk = FailingDisk()
    with files.use(disk):
        action()
    return disk.operations


def test_whichever_operation_fails_the_name_holds_the_old_content_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "a"
    total = _operations(lambda: files.publish_bytes(path, b"old"))
    assert total == 4  # create, fsync, rename, fsync of the directory
    for fail_at in range(total):
        files.publish_bytes(path, b"old")
        with files.use(FailingDisk(fail_at)), pytest.raises(StorageError, match="injected failure"):
            files.publish_bytes(path, b"new")
        assert path.read_bytes() == (b"new" if fail_at == total - 1 else b"old")
        assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_whichever_operation_fails_a_removed_tree_is_whole_or_has_no_name(tmp_path: Path) -> None:
    def build() -> None:
        (tmp_path / "7" / "db").mkdir(parents=True)
        (tmp_path / "7" / "version.json").touch()

    build()
    total = _operations(lambda: files.remove_tree(tmp_path / "7"))
    for fail_at in range(total):
        build()
        with files.use(FailingDisk(fail_at)), pytest.raises(StorageError, match="injected failure"):
            files.remove_tree(tmp_path / "7")
        if (tmp_path / "7").exists():
            assert fail_at == 0
            assert (tmp_path / "7" / "version.json").exists()
            files.remove_tree(tmp_path / "7")
        assert files.sweep(tmp_path) == (0 if fail_at == 0 else 1)
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def forgetful(tmp_path: Path) -> ForgetfulDisk:
    return ForgetfulDisk(tmp_path)


def test_what_was_published_survives_power_loss(tmp_path: Path, forgetful: ForgetfulDisk) -> None:
    with files.use(forgetful):
        files.publish_bytes(tmp_path / "a", b"old")
        files.publish_bytes(tmp_path / "a", b"new")
        files.make_dir(tmp_path / "x" / "y")
        files.publish_bytes(tmp_path / "x" / "y" / "b", b"deep")
        files.rename(tmp_path / "x" / "y" / "b", tmp_path / "c")
    forgetful.lose_power()
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "c").read_bytes() == b"deep"
    assert not (tmp_path / "x" / "y" / "b").exists()


def test_what_was_not_published_does_not(tmp_path: Path, forgetful: ForgetfulDisk) -> None:
    with files.use(forgetful):
        files.publish_bytes(tmp_path / "a", b"old")
        publication = files.Publication(tmp_path / "a")
        publication.file.write(b"new")
        (tmp_path / "careless").write_bytes(b"never synced")
    forgetful.lose_power()
    publication.abort()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert not (tmp_path / "careless").exists()


def test_a_removed_tree_stays_removed(tmp_path: Path, forgetful: ForgetfulDisk) -> None:
    with files.use(forgetful):
        files.make_dir(tmp_path / "7")
        files.publish_bytes(tmp_path / "7" / "version.json", b"{}")
        files.remove_tree(tmp_path / "7")
        files.remove_tree(tmp_path / "7")  # gone already
    forgetful.lose_power()
    assert not (tmp_path / "7").exists()


def test_sweep_takes_only_what_is_scratch(tmp_path: Path) -> None:
    for name in (".tmp-a-0", "keep", ".trash-b-1"):
        (tmp_path / name).touch()
    (tmp_path / ".trash-c-2" / "db").mkdir(parents=True)
    assert files.sweep(tmp_path) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["keep"]
    assert files.sweep(tmp_path / "missing") == 0


def test_json_is_read_back_and_bad_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "version.json"
    with pytest.raises(NotFound, match="does not exist"):
        files.read_json(path)
    files.publish_json(path, {"name": "é", "n": 1})
    assert files.read_json(path) == {"name": "é", "n": 1}
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(Corruption, match=r"version\.json is not JSON"):
            files.read_json(path)
    path.write_bytes(b"[1]")
    with pytest.raises(Corruption, match="expected a JSON object, got list"):
        files.read_json(path)


def test_make_dir_names_a_directory_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_dir(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")  # as for users other than root

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(StorageError, match=f"create the directory {tmp_path}"):
        files.make_dir(tmp_path / "a" / "b")


def test_make_dir_refuses_a_name_that_a_file_has(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(StorageError, match="cannot create the directory"):
        files.make_dir(tmp_path / "a" / "b")
    assert files.make_dir(tmp_path / "c") == files.make_dir(tmp_path / "c")


def test_scratch_files_have_no_name(tmp_path: Path) -> None:
    with files.scratch(tmp_path) as file:
        file.write(b"spool")
        file.seek(0)
        assert file.read() == b"spool"
        assert list(tmp_path.iterdir()) == []


def test_removing_a_file_twice(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    files.remove_file(tmp_path / "a")
    files.remove_file(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
