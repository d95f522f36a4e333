"""Models whose rows are in a real cluster: one node, and several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import int4_model
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, marks, member
from tests.redis_cluster import RedisCluster, needs_engine
from tierstore import kernels
from tierstore.engine.placements.cluster import ingester, placement
from tierstore.engine.placements.following import follower
from tierstore.engine.store import Store
from tierstore.errors import Conflict
from tierstore.formats.delta.reader import Undecoded
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.ssd import index as ssd_index
from tierstore.wire import resp

pytestmark = pytest.mark.usefixtures("quick_loads")


def test_a_model_is_loaded_served_changed_and_there_after_a_restart(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    check(store, "user", range(500), 0)
    check(store, "item", range(1000), 0)
    _, found = store.model("ctr").lookup("item_id", [5, 99_999], return_found=True)
    assert found.tolist() == [True, False]
    delta = scenes.stamped(1, {"item": range(10), "user": [3]})
    assert store.apply_delta(delta).applied
    check(store, "item", range(10), 1)
    assert not store.apply_delta(delta).applied
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "the delta is folded", 60)
    check(store, "item", range(10), 1)
    check(store, "item", range(10, 1000), 0)
    store.close()
    again = open_node("b")
    check(again, "item", range(10), 1)
    check(again, "user", range(4, 500), 0)
    assert again.status()["models"]["ctr"]["watermark"] == 1


@needs_engine("redis", "valkey", reason="it removes keys when its memory is full")
def test_a_cluster_that_removes_keys_when_its_memory_is_full_is_a_problem_until_it_does_not(
    open_node: OpenNode, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "REFRESH_EVERY_S", 0.0)
    evicting, *_ = cluster.servers

    def problem(store: Store) -> str | None:
        found = [one["text"] for one in store.status()["problems"] if one["kind"] == "cluster"]
        return found[0] if found else None

    evicting.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        store = open_node()
        assert problem(store) is None, "its memory has no bound"
        store.close()
        evicting.call("CONFIG", "SET", "maxmemory", 1 << 40)
        store = open_node("b")
        assert f"maxmemory-policy is allkeys-lru ({evicting.address})" in str(problem(store))
        assert "CONFIG SET maxmemory-policy noeviction" in caplog.text
        assert store.status()["remote"]["reachable"]
        evicting.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        scenes.eventually(lambda: problem(store) is None, "the problem ends")
    finally:
        evicting.call("CONFIG", "SET", "maxmemory", 0)
        evicting.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_what_served_last_is_kept_and_served_by_a_rollback_of_any_node(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node(keep_versions=1)
    for version in (20, 21):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version % 16))
    assert store.rollback("ctr") == 20
    store.load_snapshot(scenes.write_snapshot(tmp_path, 22, stamp=6))
    scenes.eventually(lambda: store.model("ctr").versions == [20, 22], "what was rejected goes", 60)
    store.close()
    again = open_node("b", keep_versions=1)
    assert again.status()["models"]["ctr"]["rollback_to"] == 20
    assert again.rollback("ctr") == 20
    check(again, "item", range(10), 4)


def test_a_number_that_was_dropped_and_is_loaded_again_has_not_served(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version))
    store.drop("ctr", 1)
    scenes.eventually(lambda: list(member(store).shared.versions()) == [2], "it is gone", 60)
    store.load_snapshot(scenes.write_snapshot(tmp_path / "again", 1, stamp=5), activate=False)
    with pytest.raises(Conflict, match="no version that served before 2"):
        open_node("b", keep_versions=9).rollback("ctr")
    assert store.status()["models"]["ctr"]["rollback_to"] is None


def test_a_rejected_version_whose_rows_are_lost_does_not_hold_the_log(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.1)
    store = open_node(keep_versions=9, log_retention_s=0)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    assert store.rollback("ctr") == 1
    with store.placement.open_writer("ctr", 2, {}, store.model("ctr").catalogue.info(2).tags) as writer:  # type: ignore[attr-defined]
        writer.drop(pause_s=0)
    shared = member(store).shared
    scenes.eventually(lambda: "tags are gone" in (member(store).ingester.problem or ""), "it is noticed", 60)
    for seq in range(1, 4):
        store.apply_delta(scenes.stamped(seq, {"item": range(10)}))
    scenes.eventually(lambda: not shared.read(0, 9), "every delta is in the rows of what serves", 60)


def test_a_node_decodes_a_delta_once(open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the delta, serves it and brings it into the rows of the cluster."""
    decoded: list[int] = []

    decode = Undecoded.decode

    def noted(*args: Any) -> Any:
        delta = decode(*args)
        decoded.append(delta.seq)
        return delta

    monkeypatch.setattr(Undecoded, "decode", noted)
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in range(1, 6):
        store.apply_delta(scenes.stamped(seq, {"item": range(10), "user": [3]}))
    scenes.eventually(lambda: marks(store)[-1] == 5, "the rows in the cluster have all", 60)
    assert decoded == [1, 2, 3, 4, 5]


