"""A store that follows a Kafka topic, and what tests see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.conftest import eventually, settings_for
from tests.service.scenes import rows, write_snapshot
from tierstore.engine.store import Store

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")


def vector(value: float, table: str = "item") -> list[float]:
    return [float(number) for number in rows(table, [value])[0]]


class TopicScene:
    """A store with the model `ctr` at seq 3, and a topic. `source`: what follows it, once it does."""

    source: Any = None

    def __init__(self, root: Path, brokers: Any, topic: str, *, empty: bool = False, **settings: Any) -> None:
        self.root, self.brokers, self.topic, self.settings = root, brokers, topic, settings
        self.producer = confluent_kafka.Producer({"bootstrap.servers": brokers.address})
        self.store = self.open()
        if not empty:
            self.load()

    def remake(self, partitions: int = 1) -> None:
        """Delete the topic, and make another one of its name."""
        self.brokers.delete_topic(self.topic)
        self.brokers.new_topic(partitions, name=self.topic)
        self.producer = confluent_kafka.Producer({"bootstrap.servers": self.brokers.address})

    def load(self) -> None:
        self.store.load_snapshot(write_snapshot(self.root, 1, delta_seq=3))

    def open(self, **settings: Any) -> Store:
        return Store(settings_for(self.root, **{"kafka": self.brokers.address} | self.settings | settings))

    def follow(self) -> Any:
        raise NotImplementedError

    def reopen(self, **settings: Any) -> Any:
        """As a new process would."""
        self.close()
        self.store = self.open(**settings)
        return self.follow()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None
        self.store.close()

    def expect(self, key: int, value: float | None) -> None:
        """Wait until this row of `item` is served; for None, until there is none."""

        def there() -> bool:
            got, found = self.store.model("ctr").lookup("item_id", [key], return_found=True)
            return not found[0] if value is None else bool(np.array_equal(got, rows("item", [value])))

        eventually(there, f"item {key} to be {value}; {self.shown()}")

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.source.status()
        return status

    def shown(self) -> object:
        return None if self.source is None else self.status()

    def is_in(self, state: str, *words: str, **counts: int) -> dict[str, Any]:
        """Wait for a state, and for counts: the state may be one of before, and a delta is counted after it was applied."""

        def so() -> dict[str, Any] | None:
            status = self.status()
            there = status["state"] == state and all(word in str(status["problem"]) for word in words)
            return status if there and counts.items() <= status.items() else None

        found: dict[str, Any] = eventually(so, f"state {state} {words} {counts}; {self.shown()}")
        return found
