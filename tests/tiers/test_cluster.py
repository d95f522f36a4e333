"""The remote tier on a real cluster: the contract of row stores, watermarks, writes, many threads, users and TLS."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Authority
from tests.redis_cluster import RedisCluster, Server, engine, free_ports, redis_cluster, wait_for
from tests.tiers.backing_contract import ROW_BYTES, BackingContract, get, some_rows
from tierstore.engine.placements.following.rows import RemoteRows
from tierstore.errors import (
    Closed,
    ConfigError,
    Conflict,
    Corruption,
    Fenced,
    InvalidInput,
    Overloaded,
    RemoteUnavailable,
    SequenceGap,
)
from tierstore.formats.keys import partition_of
from tierstore.tiers.cluster import lookup
from tierstore.tiers.cluster.commands import call, command
from tierstore.tiers.cluster.engines import Engine
from tierstore.tiers.cluster.redis_keys import slot_of, watermark_key
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import Cluster, connect
from tierstore.tiers.cluster.write import Change, TagState, Writer
from tierstore.tiers.connection_pools import Options
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.joining import NO_LIMIT
from tierstore.tiers.ssd.cache import SsdCache
from tierstore.types import Keys, Rows, States, Tier

PATIENT = Options(timeout_s=60.0, connect_timeout_s=20.0, other_after_s=0.0)  # the machine may be busy
TABLE_IDS = (1, 2, 3, 255, 256, 65535)
_models = (f"model-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisCluster]:
    with redis_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(servers: RedisCluster) -> Iterator[Cluster]:
    connected = connect(servers.url, PATIENT)
    yield connected
    connected.close()


class Loaded:
    """A model of one table `t`, with a writer and a reader."""

    def __init__(self, cluster: Cluster, keys: Keys, rows: Rows, *, per_master: int = 2, seq: int = 0) -> None:
        self.model, self.cluster, self.tags = next(_models), cluster, cluster.tags(per_master)
        self.keys, self.rows = keys, rows
        self.writer = Writer(cluster, self.model, 1, {"t": rows.shape[1]}, self.tags, timeout_s=60)
        self.writer.write_rows("t", keys, rows)
        self.writer.finish(seq=seq, epoch=1)
        self.table = ClusterTable(cluster, self.model, 1, "t", self.tags, rows.shape[1])

    def fetch(self, keys: Any, **more: Any) -> tuple[Rows, np.ndarray, Any]:
        keys = np.asarray(keys, np.int64)
        rows, state = np.full((len(keys), self.rows.shape[1]), 0xEE, np.uint8), np.zeros(len(keys), np.uint8)
        watermarks = self.table.fetch(keys, rows, state, **more)
        return rows, state, watermarks

    def change(self, keys: Keys, rows: Rows, deleted: np.ndarray | None = None) -> Change:
        return Change("t", keys, rows, np.zeros(len(keys), np.bool_) if deleted is None else deleted)

    def mark(self, tag: int) -> bytes:
        return watermark_key(self.tags[tag], self.model, 1)


@pytest.fixture
def loaded(cluster: Cluster) -> Iterator[Loaded]:
    keys = np.arange(-2000, 2000, 2)
    loaded = Loaded(cluster, keys, some_rows(keys, 7), seq=5)
    yield loaded
    loaded.writer.close()


class TestContract(BackingContract):
    answered = Tier.REMOTE

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def make(self, directory: Path) -> Any:
        model, tags = next(_models), self.cluster.tags(2)
        sizes = {f"t{number}": ROW_BYTES for number in TABLE_IDS}
        writer = Writer(self.cluster, model, 1, sizes, tags, timeout_s=60)
        writer.finish(seq=0)

        class Store(RemoteRows):
            deltas = itertools.count(1)

            def write(self, change: Change) -> None:
                writer.apply_delta(1, next(self.deltas), [change])

            def close(self) -> None:
                super().close()
                writer.close()

        tables = {n: ClusterTable(self.cluster, model, 1, f"t{n}", tags, ROW_BYTES) for n in TABLE_IDS}
        return Store("a version", tables, 0, "refuse")

    def put(self, store: Any, table_id: int, keys: Keys, rows: Rows, deleted: np.ndarray | None = None) -> None:
        store.write(Change(f"t{table_id}", keys, rows, np.zeros(len(keys), np.bool_) if deleted is None else deleted))


class BehindACacheOnSsd:
    """Rows in the cluster as a node reads them that keeps some on its SSD; a put is a delta that is folded at once."""

    def __init__(self, rows: Any, tables: dict[int, ClusterTable], cache: SsdCache) -> None:
        self._rows, self._tables, self._cache, self._seq = rows, tables, cache, 0
        sizes = dict.fromkeys(tables, 100_000)
        self._base = RemoteRows("a version", tables, 0, "refuse", cache=cache, rows=sizes)

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        wanted = state.copy()
        while True:  # rows of a put that is not over yet are refused; whoever asked for them asks again
            with suppress(Overloaded):
                self._base.get_at(table_id, keys, rows, state, self._seq)
                break
            state[:] = wanted
        self._cache.drain()
        state[state == Tier.DISK] = Tier.REMOTE

    def write(self, change: Change) -> None:
        seq, table_id = self._seq + 1, int(change.table[1:])
        self._base.raise_floor(table_id, seq)
        self._base.forget(table_id, change.codes)  # a node has the delta in memory by now, before the cluster has it
        self._rows.write(change)
        self._base.trust(seq)
        self._base.forget(table_id, change.codes)
        self._seq = seq

    @property
    def hits(self) -> int:
        return sum(self._base.cache_stats(number)["hits"] for number in self._tables)

    def close(self) -> None:
        self._base.close()
        self._rows.close()


class TestContractBehindACacheOnSsd(TestContract):
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path) -> Iterator[None]:
        readers = ReaderPool(2)
        self.cache = SsdCache(tmp_path, 1 << 20, readers)
        yield
        self.cache.close()
        readers.close()

    def make(self, directory: Path) -> Any:
        rows = super().make(directory)
        return BehindACacheOnSsd(rows, rows._tables, self.cache)

    def test_the_second_read_of_a_row_is_from_the_disk(self, store: BehindACacheOnSsd) -> None:
        keys = np.arange(500)
        self.put(store, 1, keys, some_rows(keys))
        for _ in range(2):
            np.testing.assert_array_equal(get(store, 1, np.arange(600))[0][:500], some_rows(keys))
        assert store.hits == 500


# ---- layout and load ------------------------------------------------------------------------------------------


def test_each_master_has_its_tags_spread_over_its_slots(cluster: Cluster) -> None:
    tags = cluster.tags(4)
    assert len(set(tags)) == 12
    for number, owned in enumerate(cluster.masters().values()):
        mine = tags[4 * number : 4 * number + 4]
        slots = [slot_of(tag) for tag in mine]
        assert set(slots) <= set(owned)
        assert slots == sorted(slots)
        assert max(slots) - min(slots) > len(owned) // 4
    for wrong in (0, 65):
        with pytest.raises(InvalidInput, match="expected 1 to 64 tags"):
            cluster.tags(wrong)


def test_rows_lie_where_the_layout_says(loaded: Loaded) -> None:
    tags = partition_of(loaded.keys, len(loaded.tags))
    for key, tag, row in list(zip(loaded.keys, tags, loaded.rows, strict=True))[::199]:
        name = b"ts:{%s}:%s:1:t" % (loaded.tags[tag], loaded.model.encode())
        assert loaded.cluster.client.hget(name, int(key).to_bytes(8, "little", signed=True)) == row.tobytes()


def test_rows_are_counted_and_samples_compared(loaded: Loaded) -> None:
    assert sum(loaded.writer.counts("t")) == 2000
    loaded.writer.verify("t", loaded.keys, loaded.rows)
    other = loaded.rows.copy()
    other[77, 3] ^= 1
    with pytest.raises(Corruption, match=f"1 of 2000 sampled rows .* code {loaded.keys[77]} first"):
        loaded.writer.verify("t", loaded.keys, other)


def test_what_a_load_writes_after_its_end_changes_nothing(loaded: Loaded) -> None:
    cluster, model, tags = loaded.cluster, next(_models), loaded.tags
    on = {"one"}

    def writer(load: str) -> Writer:
        return Writer(
            cluster, model, 1, {"t": ROW_BYTES}, tags, load=load, is_on=lambda: load in on, timeout_s=60
        )  # fmt: skip

    first, beside, other = writer("one"), writer("one"), writer("two")
    first.begin()
    first.write_rows("t", loaded.keys, loaded.rows)
    for tag in tags:  # as a failover leaves it
        cluster.client.hdel(f"ts:{{{tag.decode()}}}:{model}:1", "load")
    beside.write_rows("t", loaded.keys[:9], loaded.rows[:9])
    with pytest.raises(Conflict, match="not being loaded by this load any more"):
        other.write_rows("t", loaded.keys, 255 - loaded.rows)
    first.finish(seq=3)
    first.finish(seq=0)  # a node that was stopped meanwhile ends it again
    on.clear()
    for late in (first, beside, other):
        with pytest.raises(Conflict, match="not being loaded by this load any more"):
            late.write_rows("t", loaded.keys, 255 - loaded.rows)
    first.verify("t", loaded.keys, loaded.rows)
    assert {state.seq for state in first.states() if state is not None} == {3}
    other.begin()
    assert sum(other.counts("t")) == 0
    assert first.states() == [None] * len(tags)
    other.drop(pause_s=0)
    with pytest.raises(Conflict, match="not being loaded by this load any more"):
        other.write_rows("t", loaded.keys, loaded.rows)


def test_a_load_goes_on_while_a_slot_moves(loaded: Loaded, servers: RedisCluster) -> None:
    cluster, model, tags = loaded.cluster, next(_models), loaded.tags
    with Writer(cluster, model, 1, {"t": ROW_BYTES}, tags, load="one", timeout_s=60) as writer:
        writer.begin()
        writer.write_rows("t", loaded.keys[:1000], loaded.rows[:1000])
        slot, ends = slot_of(tags[0]), itertools.count(1000, 50)

        def write() -> None:
            begin = next(ends)
            writer.write_rows("t", loaded.keys[begin : begin + 50], loaded.rows[begin : begin + 50])

        source = servers.master_of(slot)
        target = next(server for server in servers.masters() if server is not source)
        servers.move_slot(slot, target, before_end=write)
        servers.move_slot(slot, source)
        rest = next(ends)
        assert rest >= 1100, "after the watermark, and after the rows"
        writer.write_rows("t", loaded.keys[rest:], loaded.rows[rest:])
        writer.finish(seq=0)
        writer.verify("t", loaded.keys, loaded.rows)


def test_a_version_without_watermarks_is_an_error_and_not_absent_rows(loaded: Loaded) -> None:
    loaded.writer.drop(pause_s=0)
    loaded.writer.drop(pause_s=0)
    state = np.zeros(4, np.uint8)
    with pytest.raises(RemoteUnavailable, match="does not have the version") as failed:
        loaded.table.fetch(np.arange(4), np.zeros((4, ROW_BYTES), np.uint8), state)
    assert list(failed.value.keys) == [0, 1, 2, 3]
    assert not state.any()
    assert loaded.writer.states() == [None] * 6
    assert sum(loaded.writer.counts("t")) == 0


def test_one_tag_that_is_lost_fails_alone(loaded: Loaded) -> None:
    loaded.cluster.client.delete(loaded.mark(2))
    lost = partition_of(loaded.keys, 6) == 2
    rows, state = np.zeros_like(loaded.rows), np.zeros(len(loaded.keys), np.uint8)
    with pytest.raises(RemoteUnavailable) as failed:
        loaded.table.fetch(loaded.keys, rows, state)
    assert list(failed.value.keys) == loaded.keys[lost].tolist()
    np.testing.assert_array_equal(state, np.where(lost, Tier.PENDING, Tier.REMOTE))
    np.testing.assert_array_equal(rows[~lost], loaded.rows[~lost])


def test_rows_of_another_size_are_refused(loaded: Loaded) -> None:
    table = ClusterTable(loaded.cluster, loaded.model, 1, "t", loaded.tags, ROW_BYTES - 1)
    state = np.zeros(2, np.uint8)
    with pytest.raises(RemoteUnavailable, match="not rows of 11 bytes"):
        table.fetch(np.array([0, 2]), np.zeros((2, ROW_BYTES - 1), np.uint8), state)
    assert not state.any()
    assert (loaded.fetch(loaded.keys)[0] == loaded.rows).all(), "other connections are not disturbed"


@pytest.mark.parametrize("row_bytes", [1, 9, 64, 4096, 90_000])
def test_rows_of_any_size(cluster: Cluster, row_bytes: int) -> None:
    keys = np.arange(40)
    rows = np.random.default_rng(row_bytes).integers(0, 256, (40, row_bytes), np.uint8)
    rows[::3] = np.frombuffer(b"\r\n", np.uint8)[np.arange(row_bytes) % 2]  # what ends lines in the protocol
    rows[1::3] = np.frombuffer(b"$-1\r\n", np.uint8)[np.arange(row_bytes) % 5]
    loaded = Loaded(cluster, keys, rows, per_master=1)
    got, state, _ = loaded.fetch(np.arange(-5, 45))
    loaded.writer.close()
    np.testing.assert_array_equal(got[5:45], rows)
    assert state.tolist() == [Tier.ABSENT] * 5 + [Tier.REMOTE] * 40 + [Tier.ABSENT] * 5


# ---- deltas and watermarks ------------------------------------------------------------------------------------


def test_a_delta_goes_to_every_tag_and_moves_its_watermark(loaded: Loaded) -> None:
    keys = np.array([-2000, 0, 1])
    change = loaded.change(keys, some_rows(keys, 9), np.array([False, True, False]))
    assert loaded.writer.apply_delta(1, 6, [change]) == [True] * 6
    assert loaded.writer.apply_delta(1, 6, [change]) == [False] * 6
    rows, state, watermarks = loaded.fetch([-2000, 0, 1, 2])
    assert state.tolist() == [Tier.REMOTE, Tier.ABSENT, Tier.REMOTE, Tier.REMOTE]
    np.testing.assert_array_equal(
        rows[[0, 2, 3]], np.concatenate([some_rows(keys[[0, 2]], 9), some_rows(np.array([2]), 7)])
    )
    assert (watermarks.lowest, watermarks.highest) == (6, 6)
    assert loaded.writer.states() == [TagState(6, 6, 1, 0)] * 6


def test_watermarks_are_of_the_tags_that_were_read(loaded: Loaded) -> None:
    tag = int(partition_of(np.array([0]), 6)[0])
    _, _, watermarks = loaded.fetch([0])
    assert [low == 5 for low in watermarks.low] == [number == tag for number in range(6)]
    assert set(watermarks.low) == {5, NO_LIMIT}
    assert set(watermarks.high) == {5, -1}
    assert loaded.fetch([])[2].lowest == NO_LIMIT


def test_an_old_epoch_a_gap_and_a_dropped_version_are_refused(loaded: Loaded) -> None:
    change = loaded.change(loaded.keys[:50], some_rows(loaded.keys[:50], 9))
    loaded.writer.fence(4)
    for attempt in (lambda: loaded.writer.apply_delta(3, 6, [change]), lambda: loaded.writer.fence(3)):
        with pytest.raises(Fenced, match="epoch 3 is over, epoch 4 writes now"):
            attempt()
    with pytest.raises(SequenceGap, match="expected delta 6, got 7") as gap:
        loaded.writer.apply_delta(4, 7, [change])
    assert gap.value.expected_seq == 6
    np.testing.assert_array_equal(loaded.fetch(loaded.keys)[0], loaded.rows)
    assert loaded.writer.states() == [TagState(5, 5, 4, 0)] * 6
    loaded.writer.drop(pause_s=0)
    with pytest.raises(Exception, match="there is no watermark"):
        loaded.writer.apply_delta(4, 6, [change])
    assert sum(loaded.writer.counts("t")) == 0, "a late delta does not bring rows back"


def test_rows_of_two_deltas_with_one_seq_are_refused(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    change = loaded.change(loaded.keys, some_rows(loaded.keys, 9))
    assert loaded.writer.apply_delta(1, 6, [change], "a1") == [True] * 6
    assert loaded.writer.apply_delta(1, 6, [change], "a1") == [False] * 6
    with pytest.raises(Corruption, match="another delta 6"):
        loaded.writer.apply_delta(1, 6, [change], "b2")
    monkeypatch.setattr(loaded.writer, "_script_bytes", 1000)
    run, begun = Writer._run, set[int]()

    def only_first(self: Writer, tag: int, *words: Any) -> int:  # of each tag: all have begun when it ends
        assert tag not in begun
        begun.add(tag)
        return run(self, tag, *words)

    monkeypatch.setattr(Writer, "_run", only_first)
    with pytest.raises(AssertionError):
        loaded.writer.apply_delta(1, 7, [change], "a1")
    assert len(begun) == 6
    monkeypatch.undo()
    with pytest.raises(Corruption, match="another delta 7"):
        loaded.writer.apply_delta(1, 7, [change], "b2")
    loaded.writer.apply_delta(1, 7, [change], "a1")
    assert {(state.seq, state.digest) for state in loaded.writer.states() if state} == {(7, "a1")}
    # an earlier release writes no digest
    for tag in loaded.tags:
        key = watermark_key(tag, loaded.model, 1)
        call(loaded.cluster, slot_of(tag), [command(b"HSET", key, b"seq", b"8", b"applying", b"8")], timeout_s=60)
    assert {(state.seq, state.digest) for state in loaded.writer.states() if state} == {(8, "")}
    assert loaded.writer.apply_delta(1, 8, [change], "b2") == [False] * 6


@pytest.mark.parametrize("at", [2**53, 10**16 - 1, 10**18 - 3, 2**63 - 3])
def test_seqs_are_compared_to_the_last_digit(loaded: Loaded, at: int) -> None:
    change = loaded.change(loaded.keys, some_rows(loaded.keys, 9))
    loaded.writer.finish(seq=at)
    with pytest.raises(SequenceGap) as gap:
        loaded.writer.apply_delta(1, at + 2, [change])
    assert gap.value.expected_seq == at + 1
    for seq in (at + 1, at + 2):
        assert loaded.writer.apply_delta(1, seq, [change]) == [True] * 6
        assert loaded.writer.apply_delta(1, seq, [change]) == [False] * 6
        assert {state and state.seq for state in loaded.writer.states()} == {seq}
        assert loaded.fetch(loaded.keys)[2].lowest == seq


def test_a_large_delta_that_was_broken_off_shows_and_is_done_again(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.writer, "_script_bytes", 1000)
    change = loaded.change(loaded.keys, some_rows(loaded.keys, 9), np.arange(len(loaded.keys)) % 5 == 0)
    run, calls = Writer._run, itertools.count()

    def broken(self: Writer, *words: Any) -> int:
        if next(calls) >= 20:
            raise ConnectionError("cut")
        return run(self, *words)

    monkeypatch.setattr(Writer, "_run", broken)
    with pytest.raises(ConnectionError):
        loaded.writer.apply_delta(1, 6, [change])
    states = loaded.writer.states()
    assert any(state and state.seq == 5 and state.applying == 6 and state.chunk for state in states)
    watermarks = loaded.fetch(loaded.keys)[2]
    assert (watermarks.lowest, watermarks.highest) == (5, 6)
    monkeypatch.setattr(Writer, "_run", run)
    with Writer(loaded.cluster, loaded.model, 1, {"t": ROW_BYTES}, loaded.tags) as successor:
        successor.apply_delta(2, 6, [change])
    assert all(state == TagState(6, 6, 2, 0) for state in loaded.writer.states())
    rows, state, watermarks = loaded.fetch(loaded.keys)
    assert (watermarks.lowest, watermarks.highest) == (6, 6)
    np.testing.assert_array_equal(state == Tier.ABSENT, change.deleted)
    np.testing.assert_array_equal(rows[~change.deleted], change.rows[~change.deleted])


def test_what_is_read_is_never_outside_its_watermarks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row tells its delta. Deltas go in many chunks while threads read."""
    monkeypatch.setattr(loaded.writer, "_script_bytes", 2000)
    loaded.writer.apply_delta(1, 6, [loaded.change(loaded.keys, some_rows(loaded.keys, 6))])
    tags, stop = partition_of(loaded.keys, 6), threading.Event()

    def read() -> int:
        between = 0
        while not stop.is_set():
            rows, state, watermarks = loaded.fetch(loaded.keys)
            assert (state == Tier.REMOTE).all()
            deltas = np.ascontiguousarray(rows[:, 8:]).view(np.int32).ravel()
            assert (deltas >= watermarks.low[tags]).all()
            assert (deltas <= watermarks.high[tags]).all()
            between += int((watermarks.low != watermarks.high).sum())
        return between

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        try:
            for seq in range(7, 30):
                loaded.writer.apply_delta(1, seq, [loaded.change(loaded.keys, some_rows(loaded.keys, seq))])
        finally:
            stop.set()
        assert sum(reader.result() for reader in readers) > 0, "some reads fell into a delta"


