"""Kill brokers, the service and the producer of rows, again and again, and compare the store in the end with the topic.

    python -m tools.kafka_rows_chaos --kills 200

Three brokers of Apache Kafka run; a process produces rows in transactions, of which it aborts some, and notes what was committed;
another one gathers rows into deltas. Each of them is killed with SIGKILL at random moments, and started again. In the end the topic
is read from its beginning, and

- every row that the producer had committed is in it;
- the entries of the log have as many rows as the topic, less what is parked, and their positions only go up: none is lost, none came twice;
- every key has the vector of its last row in the topic; what was aborted is nowhere; all poison is parked.

Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import tierstore
from tests.kafka_real import RealBrokers, real_brokers
from tierstore.config import load_settings
from tierstore.engine.deltas.origin import read as read_origin
from tierstore.engine.store import Store
from tierstore.service.sources.kafka_routes import TopicRoute
from tierstore.service.sources.kafka_rows import RowTopic
from tools.kafka_chaos import Process, context, follow, options

PARTITIONS, KEYS, DIM = 4, 500, 4
POISON = b"no row"
ABORTED = -1.0


def of_rows(topic: str, store: Store) -> RowTopic:
    return RowTopic(store, store.settings, TopicRoute(topic, "ctr", "item"))


def produce(journal: Path, address: str, topic: str, seed: int, pipe: Connection) -> None:
    """The producer that is killed. A row's vector says when its producer began and which of its rows it is; of what is committed both are noted."""
    import confluent_kafka

    chance = random.Random(seed)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "transactional.id": topic, "transaction.timeout.ms": 20000, "log_level": 0}
    )
    number = (int(time.time() * 100) & 0xFFFFFF) << 24  # no other one has: float32 has 24 bits
    with journal.open("ab", buffering=0) as file:
        _patiently(producer.init_transactions)
        pipe.send("ready")
        while not pipe.poll():  # its end counts as something to read
            producer.begin_transaction()
            aborts, numbers = chance.random() < 0.2, []
            for _ in range(chance.randint(1, 200)):
                key, number = chance.randrange(KEYS), number + 1
                vector = (
                    [ABORTED] * DIM if aborts else [float(number >> 24), float(number & 0xFFFFFF), *[0.5] * (DIM - 2)]
                )
                value = orjson.dumps({"key": key, "vector": vector, "event_time": time.time()})
                if chance.random() < 0.0005 and not aborts:
                    value = POISON
                else:
                    numbers.append(number)
                producer.produce(topic, value, str(key).encode(), partition=key % PARTITIONS)
            try:
                _patiently(producer.abort_transaction if aborts else producer.commit_transaction)
            except confluent_kafka.KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    print(f"the producer ends: {error}", flush=True)  # as Kafka wants it; the next one begins anew
                    return
                _patiently(producer.abort_transaction)
                continue
            if not aborts:
                file.write(b"".join(struct.pack("<q", one) for one in numbers))
            time.sleep(chance.uniform(0, 0.05))


def _patiently(action: Callable[[float], Any]) -> None:
    import confluent_kafka

    while True:
        try:
            action(10.0)
            return
        except confluent_kafka.KafkaException as error:
            if not error.args[0].retriable():
                raise


def _committed(journal: Path) -> list[int]:
    data = journal.read_bytes()
    return [one for (one,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8])]


class Killer:
    """Kills one of the parts at a time: a broker only when all replicas are in sync, so that no row has to be lost."""

    def __init__(self, cluster: RealBrokers, topic: str, service: Process, producer: Process, seed: int) -> None:
        self._cluster, self._topic, self._random = cluster, topic, random.Random(seed)
        self._service, self._producer = service, producer
        self.brokers = 0

    def one(self) -> None:
        chance = self._random.random()
        if chance < 0.15:
            node = self._cluster.leader(self._topic, self._random.randrange(PARTITIONS))
            self._cluster.kill(node)
            time.sleep(self._random.uniform(0, 2))
            self._cluster.start(node)
            self.brokers += 1
            # the others are killed meanwhile
            for _ in range(2):
                self._kill(self._service)
            self._cluster.await_in_sync(self._topic)
        else:
            self._kill(self._producer if chance < 0.4 else self._service)

    def _kill(self, process: Process) -> None:
        if self._random.random() > 0.15:  # else in its start
            process.ready()
        time.sleep(self._random.uniform(0, 1.2))
        process.kill()
        process.start()

    @property
    def kills(self) -> int:
        return self.brokers + self._service.kills + self._producer.kills


