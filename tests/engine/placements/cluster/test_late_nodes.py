"""Nodes that stand still within a load into a real cluster, and go on once others have done it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version, member
from tests.redis_cluster import RedisCluster
from tierstore.engine.placements.cluster import shared_load
from tierstore.engine.placements.cluster.ingester import Ingester
from tierstore.engine.placements.cluster.shared_load import LoadState, PartTable, SharedLoad
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.placements.cluster.target import ClusterTarget
from tierstore.engine.store import Store
from tierstore.errors import Conflict, Corruption
from tierstore.tiers.cluster.topology import connect
from tierstore.tiers.cluster.write import Writer

pytestmark = pytest.mark.usefixtures("quick_loads")


def graph(weight: float) -> bytes:
    pytest.importorskip("onnxruntime")
    from tests.predict import onnx_models

    return onnx_models.linear({"user_id": np.full(scenes.DIM["user"], weight, np.float32)})


def dense(store: Store, number: int) -> bytes:
    """The dense part of a version in the cluster."""
    shared = member(store).shared
    return shared.files(number, shared.versions()[number]["record"]["loaded_at_s"])["dense.onnx"]


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


@contextlib.contextmanager
def loaded_meanwhile(late: Store, other: Store, stop: Stop, tmp_path: Path) -> Iterator[Future[int]]:
    """A load that stands at `stop` until the end of the block, before which another node has loaded the same."""
    snapshot = scenes.write_snapshot(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(late.load_snapshot, snapshot)
        assert stop.stands.wait(60)
        try:
            other.load_snapshot(snapshot, activate=False)
            yield load
        finally:
            stop.go_on.set()


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
    with loaded_meanwhile(a, b, Stop(monkeypatch, Writer, "begin"), tmp_path) as late:
        assert state(b) == WHOLE
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
    b = open_node("b", keep_versions=2, remote_lease_s=60.0)  # it brings deltas into the cluster
    b.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=graph(1.0)))
    a = open_node("a", keep_versions=2)
    scenes.eventually(lambda: "ctr" in a.models() and has_version(a, 1), "it serves", 60)
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    stop = Stop(monkeypatch, ClusterTarget, "publish")
    snapshot = scenes.write_snapshot(tmp_path, 2, dense=graph(2.0))

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(a.load_snapshot, snapshot, activate=False)
        assert stop.stands.wait(60)
        try:
            b.load_snapshot(snapshot, activate=False)
            assert dense(b, 2) == graph(2.0)
            b.apply_delta(scenes.delta(1, dense=graph(3.0)))
            scenes.eventually(lambda: dense(b, 2) == graph(3.0), "it is in the cluster", 60)
        finally:
            stop.go_on.set()
        late.result(60)
    assert dense(b, 2) == graph(3.0)


def unclaimed(store: Store) -> None:
    """Wait until nobody holds a load of version 1 any more."""
    shared = member(store).shared
    scenes.eventually(lambda: not shared._cluster.call("EXISTS", f"{shared._base}loader:1"), "its claim is over", 60)


def progress(store: Store) -> int:
    """How many fields are there of a load of version 1."""
    shared = member(store).shared
    return int(shared._cluster.call("HLEN", f"{shared._base}load:1"))


@pytest.mark.parametrize("note", ["checkpoint", "finish_part"])
def test_nothing_is_noted_of_a_load_that_has_ended(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    a, b = open_node("a"), open_node("b")
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    with loaded_meanwhile(a, b, Stop(monkeypatch, SharedLoad, note), tmp_path) as late:
        assert (state(b), progress(b)) == (WHOLE, 0)
    with contextlib.suppress(Conflict):  # it has more to write, and the load has ended
        late.result(60)
    assert progress(b) == 0
    check_whole(b)


def test_a_node_that_is_late_with_a_part_leaves_the_load_of_another_snapshot(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    finish, stands, go_on, done = SharedLoad.finish_part, threading.Event(), threading.Event(), threading.Event()

    def finish_late(this: SharedLoad, *words: Any) -> None:
        """The first node's comes right after the second one's."""
        if not stands.is_set():
            stands.set()
            assert go_on.wait(60)
            finish(this, *words)
            done.set()
        else:
            finish(this, *words)
            go_on.set()
            assert done.wait(60)

    monkeypatch.setattr(SharedLoad, "finish_part", finish_late)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(a.load_snapshot, scenes.write_snapshot(tmp_path / "earlier", stamp=9, default="mean"))
        assert stands.wait(60)
        try:
            unclaimed(a)
            b.load_snapshot(scenes.write_snapshot(tmp_path, default="mean"))
        finally:
            go_on.set()
        with pytest.raises(Conflict, match=r"is being loaded by another node|is in the cluster already"):
            late.result(60)
    check_whole(b)
    mean = scenes.vectors("item", 0, range(1000)).mean(0)
    np.testing.assert_allclose(b.model("ctr").lookup("item_id", np.array([5000])), mean[None], rtol=1e-5)


def test_what_a_load_notes_counts_for_that_load_alone(cluster: RedisCluster) -> None:
    connected = connect(cluster.url)
    try:
        shared = SharedModel(connected, "ctr")
        late, now = SharedLoad(shared, 1, "a"), SharedLoad(shared, 1, "b")
        assert late.claim("late")
        connected.call("DEL", f"{shared._base}loader:1")
        assert now.claim("now")
        shared.record(1, None, {"state": "loading", "token": "now"})
        of = {"item": PartTable(3, 7, [0.5], 0, [1, 2])}
        now.checkpoint("file", 5)
        now.finish_part(2, of, [])
        before = now.state()
        assert (before.parts, before.checkpoints) == ({2: of}, {"file": 5})
        for change in (
            lambda: late.checkpoint("file", 9),
            lambda: late.finish_part(1, of, ["file"]),
            lambda: late.begin_again(before, {"item": [1]}),
            late.end,
            late.release,
        ):
            change()
            assert now.state() == before
            assert connected.call("GET", f"{shared._base}loader:1") == b"now"
        now.begin_again(before, {"item": [1]})
        assert now.state() == LoadState({}, {"file": 5}, 1, {"item": [1]})
        now.end()
        assert now.state() == LoadState({}, {}, 0, None)
        assert not connected.call("EXISTS", f"{shared._base}loader:1")
    finally:
        connected.close()


def test_a_node_that_is_late_with_the_end_of_a_load_leaves_the_dense_part_of_another_snapshot(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    monkeypatch.setattr(shared_load, "CLAIM_S", 1.0)
    stop, began = Stop(monkeypatch, ClusterTarget, "publish"), threading.Event()
    place, published = ClusterTarget.place, threading.Event()

    def place_beside(this: ClusterTarget, *words: Any) -> Any:
        """The second node's load goes on once the first node's has ended."""
        if stop.stands.is_set():
            began.set()
            assert published.wait(60)
        return place(this, *words)

    monkeypatch.setattr(ClusterTarget, "place", place_beside)
    first, second = (
        scenes.write_snapshot(tmp_path / str(stamp), stamp=stamp, dense=graph(float(stamp))) for stamp in (1, 2)
    )
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(a.load_snapshot, first)
        assert stop.stands.wait(60)
        try:
            unclaimed(a)
            now = threads.submit(b.load_snapshot, second, activate=False)
            assert began.wait(60)
        finally:
            stop.go_on.set()
        with pytest.raises(Conflict, match="was dropped while it was loaded"):
            late.result(60)
        published.set()
        now.result(60)
    assert dense(b, 1) == graph(2.0)


def test_a_node_that_has_lost_the_lease_leaves_the_dense_part_of_a_later_delta(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = open_node("a", remote_lease_s=1.0)
    a.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(1.0)))
    scenes.eventually(lambda: member(a).ingester.epoch is not None, "it brings deltas into the cluster", 60)
    b = open_node("b", remote_lease_s=60.0)
    scenes.eventually(lambda: "ctr" in b.models() and has_version(b, 1), "it serves", 60)
    apply, stands, go_on, ended = Ingester._apply, threading.Event(), threading.Event(), threading.Event()

    def apply_late(this: Ingester, *words: Any, **more: Any) -> None:
        is_late = not stands.is_set()
        if is_late:
            stands.set()
            assert go_on.wait(60)
        try:
            apply(this, *words, **more)
        finally:
            if is_late:
                ended.set()

    monkeypatch.setattr(Ingester, "_apply", apply_late)
    a.apply_delta(scenes.delta(1, dense=graph(2.0)))
    assert stands.wait(60)
    b.apply_delta(scenes.delta(2, dense=graph(3.0)))
    scenes.eventually(lambda: dense(b, 1) == graph(3.0), "the other node has brought both", 60)
    scenes.eventually(lambda: member(b).shared.pointer().marks.get(1) == 2, "and says so", 60)
    go_on.set()
    assert ended.wait(60)
    assert dense(b, 1) == graph(3.0)
