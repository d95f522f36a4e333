"""A start on a full disk: what is there is served, what cannot be kept is refused, and with room again all goes on."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import quick_build, scenes
from tests.engine.lifecycle.test_start import SMALL, item, loaded
from tests.engine.test_faults import numbers, rows_of, same
from tests.engine.test_store import folded
from tests.tiers.full_disk import FullDisk, full_disk
from tierstore.errors import DiskFull
from tierstore.types import BaseKind

pytestmark = pytest.mark.usefixtures("quick_loads")

FULL = "the disk is full; free some space"
UNFOLDED = range(1, 6)


@pytest.fixture
def disk() -> Iterator[FullDisk]:
    with full_disk() as disk:
        yield disk


def unfolded(store: tierstore.Store, first: int = 1) -> None:
    for seq in range(first, 6):
        keys = [37 * (seq % 8), 1000, seq]
        upserts = {
            "item": (keys, scenes.vectors("item", seq, keys)),
            "user": ([seq], scenes.vectors("user", seq, [seq])),
        }
        store.apply_delta(scenes.delta(seq, upserts, {"item": [999], "user": [37 * (seq % 3)]}))


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_a_node_that_starts_on_a_full_disk_serves_and_goes_on_when_there_is_room(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, disk: FullDisk, base: BaseKind
) -> None:
    store = open_store(fold_grace_s=60, base=base)
    loaded(store, tmp_path, 1, 2)
    loaded(store, tmp_path, 1, model="other")
    unfolded(store)
    expected, before = rows_of(store), numbers(store)
    store.close()
    for _ in range(2):  # nor is anything worse after another start
        disk.full = True
        store = open_store(base=base, fold_grace_s=60)
        assert same(rows_of(store), expected), "with every delta that was acknowledged"
        assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
        assert numbers(store) == before
        with pytest.raises(DiskFull, match=FULL):
            store.apply_delta(scenes.stamped(6, {"item": [6]}))
        with pytest.raises(DiskFull, match=FULL):
            store.rollback("ctr")
        assert same(rows_of(store), expected)
        store.close()
    store = open_store(base=base)
    housekeeping = store.model("ctr").housekeeping
    scenes.eventually(lambda: housekeeping.problem is not None, "housekeeping finds no room")
    assert FULL in (store.model("ctr").problem or "")
    assert same(rows_of(store), expected)
    disk.full = False
    assert store.apply_delta(scenes.stamped(6, {"item": [6]})).applied
    folded(store)
    assert item(store, 6) == scenes.vector("item", 6, 6)[0]
    store.apply_delta(scenes.stamped(7, {"item": [7]}))
    folded(store)
    store.rollback("ctr")
    assert [item(store, key) for key in (6, 7)] == [scenes.vector("item", key, key)[0] for key in (6, 7)]
    assert store.verify().ok
    store.close()
    store = open_store(base=base)
    assert store.model("ctr").active_version == 1
    assert item(store, 7) == scenes.vector("item", 7, 7)[0]


def test_on_a_full_disk_a_canary_is_served_as_before(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, disk: FullDisk
) -> None:
    store = open_store(fold_grace_s=60)
    loaded(store, tmp_path, 1, 2, active=1)
    store.canary("ctr", 2, 0.5)
    store.label("ctr", "next", 2)
    unfolded(store)
    store.close()
    disk.full = True
    store = open_store(fold_grace_s=60)
    ctr = store.model("ctr")
    assert (ctr.served.versions, ctr.served.share, dict(ctr.served.labels)) == ((1, 2), 0.5, {"next": 2})
    for version in (1, 2):
        rows, found = ctr.lookup("item_id", [5, 9, 999], version=version, return_found=True)
        np.testing.assert_array_equal(rows[0], scenes.vector("item", 5, 5))
        np.testing.assert_array_equal(rows[1], scenes.vector("item", version, 9))
        assert found.tolist() == [True, True, False]
    used = store.status()["overlay_budget"]["used"]
    assert used == sum(overlay.nbytes for view in ctr.served.views for overlay in view.overlays) > 0
    disk.full = False
    store.withdraw("ctr")
    assert store.status()["overlay_budget"]["used"] == used // 2


def test_what_does_not_fit_into_memory_unfolded_is_not_passed_over(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, disk: FullDisk
) -> None:
    store = open_store(fold_grace_s=60)
    loaded(store, tmp_path, 1)
    loaded(store, tmp_path, 1, model="other")
    unfolded(store)
    expected = rows_of(store)
    store.close()
    disk.full = True
    store = open_store(overlay_budget="64B")
    assert (store.model("ctr").ready, store.model("other").ready) == (False, True)
    problem = store.model("ctr").problem or ""
    assert FULL in problem
    assert "overlay_budget, 64 bytes" in problem
    disk.full = False
    store.activate("ctr", 1)
    assert same(rows_of(store), expected)
    assert store.model("ctr").problem is None


def test_a_dense_part_that_cannot_be_folded_is_served(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, disk: FullDisk
) -> None:
    pytest.importorskip("onnxruntime")
    om = pytest.importorskip("tests.predict.onnx_models")
    store = open_store(fold_grace_s=60)
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=SMALL, dense=scenes.some_dense()))
    store.apply_delta(scenes.delta(1, dense=om.linear({"user_id": np.ones(scenes.DIM["user"])}, 50.0)))
    wanted = {"user_id": [3]}
    expected = store.model("ctr").predict(wanted)
    store.close()
    disk.full = True
    store = open_store()
    np.testing.assert_array_equal(store.model("ctr").predict(wanted), expected)
    disk.full = False
    store.apply_delta(scenes.stamped(2, {"item": [2]}))
    folded(store)
    np.testing.assert_array_equal(store.model("ctr").predict(wanted), expected)
    store.close()
    np.testing.assert_array_equal(open_store().model("ctr").predict(wanted), expected)


# --- a disk that really is


def really(where: Path, small: Path) -> None:
    """On the small file system `small`, with snapshots in `where`: load, fill it up, start, make room, go on."""
    with quick_build.in_process():
        for base in ("sealed", "rocksdb"):

            def opened(grace_s: float, base: BaseKind = base) -> tierstore.Store:
                data = small / base
                return tierstore.open(
                    data, host_budget="1MiB", load_workers=1, disk_threads=2, base=base, fold_grace_s=grace_s
                )

            with opened(60) as store:
                store.load_snapshot(scenes.write_snapshot(where / base, rows=SMALL))
                unfolded(store)
                expected = rows_of(store)
            filler = small / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            with opened(0) as store:
                assert same(rows_of(store), expected)
                with pytest.raises(DiskFull, match=FULL):  # a small one may find room that RocksDB has left
                    store.apply_delta(scenes.stamped(6, {"item": range(50_000)}))
                filler.unlink()
                store.apply_delta(scenes.stamped(6, {"item": [6]}))
                folded(store)
            with opened(0) as store:
                assert item(store, 6) == scenes.vector("item", 6, 6)[0]
                assert store.verify().ok


def without_room_for_strings(where: Path, small: Path) -> None:
    """A load whose rows fit, and whose strings of keys would not."""

    def snapshot(version: int) -> Path:
        with tierstore.SnapshotWriter(where / f"strings-{version}", model="ctr", version=version) as writer:
            words = [secrets.token_hex(60) for _ in range(60_000)]
            writer.table("word", dim=1, dtype="float16", key="string").write(
                words, np.ones((len(words), 1), np.float32)
            )
            writer.feature("word", table="word")
            writer.warmup("word", words[:10])
        return where / f"strings-{version}"

    with (
        quick_build.in_process(),
        tierstore.open(small / "data", host_budget="1MiB", load_workers=1, disk_threads=2) as store,
    ):
        filler = small / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small).free - 4_200_000))
        for version, kept in ((1, False), (2, True)):
            store.load_snapshot(snapshot(version))
            (entry,) = (of for of in store.status()["models"]["ctr"]["versions"] if of["version"] == version)
            assert (entry["hashes_only"] == {}) == kept
            assert store.verify().rows == 60_000 * version
            filler.unlink(missing_ok=True)
        store.export("ctr", where / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["really", "without_room_for_strings"])
def test_a_full_disk_as_the_kernel_and_rocksdb_know_it(tmp_path: Path, what: str) -> None:
    """In a mount namespace of its own, which is gone with its process."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=24m none "$0" && exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*mount, small, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    code = f"from pathlib import Path; from tests.engine.lifecycle.test_full_disk import {what}; {what}(Path({str(tmp_path)!r}), Path({str(small)!r}))"
    done = subprocess.run(
        [*mount, small, sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
