"""The status of a topic of rows: that of a topic of deltas, and counts of rows. Written by its thread, read by any."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from tierstore.kafka.row_messages import Row
from tierstore.service.families import counters, gauges, histograms
from tierstore.service.sources.kafka_status import STATES, KafkaStats
from tierstore.service.stats import FRESHNESS_BOUNDS_S, Histogram

_OF_TOPIC = (
    "topic", "state", "problem", "lag_messages", "lag_seconds", "partitions", "parked", "parked_since_start", "errors",
    "rewinds", "rebalances", "held_up", "passed_over",
)  # fmt: skip


class RowStats:
    """Counts since the start. `topic`: the state, and counts of messages."""

    def __init__(self, topic: str) -> None:
        self.topic = KafkaStats(topic)
        self.rows = self.deleted = self.deltas = 0
        self.pending = self.lost = 0
        self.missed: list[str] = []  # deletions that were gone before they were read
        self.freshness = Histogram(FRESHNESS_BOUNDS_S)

    def visible(self, rows: Sequence[Row]) -> None:
        """Count rows that every request sees from now on, and their age by event time."""
        ages_s = np.maximum(0.0, time.time() - np.array([row.event_ms for row in rows]) / 1000)
        places = np.searchsorted(FRESHNESS_BOUNDS_S, ages_s)
        counts = np.bincount(places, minlength=len(FRESHNESS_BOUNDS_S) + 1)
        self.freshness.absorb(counts.tolist(), float(ages_s.sum()))
        self.rows += len(rows)
        self.deleted += sum(row.vector is None for row in rows)
        self.deltas += 1

    def status(self, parked: int) -> dict[str, Any]:
        """The document."""
        whole = self.topic.status(parked)
        problems = [] if whole["problem"] is None else [whole["problem"]]
        if self.lost:
            problems.append(
                f"kafka topic {self.topic.topic}: {self.lost:,} offsets were deleted before they were read: load a "
                "snapshot, or produce those rows again"
            )
        whole["problem"] = "; ".join(problems + [f"kafka topic {text}" for text in self.missed]) or None
        own = {"rows": self.rows, "deleted": self.deleted, "deltas": self.deltas}
        return {**{name: whole[name] for name in _OF_TOPIC}, **own, "pending": self.pending, "lost": self.lost}


_COUNTERS = {
    "rows": "Rows applied from the topic, deletions among them.",
    "deleted": "Deletions among the rows.",
    "deltas": "Deltas that rows were gathered into.",
    "errors": "Failed attempts to read or to apply.",
    "lost": "Offsets that the brokers had deleted before they were read.",
}
_GAUGES = {
    "parked": "Messages that are parked.",
    "pending": "Rows that wait to become a delta.",
    "lag_seconds": "Age of the newest message that was read; 0 once all were.",
}


def row_families(topics: Sequence[tuple[RowStats, dict[str, Any]]]) -> Iterator[Metric]:
    """Metrics for Prometheus, of the topics with their status."""
    by_topic = {status["topic"]: status for _, status in topics}
    for kind, texts in ((counters, _COUNTERS), (gauges, _GAUGES)):
        for name, text in texts.items():
            values = {topic: status[name] for topic, status in by_topic.items()}
            yield kind(f"tierstore_kafka_rows_{name}", text, "topic", values)
    lags = {
        (topic, partition): one["lag"]
        for topic, status in by_topic.items()
        for partition, one in (status["partitions"] or {}).items()
    }
    yield gauges("tierstore_kafka_rows_lag_messages", "Messages that are not read yet.", "topic partition", lags)
    states = {(topic, name): float(name == of["state"]) for topic, of in by_topic.items() for name in STATES}
    yield gauges("tierstore_kafka_rows_state", "1 for the state that the topic is in.", "topic state", states)
    text = "From the event time of a row until it is visible."
    ages = {status["topic"]: stats.freshness for stats, status in topics}
    yield histograms("tierstore_kafka_rows_freshness_seconds", text, "topic", ages)
