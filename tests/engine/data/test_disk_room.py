"""Quotas on disk, and the floor of free space: refused before anything is written, and what is held stays served."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine import scenes
from tierstore.engine.data import disk_room
from tierstore.errors import Conflict, DiskFull
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")

MIB = 1 << 20


def snapshot(root, version: int, *, delta_seq: int = 0):
    """The directory of a snapshot, made once."""
    where = root / f"ctr-{version}"
    return where if where.exists() else scenes.write_snapshot(root, version, delta_seq=delta_seq)


def rows(seq: int, n: int = 100) -> bytes:
    return scenes.stamped(seq, {"user": range(n)})


@pytest.fixture
def free(monkeypatch):
    """The free bytes that the file system reports, of 100 GiB."""
    state = SimpleNamespace(bytes=50 << 30)

    def statvfs(path):
        return SimpleNamespace(f_bavail=state.bytes, f_bfree=state.bytes, f_frsize=1, f_blocks=100 << 30)

    monkeypatch.setattr(disk_room.os, "statvfs", statvfs)
    return state


def test_below_the_floor_deltas_and_loads_are_refused_and_nothing_is_lost(open_store, tmp_path, free):
    store = open_store(disk_reserve="256MiB")
    store.load_snapshot(snapshot(tmp_path, 1))
    first = rows(1)
    assert store.apply_delta(first).applied
    free.bytes = 256 * MIB + 100
    with pytest.raises(
        DiskFull, match=r"no room for a delta: 256.0 MiB are free, and 256.0 MiB are kept.*disk_reserve"
    ):
        store.apply_delta(rows(2))
    assert not store.apply_delta(first).applied, "one that is held is acknowledged again"
    free.bytes = 255 * MIB
    problem = store.status()["disk"]["problem"]
    assert problem.startswith(f"{tmp_path}"), "it names the file system"
    assert "255.0 MiB are free" in problem
    with pytest.raises(DiskFull, match="no room for a load"):
        store.load_snapshot(snapshot(tmp_path, 2))
    assert store.model("ctr").versions == [1]
    assert store.model("ctr").lookup("user_id", [1])[0, 0] == scenes.vectors("user", 1, [1])[0, 0]
    free.bytes = 50 << 30
    assert store.apply_delta(rows(2)).applied
    store.load_snapshot(snapshot(tmp_path, 2))


def test_a_load_that_reaches_the_floor_ends_and_leaves_nothing(open_store, tmp_path, free, monkeypatch):
    monkeypatch.setattr(disk_room, "_LOOK_AGAIN_S", 0.0)
    store = open_store(disk_reserve="256MiB")
    store.load_snapshot(snapshot(tmp_path, 1))

    def fills(progress):
        free.bytes = MIB

    with pytest.raises(DiskFull, match="the load"):
        store.load_snapshot(snapshot(tmp_path, 2), progress=fills)
    assert store.model("ctr").versions == [1]
    free.bytes = 50 << 30
    store.load_snapshot(snapshot(tmp_path, 2))
    assert store.model("ctr").active_version == 2


def test_the_floor_is_at_most_a_share_of_a_small_disk_and_zero_is_none(open_store, tmp_path, monkeypatch):
    small = SimpleNamespace(f_bavail=MIB, f_bfree=MIB, f_frsize=1, f_blocks=16 * MIB)
    monkeypatch.setattr(disk_room.os, "statvfs", lambda path: small)
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1))
    small.f_bavail = 16 * MIB // 50
    with pytest.raises(DiskFull):
        store.apply_delta(rows(1))
    store.close()
    assert open_store(disk_reserve=0).apply_delta(rows(1)).applied


def test_the_log_has_a_quota_and_room_again_when_it_is_pruned(open_store, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_room, "_LOOK_AGAIN_S", 0.0)
    size = len(rows(1))
    store = open_store(quotas={"ctr": {"log_bytes": 4 * size}}, log_retention_s=0)
    store.load_snapshot(snapshot(tmp_path, 1))
    model = store.model("ctr")
    seq, why = 0, ""
    while not why:
        seq += 1
        assert seq < 10
        try:
            store.apply_delta(rows(seq))
        except DiskFull as error:
            why = str(error)
    assert "log_bytes" in why
    assert seq in (3, 4, 5)
    assert files.tree_bytes(model.where.log) <= 4 * size
    assert model.lookup("user_id", [1])[0, 0] == scenes.vectors("user", seq - 1, [1])[0, 0]
    publisher = model.publisher
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: not publisher.current.overlays, timeout=60)
    scenes.housekeep(store)
    assert store.apply_delta(rows(seq)).applied


def test_versions_that_wait_to_be_activated_are_counted(open_store, tmp_path):
    store = open_store(keep_versions=1)
    store.load_snapshot(snapshot(tmp_path, 1))
    for version in (2, 3):
        store.load_snapshot(snapshot(tmp_path, version), activate=False)
    with pytest.raises(Conflict, match=r"never activated: \[2, 3\]; keep_versions=1 allows 2"):
        store.load_snapshot(snapshot(tmp_path, 4), activate=False)
    store.drop("ctr", 2)
    store.load_snapshot(snapshot(tmp_path, 4), activate=False)
    store.load_snapshot(snapshot(tmp_path, 5))
    scenes.housekeep(store)
    assert store.model("ctr").versions == [1, 5], "3 and 4 never served"


def test_a_model_has_a_quota_of_versions(open_store, tmp_path):
    store = open_store(quotas={"*": {"versions": 2}}, keep_versions=5)
    for version in (1, 2):
        store.load_snapshot(snapshot(tmp_path, version))
    with pytest.raises(Conflict, match=r"has 2 versions, its quota is 2; drop one first: \[1\]"):
        store.load_snapshot(snapshot(tmp_path, 3))
    store.drop("ctr", 1)
    store.load_snapshot(snapshot(tmp_path, 3))
    assert store.model("ctr").versions == [2, 3]
    assert os.path.isdir(tmp_path / "data/models/ctr/3")
    assert np.isfinite(store.model("ctr").lookup("user_id", [1])).all()
