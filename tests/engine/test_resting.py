"""What rests of a version that was left: a rollback does not open RocksDB, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine import quick_build, scenes
from tests.engine.test_store import settled
from tierstore.engine.store import Store
from tierstore.errors import Corruption
from tierstore.tiers.disk import DiskTier, ReaderPool

KEYS = range(50)


@pytest.fixture(autouse=True)
def _quick_loads() -> Iterator[None]:
    with quick_build.in_process():
        yield


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories in which RocksDB was opened, in order."""
    seen: list[Path] = []
    plain = DiskTier._open.__func__  # type: ignore[attr-defined]

    def noted(cls: type[DiskTier], path: Path, *args: object, **options: object) -> DiskTier:
        seen.append(path)
        tier: DiskTier = plain(cls, path, *args, **options)
        return tier

    monkeypatch.setattr(DiskTier, "_open", classmethod(noted))
    return seen


def load(store: Store, where: Path, version: int) -> None:
    """Load a version and switch to it; the one before it is left."""
    before = store.model("ctr").active_version if store.models() else None
    source = where / f"ctr-{version}"
    store.load_snapshot(source if source.exists() else scenes.write_snapshot(where, version, stamp=version))
    leave(store, before)


def switch(store: Store, version: int) -> None:
    before = store.model("ctr").active_version
    store.activate("ctr", version)
    leave(store, before)


def leave(store: Store, version: int | None) -> None:
    assert version is None or store.model("ctr")._keeper.wait_retired(version, 20)


def rows_of(store: Store) -> np.ndarray:
    return store.model("ctr").lookup("user_id", list(KEYS))


def test_going_back_and_forth_opens_rocksdb_for_new_versions_alone(
    store: Store, tmp_path: Path, openings: list[Path]
) -> None:
    load(store, tmp_path, 1)
    load(store, tmp_path, 2)
    before = len(openings)
    for version in (1, 2, 1, 2):
        switch(store, version)
        assert np.array_equal(rows_of(store), scenes.vectors("user", version, KEYS))
    assert len(openings) == before
    load(store, tmp_path, 3)
    before = len(openings)
    switch(store, 2)
    assert len(openings) == before


def test_deltas_that_came_before_and_while_it_rested_are_seen_again(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, 1)
    store.apply_delta(scenes.stamped(1, {"user": range(10)}))
    settled(store)
    load(store, tmp_path, 2)
    store.apply_delta(scenes.stamped(2, {"user": range(5)}))
    switch(store, 1)
    expected = scenes.vectors("user", 1, KEYS)
    expected[:10], expected[:5] = scenes.vectors("user", 1, range(10)), scenes.vectors("user", 2, range(5))
    assert np.array_equal(rows_of(store), expected)


def test_a_version_that_rests_can_be_dropped_and_loaded_again(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, 1)
    load(store, tmp_path, 2)
    store.drop("ctr", 1)
    assert not store.model("ctr").where.version(1).root.exists()
    load(store, tmp_path, 1)
    assert np.array_equal(rows_of(store), scenes.vectors("user", 1, KEYS))


def test_what_rests_is_closed_with_the_store(open_store: Callable[..., Store], tmp_path: Path) -> None:
    store = open_store()
    load(store, tmp_path, 1)
    load(store, tmp_path, 2)
    db = store.model("ctr").where.version(1).db
    store.close()
    reader = ReaderPool(1)
    DiskTier.open(db, block_cache_bytes=1 << 20, reader=reader).close()  # its lock is free
    reader.close()
    store = open_store()
    switch(store, 1)
    assert np.array_equal(rows_of(store), scenes.vectors("user", 1, KEYS))


def test_a_base_that_is_lost_while_it_rests_is_refused_and_what_serves_goes_on(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, 1)
    load(store, tmp_path, 2)
    base = next((store.model("ctr").where.version(1).db / "base").iterdir())
    base.rename(tmp_path / "aside")
    with pytest.raises(Corruption, match="is missing"):
        store.activate("ctr", 1)
    assert np.array_equal(rows_of(store), scenes.vectors("user", 2, KEYS))
    (tmp_path / "aside").rename(base)
    switch(store, 1)
    assert np.array_equal(rows_of(store), scenes.vectors("user", 1, KEYS))


def test_of_several_kept_versions_the_one_left_last_rests(
    open_store: Callable[..., Store], tmp_path: Path, openings: list[Path]
) -> None:
    store = open_store(keep_versions=2)
    for version in (1, 2, 3):
        load(store, tmp_path, version)
    before = len(openings)
    switch(store, 1)
    assert openings[before:] == [store.model("ctr").where.version(1).db]
    switch(store, 3)  # which has taken the place of version 2
    assert len(openings) == before + 1
    reader = ReaderPool(1)
    DiskTier.open(store.model("ctr").where.version(2).db, block_cache_bytes=1 << 20, reader=reader).close()
    reader.close()
