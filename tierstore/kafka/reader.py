"""Reading a topic: all of its partitions, from positions that the caller knows.

The broker's own offsets decide nothing.

One thread: librdkafka's consumer is not to be called from another one, not even for what it has cached.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tierstore.errors import NotFound, Unreachable
from tierstore.kafka import client
from tierstore.kafka.admin import TopicAdmin
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.registry import PROPERTIES

logger = logging.getLogger(__name__)

METADATA_S = 5.0  # that a request for metadata may take
ID_S = 0.5  # that a start waits for the id of a topic, where it is not known that the brokers give one
LATE_ID_S = 0.1  # that reading stands still for it: an answer that comes later counts at the next question
BATCH = 64  # messages that are handed over at a time
QUEUED_KBYTES = 64 << 10  # that librdkafka reads ahead
LOOK_S = 5.0  # between questions how far partitions go of which nothing is read
LOOK_TIMEOUT_S = 1.0
_TRUNCATED = "log truncation"  # librdkafka's word for it: the error's code is that of any offset that is not there
STANDS_S = 10.0  # without a message of a partition that has some, after which it stands still


class Topic(NamedTuple):
    """A topic as the brokers have it. topic_id: another one once it was deleted and made again; empty where the brokers
    do not say it (Kafka before 2.8, or no right to describe the topic).
    """

    cluster: str
    topic_id: str
    partitions: list[int]


class _Stood(NamedTuple):
    """Since when nothing was read of a partition, and what is known of it."""

    since_s: float
    why: str
    is_held_back: bool  # by a transaction that is open


class TopicReader:
    """A consumer of one topic; `group.id` of the options counts before `group`.

    Errors are ConfigError, Unreachable (no broker), NotFound (no such topic).
    """

    def __init__(self, brokers: str, topic: str, group: str, options: Mapping[str, str], *, batch: int = BATCH) -> None:
        self._kafka = client.confluent_kafka()
        self._brokers, self._topic, self._batch = brokers, topic, batch
        ours = {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # `_go_on` says what is missing
            "enable.partition.eof": True,
            "allow.auto.create.topics": False,
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": QUEUED_KBYTES,
            "fetch.wait.max.ms": 100,
            "reconnect.backoff.max.ms": 2000,
        }
        handlers: dict[str, Any] = {
            "error_cb": self._on_error,
            "logger": logging.getLogger("tierstore.kafka.librdkafka"),
        }
        self._consumer = client.make("Consumer", {**client.merged(ours, _of_brokers(options)), **handlers})
        self._admin = TopicAdmin(brokers, topic, _of_brokers(options))
        self.problem: str | None = None  # why no broker can be read
        self.positions: dict[int, int] = {}  # partition → the offset that is read next
        self.went_back: set[int] = set()  # partitions that had less than was read already: truncated, or made anew
        self.gone: list[int] = []  # partitions that were read before, and that the topic no longer has
        self.lost: Counter[int] = Counter()  # partition → offsets that the brokers no longer had when it was their turn
        self._at_end: set[int] = set()
        self._out_of_range: dict[int, bool] = {}  # partitions to go on in; whether their end was cut off
        self._paused = False
        self._next_look_s = 0.0
        self._looked_at: dict[int, int] = {}  # partition → its position at the last look
        self._ends: dict[int, int] = {}  # partition → where it ended when the brokers were asked
        self._stood: dict[int, _Stood] = {}  # partitions of which nothing was read since the look before

    def _on_error(self, error: Any) -> None:
        codes = self._kafka.KafkaError
        if error.code() in (codes._ALL_BROKERS_DOWN, codes._AUTHENTICATION, codes._SSL, codes._RESOLVE):
            self.problem = client.text_of(error)
        logger.debug("kafka: %s", client.text_of(error))

    def describe(self, id_wait_s: float = ID_S) -> Topic:
        """The topic, as the brokers have it now."""
        self._admin.ask_id()
        try:
            metadata = self._consumer.list_topics(self._topic, METADATA_S)
        except self._kafka.KafkaException as error:
            self.problem = client.text_of(error)
            raise client.unreachable(self._brokers, error) from error
        self.problem = None
        topic = metadata.topics.get(self._topic)
        if topic is None or topic.error is not None or not topic.partitions:
            why = "it has no partitions" if topic is None or topic.error is None else client.text_of(topic.error)
            raise NotFound(f"kafka: no topic {self._topic!r} at {self._brokers}: {why}")
        return Topic(str(metadata.cluster_id), self._admin.topic_id(id_wait_s), sorted(topic.partitions))

    def assign(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, each from its offset. A reader that is paused stays so."""
        self.positions = dict(positions)
        self._at_end.clear()
        self._consumer.assign([self._at(partition, offset) for partition, offset in positions.items()])
        if self._paused:  # librdkafka keeps it for the partitions that there were, and begins to read new ones
            self._hold()

    def poll(self, timeout_s: float) -> list[KafkaMessage]:
        """What was read, in the order of each partition; empty where nothing comes in time."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        found = [first, *self._consumer.consume(self._batch - 1, 0)]
        messages = [read for read in map(self._received, found) if read is not None]
        if self._out_of_range:
            self.seek({partition: self._go_on(partition, cut) for partition, cut in self._out_of_range.items()})
            self._out_of_range.clear()
        return messages

    def _go_on(self, partition: int, is_cut: bool) -> int:
        """Where to go on in a partition that has not the next offset: at its oldest one. The next was deleted as too
        old, or the topic was made anew, or a leader was elected that lacked the end (`is_cut`): what was written since
        has offsets that were read already.
        """
        low, high = self._watermarks(partition, cached=False)
        position = self.positions[partition]
        if low <= position <= high and not is_cut:  # a broker that became the leader a moment ago had less
            return position
        if low > position:
            logger.warning(
                "kafka: %s, partition %d: the brokers have deleted offsets %d to %d, which were not read yet",
                self._topic,
                partition,
                position,
                low - 1,
            )
            self.lost[partition] += low - position
        else:
            self._move(partition, low)
        return low

    def _received(self, message: Any) -> KafkaMessage | None:
        partition, offset, error = message.partition(), message.offset(), message.error()
        if error is not None:
            if error.code() == self._kafka.KafkaError._PARTITION_EOF:
                self._at_end.add(partition)
                self._move(partition, offset)
                self.problem = None
            elif error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
                self._out_of_range[partition] = _TRUNCATED in str(error.str()).lower()
            else:
                logger.warning("kafka: %s, partition %d: %s", self._topic, partition, client.text_of(error))
            return None
        self._at_end.discard(partition)
        self.problem = None
        self._move(partition, offset, offset + 1)
        kind, timestamp_ms = message.timestamp()
        value = message.value()
        headers = message.headers() or []
        timestamp_ms = timestamp_ms if kind else 0
        return KafkaMessage(partition, offset, value or b"", headers, timestamp_ms, message.key(), value is None)

    def _move(self, partition: int, offset: int, after: int | None = None) -> None:
        if offset < self.positions.get(partition, 0):
            logger.warning(
                "kafka: %s, partition %d goes on at %d: it was truncated, or made anew", self._topic, partition, offset
            )
            self.went_back.add(partition)
            self._ends.pop(partition, None)
        self.positions[partition] = offset if after is None else after

    def seek(self, positions: Mapping[int, int]) -> None:
        """Read on from other offsets. Partitions that are not named go on where they are."""
        self.assign({**self.positions, **positions})

    def read_again(self, messages: Iterable[KafkaMessage]) -> None:
        """Read these again, and what follows them in their partitions."""
        first: dict[int, int] = {}
        for message in messages:
            first[message.partition] = min(message.offset, first.get(message.partition, message.offset))
        self.seek(first)

    def pause(self, paused: bool) -> None:
        """Read no more, or go on."""
        if paused is not self._paused:
            self._paused = paused
            self._stood.clear()
            self._hold()

    def _hold(self) -> None:
        partitions = [self._at(partition) for partition in self.positions]
        (self._consumer.pause if self._paused else self._consumer.resume)(partitions)

    @property
    def at_end(self) -> bool:
        """Whether everything that the partitions hold was read: also what a transaction that is open holds back."""
        return self._at_end >= self.positions.keys() and all(
            end <= self.positions.get(one, end) for one, end in self._ends.items()
        )

    def beginning(self) -> dict[int, int]:
        """Partition → the oldest offset that the broker has."""
        return {partition: self._watermarks(partition, cached=False)[0] for partition in self.positions}

    def deletions_kept_s(self) -> float | None:
        """For how long deletions stay in the topic, see `TopicAdmin`. Unreachable if the brokers do not answer now."""
        return self._admin.deletions_kept_s(LOOK_TIMEOUT_S)

    def may_have_more(self, positions: Mapping[int, int]) -> bool:
        """Whether something is behind these positions, or may be: a partition without a leader cannot be asked."""
        try:
            # the topic may have other partitions than those of `positions`
            return any(self._watermarks(one, cached=False)[1] > positions.get(one, 0) for one in self.positions)
        except Unreachable:
            return True

    def ends(self, *, ask: bool) -> dict[int, int] | None:
        """Partition → the offset behind all that is there to read: as the brokers say now (`ask`), or as they
        said at least, with what was fetched last. None where that is not known of all.
        """
        if ask:
            asked = self._admin.ends(self.positions, LOOK_TIMEOUT_S, committed=True)
            ends = {one: end for one, end in asked.items() if isinstance(end, int)}
        else:
            ends = {one: self._fetched_end(one) for one in self.positions}
        return ends if ends.keys() == self.positions.keys() and min(ends.values(), default=0) >= 0 else None

    def is_beyond(self, ends: Mapping[int, int], *, or_at_end: bool) -> bool:
        """Whether partitions were read up to these offsets, or, with `or_at_end`, as far as there is something to read:
        what a transaction that is open holds back is not.
        """
        return all(
            self.positions.get(one, end) >= end or (or_at_end and one in self._at_end) for one, end in ends.items()
        )

    def at_time(self, timestamp_ms: int) -> dict[int, int]:
        """Partition → the first offset at that time or later; the end where there is none."""
        # before: what comes while the brokers are asked lies behind these. An open transaction is not passed by either
        ends = {partition: self._watermarks(partition, cached=False)[1] for partition in self.positions}
        try:
            found = self._consumer.offsets_for_times(
                [self._at(partition, timestamp_ms) for partition in self.positions], METADATA_S
            )
        except self._kafka.KafkaException as error:
            raise client.unreachable(self._brokers, error) from error
        for one in found:
            if one.error is not None or one.offset < self._kafka.OFFSET_END:
                why = (
                    f"partition {one.partition} of {self._topic!r}, by time: {client.text_of(one.error or one.offset)}"
                )
                raise client.unreachable(self._brokers, why)
        return {one.partition: one.offset if one.offset >= 0 else ends[one.partition] for one in found}

    def look(self) -> None:
        """Ask the brokers, now and then, how far those partitions go of which nothing is read: what librdkafka
        has heard of them is as old as what it fetched last.
        """
        now_s, before, self._looked_at = time.monotonic(), self._looked_at, dict(self.positions)
        still = [one for one, position in self.positions.items() if before.get(one, position) == position]
        self._stood = {one: since for one, since in self._stood.items() if one in still}
        if now_s < self._next_look_s or not still:
            return
        self._next_look_s = now_s + LOOK_S
        ends = self._admin.ends(still, LOOK_TIMEOUT_S, committed=False)
        if any(isinstance(end, str) for end in ends.values()):
            self._next_look_s += LOOK_S  # nothing is read while one waits for it
        self._ends |= {one: end for one, end in ends.items() if isinstance(end, int)}
        beyond = [one for one in still if self._ends.get(one, 0) > self.positions[one]]
        stable = self._admin.ends(beyond, LOOK_TIMEOUT_S, committed=True)  # after: so what lies between is not settled
        for one in still:
            end = ends[one]
            self._note(one, now_s, end if isinstance(end, str) else None, stable.get(one))

    def _note(self, partition: int, now_s: float, error: str | None, stable: int | str | None) -> None:
        """Nothing was read of a partition since the look before. stable: where the first open transaction begins."""
        position = self.positions[partition]
        more, is_held_back = self._ends.get(partition, 0) - position, False
        if self._paused or (error is None and more <= 0):
            self._stood.pop(partition, None)
            return
        if error is not None:
            why = f"the brokers do not say what is there: {error}"
        elif isinstance(stable, int) and stable <= position:
            is_held_back = True
            why = f"a transaction is open since offset {stable}, and {more} messages wait until it ends"
        else:
            why = f"{more} messages more are there"
        since_s = self._stood[partition].since_s if partition in self._stood else now_s
        self._stood[partition] = _Stood(since_s, why, is_held_back)

    @property
    def stands(self) -> bool:
        """Whether a partition has more than was read of it for a while, or does not say: it may have no leader, or the
        right to read it is gone. What a transaction holds back nobody can read, and no deletion in it goes.
        """
        now_s = time.monotonic()
        return any(
            not stood.is_held_back
            and now_s - stood.since_s >= STANDS_S
            and self._looked_at.get(one) == self.positions.get(one)
            for one, stood in self._stood.items()
        )

    def standing(self) -> str | None:
        """What stands still though nobody has paused it, as `look` has found."""
        now_s = time.monotonic()
        texts = [
            f"partition {one} stands still at {self.positions[one]}: {stood.why}"
            for one, stood in sorted(self._stood.items())
            if now_s - stood.since_s >= STANDS_S
        ]
        if self.gone:
            numbers = ", ".join(map(str, self.gone[:10]))
            texts.insert(
                0,
                f"the topic no longer has partition {numbers}: it was deleted and made again, and its brokers give no "
                "id that tells its messages from the old ones; produce again what is missing, or load a snapshot",
            )
        return "; ".join(texts[:3]) or None

    def lag(self) -> dict[int, int]:
        """Partition → messages that the brokers have and that were not read yet, as far as is known.

        Where the end was read there are none, though offsets may follow, those of aborted transactions, until the
        brokers have more. Behind a transaction that is open there are some.
        """
        lags = {}
        for partition, position in list(self.positions.items()):
            lags[partition] = max(0, max(self._fetched_end(partition), self._ends.get(partition, 0)) - position)
        return lags

    def _fetched_end(self, partition: int) -> int:
        """Where a partition ended when something of it was fetched last; negative if nothing was."""
        return self.positions[partition] if partition in self._at_end else self._watermarks(partition, cached=True)[1]

    def _watermarks(self, partition: int, *, cached: bool) -> tuple[int, int]:
        try:
            found = self._consumer.get_watermark_offsets(self._at(partition), timeout=METADATA_S, cached=cached)
        except self._kafka.KafkaException as error:
            if cached:
                return 0, 0
            raise client.unreachable(self._brokers, error) from error
        if found is None and not cached:  # no answer is none that the partition is empty
            raise client.unreachable(self._brokers, f"nothing of partition {partition} of {self._topic!r} in time")
        return found or (0, 0)

    def commit(self, positions: Mapping[int, int]) -> None:
        """Report positions to the broker, for its own tools. What fails is not tried again."""
        try:
            offsets = [self._at(partition, offset) for partition, offset in positions.items()]
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except self._kafka.KafkaException as error:
            logger.debug("kafka: offsets are not committed: %s", client.text_of(error))

    def close(self) -> None:
        self._consumer.close()

    def _at(self, partition: int, offset: int | None = None) -> Any:
        return self._kafka.TopicPartition(self._topic, partition, *(() if offset is None else (offset,)))


def check_kafka_options(brokers: str, options: Mapping[str, str]) -> None:
    """MissingExtra, or ConfigError for options that librdkafka refuses."""
    TopicReader(brokers, "tierstore-check", "tierstore-check", options).close()


def _of_brokers(options: Mapping[str, str]) -> dict[str, str]:
    """Without what is for a schema registry, and librdkafka does not know."""
    return {name: value for name, value in options.items() if not name.startswith(PROPERTIES)}
