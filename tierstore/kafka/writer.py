"""Writing deltas to a Kafka topic: what a trainer calls.

A `KafkaDeltaWriter` belongs to one thread. Deltas are kept in memory until the brokers have acknowledged every message
of them, so that what fails can be sent again; the consumer skips what it has already.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from tierstore.arguments import check_name
from tierstore.errors import DeltaError, InvalidInput, NotFound, Unreachable
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.names import MAX_ORDINAL
from tierstore.formats.times import TimeLike
from tierstore.kafka import client
from tierstore.kafka.admin import TopicAdmin
from tierstore.kafka.messages import KafkaMessage, MessageHeaders, headers_of, read_checked, split
from tierstore.trace_context import current_trace

MAX_MESSAGE = 900_000  # bytes; below the brokers' usual limit of 1 MB, with its headers
_METADATA_S = 30.0
_SCAN = 256  # messages that are read at a time, from the end, to find the newest seq
_FULL_S = 0.05
_OPEN_S = 30.0  # that it is waited for transactions of others
_OPEN_POLL_S = 0.2


@dataclass(slots=True)
class _Sent:
    data: bytes
    trace: list[tuple[str, bytes]]  # headers of the trace that it was sent in
    remaining: int = 0  # messages that are on their way
    error: str | None = None


class KafkaDeltaWriter:
    """Write the deltas of one model to a topic.

    >>> with KafkaDeltaWriter("broker:9092", "deltas", "ctr", next_seq=41821) as writer:
    ...     with writer.delta() as delta:
    ...         delta.upsert("item", keys, vectors)
    ...     writer.flush()

    next_seq: the seq of the next delta; by default one more than the newest of the model in the topic. options:
    properties of librdkafka, such as those for TLS. max_message: bytes of a message; a larger delta is sent in
    several. The block's end flushes.
    """

    def __init__(
        self,
        brokers: str,
        topic: str,
        model: str,
        *,
        next_seq: int | None = None,
        options: Mapping[str, Any] | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        check_name("model", model)
        if max_message < 1:
            raise InvalidInput(f"max_message: expected a positive number of bytes, got {max_message}")
        self._kafka = client.confluent_kafka()
        self._brokers, self._topic, self._model, self._max_message = brokers, topic, model, max_message
        options = dict(options or {})
        ours = {"bootstrap.servers": brokers, "enable.idempotence": True, "acks": "all", "linger.ms": 0}
        self._producer = client.make("Producer", client.merged(ours, options))
        self._unacknowledged: dict[int, _Sent] = {}
        if next_seq is None:
            newest = newest_seq(brokers, topic, model, options)
            if newest is None:
                raise NotFound(
                    f"topic {topic!r} has no delta of {model!r}: name the first one by next_seq=, one more than the "
                    "snapshot's delta_seq"
                )
            next_seq = newest + 1
        self._next_seq = next_seq
        _check_seq(next_seq)

    @property
    def next_seq(self) -> int:
        """The seq that the next delta gets."""
        return self._next_seq

    @contextmanager
    def delta(self, *, event_time: TimeLike | None = None, base_version: int | None = None) -> Iterator[DeltaWriter]:
        """A `DeltaWriter` whose delta is sent when the block ends; if the block raises, nothing is sent."""
        sink = io.BytesIO()
        with DeltaWriter(
            sink, model=self._model, seq=self._next_seq, event_time=event_time, base_version=base_version
        ) as delta:
            yield delta
        self.send(sink.getvalue())

    def send(self, delta: bytes) -> int:
        """Send a delta that was written already, and return its seq, which has to be the next one.

        It returns before the brokers have it: `flush` waits for that. DeltaError for bytes that are no such delta.
        """
        read_checked(delta, self._model, self._next_seq)
        seq = self._next_seq
        self._unacknowledged[seq] = _Sent(delta, [(name, value.encode()) for name, value in current_trace().items()])
        self._next_seq += 1
        self._produce(seq)
        return seq

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the brokers have every delta. Unreachable names those that they do not have in time.

        Those are kept: `flush` may be called again, and sends what had failed once more.
        """
        for seq in [seq for seq, sent in self._unacknowledged.items() if sent.error is not None]:
            self._produce(seq)
        until = time.monotonic() + timeout_s
        while any(sent.remaining for sent in self._unacknowledged.values()) and time.monotonic() < until:
            self._producer.poll(min(0.1, max(0.0, until - time.monotonic())))
        if not self._unacknowledged:
            return
        why = next(
            (sent.error for sent in self._unacknowledged.values() if sent.error is not None), "no answer in time"
        )
        seqs = ", ".join(map(str, list(self._unacknowledged)[:10]))
        raise Unreachable(
            f"kafka: {self._brokers} did not acknowledge delta {seqs} of {self._model!r}: {why}; flush again to send "
            "what failed once more"
        )

    def close(self) -> None:
        """Flush."""
        self.flush()

    def __enter__(self) -> KafkaDeltaWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._producer.flush(1.0)

    def _produce(self, seq: int) -> None:
        sent = self._unacknowledged[seq]
        sent.error = None

        def acknowledged(error: Any, _: Any) -> None:
            sent.remaining -= 1
            if error is not None:
                sent.error = client.text_of(error)
            elif not sent.remaining and sent.error is None:
                self._unacknowledged.pop(seq, None)

        split_up = split(self._model, seq, sent.data, self._max_message)
        messages = [([*headers, *sent.trace], value) for headers, value in split_up]
        sent.remaining = len(messages)
        for number, (headers, value) in enumerate(messages):
            while True:
                try:
                    self._producer.produce(
                        self._topic, bytes(value), self._model.encode(), headers=headers, on_delivery=acknowledged
                    )
                    break
                except BufferError:  # its queue is full
                    self._producer.poll(_FULL_S)
                except self._kafka.KafkaException as error:
                    sent.remaining -= len(messages) - number
                    sent.error = client.text_of(error)
                    raise DeltaError(
                        f"kafka: delta {seq} of {self._model!r} cannot be sent: {client.text_of(error)}"
                    ) from error
        self._producer.poll(0)