# ---- an engine that answers each connection on a thread of its own ------------------------------------------------


@pytest.fixture
def threaded(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """`loaded`, in what is taken for Kvrocks."""
    monkeypatch.setattr(loaded.cluster, "engine", Engine("kvrocks", "2.10.1"))
    with Writer(loaded.cluster, loaded.model, 1, {"t": ROW_BYTES}, loaded.tags) as writer:
        monkeypatch.setattr(loaded, "writer", writer)
        yield loaded


def test_many_keys_are_asked_for_over_several_connections(servers: RedisCluster, threaded: Loaded) -> None:
    absent = np.arange(-1999, 2000, 2)
    order = np.random.default_rng(5).permutation(len(threaded.keys) + len(absent))
    keys = np.concatenate([threaded.keys, absent])[order]
    for address in threaded.cluster.masters():
        threaded.cluster.pools.forget(address)
    opened = threaded.cluster.stats()["connections_opened"]
    commands = hmgets(servers)
    rows, state, watermarks = threaded.fetch(keys)
    there = order < len(threaded.keys)
    np.testing.assert_array_equal(state, np.where(there, Tier.REMOTE, Tier.ABSENT))
    np.testing.assert_array_equal(rows[there], threaded.rows[order[there]])
    assert watermarks.low.tolist() == watermarks.high.tolist() == [5] * 6
    assert threaded.cluster.stats()["connections_opened"] - opened >= 3 * 4
    assert hmgets(servers) - commands >= 3 * 3 * 4, (
        "each connection compares the watermark before its rows and after them"
    )


def test_few_keys_take_one_command_a_tag(servers: RedisCluster, threaded: Loaded) -> None:
    threaded.fetch(threaded.keys[:60])
    commands = hmgets(servers)
    threaded.fetch(threaded.keys[:60])
    assert hmgets(servers) - commands == 3 * 6


def test_a_tag_that_is_lost_fails_with_all_its_pieces(threaded: Loaded) -> None:
    threaded.cluster.client.delete(threaded.mark(2))
    lost = partition_of(threaded.keys, 6) == 2
    rows, state = np.zeros_like(threaded.rows), np.zeros(len(threaded.keys), np.uint8)
    with pytest.raises(RemoteUnavailable) as failed:
        threaded.table.fetch(threaded.keys, rows, state)
    assert list(failed.value.keys) == threaded.keys[lost].tolist()
    np.testing.assert_array_equal(state, np.where(lost, Tier.PENDING, Tier.REMOTE))
    np.testing.assert_array_equal(rows[~lost], threaded.rows[~lost])


def test_a_delta_goes_in_smaller_steps(servers: RedisCluster, threaded: Loaded) -> None:
    def scripts() -> int:
        return sum(one.client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0) for one in servers.masters())

    keys, before = np.arange(60_000), scripts()
    threaded.writer.apply_delta(1, 6, [threaded.change(keys, some_rows(keys, 9))])
    assert scripts() - before >= 60_000 * (8 + ROW_BYTES) // (64 << 10)
    rows, _, watermarks = threaded.fetch(keys)
    np.testing.assert_array_equal(rows, some_rows(keys, 9))
    assert (watermarks.lowest, watermarks.highest) == (6, 6)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8), most=st.integers(1, 60))
