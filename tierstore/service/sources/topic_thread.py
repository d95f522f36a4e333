"""A thread that follows a topic of any kind: it connects, works step by step, and connects again after a failure.

Also shared by all followers of topics: how far back to read, new partitions, how far the models' logs go.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from tierstore.config import Settings
from tierstore.engine.events.changes import REQUESTER
from tierstore.engine.store import Store
from tierstore.errors import NotFound, Unreachable
from tierstore.kafka.client import read_options
from tierstore.kafka.reader import BATCH, ID_S, LATE_ID_S, METADATA_S, Topic, TopicReader
from tierstore.service.error_status import log_failure
from tierstore.service.sources.kafka_apply import LONGEST_RETRY_S, RETRY_S
from tierstore.service.sources.kafka_status import KafkaStats
from tierstore.threads import Thread

logger = logging.getLogger(__name__)

POLL_S = 0.1
SAVE_S = 5.0  # between records of positions that no delta was logged with
CHECK_S = 5.0  # between questions whether the topic is the same, and which partitions it has


class _BeginAgain(Exception):
    """The topic is not, or may not be, the one that is read. The message says why."""


class Work(Protocol):
    """The thread's work. Any error in it ends the connection, and `begin` is called again after a pause.

    `topic`: as it is when it begins. If it is another one later, the connection ends too.
    """

    def begin(self, reader: TopicReader, topic: Topic) -> None: ...
    def step(self, reader: TopicReader) -> None: ...
    def save(self) -> None: ...  # at the end of the thread, if it is connected


class TopicThread:
    """The thread of one topic. `stopping` is set when it should end. `batch`: messages that are read at a time."""

    def __init__(
        self, name: str, settings: Settings, topic: str, stats: KafkaStats, work: Work, batch: int = BATCH
    ) -> None:
        self._settings, self._topic, self._stats, self._work, self._batch = settings, topic, stats, work, batch
        self.stopping = threading.Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        # for the thread
        self._reader: TopicReader | None = None
        self._found = Topic("", "", [])  # as it was when it was looked at last
        self._checked_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Finish the step that is under way, and end."""
        self.stopping.set()
        self._thread.join(timeout_s)

    @property
    def reader(self) -> TopicReader:
        """What reads the topic, while it is connected."""
        assert self._reader is not None
        return self._reader

    def _run(self) -> None:
        REQUESTER.set(f"kafka topic {self._topic}")
        pause_s = RETRY_S
        while not self.stopping.is_set():
            try:
                self._reader = reader = self._connect()
                # brokers that gave an id once are waited for
                self._found = reader.describe(METADATA_S if self._found.topic_id else ID_S)
                self._checked_s = time.monotonic()
                self._work.begin(reader, self._found)
                while not self.stopping.is_set():
                    self._work.step(reader)
                    pause_s = RETRY_S
                self._work.save()
            except _BeginAgain as why:
                logger.warning("kafka: %s: %s", self._topic, why)
            except Unreachable as error:
                self._report("broker unreachable", error)
            except NotFound as error:
                self._report("unknown topic", error)
            except Exception as error:  # noqa: BLE001 - the source must outlive whatever it meets
                self._report("held up", error)
                log_failure(error, f"reading {self._topic}")
            connected, self._reader = self._reader, None
            if connected is not None:
                connected.close()
            self.stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _report(self, state: str, error: Exception) -> None:
        if self._stats.failed(state, str(error)):
            logger.warning("kafka: %s: %s: %s", self._topic, state, error)

    def _connect(self) -> TopicReader:
        settings, group = self._settings, f"tierstore-{socket.gethostname()}"
        assert settings.kafka is not None
        return TopicReader(settings.kafka, self._topic, group, read_options(settings.kafka_config), batch=self._batch)

    def check_topic(self) -> None:
        """Now and then, look whether the topic is still the same, and read its new partitions too.

        NotFound if it is gone.
        """
        reader, now_s = self.reader, time.monotonic()
        if now_s - self._checked_s < (RETRY_S if reader.problem else CHECK_S):
            return
        self._checked_s = now_s
        try:
            now = reader.describe(LATE_ID_S)
        except Unreachable:
            return  # `problem` reports it; messages that were read can still be applied
        before, self._found = self._found, now._replace(topic_id=now.topic_id or self._found.topic_id)
        if now.cluster != before.cluster:
            raise _BeginAgain(f"the brokers now belong to another cluster, {now.cluster!r}, of which it is read anew")
        if self._found.topic_id != before.topic_id:
            raise _BeginAgain(
                f"it has another id than before, {now.topic_id}: it was deleted and made again"
                if before.topic_id
                else f"its id is known now, {now.topic_id}"
            )
        note_gone(reader, self._found, reader.positions)
        if new := [one for one in now.partitions if one not in reader.positions]:
            logger.info("kafka: %s has new partitions: %s", self._topic, new)
            self._stats.rebalancing()
            reader.assign({**reader.positions, **dict.fromkeys(new, 0)})


def note_gone(reader: TopicReader, topic: Topic, known: Iterable[int]) -> None:
    """Have the reader say which of the partitions that were `known` the topic no longer has.

    Where there is an id, and it is the same, none is gone: the broker that answered has not heard of them yet.
    """
    reader.gone = [] if topic.topic_id else sorted({*reader.gone, *known} - {*topic.partitions})


def far_back(reader: TopicReader, settings: Settings) -> dict[int, int]:
    """Partition → the offset from which a model that is new here is read."""
    if settings.kafka_rewind_s is None:
        return reader.beginning()
    return reader.at_time(int((time.time() - settings.kafka_rewind_s) * 1000))


def newest_of_logs(store: Store, models: Iterable[str]) -> dict[str, int]:
    """Model → the newest seq of its log, for those of `models` that are there and have one."""
    logs = {}
    for name in models:
        with contextlib.suppress(NotFound):
            if (last := store.model(name).log.last) is not None:
                logs[name] = last
    return logs