def newest_seq(brokers: str, topic: str, model: str, options: Mapping[str, Any] | None = None) -> int | None:
    """The newest seq of a model in a topic, or None where it has none.

    A delta of which parts are missing at the end does not count: what wrote it ended between them, and writes it again.
    Reads the partitions backwards until one is found. Waits for transactions that are open, anybody's, as nothing
    behind them can be read; Unreachable if that takes more than 30 seconds.
    """
    kafka, options = client.confluent_kafka(), dict(options or {})
    ours = {
        "bootstrap.servers": brokers,
        "group.id": "tierstore-writer",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
        "isolation.level": "read_committed",
    }
    consumer = client.make("Consumer", client.merged(ours, options))
    try:
        found = consumer.list_topics(topic, _METADATA_S).topics.get(topic)
        if found is None or found.error is not None:
            raise NotFound(f"kafka: no topic {topic!r} at {brokers}")
        ends = _ends(TopicAdmin(brokers, topic, options), list(found.partitions), brokers, topic)
        whole, cut = set[int](), set[int]()
        for partition, end in ends.items():
            low, _ = consumer.get_watermark_offsets(kafka.TopicPartition(topic, partition), timeout=_METADATA_S)
            seqs = _newest_in(consumer, kafka, kafka.TopicPartition(topic, partition, low), end, model)
            whole |= seqs.whole
            cut |= seqs.cut
        newest = max(whole, default=0)
        later = [seq for seq in cut if seq > newest]
        return min(later) - 1 if later else newest or None
    except kafka.KafkaException as error:
        raise client.unreachable(brokers, error) from error
    finally:
        consumer.close()


def _ends(admin: TopicAdmin, partitions: list[int], brokers: str, topic: str) -> dict[int, int]:
    """Partition → its end, once no transaction that had begun before it is open any more."""
    ends = _known(admin.ends(partitions, _METADATA_S, committed=False), brokers, topic)
    until = time.monotonic() + _OPEN_S
    while True:
        stable = _known(admin.ends(partitions, _METADATA_S, committed=True), brokers, topic)
        behind = [one for one in partitions if stable[one] < ends[one]]
        if not behind:
            return ends
        if time.monotonic() > until:
            one = behind[0]
            raise Unreachable(
                f"kafka: a transaction is open on partition {one} of {topic!r} since offset {stable[one]}, and the "
                f"{ends[one] - stable[one]} messages from there on cannot be read until it ends, so the newest delta "
                "is not known: end it (kafka-transactions.sh finds it), try again later, or give next_seq="
            )
        time.sleep(_OPEN_POLL_S)


def _known(ends: dict[int, int | str], brokers: str, topic: str) -> dict[int, int]:
    for partition, end in ends.items():
        if isinstance(end, str):
            raise client.unreachable(brokers, f"partition {partition} of {topic!r}: {end}")
    return {partition: int(end) for partition, end in ends.items()}


class _Seqs(NamedTuple):
    """The seqs of a model's deltas that are whole in a partition, and of others of which some parts are there."""

    whole: set[int]
    cut: set[int]


def _newest_in(consumer: Any, kafka: Any, low: Any, end: int, model: str) -> _Seqs:
    """The seqs at the end of a partition whose oldest offset is `low`, back to a whole one before all that are cut."""
    parts: dict[tuple[int, int, str | None], set[int]] = {}  # (seq, parts, digest) → those that are there
    first: dict[int, int] = {}  # seq → its first offset
    upto, step = end, _SCAN
    while True:
        begin = max(low.offset, upto - step)
        for offset, headers in _headers(consumer, kafka, kafka.TopicPartition(low.topic, low.partition, begin), upto):
            if headers.model == model:
                parts.setdefault((headers.seq, headers.parts, headers.digest), set()).add(headers.part)
                first[headers.seq] = min(offset, first.get(headers.seq, offset))
        whole = {seq for (seq, count, _), there in parts.items() if len(there) == count}
        cut = first.keys() - whole
        later = [first[seq] for seq in cut if seq > max(whole, default=0)]
        is_found = whole and min(first[seq] for seq in whole) < min(later, default=end)
        if is_found or begin == low.offset:
            return _Seqs(whole, set(cut))
        upto, step = begin, step * 4


def _headers(consumer: Any, kafka: Any, begin: Any, end: int) -> Iterator[tuple[int, MessageHeaders]]:
    """(offset, what it says of itself) of each part of a delta in one partition, between two offsets."""
    if begin.offset >= end:
        return
    consumer.assign([begin])
    last_s = time.monotonic()
    while True:
        read = consumer.poll(1.0)
        if read is None:
            if time.monotonic() - last_s > _METADATA_S:
                raise Unreachable(f"kafka: partition {begin.partition} of {begin.topic!r} cannot be read")
            continue
        last_s = time.monotonic()
        if read.error() is not None:
            if read.error().code() == kafka.KafkaError._PARTITION_EOF:
                return
            continue
        if read.offset() >= end:
            return
        message = KafkaMessage(read.partition(), read.offset(), read.value() or b"", read.headers() or [], 0)
        with suppress(DeltaError):
            yield read.offset(), headers_of(message)
        if read.offset() + 1 >= end:
            return


def _check_seq(seq: int) -> None:
    if isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq <= MAX_ORDINAL:
        raise InvalidInput(f"next_seq: expected an integer from 1 to {MAX_ORDINAL}, got {seq!r}")
