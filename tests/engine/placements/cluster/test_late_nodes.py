"""Nodes that stand still within a load into a real cluster, and go on once others have done it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version, member
from tierstore.engine.placements.cluster import shared_load
from tierstore.engine.placements.cluster.target import ClusterTarget
from tierstore.engine.store import Store
from tierstore.errors import Conflict, Corruption
from tierstore.tiers.remote.write import Writer

pytestmark = pytest.mark.usefixtures("quick_loads")


class Stop:
    """Has the first call of a method wait until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> None:
        self.stands, self.go_on = threading.Event(), threading.Event()
        method = getattr(of, name)

        def stop(this: Any, *words: Any, **more: Any) -> Any:
            if not self.stands.is_set():
                self.stands.set()
                assert self.go_on.wait(120)
            return method(this, *words, **more)

        monkeypatch.setattr(of, name, stop)


def state(store: Store) -> tuple[str, int, int]:
    """The state of version 1, how many items it has in the cluster, and how many tags can be read."""
    record = member(store).shared.versions()[1]
    tags = [tag.encode() for tag in record["tags"]]
    with store.placement.open_writer("ctr", 1, record["tables"], tags) as writer:  # type: ignore[attr-defined]
        return record["state"], sum(writer.counts("item")), sum(state is not None for state in writer.states())


WHOLE = ("ready", 1000, 6)


def check_whole(store: Store) -> None:
    """Version 1 is in the cluster with all it has, and serves it."""
    assert state(store) == WHOLE
    store.activate("ctr", 1)
    check(store, "item", range(1000), 0)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_node_that_outlives_its_lease_does_not_begin_a_load_that_has_ended(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    a, b = open_node("a"), open_node("b")
    if earlier:
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(tierstore.errors.LoadCancelled):
            a.load_snapshot(scenes.write_snapshot(tmp_path / "earlier", stamp=9), cancelled=cancelled)
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    stop = Stop(monkeypatch, Writer, "begin")
    snapshot = scenes.write_snapshot(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(a.load_snapshot, snapshot)
        assert stop.stands.wait(60)
        try:
            b.load_snapshot(snapshot, activate=False)
            assert state(b) == WHOLE
        finally:
            stop.go_on.set()
        with pytest.raises(Conflict, match=r"is in the cluster already \(ready\)"):
            late.result(60)
    check_whole(b)


def test_a_load_that_failed_is_not_removed_beside_another_one(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, failed = open_node("a"), open_node("b"), threading.Event()
    upload = ClusterTarget._upload

    def fail(self: ClusterTarget, *words: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise Corruption("a file on this disk is damaged")
        upload(self, *words)

    monkeypatch.setattr(ClusterTarget, "_upload", fail)
    stop = Stop(monkeypatch, Writer, "drop")
    snapshot = scenes.write_snapshot(tmp_path)

    def load() -> bool:
        try:
            return b.load_snapshot(snapshot, activate=False) == 1
        except Conflict:  # it is being removed
            return False

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(a.load_snapshot, snapshot)
        assert stop.stands.wait(60)
        try:
            scenes.eventually(load, "its leftovers are gone, and it is loaded by the other node", 60)
        finally:
            stop.go_on.set()
        with pytest.raises(Corruption, match="is damaged"):
            late.result(60)
    check_whole(b)


def test_a_node_that_is_late_with_the_end_of_a_load_leaves_the_dense_part_of_a_delta(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    from tests.predict import onnx_models

    def graph(weight: float) -> bytes:
        return onnx_models.linear({"user_id": np.full(scenes.DIM["user"], weight, np.float32)})

    b = open_node("b", keep_versions=2, remote_lease_s=60.0)  # it brings deltas into the cluster
    b.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=graph(1.0)))
    a = open_node("a", keep_versions=2)
    scenes.eventually(lambda: "ctr" in a.models() and has_version(a, 1), "it serves", 60)
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    stop = Stop(monkeypatch, ClusterTarget, "publish")
    snapshot, shared = scenes.write_snapshot(tmp_path, 2, dense=graph(2.0)), member(b).shared

    def dense() -> bytes:
        return shared.files(2, shared.versions()[2]["record"]["loaded_at_s"])["dense.onnx"]

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(a.load_snapshot, snapshot, activate=False)
        assert stop.stands.wait(60)
        try:
            b.load_snapshot(snapshot, activate=False)
            assert dense() == graph(2.0)
            b.apply_delta(scenes.delta(1, dense=graph(3.0)))
            scenes.eventually(lambda: dense() == graph(3.0), "it is in the cluster", 60)
        finally:
            stop.go_on.set()
        late.result(60)
    assert dense() == graph(3.0)
