"""Kill what reads deltas from Kafka, again and again, and compare what is stored in the end with what was produced.

    python -m tools.kafka_chaos --kills 200

A process opens a store and follows a topic of librdkafka's mock cluster, of the brokers that TIERSTORE_TEST_KAFKA names, or, with
`--brokers 3`, of so many of Apache Kafka, which are killed as well. It is
killed with SIGKILL at random moments, its start included, while deltas of two models are produced over several partitions: out
of order, twice, in parts, and among them messages that cannot be applied. The mock's brokers go down for moments. In the end
every key, every entry of the log and everything that is parked has to be as it was produced. Exit code 1 if it is not.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.kafka_broker import Brokers
from tests.kafka_real import RealBrokers, real_brokers
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.kafka.messages import digest_of, split
from tierstore.service.sources.kafka import KafkaSource

MODELS, PARTITIONS, KEYS, DIM = ("ads", "feed"), 4, 200, 4
PER_S = 10.0  # deltas that are produced
READY_S, END_S = 120.0, 300.0


context = multiprocessing.get_context("forkserver")


def options(data: Path, address: str, **source: object) -> dict[str, object]:
    small = {"host_budget": "8MiB", "load_workers": 1, "disk_threads": 2, "max_delta": "1MiB", "log_retention_s": 1e6}
    return {"data": data, "kafka": address, **small, **source}


def follow(settings: dict[str, object], source_of: Callable[[Store], Any], pipe: Connection) -> None:
    """What is killed: a store that reads from Kafka, until the other end of the pipe is closed."""
    with Store(load_settings(None, **settings)) as store:
        source = source_of(store)
        pipe.send("ready")
        try:
            while pipe.recv():
                pipe.send({**source.status(), "last": {name: store.model(name).log.last for name in store.models()}})
        except EOFError:
            source.close()


def of_deltas(store: Store) -> KafkaSource:
    return KafkaSource(store, store.settings)


class Process:
    """One that is killed and started again; forked from one that has imported everything, so that a start is short."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._target, self._arguments = target, arguments
        self.kills = 0
        self.start()

    def start(self) -> None:
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=self._target, args=(*self._arguments, other))
        self._process.start()
        other.close()

    def ready(self) -> None:
        if not self._pipe.poll(READY_S) or self._pipe.recv() != "ready":
            raise RuntimeError(f"{self._target.__name__} did not start")

    def await_status(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask until it is so, or for END_S. Returns what it said last."""
        until = time.monotonic() + END_S
        while True:
            self._pipe.send("status")
            status: dict[str, Any] = self._pipe.recv()
            if holds(status) or time.monotonic() > until:
                return status
            time.sleep(0.2)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self.kills += 1

    def end(self) -> None:
        """Have it end by itself: its pipe ends, and what it is in the middle of is finished."""
        self._pipe.close()
        self._process.join(60)


class Producer(threading.Thread):
    """Produces until stopped, and knows what has to be stored in the end."""

    def __init__(self, address: str, topic: str, poison: int, seed: int) -> None:
        super().__init__(name="producer", daemon=True)
        import confluent_kafka

        self._producer = confluent_kafka.Producer({"bootstrap.servers": address, "enable.idempotence": True})
        self._topic, self._poison, self._random = topic, poison, random.Random(seed)
        self.stopping = threading.Event()
        self.rows = {model: np.zeros((KEYS, DIM), np.float32) for model in MODELS}
        self.digests: dict[str, list[str]] = {model: [] for model in MODELS}
        # where the messages of a delta are, by model and seq: partition and offset
        self.places: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
        self.poisoned = self.sent = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not (self.stopping.is_set() and self.poisoned == self._poison):
                self.burst()
                time.sleep(5 / PER_S)
            self.flush()
        except Exception as error:  # noqa: BLE001 - the main thread reports it
            self.error = error

    def burst(self) -> None:
        """Some deltas in disorder, one of them twice, and perhaps poison."""
        chance = self._random
        burst = [self._next(chance.choice(MODELS)) for _ in range(5)]
        last = max(burst, key=lambda one: one[1])
        chance.shuffle(burst)
        for model, seq, data, partition in burst:
            if self.poisoned < self._poison and chance.random() < 0.05:
                self._put(
                    b"poison %d" % self.poisoned, partition, *(("seq", seq), ("model", model))
                )  # then the good one
                self.poisoned += 1
            most = 300 if chance.random() < 0.15 else 1 << 20
            for headers, value in split(model, seq, data, most):
                self._put(bytes(value), partition, *((name, text.decode()) for name, text in headers), of=(model, seq))
        model, seq, data, partition = last
        self._put(
            data, partition, ("model", model), ("seq", seq), of=(model, seq)
        )  # as a producer that got no answer would
        if self.poisoned < self._poison and chance.random() < 0.1:
            if chance.random() < 0.5:
                self._put(b"poison %d" % self.poisoned, partition)
            else:  # other content under the same seq
                self._put(self._delta(model, seq, [0], np.full((1, DIM), -1, np.float32)), partition)
            self.poisoned += 1

    def _next(self, model: str) -> tuple[str, int, bytes, int]:
        keys = sorted(self._random.sample(range(KEYS), self._random.randint(1, 40)))
        seq = len(self.digests[model]) + 1
        vectors = np.full((len(keys), DIM), seq, np.float32) + np.array(keys, np.float32)[:, None] / 1024
        self.rows[model][keys] = vectors
        data = self._delta(model, seq, keys, vectors)
        self.digests[model].append(digest_of(data))
        return model, seq, data, self._random.randrange(PARTITIONS)

    @staticmethod
    def _delta(model: str, seq: int, keys: list[int], vectors: np.ndarray) -> bytes:
        sink = io.BytesIO()
        with tierstore.DeltaWriter(sink, model=model, seq=seq) as delta:
            delta.upsert("item", np.array(keys), vectors)
        return sink.getvalue()

    def allow_poison(self, more: int) -> None:
        """Have so many further messages be ones that cannot be applied."""
        self._poison += more

    def flush(self) -> None:
        """Return when the brokers have everything."""
        if self._producer.flush(120):
            raise RuntimeError("the brokers did not acknowledge everything")

    def _put(
        self, value: bytes, partition: int, *headers: tuple[str, object], of: tuple[str, int] | None = None
    ) -> None:
        named = [(name, str(text).encode()) for name, text in headers]

        def delivered(error: object, message: Any) -> None:
            if of is not None and error is None:
                self.places[of].add((message.partition(), message.offset()))

        self._producer.produce(self._topic, value, partition=partition, headers=named, on_delivery=delivered)
        self._producer.poll(0)
        self.sent += 1


def load_models(root: Path, data: Path) -> None:
    """Make a store with what is served before the first delta; snapshots go to `root`."""
    with Store(load_settings(None, **options(data, ""))) as store:
        for model in MODELS:
            with tierstore.SnapshotWriter(root / model, model=model, version=1, delta_seq=0) as writer:
                writer.table("item", dim=DIM).write(np.arange(KEYS), np.zeros((KEYS, DIM), np.float32))
                writer.feature("item_id", table="item")
            store.load_snapshot(root / model)


def problems_of(store: Store, producer: Producer) -> list[str]:
    """How the store differs from what was produced."""
    found = []
    for model, rows in producer.rows.items():
        got = store.model(model).lookup("item_id", np.arange(KEYS))
        if wrong := int((got != rows).any(axis=1).sum()):
            found.append(f"{model}: {wrong} of {KEYS} rows differ")
        log, digests = store.model(model).log, producer.digests[model]
        if log.last != len(digests):
            found.append(f"{model}: the log ends at {log.last}, {len(digests)} were produced")
        if [log.digest(seq) for seq in range(1, len(digests) + 1)] != digests:
            found.append(f"{model}: entries of the log differ from what was produced")
    if (parked := len(store.parked())) != producer.poisoned:
        found.append(f"{parked} messages are parked, {producer.poisoned} were poison")
    return found + list(store.verify().problems)


def fail_broker(cluster: Brokers | RealBrokers, topic: str, chance: random.Random) -> None:
    """A broker is away for a moment; of real ones none before the last one is back."""
    broker = chance.randint(1, 3)
    if isinstance(cluster, RealBrokers):
        cluster.await_in_sync(topic)
        broker = cluster.leader(topic, chance.randrange(PARTITIONS))
        cluster.kill(broker)
        time.sleep(chance.uniform(0, 1))
        cluster.start(broker)
    else:
        cluster.command(f"down {broker}")
        time.sleep(chance.uniform(0, 1))
        cluster.command(f"up {broker}")


def run(kills: int, poison: int, seed: int, root: Path, cluster: Brokers | RealBrokers) -> int:
    chance, data = random.Random(seed), root / "data"
    topic = cluster.new_topic(PARTITIONS)
    load_models(root, data)
    producer = Producer(cluster.address, topic, poison, seed)
    producer.start()
    began_s, outages, settings = time.monotonic(), 0, options(data, cluster.address, kafka_topic=topic)
    follower = Process(follow, settings, of_deltas)
    for number in range(kills):
        if chance.random() < 0.1:
            time.sleep(chance.uniform(0, 1.5))  # in its start
        else:
            follower.ready()
            time.sleep(chance.uniform(0, 1.2))
        if (cluster.is_mock or isinstance(cluster, RealBrokers)) and number % 10 == 9:
            fail_broker(cluster, topic, chance)
            outages += 1
        follower.kill()
        follower.start()
        if (number + 1) % 20 == 0:
            print(f"{number + 1} kills, {producer.sent} messages, {time.monotonic() - began_s:.0f} s", flush=True)
    producer.stopping.set()
    producer.join()
    if producer.error is not None:
        raise producer.error
    follower.ready()
    wanted = {model: len(seqs) for model, seqs in producer.digests.items()}
    status = follower.await_status(lambda said: (said["state"], said["last"]) == ("caught up", wanted))
    follower.end()
    with Store(load_settings(None, **settings)) as store:
        found = problems_of(store, producer)
    for problem in found:
        print(f"problem: {problem}")
    print(f"{kills} kills, {outages} outages of a broker, {sum(wanted.values())} deltas in {producer.sent} messages, {producer.poisoned} of poison, {time.monotonic() - began_s:.0f} s: {'wrong' if found else 'all is as produced'}; {status['state']}")  # fmt: skip
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--poison", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--brokers", type=int, default=0, help="of Apache Kafka, in place of the mock's")
    given = parser.parse_args()
    context.set_forkserver_preload(["tierstore.service.sources.kafka"])
    brokers = real_brokers(given.brokers) if given.brokers else closing(Brokers())
    with tempfile.TemporaryDirectory() as root, brokers as cluster:
        return run(given.kills, given.poison, given.seed, Path(root), cluster)


if __name__ == "__main__":
    sys.exit(main())
