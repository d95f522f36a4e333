"""The remote tier while its cluster is in trouble: masters killed, slots that move, servers that are slow or cut off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.redis_cluster import RedisCluster, redis_cluster, wait_for
from tests.tiers.backing_contract import ROW_BYTES, some_rows
from tests.tiers.test_cluster import PATIENT, Loaded
from tierstore.errors import RemoteUnavailable
from tierstore.formats.keys import partition_of
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import Cluster, connect
from tierstore.tiers.connection_pools import Options
from tierstore.types import Tier

KEYS = np.arange(3000)
ROWS = some_rows(KEYS, 3)


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisCluster]:
    with redis_cluster() as running:
        yield running


@pytest.fixture
def loaded(servers: RedisCluster) -> Iterator[Loaded]:
    """A model in a cluster that is whole, with its data on all replicas."""
    for server in servers.servers:
        if server.process is None:
            server.start()
    servers.wait_until_ok()
    cluster = connect(servers.url, PATIENT)
    loaded = Loaded(cluster, KEYS, ROWS)
    servers.replicate()
    yield loaded
    loaded.writer.close()
    cluster.close()


def table_on(loaded: Loaded, servers: RedisCluster, options: Options) -> tuple[Cluster, ClusterTable]:
    cluster = connect(servers.url, options)
    return cluster, ClusterTable(cluster, loaded.model, 1, "t", loaded.tags, ROW_BYTES)


def fetch(table: ClusterTable, deadline_s: float | None = None) -> tuple[np.ndarray, set[int]]:
    """All rows that could be read are right. Returns states, and the codes that could not be read."""
    rows, state = np.zeros_like(ROWS), np.zeros(len(KEYS), np.uint8)
    failed: set[int] = set()
    try:
        table.fetch(KEYS, rows, state, deadline_s=deadline_s)
    except RemoteUnavailable as error:
        failed = set(error.keys)
    answered = state == Tier.REMOTE
    np.testing.assert_array_equal(rows[answered], ROWS[answered])
    assert failed == set(KEYS[~answered].tolist())
    assert set(state[~answered]) <= {Tier.PENDING}, "a key that exists is never called absent"
    return state, failed


@pytest.mark.thorough
def test_a_killed_master_is_answered_by_its_replica_and_is_back_after_the_failover(
    servers: RedisCluster, loaded: Loaded
) -> None:
    cluster, table = table_on(loaded, servers, replace(PATIENT, other_after_s=20.0))
    assert fetch(table)[1] == set()
    victim = servers.masters()[0]
    gone, stop = cluster.masters(), threading.Event()

    def failed_over() -> bool:
        cluster.refresh()
        return len(servers.masters()) == 3 and cluster.masters().keys() != gone.keys()

    def read() -> int:
        count = 0
        while not stop.is_set():
            fetch(table)
            count += 1
        return count

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        try:
            victim.kill()
            wait_for(lambda: fetch(table)[1] == set(), "replicas answer, before they are masters or after")
            wait_for(failed_over, "the failover")
            assert fetch(table)[1] == set()
        finally:
            stop.set()
        assert sum(reader.result() for reader in readers) > 0
    loaded.writer.apply_delta(2, 1, [loaded.change(KEYS, ROWS)])
    assert loaded.fetch(KEYS)[2].lowest == 1, "the new master takes writes"
    cluster.close()


@pytest.mark.thorough
def test_without_replicas_its_keys_fail_and_no_others(servers: RedisCluster, loaded: Loaded) -> None:
    cluster, table = table_on(loaded, servers, replace(PATIENT, timeout_s=1.0, other_after_s=0.0))
    victim = servers.masters()[1]
    lost = {tag for tag, slot in enumerate(table.layout.slots) if cluster.master_of(slot).port == victim.port}
    assert fetch(table, time.monotonic() + 60)[1] == set()
    victim.kill()
    _, failed = fetch(table)
    if failed:  # unless the failover was faster
        assert failed == set(KEYS[np.isin(partition_of(KEYS, len(loaded.tags)), list(lost))].tolist())
        with pytest.raises(RemoteUnavailable, match=victim.address):
            table.fetch(np.array(sorted(failed)), np.zeros((len(failed), ROW_BYTES), np.uint8), np.zeros(len(failed), np.uint8))  # fmt: skip
    wait_for(lambda: fetch(table)[1] == set(), "the failover")
    cluster.close()


@pytest.mark.thorough
def test_slots_that_are_migrated_during_look_ups(servers: RedisCluster, loaded: Loaded) -> None:
    """Each slot goes to another master and back, key by key, and all keys are read at every step, from several threads."""
    cluster, table = table_on(loaded, servers, PATIENT)
    masters, stop, steps = servers.masters(), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            assert fetch(table)[1] == set()

    def step() -> None:
        steps.append(fetch(table)[1])

    with ThreadPoolExecutor(2) as threads:
        reader = threads.submit(read)
        try:
            for slot in set(table.layout.slots):
                source = servers.master_of(slot)
                target = next(server for server in masters if server is not source)
                servers.move_slot(slot, target, before_end=step)
                assert fetch(table)[1] == set()
                servers.move_slot(slot, source, before_end=step)
        finally:
            stop.set()
        reader.result()
    assert len(steps) >= 2 * 2 * len(set(table.layout.slots)), "the watermark and the rows of each tag, there and back"
    assert not any(steps)
    cluster.close()


def test_a_slow_master_is_left_for_its_replica(servers: RedisCluster, loaded: Loaded) -> None:
    cluster, table = table_on(loaded, servers, replace(PATIENT, other_after_s=0.2))
    wait_for(lambda: fetch(table)[1] == set(), "a first answer")
    master = servers.masters()[2]
    with ThreadPoolExecutor(1) as threads:
        asleep = threads.submit(master.call, "DEBUG", "SLEEP", "3")
        time.sleep(0.2)
        answered = False
        while not (
            answered or asleep.done()
        ):  # on a busy machine a look-up may give up before the replica has answered
            answered = fetch(table)[1] == set()
        assert answered
        if not asleep.done():  # so it was not the master that has answered
            assert cluster.stats()["suspects"]
        asleep.result()
    cluster.close()


def test_a_master_is_waited_for_where_its_replica_is_behind(servers: RedisCluster, loaded: Loaded) -> None:
    cluster, table = table_on(loaded, servers, replace(PATIENT, other_after_s=0.1, suspect_s=60.0))
    wait_for(lambda: fetch(table)[1] == set(), "a first answer")
    replicated = lambda: cluster.refresh() or all(len(found) > 1 for found in cluster.topology.values())  # noqa: E731
    wait_for(replicated, "the cluster, which has only begun, says which replicas it has")
    master = servers.masters()[0]
    replica = servers.cut_replica(master)
    loaded.writer.apply_delta(2, 1, [loaded.change(KEYS, ROWS)])
    rows, state = np.zeros_like(ROWS), np.zeros(len(KEYS), np.uint8)
    try:
        with ThreadPoolExecutor(1) as threads:
            asleep = threads.submit(master.call, "DEBUG", "SLEEP", "1.0")
            time.sleep(0.2)
            marks = table.fetch(KEYS, rows, state, floor=1)
            assert marks.lowest == 1
            assert (state == Tier.REMOTE).all()
            asleep.result()
        master.pause()
        began_s, state[:] = time.monotonic(), 0
        with pytest.raises(RemoteUnavailable, match=r"a replica that is behind: it has deltas up to 0, .* up to 1"):
            table.fetch(KEYS, rows, state, deadline_s=began_s + 1.0, floor=1)
        assert time.monotonic() - began_s > 0.9
        master.resume()
    finally:
        master.resume()
        servers.join_replica(replica)
    cluster.close()


def test_a_cluster_that_is_cut_off_fails_in_time_and_comes_back(servers: RedisCluster, loaded: Loaded) -> None:
    cluster, table = table_on(loaded, servers, replace(PATIENT, timeout_s=0.5, connect_timeout_s=0.3))
    wait_for(lambda: fetch(table)[1] == set(), "a first answer")
    for server in servers.running():
        server.pause()
    try:
        assert fetch(table)[1] == set(KEYS.tolist())
        assert fetch(table)[1] == set(KEYS.tolist())
    finally:
        for server in servers.running():
            server.resume()
    wait_for(lambda: fetch(table)[1] == set(), "the cluster to be back")
    servers.wait_until_ok()
    cluster.close()
