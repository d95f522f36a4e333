"""Loads into a real cluster: those that are broken off, fail, or lose rows on their way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version, member
from tierstore.engine.placements.cluster import ingester
from tierstore.engine.placements.cluster.shared_model import model_names
from tierstore.tiers.cluster.write import Writer

pytestmark = pytest.mark.usefixtures("quick_loads")


def test_a_load_that_was_cancelled_goes_on_from_what_the_cluster_has(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cancelled, written = open_node(), threading.Event(), []
    write_rows = Writer.write_rows

    def write(self: Writer, table: str, *rows: Any) -> None:
        write_rows(self, table, *rows)
        written.append(table)
        cancelled.set()

    monkeypatch.setattr(Writer, "write_rows", write)
    snapshot = scenes.write_snapshot(tmp_path)
    with pytest.raises(tierstore.errors.LoadCancelled):
        store.load_snapshot(snapshot, cancelled=cancelled)
    assert written == ["user"]
    store.load_snapshot(snapshot)
    assert written == ["user", "item"]
    check(store, "user", range(500), 0)
    check(store, "item", range(1000), 0)


def test_rows_of_a_load_that_a_server_has_lost_are_written_again(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cancelled, written = open_node(), threading.Event(), []
    write_rows = Writer.write_rows

    def write(self: Writer, table: str, *rows: Any) -> None:
        write_rows(self, table, *rows)
        written.append((table, len(rows[0])))
        cancelled.set()

    monkeypatch.setattr(Writer, "write_rows", write)
    snapshot = scenes.write_snapshot(tmp_path)
    with pytest.raises(tierstore.errors.LoadCancelled):
        store.load_snapshot(snapshot, cancelled=cancelled)
    assert written == [("user", 500)]
    shared = member(store).shared
    tag = shared.versions()[1]["tags"][1]
    rows = f"ts:{{{tag}}}:ctr:1:user"
    lost = shared._cluster.call("HLEN", rows)
    shared._cluster.call("DEL", rows)  # as a failover leaves it; the checkpoints are elsewhere
    store.load_snapshot(snapshot)
    assert written == [("user", 500), ("item", 1000), ("user", lost)]
    check(store, "user", range(500), 0)
    check(store, "item", range(1000), 0)


def test_the_log_keeps_what_a_version_lacks_that_is_being_loaded(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.05)
    store, uploading, go_on = open_node(log_retention_s=0.0), threading.Event(), threading.Event()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    write_rows = Writer.write_rows

    def write(self: Writer, *words: Any) -> None:
        uploading.set()
        assert go_on.wait(60)
        write_rows(self, *words)

    monkeypatch.setattr(Writer, "write_rows", write)
    shared, cleaned = member(store).shared, threading.Event()
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": range(20)}))
    scenes.eventually(lambda: not shared.read(0, 9), "without a load the log is cut off", 60)
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(store.load_snapshot, scenes.write_snapshot(tmp_path, 2, delta_seq=2))
        assert uploading.wait(60)
        for seq in (3, 4):
            store.apply_delta(scenes.stamped(seq, {"item": range(20)}))
        scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "they are folded", 60)
        trim = ingester.Ingester._trim
        monkeypatch.setattr(ingester.Ingester, "_trim", lambda self, *words: (trim(self, *words), cleaned.set()))
        assert cleaned.wait(60)
        assert [entry.seq for entry in shared.read(0, 9)] == [3, 4]
        go_on.set()
        assert load.result() == 2
    check(store, "item", range(20), 4)
    scenes.eventually(lambda: not shared.read(0, 9), "nobody needs it any more", 60)


def test_a_version_that_one_node_cannot_serve_is_not_switched_to(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = open_node("a")
    a.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    b = open_node("b")

    def fail(*_: Any, **__: Any) -> Any:
        raise tierstore.errors.StorageError("no memory here")

    monkeypatch.setattr(member(b).model.opener, "warmed", fail)
    with pytest.raises(tierstore.Conflict, match="no memory here"):
        a.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2))
    assert a.model("ctr").active_version == b.model("ctr").active_version == 1
    monkeypatch.undo()
    a.activate("ctr", 2)
    scenes.eventually(lambda: b.model("ctr").active_version == 2, "b serves version 2", 60)
    for store in (a, b):
        check(store, "item", range(1000), 2)


def test_a_first_load_that_failed_leaves_nothing_on_any_node(open_node: OpenNode, tmp_path: Path) -> None:
    stores, at_first = [open_node(name) for name in "ab"], {thread.name for thread in threading.enumerate()}
    snapshot = scenes.write_snapshot(tmp_path)
    item = next((snapshot / "item").iterdir())
    whole = item.read_bytes()
    item.write_bytes(whole[:-8])
    with pytest.raises(tierstore.SnapshotError):
        stores[0].load_snapshot(snapshot)
    commands = stores[0].placement.cluster  # type: ignore[attr-defined]
    scenes.eventually(lambda: not any(store.models() for store in stores), "no node has the model", 60)
    scenes.eventually(lambda: {thread.name for thread in threading.enumerate()} <= at_first, "its threads end", 60)
    left = [tmp_path / name / "models" / "ctr" for name in "ab"]
    scenes.eventually(lambda: not any(path.exists() for path in left), "its directories go", 60)
    assert model_names(commands) == []
    item.write_bytes(whole)
    stores[1].load_snapshot(snapshot)
    for store in stores:
        scenes.eventually(lambda store=store: "ctr" in store.models() and has_version(store, 1), "served", 60)
        check(store, "item", range(1000), 0)


def test_rows_that_are_too_old_do_not_get_into_a_cluster(open_node: OpenNode, tmp_path: Path) -> None:
    now, keys = time.time(), np.arange(40)
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        user = snapshot.table("user", dim=4, ttl_s="30d", time_column="seen")
        user.write(keys, scenes.vectors("user", 0, keys), now - 86400 * keys - 60)
        snapshot.feature("user_id", table="user")
    store = open_node()
    store.load_snapshot(tmp_path / "s")
    store.apply_delta(scenes.stamped(1, {"user": [35, 2]}))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "the delta is folded", 60)
    store.model("ctr").housekeeping.tasks.run()
    assert store.model("ctr").problem is None
    _, found = store.model("ctr").lookup("user_id", keys, return_found=True)
    assert set(keys[found].tolist()) == {*range(30), 35}
    ttl = store.status()["models"]["ctr"]["tables"]["user"]["ttl"]
    assert (ttl["expired_at_load"], ttl["expired_since"], ttl["checked_at"]) == (10, 0, None)
