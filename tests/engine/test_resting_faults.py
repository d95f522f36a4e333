"""What rests of a version that was left: taken back by one, never open twice, and closed with the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.engine import quick_build, scenes
from tests.engine.test_switch import until
from tierstore.errors import Closed
from tierstore.tiers import sealed
from tierstore.types import Progress


@pytest.fixture(autouse=True)
def _quick_loads() -> Iterator[None]:
    with quick_build.in_process():
        yield


def resting(store, model: str = "ctr") -> int | None:
    held = store.model(model)._resting._held
    return None if held is None else held[0]


def test_a_version_whose_rest_is_just_being_closed_is_opened_after_that(open_store, tmp_path, monkeypatch):
    """Version 1 rests, and version 2 comes to rest in its place while somebody goes back to version 1."""
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    until(store, lambda: not store.model("ctr")._keeper._retiring)
    assert resting(store) == 1
    closing, go_on, close = threading.Event(), threading.Event(), sealed.close_rocksdb

    def slowly(path, db):
        closing.set()
        assert go_on.wait(20)
        close(path, db)

    monkeypatch.setattr(sealed, "close_rocksdb", slowly)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3))
    assert closing.wait(20)
    wrong: list[BaseException] = []

    def activate() -> None:
        try:
            store.activate("ctr", 1)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    back = threading.Thread(target=activate, daemon=True)
    back.start()
    back.join(0.3)  # as long as it takes, if it is let
    go_on.set()
    back.join(20)
    assert wrong == []
    assert store.model("ctr").active_version == 1


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
            while not b._closed:
                closer.join(0.01)

    with pytest.raises(Closed):
        store.verify(close)
    closer.join(20)
    with pytest.raises(Closed), b.reading(1):
        pass
    again = open_store()
    again.activate("b", 1)
    assert again.model("b").problem is None


def test_a_store_that_is_closed_while_a_kept_version_is_read_leaves_that_to_nobody(open_store, tmp_path):
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    with store.model("ctr").reading(1):
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
    promote = ctr._promote

    def late(number: int) -> bool:
        store.withdraw("ctr")
        return promote(number)

    def activate() -> None:
        try:
            store.activate("ctr", 2)
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    monkeypatch.setattr(ctr, "_promote", late)
    forth = threading.Thread(target=activate, daemon=True)
    with ctr.view("canary"):
        forth.start()
        forth.join(0.3)  # as long as it takes, if it is let
    forth.join(20)
    assert wrong == []
    assert ctr.active_version == 2


def test_verify_finds_damage_on_disk_of_a_version_that_rests(open_store, tmp_path):
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    until(store, lambda: not store.model("ctr")._keeper._retiring)
    assert resting(store) == 1
    current = store.model("ctr").where.version(1).db / "CURRENT"
    content = current.read_bytes()
    current.write_bytes(b"no such manifest\n")
    report = store.verify()
    assert [problem.partition(":")[0] for problem in report.problems] == ["ctr version 1"]
    current.write_bytes(content)
    assert store.verify().ok
