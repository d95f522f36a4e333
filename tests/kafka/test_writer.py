"""Where a writer of deltas counts on: behind the newest delta that is whole, wherever its parts lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

import tierstore
from tests.kafka_broker import Brokers
from tierstore.kafka import writer
from tierstore.kafka.messages import split

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")

MODELS = ("ctr", "other")


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


class Topic:
    def __init__(self, brokers: Brokers, partitions: int = 1) -> None:
        self.brokers, self.name = brokers, brokers.new_topic(partitions)
        self._producer = confluent_kafka.Producer({"bootstrap.servers": brokers.address})

    def put(
        self, seq: int, content: bytes, parts: Sequence[int] | None = None, *, model: str = "ctr", partition: int = 0
    ) -> None:
        """The parts of those numbers, from 1, of one byte each; all by default."""
        for number, (headers, value) in enumerate(split(model, seq, content, 1), 1):
            if parts is None or number in parts:
                self._producer.produce(self.name, bytes(value), partition=partition, headers=headers)
        assert self._producer.flush(60) == 0

    def next_seq(self, model: str = "ctr") -> int:
        with tierstore.KafkaDeltaWriter(self.brokers.address, self.name, model) as made:
            return made.next_seq


@pytest.fixture
def topic(brokers: Brokers) -> Topic:
    return Topic(brokers)


def test_a_delta_that_is_cut_is_written_again_under_its_seq(topic: Topic) -> None:
    topic.put(4, b"abc")
    topic.put(5, b"abcde", [1, 2])
    assert topic.next_seq() == 5
    topic.put(5, b"other", [1, 2, 3])  # cut again
    assert topic.next_seq() == 5
    topic.put(5, b"abcde")
    assert topic.next_seq() == 6


def test_the_first_delta_of_a_model_may_be_cut(topic: Topic) -> None:
    topic.put(1, b"abc", [1])
    topic.put(41, b"abc", [1, 2], model="other")
    assert [topic.next_seq(model) for model in MODELS] == [1, 41]
    topic.put(1, b"xyz")
    assert topic.next_seq() == 2


def test_a_whole_delta_counts_though_one_before_it_is_cut(topic: Topic) -> None:
    topic.put(4, b"abc")
    topic.put(5, b"abc", [1, 3])
    topic.put(6, b"abc")
    assert topic.next_seq() == 7


def test_a_delta_comes_in_two_attempts(topic: Topic) -> None:
    topic.put(4, b"abc", [1, 2])
    topic.put(4, b"abc", [1, 2, 3])
    assert topic.next_seq() == 5


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_parts_are_found_however_far_back_they_lie(topic: Topic, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(writer, "_SCAN", step)
    topic.put(7, b"abcdefgh")
    topic.put(8, b"abcdefghijkl")
    for seq in range(1, 4):
        topic.put(seq, b"ab", model="other")
    assert [topic.next_seq(model) for model in MODELS] == [9, 4]
    topic.put(9, b"abcdefghijkl", range(1, 12))
    topic.put(4, b"ab", model="other")
    assert [topic.next_seq(model) for model in MODELS] == [9, 5]


def test_a_cut_delta_of_one_partition_is_whole_in_another(brokers: Brokers) -> None:
    topic = Topic(brokers, 2)
    topic.put(5, b"abc", [1])
    topic.put(5, b"abc", partition=1)
    assert topic.next_seq() == 6


def test_messages_that_are_no_deltas_do_not_count(topic: Topic) -> None:
    topic.put(4, b"abc")
    topic._producer.produce(topic.name, b"what", partition=0)
    topic._producer.produce(topic.name, None, b"ctr", partition=0)
    topic._producer.flush(60)
    assert topic.next_seq() == 5


def test_a_writer_reads_what_is_committed_alone(topic: Topic) -> None:
    with pytest.raises(tierstore.ConfigError, match=r"isolation\.level: expected read_committed"):
        tierstore.KafkaDeltaWriter(
            topic.brokers.address, topic.name, "ctr", options={"isolation.level": "read_uncommitted"}
        )
