"""Deltas from a Kafka topic, each applied once, in the order of the seqs of its model.

One thread reads all partitions of the topic and applies each model's next delta. Early deltas wait in a window of
bounded size. Deltas that cannot be applied are parked. Deltas that the store has already are skipped. Positions are
logged with the deltas, so a crash neither loses nor repeats one (`kafka_positions.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.store import Store
from tierstore.errors import DeltaError, StorageError
from tierstore.kafka.messages import KafkaMessage, MessageHeaders, headers_of
from tierstore.kafka.reader import Topic, TopicReader
from tierstore.kafka.reorder_window import ReorderWindow
from tierstore.service.sources.kafka_apply import Applier
from tierstore.service.sources.kafka_positions import SOURCE, Positions
from tierstore.service.sources.kafka_status import KafkaStats, families
from tierstore.service.sources.topic_thread import POLL_S, SAVE_S, TopicThread, far_back, newest_of_logs, note_gone
from tierstore.service.traces import Traces

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20  # of messages that wait for an earlier delta; beyond it they are read again
GAP_S = 10.0  # how long a delta may be missing before earlier messages are read again for it


class KafkaSource:
    """Follows a topic until closed. `status` and `families`: any thread."""

    def __init__(self, store: Store, settings: Settings, traces: Traces | None = None) -> None:
        assert settings.kafka_topic is not None
        self._store, self._settings = store, settings
        self._topic = settings.kafka_topic
        self.stats = KafkaStats(self._topic)
        self._window = ReorderWindow(max(_WINDOW_BYTES, 2 * settings.max_delta))
        self._positions = Positions(store.root.kafka_positions, self._topic)
        self._parked = store.parked_files
        self._followed: set[str] = set()
        self._seen: dict[str, int] = {}  # model → its log's newest seq at the last look
        self._gaps: dict[
            str, tuple[tuple[int, int], float]
        ] = {}  # model → ((the missing seq, parts that came), since when)
        self._rewound_for: dict[str, int] = {}  # model → the seq that a rewind has looked for
        self._forgot_at: dict[str, int] = {}  # model → its log's newest seq when the window had no room
        self._saved_s = self._maintained_s = 0.0
        self._thread = TopicThread("tierstore-kafka", settings, self._topic, self.stats, self)
        self._applier = Applier(store, self._topic, self._positions, self.stats, self._thread.stopping, traces)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """The state, the lag, what was applied, and what blocks which model."""
        return self.stats.status(self._parked.count(self._topic))

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        return families(self.status())

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the delta that is being applied, record the positions, and end."""
        self._thread.close(timeout_s)

    # --- the thread

    def begin(self, reader: TopicReader, topic: Topic) -> None:
        """Read on from the recorded positions."""
        settings = self._settings
        logs = self._logs()
        held = {model: self._store.model(model).log.newest_origin(SOURCE) for model in logs}
        reader.positions = dict.fromkeys(topic.partitions, 0)
        if self._positions.load(topic, held):
            begin = {one: self._positions.saved.get(one, 0) for one in topic.partitions}
            note_gone(reader, topic, self._positions.saved)
            self._followed = self._positions.models & logs.keys()
        else:
            begin = reader.beginning() if self._positions.made_anew else far_back(reader, settings)
            self._followed = set(logs)
            self._positions.save(begin, self._followed, new_epoch=True)
        self._window = ReorderWindow(max(_WINDOW_BYTES, 2 * settings.max_delta))
        self._seen = logs
        self._gaps, self._forgot_at = {}, {}
        self._applier.begin(self._window, reader)
        reader.assign(begin)
        self.stats.connected()

    def step(self, reader: TopicReader) -> None:
        """Read some messages, and apply the next deltas."""
        waiting = time.monotonic() < self._applier.resume_s
        reader.pause(waiting)
        messages = reader.poll(POLL_S)
        for number, message in enumerate(messages):
            try:
                self._receive(message)
            except StorageError as error:  # it could not be parked: read it and later ones again
                reader.read_again(messages[number:])
                self._applier.wait(error)
                break
        try:
            self._forgot_at = {
                model: self._forgot_at.get(model, self._applier.last(model) or 0) for model in self._window.forgotten
            }
            self._applier.apply_ready()
            if time.monotonic() - self._maintained_s >= POLL_S:
                self._maintain()
                self.stats.place(reader.positions, reader.lag())
                self._maintained_s = time.monotonic()
        except StorageError as error:
            self._applier.wait(error)
        self._update_stats()

    def _logs(self) -> dict[str, int]:
        return newest_of_logs(self._store, self._store.models())

    # --- messages

    def _receive(self, message: KafkaMessage) -> None:
        """Put a message where it belongs. StorageError if it should be parked and could not be."""
        stats = self.stats
        stats.read(message.timestamp_ms)
        try:
            headers = headers_of(message)
        except DeltaError as error:
            self._applier.park_message(message, str(error))
            return
        last = self._applier.last(headers.model) if headers.model in self._followed else None
        if last is None:
            stats.pass_over(headers.model)  # a rewind reads it again once there is such a model
        elif headers.seq <= last and self._is_same(headers):
            stats.duplicates += 1
        elif headers.seq <= last and headers.part > 1 and not self._window.at(headers.model, headers.seq):
            stats.abandoned += 1  # of an attempt whose beginning was dropped
        elif (held := self._window.add(message, headers)) is None:
            stats.duplicates += 1
        elif held.nbytes > self._settings.max_delta and held not in self._applier.too_large:
            self._applier.too_large.append(held)

    def _is_same(self, headers: MessageHeaders) -> bool:
        """Whether the delta is one that the log has, or had."""
        digest = self._store.model(headers.model).log.digest(headers.seq)
        return digest is None or digest == headers.digest

    # --- periodic work

    def _maintain(self) -> None:
        now, reader = time.monotonic(), self._thread.reader
        if reader.went_back:
            self._positions.save(self._needed(), self._followed, new_epoch=True)
            reader.went_back.clear()
        self._follow_models()
        self._read_forgotten()
        if now - self._saved_s >= SAVE_S:
            self.save()
            reader.commit(self._positions.saved)
        self._thread.check_topic()
        reader.look()

    def _follow_models(self) -> None:
        """Read earlier messages for a model that is new here, or that was dropped and loaded again."""
        logs = self._logs()
        self._followed = {
            model for model in self._followed if model in logs and logs[model] >= self._seen.get(model, 0)
        }
        for model in self._window.models():
            if model not in self._followed:
                self._window.remove_model(model)
        self._seen |= {model: logs[model] for model in self._followed}
        wanted = logs.keys() - self._followed
        gaps = self._new_gaps(logs)
        if wanted or gaps:
            self._rewind(logs, wanted, gaps)

    def _new_gaps(self, logs: dict[str, int]) -> set[str]:
        """Models that have waited for a delta for a while, which neither a message nor a rewind brought. One of which
        some parts came is parked, and stays in the window: the others may come yet.
        """
        now, parked = time.monotonic(), {(record.model, record.seq) for record in self._parked.list()}
        gaps = {}
        for model in self._window.models() if self._thread.reader.at_end else []:
            seq = logs[model] + 1
            held = self._window.at(model, seq)
            if any(one.complete for one in held) or (model, seq) in parked:
                continue
            if held or self._rewound_for.get(model) != seq:
                missing = seq, sum(len(one.values) for one in held)
                before, since_s = self._gaps.get(model, (missing, now))
                gaps[model] = (missing, since_s if before == missing else now)
        self._gaps = gaps
        overdue = {model for model, (_, since_s) in gaps.items() if now - since_s >= GAP_S}
        cut = {model for model in overdue if self._window.at(model, logs[model] + 1)}
        for model in cut:
            self._applier.park_cut(self._window.at(model, logs[model] + 1)[-1])
        return overdue - cut

    def _rewind(self, logs: dict[str, int], models: set[str], gaps: set[str]) -> None:
        reader = self._thread.reader
        back = far_back(reader, self._settings)
        begin = {one: min(offset, back.get(one, offset)) for one, offset in reader.positions.items()}
        self._positions.save(begin, self._followed | models, new_epoch=True)
        self._followed |= models
        for model in models | gaps:
            self._rewound_for[model] = logs[model] + 1
            self._seen[model] = logs[model]
        self.stats.rewinds += 1
        logger.info("kafka: %s is read again for %s", self._topic, ", ".join(sorted(models | gaps)))
        reader.seek(begin)

    def _read_forgotten(self) -> None:
        """Read again what the window had no room for, once the delta before it has come."""
        for model in list(self._window.forgotten):
            last = self._applier.last(model)
            if last is None or last == self._forgot_at.get(model, last) or self._window.at(model, last + 1):
                continue
            self._thread.reader.seek(self._window.read_again(model))
            return

    def _needed(self) -> dict[int, int]:
        return {one: self._window.needed(one, offset) for one, offset in self._thread.reader.positions.items()}

    def save(self) -> None:
        """Record the positions."""
        self._saved_s = time.monotonic()
        self._positions.save(self._needed(), self._followed)

    def _update_stats(self) -> None:
        reader, window, stats = self._thread.reader, self._window, self.stats
        stats.window_bytes = window.nbytes
        waiting = time.monotonic() < self._applier.resume_s
        held_up = {}
        for model in {*window.models(), *window.forgotten}:
            last = self._applier.last(model)
            if last is not None and (why := self._why_held_up(model, last + 1)) is not None:
                held_up[model] = why
        for record in self._parked.list():
            if record.model is not None and record.seq == (self._applier.last(record.model) or -2) + 1:
                held_up[record.model] = f"delta {record.seq} is parked as {record.id}: {record.reason}"
        stats.update(reader, waiting, held_up)

    def _why_held_up(self, model: str, seq: int) -> str | None:
        if any(held.complete for held in self._window.at(model, seq)):
            return self._applier.why.get(model)
        if not self._thread.reader.at_end:
            return None
        parts = [f"{len(held.values)} of {held.parts} parts" for held in self._window.at(model, seq)]
        later = sum(other > seq for other in self._window.seqs(model))
        came = f"only {parts[0]} came" if parts else "it did not come"
        return f"delta {seq} is missing: {came}; {later} later ones wait"
