"""Rollbacks to a delta, and deactivation, over a real cluster: every node follows, and deltas go on."""

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
from tests.redis_cluster import contents, put_back
from tierstore.engine.placements.cluster import ingester
from tierstore.engine.placements.cluster.shared_model import MODELS, model_names
from tierstore.engine.placements.cluster.undo import Undo
from tierstore.engine.store import Store
from tierstore.errors import Conflict
from tierstore.tiers.cluster.write import Writer

pytestmark = pytest.mark.usefixtures("quick_loads")

ITEMS = 1000


class Expected:
    """The rows of table item that the deltas sent so far leave, by the promise alone: the states are kept."""

    def __init__(self) -> None:
        self.states: list[dict[int, int | None]] = [dict.fromkeys(range(ITEMS), 0)]

    def delta(self, seq: int, keys: range, gone: range = range(0)) -> bytes:
        state = self.states[-1] | dict.fromkeys(keys, seq) | dict.fromkeys(gone, None)
        self.states.append(state)
        rows = {"item": (keys, scenes.vectors("item", seq, keys))}
        return scenes.delta(seq, rows, {"item": gone} if gone else None)

    def rolled_back(self, to: int) -> None:
        self.states[-1] = self.states[to]

    def check(self, store: Store) -> None:
        state = self.states[-1]
        keys = np.arange(ITEMS + 100)
        rows, found = store.model("ctr").lookup("item_id", keys, return_found=True)
        there = np.array([state.get(int(key)) is not None for key in keys])
        np.testing.assert_array_equal(found, there)
        wanted = [scenes.vector("item", state[int(key)] or 0, int(key)) for key in keys[there]]
        np.testing.assert_array_equal(rows[there], np.array(wanted))


def folded(*stores: Store) -> None:
    for store in stores:
        scenes.eventually(
            lambda store=store: store.status()["models"]["ctr"]["overlays"] == 0, "its deltas are in the rows", 60
        )


def served(store: Store, number: int = 1) -> None:
    scenes.eventually(lambda: "ctr" in store.models() and has_version(store, number), "it serves", 60)


def follows(store: Store, like: Store) -> None:
    ranges = like.status()["models"]["ctr"]["undone"]
    scenes.eventually(lambda: store.status()["models"]["ctr"]["undone"] == ranges, "it is rolled back too", 60)


def ten_deltas(open_node: OpenNode, tmp_path: Path) -> tuple[Store, Expected]:
    store, expected = open_node("a"), Expected()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in range(1, 11):
        store.apply_delta(expected.delta(seq, range(seq * 30, seq * 30 + 40)))
    folded(store)
    return store, expected


def other_one_is_refused_and_the_lost_one_is_done(store: Store, expected: Expected) -> None:
    with pytest.raises(Conflict, match="a rollback to delta 5 has begun; send that one again first"):
        store.rollback("ctr", to_seq=8)
    store.rollback("ctr", to_seq=5)
    expected.rolled_back(5)
    expected.check(store)
    store.rollback("ctr", to_seq=8)
    expected.rolled_back(8)
    expected.check(store)


