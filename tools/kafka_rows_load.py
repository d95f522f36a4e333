"""Rows at a rate from Apache Kafka into a service, with look-ups beside: how fresh answers are, and what the rows cost look-ups.

    python -m tools.kafka_rows_load --minutes 10 --rows-per-minute 1000000

One broker, a service and a producer, each a process. Look-ups of random sizes are sent at a rate, first in quiet and then beside the rows.
Ten times a second a row of a key of its own is sent, and asked for until it is seen: freshness is from its event time to then. In the end
a sample of keys has to have their last rows. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.kafka_real import RealBrokers, real_brokers

PARTITIONS, KEYS, DIM = 4, 1_000_000, 32
PROBE = KEYS  # the key of rows that are looked for
PROBES_PER_S, LOOKUPS_PER_S, QUIET_S = 10.0, 50.0, 60.0
SAMPLE = 2000
context = multiprocessing.get_context("spawn")


def produce(address: str, topic: str, per_s: float, seconds: float, seed: int, pipe: Connection) -> None:
    """Rows at a rate. The first number of a vector is the number of its row. Sends which row of each sampled key was the last."""
    import confluent_kafka

    chance = random.Random(seed)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
    )
    tails = [", ".join(f"{chance.gauss(0, 1):.6f}" for _ in range(DIM - 1)).encode() for _ in range(64)]
    last, sent, began_s, probed_s = dict[int, int](), 0, time.monotonic(), 0.0
    while (now := time.monotonic() - began_s) < seconds:
        moment = int(time.time() * 1000)
        while sent < now * per_s:
            sent += 1
            key = min(int(chance.paretovariate(0.3)) - 1, 1 << 40) % KEYS
            last[key] = sent
            value = b'{"key":%d,"event_time":%d,"vector":[%d, %s]}' % (key, moment, sent % 1_000_000, tails[sent % 64])
            producer.produce(topic, value, b"%d" % key, partition=key % PARTITIONS)
        if now - probed_s >= 1 / PROBES_PER_S:
            probed_s, moment = now, time.time_ns()
            numbers = b", ".join(
                b"%d" % (moment // 1_000_000 // 1000 ** (2 - place) % 1000 if place < 3 else 0) for place in range(DIM)
            )
            producer.produce(
                topic,
                b'{"key":%d,"event_time":%d,"vector":[%s]}' % (PROBE, moment // 1_000_000, numbers),
                b"p",
                partition=0,
            )
        producer.poll(0.002)
    left = producer.flush(120)
    keys = chance.sample(sorted(last), min(SAMPLE, len(last)))
    pipe.send((sent, left, time.monotonic() - began_s, {key: last[key] % 1_000_000 for key in keys}))


class LookUps(threading.Thread):
    """Look-ups at a rate, and their milliseconds from the moment when each was due."""

    def __init__(self, url: str, per_s: float = LOOKUPS_PER_S) -> None:
        super().__init__(daemon=True)
        self._client, self._per_s, self.stopping = tierstore.Client(url), per_s, threading.Event()
        self.took_ms: list[float] = []

    def run(self) -> None:
        chance, due_s = np.random.default_rng(5), time.monotonic()
        while not self.stopping.is_set():
            due_s += chance.exponential(1 / self._per_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
            keys = (chance.pareto(0.3, int(chance.integers(20, 400))).clip(0, 1e12)).astype(np.int64) % KEYS
            began_s = time.monotonic()
            self._client.lookup("ctr", "item_id", keys)
            self.took_ms.append((time.monotonic() - began_s) * 1000)


class Probes(threading.Thread):
    """Asks for the row of the probe. When a new one is seen, notes how old it is, and those before it that no answer showed."""

    def __init__(self, url: str, every_ms: float = 1000 / PROBES_PER_S) -> None:
        super().__init__(daemon=True)
        self._client, self._every_ms, self.stopping = tierstore.Client(url), round(every_ms), threading.Event()
        self.ages_ms: list[float] = []

    def run(self) -> None:
        before = 0
        while not self.stopping.wait(0.005):
            row = self._client.lookup("ctr", "item_id", np.array([PROBE]))[0]
            now_ms = time.time() * 1000
            moment_ms = int(row[0]) * 1_000_000 + int(row[1]) * 1000 + int(row[2])  # without what does not change
            if moment_ms != before:
                passed = range(moment_ms, before, -self._every_ms) if 0 < before < moment_ms else ()
                self.ages_ms += [(now_ms - one) % 1_000_000_000 for one in passed]
                before = moment_ms


def percentiles(values: list[float]) -> str:
    p50, p99 = np.percentile(values, [50, 99]) if values else (0.0, 0.0)
    return f"median {p50:,.1f} ms, p99 {p99:,.1f} ms of {len(values):,}"


def cpu_s(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(root: Path, cluster: RealBrokers, source: list[str], **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A service, and its address. `environment`: settings that have no flag."""
    command = [sys.executable, "-m", "tierstore", "serve", "--data", str(root / "data"), "--port", "0", "--grpc-port", "off",
               "--kafka", cluster.address, *source]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def lookups_for(url: str, seconds: float) -> list[float]:
    lookups = LookUps(url)
    lookups.start()
    time.sleep(seconds)
    lookups.stopping.set()
    lookups.join()
    return lookups.took_ms


