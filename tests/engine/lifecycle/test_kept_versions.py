"""Versions that are kept and do not serve: closed at once, never open twice, dropped, and read as a whole."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.engine import scenes
from tests.engine.lifecycle.test_switch import until
from tierstore.errors import Closed, Corruption
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Progress

pytestmark = pytest.mark.usefixtures("quick_loads")


KEYS = list(range(50))


def two_versions(store, where):
    """The store with version 2 active and version 1 kept, and closed."""
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(where, version, stamp=version))
    until(store, lambda: not store.model("ctr").state.retiring)
    return store


def test_what_reads_all_versions_leaves_nothing_open_in_a_store_that_was_closed_meanwhile(open_store, tmp_path):
    store = open_store(keep_versions=9)
    for model in ("a", "b"):
        for version in (1, 2):
            store.load_snapshot(scenes.write_snapshot(tmp_path, version, model=model))
    b = store.model("b")
    closer = threading.Thread(target=store.close)

    def close(step: Progress) -> None:
        if step.phase == "verify a 1" and closer.ident is None:
            closer.start()  # b is closed, then a
            while not b.state.live.closed:
                closer.join(0.01)

    with pytest.raises(Closed):
        store.verify(close)
    closer.join(20)
    with pytest.raises(Closed), b.opener.reading(1):
        pass
    again = open_store()
    again.activate("b", 1)
    assert again.model("b").problem is None


def test_a_store_that_is_closed_while_a_kept_version_is_read_leaves_that_to_nobody(open_store, tmp_path):
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    with store.model("ctr").opener.reading(1):
        store.close()
    again = open_store()
    again.activate("ctr", 1)
    assert again.model("ctr").problem is None


def test_a_canary_that_is_withdrawn_while_it_is_activated_is_opened_once_it_is_closed(
    open_store, tmp_path, monkeypatch
):
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version), activate=version == 1)
    store.canary("ctr", 2)
    ctr, wrong = store.model("ctr"), []
    promote = ctr.routes.promote

    def late(number: int, why: str) -> bool:
        store.withdraw("ctr")
        return promote(number, why)

    def activate() -> None:
        try:
            store.activate("ctr", 2)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    monkeypatch.setattr(ctr.routes, "promote", late)
    forth = threading.Thread(target=activate, daemon=True)
    with ctr.view("canary"):
        forth.start()
        forth.join(0.3)  # as long as it takes, if it is let
    forth.join(20)
    assert wrong == []
    assert ctr.active_version == 2


def test_verify_finds_damage_on_disk_of_a_kept_version(open_store, tmp_path):
    store = two_versions(open_store(keep_versions=9), tmp_path)
    current = store.model("ctr").where.version(1).db / "CURRENT"
    content = current.read_bytes()
    current.write_bytes(b"no such manifest\n")
    report = store.verify()
    assert [problem.partition(":")[0] for problem in report.problems] == ["ctr version 1"]
    current.write_bytes(content)
    assert store.verify().ok


def test_a_version_that_was_left_gives_its_files_back_at_once(store, tmp_path):
    two_versions(store, tmp_path)
    reader = ReaderPool(1)
    where = store.model("ctr").where.version(1)
    DiskTier.open(where.db, block_cache_bytes=1 << 20, reader=reader).close()  # its lock is free
    reader.close()
    assert store.rollback("ctr") == 1
    assert store.model("ctr").active_version == 1


def test_a_version_that_was_left_can_be_dropped_and_loaded_again(store, tmp_path):
    two_versions(store, tmp_path)
    store.drop("ctr", 1)
    assert not store.model("ctr").where.version(1).root.exists()
    store.load_snapshot(tmp_path / "ctr-1")
    assert np.array_equal(store.model("ctr").lookup("user_id", KEYS), scenes.vectors("user", 1, KEYS))


def test_deltas_of_before_and_after_a_version_was_left_are_there_when_it_serves_again(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1))
    store.apply_delta(scenes.stamped(1, {"user": range(10)}))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2))
    store.apply_delta(scenes.stamped(2, {"user": range(5)}))
    store.rollback("ctr")
    expected = scenes.vectors("user", 1, KEYS)
    expected[:10], expected[:5] = scenes.vectors("user", 1, range(10)), scenes.vectors("user", 2, range(5))
    assert np.array_equal(store.model("ctr").lookup("user_id", KEYS), expected)


def test_a_base_that_is_lost_while_its_version_is_kept_is_refused_and_what_serves_goes_on(store, tmp_path):
    two_versions(store, tmp_path)
    base = next((store.model("ctr").where.version(1).db / "base").iterdir())
    base.rename(tmp_path / "aside")
    with pytest.raises(Corruption, match="is missing"):
        store.activate("ctr", 1)
    assert np.array_equal(store.model("ctr").lookup("user_id", KEYS), scenes.vectors("user", 2, KEYS))
    (tmp_path / "aside").rename(base)
    store.activate("ctr", 1)
    assert np.array_equal(store.model("ctr").lookup("user_id", KEYS), scenes.vectors("user", 1, KEYS))