def test_rows_of_four_bits_are_answered_as_documented_by_every_node(open_node: OpenNode, tmp_path: Path) -> None:
    model, store = int4_model.Model(), open_node()
    store.load_snapshot(model.snapshot(tmp_path / "snapshot"))
    model.check(store.model("ctr"))
    store.apply_delta(model.delta(1))
    model.check(store.model("ctr"))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "the delta is folded", 60)
    for node in (store, open_node("b")):
        model.check(node.model("ctr"))


def test_errors_of_deltas_are_those_of_any_store(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node()
    with pytest.raises(tierstore.NotFound):
        store.apply_delta(scenes.stamped(1, {"item": [1]}))
    store.load_snapshot(scenes.write_snapshot(tmp_path, delta_seq=7))
    with pytest.raises(tierstore.SequenceGap) as gap:
        store.apply_delta(scenes.stamped(9, {"item": [1]}))
    assert gap.value.expected_seq == 8
    with pytest.raises(tierstore.DeltaError, match="vectors of 8 numbers"):
        store.apply_delta(scenes.delta(8, {"item": ([1], np.ones((1, 3), np.float32))}))
    assert store.apply_delta(scenes.stamped(8, {"item": [1]})).applied
    with pytest.raises(tierstore.Conflict, match="other content"):
        store.apply_delta(scenes.stamped(8, {"item": [2]}))
    with pytest.raises(tierstore.Conflict, match="already"):
        store.load_snapshot(scenes.write_snapshot(tmp_path / "again", delta_seq=8))


def test_what_one_node_does_every_node_serves(open_node: OpenNode, tmp_path: Path) -> None:
    a, b = open_node("a"), open_node("b")
    a.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves version 1", 60)
    check(b, "item", range(1000), 0)
    a.apply_delta(scenes.stamped(1, {"item": range(20)}))
    b.apply_delta(scenes.stamped(2, {"item": range(10, 30), "user": range(5)}))  # after a's, whichever brings it in
    for store in (a, b):
        scenes.eventually(lambda store=store: store.status("ctr")["models"]["ctr"]["watermark"] == 2, "both deltas", 60)
        check(store, "item", range(10), 1)
        check(store, "item", range(10, 30), 2)
        check(store, "user", range(5), 2)
        check(store, "user", range(5, 500), 0)
    b.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=5, delta_seq=2))
    scenes.eventually(lambda: a.model("ctr").active_version == 2, "a serves version 2", 60)
    for store in (a, b):
        check(store, "item", range(1000), 5)
    a.apply_delta(scenes.stamped(3, {"item": range(5)}))
    assert a.rollback("ctr") == 1
    scenes.eventually(lambda: b.model("ctr").active_version == 1, "b serves version 1 again", 60)
    for store in (a, b):
        scenes.eventually(lambda store=store: store.status("ctr")["models"]["ctr"]["watermark"] == 3, "the delta", 60)
        check(store, "item", range(5), 3)
        check(store, "item", range(10, 30), 2)
    a.drop("ctr", 2)
    scenes.eventually(lambda: a.model("ctr").versions == [1] and b.model("ctr").versions == [1], "2 is dropped", 60)


class Paused:
    """Stops the thread of a node that applies a delta, after it has reached some tags and before the others."""

    def __init__(self, writer: Writer, after: int) -> None:
        self.reached, self.resume = threading.Event(), threading.Event()
        self._run, self._after, self._lock = writer._run, after, threading.Lock()
        writer._run = self  # type: ignore[method-assign, assignment]

    def __call__(self, *words: Any) -> int:
        with self._lock:
            self._after -= 1
            pause = self._after < 0
        if pause:
            self.reached.set()
            assert self.resume.wait(120)
        return self._run(*words)


