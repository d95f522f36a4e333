"""The first load of a model, where the system refuses something meanwhile: it is refused, and the next one is not."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tierstore import open_files
from tierstore.errors import StorageError, TierstoreError

pytestmark = pytest.mark.usefixtures("quick_loads")

COUNTS = (0, 1, 2, 3, 5, 8, 13, 24)  # of descriptors; a small load needs fewer than the last


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """In the block this process can open so many more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_load_that_ran_out_of_descriptors_anywhere_leaves_the_next_one_as_it_was(
    store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "raise_to", lambda _: None)
    failed = []
    for count in COUNTS:
        name = f"m{count}"
        snapshot = scenes.write_snapshot(tmp_path, 1, model=name, rows={"user": 3, "item": 3})
        with descriptors(count):
            try:
                store.load_snapshot(snapshot)
            except TierstoreError:
                failed.append(count)
        if count in failed:
            assert store.load_snapshot(snapshot) == 1, count
        assert store.model(name).lookup("item_id", [2])[0, 0] == scenes.vector("item", 0, 2)[0]
    assert 0 in failed
    assert COUNTS[-1] not in failed


def test_a_model_that_ran_out_of_descriptors_as_it_was_taken_over_is_taken_over_by_the_next_try(
    open_store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "raise_to", lambda _: None)
    with open_store() as made:
        made.load_snapshot(scenes.write_snapshot(tmp_path, 1, rows={"user": 3, "item": 3}))
        made.apply_delta(scenes.stamped(1, {"item": [1]}))
        of = made.root.model("ctr").root
    failed = []
    for count in COUNTS:
        with tierstore.open(tmp_path / f"{count}", host_budget="4MiB", load_workers=1) as store:
            copied = store.root.root / "copied"
            shutil.copytree(of, copied)
            try:
                with descriptors(count):
                    store.adopt("ctr", copied)
            except (TierstoreError, OSError):
                failed.append(count)
                assert store.models() == []
                store.adopt("ctr", copied)
            assert store.model("ctr").problem is None, count
            assert store.model("ctr").lookup("item_id", [1])[0, 0] == scenes.vector("item", 1, 1)[0]
            assert not copied.exists()
    assert 0 in failed


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("where", ["log", "ctr"])
def test_a_directory_that_could_not_be_listed_once_is_listed_by_the_next_load(
    store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    snapshot = scenes.write_snapshot(tmp_path, 7)
    listed, refused = os.listdir, []

    def listdir(path: str | Path = ".") -> list[str]:
        if Path(path).name == where and not refused:
            refused.append(path)
            raise OSError(number, os.strerror(number))
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(StorageError, match=os.strerror(number)):
        store.load_snapshot(snapshot)
    assert refused
    assert store.models() == []
    assert store.load_snapshot(snapshot) == 7
    assert store.model("ctr").log.damage == []
