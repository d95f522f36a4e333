"""Freshness of deltas through Kafka: from produce to visible, at a million rows a minute.

    python -m benchmarks.kafka_freshness [--rows-per-minute 1_000_000] [--deltas-per-s 1] [--seconds 60] [--tiny] [--json FILE]

A process writes deltas of 32 float16 with `KafkaDeltaWriter`, each in as many messages as it takes, to librdkafka's mock cluster (or
to the brokers that TIERSTORE_TEST_KAFKA names). A store follows the topic while a thread looks 64 random keys up, a thousand times a second
at most. Freshness is the time from before a delta is encoded to when every look-up sees it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.export import Lookups
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ten_million import keys_of, write
from tests.kafka_broker import Brokers
from tierstore.config import load_settings
from tierstore.engine.store import Store

MODEL, DIM, ROWS, TINY_ROWS = "bench", 32, 1_000_000, 20_000
WAIT_S = 120.0


class Freshness:
    """An observer of the store."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        self.seconds.append(freshness_s)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def produce(brokers: str, topic: str, rows: int, changed: int, per_s: float, count: int) -> None:
    random = np.random.default_rng(3)
    with tierstore.KafkaDeltaWriter(brokers, topic, MODEL, next_seq=1) as writer:
        began = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + number / per_s - time.monotonic()))
            keys = random.choice(rows, changed, replace=False)
            vectors = random.standard_normal((changed, DIM), dtype=np.float32).astype(np.float16)
            with writer.delta(event_time=time.time()) as delta:
                delta.upsert("item", keys_of(keys), vectors)


def measure(root: Path, rows: int, per_minute: int, per_s: float, seconds: float) -> dict[str, Any]:
    from tierstore.service.sources.kafka import KafkaSource

    write(root / "snapshot", rows, DIM, "float16")
    cluster = Brokers()
    topic, changed, count = cluster.new_topic(), round(per_minute / 60 / per_s), round(seconds * per_s)
    settings = load_settings(
        None, data=root / "data", kafka=cluster.address, kafka_topic=topic, host_budget="64MiB", overlay_budget="1GiB"
    )
    with Store(settings) as store:
        store.load_snapshot(root / "snapshot")
        seen = Freshness()
        store.observers.append(seen)
        lookups, source = Lookups(store, rows), KafkaSource(store, settings)
        arguments = (cluster.address, topic, rows, changed, per_s, count)
        producer = multiprocessing.get_context("spawn").Process(target=produce, args=arguments)
        producer.start()

        def until_all_came() -> None:
            until = time.monotonic() + seconds + WAIT_S
            while len(seen.seconds) < count and time.monotonic() < until:
                time.sleep(0.05)

        latency = lookups.during(until_all_came)
        producer.join()
        source.close()
        lookups.close()
    is_mock = cluster.is_mock
    cluster.close()
    p50, p99, worst = np.percentile(np.array(seen.seconds), [50, 99, 100])
    return {
        "brokers": "librdkafka's mock" if is_mock else "real",
        "deltas": len(seen.seconds),
        "of": count,
        "rows_a_delta": changed,
        "deltas_per_s": per_s,
        "freshness_p50_s": float(p50),
        "freshness_p99_s": float(p99),
        "freshness_max_s": float(worst),
        "lookup_p50_us": latency["p50_us"],
        "lookup_p99_us": latency["p99_us"],
    }


def main() -> None:
    arguments = parser_of(
        __file__, __doc__, "tiny", rows_per_minute=1_000_000, deltas_per_s=1.0, seconds=60.0
    ).parse_args()
    document: dict[str, Any] = {"benchmark": "kafka_freshness", "machine": describe(), "results": [], "headlines": []}
    if importlib.util.find_spec("confluent_kafka") is None:
        document["skipped"] = "the extra `kafka` is not installed"
    else:
        seconds, rows = (2.0, TINY_ROWS) if arguments.tiny else (arguments.seconds, ROWS)
        per_minute = 60_000 if arguments.tiny else arguments.rows_per_minute
        with tempfile.TemporaryDirectory() as root:
            result = measure(Path(root), rows, per_minute, arguments.deltas_per_s, seconds)
        document["results"].append(result)
        print(
            f"{result['deltas']} of {result['of']} deltas of {result['rows_a_delta']:,} rows: visible after {result['freshness_p50_s'] * 1e3:.0f} ms (median), "
            f"{result['freshness_p99_s'] * 1e3:.0f} ms (p99), {result['freshness_max_s'] * 1e3:.0f} ms (longest); look-ups p99 {result['lookup_p99_us']:.0f} µs"
        )
    report.write(arguments.json, document)


if __name__ == "__main__":
    main()