@pytest.mark.thorough
def test_an_ingester_that_stops_within_a_delta_is_replaced_and_fenced(open_node: OpenNode, tmp_path: Path) -> None:
    nodes = [open_node(name, remote_lease_s=1.0) for name in "ab"]
    nodes[0].load_snapshot(scenes.write_snapshot(tmp_path))
    scenes.eventually(lambda: all("ctr" in node.models() for node in nodes), "both have the model", 60)
    for node in nodes:
        scenes.eventually(lambda node=node: node.model("ctr").active_version == 1, "both serve it", 60)
    for seq in range(1, 6):
        scenes.eventually(lambda: any(member(node).ingester.epoch for node in nodes), "one has the lease", 60)
        old = next(node for node in nodes if member(node).ingester.epoch)
        new = next(node for node in nodes if node is not old)
        scenes.eventually(lambda old=old: bool(member(old).ingester._writers), "it is at work", 60)
        epoch = member(old).ingester.epoch
        paused = Paused(member(old).ingester._writers[1], after=seq)
        nodes[seq % 2].apply_delta(
            scenes.stamped(seq, {"item": range(100), "user": range(50)}, deletes={"item": [500 + seq]})
        )
        assert paused.reached.wait(60)
        scenes.eventually(lambda new=new: member(new).ingester.epoch is not None, "the other one has the lease", 60)
        scenes.eventually(lambda seq=seq, new=new: set(marks(new)) == {seq}, "every tag has the delta", 60)
        paused.resume.set()
        scenes.eventually(lambda old=old, epoch=epoch: member(old).ingester.epoch != epoch, "the old one knows it", 60)
        assert set(marks(new)) == {seq}
        for node in nodes:
            scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
            assert node.status()["models"]["ctr"]["watermark"] == seq
            check(node, "item", range(100), seq)
            check(node, "user", range(50), seq)
            check(node, "user", range(50, 500), 0)
            _, found = node.model("ctr").lookup("item_id", [500 + seq, 520], return_found=True)
            assert found.tolist() == [False, True]


def test_a_node_that_was_away_for_too_long_begins_again(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "CLEAN_EVERY_S", 0.05)
    monkeypatch.setattr(ingester, "STALLED_S", 0.2)
    monkeypatch.setattr(ingester, "BATCH", 2)
    a, b = open_node("a", log_retention_s=0.0), open_node("b", remote_lease_s=600.0)
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves it", 60)
    check(b, "item", range(100), 0)  # in b's memory from now on
    away = threading.Event()

    def look(self: Any, **_: Any) -> bool:
        if self is member(b).follower and away.is_set():
            raise tierstore.errors.StorageError("cut off")
        return look_(self)

    look_ = follower.Follower._look
    monkeypatch.setattr(follower.Follower, "_look", look)
    away.set()
    scenes.eventually(lambda: member(b).follower.problem is not None, "b is away", 60)
    for seq in range(1, 7):
        a.apply_delta(scenes.stamped(seq, {"item": range(20)}))
    begins = member(a).shared
    scenes.eventually(lambda: [e.seq for e in begins.read(0, 1)] not in ([1], [2]), "the log is cut off", 60)
    assert b.status()["models"]["ctr"]["watermark"] == 0
    check(b, "item", range(100), 0)  # what it reports, and no newer
    with pytest.raises(tierstore.Overloaded, match="catching up"):
        b.model("ctr").lookup("item_id", np.arange(600, 1000))
    away.clear()
    scenes.eventually(lambda: b.status()["models"]["ctr"]["watermark"] == 6, "b has caught up", 60)
    check(b, "item", range(20), 6)
    check(b, "item", range(20, 1000), 0)


def unknown_model(store: Store) -> type[BaseException]:
    """How one is refused that there never was."""
    with pytest.raises(tierstore.TierstoreError) as refused:
        store.model("another")
    return refused.type


def test_without_the_cluster_memory_answers_and_the_remaining_keys_are_refused(
    cluster: RedisCluster, open_node: OpenNode, tmp_path: Path
) -> None:
    refusing = open_node("a", remote_timeout_s=1.0)
    refusing.load_snapshot(scenes.write_snapshot(tmp_path))
    defaulting = open_node("b", remote_timeout_s=1.0, remote_on_failure="default")
    for store in (refusing, defaulting):
        check(store, "item", range(100), 0)
    for server in cluster.servers:
        server.pause()
    try:
        for store in (refusing, defaulting):
            check(store, "item", range(100), 0)
        with pytest.raises(tierstore.errors.RemoteUnavailable):
            refusing.model("ctr").lookup("item_id", np.arange(90, 300))
        rows, found = defaulting.model("ctr").lookup("item_id", np.arange(90, 300), return_found=True)
        assert found[:10].all()
        assert not found[10:].any()
        assert not rows[10:].any()
        scenes.eventually(lambda: not refusing.status()["remote"]["reachable"], "the status says it", 120)
        scenes.eventually(
            lambda: unknown_model(refusing) is tierstore.errors.RemoteUnavailable,
            "nobody can say that there is none",
            120,
        )
    finally:
        for server in cluster.servers:
            server.resume()
    cluster.wait_until_ok()
    scenes.eventually(lambda: refusing.status()["remote"]["reachable"], "the status says it", 60)
    assert unknown_model(refusing) is tierstore.NotFound
    for store in (refusing, defaulting):
        check(store, "item", range(1000), 0)  # a default was never kept as the key's answer