def run(minutes: float, per_minute: float, root: Path, cluster: RealBrokers) -> int:
    topic = cluster.new_topic(PARTITIONS)
    with tierstore.SnapshotWriter(root / "ctr", model="ctr", version=1) as writer:
        writer.table("item", dim=DIM).write(np.arange(KEYS + 1), np.zeros((KEYS + 1, DIM), np.float32))
        writer.feature("item_id", table="item")
    with tierstore.open(root / "data") as store:
        store.load_snapshot(root / "ctr")
    process, url = serve(root, cluster, ["--kafka-rows", f"{topic}=ctr/item"])
    client = tierstore.Client(url)
    lookups_for(url, 10)
    before_s = cpu_s(process.pid)
    print(f"look-ups in quiet: {percentiles(lookups_for(url, QUIET_S))}; {100 * (cpu_s(process.pid) - before_s) / QUIET_S:.0f}% of a core", flush=True)  # fmt: skip
    pipe, other = context.Pipe()
    producer = context.Process(target=produce, args=(cluster.address, topic, per_minute / 60, minutes * 60, 3, other))
    producer.start()
    probes, lookups, before_s = Probes(url), LookUps(url), cpu_s(process.pid)
    began_s = time.monotonic()
    probes.start()
    lookups.start()
    while not pipe.poll(60):
        status = client.status()["service"]["kafka_rows"]["topics"][topic]
        print(f"{time.monotonic() - began_s:.0f} s: {status['rows']:,} rows, {status['state']}, {status['lag_messages']:,} behind; freshness {percentiles(probes.ages_ms)}; look-ups {percentiles(lookups.took_ms)}; load {os.getloadavg()[0]:.0f}", flush=True)  # fmt: skip
    sent, left, took_s, last = pipe.recv()
    used = (cpu_s(process.pid) - before_s) / (time.monotonic() - began_s)
    for thread in (probes, lookups):
        thread.stopping.set()
        thread.join()
    until = time.monotonic() + 120
    while time.monotonic() < until:
        status: dict[str, Any] = client.status()["service"]["kafka_rows"]["topics"][topic]
        if status["state"] == "caught up" and not status["pending"]:
            break
        time.sleep(0.2)
    keys = np.array(list(last))
    wrong = int((client.lookup("ctr", "item_id", keys)[:, 0] != np.array(list(last.values()), np.float32)).sum())
    print(f"{sent:,} rows in {took_s:.0f} s ({60 * sent / took_s:,.0f} a minute), {left} not acknowledged; {status['rows']:,} applied with the probes, in {status['deltas']:,} deltas")  # fmt: skip
    print(f"freshness of probes: {percentiles(probes.ages_ms)}")
    print(f"look-ups beside: {percentiles(lookups.took_ms)}; the service {100 * used:.0f}% of a core")
    print(f"{wrong} of {len(keys):,} sampled keys have another row than their last")
    process.terminate()
    process.wait(60)
    producer.join()
    return 1 if wrong or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rows-per-minute", type=float, default=1e6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, real_brokers(1) as cluster:
        return run(arguments.minutes, arguments.rows_per_minute, Path(root), cluster)


if __name__ == "__main__":
    sys.exit(main())
