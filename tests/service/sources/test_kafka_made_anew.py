"""A topic that was deleted and made again under its name is another topic: it is read from its beginning, whatever the
offsets say. Where no broker says a topic's id, reading goes on.

With librdkafka's mock; the same with Apache Kafka in `test_kafka_real.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kafka_broker import Brokers
from tests.service.conftest import eventually
from tests.service.sources.kafka_scenes import vector
from tests.service.sources.test_kafka import Scene
from tests.service.sources.test_kafka_rows import RowScene
from tierstore.errors import NotReady, Unreachable
from tierstore.kafka.admin import TopicAdmin
from tierstore.kafka.reader import TopicReader


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.service.sources.topic_thread.CHECK_S", 0.1)


@pytest.fixture
def scene(tmp_path: Path, brokers: Brokers) -> Iterator[RowScene]:
    made = RowScene(tmp_path, brokers)
    yield made
    made.close()


@pytest.fixture
def deltas(tmp_path: Path, brokers: Brokers) -> Iterator[Scene]:
    (tmp_path / "deltas").mkdir()
    made = Scene(tmp_path / "deltas", brokers)
    yield made
    made.close()


def write(scene: RowScene, keys: range, add: float) -> None:
    for key in keys:
        scene.producer.produce(scene.topic, json.dumps({"vector": vector(key + add)}).encode(), str(key).encode())
    assert scene.producer.flush(60) == 0


def check_rows_of_both(scene: RowScene, count: int, *, stopped: bool) -> None:
    """Ten rows, and then `count` of a topic of the same name: all of them are served, also after a start."""
    scene.follow()
    write(scene, range(1, 11), 0.0)
    scene.expect(10, 10.0)
    scene.is_in("caught up", rows=10)
    if stopped:
        scene.close()
    scene.remake()
    write(scene, range(11, 11 + count), 0.5)
    if stopped:
        scene.store = scene.open()
        scene.follow()
    for key in (11, 11 + count // 2, 10 + count):
        scene.expect(key, key + 0.5)
    scene.expect(10, 10.0)
    scene.is_in("caught up", lost=0, parked=0, pending=0)
    scene.reopen()
    scene.is_in("caught up", rows=0)
    write(scene, range(1, 2), 100.0)
    scene.expect(1, 101.0)
    scene.is_in("caught up", rows=1)


def follow_the_new_topic(scene: RowScene) -> None:
    """Make the topic anew while the store is closed, and have all that is in it applied."""
    scene.remake()
    write(scene, range(11, 31), 0.5)
    scene.store = scene.open()
    scene.follow()
    scene.expect(11, 11.5)
    scene.expect(30, 30.5)


@pytest.mark.parametrize("stopped", [False, True], ids=["while it is read", "while the service is stopped"])
@pytest.mark.parametrize("count", [10, 50], ids=["as many messages", "more messages"])
def test_rows_of_a_topic_made_anew_are_all_applied(scene: RowScene, count: int, stopped: bool) -> None:
    check_rows_of_both(scene, count, stopped=stopped)


def check_deltas_of_both(scene: Scene) -> None:
    scene.follow()
    for seq in range(4, 9):
        scene.delta(seq, {1: float(seq)})
    scene.reaches(8)
    scene.is_in("caught up", applied=5)
    scene.remake()
    for seq in range(9, 14):
        scene.delta(seq, {1: float(seq), seq: float(seq)})
    scene.reaches(13)
    scene.expect(1, 13.0)
    scene.expect(9, 9.0)
    scene.is_in("caught up", parked=0, lag_messages=0)


def test_deltas_of_a_topic_made_anew_are_all_applied(deltas: Scene) -> None:
    check_deltas_of_both(deltas)


def test_rows_of_a_topic_made_anew_are_read_from_its_beginning_whatever_the_rewind(
    tmp_path: Path, brokers: Brokers
) -> None:
    scene = RowScene(tmp_path, brokers, kafka_rewind_s=0.001)
    scene.follow()
    write(scene, range(1, 11), 0.0)
    scene.expect(10, 10.0)
    scene.close()
    follow_the_new_topic(scene)
    scene.close()


def test_a_lost_record_does_not_hide_that_the_topic_is_another(scene: RowScene) -> None:
    """The log's newest entry says of which topic it is, too."""
    scene.follow()
    write(scene, range(1, 11), 0.0)
    scene.expect(10, 10.0)
    scene.close()
    scene.store.root.kafka_rows(scene.topic, "ctr").unlink()
    follow_the_new_topic(scene)


