"""Masters that lose what they had acknowledged, under nodes over a real cluster: no seq has two contents, and nothing comes back.

Also where a server says less of itself: Kvrocks has no `master_replid` and no `run_id`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.cuts import hide
from tests.engine.placements.cluster.scenes import OpenNode, member
from tests.redis_cluster import RedisCluster, Server, cut_log, wait_for
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.placements.following import follower
from tierstore.engine.store import Store
from tierstore.tiers.cluster.redis_keys import slot_of

pytestmark = pytest.mark.usefixtures("quick_loads")

LOG_SLOT = slot_of(b"ts:ctr")
NOBODY = "0" * 40  # the id of a server that is none


@pytest.fixture(
    autouse=True, params=[(), ("master_replid",), ("master_replid", "run_id")], ids=["replid", "run_id", "start"]
)
def hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that scripts do not find in what a server says of itself."""
    hide(monkeypatch, *request.param)


@pytest.fixture
def whole(cluster: RedisCluster) -> Iterator[RedisCluster]:
    """A cluster with all its servers, before and after."""
    yield cluster
    for server in cluster.servers:
        if server.process is None:
            server.start()
    cluster.wait_until_ok()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[Store, threading.Event]:
    """Nodes that hear nothing of the cluster, once they are in here: set the event to have them hear it again."""
    cut: dict[Store, threading.Event] = {}
    look = follower.Follower._look

    def look_unless_cut(self: Any, **options: Any) -> bool:
        back = next((event for node, event in cut.items() if member(node).follower is self), None)
        if back is not None and not back.is_set():
            raise tierstore.errors.StorageError("cut off")
        return look(self, **options)

    monkeypatch.setattr(follower.Follower, "_look", look_unless_cut)
    return cut


def cut(away: dict[Store, threading.Event], *nodes: Store) -> None:
    for node in nodes:
        away[node] = threading.Event()
        scenes.eventually(lambda node=node: member(node).follower.problem is not None, "it is cut off", 60)


def shared(store: Store) -> SharedModel:
    return member(store).shared


def log_of(store: Store) -> list[tuple[int, str]]:
    return [(entry.seq, entry.digest) for entry in shared(store).read(0, 99)]


def rows_are(store: Store, seq: int, keys: range) -> bool:
    return np.array_equal(store.model("ctr").lookup("item_id", np.array(keys)), scenes.vectors("item", seq, keys))


def despite_errors(happened: Callable[[], bool], what: str) -> None:
    """Until it does; what is refused is tried again, as a client does it."""

    def tried() -> bool:
        try:
            return happened()
        except (tierstore.Overloaded, tierstore.errors.StorageError):
            return False

    scenes.eventually(tried, what, 60)


def has(store: Store, seq: int) -> bool:
    return (store.status("ctr")["models"]["ctr"]["watermark"] or 0) >= seq  # type: ignore[no-any-return]


def problem(store: Store) -> str:
    return str(store.status()["models"]["ctr"]["remote"]["problem"] or "")


def begin(open_node: OpenNode, tmp_path: Path, *names: str) -> list[Store]:
    """Nodes that serve version 1 with deltas 1 to 3."""
    nodes = [open_node(name) for name in names]
    nodes[0].load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2, 3):
        nodes[0].apply_delta(scenes.stamped(seq, {"item": range(10)}))
    for node in nodes:
        scenes.eventually(lambda node=node: "ctr" in node.models() and has(node, 3), "all have delta 3", 60)
        scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
    return nodes


def cut_replica(cluster: RedisCluster) -> tuple[Server, Server]:
    """The master that has the log, and its replica, which gets nothing from now on."""
    master = cluster.master_of(LOG_SLOT)
    cluster.replicate([master])
    return master, cluster.cut_replica(master)


X = scenes.stamped(4, {"item": range(20)})
Y = scenes.delta(4, {"item": (range(5, 25), scenes.vectors("item", 9, range(5, 25)))})


@pytest.mark.thorough
def test_no_other_content_is_taken_for_a_delta_that_a_failover_has_lost(
    whole: RedisCluster, open_node: OpenNode, tmp_path: Path, away: dict[Store, threading.Event]
) -> None:
    a, b = begin(open_node, tmp_path, "a", "b")
    log_before = log_of(a)
    master, replica = cut_replica(whole)
    a.apply_delta(X)
    acknowledged = log_of(a)
    cut(away, a, b)
    whole.lose(master, replica)
    wait_for(lambda: log_of(a) == log_before, "the log without what was lost")
    with pytest.raises(tierstore.Conflict, match="other content"):
        a.apply_delta(Y)  # it has the delta, and the cluster has not
    c = open_node("c")  # never had it
    scenes.eventually(lambda: "ctr" in c.models() and has(c, 3), "c serves", 60)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(c.apply_delta, Y)
        after = threads.submit(b.apply_delta, scenes.stamped(5, {"item": range(15, 30)}))
        for event in away.values():
            event.set()
        with pytest.raises(tierstore.Conflict, match="other content"):
            other.result()
        assert after.result().applied, "what follows waits until the log is whole again"
    assert log_of(a)[: len(acknowledged)] == acknowledged
    for node in (a, b, c):
        scenes.eventually(lambda node=node: has(node, 5), "all have all deltas", 60)
        assert rows_are(node, 4, range(15))
        assert rows_are(node, 5, range(15, 30))
        assert node.status()["models"]["ctr"]["remote"]["problem"] is None


