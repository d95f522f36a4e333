"""Reading a topic: what is paused stays so until it is resumed, and is then read, wherever it was to go on meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.kafka_broker import Brokers
from tests.service.conftest import eventually
from tierstore.errors import Unreachable
from tierstore.kafka import reader
from tierstore.kafka.reader import TopicReader

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")

MESSAGES = 5  # in each partition


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def topic(brokers: Brokers) -> str:
    name = brokers.new_topic(2)
    produce(brokers, name, MESSAGES)
    return name


def produce(brokers: Brokers, topic: str, count: int) -> None:
    """So many messages in each of two partitions."""
    producer = confluent_kafka.Producer({"bootstrap.servers": brokers.address})
    for number in range(2 * count):
        producer.produce(topic, b"", partition=number % 2)
    assert producer.flush(60) == 0


@pytest.fixture
def made(brokers: Brokers, topic: str) -> Iterator[TopicReader]:
    one = TopicReader(brokers.address, topic, f"tierstore-test-{uuid.uuid4().hex}", {})
    yield one
    one.close()


def read_to(reader: TopicReader, ends: Mapping[int, int]) -> list[tuple[int, int]]:
    """(partition, offset) of all messages until these positions are reached."""
    found: list[tuple[int, int]] = []

    def reached() -> bool:
        found.extend((message.partition, message.offset) for message in reader.poll(0.05))
        return reader.positions == ends

    eventually(reached, f"positions {ends}; {reader.positions}, {found}")
    return sorted(found)


def offsets(**begins: int) -> list[tuple[int, int]]:
    return [(int(name[1:]), offset) for name, begin in begins.items() for offset in range(begin, MESSAGES)]


MOVES: dict[str, Callable[[TopicReader], None]] = {
    "assign": lambda one: one.assign({0: 2, 1: 3}),
    "seek": lambda one: one.seek({0: 2, 1: 3}),
    "two seeks": lambda one: (one.seek({0: 0}), one.seek({0: 2, 1: 3}))[0],
    "pause again": lambda one: (one.seek({0: 2, 1: 3}), one.pause(True))[0],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("has_read", [False, True], ids=["before it has read", "at the end"])
def test_what_is_sent_elsewhere_while_it_is_paused_is_read_from_there_once_it_goes_on(
    made: TopicReader, move: Callable[[TopicReader], None], has_read: bool
) -> None:
    made.assign({0: 0, 1: 0})
    if has_read:
        assert read_to(made, {0: MESSAGES, 1: MESSAGES}) == offsets(p0=0, p1=0)
    made.pause(True)
    while made.poll(0.2):
        pass
    move(made)
    assert made.poll(0.5) == []
    made.pause(False)
    assert read_to(made, {0: MESSAGES, 1: MESSAGES}) == offsets(p0=2, p1=3)


def test_a_partition_that_is_new_while_the_reader_is_paused_is_paused_and_then_read(made: TopicReader) -> None:
    made.assign({0: 0})
    read_to(made, {0: MESSAGES})
    made.pause(True)
    made.assign({**made.positions, 1: 0})
    assert made.poll(0.5) == []
    made.pause(False)
    assert read_to(made, {0: MESSAGES, 1: MESSAGES}) == offsets(p1=0)


def test_the_lag_counts_what_was_not_read_also_where_nothing_is_fetched(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_S", 0.0)
    name = brokers.new_topic(2)
    one = TopicReader(brokers.address, name, f"tierstore-test-{uuid.uuid4().hex}", {})
    produce(brokers, name, 3)
    one.assign({0: 0, 1: 0})
    one.pause(True)

    def lag() -> dict[int, int]:
        """A question of a new client may not be answered in time."""
        one.look()
        return dict(one.lag())

    eventually(lambda: lag() == {0: 3, 1: 3}, "the ends are known")
    one.pause(False)
    read_to(one, {0: 3, 1: 3})
    assert one.lag() == {0: 0, 1: 0}
    one.pause(True)
    produce(brokers, name, 2)
    one.look()
    one.look()  # they were read up to their ends since the one before
    assert one.lag() == {0: 2, 1: 2}
    one.close()


def test_a_reader_that_stands_still_says_so_until_it_goes_on(
    made: TopicReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "STANDS_S", 0.2)
    monkeypatch.setattr(reader, "LOOK_S", 0.0)
    made.assign({0: 0, 1: 0})
    made._consumer.pause([made._at(1)])  # whatever it is that holds it

    def stands() -> bool:
        made.poll(0.05)
        made.look()  # a broker may be too busy to say what is there
        return "partition 1 stands still at 0: 5 messages more" in str(made.standing())

    eventually(stands, "it is noticed")
    made.pause(True)
    assert made.standing() is None, "it is wanted"
    made.pause(False)
    read_to(made, {0: MESSAGES, 1: MESSAGES})
    made.look()
    assert made.standing() is None


class Truncated:
    """librdkafka's message of an error, as it was seen after an election of a leader without the newest messages."""

    TEXT = (
        "Partition log truncation detected at offset 5 (leader epoch 0): broker end offset is 2 (offset leader epoch 0). "
        "Reset to INVALID.: Local: Partition log truncation detected (broker 2)"
    )

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return MESSAGES

    def error(self) -> Any:
        return confluent_kafka.KafkaError(confluent_kafka.KafkaError._AUTO_OFFSET_RESET, self.TEXT)


def test_a_partition_whose_end_was_cut_off_and_written_anew_is_read_again(
    made: TopicReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position is within what is there by then, and what lies before it is not what was read."""
    made.assign({0: 0, 1: 0})
    read_to(made, {0: MESSAGES, 1: MESSAGES})
    consumer, left = made._consumer, [Truncated()]

    class Cut:
        def __getattr__(self, name: str) -> Any:
            return getattr(consumer, name)

        def poll(self, timeout_s: float) -> Any:
            return left.pop() if left else consumer.poll(timeout_s)

    monkeypatch.setattr(made, "_consumer", Cut())
    made.poll(0.05)
    assert made.went_back == {0}
    assert read_to(made, {0: MESSAGES, 1: MESSAGES}) == offsets(p0=0)
    assert not made.lost


def test_nothing_at_or_after_a_time_is_the_end(made: TopicReader) -> None:
    """Of librdkafka -1, which its mock answers to each time."""
    made.positions = {0: 0, 1: 0}
    assert made.at_time(1) == {0: MESSAGES, 1: MESSAGES}


def test_a_time_that_the_brokers_do_not_look_up_is_no_end(made: TopicReader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, consumer: Any) -> None:
            self._consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._consumer, name)

        def offsets_for_times(self, partitions: list[Any], timeout_s: float) -> list[Any]:
            return [confluent_kafka.TopicPartition(one.topic, one.partition, answer) for one in partitions]

    monkeypatch.setattr(made, "_consumer", Refusing(made._consumer))
    made.positions = {0: 0}
    answer = confluent_kafka.OFFSET_INVALID
    with pytest.raises(Unreachable, match="by time"):
        made.at_time(1)
