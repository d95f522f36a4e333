"""Dense parts of models in a real cluster: rows and graph are of one delta, whenever a node begins."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, has_version, member
from tests.redis_cluster import RedisCluster, contents, cut_log, put_back
from tierstore.engine.placements.cluster import ingester
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.placements.following import follower
from tierstore.engine.store import Store
from tierstore.errors import NotFound
from tierstore.tiers.cluster.topology import connect
from tierstore.tiers.cluster.write import Writer

pytestmark = pytest.mark.usefixtures("quick_loads")

pytest.importorskip("onnxruntime", reason="needs the extra dense")
from tests.engine.reads import test_heads as heads  # noqa: E402
from tests.predict import onnx_models  # noqa: E402

KEYS = np.arange(1, 9)
DIMS = sorted(scenes.DIM.items())


def graph(stamp: int) -> bytes:
    return onnx_models.telltale(stamp, {"user_id": 4, "item_id": 8})


def delta(seq: int) -> bytes:
    """Rows and a graph of one stamp."""
    rows = {table: (range(10), np.full((10, scenes.DIM[table]), seq, np.float32)) for table in ("user", "item")}
    return scenes.delta(seq, rows, dense=graph(seq))


def stamp_of(store: Store) -> int:
    """Of the graph, which says in its answer how far rows are off it."""
    answer = store.model("ctr").predict({"user_id": KEYS, "item_id": KEYS})
    assert not answer["off"].any(), answer
    (stamp,) = set(answer["stamp"].reshape(-1).tolist())
    return int(stamp)


def folded(store: Store) -> bool:
    return bool(store.status()["models"]["ctr"]["overlays"] == 0)


@pytest.mark.parametrize("late", ["at the pointer", "at the copies"])
def test_a_node_that_starts_within_a_delta_has_rows_and_graph_of_one_delta(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    a = open_node("a")
    a.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(0)))
    a.apply_delta(delta(1))
    scenes.eventually(lambda: folded(a), "delta 1 is folded", 60)
    files, ran = SharedModel.files, threading.Event()
    follow = follower.Follower._run
    monkeypatch.setattr(follower.Follower, "_run", lambda self: ran.wait(60) and follow(self))

    def between(self: SharedModel, *of: Any) -> Any:
        monkeypatch.setattr(SharedModel, "files", files)
        before = files(self, *of)
        a.apply_delta(delta(2))
        scenes.eventually(lambda: folded(a), "delta 2 is folded", 60)
        return files(self, *of) if late == "at the pointer" else before

    monkeypatch.setattr(SharedModel, "files", between)
    b = open_node("b")
    assert stamp_of(b) == 2
    ran.set()
    scenes.eventually(lambda: folded(b), "and folded", 60)
    assert stamp_of(b) == 2


def test_a_node_that_begins_again_has_the_graph_of_its_rows(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.05)
    monkeypatch.setattr(ingester, "STALLED_S", 0.2)
    a, b = open_node("a", log_retention_s=0.0), open_node("b", remote_lease_s=600.0)
    a.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(0)))
    scenes.eventually(lambda: "ctr" in b.models() and has_version(b, 1), "b serves it", 60)
    look, away = follower.Follower._look, threading.Event()

    def look_unless_away(self: Any, **options: Any) -> bool:
        if self is member(b).follower and away.is_set():
            raise tierstore.errors.StorageError("cut off")
        return look(self, **options)

    monkeypatch.setattr(follower.Follower, "_look", look_unless_away)
    away.set()
    scenes.eventually(lambda: member(b).follower.problem is not None, "b is away", 60)
    for seq in (1, 2, 3):
        a.apply_delta(delta(seq))
    shared = member(a).shared
    scenes.eventually(lambda: [entry.seq for entry in shared.read(0, 9)][:1] != [1], "the log is cut off", 60)
    away.clear()
    scenes.eventually(lambda: b.status()["models"]["ctr"]["watermark"] == 3, "b has caught up", 60)
    assert stamp_of(b) == 3


def test_nodes_of_a_cluster_have_the_same_heads_whenever_they_begin(open_node: OpenNode, tmp_path: Path) -> None:
    a = open_node("a")
    a.load_snapshot(heads.snapshot(tmp_path))
    b = open_node("b")
    a.apply_delta(scenes.delta(1, heads.rows(2), heads={"cvr": heads.graph("cvr", 20), "ltv": None}))
    scenes.eventually(lambda: folded(a), "delta 1 is folded", 60)
    for node in (a, b, open_node("c")):
        scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["watermark"] == 1, "it has delta 1", 60)  # type: ignore[misc]
        assert (heads.predict(node, ""), heads.predict(node, "cvr")) == ((2, 1), (2, 20))
        with pytest.raises(NotFound, match="no head 'ltv'"):
            heads.predict(node, "ltv")


# --- a graph goes where its delta goes


class Refused:
    """Has the rows of a delta refused until that is over; those of later deltas wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seq: int) -> None:
        self.happened, self.over = threading.Event(), threading.Event()
        apply = Writer.apply_delta

        def refuse(this: Writer, epoch: int, of: int, *words: Any) -> Any:
            if of == seq and not self.over.is_set():
                self.happened.set()
                raise tierstore.errors.StorageError("the rows cannot be written")
            return apply(this, epoch, of, *words)

        monkeypatch.setattr(Writer, "apply_delta", refuse)


