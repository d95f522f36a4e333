"""Crash test of deltas from Kafka: end what follows a topic at any moment, and look whether each delta comes in once.

`python -m tools.crash_kafka --rounds 2 --seed 1`, from the root of the repository.

A child opens a store, follows a topic of librdkafka's mock cluster, closes, and begins again, while deltas of two models come:
out of order, twice, in parts, and among them messages that cannot be applied (`tools/kafka_chaos.py`). It is killed.
From the record of what it did (`tools/disk_trace.py`) the data directory is made again as it was after each operation
of ours, and as it may look if the power failed there. At each of these points

- the log holds every delta that was visible, each with the digest of what was produced and with the offsets that it has in the topic;
- what follows the topic from there applies each delta that the log lacks, and none that it holds;
- then every row, every entry of the log and everything that is parked is as it was produced.

Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.kafka_broker import Brokers
from tierstore.config import load_settings
from tierstore.engine.deltas.origin import read as read_origin
from tierstore.engine.store import Store
from tierstore.service.sources.kafka import KafkaSource
from tierstore.service.sources.kafka_positions import SOURCE
from tools.crash_check import Wrong
from tools.crash_work import Journal
from tools.disk_trace import MODES, Disk, Mode, Operation, found
from tools.kafka_chaos import END_S, MODELS, PARTITIONS, Producer, load_models, options, problems_of
from tools.nursery import Nursery

POISON = 3  # a round
POLL_S = 0.002


def work(root: Path, *, seed: int, address: str, topic: str) -> None:
    """Follow, until killed, the topic for some deltas, close, open again."""
    rng, journal = random.Random(seed), Journal(root / "disk/journal")
    while True:
        with Store(load_settings(None, **options(root / "disk/data", address, topic))) as store:
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


class CrashKafka:
    """A store under `root` that follows a topic. A context manager; `round` kills a child and checks."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._rng, self._cluster = root, random.Random(seed), Brokers()
        self._topic = self._cluster.new_topic(PARTITIONS)
        self.producer = Producer(self._cluster.address, self._topic, 0, seed)
        self.points: Counter[str] = Counter()  # by how they were made, "killed" by SIGKILL as "signal"
        self.operations = self.applied = 0  # `applied`: deltas that came after a start at a point
        (root / "disk").mkdir()
        load_models(root, root / "disk/data")
        self._nursery = Nursery(root, "tools.crash_kafka")
        self.records = self._nursery.records

    def __enter__(self) -> CrashKafka:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__()
        self._cluster.close()

    def round(self, bursts: int, *, most: int | None = None) -> None:
        """Kill a child after so many bursts of deltas, and look at what it leaves, and left after operations of ours.

        `most` bounds how many of these points there are; else it is every operation, each in one of the modes. Raises Wrong.
        """
        top, rng = self._root / "disk", self._rng
        (top / "journal").write_bytes(b"")
        disk = Disk(top)
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
        history = self._nursery.kill()
        self._replay(disk, history, most)
        self._look(top, "signal")

    def _await_a_start(self) -> None:
        until = time.monotonic() + END_S
        while not (self._root / "disk/journal").read_bytes():
            if time.monotonic() > until:
                raise Wrong("the child did not start")
            time.sleep(POLL_S)

    def _replay(self, disk: Disk, history: list[Operation], most: int | None) -> None:
        self.operations += len(history)
        ours = disk.numbers(history, lambda path: "/data" in path and "/db/" not in path)
        points: list[tuple[int, Mode]] = [(number, self._rng.choice(MODES)) for number in ours]
        if most is not None:
            points = sorted(self._rng.sample(points, min(most, len(points))))
        for number, operation in enumerate(history):
            disk.play(operation)
            while points and points[0][0] == number:
                _, mode = points.pop(0)
                self._point(disk, mode, f"operation {number} of {len(history)}")

    def _point(self, disk: Disk, mode: Mode, name: str) -> None:
        with found(disk, self._root / "point", mode, self._rng) as where:
            # of a journal nothing is flushed
            (where / "journal").write_bytes(bytes(disk.top.names["journal"].content))  # type: ignore[union-attr]
            try:
                self._look(where, mode)
            except Exception as error:
                shutil.copytree(where, self._root / "wrong")
                raise Wrong(f"{mode} after {name}; like it: {self._root / 'wrong'}: {error}") from error

    def _look(self, where: Path, how: str) -> None:
        self.points[how] += 1
        seen = [line.split()[2:] for line in (where / "journal").read_text().splitlines()]
        visible = dict(zip(MODELS, map(int, seen[-1]), strict=True)) if seen else dict.fromkeys(MODELS, 0)
        with Store(load_settings(None, **options(where / "data", self._cluster.address, self._topic))) as store:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--points", type=int, help="of each round; by default every operation of ours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bursts", type=int, default=4, help="of five deltas, a round")
    parsed = parser.parse_args()
    logging.disable(logging.WARNING)  # poison is parked at each point anew
    root = Path(tempfile.mkdtemp(prefix="tierstore-crash-"))
    print(f"seed {parsed.seed}, under {root}", flush=True)
    with CrashKafka(root, parsed.seed) as test:
        if not test.records:
            print("no C compiler: kills at random moments alone, no power loss")
        for _ in range(parsed.rounds):
            test.round(parsed.bursts, most=parsed.points)
            produced = sum(map(len, test.producer.digests.values()))
            print(f"points: {dict(test.points)}, from {test.operations} file operations; {produced} deltas in {test.producer.sent} messages, {test.producer.poisoned} of poison; {test.applied} applied after a start", flush=True)  # fmt: skip
    shutil.rmtree(root)
    print("every delta is there once, with its origin; all poison is parked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