def test_pieces_are_whole_in_order_and_not_too_large(counts: list[int], most: int) -> None:
    starts = np.cumsum([0, *counts])
    parts, begins = lookup._cut(starts, most)
    found: list[list[int]] = [[] for _ in counts]
    for part, begin, end in zip(parts.tolist(), begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        assert end - begin <= most
        found[part] += range(begin, end)
    assert found == [[*range(low, high)] for low, high in itertools.pairwise(starts.tolist())]


# ---- many at once ---------------------------------------------------------------------------------------------


def hmgets(servers: RedisCluster) -> int:
    return sum(
        server.client.info("commandstats").get("cmdstat_hmget", {}).get("calls", 0) for server in servers.masters()
    )


def test_a_key_is_read_once_however_many_want_it(servers: RedisCluster, loaded: Loaded) -> None:
    loaded.fetch(loaded.keys)
    before = hmgets(servers)
    loaded.fetch(loaded.keys)
    once = hmgets(servers) - before
    masters = servers.masters()
    for server in masters:
        server.pause()
    try:
        with ThreadPoolExecutor(8) as threads:
            first = threads.submit(loaded.fetch, loaded.keys)
            wait_for(lambda: loaded.table._reading, "the first reader")
            others = [threads.submit(loaded.fetch, loaded.keys[i::7]) for i in range(7)]
            wait_for(lambda: loaded.table._reading[0].followers == 7, "all others to join it")
            for server in masters:
                server.resume()
            np.testing.assert_array_equal(first.result()[0], loaded.rows)
            for i, other in enumerate(others):
                np.testing.assert_array_equal(other.result()[0], loaded.rows[i::7])
                assert other.result()[2].lowest == 5
    finally:
        for server in masters:
            server.resume()
    assert hmgets(servers) - before == 2 * once
    assert loaded.table._reading == []


def test_bytes_on_their_way_are_bounded(servers: RedisCluster, loaded: Loaded) -> None:
    small = connect(servers.url, Options(timeout_s=60, outstanding_bytes=100_000, other_after_s=0))
    table = ClusterTable(small, loaded.model, 1, "t", loaded.tags, ROW_BYTES)

    def fetch(keys: Keys) -> None:
        table.fetch(keys, np.zeros((len(keys), ROW_BYTES), np.uint8), np.zeros(len(keys), np.uint8))

    masters = servers.masters()
    try:
        with ThreadPoolExecutor(1) as threads:
            for server in masters:
                server.pause()
            waiting = threads.submit(fetch, loaded.keys)  # 2000 keys: more than the limit, but nothing else waits
            wait_for(lambda: small.stats()["outstanding_bytes"], "the first look-up")
            with pytest.raises(Overloaded, match="outstanding_bytes"):
                fetch(loaded.keys[:1])
            for server in masters:
                server.resume()
            waiting.result()
        fetch(loaded.keys[:1])
        assert small.stats()["outstanding_bytes"] == 0
    finally:
        for server in masters:
            server.resume()
        small.close()


# ---- connecting -----------------------------------------------------------------------------------------------


def test_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_cluster(masters=1, password="se cret/@:") as servers:
        keys = np.arange(100)
        cluster = connect(servers.url, PATIENT)
        Loaded(cluster, keys, some_rows(keys)).writer.close()
        cluster.close()
        address = servers.servers[0].address
        for url in (f"redis://:wrong-one@{address}", f"redis://somebody:se@{address}", f"redis://{address}"):
            has_users = engine() != "kvrocks" or "somebody" not in url
            match = "TIERSTORE_REMOTE_PASSWORD" if has_users else "leave the user out"
            with pytest.raises(ConfigError, match=match) as refused:
                connect(url, PATIENT)
            assert address in str(refused.value)
            assert "wrong-one" not in str(refused.value)
        monkeypatch.setenv("TIERSTORE_REMOTE_PASSWORD", "se cret/@:")
        connect(f"redis://{address}", PATIENT).close()


def test_tls(tmp_path: Path) -> None:
    with redis_cluster(masters=1, authority=Authority(tmp_path)) as servers:
        cluster = connect(servers.url, PATIENT)
        keys = np.arange(20_000)
        loaded = Loaded(cluster, keys, some_rows(keys, 3))
        np.testing.assert_array_equal(loaded.fetch(keys)[0], loaded.rows)
        assert loaded.fetch([-1])[1] == [Tier.ABSENT]
        loaded.writer.apply_delta(1, 1, [loaded.change(keys[:10], some_rows(keys[:10], 4))])
        assert loaded.fetch(keys[:10])[2].lowest == 1
        loaded.writer.close()
        cluster.close()
        address = servers.servers[0].address
        with pytest.raises(ConfigError, match="TLS failed"):
            connect(f"rediss://{address}", PATIENT)
        with pytest.raises(RemoteUnavailable, match="rediss://"):
            connect(f"redis://{address}", PATIENT)


def test_no_cluster_at_that_address(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(RemoteUnavailable, match=f"127.0.0.1:{port} cannot be reached .*check that the server runs"):
            connect(f"redis://127.0.0.1:{port}", PATIENT)
        silent.listen()
        with pytest.raises(RemoteUnavailable, match="cannot be reached"):
            connect(f"redis://127.0.0.1:{port}", Options(connect_timeout_s=0.3))


def test_a_server_that_is_no_cluster(tmp_path: Path) -> None:
    with redis_cluster(masters=1) as servers:  # for its checks of what the machine has
        port, bus = free_ports(2)
        alone = Server(9, port, bus, tmp_path, in_cluster=False)
        alone.start()
        try:
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is not part of a cluster"):
                connect(f"redis://127.0.0.1:{port}", PATIENT)
            connect(f"redis://127.0.0.1:{port},{servers.servers[0].address}", PATIENT).close()
        finally:
            alone.kill()


def test_a_closed_cluster_says_so(servers: RedisCluster, loaded: Loaded) -> None:
    cluster = connect(servers.url, PATIENT)
    table = ClusterTable(cluster, loaded.model, 1, "t", loaded.tags, ROW_BYTES)
    cluster.close()
    with pytest.raises(Closed):
        table.fetch(np.arange(3), np.zeros((3, ROW_BYTES), np.uint8), np.zeros(3, np.uint8))
    with pytest.raises(Closed):
        _ = cluster.client
