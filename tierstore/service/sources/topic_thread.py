"""A thread that follows a topic of any kind: it connects, works step by step, and connects again after a failure.

Also shared by all followers of topics: connecting by the settings, how far back to read, new partitions.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Protocol

from tierstore.config import Settings
from tierstore.engine.events.changes import REQUESTER
from tierstore.errors import NotFound, Unreachable
from tierstore.kafka.client import read_options
from tierstore.kafka.reader import BATCH, TopicReader
from tierstore.service.error_status import log_failure
from tierstore.service.sources.kafka_apply import LONGEST_RETRY_S, RETRY_S
from tierstore.service.sources.kafka_status import KafkaStats
from tierstore.threads import Thread

logger = logging.getLogger(__name__)

POLL_S = 0.1
SAVE_S = 5.0  # between records of positions that no delta was logged with
METADATA_S = 30.0  # between requests for the topic's partitions


class Work(Protocol):
    """The thread's work. Any error in it ends the connection, and `begin` is called again after a pause."""

    def begin(self) -> None: ...
    def step(self) -> None: ...
    def save(self) -> None: ...  # at the end of the thread, if it is connected
    def end(self) -> None: ...


class TopicThread:
    """The thread of one topic. `stopping` is set when it should end."""

    def __init__(self, name: str, topic: str, stats: KafkaStats, work: Work) -> None:
        self._topic, self._stats, self._work = topic, stats, work
        self.stopping = threading.Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Finish the step that is under way, and end."""
        self.stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        REQUESTER.set(f"kafka topic {self._topic}")
        pause_s = RETRY_S
        while not self.stopping.is_set():
            try:
                self._work.begin()
                while not self.stopping.is_set():
                    self._work.step()
                    pause_s = RETRY_S
                self._work.save()
            except Unreachable as error:
                self._report("broker unreachable", error)
            except NotFound as error:
                self._report("unknown topic", error)
            except Exception as error:  # noqa: BLE001 - the source must outlive whatever it meets
                self._report("held up", error)
                log_failure(error, f"reading {self._topic}")
            self._work.end()
            self.stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _report(self, state: str, error: Exception) -> None:
        if self._stats.failed(state, str(error)):
            logger.warning("kafka: %s: %s: %s", self._topic, state, error)


def connect_topic(settings: Settings, topic: str, *, batch: int = BATCH) -> TopicReader:
    """A reader of a topic of the brokers that the settings name."""
    assert settings.kafka is not None
    group = f"tierstore-{socket.gethostname()}"
    return TopicReader(settings.kafka, topic, group, read_options(settings.kafka_config), batch=batch)


def far_back(reader: TopicReader, settings: Settings) -> dict[int, int]:
    """Partition → the offset from which a model that is new here is read."""
    if settings.kafka_rewind_s is None:
        return reader.beginning()
    return reader.at_time(int((time.time() - settings.kafka_rewind_s) * 1000))


def new_partitions(reader: TopicReader, cluster: str) -> list[int]:
    """Partitions of the topic that are not read yet. Unreachable if the brokers now belong to another cluster."""
    try:
        now, partitions = reader.partitions()
    except Unreachable:
        return []  # `problem` reports it; messages that were read can still be applied
    if now != cluster:
        raise Unreachable(f"kafka: the brokers now belong to another cluster, {now!r}: reading it from its beginning")
    return [one for one in partitions if one not in reader.positions]
