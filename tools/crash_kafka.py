"""The crash test of deltas from Kafka: end what follows a topic at any moment, and look whether each delta comes in once.

A child opens a store, follows a topic of librdkafka's mock cluster, closes, and begins again, while deltas of two models come:
out of order, twice, in parts, and among them messages that cannot be applied (`tools/kafka_chaos.py`). It is killed.
At each point of its record, which are operations of ours,

- the log holds every delta that was visible, each with the digest of what was produced and with the offsets that it has in the topic;
- what follows the topic from there applies each delta that the log lacks, and none that it holds;
- then every row, every entry of the log and everything that is parked is as it was produced.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.kafka_broker import Brokers
from tierstore.config import load_settings
from tierstore.engine.deltas.origin import read as read_origin
from tierstore.engine.store import Store
from tierstore.service.sources.kafka import KafkaSource
from tierstore.service.sources.kafka_positions import SOURCE
from tools.crash_check import Wrong
from tools.crash_test import Rounds
from tools.crash_work import Journal
from tools.disk_trace import MODES, Disk, Mode
from tools.kafka_chaos import END_S, MODELS, PARTITIONS, Producer, load_models, options, problems_of

POISON, BURSTS = 3, 4  # a round; a burst is of five deltas
POLL_S = 0.002


def work(root: Path, *, seed: int, address: str, topic: str) -> None:
    """Follow, until killed, the topic for some deltas, close, open again."""
    rng, journal = random.Random(seed), Journal(root / "disk/journal")
    while True:
        with Store(load_settings(None, **options(root / "disk/data", address, kafka_topic=topic))) as store:
            source, now = KafkaSource(store, store.settings), _last(store)
            enough = sum(now.values()) + rng.randint(3, 30)
            while sum(now.values()) < enough:
                before = now
                with journal.step("visible", *before.values()):
                    while (now := _last(store)) == before:
                        time.sleep(POLL_S)
            source.close()


def _last(store: Store) -> dict[str, int]:
    return {model: store.model(model).log.last or 0 for model in MODELS}


class Crash(Rounds):
    proven = "every delta is there once, with its origin; all poison is parked"

    def __init__(self, root: Path, seed: int) -> None:
        (root / "disk").mkdir()
        load_models(root, root / "disk/data")
        self._cluster = Brokers()
        self._topic = self._cluster.new_topic(PARTITIONS)
        self.producer = Producer(self._cluster.address, self._topic, 0, seed)
        super().__init__(root, seed, "tools.crash_kafka")
        self.applied = 0  # deltas that came after a start at a point

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._cluster.close()

    def one(self, number: int, most: int | None) -> None:
        self.round(BURSTS, most=most)

    def said(self) -> str:
        sent = self.producer
        return f"{sum(map(len, sent.digests.values()))} deltas in {sent.sent} messages, {sent.poisoned} of poison; {self.applied} applied after a start"

    def round(self, bursts: int, *, most: int | None = None) -> None:
        """Kill a child after so many bursts of deltas, and look at what it leaves, and left after operations of ours.

        `most` bounds how many of these points there are; else it is every operation, each in one of the modes. Raises Wrong.
        """
        rng = self._rng
        self._journal.write_bytes(b"")
        disk = Disk(self._top)
        self.producer.allow_poison(POISON)
        self._nursery.start(
            traced=self.records, seed=rng.getrandbits(32), address=self._cluster.address, topic=self._topic
        )
        self._await_a_start()
        for _ in range(bursts):
            self.producer.burst()
            time.sleep(rng.random() * 0.3)
        self.producer.flush()
        time.sleep(rng.random() * 0.5)
        history = self._kill()
        ours = disk.numbers(history, lambda path: "/data" in path and "/db/" not in path)
        points: list[tuple[int, Mode]] = [(number, rng.choice(MODES)) for number in ours]
        self._replay(disk, history, points if most is None else rng.sample(points, min(most, len(points))))
        self._look(self._top, "signal")

    def _await_a_start(self) -> None:
        until = time.monotonic() + END_S
        while not self._journal.read_bytes():
            if time.monotonic() > until:
                raise Wrong("the child did not start")
            time.sleep(POLL_S)

    def _look(self, where: Path, how: str) -> None:
        self.points[how] += 1
        seen = [line.split()[2:] for line in (where / "journal").read_text().splitlines()]
        visible = dict(zip(MODELS, map(int, seen[-1]), strict=True)) if seen else dict.fromkeys(MODELS, 0)
        with Store(
            load_settings(None, **options(where / "data", self._cluster.address, kafka_topic=self._topic))
        ) as store:
            held = _last(store)
            if any(held[model] < visible[model] for model in MODELS):
                raise Wrong(f"the logs end with {held}; {visible} was visible")
            self._check_entries(store)
            applied = self._follow(store)
            lacked = sum(_last(store).values()) - sum(held.values())
            if applied != lacked:
                raise Wrong(f"{applied} deltas were applied, and {lacked} were lacking")
            self.applied += applied
            self._check_entries(store)
            if problems := problems_of(store, self.producer):
                raise Wrong("; ".join(problems))

    def _follow(self, store: Store) -> int:
        """Read the topic to its end. Returns how many deltas were applied."""
        source, until = KafkaSource(store, store.settings), time.monotonic() + END_S
        wanted = {model: len(digests) for model, digests in self.producer.digests.items()}
        try:
            while (status := source.status())["state"] != "caught up" or _last(store) != wanted:
                if time.monotonic() > until:
                    raise Wrong(f"{_last(store)} is there, {wanted} was produced: {status}")
                time.sleep(POLL_S)
            return int(source.status()["applied"])
        finally:
            source.close()

    def _check_entries(self, store: Store) -> None:
        """Each entry of the logs is what was produced under its seq, and says where in the topic that is."""
        for model, last in _last(store).items():
            log, where = store.model(model).log, store.root.model(model)
            for seq in range(1, last + 1):
                if log.digest(seq) != self.producer.digests[model][seq - 1]:
                    raise Wrong(f"{model}: delta {seq} is not what was produced")
                origin = read_origin(where.log_entry(seq, log.digest(seq)))
                places = self.producer.places[model, seq]
                if origin is None or origin["source"] != SOURCE or origin["topic"] != self._topic:
                    raise Wrong(f"{model}: delta {seq} has the origin {origin}")
                stored = {(origin["partition"], offset) for offset in origin["offsets"]}
                if not stored or not stored <= places:
                    raise Wrong(f"{model}: delta {seq} says it is at {stored}, and is at {places}")