@pytest.mark.parametrize("waits", [False, True], ids=["who wants it is gone", "who wants it waits"])
def test_after_a_rollback_that_the_cluster_has_lost_midway_no_other_one_is_done(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    store, expected = ten_deltas(open_node, tmp_path)
    shared, put_before, lost = member(store).shared, Writer.put_before, threading.Event()

    def put(self: Writer, epoch: int, seq: int, *tags: Any) -> None:
        if seq == 6 and not lost.is_set():  # 10, 9, 8 and 7 are put back
            shared._cluster.call("HSET", shared._current, "rollback", "")
            shared._cluster.call("HINCRBY", shared._current, "generation", 1)
            lost.set()
            raise tierstore.errors.StorageError("a server is gone")
        put_before(self, epoch, seq, *tags)

    monkeypatch.setattr(Writer, "put_before", put)
    if waits:
        store.rollback("ctr", to_seq=5)
        assert lost.is_set()
        expected.rolled_back(5)
        expected.check(store)
        return
    shared.update(lambda _: {"rollback": 5})
    assert lost.wait(60)
    stopped = "was being rolled back to a delta, and the cluster has lost to which"
    scenes.eventually(lambda: stopped in (member(store).ingester.problem or ""), "it is noticed", 60)
    other_one_is_refused_and_the_lost_one_is_done(store, expected)


def test_after_a_rollback_whose_end_the_cluster_has_lost_no_other_one_is_done(
    open_node: OpenNode, tmp_path: Path
) -> None:
    store, expected = ten_deltas(open_node, tmp_path)
    store.rollback("ctr", to_seq=5)
    shared = member(store).shared
    shared._cluster.call("HDEL", shared._current, "undone")
    other_one_is_refused_and_the_lost_one_is_done(store, expected)


@pytest.mark.parametrize("lost", ["the end", "the end, and a tag's rows"])
def test_a_rollback_whose_end_was_lost_undoes_the_deltas_that_came_after_it_too(
    open_node: OpenNode, tmp_path: Path, lost: str
) -> None:
    store, expected = ten_deltas(open_node, tmp_path)
    shared = member(store).shared
    call, tag = shared._cluster.call, shared.versions()[1]["tags"][2]
    keys = [f"ts:{{{tag}}}:ctr:1{of}" for of in ("", "::before", ":item", ":user")]
    then = contents(call, keys)
    store.rollback("ctr", to_seq=5)
    expected.rolled_back(5)
    for seq in (11, 12):
        store.apply_delta(expected.delta(seq, range(seq * 20, seq * 20 + 500), range(900, 900 + seq)))
    folded(store)
    expected.check(store)
    if lost != "the end":
        put_back(call, then)
        call("DEL", f"ts:{{{tag}}}:ctr:1.1")
    call("HDEL", shared._current, "undone")
    call("HINCRBY", shared._current, "generation", 1)
    store.rollback("ctr", to_seq=5)
    expected.rolled_back(5)
    expected.check(store)
    assert store.status()["models"]["ctr"]["undone"] == [[6, 12]]
    store.rollback("ctr", to_seq=12)  # as it was when 12 was applied: without 6 to 10
    expected.states[-1] = expected.states[11] | dict.fromkeys(range(240, 740), 12) | dict.fromkeys(range(900, 912))
    expected.check(store)
    store.apply_delta(expected.delta(13, range(30, 60)))
    folded(store)
    expected.check(store)
    expected.check(open_node("b"))


@pytest.mark.parametrize("to", [1, 4])
def test_a_rollback_goes_on_when_a_server_has_lost_what_deltas_replaced(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: int
) -> None:
    """One tag falls back to before some deltas, within the rollback, when other tags are not to be read any more."""
    store, expected = open_node("a"), Expected()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    shared = member(store).shared
    call, tag = shared._cluster.call, shared.versions()[1]["tags"][2]
    keys = [f"ts:{{{tag}}}:ctr:1{of}" for of in ("", "::before", ":item", ":user")]
    for seq in range(1, 3):
        store.apply_delta(expected.delta(seq, range(seq * 10, seq * 10 + 300)))
    folded(store)
    then = contents(call, keys)
    for seq in range(3, 6):
        store.apply_delta(expected.delta(seq, range(seq * 10, seq * 10 + 300), range(900, 950)))
    folded(store)
    put_before, fallen = Writer.put_before, threading.Event()

    def put(self: Writer, epoch: int, seq: int, *tags: Any) -> None:
        if not fallen.is_set():
            put_back(call, then)
            call("DEL", f"ts:{{{tag}}}:ctr:1.1")
            fallen.set()
            raise tierstore.errors.StorageError("a server is gone")
        put_before(self, epoch, seq, *tags)

    monkeypatch.setattr(Writer, "put_before", put)
    assert store.rollback("ctr", to_seq=to) == 1
    assert fallen.is_set()
    expected.rolled_back(to)
    expected.check(store)
    store.apply_delta(expected.delta(6, range(700)))
    folded(store)
    expected.check(store)


def test_a_rollback_of_a_version_that_has_lost_tags_is_refused(open_node: OpenNode, tmp_path: Path) -> None:
    store, expected = open_node("a"), Expected()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        store.apply_delta(expected.delta(seq, range(seq * 30)))
    folded(store)
    shared = member(store).shared
    tag = shared.versions()[1]["tags"][3]
    shared._cluster.call("DEL", f"ts:{{{tag}}}:ctr:1", f"ts:{{{tag}}}:ctr:1:item", f"ts:{{{tag}}}:ctr:1:user")
    with pytest.raises(Conflict, match="some of its tags are gone from the cluster"):
        store.rollback("ctr", to_seq=1)


def test_a_rollback_waits_for_a_node_that_knows_all_versions(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, expected = open_node("a", keep_versions=2), Expected()
    for version in (2, 1):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    for seq in (1, 2):
        store.apply_delta(expected.delta(seq, range(seq * 30)))
    folded(store)
    catalogue, tried = store.model("ctr").catalogue, threading.Event()
    infos, roll_back = catalogue.infos, ingester.Ingester._roll_back
    known = [1]

    def roll(self: ingester.Ingester, *words: Any) -> None:
        try:
            roll_back(self, *words)
        finally:
            tried.set()

    monkeypatch.setattr(ingester.Ingester, "_roll_back", roll)
    monkeypatch.setattr(catalogue, "infos", lambda: [info for info in infos() if info.number in known])
    with ThreadPoolExecutor(1) as threads:
        rollback = threads.submit(store.rollback, "ctr", to_seq=1)
        assert tried.wait(60)
        assert member(store).shared.pointer().rollback == 1
        known.append(2)
        assert rollback.result(60) == 1
    expected.rolled_back(1)
    expected.check(store)
    store.activate("ctr", 2)
    expected.check(store)


@pytest.mark.parametrize("in_rows", [True, False])
def test_deltas_are_undone_on_every_node_and_the_next_ones_are_applied(
    open_node: OpenNode, tmp_path: Path, in_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = open_node("a"), open_node("b"), Expected()
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    served(b)
    a.apply_delta(expected.delta(1, range(50), range(900, 950)))
    folded(a, b)
    if not in_rows:
        monkeypatch.setattr(ingester.Ingester, "_apply", _never)
    a.apply_delta(expected.delta(2, range(25, 300), range(10)))
    b.apply_delta(expected.delta(3, range(5, 8), range(100, 200)))
    fourth = expected.delta(4, range(1000, 1050), range(300, 400))
    a.apply_delta(fourth)
    if in_rows:
        folded(a, b)
    expected.check(a)
    monkeypatch.undo()
    assert b.rollback("ctr", to_seq=1) == 1
    expected.rolled_back(1)
    expected.check(b)
    follows(a, b)
    expected.check(a)
    assert a.status()["models"]["ctr"]["undone"] == [[2, 4]]
    again = a.apply_delta(fourth)
    assert (again.applied, again.send_as) == (False, 5)
    with pytest.raises(Conflict, match="held with other content"):
        a.apply_delta(scenes.stamped(4, {"item": range(3)}))
    assert a.apply_delta(expected.delta(5, range(20, 40))).applied
    for store in (a, b):
        scenes.eventually(lambda store=store: store.status()["models"]["ctr"]["watermark"] == 5, "it has delta 5", 60)
        expected.check(store)
    folded(a, b)
    expected.check(a)
    a.close()
    b.close()
    expected.check(open_node("c"))


def _never(*_: Any) -> None:
    raise tierstore.errors.StorageError("the rows cannot be written")


def test_a_rollback_that_went_too_far_is_taken_back(open_node: OpenNode, tmp_path: Path) -> None:
    store, expected = open_node(), Expected()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in range(1, 6):
        store.apply_delta(expected.delta(seq, range(seq * 10, seq * 10 + 100), range(seq * 100, seq * 100 + 9)))
    folded(store)
    store.rollback("ctr", to_seq=2)
    expected.rolled_back(2)
    store.apply_delta(expected.delta(6, range(15, 60)))
    expected.check(store)
    store.rollback("ctr", to_seq=4)  # as it was then: with 3 and 4, without 5 and 6
    expected.rolled_back(4)
    expected.check(store)
    assert store.rollback("ctr", to_seq=4) == 1, "sent again"
    store.rollback("ctr", to_seq=6)
    expected.states[-1] = expected.states[2] | dict.fromkeys(range(15, 60), 6)
    expected.check(store)
    assert store.status()["models"]["ctr"]["undone"] == [[3, 5]]
    store.rollback("ctr", to_seq=0)
    expected.rolled_back(0)
    expected.check(store)
    expected.check(open_node("b"))


def test_a_version_that_is_loaded_later_and_one_that_is_kept_are_without_undone_deltas(
    open_node: OpenNode, tmp_path: Path
) -> None:
    store, expected = open_node(keep_versions=2), Expected()
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    for seq in range(1, 4):
        store.apply_delta(expected.delta(seq, range(seq * 10, seq * 10 + 100)))
    folded(store)
    store.rollback("ctr", to_seq=1)
    expected.rolled_back(1)
    store.apply_delta(expected.delta(4, range(700, 800)))
    folded(store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3))
    expected.check(store)
    store.activate("ctr", 1)
    expected.check(store)
    store.drop("ctr", 2)
    scenes.eventually(lambda: 2 not in member(store).shared.versions(), "it is gone", 60)
    store.load_snapshot(scenes.write_snapshot(tmp_path / "again", 2))
    expected.check(store)


def test_a_rollback_goes_on_when_the_node_that_does_it_ends(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = open_node("a"), open_node("b"), Expected()
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    served(b)
    for seq in range(1, 4):
        a.apply_delta(expected.delta(seq, range(seq * 10, seq * 10 + 400)))
    folded(a, b)
    leads = next(store for store in (a, b) if member(store).ingester.epoch is not None)
    other = b if leads is a else a
    put_before, stuck, go_on = Writer.put_before, threading.Event(), threading.Event()

    def put(self: Writer, epoch: int, seq: int, *tags: Any) -> None:
        put_before(self, epoch, seq, *tags)
        if not stuck.is_set():
            stuck.set()
            assert go_on.wait(60)

    monkeypatch.setattr(Writer, "put_before", put)
    with ThreadPoolExecutor(1) as threads:
        rollback = threads.submit(other.rollback, "ctr", to_seq=1)
        assert stuck.wait(60)
        with pytest.raises(tierstore.Overloaded, match="being rolled back"):
            other.model("ctr").lookup("user_id", np.arange(500))
        with pytest.raises(Conflict, match="is being rolled back to delta 1"):
            leads.rollback("ctr", to_seq=2)
        late = other.apply_delta(expected.delta(4, range(700)))  # acknowledged before the rollback ends
        assert late.applied
        scenes.eventually(lambda: member(other).ingester.epoch is not None, "the other node has the lease", 60)
        assert rollback.result(60) == 1
        go_on.set()  # the first one wakes up, and is fenced
    undone = other.status()["models"]["ctr"]["undone"]
    assert undone == [[2, 4]]
    expected.rolled_back(1)
    for store in (a, b):
        follows(store, other)
        expected.check(store)
        check(store, "user", range(500), 0)


def test_what_a_delta_replaced_is_kept_as_long_as_the_log_keeps_it(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.05)
    store, expected = open_node(log_retention_s=0.0), Expected()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        store.apply_delta(expected.delta(seq, range(seq * 100)))
    shared = member(store).shared
    scenes.eventually(lambda: not shared.read(0, 9), "the log is cut off", 60)
    with pytest.raises(Conflict, match=r"what delta 2 replaced is not kept any more.*log_retention_s"):
        store.rollback("ctr", to_seq=1)
    expected.check(store)
    tag = shared.versions()[1]["tags"][0]
    assert shared._cluster.call("HLEN", f"ts:{{{tag}}}:ctr:1::before") == 0
    store.apply_delta(expected.delta(3, range(7)))
    expected.check(store)


def test_a_dense_part_that_a_delta_brought_goes_with_it(open_node: OpenNode, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.predict import onnx_models

    def graph(weight: float) -> bytes:
        return onnx_models.linear({"user_id": np.full(scenes.DIM["user"], weight, np.float32)})

    a, b = open_node("a"), open_node("b")
    a.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(1.0), stamp=1))
    served(b)

    def score(store: Store) -> float:
        return float(np.ravel(store.model("ctr").predict({"user_id": [3]}))[0])

    before = score(a)
    a.apply_delta(scenes.delta(1, dense=graph(3.0)))
    folded(a, b)
    assert score(a) == score(b) == 3 * before
    a.rollback("ctr", to_seq=0)
    follows(b, a)
    assert score(a) == score(b) == before
    a.close()
    b.close()
    assert score(open_node("c")) == before


def test_a_deactivated_model_that_is_lost_from_the_list_is_kept(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.deactivate("ctr")
    commands = store.placement.cluster  # type: ignore[attr-defined]
    scenes.eventually(lambda: member(store).follower.pointer.deactivated, "it is known here", 60)
    commands.call("SREM", MODELS, "ctr")
    scenes.eventually(lambda: model_names(commands) == ["ctr"], "it is on the list again", 60)
    store.activate("ctr", 1)
    check(store, "user", range(500), 0)


def test_a_model_is_deactivated_on_every_node_and_activated_again(open_node: OpenNode, tmp_path: Path) -> None:
    a, b, expected = open_node("a"), open_node("b"), Expected()
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    served(b)
    a.apply_delta(expected.delta(1, range(30)))
    b.deactivate("ctr")
    for store in (a, b):
        scenes.eventually(lambda store=store: store.model("ctr").active_version is None, "it does not serve", 60)
        with pytest.raises(tierstore.NotReady, match="has no active version"):
            store.model("ctr").lookup("item_id", [1])
        with pytest.raises(tierstore.NotReady, match="before sending deltas"):
            store.apply_delta(scenes.stamped(2, {"item": range(5)}))
    b.deactivate("ctr")
    a.close()
    again = open_node("c")
    assert again.model("ctr").active_version is None
    again.activate("ctr", 1)
    served(b)
    for store in (again, b):
        expected.check(store)
    assert b.apply_delta(expected.delta(2, range(5, 60))).applied
    expected.check(b)


def test_what_is_under_way_refuses_a_rollback_to_a_delta(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_node(keep_versions=2)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    store.apply_delta(scenes.stamped(1, {"item": range(5)}))
    for seq in (2, 9):
        with pytest.raises(Conflict, match="expected a seq from 0 to 1"):
            store.rollback("ctr", to_seq=seq)
    store.canary("ctr", 1, 0.5)
    with pytest.raises(Conflict, match="withdraw the canary"):
        store.rollback("ctr", to_seq=0)
    store.withdraw("ctr")
    monkeypatch.setattr(Undo, "roll_back", lambda *_: None)
    member(store).shared.update(lambda _: {"rollback": 0})
    for refused in (lambda: store.activate("ctr", 1), lambda: store.deactivate("ctr")):
        with pytest.raises(Conflict, match="is being rolled back to delta 0"):
            refused()