def test_rows_that_were_read_and_wait_are_applied_before_those_of_the_new_topic(
    scene: RowScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the new topic cannot be read at first, and where the connection breaks while they wait."""
    apply, beginning, poll = scene.store.apply_delta, TopicReader.beginning, TopicReader.poll
    refuses, again = [True], [0]

    def refuse(*arguments: Any, **options: Any) -> Any:
        if refuses[0]:
            raise NotReady("nothing serves")
        return apply(*arguments, **options)

    def begin(self: TopicReader) -> dict[int, int]:
        if again == [1]:
            again[0] = 2
            raise Unreachable("no broker")
        again[0] += 1
        return beginning(self)

    def read(self: TopicReader, timeout_s: float) -> list[Any]:
        if not again:
            again.append(3)
            raise RuntimeError("broken")
        return poll(self, timeout_s)

    monkeypatch.setattr(TopicReader, "beginning", begin)
    monkeypatch.setattr(TopicReader, "poll", read)

    source = scene.follow()
    scene.is_in("caught up")
    monkeypatch.setattr(scene.store, "apply_delta", refuse)
    write(scene, range(1, 4), 0.0)
    eventually(lambda: sum(len(of.pending) for of in list(source._models.values())) == 3, "three rows wait")
    scene.remake()
    write(scene, range(2, 6), 0.5)
    eventually(lambda: sum(len(of.pending) for of in list(source._models.values())) >= 7, "the others wait, too")
    again.clear()
    eventually(lambda: again == [3], "it connects anew")
    eventually(lambda: sum(len(of.pending) for of in list(source._models.values())) >= 7, "those are read again")
    refuses[0] = False
    scene.expect(5, 5.5)
    scene.expect(2, 2.5)
    scene.expect(1, 1.0)
    scene.is_in("caught up", pending=0)


def test_a_deleted_topic_is_named(scene: RowScene, deltas: Scene) -> None:
    for one in (scene, deltas):
        one.follow()
        one.is_in("caught up")
        one.brokers.delete_topic(one.topic)
        one.is_in("unknown topic", one.topic)


def without_ids(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As brokers before 2.8, or those that let nobody describe a topic, until it is called."""
    told = [False]
    tells = TopicAdmin.topic_id
    monkeypatch.setattr(TopicAdmin, "topic_id", lambda self, wait_s: tells(self, wait_s) if told[0] else "")

    def tell() -> None:
        told[0] = True

    return tell


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "at the next start"])
def test_an_id_that_was_not_known_before_has_nothing_read_again(
    scene: RowScene, deltas: Scene, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    tell = without_ids(monkeypatch)
    write(scene, range(1, 11), 0.0)
    for seq in (4, 5):
        deltas.delta(seq, {1: float(seq)})
    scene.follow()
    deltas.follow()
    scene.is_in("caught up", rows=10)
    deltas.is_in("caught up", applied=2)
    tell()
    if not running:
        scene.reopen()
        deltas.reopen()
    last = scene.store.model("ctr").log.last
    for one, record in (
        (scene, scene.store.root.kafka_rows(scene.topic, "ctr")),
        (deltas, deltas.store.root.kafka_positions),
    ):
        eventually(lambda record=record: json.loads(record.read_bytes()).get("topic_id"), "its id is on record")
        one.is_in("caught up", lag_messages=0)
    scene.is_in("caught up", rows=10 if running else 0)
    deltas.is_in("caught up", applied=2 if running else 0, duplicates=0)
    assert scene.store.model("ctr").log.last == last
    scene.remake()
    write(scene, range(11, 31), 0.5)
    scene.expect(11, 11.5)
    scene.expect(30, 30.5)


def test_an_id_that_is_no_longer_known_has_nothing_read_again(scene: RowScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.follow()
    write(scene, range(1, 11), 0.0)
    scene.is_in("caught up", rows=10)
    tell = without_ids(monkeypatch)
    scene.reopen()
    write(scene, range(11, 12), 0.0)
    scene.is_in("caught up", rows=1)
    scene.close()
    tell()
    follow_the_new_topic(scene)


def test_partitions_that_are_gone_are_named_where_no_id_tells_it(
    tmp_path: Path, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ids(monkeypatch)
    for name in ("rows", "deltas"):
        (tmp_path / name).mkdir()
    scenes = RowScene(tmp_path / "rows", brokers, 3), Scene(tmp_path / "deltas", brokers, 3)
    for scene in scenes:
        scene.follow()
        scene.is_in("caught up")
        scene.remake(1)
        scene.is_in("held up", "no longer has partition 1, 2", "made again")
        scene.close()


def test_partitions_that_are_gone_at_a_start_are_named_and_the_others_read(
    tmp_path: Path, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ids(monkeypatch)
    monkeypatch.setattr(TopicAdmin, "deletions_kept_s", lambda self, timeout_s: 0.0)  # those of the mock say nothing
    scene = RowScene(tmp_path, brokers, 3)
    scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    scene.is_in("caught up")
    scene.close()
    scene.remake(1)
    scene.reopen()
    scene.is_in("held up", "no longer has partition 1, 2")
    for value in (10.0, 20.0):  # the first has the offset of one of before
        scene.row(2, value)
    scene.expect(2, 20.0)
    scene.close()


def test_a_delta_says_of_which_topic_it_is(deltas: Scene) -> None:
    deltas.follow()
    deltas.delta(4, {1: 40.0})
    deltas.reaches(4)
    origin = deltas.store.model("ctr").log.newest_origin("kafka")
    assert origin is not None
    assert len(origin["topic_id"]) == 22
