"""How old the newest delta is that a model shows, and what is said where that is too old."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_store import folded
from tierstore.engine.events.changes import REQUESTER
from tierstore.formats.delta.reader import Undecoded

pytestmark = pytest.mark.usefixtures("quick_loads")

NOW = datetime.now(UTC)


def delta(seq: int, age: timedelta) -> bytes:
    return scenes.stamped(seq, {"item": [seq]}, event_time=NOW - age)


def status(store: tierstore.Store) -> dict[str, Any]:
    document: dict[str, Any] = store.status()["models"]["ctr"]
    return document


def snapshot(root: Path, age: timedelta) -> Path:
    where = root / "snapshot"
    with tierstore.SnapshotWriter(where, model="ctr", version=1, created_at=NOW - age) as writer:
        keys = list(range(9))
        writer.table("item", dim=scenes.DIM["item"]).write(keys, scenes.vectors("item", 1, keys))
        writer.feature("item_id", table="item")
    return where


def test_the_age_is_that_of_the_newest_delta_that_is_visible(tmp_path, open_store):
    store = open_store(quotas={"*": {"freshness_max_s": 3600}})
    store.load_snapshot(snapshot(tmp_path, timedelta(days=30)))
    before = status(store)
    assert before["last_event_time"] is None
    assert before["delta_age_s"] >= 30 * 86400
    assert (before["fresh"], before["freshness_max_s"]) == (False, 3600)
    assert "no delta since the snapshot" in before["problem"]
    assert store.model("ctr").ready, "an old answer is better than none"
    store.apply_delta(delta(1, timedelta(0)))
    assert (status(store)["fresh"], status(store)["problem"]) == (True, None)
    store.apply_delta(delta(2, timedelta(days=2)))
    assert 2 * 86400 <= status(store)["delta_age_s"] < 3 * 86400
    assert f"the newest delta is of {(NOW - timedelta(days=2)).isoformat()}" in str(status(store)["problem"])
    store.close()
    store = open_store()
    assert status(store)["last_event_time"] == (NOW - timedelta(days=2)).isoformat(), "the log says so after a start"
    assert (status(store)["fresh"], status(store)["problem"]) == (None, None)
    store.rollback("ctr", to_seq=1)
    assert status(store)["last_event_time"] == NOW.isoformat(), "what is undone is not visible"
    store.rollback("ctr", to_seq=0)
    assert status(store)["last_event_time"] is None


def test_a_trainer_whose_clock_is_ahead_hides_no_old_answer(tmp_path, open_store):
    store = open_store(quotas={"*": {"freshness_max_s": 3600}})
    store.load_snapshot(snapshot(tmp_path, timedelta(days=30)))
    store.apply_delta(delta(1, timedelta(days=-365)))
    assert status(store)["last_event_time"] == (NOW + timedelta(days=365)).isoformat(), "as the delta says"
    assert (status(store)["fresh"], status(store)["problem"]) == (True, None)
    folded(store)
    store.close()
    (entry,) = (tmp_path / "data/models/ctr/log").glob("*.arrow")
    received = NOW - timedelta(hours=2)
    os.utime(entry, (received.timestamp(), received.timestamp()))
    store = open_store(quotas={"*": {"freshness_max_s": 3600}})
    assert 7200 <= status(store)["delta_age_s"] < 86400, "nothing happened after it was received"
    assert status(store)["fresh"] is False
    assert f"{(NOW + timedelta(days=365)).isoformat()}, but came {received.isoformat()}" in status(store)["problem"]


def test_the_status_says_when_the_newest_delta_was_received_and_from_whom(tmp_path, open_store):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, timedelta(days=30)))
    assert (status(store)["last_received_time"], status(store)["last_received_from"]) == (None, None)
    sending = REQUESTER.set("token trainer at 10.0.0.7:51312")
    began = datetime.now(UTC)
    store.apply_delta(delta(1, timedelta(days=2)))
    REQUESTER.reset(sending)
    received = datetime.fromisoformat(status(store)["last_received_time"])
    assert began <= received <= datetime.now(UTC)
    assert status(store)["last_received_from"] == "token trainer at 10.0.0.7:51312"
    store.apply_delta(delta(2, timedelta(days=1)))
    assert status(store)["last_received_from"] == "in process"
    folded(store)
    store.close()
    store = open_store()
    again = datetime.fromisoformat(status(store)["last_received_time"])
    assert received <= again <= datetime.now(UTC)
    assert status(store)["last_received_from"] is None, "the audit has it"


@pytest.mark.parametrize(("own", "fresh"), [(0, None), (1, False), (10**7, True)])
def test_a_model_may_have_a_limit_of_its_own(tmp_path, open_store, own, fresh):
    store = open_store(quotas={"*": {"freshness_max_s": 60}, "ctr": {"freshness_max_s": own}})
    store.load_snapshot(snapshot(tmp_path, timedelta(days=1)))
    assert status(store)["fresh"] is fresh
    assert (status(store)["problem"] is None) == (fresh is not False)


def test_to_say_how_old_the_newest_delta_is_nothing_of_it_is_decoded(tmp_path, open_store, monkeypatch):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, timedelta(days=30)))
    store.apply_delta(delta(1, timedelta(days=2)))
    folded(store)
    store.close()
    store = open_store()
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the whole delta is read")

        patch.setattr(Undecoded, "_decode", refuse)
        patch.setattr("tierstore.engine.deltas.log.read_regular", refuse)
        assert status(store)["last_event_time"] == (NOW - timedelta(days=2)).isoformat()


@pytest.mark.parametrize("content", [b"", b"no Arrow at all"])
def test_a_newest_delta_that_is_damaged_has_no_time(tmp_path, open_store, content):
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, timedelta(days=30)))
    store.apply_delta(delta(1, timedelta(days=2)))
    folded(store)
    store.close()
    store = open_store()
    (entry,) = (tmp_path / "data/models/ctr/log").glob("*.arrow")
    entry.write_bytes(content)
    assert status(store)["last_event_time"] is None
