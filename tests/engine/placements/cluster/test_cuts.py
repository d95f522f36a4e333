"""Writes that are cut off after any of their calls, on a real server: what is there then is made whole by what comes next, and a seq keeps one content."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.cuts import Cuts, hide
from tests.engine.placements.cluster.scenes import OpenNode, member
from tests.redis_cluster import RedisCluster, cut_log
from tierstore.engine.placements.cluster import scripts
from tierstore.engine.placements.cluster.shared_load import LoadState, PartTable, SharedLoad
from tierstore.engine.placements.cluster.shared_model import Owed, Recovering, SharedModel
from tierstore.engine.placements.following.rows import RemoteRows
from tierstore.engine.store import Store
from tierstore.errors import Conflict, Corruption, Fenced, Overloaded, StorageError
from tierstore.formats.delta.reader import read_delta
from tierstore.tiers.cluster.engines import Engine
from tierstore.tiers.cluster.scripts import APPLY
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import Cluster, connect
from tierstore.tiers.cluster.write import Change, Writer
from tierstore.types import Tier

pytestmark = pytest.mark.usefixtures("quick_loads")

NOBODY = "0" * 40  # the mark of a server that is none
_names = (f"model-{number}" for number in itertools.count())


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(monkeypatch)


@pytest.fixture
def connected(cluster: RedisCluster) -> Iterator[Cluster]:
    made = connect(cluster.url)
    yield made
    made.close()


# --- each script alone


def digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def begun(cluster: Cluster) -> SharedModel:
    """A model whose log begins after 0."""
    shared = SharedModel(cluster, next(_names))
    assert shared.change(shared.pointer(), seq=0)
    return shared


def append(shared: SharedModel, seq: int, data: bytes, after: bytes | None = None) -> bool:
    return shared.append(seq, digest(data), data, None if after is None else digest(after))


def log_of(shared: SharedModel) -> list[tuple[int, bytes]]:
    return [(entry.seq, entry.data) for entry in shared.read(0, 99)]


@pytest.mark.parametrize("then", ["the same", "another"])
def test_a_delta_whose_acknowledgement_is_cut_off_is_there_or_not(connected: Cluster, cuts: Cuts, then: str) -> None:
    outcomes = set()
    for calls in itertools.count():
        shared = begun(connected)
        append(shared, 1, b"one")
        cuts.after(calls, scripts.APPEND)
        try:
            append(shared, 2, b"two", b"one")
        except StorageError:
            assert cuts.happened
        if not cuts.happened:
            break
        content = b"two" if then == "the same" else b"other"
        try:
            outcomes.add(append(shared, 2, content, b"one"))
        except Conflict:
            assert then == "another"
            outcomes.add("another is held")
            content = b"two"
        with pytest.raises(Conflict):
            append(shared, 2, b"third", b"one")
        assert append(shared, 3, b"three", content)
        assert log_of(shared) == [(1, b"one"), (2, content), (3, b"three")]
        assert [entry.after for entry in shared.read(1, 9)] == [digest(b"one"), digest(content)]
        assert (shared.pointer().seq, shared.pointer().digest) == (3, digest(b"three"))
    assert calls > 7
    assert outcomes == ({True, False} if then == "the same" else {True, "another is held"})


def test_a_node_that_reports_brings_a_cut_off_acknowledgement_to_its_end(connected: Cluster, cuts: Cuts) -> None:
    for calls in itertools.count():
        shared = begun(connected)
        cuts.after(calls, scripts.APPEND)
        try:
            append(shared, 1, b"one")
        except StorageError:
            assert cuts.happened
        shared.beat("node", {"seq": 0})
        assert shared.pointer().seq == len(log_of(shared))
        if not cuts.happened:
            break


def test_another_server_is_noticed_though_that_is_cut_off(connected: Cluster, cuts: Cuts) -> None:
    for script in (scripts.APPEND, scripts.BEAT, scripts.RECOVERED):
        for calls in itertools.count():
            shared = begun(connected)
            append(shared, 1, b"one")
            shared.beat("a", {"seq": 1, "server": NOBODY})
            connected.call("HSET", shared._current, "server", NOBODY)
            cuts.after(calls, script)
            try:
                if script is scripts.APPEND:
                    with pytest.raises((Recovering, StorageError)):
                        append(shared, 2, b"two")
                elif script is scripts.BEAT:
                    shared.beat("b", {"seq": 1, "server": NOBODY})
                else:
                    assert not shared.recovered("0", None, "", None)
            except StorageError:
                assert cuts.happened
            with pytest.raises(Recovering):
                append(shared, 2, b"two")
            assert shared.pointer().server != NOBODY
            assert not shared.recovered(shared.pointer().recovering or "", 1, digest(b"one"), None), "a has not looked"
            if not cuts.happened:
                break


def test_what_is_owed_is_not_forgotten_where_the_end_of_a_recovery_is_cut_off(
    connected: Cluster, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for calls in itertools.count():
        shared = begun(connected)
        append(shared, 1, b"one")
        connected.call("HSET", shared._current, "server", NOBODY)
        shared.beat("node", None)
        recovering = str(int(shared.pointer().recovering or "0") - 2 * scripts.RECOVERY_MS)  # that long ago
        connected.call("HSET", shared._current, "recovering", recovering)
        cuts.after(calls, scripts.RECOVERED)
        try:
            shared.recovered(recovering, 2, digest(b"two"), (3, digest(b"three")))
        except StorageError:
            assert cuts.happened
        if shared.pointer().recovering is not None:
            assert shared.recovered(recovering, 2, digest(b"two"), (3, digest(b"three")))
        assert (shared.pointer().seq, shared.pointer().digest) == (2, digest(b"two"))
        assert shared.pointer().owed == 3
        with pytest.raises(Owed):
            append(shared, 3, b"other", b"two")
        assert append(shared, 3, b"three", b"two")
        assert shared.pointer().owed is None
        if not cuts.happened:
            break


def test_a_change_of_the_pointer_happens_as_a_whole_or_not_at_all(connected: Cluster, cuts: Cuts) -> None:
    shared = begun(connected)
    for calls in itertools.count():
        before = shared.pointer()
        new = {"current": calls + 1, "wanted": None, "canary": calls + 2, "share": 0.5, "seq": calls + 7}
        cuts.after(calls, scripts.CHANGE)
        try:
            shared.change(before, **new)
        except StorageError:
            assert cuts.happened
        now = shared.pointer()
        if now != before:
            assert now.generation == before.generation + 1
            assert (now.current, now.wanted, now.canary, now.share, now.seq) == (
                calls + 1,
                None,
                calls + 2,
                0.5,
                calls + 7,
            )
        else:
            assert shared.change(before, **new)
        if not cuts.happened:
            break


def test_a_record_that_is_cut_off_is_written_by_the_next_try(connected: Cluster, cuts: Cuts) -> None:
    loading, ready = {"state": "loading"}, {"state": "dropping"}
    for before, after in ((None, loading), (loading, ready), (ready, None)):
        for calls in itertools.count():
            shared = begun(connected)
            if before is not None:
                shared.record(1, None, before)
            generation = shared.pointer().generation
            cuts.after(calls, scripts.RECORD)
            try:
                shared.record(1, before, after)
            except StorageError:
                assert cuts.happened
            assert shared.record(1, before, after)
            assert shared.versions() == ({} if after is None else {1: after})
            assert shared.pointer().generation > generation, "or no node would look"
            if not cuts.happened:
                break


def test_files_are_removed_by_the_next_try_and_not_those_of_another_record(connected: Cluster, cuts: Cuts) -> None:
    record, other = {"state": "dropping"}, {"state": "loading"}
    for calls in itertools.count():
        shared = begun(connected)
        shared.record(1, None, record)
        for what in ("files", "load", "heads"):
            connected.call("HSET", f"{shared._base}{what}:1", "a", "b")
        connected.call("HSET", shared._current, "mark:1", 3)
        assert not shared.remove_files(1, other)
        assert connected.call("EXISTS", *(f"{shared._base}{what}:1" for what in ("files", "load", "heads"))) == 3
        assert shared.pointer().marks == {1: 3}
        cuts.after(calls, scripts.REMOVE_FILES)
        try:
            shared.remove_files(1, record)
        except StorageError:
            assert cuts.happened
        assert shared.remove_files(1, record)
        assert connected.call("EXISTS", *(f"{shared._base}{what}:1" for what in ("files", "load", "heads"))) == 0
        assert shared.pointer().marks == {}
        if not cuts.happened:
            break


def test_a_lease_that_is_cut_off_goes_to_somebody_with_a_higher_epoch(connected: Cluster, cuts: Cuts) -> None:
    for calls, above in itertools.product(range(9), (0, 7)):
        shared = begun(connected)
        first = shared.acquire("a", 60.0) or 0
        shared.release("a")
        cuts.after(calls, scripts.ACQUIRE)
        try:
            shared.acquire("a", 60.0, above)
        except StorageError:
            assert cuts.happened
        held = shared.lease()
        b = shared.acquire("b", 60.0, above)
        assert (b is None) == (held is not None)
        epoch = b or shared.acquire("a", 60.0, above) or 0
        assert epoch > max(first, above)
        cuts.after(calls, scripts.RELEASE)
        try:
            shared.release("b")
        except StorageError:
            assert cuts.happened
        assert (shared.lease() is None) or shared.acquire("b" if b else "a", 60.0) == epoch


def test_progress_that_is_cut_off_loses_no_entry_that_rows_lack(connected: Cluster, cuts: Cuts) -> None:
    for calls in itertools.count():
        shared = begun(connected)
        for seq in (1, 2, 3):
            append(shared, seq, b"%d" % seq)
        epoch = shared.acquire("a", 60.0)
        assert epoch is not None
        cuts.after(calls, scripts.PROGRESS)
        try:
            shared.progress(epoch, 1, None, 2, 3)
        except StorageError:
            assert cuts.happened
        assert log_of(shared)[-1] == (3, b"3")
        assert shared.pointer().marks.get(1, 0) == 2 or len(log_of(shared)) == 3
        assert shared.progress(epoch, 1, None, 2, 3)
        assert not shared.progress(epoch, 1, 1, 3), "another mark than it has"
        assert log_of(shared) == [(3, b"3")]
        if not cuts.happened:
            break


def test_dense_parts_that_are_cut_off_are_put_there_and_put_back_by_the_next_try(
    connected: Cluster, cuts: Cuts
) -> None:
    for script, calls in itertools.product((scripts.PUT_HEADS, scripts.PUT_HEADS_BACK), range(12)):
        shared = begun(connected)
        epoch = shared.acquire("a", 60.0) or 0
        files, kept = f"{shared._base}files:1", f"{shared._base}heads:1"
        before = {b"dense.onnx": b"first", b"dense.cvr.onnx": b"second"}
        connected.call("HSET", files, *(word for pair in before.items() for word in pair))
        cuts.after(calls, script)
        for seq, graphs in ((7, {"": b"third"}), (8, {"": b"", "cvr": b"fourth", "of": b"fifth"})):
            twice_if_cut(shared.put_heads, epoch, 1, seq, f"0{seq}", graphs)
        assert connected.call("HGETALL", files) == {
            b"dense.onnx": b"", b"dense.cvr.onnx": b"fourth", b"dense.of.onnx": b"fifth"
        }  # fmt: skip
        assert connected.call("HGETALL", kept) == {
            b"7": b"07", b"7 ": b"first", b"8": b"08", b"8 ": b"third", b"8 cvr": b"second", b"8 of": b""
        }  # fmt: skip
        twice_if_cut(shared.put_heads_back, epoch, 1, 6)
        assert connected.call("HGETALL", files) == before | {b"dense.of.onnx": b""}
        assert not connected.call("EXISTS", kept)
        shared.release("a")
        with pytest.raises(Fenced):
            shared.put_heads(epoch, 1, 9, "09", {"": b"late"})
        assert connected.call("HGET", files, "dense.onnx") == b"first"


def test_notes_of_a_load_that_are_cut_off_are_made_by_the_next_try(connected: Cluster, cuts: Cuts) -> None:
    for script, calls in itertools.product((scripts.NOTE, scripts.END, scripts.PUT_FILE), range(7)):
        shared = begun(connected)
        load = SharedLoad(shared, 1, "a")
        assert load.claim("token")
        shared.record(1, None, {"state": "loading", "token": "token"})
        cuts.after(calls, script)
        part = {"item": PartTable(3, 7, [0.5], 0, [1, 2])}
        for content in (b"first", b"later"):
            twice_if_cut(shared.put_file, 1, "token", "dense.onnx", content)
        twice_if_cut(load.checkpoint, "file", 5)
        twice_if_cut(load.finish_part, 2, part, ["file"])
        assert connected.call("HGETALL", f"{shared._base}files:1") == {b"dense.onnx": b"first"}
        assert load.state() == LoadState({2: part}, {}, 0, None)
        twice_if_cut(load.end)
        assert load.state() == LoadState({}, {}, 0, None)
        assert not connected.call("EXISTS", f"{shared._base}loader:1")


def test_a_report_that_is_cut_off_leaves_no_node_that_is_waited_for_without_end(
    connected: Cluster, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_ms = scripts.NODE_GONE_MS * 2
    for report in ("the first of a node", "one that finds another gone"):
        for calls in itertools.count():
            shared = begun(connected)
            if report != "the first of a node":
                shared.beat("a", {"seq": 1})
                now = connected.call("ZSCORE", shared._alive, "a")
                connected.call("ZADD", shared._alive, float(now) - silent_ms, "a")
            cuts.after(calls, scripts.BEAT)
            try:
                shared.beat("a" if report == "the first of a node" else "b", {"seq": 1})
            except StorageError:
                assert cuts.happened
            connected.call("ZADD", shared._alive, "XX", 0, "a")  # it is not heard of again
            assert {*shared.beat("c", {"seq": 2})} <= {"b", "c"}
            assert connected.call("HEXISTS", shared._nodes, "a") == 0
            if not cuts.happened:
                break


def test_a_log_that_has_lost_its_end_says_what_to_do(connected: Cluster) -> None:
    shared = begun(connected)
    append(shared, 1, b"one")
    append(shared, 2, b"two")
    connected.call("XDEL", shared._log, "2-0")
    connected.call("HSET", shared._current, "seq", 1, "digest", f"1 {digest(b'one')}")
    with pytest.raises(Owed, match="load a snapshot with a delta_seq of 2 or more"):
        append(shared, 2, b"two")
    assert shared.change(shared.pointer(), seq=2)
    assert append(shared, 3, b"three")


# --- what is noticed of a server


def test_a_log_that_a_node_has_had_longer_takes_nothing_new_until_all_nodes_have_looked(connected: Cluster) -> None:
    shared = begun(connected)
    for seq, data in ((1, b"one"), (2, b"two"), (3, b"three")):
        append(shared, seq, data)
    for node in ("a", "b"):
        shared.beat(node, {"seq": 3, "server": shared.pointer().server})
    cut_log(connected.call, shared._log, 1)
    connected.call("HSET", shared._current, "seq", 1, "digest", f"1 {digest(b'one')}")
    assert shared.put_back(2, digest(b"two"), b"two", digest(b"one")), "what a has"
    with pytest.raises(Recovering):
        append(shared, 3, b"other", b"two")
    before = shared.pointer()
    connected.call("HSET", shared._current, "recovering", int(before.recovering or 0) - 2 * scripts.RECOVERY_MS)
    assert not shared.recovered(shared.pointer().recovering or "", 1, "", None), "b has not looked since"
    assert shared.put_back(3, digest(b"three"), b"three", digest(b"two")), "what b has"
    for node in ("a", "b"):
        shared.beat(node, {"seq": 3, "server": before.server})
    assert shared.recovered(shared.pointer().recovering or "", 1, "", None)
    with pytest.raises(Conflict, match="other content"):
        append(shared, 3, b"other", b"two")
    assert append(shared, 4, b"four", b"three")
    assert shared.pointer().recovering is None


def test_a_server_without_an_id_is_known_by_its_process_and_when_it_began(
    connected: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "master_replid", "run_id")
    shared = begun(connected)
    append(shared, 1, b"one")
    process, port, start = shared.pointer().server.split("-")
    for seq, other in enumerate(
        (
            f"{process}-{port}-{int(start) - 3}",
            f"{int(process) + 1}-{port}-{start}",
            f"{process}-{int(port) + 1}-{start}",
            "",
            NOBODY,
        ),
        2,
    ):
        connected.call("HSET", shared._current, "server", other)
        with pytest.raises(Recovering):
            append(shared, seq, b"%d" % seq)
        connected.call("HDEL", shared._current, "recovering")
    for second in (-1, 1):  # seconds are counted from another moment
        connected.call("HSET", shared._current, "server", f"{process}-{port}-{int(start) + second}")
        assert append(shared, (shared.pointer().seq or 0) + 1, b"%d" % second)


# --- rows


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 20_000])
def test_rows_of_a_delta_that_is_cut_off_are_not_read_as_older_ones(
    connected: Cluster, cuts: Cuts, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(Engine, "script_bytes", chunk_bytes)
    keys, seen = np.arange(2500), set()
    old, new = (np.full((len(keys), 16), stamp, np.uint8) for stamp in (5, 6))
    gone = keys % 10 == 0

    def read(rows_of: RemoteRows, seq: int) -> tuple[np.ndarray, np.ndarray]:
        rows, state = np.zeros((len(keys), 16), np.uint8), np.zeros(len(keys), np.uint8)
        rows_of.get_at(1, keys, rows, state, seq)
        return rows, state

    for calls, run in itertools.product(range(12), range(1 if chunk_bytes > 1 << 19 else 3)):
        name = next(_names)
        with Writer(connected, name, 1, {"t": 16}, [b"0"]) as writer:
            writer.write_rows("t", keys, old)
            writer.finish(seq=5, epoch=1)
            runs = itertools.count()
            cuts.after(calls, APPLY.decode(), lambda *_, runs=runs, run=run: next(runs) == run)
            with contextlib.suppress(StorageError):
                writer.apply_delta(2, 6, [Change("t", keys, new, gone)], "6" * 16)
        tables = {1: ClusterTable(connected, name, 1, "t", [b"0"], 16)}
        before = RemoteRows("a version", tables, 5, "refuse")
        try:
            rows, state = read(before, 5)
            assert (rows == 5).all()
            assert (state == Tier.REMOTE).all()
            seen.add("old")
        except Overloaded:
            seen.add("refused")
        with Writer(connected, name, 1, {"t": 16}, [b"0"]) as successor:
            if (begun := successor.states()[0]) is not None and begun.applying == 6:
                with pytest.raises(Corruption, match="another delta 6"):
                    successor.apply_delta(3, 6, [Change("t", keys, new, gone)], "7" * 16)
            successor.apply_delta(3, 6, [Change("t", keys, new, gone)], "6" * 16)
        rows, state = read(RemoteRows("a version", tables, 6, "refuse"), 6)
        assert (rows[~gone] == 6).all()
        np.testing.assert_array_equal(state == Tier.ABSENT, gone)
    assert seen == {"old", "refused"}


# --- nodes


class Nodes:
    """A model with two versions on nodes that come and go, and what was acknowledged: each delta, and each row of an item."""

    def __init__(self, open_node: OpenNode, snapshots: Path) -> None:
        self._open, self._names = open_node, itertools.count()
        self.acknowledged: list[bytes] = []
        self._next: bytes | None = None
        self.stamps = np.zeros(scenes.ROWS["item"], np.int64)
        self.node = self.open()
        for version in (1, 2):
            self.node.load_snapshot(scenes.write_snapshot(snapshots, version))

    def open(self) -> Store:
        return self._open(f"node-{next(self._names)}", remote_lease_s=0.5)

    @property
    def delta(self) -> bytes:
        """The next one, which names itself in its rows; the same until it is acknowledged."""
        seq = len(self.acknowledged) + 1
        self._next = self._next or scenes.stamped(seq, {"item": range(seq % 7, 1000, 3)})
        return self._next

    def send(self, node: Store) -> None:
        """The next delta, as a client does: until it is acknowledged."""
        delta, seq = self.delta, len(self.acknowledged) + 1

        def sent() -> bool:
            try:
                node.apply_delta(delta)
            except (tierstore.Overloaded, StorageError):
                return False
            return True

        scenes.eventually(sent, f"delta {seq} is acknowledged", 60)
        self.acknowledged.append(delta)
        self.stamps[seq % 7 : 1000 : 3], self._next = seq, None

    def check(self, *nodes: Store) -> None:
        """All nodes have what was acknowledged, in memory and in the rows, and nothing else."""
        seq = len(self.acknowledged)
        for node in nodes:
            of = member(node)
            scenes.eventually(lambda node=node: has_watermark(node, seq), f"it has delta {seq}", 60)
            scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["overlays"] == 0, "it is folded", 60)
            rows = node.model("ctr").lookup("item_id", np.arange(1000))
            np.testing.assert_array_equal(rows[:, 0], self.stamps % 16 * 64 + np.arange(1000) % 64)
            assert [(entry.seq, entry.digest) for entry in of.shared.read(0, 999)] == [
                (number, read_delta(delta).digest) for number, delta in enumerate(self.acknowledged, 1)
            ]
            other = scenes.delta(seq, {"item": ([1], np.zeros((1, scenes.DIM["item"]), np.float32))})
            with pytest.raises(Conflict, match="other content"):
                node.apply_delta(other)
            assert {*of.shared.beat("", None)} == {one.placement.node for one in nodes}  # type: ignore[attr-defined]
            scenes.eventually(lambda of=of: of.status()["problem"] is None, "there is no problem", 60)


def has_watermark(node: Store, seq: int) -> bool:
    return "ctr" in node.models() and (node.status()["models"]["ctr"]["watermark"] or 0) == seq


def refused(change: Callable[..., object], *words: Any) -> bool:
    """Whether a change is refused as its script is cut off."""
    try:
        change(*words)
    except StorageError:
        return True
    return False


def twice_if_cut(change: Callable[..., object], *words: Any) -> None:
    if refused(change, *words):
        change(*words)


def goes_on(nodes: Nodes, cuts: Cuts, server_dies: bool) -> None:
    """After a cut: another server may answer from now on; a new node comes, takes what was refused, and then is alone."""
    old, new = nodes.node, nodes.open()
    if server_dies:
        shared = member(old).shared
        shared._cluster.call("HSET", shared._current, "server", NOBODY)
    scenes.eventually(lambda: "ctr" in new.models() and new.model("ctr").active_version is not None, "it serves", 60)
    for node in (new, old):
        nodes.send(node)
    nodes.check(new, old)
    old.close()
    nodes.node = new
    nodes.send(new)
    nodes.check(new)


@pytest.mark.thorough
@pytest.mark.parametrize("server_dies", [False, True], ids=["the server lives", "the server dies"])
@pytest.mark.parametrize("script", ["APPEND", "CHANGE", "PROGRESS", "ACQUIRE", "BEAT", "RECOVERED", "APPLY"])
def test_nodes_go_on_after_a_script_that_was_cut_off_after_any_write(
    open_node: OpenNode, tmp_path: Path, cuts: Cuts, script: str, server_dies: bool
) -> None:
    nodes = Nodes(open_node, tmp_path)
    text = APPLY.decode() if script == "APPLY" else getattr(scripts, script)
    for calls in itertools.count():
        node, shared = nodes.node, member(nodes.node).shared
        cuts.after(calls, text, writes_only=True)
        if script == "CHANGE":
            version = 3 - (node.model("ctr").active_version or 0)
            if refused(node.activate, "ctr", version):
                node.activate("ctr", version)
        elif script == "APPEND":
            refused(node.apply_delta, nodes.delta)
            if server_dies:
                shared._cluster.call("HSET", shared._current, "server", NOBODY)
        else:
            if script == "RECOVERED":
                shared._cluster.call("HSET", shared._current, "server", NOBODY)
            nodes.send(node)
        scenes.eventually(lambda: cuts.runs > 0, "the script has run", 60)
        whole = not cuts.happened
        goes_on(nodes, cuts, server_dies)
        if whole:
            return
