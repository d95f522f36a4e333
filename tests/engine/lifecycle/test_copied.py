"""A data directory that was copied while it was open: told apart, opened where it is whole, or refused with what to do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.mounts import ROOT, needs_mounts

pytestmark = pytest.mark.usefixtures("quick_loads")

KEYS = {"item_id": np.arange(-3, 1100), "user_id": np.arange(-3, 600)}
OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0}


def answers(store: tierstore.Store) -> list[np.ndarray]:
    found = store.model("ctr").lookup_many(KEYS, return_found=True)
    return [part for pair in found.values() for part in pair]


def same(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def serving(open_store: Callable[..., tierstore.Store], tmp_path: Path) -> tierstore.Store:
    """Version 1 with deltas 1 to 4, all folded; the newest brings a dense part."""
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=scenes.some_dense()))
    for seq in range(1, 5):
        dense = scenes.some_dense() if seq == 4 else None
        store.apply_delta(scenes.stamped(seq, {"item": range(seq, 900, 7), "user": [seq]}, dense=dense))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "they are folded")
    return store


def copy(store: tierstore.Store, to: Path) -> Path:
    """Copy the whole data directory. Returns that of the model."""
    with contextlib.suppress(shutil.Error):  # a file went before its turn came
        shutil.copytree(store.root.root, to)
    return to / "models/ctr"


def tear(model: Path) -> None:
    """As where the newest file of RocksDB came after its folder was listed."""
    max((model / "1/db").glob("*.sst")).unlink()


def test_a_copy_that_is_whole_opens_and_is_a_directory_of_its_own_from_then_on(serving, tmp_path) -> None:
    expected = answers(serving)
    copy(serving, tmp_path / "copy")
    for copied in (True, False):
        with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
            assert other.shared.copied is copied
            assert same(answers(other), expected)
            assert other.model("ctr").problem is None


def test_what_no_process_has_open_or_what_was_killed_is_no_copy(serving, open_store, tmp_path) -> None:
    lock = serving.root.lock.read_bytes()
    serving.close()
    copy(serving, tmp_path / "copy")
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert not other.shared.copied
    serving.root.lock.write_bytes(lock)  # as it is where the process was killed
    assert not open_store().shared.copied


def test_a_directory_that_got_another_inode_is_no_copy(serving, open_store, tmp_path) -> None:
    """As at each mount of an overlayfs with layers on two file systems."""
    lock = serving.root.lock
    serving.close()
    moved = tmp_path / "moved"
    moved.mkdir()
    lock.write_text(f"1 file:{lock.stat().st_ino}")  # as it is where the process was killed
    for one in serving.root.root.iterdir():
        one.rename(moved / one.name)
    with tierstore.open(moved, **OPTIONS) as other:
        assert not other.shared.copied
        words = (moved / lock.name).read_text().split()
        assert words[1] == f"file:{(moved / lock.name).stat().st_ino}"


@pytest.mark.parametrize("copied", [False, True])
def test_a_lock_of_an_earlier_release_names_the_directory(serving, open_store, tmp_path, copied) -> None:
    root, lock = serving.root.root, serving.root.lock
    serving.close()
    lock.write_text(f"1 {root.stat().st_ino + copied}")
    assert open_store().shared.copied is copied


@needs_mounts
def test_a_directory_on_two_layers_of_an_overlay_is_no_copy_after_another_mount(tmp_path) -> None:
    code = """if True:
    import os, sys
    from pathlib import Path
    from tierstore.engine.lifecycle.directory_lock import is_copy, lock
    path = Path("m/b/LOCK")
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    print(os.stat("m/b").st_ino, is_copy(path, file), flush=True)
    lock(path)
    os._exit(0)  # as if it were killed
    """
    steps = f"""
    mkdir lower upper m && mount -t tmpfs none upper && mkdir upper/u upper/w
    mount_it() {{ mount -t overlay overlay -o lowerdir=lower,upperdir=upper/u,workdir=upper/w m; }}
    mount_it || exit 77
    mkdir m/a m/b && {sys.executable} -c '{code}' && umount m && mount_it
    stat -c %i m/b m/a >&2
    {sys.executable} -c '{code}'
    """
    run = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", steps],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if run.returncode == 77:
        pytest.skip("no overlay can be mounted here")
    first, second = run.stdout.splitlines()
    assert first.endswith("False"), run.stderr
    assert second.endswith("False"), run.stderr
    if first == second:
        pytest.skip("this kernel gives the directory the same inode again")


def test_the_same_damage_where_nothing_was_copied_is_not_passed_over(serving, open_store) -> None:
    serving.close()
    tear(serving.root.model("ctr").root)
    store = open_store()
    assert "opening" in store.model("ctr").problem
    assert "was copied" not in store.model("ctr").problem


def test_a_copy_that_tore_is_refused_with_what_to_do(serving, tmp_path) -> None:
    tear(copy(serving, tmp_path / "copy"))
    for _ in range(2):  # it stays a copy
        with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
            problem = other.model("ctr").problem
            assert "this directory was copied while a process had the original open" in problem
            assert "`tierstore backup` and `tierstore restore`" in problem


def test_deltas_that_a_copy_lacks_can_be_copied_from_the_original(serving, tmp_path) -> None:
    expected = answers(serving)
    model = copy(serving, tmp_path / "copy")
    last = max((model / "log").glob("*.arrow"))
    os.unlink(last)
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        problem = other.model("ctr").problem
        assert f"cp -n ORIGINAL/models/ctr/log/*.arrow {model / 'log'}/" in problem
    shutil.copy(serving.model("ctr").where.log / last.name, last)
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert same(answers(other), expected)
        assert other.model("ctr").problem is None


def test_a_copy_may_go_on_without_the_end_of_its_log_that_its_rows_have(serving, tmp_path) -> None:
    expected = answers(serving)
    model = copy(serving, tmp_path / "copy")
    max((model / "log").glob("*.arrow")).unlink()
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert f"rm {model / 'log.end'}." in other.model("ctr").problem
    (model / "log.end").unlink()
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert other.model("ctr").problem is None
        assert same(answers(other), expected)
        assert other.apply_delta(scenes.stamped(5, {"item": [1]})).applied


def test_filters_of_another_moment_are_made_again(serving, tmp_path) -> None:
    expected = answers(serving)
    changed = copy(serving, tmp_path / "copy") / "1/db/changed.keys"
    size = changed.stat().st_size
    changed.write_bytes(changed.read_bytes()[:16])
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert same(answers(other), expected)
        assert changed.stat().st_size > size / 2


def test_a_dense_part_of_another_moment_is_not_served(serving, tmp_path) -> None:
    where = copy(serving, tmp_path / "copy") / "1"
    (where / "dense.onnx").write_bytes(b"of another delta")
    with tierstore.open(tmp_path / "copy", **OPTIONS) as other:
        assert "make the copy again" in other.model("ctr").problem
