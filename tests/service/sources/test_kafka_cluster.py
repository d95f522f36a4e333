"""Deltas from a topic into a model in a real cluster: every node reads, one brings each delta in, and none is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.kafka_broker import Brokers
from tests.redis_cluster import RedisCluster, redis_cluster
from tests.service.conftest import eventually
from tests.service.scenes import delta, rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import Conflict
from tierstore.service.sources.kafka import KafkaSource

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisCluster]:
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    running = Brokers()
    yield running
    running.close()


def seen(model: Any) -> int:
    """The newest delta that its answers have: its log has it a moment before."""
    with model.view() as view:
        return int(view.seq)


class Nodes:
    """Nodes of one cluster on one topic, each with a directory of its own; the model `ctr` at seq 3."""

    def __init__(self, root: Path, cluster: RedisCluster, brokers: Brokers) -> None:
        self.root, self.cluster, self.brokers = root, cluster, brokers
        self.topic = brokers.new_topic(2)
        self.producer = confluent_kafka.Producer({"bootstrap.servers": brokers.address})
        self.stores: dict[str, Store] = {}
        self.sources: dict[str, KafkaSource] = {}
        self.open("a").load_snapshot(write_snapshot(root, 1, delta_seq=3))
        self.follow("a")

    def open(self, name: str) -> Store:
        self.stores[name] = tierstore.open(
            self.root / name, remote=self.cluster.url, kafka=self.brokers.address, kafka_topic=self.topic,
            host_budget="4MiB", load_workers=1, remote_timeout_s=20.0, remote_lease_s=2.0, fold_grace_s=0.0,
        )  # fmt: skip
        return self.stores[name]

    def follow(self, name: str) -> None:
        self.sources[name] = KafkaSource(self.stores[name], self.stores[name].settings)

    def start(self, name: str) -> None:
        store = self.open(name)
        eventually(lambda: "ctr" in store.models() and store.model("ctr").ready, f"{name} serves")
        self.follow(name)

    def leader(self) -> str:
        return str(eventually(lambda: next(iter(self._leading()), None), "a node to have the lease"))

    def _leading(self) -> list[str]:
        return [name for name, store in self.stores.items() if store.placed(store.model("ctr")).leads()]

    def stop_reading(self, name: str) -> None:
        self.sources.pop(name).close()

    def stop(self, name: str) -> None:
        if name in self.sources:
            self.stop_reading(name)
        self.stores.pop(name).close()

    def put(self, value: bytes, partition: int = 0, **headers: object) -> None:
        named = [(name, str(text).encode()) for name, text in headers.items()]
        self.producer.produce(self.topic, value, partition=partition, headers=named)
        assert self.producer.flush(60) == 0

    def deltas(self, seqs: range) -> None:
        for seq in seqs:
            self.put(delta(seq, {1: float(seq), seq: seq + 0.5}), partition=seq % 2, model="ctr", seq=seq)

    def reach(self, seq: int) -> None:
        for name, store in self.stores.items():
            eventually(lambda store=store: seen(store.model("ctr")) == seq, f"{name} at {seq}; {self.shown()}")
            got = store.model("ctr").lookup("item_id", np.arange(4, seq + 1))
            np.testing.assert_array_equal(got, rows("item", [one + 0.5 for one in range(4, seq + 1)]))
            np.testing.assert_array_equal(store.model("ctr").lookup("item_id", [1]), rows("item", [float(seq)]))

    def shown(self) -> dict[str, Any]:
        return {name: source.status() for name, source in self.sources.items()}

    def sum_of(self, field: str) -> int:
        return sum(status[field] for status in self.shown().values())


@pytest.fixture
def nodes(tmp_path: Path, servers: RedisCluster, brokers: Brokers) -> Iterator[Nodes]:
    servers.flush()
    made = Nodes(tmp_path, servers, brokers)
    yield made
    for name in list(made.stores):
        made.stop(name)


@pytest.mark.thorough
def test_every_node_reads_and_each_delta_is_brought_in_once(nodes: Nodes) -> None:
    nodes.start("b")
    nodes.deltas(range(4, 44))
    nodes.reach(43)
    eventually(lambda: nodes.sum_of("applied") + nodes.sum_of("duplicates") >= 80, f"all were read; {nodes.shown()}")
    assert nodes.sum_of("applied") == 40
    assert nodes.sum_of("parked") == 0


@pytest.mark.thorough
def test_another_node_stands_in_for_one_that_reads_no_more_or_is_gone(nodes: Nodes) -> None:
    nodes.start("b")
    nodes.deltas(range(4, 8))
    nodes.reach(7)
    leader = nodes.leader()
    nodes.stop_reading(leader)  # it has the lease all the same
    nodes.deltas(range(8, 12))
    nodes.reach(11)
    nodes.stop(leader)
    nodes.deltas(range(12, 16))
    nodes.reach(15)


def test_a_node_that_comes_with_an_empty_directory_repeats_nothing(nodes: Nodes) -> None:
    nodes.start("b")
    nodes.deltas(range(4, 10))
    nodes.reach(9)
    nodes.stop("b")
    shutil.rmtree(nodes.root / "b")
    nodes.deltas(range(10, 13))
    nodes.start("b")
    nodes.reach(12)
    eventually(lambda: nodes.shown()["b"]["state"] == "caught up", f"b is caught up; {nodes.shown()}")
    assert nodes.stores["b"].verify().ok


def test_what_a_person_skips_on_one_node_is_skipped_on_all(nodes: Nodes) -> None:
    nodes.start("b")
    nodes.put(delta(5, {1: 1.0}), model="ctr", seq=4)  # its headers say something else
    nodes.deltas(range(5, 8))
    for store in nodes.stores.values():
        eventually(lambda store=store: store.parked(), "it is parked on each node")
    (parked,) = nodes.stores["b"].parked()
    with pytest.raises(tierstore.DeltaError):
        nodes.stores["b"].retry_parked(parked["id"])
    assert nodes.stores["b"].skip_parked(parked["id"])["applied"]
    for name, store in nodes.stores.items():
        eventually(lambda store=store: store.model("ctr").log.last == 7, f"{name} goes on; {nodes.shown()}")
    (left,) = nodes.stores["a"].parked()
    assert not nodes.stores["a"].skip_parked(left["id"])["applied"]  # its seq is taken
    with pytest.raises((tierstore.NotFound, Conflict)):
        nodes.stores["a"].skip_parked(left["id"])