def read_topic(address: str, topic: str) -> list[tuple[int, int, bytes]]:
    """(partition, offset, value) of every committed message."""
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": address, "group.id": "check", "enable.partition.eof": True, "isolation.level": "read_committed",
         "enable.auto.commit": False}
    )  # fmt: skip
    consumer.assign([confluent_kafka.TopicPartition(topic, one, 0) for one in range(PARTITIONS)])
    found, ended = [], set[int]()
    while len(ended) < PARTITIONS:
        for message in consumer.consume(1000, 5.0):
            if message.error() is None:
                found.append((message.partition(), message.offset(), message.value()))
            elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    return found


def problems_of(store: Store, topic: str, messages: list[tuple[int, int, bytes]], committed: list[int]) -> list[str]:
    """How the store differs from the topic, and the topic from what was committed."""
    found, last, numbers = [], dict[int, list[float]](), list[int]()
    for _, _, value in sorted(messages, key=lambda one: one[:2]):
        if value != POISON:
            row = orjson.loads(value)
            last[row["key"]] = row["vector"]
            numbers.append(int(row["vector"][0]) << 24 | int(row["vector"][1]))
    if missing := set(committed) - set(numbers):
        found.append(f"{len(missing)} committed rows are not in the topic")
    if twice := len(numbers) - len(set(numbers)):
        found.append(f"the topic has {twice} rows twice")
    if aborted := sum(number < 0 for number in numbers):
        found.append(f"{aborted} aborted rows are seen")
    wanted = np.zeros((KEYS, DIM), np.float32)
    for key, vector in last.items():
        wanted[key] = vector
    got = store.model("ctr").lookup("item_id", np.arange(KEYS))
    if wrong := int((got != wanted).any(axis=1).sum()):
        found.append(f"{wrong} of {KEYS} rows differ")
    log, where = store.model("ctr").log, store.root.model("ctr")
    counted, before = 0, dict[str, int]()
    for seq in range(1, (log.last or 0) + 1):
        origin = read_origin(where.log_entry(seq, str(log.digest(seq))))
        assert origin is not None
        counted += origin["rows"]
        if any(origin["resume"][one] < offset for one, offset in before.items()):
            found.append(f"delta {seq} goes back: {before} to {origin['resume']}")
        before = origin["resume"]
    if counted != len(numbers):
        found.append(f"the log has {counted} rows, the topic {len(numbers)}")
    poison = sum(value == POISON for _, _, value in messages)
    if (parked := len(store.parked())) != poison:
        found.append(f"{parked} messages are parked, {poison} were poison")
    return found + list(store.verify().problems)


def run(kills: int, seed: int, root: Path, cluster: RealBrokers) -> int:
    topic, data, journal = cluster.new_topic(PARTITIONS), root / "data", root / "committed"
    journal.touch()
    rows = {"kafka_rows": [f"{topic}=ctr/item"], "kafka_rows_gather_s": 0.1}
    settings = options(data, cluster.address, **rows)
    with Store(load_settings(None, **settings)) as store:
        with tierstore.SnapshotWriter(root / "ctr", model="ctr", version=1, delta_seq=0) as writer:
            writer.table("item", dim=DIM).write(np.arange(KEYS), np.zeros((KEYS, DIM), np.float32))
            writer.feature("item_id", table="item")
        store.load_snapshot(root / "ctr")
    service = Process(follow, settings, partial(of_rows, topic))
    producer = Process(produce, journal, cluster.address, topic, seed)
    killer, began_s, shown = Killer(cluster, topic, service, producer, seed), time.monotonic(), 0
    while killer.kills < kills:
        killer.one()
        if killer.kills >= shown + 20:
            shown = killer.kills
            print(
                f"{shown} kills, {len(_committed(journal)):,} rows committed, {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
    producer.ready()
    time.sleep(2)
    producer.end()
    messages = read_topic(cluster.address, topic)
    service.ready()
    status = service.await_status(lambda said: said["state"] == "caught up" and not said["pending"])
    service.end()
    with Store(load_settings(None, **settings)) as store:
        found = problems_of(store, topic, messages, _committed(journal))
        deltas = store.model("ctr").log.last
    for problem in found:
        print(f"problem: {problem}")
    print(f"{killer.kills} kills ({killer.brokers} of brokers, {service.kills} of the service, {producer.kills} of the producer), {len(messages):,} rows in {deltas:,} deltas, {len(_committed(journal)):,} known to be committed, {time.monotonic() - began_s:.0f} s: {'wrong' if found else 'all is as the topic has it'}; {status.get('state')}")  # fmt: skip
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    context.set_forkserver_preload(["tierstore.service.sources.kafka_rows"])
    with tempfile.TemporaryDirectory() as root, real_brokers(arguments.brokers) as cluster:
        return run(arguments.kills, arguments.seed, Path(root), cluster)


if __name__ == "__main__":
    sys.exit(main())