@pytest.mark.thorough
def test_a_node_whose_deltas_were_lost_for_good_serves_what_the_cluster_has_and_says_so(
    whole: RedisCluster, open_node: OpenNode, tmp_path: Path, away: dict[Store, threading.Event]
) -> None:
    a, b = begin(open_node, tmp_path, "a", "b")
    cut(away, b)
    master, replica = cut_replica(whole)
    a.apply_delta(X)
    assert rows_are(a, 4, range(20))
    cut(away, a)
    whole.lose(master, replica)
    away[b].set()
    despite_errors(lambda: b.apply_delta(Y).applied, "taken once a is not waited for any more")
    away[a].set()
    despite_errors(lambda: rows_are(a, 9, range(5, 25)), "a serves what the cluster has")
    assert "lost delta 4" in a.status()["models"]["ctr"]["remote"]["problem"]
    assert a.apply_delta(scenes.stamped(5, {"user": [1]})).applied
    for node in (a, b):
        scenes.eventually(lambda node=node: has(node, 5), "both have all deltas", 60)
        assert rows_are(node, 3, range(5))
        assert rows_are(node, 9, range(5, 25))
    a.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=5))
    assert a.status()["models"]["ctr"]["remote"]["problem"] is None


@pytest.mark.thorough
def test_rows_of_a_delta_that_no_node_has_any_more_are_not_mixed_with_another_one(
    whole: RedisCluster, open_node: OpenNode, tmp_path: Path
) -> None:
    (a,) = begin(open_node, tmp_path, "a")
    master, replica = cut_replica(whole)
    a.apply_delta(X)
    scenes.eventually(lambda: a.status()["models"]["ctr"]["overlays"] == 0, "its rows are in the cluster", 60)
    a.close()
    whole.lose(master, replica)
    b = open_node("b")
    scenes.eventually(lambda: "ctr" in b.models() and has(b, 3), "b serves", 60)
    with pytest.raises(tierstore.Conflict, match="acknowledged with other content"):
        b.apply_delta(Y)
    despite_errors(lambda: "delta 4 of 'ctr' was" in problem(b) and "send that content" in problem(b), "it says so")
    assert b.apply_delta(X).applied
    scenes.eventually(lambda: b.status()["models"]["ctr"]["overlays"] == 0, "its rows are everywhere", 60)
    assert not problem(b)
    assert rows_are(open_node("c"), 4, range(20))


def test_rows_that_are_all_there_count_as_acknowledged_though_the_log_has_lost_their_delta(
    open_node: OpenNode, tmp_path: Path
) -> None:
    (a,) = begin(open_node, tmp_path, "a")
    a.apply_delta(X)
    scenes.eventually(lambda: a.status()["models"]["ctr"]["overlays"] == 0, "its rows are in the cluster", 60)
    a.close()
    c = open_node("c")
    of = shared(c)
    cut_log(of._cluster.call, of._log, 3)
    of._cluster.call("HSET", of._current, "seq", 3, "digest", "3 " + log_of(c)[-1][1], "mark:1", 3, "server", NOBODY)
    with pytest.raises(tierstore.Conflict, match="other content"):
        c.apply_delta(Y)
    assert c.apply_delta(scenes.stamped(5, {"item": [0]})).applied
    scenes.eventually(lambda: rows_are(c, 4, range(1, 20)), "the rows of delta 4 stay", 60)


def test_epochs_that_a_failover_has_lost_keep_deltas_from_the_rows_for_a_moment_alone(
    open_node: OpenNode, tmp_path: Path
) -> None:
    begin(open_node, tmp_path, "a")[0].close()
    b = open_node("b")
    scenes.eventually(lambda: bool(member(b).ingester._writers), "it has fenced the tags", 60)
    of = shared(b)
    assert member(b).ingester.epoch == 2
    of._cluster.call("SET", of._epochs, 0)
    of._cluster.call("SET", of._lease, f"{b.placement.node} 1")  # type: ignore[attr-defined]
    b.apply_delta(X)
    scenes.eventually(lambda: b.status()["models"]["ctr"]["overlays"] == 0, "its rows are in the cluster", 60)
