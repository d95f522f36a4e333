"""Small deltas at a rate from Apache Kafka into a service, with many look-ups beside, and the start after it.

    python -m tools.kafka_deltas_load --minutes 10 --deltas-per-s 50 --lookups-per-s 2000

One broker, a service, a producer of deltas of 1,000 rows, and two processes of look-ups. Each delta carries a row with its event time,
which is asked for until it is seen: freshness is from then. In the end a sample of keys has to have their last rows, once more after
the service was ended and started again. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import tierstore
from tests.kafka_real import RealBrokers, real_brokers
from tools.kafka_rows_load import DIM, KEYS, PROBE, SAMPLE, LookUps, Probes, cpu_s, percentiles, serve

ROWS, QUIET_S, LOOKING_UP = 1000, 30.0, 2
RETENTION = {"TIERSTORE_LOG_RETENTION_S": "3600"}
context = multiprocessing.get_context("spawn")


def produce(address: str, topic: str, per_s: float, seconds: float, pipe: Connection) -> None:
    """Deltas at a rate. The first number of a vector is its delta's seq. Sends how many there were, and the last seq of each key."""
    chance, last = np.random.default_rng(3), np.zeros(KEYS, np.int64)
    rows = chance.standard_normal((ROWS + 1, DIM)).astype(np.float32)
    with tierstore.KafkaDeltaWriter(address, topic, "ctr", next_seq=1) as writer:
        began_s, seq = time.monotonic(), 0
        while time.monotonic() - began_s < seconds:
            seq += 1
            time.sleep(max(0.0, began_s + seq / per_s - time.monotonic()))
            keys = np.unique(chance.pareto(0.3, 2 * ROWS).clip(0, 1e12).astype(np.int64) % KEYS)[-ROWS:]
            last[keys], moment_ms = seq, time.time_ns() // 1_000_000
            rows[:, 0] = seq
            rows[len(keys), :3] = [moment_ms // 1000 ** (2 - place) % 1000 for place in range(3)]
            with writer.delta(event_time=time.time()) as delta:
                delta.upsert("item", np.append(keys, PROBE), rows[: len(keys) + 1])
        took_s = time.monotonic() - began_s
        writer.flush()
    sampled = chance.choice(np.flatnonzero(last), SAMPLE, replace=False)
    pipe.send((seq, took_s, sampled, last[sampled]))


def look_up(url: str, per_s: float, seconds: float, pipe: Connection) -> None:
    """Milliseconds of look-ups at a rate."""
    lookups = LookUps(url, per_s)
    lookups.start()
    time.sleep(seconds)
    lookups.stopping.set()
    lookups.join()
    pipe.send(lookups.took_ms)


class ManyLookUps:
    def __init__(self, url: str, per_s: float, seconds: float) -> None:
        self._pipes = [context.Pipe() for _ in range(LOOKING_UP)]
        self._processes = [
            context.Process(target=look_up, args=(url, per_s / LOOKING_UP, seconds, other)) for _, other in self._pipes
        ]
        for process in self._processes:
            process.start()

    def took_ms(self) -> list[float]:
        took_ms = [one for pipe, _ in self._pipes for one in pipe.recv()]
        for process in self._processes:
            process.join()
        return took_ms


def count_wrong(client: tierstore.Client, keys: np.ndarray, seqs: np.ndarray) -> int:
    return int((client.lookup("ctr", "item_id", keys)[:, 0] != seqs.astype(np.float32)).sum())


def run(minutes: float, per_s: float, lookups_per_s: float, root: Path, cluster: RealBrokers) -> int:
    topic = cluster.new_topic(1)
    with tierstore.SnapshotWriter(root / "ctr", model="ctr", version=1) as writer:
        writer.table("item", dim=DIM).write(np.arange(KEYS + 1), np.zeros((KEYS + 1, DIM), np.float32))
        writer.feature("item_id", table="item")
    with tierstore.open(root / "data") as store:
        store.load_snapshot(root / "ctr")
    source = ["--kafka-topic", topic]
    process, url = serve(root, cluster, source, **RETENTION)
    client = tierstore.Client(url)
    ManyLookUps(url, lookups_per_s, 5).took_ms()
    print(f"look-ups in quiet: {percentiles(ManyLookUps(url, lookups_per_s, QUIET_S).took_ms())}", flush=True)
    pipe, other = context.Pipe()
    producer = context.Process(target=produce, args=(cluster.address, topic, per_s, minutes * 60, other))
    lookups, probes = ManyLookUps(url, lookups_per_s, minutes * 60), Probes(url, 1000 / per_s)
    before_s, began_s = cpu_s(process.pid), time.monotonic()
    producer.start()
    probes.start()
    while not pipe.poll(30):
        kafka = client.status()["service"]["kafka"]
        print(f"{time.monotonic() - began_s:.0f} s: {kafka['applied']:,} deltas, {kafka['state']}, {kafka['lag_messages']:,} behind; freshness {percentiles(probes.ages_ms)}; load {os.getloadavg()[0]:.0f}", flush=True)  # fmt: skip
    sent, took_s, keys, seqs = pipe.recv()
    used = (cpu_s(process.pid) - before_s) / (time.monotonic() - began_s)
    ended_s = time.monotonic()
    while client.status()["models"]["ctr"]["watermark"] < sent and time.monotonic() - ended_s < 120:
        time.sleep(0.01)
    behind_s = time.monotonic() - ended_s
    probes.stopping.set()
    probes.join()
    wrong = count_wrong(client, keys, seqs)
    print(
        f"{sent:,} deltas of {ROWS:,} rows in {took_s:.0f} s ({sent / took_s:.1f} a second); all visible {behind_s:.2f} s after the last"
    )
    print(f"freshness: {percentiles(probes.ages_ms)}")
    print(f"look-ups beside: {percentiles(lookups.took_ms())}; the service {100 * used:.0f}% of a core")
    print(f"{wrong} of {len(keys):,} sampled keys have another row than their last; the log takes {sum(each.stat().st_size for each in (root / 'data').rglob('*') if each.is_file()) / 1e6:,.0f} MB with the rows")  # fmt: skip
    process.terminate()
    process.wait(60)
    began_s = time.monotonic()
    process, url = serve(root, cluster, source, **RETENTION)
    again = count_wrong(tierstore.Client(url), keys, seqs)
    print(f"the start after it: answers after {time.monotonic() - began_s:.2f} s, {again} of {len(keys):,} wrong")
    process.terminate()
    process.wait(60)
    producer.join()
    return 1 if wrong or again else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--deltas-per-s", type=float, default=50)
    parser.add_argument("--lookups-per-s", type=float, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, real_brokers(1) as cluster:
        return run(arguments.minutes, arguments.deltas_per_s, arguments.lookups_per_s, Path(root), cluster)


if __name__ == "__main__":
    sys.exit(main())
