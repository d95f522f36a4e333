"""Rows from Kafka topics, one a message, gathered into deltas: each row counts once, in the order of its partition.

One thread for each topic reads all partitions. The rows of a model wait for `kafka_rows_gather_s`; then they become
the next delta of that model's log, which is logged with the positions of the model in the same step. So a start goes
on behind the log's content, and a crash neither loses nor repeats a row (docs/decisions/kafka.md). Messages that are
malformed, or do not fit their table, are parked.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.model import Model
from tierstore.engine.store import Store
from tierstore.errors import (
    Conflict,
    DeltaError,
    NotFound,
    Overloaded,
    StorageError,
    TierstoreError,
    TooLarge,
    Unreachable,
)
from tierstore.kafka.messages import KafkaMessage, digest_of
from tierstore.kafka.parked import Parked
from tierstore.kafka.reader import LOOK_S, STANDS_S, Topic, TopicReader
from tierstore.kafka.row_messages import ROW_BYTES, Row, TableRows, fit, make_delta
from tierstore.service.sources.kafka_apply import LONGEST_RETRY_S, RETRY_S
from tierstore.service.sources.kafka_positions import OLDEST_S, Positions
from tierstore.service.sources.kafka_routes import TopicRoute, make_row_reader
from tierstore.service.sources.kafka_rows_status import RowStats, row_families
from tierstore.service.sources.topic_thread import POLL_S, SAVE_S, TopicThread, far_back, newest_of_logs, note_gone
from tierstore.tiers.background import without_yielding, yield_to_requests

logger = logging.getLogger(__name__)

BATCH = 2048  # messages that are read at a time
_SHORT, _LONG = 32, 512  # messages to read, and rows to handle, in about half a millisecond
PENDING_BYTES = 64 << 20  # of rows that wait to become a delta, at most
ASK_S = 60.0  # between questions for how long deletions stay
LEAST_S = 30.0  # that deletions stay in any topic; while it is not known how long they do
MOST_PARKED = 1000  # messages of a topic: beyond it the fault is not a single row's


@dataclass(slots=True)
class _Attempt:
    """A delta made of the first `count` waiting rows, which may be in the log although it failed."""

    seq: int
    data: bytes
    digest: str
    rows: Sequence[Row]
    origin: dict[str, Any]


class _Ends(NamedTuple):
    """When it was noted where the topic ended, and where. asked: the positions count alone, as the brokers were asked
    for them, or nothing was read since for a while.
    """

    at_s: float
    positions: dict[int, int]
    asked: bool


class _Absence(NamedTuple):
    """From when to when nobody read the topic for a model, and the positions behind which it was read again."""

    from_s: float
    to_s: float
    positions: dict[int, int]


@dataclass(slots=True)
class _Followed:
    """A model whose rows are read."""

    positions: Positions
    skip: dict[int, int]  # partition → the offset before which its rows are in the log already
    read_s: float  # up to when all of the topic was read, by `time.time`, or since when it is followed; 0 at first
    absence: _Absence | None = None  # the longest of which the brokers have not said yet whether it matters
    pending: list[Row] = field(default_factory=list)
    gone: int = 0  # how many of them, the first, are of a topic that was deleted since: nobody else has them any more
    nbytes: int = 0
    first_s: float = 0.0  # when the first of them was read
    not_before: float = 0.0
    most: int = 1 << 62  # rows of a delta
    attempt: _Attempt | None = None


class RowTopic:
    """Follows one topic until closed. `status`: any thread."""

    def __init__(self, store: Store, settings: Settings, route: TopicRoute) -> None:
        self._store, self._settings, self._route = store, settings, route
        self._topic, self._parked = route.topic, store.parked_files
        self._rows = make_row_reader(settings)
        self.stats = RowStats(route.topic)
        self._pending_bytes = min(PENDING_BYTES, int(settings.max_delta))
        self._found = Topic("", "", [])
        self._models: dict[str, _Followed] = {}
        self._why: dict[str, str] = {}  # model → why its rows cannot be applied now
        self._resume_s = self._saved_s = self._maintained_s = 0.0
        self._stands = True  # whether nothing is read
        self._read_s = 0.0  # when messages of it were asked for last, by `time.time`
        self._ends: _Ends | None = None
        self._asks_ends, self._noted_s = True, -math.inf  # whether the brokers are to be asked; when it was done last
        self._kept_s: float | None = None  # for how long deletions stay in the topic; None if that is not known yet
        self._asked_s = -math.inf  # when the brokers were asked for it
        name = f"tierstore-rows-{route.topic}"[:60]
        self._thread = TopicThread(name, settings, route.topic, self.stats.topic, self, BATCH)
        self.stopping = self._thread.stopping
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """The state, the lag, what was applied, and what blocks which model."""
        return self.stats.status(self._parked.count(self._topic))

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the delta that is being applied, record the positions, and end. The next start reads waiting rows
        again.
        """
        self._thread.close(timeout_s)

    # --- the thread

    def begin(self, reader: TopicReader, topic: Topic) -> None:
        """Read on behind the content of the models' logs; rows that waited are read again."""
        self._found, self._stands, self._kept_s = topic, True, None
        self._read_s, self._asked_s, self._noted_s = 0.0, -math.inf, -math.inf
        self._ends, self._asks_ends = None, True
        reader.positions = dict.fromkeys(topic.partitions, 0)
        before, self._models = self._models, {}
        try:
            begins = [self._adopt(model, last) for model, last in self._logs().items()]
        finally:
            adopted, self._models = self._models, before
            for model in adopted.keys() & before.keys():
                if adopted[model].positions.made_anew:
                    before[model].gone = len(before[model].pending)
        for model in adopted.keys() & before.keys():
            if adopted[model].positions.seq >= before[model].positions.seq:  # else it was dropped and loaded again
                self._carry_over(model, before[model], adopted[model])
        self._models = adopted
        reader.assign({one: min((begin.get(one, 0) for begin in begins), default=0) for one in topic.partitions})
        self.stats.topic.connected()

    def _carry_over(self, model: str, old: _Followed, of: _Followed) -> None:
        """Let rows of a topic that is gone wait on; others are read again."""
        attempt, old.attempt = old.attempt, None
        with contextlib.suppress(NotFound):  # dropped meanwhile
            if attempt is not None and self._store.model(model).log.digest(attempt.seq) == attempt.digest:
                self._drop(old, len(attempt.rows))
        of.pending, of.gone, of.first_s = old.pending[: old.gone], old.gone, old.first_s
        self._drop(of, 0)

    def step(self, reader: TopicReader) -> None:
        """Read some messages, and apply rows that have waited long enough."""
        waiting = time.monotonic() < self._resume_s
        paused = waiting or not self._models or self._too_many_parked() or self._is_full()
        reader.pause(paused)
        before = dict(reader.positions)
        messages = reader.poll(min(POLL_S, self._settings.kafka_rows_gather_s))
        stands = paused or reader.problem is not None or reader.stands
        if reader.went_back:
            self._begin_anew(reader.went_back)
        # when it lags behind it keeps up with the topic rather than wait for requests
        with without_yielding(len(messages) >= BATCH):
            self._receive_all(messages)
            self._note_whether_read(stands, before)  # after: some may have to be read again
            if time.monotonic() >= self._resume_s:
                self._apply_due()
        if time.monotonic() - self._maintained_s >= POLL_S:
            self._maintain()

    def _receive_all(self, messages: Sequence[KafkaMessage]) -> None:
        for number, message in enumerate(messages):
            if number % _SHORT == 0:
                yield_to_requests()
            try:
                self._receive(message)
            except (StorageError, Unreachable) as error:  # it could not be parked, or its schema was unreachable
                self._thread.reader.read_again(messages[number:])
                self._wait(error)
                break

    def _is_full(self) -> bool:
        return any(of.nbytes >= self._pending_bytes for of in self._models.values())

    def _too_many_parked(self) -> bool:
        return self._parked.count(self._topic) >= MOST_PARKED

    def _wait(self, error: TierstoreError) -> None:
        """Read and apply nothing for a while."""
        seconds = error.retry_after_s if isinstance(error, Overloaded) else RETRY_S
        self._resume_s = time.monotonic() + max(0.05, min(seconds, LONGEST_RETRY_S))
        if self.stats.topic.waits(str(error)):
            logger.warning("kafka: %s: reading pauses: %s", self._topic, error)

    # --- messages

    def _receive(self, message: KafkaMessage) -> None:
        """Let a row wait with those of its model. StorageError if it should be parked and could not be; Unreachable."""
        self.stats.topic.read(message.timestamp_ms)
        model: str | None = None
        try:
            model, table = self._route.place(message)
            of = self._models.get(model)
            if of is None:
                self.stats.topic.pass_over(model)  # it is read again once there is such a model
                return
            if message.offset < of.skip.get(message.partition, 0):
                return
            row = self._rows.read(table, message)
        except DeltaError as error:
            self._park(message, model, str(error))
            return
        if not of.pending:
            of.first_s = time.monotonic()
        of.pending.append(row)
        of.nbytes += len(message.value) + ROW_BYTES

    def _park(self, message: KafkaMessage, model: str | None, reason: str) -> None:
        key = message.key or b""
        digest = digest_of(b"\0".join((self._topic.encode(), key, message.value)))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = Parked(
            f"{message.partition}-{message.offset}-{digest}", self._topic, message.partition, message.offset, 1, model,
            None,
            True, reason, message.timestamp_ms, now, digest_of(message.value), len(message.value), kind="row",
        )  # fmt: skip
        if self._parked.add(record, message.value):
            self.stats.topic.parked += 1
            logger.warning("kafka: %s: a row is parked as %s: %s", self._topic, record.id, reason)

    # --- deltas

    def _apply_due(self) -> None:
        now = time.monotonic()
        for model, of in self._models.items():
            due = now - of.first_s >= self._settings.kafka_rows_gather_s or of.nbytes >= self._pending_bytes
            if not of.pending or not due or now < of.not_before or self._thread.stopping.is_set():
                continue
            try:
                self._apply(self._store.model(model), of)
            except (Overloaded, StorageError) as error:
                self._wait(error)
                return
            except TooLarge as error:
                if of.most == 1:
                    self._hold_up(model, of, error)
                of.most = max(1, min(of.most, len(of.pending)) // 2)
            except (
                TierstoreError
            ) as error:  # nothing serves, another delta took the seq, or the canary has another form
                if not isinstance(error, Conflict):
                    self._hold_up(model, of, error)

    def _hold_up(self, model: str, of: _Followed, error: TierstoreError) -> None:
        of.not_before = time.monotonic() + RETRY_S
        if self._why.get(model) != str(error):
            logger.warning("kafka: %s: rows of %s wait: %s", self._topic, model, error)
        self._why[model] = str(error)

    def _apply(self, model: Model, of: _Followed) -> None:
        attempt = of.attempt
        if attempt is None or model.log.digest(attempt.seq) != attempt.digest:
            attempt = of.attempt = self._make(model, of)
        if attempt is not None:
            self._store.apply_delta(attempt.data, model=model.name, seq=attempt.seq, origin=attempt.origin)
            self.stats.visible(attempt.rows)
            count = len(attempt.rows)
            attempt = of.attempt = None
            self._drop(of, count)
        self._why.pop(model.name, None)

    def _make(self, model: Model, of: _Followed) -> _Attempt | None:
        """The next delta, of rows that fit; those that do not are parked. None if none is left."""
        last = model.log.last
        assert last is not None
        rows = of.pending[: of.most]
        parts, bad = list[TableRows](), list[tuple[Row, str]]()
        for begin in range(0, len(rows), _LONG):
            yield_to_requests()
            fitting, misfits = fit(rows[begin : begin + _LONG], model.tables)
            parts += fitting
            bad += misfits
        for row, reason in bad:
            self._park(row.message, model.name, reason)
        if bad:
            refused = {id(row) for row, _ in bad}
            of.gone -= sum(id(row) in refused for row in of.pending[: of.gone])
            rows = [row for row in rows if id(row) not in refused]
            of.pending[: of.most] = rows
        if not rows:
            self._drop(of, 0)
            return None
        data = make_delta(model.name, last + 1, parts, max(row.event_ms for row in rows))
        if len(data) > self._settings.max_delta and len(rows) > 1:
            raise TooLarge(f"{len(rows)} rows make a delta of {len(data)} bytes (max_delta)")
        waiting = of.pending[len(rows) :]
        origin = of.positions.origin(
            self._needed(of, waiting), rows=len(rows), written_s=self._read_upto_s(of, waiting)
        )
        return _Attempt(last + 1, data, digest_of(data), rows, dict(origin))

    @staticmethod
    def _drop(of: _Followed, count: int) -> None:
        for begin in range(0, count, _LONG):
            yield_to_requests()
            del of.pending[: min(_LONG, count - begin)]
        of.gone = max(0, of.gone - count)
        of.nbytes = sum(len(row.message.value) for row in of.pending) + ROW_BYTES * len(of.pending)

    def _needed(self, of: _Followed, waiting: Sequence[Row]) -> dict[int, int]:
        """Partition → the lowest offset whose row the model's log lacks, once it has all but the waiting ones."""
        needed = {one: max(offset, of.skip.get(one, 0)) for one, offset in self._thread.reader.positions.items()}
        for row in waiting:
            message = row.message
            if message.partition in needed:  # it may be of a topic that had more
                needed[message.partition] = min(message.offset, needed[message.partition])
        return needed

    @staticmethod
    def _read_upto_s(of: _Followed, waiting: Sequence[Row]) -> float:
        """Up to when the topic was read for what `_needed` says: a deletion that waits is as good as not read."""
        read_s = (of.read_s or time.time()) if of.absence is None else of.absence.from_s
        return min(read_s, time.time() - (time.monotonic() - of.first_s)) if waiting else read_s

    # --- periodic work

    def _maintain(self) -> None:
        now, reader = time.monotonic(), self._thread.reader
        self._follow_models()
        self._judge_absences()
        if now - self._saved_s >= SAVE_S:
            try:
                self._save(OLDEST_S if self._kept_s is None else min(OLDEST_S, self._kept_s / 4))
            except StorageError as error:
                self._wait(error)
            reader.commit(
                {one: min(n[one] for n in self._all_needed()) for one in reader.positions} if self._models else {}
            )
        self._thread.check_topic()
        reader.look()
        self._update_stats()
        self._maintained_s = time.monotonic()

    def _all_needed(self) -> list[dict[int, int]]:
        return [self._needed(of, of.pending) for of in self._models.values()]

    def save(self) -> None:
        """Record each model's positions, and that they are of now."""
        self._save(0.0)

    def _save(self, oldest_s: float) -> None:
        self._saved_s = time.monotonic()
        for model, last in self._logs().items():
            if (of := self._models.get(model)) is not None:
                of.positions.seq = last
                read_s = self._read_upto_s(of, of.pending)
                of.positions.save(self._needed(of, of.pending), [model], read_s=read_s, oldest_s=oldest_s)

    def _logs(self) -> dict[str, int]:
        """By model whose rows may come, the newest seq of its log."""
        models = self._store.models() if self._route.model is None else [self._route.model]
        return newest_of_logs(self._store, models)

    def _adopt(self, model: str, last: int) -> dict[int, int]:
        """Follow a model. Returns the first offset to read in each partition."""
        reader, source = self._thread.reader, f"kafka rows {self._topic}"
        positions = Positions(self._store.root.kafka_rows(self._topic, model), self._topic, source)
        origin = self._store.model(model).log.newest_origin(source)
        is_on_record = positions.load(self._found, {model: origin}) and positions.seq <= last
        read_s = 0.0
        if is_on_record or positions.adopt(origin):
            begin = {one: positions.saved.get(one, 0) for one in reader.positions}
            note_gone(reader, self._found, positions.saved)
            read_s = positions.written_s
        elif positions.made_anew:
            begin = reader.beginning()
        else:
            begin = far_back(reader, self._settings)
        positions.seq = last
        if not is_on_record:
            positions.save(begin, [model], new_epoch=True, read_s=read_s or None)
        self._models[model] = _Followed(positions, dict(begin), read_s)
        return begin

    def _note_whether_read(self, stands: bool, before: dict[int, int]) -> None:
        """Note up to when the topic was read, and how long it was not if it is again. before: the positions then."""
        now_s = time.time()
        # it has stood, too, where the process did
        stood, self._stands = self._stands or now_s - self._read_s >= STANDS_S, stands
        if stands:
            return
        if stood:
            shortest_s = LEAST_S if self._kept_s is None else min(OLDEST_S, self._kept_s)
            for of in self._models.values():
                of.read_s = of.read_s or now_s
                longest_s = 0.0 if of.absence is None else of.absence.to_s - of.absence.from_s
                if now_s - of.read_s > max(shortest_s, longest_s):
                    behind = {one: max(at, of.skip.get(one, 0)) for one, at in before.items()}
                    of.absence = _Absence(of.read_s, now_s, behind)
            self._judge_absences()
        self._note_ends(now_s, ask=stood)
        self._read_s = now_s

    def _note_ends(self, now_s: float, *, ask: bool) -> None:
        """The topic was read up to when it ended where it has been read to by now. ask: what was fetched last says
        nothing of its end now, as that was before a pause.
        """
        reader, now = self._thread.reader, time.monotonic()
        if ask:
            self._asks_ends = True
            self._ends = None if self._ends is None else self._ends._replace(asked=True)
        # that a partition is at its end may be from before a pause, until there was something else
        if (noted := self._ends) is not None and reader.is_beyond(noted.positions, or_at_end=not noted.asked):
            for of in self._models.values():
                of.read_s = max(of.read_s, noted.at_s)
            self._ends = None
        if self._ends is not None or now - self._noted_s < (LOOK_S if self._asks_ends else POLL_S):
            return
        self._noted_s = now
        if (ends := reader.ends(ask=self._asks_ends)) is not None:
            self._ends, self._asks_ends = _Ends(now_s, ends, self._asks_ends), False

    def _judge_absences(self) -> None:
        """Note where deletions may have come and gone while nobody read the topic. Where the brokers do not answer they
        are asked again later.
        """
        if self._kept_s is not None and all(of.absence is None for of in self._models.values()):
            return
        if time.monotonic() - self._asked_s < ASK_S:
            return
        self._asked_s, reader = time.monotonic(), self._thread.reader
        try:
            kept_s = reader.deletions_kept_s()
        except Unreachable as error:
            logger.info("kafka: %s: how long deletions stay is asked again: %s", self._topic, error)
            return
        self._kept_s = math.inf if kept_s is None else kept_s
        for model, of in self._models.items():
            absence, of.absence = of.absence, None
            if absence is None or absence.to_s - absence.from_s <= self._kept_s:
                continue
            if reader.may_have_more(absence.positions):
                missed = {"from_s": absence.from_s, "to_s": absence.to_s, "kept_s": self._kept_s}
                logger.warning("kafka: %s", self._missed_text(model, None, missed))
                of.positions.note_missed(missed)
                of.read_s = max(of.read_s, absence.to_s)
                try:
                    of.positions.save(of.positions.saved, [model], read_s=absence.to_s)
                except StorageError as error:  # the next record has it
                    self._wait(error)

    def _missed_deletions(self) -> Iterator[str]:
        """What was noted of models that serve data of before: deletions since are in the topic, or in the data."""
        for model, of in self._models.items():
            missed = of.positions.missed
            with contextlib.suppress(NotFound):  # dropped meanwhile
                held = self._store.model(model)
                active = held.active_version
                info = None if active is None else held.catalogue.get(active)
                if missed is None or info is None:
                    continue
                made = info.manifest.created_at
                made_s = info.loaded_at_s if made is None else made.timestamp()
                if made_s < missed["to_s"] - missed["kept_s"]:
                    yield self._missed_text(model, active, missed)

    def _missed_text(self, model: str, version: int | None, missed: dict[str, Any]) -> str:
        begin, end = (datetime.fromtimestamp(missed[one], UTC).isoformat("T", "seconds") for one in ("from_s", "to_s"))
        where = model if version is None else f"version {version} of {model}"
        return (
            f"{self._topic}: nothing was read from {begin} to {end}, and deletions stay in this compacted topic for "
            f"{missed['kept_s']:g} s (delete.retention.ms): rows that were deleted meanwhile may still be in {where}; "
            "load a snapshot"
        )

    def _follow_models(self) -> None:
        """Read earlier messages for a model that is new here, or was dropped and loaded again."""
        logs, reader = self._logs(), self._thread.reader
        for model, of in list(self._models.items()):
            if model not in logs or logs[model] < of.positions.seq:
                del self._models[model]
                self._why.pop(model, None)
            else:
                of.positions.seq = logs[model]
        new = logs.keys() - self._models.keys()
        if not new:
            return
        for of in self._models.values():
            of.skip = {one: max(offset, of.skip.get(one, 0)) for one, offset in reader.positions.items()}
        begins = [self._adopt(model, logs[model]) for model in new]
        self._stands = True  # for these nothing was read yet
        self.stats.topic.rewinds += 1
        logger.info("kafka: %s is read again for %s", self._topic, ", ".join(sorted(new)))
        reader.seek({one: min(begin.get(one, 0) for begin in begins) for one in reader.positions})

    def _begin_anew(self, partitions: set[int]) -> None:
        """Treat everything in these partitions as new, though their offsets were read before."""
        self._ends, self._asks_ends = None, True
        for model, of in self._models.items():
            for one in partitions:
                of.skip.pop(one, None)
            read_s = self._read_upto_s(of, of.pending)
            of.positions.save(self._needed(of, of.pending), [model], new_epoch=True, read_s=read_s)
        partitions.clear()

    def _update_stats(self) -> None:
        reader, stats = self._thread.reader, self.stats
        stats.topic.place(reader.positions, reader.lag())
        stats.pending = sum(len(of.pending) for of in self._models.values())
        stats.lost = sum(reader.lost.values())
        stats.missed = list(self._missed_deletions())
        held_up = dict(self._why)
        if self._too_many_parked():
            held_up[self._topic] = (
                f"{MOST_PARKED} messages are parked: mend what writes them, or the settings of rows; then skip these "
                "(tierstore parked)"
            )
        elif not self._models:
            held_up[self._route.model or self._topic] = (
                "no such model is loaded yet" if self._route.model else "no model is loaded yet"
            )
        stats.topic.update(reader, time.monotonic() < self._resume_s, held_up)


class KafkaRows:
    """All topics of rows that the settings name. Any thread."""

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