def test_a_delta_that_the_cluster_has_lost_is_put_back_by_a_node_that_has_it(
    cluster: RedisCluster, open_node: OpenNode, tmp_path: Path
) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": range(10 * seq)}))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "the deltas are folded", 60)
    shared, info = member(store).shared, store.model("ctr").catalogue.info(1)
    # what a master that had not sent its last writes to the replica that follows it leaves: the log without delta 2 ...
    first_alone = "local first = redis.call('XRANGE', KEYS[1], '1-0', '1-0')[1]; redis.call('DEL', KEYS[1]); for i = 1, 8 do first[2][i] = first[2][i] or '' end; return redis.call('XADD', KEYS[1], first[1], unpack(first[2]))"
    assert shared._cluster.call("EVAL", first_alone, 1, shared._log) == b"1-0"
    shared._cluster.call("HSET", shared._current, "seq", 1)
    scenes.eventually(lambda: [entry.seq for entry in shared.read(1, 9)] == [2], "delta 2 is in the log again", 60)
    # ... and one tag with neither its rows nor its watermark
    tag, table = info.tags[0].decode(), f"ts:{{{info.tags[0].decode()}}}:ctr:1"
    shared._cluster.call("HSET", table, "seq", 0, "applying", 0)
    lost = shared._cluster.call("HKEYS", f"{table}:item")
    shared._cluster.call("HSET", f"{table}:item", *(word for key in lost for word in (key, bytes(32))))
    scenes.eventually(lambda: shared._cluster.call("HGET", table, "seq") == b"2", f"tag {tag} has delta 2 again", 60)
    rows = store.model("ctr").lookup("item_id", np.arange(20))
    np.testing.assert_array_equal(rows, scenes.vectors("item", 2, range(20)))
    again = open_node("b")  # with nothing in memory
    np.testing.assert_array_equal(
        again.model("ctr").lookup("item_id", np.arange(20)), scenes.vectors("item", 2, range(20))
    )


def cached(store: Store, table: str = "item") -> dict[str, Any]:
    """What the status says of a table's rows on the local SSD, once what was read is written."""
    store.placement.followed.ssd_cache.drain()  # type: ignore[attr-defined]
    return dict(store.status("ctr")["models"]["ctr"]["tables"][table]["ssd_cache"])


NO_HOST_TIER = "16KiB"  # so little memory that every key is read from below


def test_rows_that_were_read_are_on_the_local_ssd_and_follow_deltas_and_switches(
    open_node: OpenNode, tmp_path: Path
) -> None:
    writer, store = open_node("a"), open_node("b", host_budget=NO_HOST_TIER, ssd_cache="1MiB")
    writer.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    scenes.eventually(lambda: "ctr" in store.models() and store.model("ctr").active_version == 1, "b serves it", 60)
    check(store, "item", range(1000), 0)
    first = cached(store)
    assert (first["rows"], first["hits"]) == (1000, 0)
    check(store, "item", range(1000), 0)
    assert cached(store)["hits"] == 1000
    tables = store.status("ctr")["models"]["ctr"]["tables"]["item"]
    assert (tables["lookup_keys"]["disk"], tables["lookup_keys"]["remote"]) == (1000, 1000)
    assert tables["tier_bytes"]["disk"] == store.status()["ssd_cache"]["used"] > 0
    for seq in range(1, 6):
        writer.apply_delta(scenes.stamped(seq, {"item": range(20 * seq)}))
        scenes.eventually(lambda seq=seq: store.status("ctr")["models"]["ctr"]["watermark"] == seq, "b has it", 60)
        check(store, "item", range(20 * seq), seq)
        scenes.eventually(lambda: store.status("ctr")["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
        check(store, "item", range(20 * seq), seq)
        check(store, "item", range(20 * seq, 1000), 0)
    assert cached(store)["hits"] > 5000 - 300
    writer.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=7, delta_seq=5))
    scenes.eventually(lambda: store.model("ctr").active_version == 2, "b serves version 2", 60)
    check(store, "item", range(1000), 7)
    assert cached(store)["hits"] == 0
    check(store, "item", range(1000), 7)
    scenes.eventually(lambda: store.status()["ssd_cache"]["used"] == cached(store)["bytes"], "version 1 is closed", 60)
    store.close()
    again = open_node("b", host_budget=NO_HOST_TIER, ssd_cache="1MiB")
    assert cached(again)["rows"] == 0
    check(again, "item", range(1000), 7)


