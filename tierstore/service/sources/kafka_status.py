"""The status of the Kafka source: its state, its lag, its counts. Written by its thread, read by any."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from tierstore.kafka.reader import TopicReader
from tierstore.service.families import counter, gauge, gauges

STATES = (
    "starting", "reading", "caught up", "waiting", "rebalancing", "broker unreachable", "unknown topic", "held up",
)  # fmt: skip
MOST_MODELS = 100


class KafkaStats:
    """Counts since the start, and the state."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.state = "starting"
        self.problem: str | None = None
        self.held_up: dict[str, str] = {}  # model, or topic → why it is blocked
        self.passed_over: Counter[str] = Counter()  # by model that the store does not have; at most MOST_MODELS of them
        self.applied = self.duplicates = self.parked = self.abandoned = 0
        self.errors = self.rewinds = self.rebalances = 0
        self.window_bytes = 0
        self._waits: str | None = None
        self._newest_ms = 0
        self._partitions: dict[str, dict[str, int]] | None = None

    def connected(self) -> None:
        self.state, self.problem = "reading", None

    def failed(self, state: str, why: str) -> bool:
        """Note that nothing can be read. Returns whether that is news."""
        self.errors += 1
        news = (state, why) != (self.state, self.problem)
        self.state, self.problem = state, why
        return news

    def waits(self, why: str) -> bool:
        """Note that the store accepts nothing. Returns whether that is news."""
        self.errors += 1
        news, self._waits = why != self._waits, why
        return news

    def read(self, timestamp_ms: int) -> None:
        self._newest_ms = timestamp_ms

    def pass_over(self, model: str) -> None:
        """Count a message of a model that the store does not have."""
        if model in self.passed_over or len(self.passed_over) < MOST_MODELS:
            self.passed_over[model] += 1
        else:
            self.passed_over["(others)"] += 1

    def rebalancing(self) -> None:
        self.rebalances += 1
        self.state = "rebalancing"

    def update(self, reader: TopicReader, waiting: bool, held_up: dict[str, str]) -> None:
        """Update the state, after each step. `held_up`: why, by model, or by topic if it is no single model's."""
        if (standing := reader.standing()) is not None:
            held_up = {**held_up, self.topic: standing}
        self.held_up = held_up
        if not waiting:
            self._waits = None
        if reader.problem is not None:
            self.state, self.problem = "broker unreachable", reader.problem
        elif waiting:
            self.state, self.problem = "waiting", self._waits
        elif held_up:
            self.state, self.problem = "held up", "; ".join(f"{model}: {why}" for model, why in held_up.items())
        else:
            self.state, self.problem = "caught up" if reader.at_end else "reading", None

    def place(self, positions: Mapping[int, int], lag: Mapping[int, int]) -> None:
        """Note the position in each partition, and the number of messages behind it."""
        self._partitions = {
            str(one): {"position": position, "lag": lag.get(one, 0)} for one, position in positions.items()
        }

    def status(self, parked: int) -> dict[str, Any]:
        """The document; `partitions` and `lag_messages` are None if unknown."""
        partitions = self._partitions
        behind = self.state != "caught up" and self._newest_ms > 0
        return {
            "topic": self.topic,
            "state": self.state,
            "problem": None if self.problem is None else f"kafka topic {self.topic}: {self.state}: {self.problem}",
            "lag_messages": None if partitions is None else sum(one["lag"] for one in partitions.values()),
            "lag_seconds": max(0.0, time.time() - self._newest_ms / 1000) if behind else 0.0,
            "partitions": partitions,
            "applied": self.applied,
            "duplicates": self.duplicates,
            "parked": parked,
            "parked_since_start": self.parked,
            "abandoned": self.abandoned,
            "errors": self.errors,
            "rewinds": self.rewinds,
            "rebalances": self.rebalances,
            "window_bytes": self.window_bytes,
            "held_up": self.held_up,
            "passed_over": dict(self.passed_over),
        }


_COUNTERS = {
    "applied": "Deltas applied from the topic.",
    "duplicates": "Messages skipped because the store has their delta.",
    "abandoned": "Incomplete deltas that were dropped because the log already has their seq.",
    "errors": "Failed attempts to read or to apply.",
    "rewinds": "Times that earlier messages were read again for a model.",
    "rebalances": "Times that the topic had new partitions.",
}


def families(status: dict[str, Any]) -> Iterator[Metric]:
    """The metrics of this part, for Prometheus."""
    for name, text in _COUNTERS.items():
        yield counter(f"tierstore_kafka_{name}", text, status[name])
    passed_over = sum(status["passed_over"].values())
    yield counter("tierstore_kafka_passed_over", "Messages of models that the store does not have.", passed_over)
    yield gauge("tierstore_kafka_parked", "Messages that are parked.", status["parked"])
    text = "Bytes of messages that wait for an earlier delta."
    yield gauge("tierstore_kafka_window_bytes", text, status["window_bytes"])
    text = "Age of the newest message that was read; 0 once all were."
    yield gauge("tierstore_kafka_lag_seconds", text, status["lag_seconds"])
    lag = {partition: state["lag"] for partition, state in (status["partitions"] or {}).items()}
    yield gauges("tierstore_kafka_lag_messages", "Messages that are not read yet.", "partition", lag)
    held_up = dict.fromkeys(status["held_up"], 1.0)
    yield gauges("tierstore_kafka_held_up", "1 while the model waits for a missing delta.", "model", held_up)
    states = {name: float(name == status["state"]) for name in STATES}
    yield gauges("tierstore_kafka_state", "1 for the state that the source is in.", "state", states)
