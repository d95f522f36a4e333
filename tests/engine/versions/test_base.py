"""Versions over either kind of base, side by side in one store: each keeps the one that it was loaded with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import quick_build, scenes
from tierstore.errors import Corruption, TierstoreError

USERS = np.arange(-1, 502)


def answers(store: tierstore.Store) -> tuple[np.ndarray, np.ndarray]:
    return store.model("ctr").lookup("user_id", USERS, return_found=True)


def check(store: tierstore.Store, stamp: int, changed: dict[int, int]) -> None:
    """Users 0 to 499 have rows of `stamp`, but for those that deltas of a seq have changed, or deleted (0)."""
    rows, found = answers(store)
    for key, row, there in zip(USERS.tolist(), rows, found, strict=True):
        seq = changed.get(key, stamp if 0 <= key < 500 else 0)
        assert there == (seq > 0), key
        np.testing.assert_array_equal(row, scenes.vector("user", seq, key) if seq else np.zeros(4, np.float32))


def delta(seq: int, upserted: list[int], deleted: list[int]) -> bytes:
    return scenes.delta(
        seq, {"user": (upserted, scenes.vectors("user", seq, upserted))}, {"user": deleted} if deleted else None
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [("rocksdb", "sealed"), ("sealed", "rocksdb")])
def test_a_version_keeps_the_base_that_it_was_loaded_with(tmp_path: Path, open_store: Any, kinds: Any) -> None:
    with quick_build.in_process():
        for version, kind in enumerate(kinds, 1):
            store = open_store(base=kind, keep_versions=5, host_budget="1MiB")
            store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version))
            store.apply_delta(delta(2 * version - 1, [3, 500], [4]))
            store.apply_delta(delta(2 * version, [5], []))
            store.close()
    for kind in kinds:  # whatever the setting says now
        store = open_store(base=kind, keep_versions=5)
        records = [json.loads((tmp_path / f"data/models/ctr/{v}/version.json").read_text()) for v in (1, 2)]
        assert [record["base"] for record in records] == list(kinds)
        changed = {3: 3, 500: 3, 4: 0, 5: 4}
        check(store, 2, changed)
        assert store.rollback("ctr") == 1
        check(store, 1, changed)
        report = store.verify()
        assert report.ok, report.problems
        store.activate("ctr", 2)
        store.close()


def test_a_version_of_before_there_were_two_kinds_is_one_of_rocksdb(tmp_path: Path, open_store: Any) -> None:
    store = open_store(base="rocksdb")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1))
    store.close()
    record = tmp_path / "data/models/ctr/1/version.json"
    document = json.loads(record.read_text())
    assert document["format"] == 1
    del document["base"], document["xxh3"]  # nor was there a checksum
    record.write_text(json.dumps(document))
    store = open_store(base="sealed")
    check(store, 1, {})
    store.close()


def test_a_release_that_knows_no_sealed_files_does_not_take_such_a_version_for_an_empty_one(
    tmp_path: Path, open_store: Any
) -> None:
    store = open_store(base="sealed")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1))
    store.close()
    document = json.loads((tmp_path / "data/models/ctr/1/version.json").read_text())
    assert document["format"] == 2, "format 1 would be opened by it as a base of RocksDB, in which there is no row"


def test_damage_to_a_sealed_file_is_told_by_verify_and_costs_only_its_keys(tmp_path: Path, open_store: Any) -> None:
    store = open_store(host_budget="64KiB")  # so little that the host tier holds nothing
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1, rows={"user": 500, "item": 1000}))
    (path,) = (tmp_path / "data/models/ctr/1/db/base").glob("*item*")
    with open(path, "r+b") as file:
        file.seek(4096 + 50)
        file.write(b"\xff\xff")
    report = store.verify()
    assert not report.ok
    assert path.name in " ".join(report.problems)
    check(store, 1, {})
    model = store.model("ctr")
    with pytest.raises(Corruption, match=path.name):
        model.lookup("item_id", [1])
    np.testing.assert_array_equal(model.lookup("item_id", [999]), scenes.vectors("item", 1, [999]))
    store.close()
    path.write_bytes(path.read_bytes()[:-5])
    store = open_store()
    assert path.name in (store.model("ctr").problem or "")
    with pytest.raises(TierstoreError):
        model.lookup("item_id", [999])


def test_an_older_sealed_file_that_is_copied_over_an_open_one_is_noticed(tmp_path: Path, open_store: Any) -> None:
    store = open_store(host_budget="64KiB")  # so little that the host tier holds nothing
    for version in (1, 2):
        rows = {"user": 500, "item": 1000}
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version, rows=rows))
    ctr = store.model("ctr")
    older, path = (next((tmp_path / f"data/models/ctr/{version}/db/base").glob("*item*")) for version in (1, 2))
    whole = path.read_bytes()
    ctr.housekeeping.tasks.run()
    assert ctr.problem is None
    with open(path, "r+b") as file:  # in place, as `cp` does
        file.write(older.read_bytes())
    ctr.housekeeping.tasks.run()
    assert f"{path} was written over" in (ctr.problem or "")
    with open(path, "r+b") as file:
        file.write(whole)
    ctr.housekeeping.tasks.run()
    assert ctr.problem is None
    np.testing.assert_array_equal(ctr.lookup("item_id", [999]), scenes.vectors("item", 2, [999]))