@pytest.mark.parametrize("awaited", [False, True])
def test_an_open_node_has_the_kernels_of_its_look_ups(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    built = set()

    def noted(entry: kernels.Entry) -> kernels.Entry:
        return entry._replace(build=lambda: built.add(entry.dispatcher.py_func))

    monkeypatch.setattr(kernels, "entries", [noted(entry) for entry in kernels.entries])
    monkeypatch.setattr(kernels, "awaited", awaited)  # whether others compile those that look-ups do without
    open_node(ssd_cache="1MiB")
    assert {resp.exchange.py_func, resp.parse.py_func} <= built
    assert (ssd_index.find.py_func in built) == (ssd_index.read.py_func in built) == (not awaited)


def test_a_disk_that_fails_under_the_cache_fails_no_look_up(open_node: OpenNode, tmp_path: Path) -> None:
    store = open_node(host_budget=NO_HOST_TIER, ssd_cache="1MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    check(store, "item", range(1000), 0)
    assert cached(store)["rows"] == 1000
    file = store.placement.followed.ssd_cache.file  # type: ignore[attr-defined]
    with open("/dev/null", "w") as null:
        file._fd, whole = null.fileno(), file._fd
        check(store, "item", range(1000), 0)
        file._fd = whole
    assert "Bad file descriptor" in store.status()["ssd_cache"]["problem"]
    check(store, "item", range(1000), 0)


def test_the_data_directory_of_a_machine_of_its_own_is_refused(open_node: OpenNode, tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "a", host_budget="4MiB", load_workers=1) as local:
        local.load_snapshot(scenes.write_snapshot(tmp_path))
    with pytest.raises(tierstore.errors.ConfigError, match="data directory of its own"):
        open_node("a")
    open_node("b").load_snapshot(tmp_path / "ctr-1")
    with tierstore.open(tmp_path / "c", host_budget="4MiB") as local:
        assert local.models() == []


@pytest.mark.parametrize("feature", ["label", "export"])
def test_what_a_model_in_a_cluster_does_not_have_is_said(open_node: OpenNode, tmp_path: Path, feature: str) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    calls: dict[str, Callable[[], object]] = {
        "label": lambda: store.label("ctr", "x", 1),
        "export": lambda: store.export("ctr", tmp_path / "out"),
    }
    with pytest.raises(tierstore.InvalidInput, match=r"no labels yet|in a cluster.*load the snapshot that it was load"):
        calls[feature]()
    assert store.verify().ok
    check(store, "item", range(1000), 0)


def test_scores_are_of_the_rows_and_the_graph_of_one_delta_on_every_node(open_node: OpenNode, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra dense")
    from tests.predict import onnx_models

    dims = {"user_id": 4, "item_id": 8}

    def graph(stamp: int) -> bytes:
        return onnx_models.telltale(stamp, dims)

    def stamp_of(store: Store) -> int:
        answer = store.model("ctr").predict({"user_id": np.arange(1, 9), "item_id": np.arange(1, 9)})
        assert not answer["off"].any(), answer
        (stamp,) = set(answer["stamp"].reshape(-1).tolist())
        return int(stamp)

    def rows(seq: int) -> dict[str, Any]:
        return {table: (range(10), np.full((10, scenes.DIM[table]), seq, np.float32)) for table in ("user", "item")}

    a, b = open_node("a"), open_node("b")
    a.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph(0)))
    scenes.eventually(lambda: "ctr" in b.models() and b.model("ctr").active_version == 1, "b serves it", 60)
    for seq in (1, 2):
        a.apply_delta(scenes.delta(seq, rows(seq), dense=graph(seq)))
        assert stamp_of(a) == seq
        scenes.eventually(lambda seq=seq: b.status()["models"]["ctr"]["watermark"] == seq, "b has it", 60)
        assert stamp_of(b) == seq
    with pytest.raises(tierstore.DeltaError, match="dense part"):
        b.apply_delta(scenes.delta(3, rows(3), dense=onnx_models.linear({"user_id": np.ones(99)})))
    for store in (a, b):
        scenes.eventually(lambda store=store: store.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
        assert stamp_of(store) == 2
    b.apply_delta(scenes.delta(3, rows(3), dense=graph(3)))
    assert stamp_of(b) == 3
    a.close()
    b.close()
    for name in ("a", "c"):  # one that has an older graph on disk, and one that has nothing
        assert stamp_of(open_node(name)) == 3
