"""Deletions of a compacted topic that may have come and gone while nobody read it are told, and nothing else is.

With librdkafka's mock, which keeps everything: what its brokers say of deletions is made up. The same with Apache
Kafka in `test_kafka_real.py`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from tests.kafka_broker import Brokers
from tests.service.conftest import eventually
from tests.service.scenes import write_snapshot
from tests.service.sources.test_kafka_rows import RowScene, nothing_is_read
from tierstore.errors import DiskFull, NotReady, Unreachable
from tierstore.formats import files
from tierstore.kafka.admin import TopicAdmin
from tierstore.kafka.reader import TopicReader
from tierstore.service.sources import kafka_positions, kafka_rows

KEPT_S = 60.0
TOLD = "delete.retention.ms"


class Clock:
    """In place of the module `time`, two hours back at first, so that nobody has to wait for an absence."""

    def __init__(self) -> None:
        self.ahead_s = self._began_s = -7200.0

    def time(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s - self._began_s


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (kafka_positions, kafka_rows):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(kafka_rows, "SAVE_S", 0.05)
    monkeypatch.setattr(TopicAdmin, "deletions_kept_s", lambda self, timeout_s: KEPT_S)
    return made


@pytest.fixture
def scene(tmp_path: Path, brokers: Brokers, clock: Clock) -> Iterator[RowScene]:
    """Its version was made two hours ago, and one row of the topic was read since."""
    made = RowScene(tmp_path, brokers, empty=True)
    made.store.load_snapshot(write_snapshot(tmp_path, 1, delta_seq=3, created_at=clock.time()))
    made.follow()
    made.row(1, 10.0)
    made.expect(1, 10.0)
    made.is_in("caught up", rows=1)
    yield made
    made.close()


def start(scene: RowScene) -> None:
    """As a new process would."""
    scene.store = scene.open()
    scene.follow()


def away(scene: RowScene, clock: Clock) -> None:
    """Begin again two hours later; meanwhile a deletion came."""
    scene.close()
    scene.put(2, None)
    clock.ahead_s = 0.0
    start(scene)
    scene.expect(2, None)


def is_told(scene: RowScene, version: int = 1) -> None:
    scene.is_in("caught up", TOLD, f"in version {version} of ctr")


def is_untold(scene: RowScene) -> None:
    eventually(lambda: scene.status()["state"] == "caught up" and scene.status()["problem"] is None, "no problem")


def test_a_deletion_that_was_read_and_waits_counts_as_not_read(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotReady("nothing serves")

    monkeypatch.setattr(scene.store, "apply_delta", refuse)
    scene.put(2, None)
    eventually(lambda: scene.status()["pending"] == 1, "it waits")
    clock.ahead_s = 0.0
    away(scene, clock)
    is_told(scene)


def test_a_snapshot_of_before_has_the_warning_stay_and_one_of_after_ends_it(scene: RowScene, clock: Clock) -> None:
    made_s = clock.time()
    away(scene, clock)
    is_told(scene)
    scene.store.load_snapshot(write_snapshot(scene.root, 2, delta_seq=3, created_at=made_s))
    is_told(scene, 2)
    scene.store.load_snapshot(write_snapshot(scene.root, 3, delta_seq=3, created_at=clock.time()))
    is_untold(scene)
    scene.store.rollback("ctr")
    is_told(scene, 2)


def test_a_snapshot_that_was_made_while_deletions_since_are_still_there_is_not_blamed(
    scene: RowScene, clock: Clock
) -> None:
    scene.close()
    scene.put(2, None)
    clock.ahead_s = 0.0
    scene.store = scene.open()
    snapshot = write_snapshot(scene.root, 2, delta_seq=3, created_at=clock.time() - KEPT_S / 2)
    scene.store.load_snapshot(snapshot)
    scene.follow()
    scene.expect(2, None)
    is_untold(scene)
    scene.store.rollback("ctr")
    is_told(scene)


def test_brokers_that_do_not_answer_at_once_are_asked_again(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_rows, "ASK_S", 0.1)
    answers = [False, False]

    def late(self: TopicAdmin, timeout_s: float) -> float:
        if answers and not answers.pop():
            raise Unreachable("no answer")
        return KEPT_S

    monkeypatch.setattr(TopicAdmin, "deletions_kept_s", late)
    away(scene, clock)
    is_told(scene)
    assert scene.status()["errors"] == 0
    record = json.loads(scene.store.root.kafka_rows(scene.topic, "ctr").read_bytes())
    assert record["missed"]["kept_s"] == KEPT_S


def test_short_pauses_before_the_brokers_have_answered_are_no_absence(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_rows, "ASK_S", 0.1)
    answers = list[float]()

    def late(self: TopicAdmin, timeout_s: float) -> float:
        if not answers:
            raise Unreachable("no answer")
        return answers[0]

    monkeypatch.setattr(TopicAdmin, "deletions_kept_s", late)
    scene.close()
    start(scene)
    for number in range(2, 8):  # longer than deletions are kept, and read all the time
        clock.ahead_s += KEPT_S / 3
        scene.row(number, 10.0 * number)
        scene.expect(number, 10.0 * number)
    with monkeypatch.context() as parked:
        parked.setattr(kafka_rows, "MOST_PARKED", 0)
        scene.is_in("held up", "are parked")
    scene.row(8, 80.0)
    scene.expect(8, 80.0)
    answers.append(KEPT_S)
    time.sleep(0.5)
    is_untold(scene)


def test_sessions_that_end_before_they_have_caught_up_are_one_absence(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.close()
    for number in range(3, 9):
        scene.row(number, float(number))
    scene.put(2, None)  # behind all that is to be read
    poll = TopicReader.poll
    for _ in range(4):
        clock.ahead_s += 0.8 * KEPT_S
        read: list[Any] = []

        def one(self: TopicReader, timeout_s: float, read: list[Any] = read) -> list[Any]:
            if read:
                time.sleep(0.02)
                return []
            self._batch = 1
            read.extend(poll(self, timeout_s))
            return list(read)

        with monkeypatch.context() as slow:
            slow.setattr(TopicReader, "poll", one)
            start(scene)
            eventually(lambda read=read: read, "one is read")  # type: ignore[misc]
            time.sleep(0.7)
            scene.close()
    clock.ahead_s += 0.8 * KEPT_S
    start(scene)
    scene.expect(2, None)
    is_told(scene)


def test_what_has_to_be_read_again_was_not_read(scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[float]()

    def fail(self: kafka_rows.RowTopic, message: Any) -> None:
        tries.append(clock.time())
        raise Unreachable("the registry does not answer")

    with monkeypatch.context() as down:
        down.setattr(kafka_rows.RowTopic, "_receive", fail)
        down.setattr(kafka_rows, "RETRY_S", 0.05)
        scene.put(2, None)
        eventually(lambda: tries, "it is tried")
        for _ in range(20):
            clock.ahead_s += KEPT_S / 10
            tries.clear()
            eventually(lambda: tries, "it is tried again")
    scene.expect(2, None)
    is_told(scene)


def test_a_kill_before_the_brokers_have_answered_leaves_the_question(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as silent:

        def none(self: TopicAdmin, timeout_s: float) -> float:
            raise Unreachable("no answer")

        silent.setattr(TopicAdmin, "deletions_kept_s", none)
        away(scene, clock)
        scene.close()
    scene.row(3, 30.0)
    start(scene)
    scene.expect(3, 30.0)
    is_told(scene)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"cleanup.policy": "compact,delete", "delete.retention.ms": "60000"}, 60.0),
        ({"cleanup.policy": "delete", "delete.retention.ms": "60000"}, None),
        (confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED, None),
        (confluent_kafka.KafkaError.CLUSTER_AUTHORIZATION_FAILED, None),
        (confluent_kafka.KafkaError._UNSUPPORTED_FEATURE, None),
        (confluent_kafka.KafkaError._TIMED_OUT, Unreachable),
        (confluent_kafka.KafkaError.REQUEST_TIMED_OUT, Unreachable),
    ],
)
def test_an_answer_that_fails_to_come_is_none_that_deletions_stay(answer: Any, expected: Any) -> None:
    future: Future[Any] = Future()
    if isinstance(answer, dict):
        future.set_result({name: SimpleNamespace(value=value) for name, value in answer.items()})
    else:
        future.set_exception(confluent_kafka.KafkaException(confluent_kafka.KafkaError(answer)))
    admin = TopicAdmin("127.0.0.1:1", "t", {})
    admin.__dict__["_client"] = SimpleNamespace(describe_configs=lambda asked, request_timeout: {asked[0]: future})
    if expected is Unreachable:
        with pytest.raises(Unreachable):
            admin.deletions_kept_s(1.0)
    else:
        assert admin.deletions_kept_s(1.0) == expected


def test_a_lost_record_hides_no_absence(scene: RowScene, clock: Clock) -> None:
    scene.close()
    scene.store.root.kafka_rows(scene.topic, "ctr").unlink()
    scene.store = scene.open()
    away(scene, clock)
    is_told(scene)


def test_a_model_from_a_backup_has_missed_what_came_since(scene: RowScene, clock: Clock, tmp_path: Path) -> None:
    model = scene.store.root.root / "models" / "ctr"
    scene.close()
    shutil.copytree(model, tmp_path / "backup", symlinks=True)
    start(scene)
    scene.is_in("caught up")
    clock.ahead_s = 0.0
    scene.row(3, 30.0)
    scene.expect(3, 30.0)
    scene.is_in("caught up", rows=1)
    scene.close()
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "backup", model, symlinks=True)
    start(scene)
    scene.expect(3, 30.0)
    is_told(scene)


def test_a_topic_that_was_made_anew_does_not_end_the_warning(scene: RowScene, clock: Clock) -> None:
    away(scene, clock)
    is_told(scene)
    scene.close()
    scene.remake()
    scene.row(3, 30.0)
    start(scene)
    scene.expect(3, 30.0)
    is_told(scene)


def test_an_idle_topic_waits_on_a_full_disk_and_stays_connected(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, reader = files.publish_record, scene.source._thread.reader

    def full(path: Path, document: Any) -> None:
        if "kafka" in str(path):
            raise DiskFull("no space left on device")
        publish(path, document)

    with monkeypatch.context() as no_room:
        no_room.setattr(files, "publish_record", full)
        clock.ahead_s = 0.0
        scene.is_in("waiting", "no space left")
    scene.row(2, 20.0)
    scene.expect(2, 20.0)
    is_untold(scene)
    assert scene.source._thread.reader is reader


@pytest.mark.parametrize("killed", [False, True], ids=["it ends", "it is killed"])
def test_an_idle_topic_is_read_and_no_absence(scene: RowScene, clock: Clock, killed: bool) -> None:
    if killed:
        scene.source.save = lambda: None
    clock.ahead_s += 5 * KEPT_S
    eventually(lambda: kept_until(scene) > clock.time() - KEPT_S / 2, "a newer record")
    scene.close()
    scene.put(2, None)
    clock.ahead_s += KEPT_S / 3
    start(scene)
    scene.expect(2, None)
    is_untold(scene)


def kept_until(scene: RowScene) -> float:
    record = json.loads(scene.store.root.kafka_rows(scene.topic, "ctr").read_bytes())
    return float(record["written_s"])


def test_a_pause_that_is_longer_than_deletions_are_kept_is_told(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as parked:
        parked.setattr(kafka_rows, "MOST_PARKED", 0)
        scene.is_in("held up", "are parked")
        scene.put(2, None)
        clock.ahead_s += 5 * KEPT_S
    scene.expect(2, None)
    is_told(scene)


def test_a_partition_without_a_leader_holds_nothing_up(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watermarks = TopicReader._watermarks

    def leaderless(self: TopicReader, partition: int, *, cached: bool) -> tuple[int, int]:
        if not cached:
            raise Unreachable("no leader")
        return watermarks(self, partition, cached=True)

    monkeypatch.setattr(TopicReader, "_watermarks", leaderless)
    away(scene, clock)
    is_told(scene)
    assert scene.status()["errors"] == 0


def test_a_topic_that_may_not_be_read_is_not_read(
    scene: RowScene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.kafka.reader.STANDS_S", 0.2)
    monkeypatch.setattr("tierstore.kafka.reader.LOOK_S", 0.1)
    with monkeypatch.context() as refused:
        nothing_is_read(refused)
        scene.put(2, None)
        scene.is_in("held up", "stands still")
        clock.ahead_s = 0.0
    scene.expect(2, None)
    is_told(scene)
