"""What nodes of a real cluster do not have: room for a delta, rows, replicas from the beginning, numbers that scripts cannot count to."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version, marks, member
from tierstore.engine.placements.cluster import ingester, placement
from tierstore.engine.placements.cluster import model as cluster_model
from tierstore.formats.delta.reader import read_delta

pytestmark = pytest.mark.usefixtures("quick_loads")


SMALL = "1KiB"  # overlay_budget of a node; a delta of 100 rows of table item takes 6 KiB


def test_a_delta_that_a_node_cannot_take_is_refused_by_every_node(open_node: OpenNode, tmp_path: Path) -> None:
    a, b = open_node("a"), open_node("b", overlay_budget=SMALL)
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves it", 60)
    assert a.apply_delta(scenes.stamped(1, {"item": range(5)})).applied
    for store in (a, b):
        with pytest.raises(tierstore.TooLarge, match="overlay_budget of node"):
            store.apply_delta(scenes.stamped(2, {"item": range(100)}))
    b.close()
    assert a.apply_delta(scenes.stamped(2, {"item": range(100)})).applied


def test_a_node_without_room_for_a_delta_goes_on_once_rows_have_it(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "STALLED_S", 0.2)
    a, b = open_node("a"), open_node("b", overlay_budget=SMALL)
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves it", 60)
    check(b, "item", range(200), 0)
    delta = scenes.stamped(1, {"item": range(100)})
    assert member(a).shared.append(1, read_delta(delta).digest, delta, None)
    scenes.eventually(lambda: b.status()["models"]["ctr"]["watermark"] == 1, "b has it from the rows", 60)
    check(b, "item", range(100), 1)
    check(b, "item", range(100, 1000), 0)
    # one that starts meanwhile
    bring = ingester.Ingester._bring
    monkeypatch.setattr(ingester.Ingester, "_bring", lambda *_: None)
    delta = scenes.stamped(2, {"item": range(100)})
    assert member(a).shared.append(2, read_delta(delta).digest, delta, None)
    c = open_node("c", overlay_budget=SMALL)
    scenes.eventually(lambda: member(c).follower._failed is not None, "c cannot serve yet", 60)
    monkeypatch.setattr(ingester.Ingester, "_bring", bring)
    scenes.eventually(lambda: c.model("ctr").active_version == 1, "c serves", 60)
    check(c, "item", range(100), 2)


def test_every_node_says_that_rows_are_gone(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.1)
    stores = [open_node(name, remote_lease_s=1.0) for name in "ab"]
    stores[0].load_snapshot(scenes.write_snapshot(tmp_path))
    scenes.eventually(lambda: "ctr" in stores[1].models() and has_version(stores[1], 1), "both serve it", 60)
    shared, tags = member(stores[0]).shared, stores[0].model("ctr").catalogue.info(1).tags
    shared._cluster.call("DEL", f"ts:{{{tags[0].decode()}}}:ctr:1")
    for store in stores:
        said = f"1 of its {len(tags)} tags are gone"
        scenes.eventually(
            lambda store=store, said=said: said in (member(store).status()["problem"] or ""), "its status says so", 60
        )


def test_a_replica_that_came_later_is_found(open_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "REFRESH_EVERY_S", 0.0)
    cluster = open_node().placement.cluster  # type: ignore[attr-defined]
    cluster._topology = {slot: of[:1] for slot, of in cluster.topology.items()}  # as if replicas had not been there
    scenes.eventually(lambda: len(cluster.replicas_of(0)) == 1, "the replica can be asked", 60)


def test_seqs_may_be_larger_than_the_doubles_of_the_scripts(open_node: OpenNode, tmp_path: Path) -> None:
    a, b, at = open_node("a"), open_node("b"), 2**53
    a.load_snapshot(scenes.write_snapshot(tmp_path, delta_seq=at))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves version 1", 60)
    for seq in (at + 1, at + 2, at + 3):
        delta = scenes.stamped(seq, {"item": range(seq - at)})
        assert a.apply_delta(delta).applied
        assert not b.apply_delta(delta).applied
    for store in (a, b):
        scenes.eventually(lambda store=store: store.status()["models"]["ctr"]["overlays"] == 0, "they are folded", 60)
        check(store, "item", range(1), at + 3)
        assert set(marks(store)) == {at + 3}


def test_rows_that_the_log_cannot_bring_up_any_more_are_a_problem_until_a_newer_snapshot_serves(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = open_node("a")
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    shared = member(a).shared
    with monkeypatch.context() as waiting:
        waiting.setattr(ingester.Ingester, "_seen_by_all", lambda *_: 0)  # rows wait for nodes
        a.apply_delta(scenes.stamped(1, {"item": range(9)}))
        a.apply_delta(scenes.stamped(2, {"item": range(9)}))
        shared._cluster.call("XDEL", shared._log, "1-0", "2-0")
    said = "has deltas up to 0, and the log in the cluster lacks those that follow: load a newer snapshot"
    scenes.eventually(lambda: said in (member(a).status()["problem"] or ""), "its status says so", 60)
    a.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=2))
    scenes.eventually(lambda: member(a).status()["problem"] is None, "it ends", 60)
    assert a.apply_delta(scenes.stamped(3, {"item": range(9)})).applied


@pytest.mark.parametrize("rows_have_it", [True, False])
def test_a_log_that_has_lost_its_end_goes_on_after_what_the_rows_have_or_says_what_to_do(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_have_it: bool
) -> None:
    """Its stream remembers that it was longer, and takes no entry up to there."""
    a = open_node("a")
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    a.apply_delta(scenes.stamped(1, {"item": range(9)}))
    scenes.eventually(lambda: a.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
    seen_by_all = ingester.Ingester._seen_by_all
    if not rows_have_it:
        monkeypatch.setattr(ingester.Ingester, "_seen_by_all", lambda *words: min(1, seen_by_all(*words)))
    a.apply_delta(scenes.stamped(2, {"item": range(9)}))
    if rows_have_it:
        scenes.eventually(lambda: a.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
    shared = member(a).shared
    (first, _) = shared.read(0, 2)
    shared._cluster.call("XDEL", shared._log, "2-0")
    shared._cluster.call("HSET", shared._current, "seq", 1, "digest", f"1 {first.digest}")
    third = scenes.stamped(3, {"item": range(9)})
    if rows_have_it:
        assert a.apply_delta(third).applied
        return
    monkeypatch.setattr(cluster_model, "VISIBLE_S", 1.5)
    with pytest.raises(tierstore.Overloaded):
        a.apply_delta(third)
    said = "lost deltas 2 to 2, and does not take them back from this node: load a snapshot with a delta_seq of 2"
    scenes.eventually(lambda: said in (member(a).status()["problem"] or ""), "its status says so", 60)
    monkeypatch.undo()
    a.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=2))
    scenes.eventually(lambda: member(a).status()["problem"] is None, "it ends", 60)
    assert a.apply_delta(third).applied


def test_a_model_that_serves_nothing_takes_deltas_again_after_another_server_has_come(
    open_node: OpenNode, tmp_path: Path
) -> None:
    a = open_node("a")
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    shared = member(a).shared
    assert shared.change(shared.pointer(), current=None)
    shared._cluster.call("HSET", shared._current, "server", "another")
    shared.beat("", None)
    assert shared.pointer().recovering is not None
    scenes.eventually(lambda: member(a)._recover() and shared.pointer().recovering is None, "it is over", 60)