def begun(open_node: OpenNode, tmp_path: Path, *seqs: int) -> Store:
    """A node that serves version 1 with these deltas in its rows."""
    node = open_node("a")
    node.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(0)))
    for seq in seqs:
        node.apply_delta(delta(seq))
    scenes.eventually(lambda: marked(node, len(seqs)), "all rows have them, and the cluster says so", 60)
    return node


def marked(node: Store, seq: int) -> bool:
    return folded(node) and member(node).shared.pointer().marks.get(1, 0) == seq


def lose_delta_2(cluster: RedisCluster, digest: str | None) -> None:
    """Have the log end after delta 1, which has this digest, as if another server had it now."""
    connected = connect(cluster.url)
    shared = SharedModel(connected, "ctr")
    cut_log(connected.call, shared._log, 1)
    words = ("seq", 1, "digest", f"1 {digest}", "mark:1", 1, "server", "0" * 40)
    connected.call("HSET", shared._current, *words)
    connected.close()


def rows_alone(seq: int, stamp: int) -> bytes:
    return scenes.delta(seq, {table: (range(10), np.full((10, dim), stamp, np.float32)) for table, dim in DIMS})


@pytest.mark.parametrize("with_graph", [True, False])
def test_the_graph_of_a_delta_that_is_lost_goes_though_another_one_has_its_seq(
    open_node: OpenNode, cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_graph: bool
) -> None:
    """It was put into the cluster, and then the log had lost its delta, of which no row was there."""
    a = begun(open_node, tmp_path, 1)
    refused = Refused(monkeypatch, 2)
    a.apply_delta(scenes.delta(2, dense=graph(9)))
    assert refused.happened.wait(60)
    digest = a.model("ctr").log.digest(1)
    a.close()
    refused.over.set()
    lose_delta_2(cluster, digest)
    b, stamp = open_node("b"), 2 if with_graph else 1
    b.apply_delta(delta(2) if with_graph else rows_alone(2, 1))
    scenes.eventually(lambda: marked(b, 2), "it is in the rows", 60)
    assert stamp_of(b) == stamp
    assert stamp_of(open_node("c")) == stamp
    b.rollback("ctr", to_seq=1)
    assert stamp_of(b) == 1
    assert stamp_of(open_node("d")) == 1


