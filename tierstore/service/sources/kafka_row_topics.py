"""All topics of rows as one source. Any thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.store import Store
from tierstore.service.sources.kafka_routes import TopicRoute
from tierstore.service.sources.kafka_rows import RowTopic
from tierstore.service.sources.kafka_rows_status import row_families


class KafkaRows:
    """All topics of rows that the settings name. `status` and `row_families`: any thread."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._topics = [RowTopic(store, settings, TopicRoute.parse(text)) for text in settings.kafka_rows]

    def status(self) -> dict[str, Any]:
        """Each topic's, by its name, and all their problems."""
        found = [topic.status() for topic in self._topics]
        return {
            "topics": {one["topic"]: one for one in found},
            "problems": [one["problem"] for one in found if one["problem"] is not None],
        }

    def families(self) -> Iterator[Metric]:
        """Metrics for Prometheus."""
        return row_families([(topic.stats, topic.status()) for topic in self._topics])

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the deltas that are being applied, and end."""
        for topic in self._topics:
            topic.stopping.set()
        for topic in self._topics:
            topic.close(timeout_s)