def test_a_graph_that_a_server_has_lost_comes_again_with_its_delta(open_node: OpenNode, tmp_path: Path) -> None:
    a = begun(open_node, tmp_path, 1)
    shared = member(a).shared
    call, keys = shared._cluster.call, [f"{shared._base}{what}" for what in ("current", "log", "files:1", "heads:1")]
    then = contents(call, keys)
    a.apply_delta(delta(2))
    scenes.eventually(lambda: marked(a, 2), "it is in the rows", 60)
    put_back(call, then)
    scenes.eventually(lambda: shared.pointer().seq == 2, "the node puts the delta back", 60)
    scenes.eventually(lambda: marked(a, 2), "its rows are there", 60)
    assert stamp_of(open_node("b")) == 2
    a.rollback("ctr", to_seq=1)
    assert stamp_of(open_node("c")) == 1


def test_a_graph_stays_when_all_rows_have_its_delta_and_the_log_has_lost_it(
    open_node: OpenNode, cluster: RedisCluster, tmp_path: Path
) -> None:
    a = begun(open_node, tmp_path, 1, 2)
    digest = a.model("ctr").log.digest(1)
    a.close()
    lose_delta_2(cluster, digest)
    b = open_node("b")
    scenes.eventually(lambda: "ctr" in b.models() and has_version(b, 1), "it serves", 60)
    b.apply_delta(scenes.delta(3, {"user": ([400], np.zeros((1, 4), np.float32))}))
    scenes.eventually(lambda: marked(b, 3), "the log goes on", 60)
    assert stamp_of(b) == 2
    assert stamp_of(open_node("c")) == 2


def test_a_rollback_undoes_a_graph_whose_delta_no_row_has_yet(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = begun(open_node, tmp_path, 1)
    refused = Refused(monkeypatch, 2)
    a.apply_delta(delta(2))
    assert refused.happened.wait(60)
    a.rollback("ctr", to_seq=1)
    refused.over.set()
    assert stamp_of(a) == 1
    assert stamp_of(open_node("b")) == 1


def test_a_graph_is_not_put_over_a_newer_one_when_a_server_has_lost_rows(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.05)
    a = begun(open_node, tmp_path)
    shared = member(a).shared
    call, tag = shared._cluster.call, shared.versions()[1]["tags"][0]
    keys = [f"ts:{{{tag}}}:ctr:1{of}" for of in ("", ":item", ":user")]
    then = contents(call, keys)
    for seq in (1, 2):
        a.apply_delta(delta(seq))
    scenes.eventually(lambda: marked(a, 2), "they are in the rows", 60)
    refused = Refused(monkeypatch, 1)
    put_back(call, then)
    assert refused.happened.wait(60)  # it is applied again, and then delta 2 is
    files = shared.files(1, shared.versions()[1]["record"]["loaded_at_s"])
    assert files["dense.onnx"] == graph(2)
    refused.over.set()
    scenes.eventually(lambda: marked(a, 2), "both are in the rows again", 60)
    assert stamp_of(open_node("b")) == 2


def test_each_loss_of_the_log_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingester, "STALLED_S", 0.05)
    one: Any = object.__new__(ingester.Ingester)
    one._lost_s = {}

    def version(number: int, delta_seq: int = 0) -> Any:
        return SimpleNamespace(number=number, manifest=SimpleNamespace(delta_seq=delta_seq))

    def at(seq: int, mark: int | None = None) -> Any:
        return SimpleNamespace(seq=seq, marks={} if mark is None else {1: mark})

    assert one._awaits_log(version(1), at(4, mark=4), 5)
    scenes.eventually(lambda: not one._awaits_log(version(1), at(4, mark=4), 5), "nodes have had their time", 60)
    assert one._awaits_log(version(1), at(8, mark=8), 9), "another loss"
    one._lost_s.clear()
    assert one._awaits_log(version(1), at(0), 3), "its mark is lost too"
    assert not one._awaits_log(version(2, delta_seq=5), at(0), 5), "a version that is new"
