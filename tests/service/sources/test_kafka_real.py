"""Topics of Apache Kafka itself: what librdkafka's mock does not have, for deltas and for rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many, with_large_counts
from tests.kafka_real import RealBrokers, real_brokers, why_not
from tests.service.conftest import eventually
from tests.service.scenes import delta, rows, write_snapshot
from tests.service.sources.kafka_scenes import vector
from tests.service.sources.test_kafka import Scene
from tests.service.sources.test_kafka_made_anew import check_deltas_of_both, check_rows_of_both, write
from tests.service.sources.test_kafka_rows import RowScene
from tierstore.kafka import writer
from tierstore.service.sources import kafka_positions, kafka_rows

confluent_kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def broker() -> Iterator[RealBrokers]:
    with real_brokers(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[RealBrokers]:
    with real_brokers(3) as cluster:
        yield cluster


@pytest.fixture
def deltas(tmp_path: Path, broker: RealBrokers) -> Iterator[Scene]:
    made = Scene(tmp_path, broker)
    yield made
    made.close()


@pytest.fixture
def scene(tmp_path: Path, broker: RealBrokers) -> Iterator[RowScene]:
    made = RowScene(tmp_path, broker)
    yield made
    made.close()


def value_of(value: float) -> bytes:
    return json.dumps({"vector": vector(value)}).encode()


def low_of(scene: Any) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": scene.brokers.address, "group.id": "low"})
    low, _ = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(scene.topic, 0), timeout=30)
    consumer.close()
    return int(low)


def in_transactions(scene: Any, *parts: tuple[bool, list[tuple[bytes, bytes]]]) -> None:
    """Each part in a transaction, which is committed or aborted. Partition 0."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": scene.brokers.address, "transactional.id": scene.topic, "transaction.timeout.ms": 60000}
    )
    producer.init_transactions(60)
    for commits, messages in parts:
        producer.begin_transaction()
        for key, value in messages:
            producer.produce(scene.topic, value, key, partition=0)
        producer.flush(60)  # it is in the topic, whatever becomes of it
        (producer.commit_transaction if commits else producer.abort_transaction)(60)


def problem_of(scene: RowScene) -> str:
    return str(scene.is_in("caught up")["problem"])


@pytest.mark.parametrize(("kept_ms", "says"), [("1", True), ("86400000", False)])
def test_who_was_away_for_longer_than_deletions_are_kept_is_told_so(
    tmp_path: Path, broker: RealBrokers, kept_ms: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_rows, "LEAST_S", 0.0)
    scene = RowScene(tmp_path, broker, topic=broker.new_topic(cleanup_policy="compact", delete_retention_ms=kept_ms))
    try:
        scene.store.load_snapshot(write_snapshot(tmp_path, 2, delta_seq=3))
        scene.follow()
        scene.row(1, 10.0)
        scene.expect(1, 10.0)
        scene.is_in("caught up", rows=1)
        scene.reopen()
        assert problem_of(scene) == "None"  # it was away, and nothing has come
        scene.close()
        scene.row(2, 20.0)
        scene.reopen()
        scene.expect(2, 20.0)
        for version in (2, 1):
            text = f"version {version} of ctr; load a snapshot"
            eventually(lambda text=text: (text in problem_of(scene)) is says, f"{text}: {says}")
            scene.reopen()  # does not mend it
            eventually(lambda text=text: (text in problem_of(scene)) is says, f"{text}: {says}")
            if version == 2:
                scene.store.rollback("ctr")  # to one that lacks the deletions as well
        scene.store.drop("ctr", 2)
        scene.store.load_snapshot(write_snapshot(tmp_path / "again", 2, delta_seq=3))
        eventually(lambda: scene.status()["problem"] is None, "the next version to have what was missed")
    finally:
        scene.close()


def test_who_stood_still_for_longer_than_deletions_are_kept_is_told_so(
    tmp_path: Path, broker: RealBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kafka_positions, kafka_rows):
        monkeypatch.setattr(module, "OLDEST_S", 0.1)
    monkeypatch.setattr(kafka_rows, "SAVE_S", 0.05)
    scene = RowScene(tmp_path, broker, topic=broker.new_topic(cleanup_policy="compact", delete_retention_ms="1"))
    try:
        scene.follow()
        scene.row(1, 10.0)
        scene.expect(1, 10.0)
        monkeypatch.setattr(kafka_rows, "MOST_PARKED", 0)
        held = scene.is_in("held up")
        scene.row(2, 20.0)
        eventually(lambda: scene.source is not None and time.time() - since(scene) > 0.5, f"a while; {held}")
        monkeypatch.setattr(kafka_rows, "MOST_PARKED", 1000)
        scene.expect(2, 20.0)
        eventually(lambda: "delete.retention.ms" in problem_of(scene), "it to be told")
    finally:
        scene.close()


def since(scene: RowScene) -> float:
    """When the record of what was read was written."""
    assert scene.source is not None
    return scene.source._models["ctr"].positions.written_s


def test_aborted_deltas_are_not_seen(deltas: Scene) -> None:
    deltas.follow()
    in_transactions(
        deltas,
        (False, [(b"ctr", delta(4, {1: 99.0}))]),
        (True, [(b"ctr", delta(4, {1: 40.0})), (b"ctr", delta(5, {2: 50.0}))]),
        (False, [(b"ctr", delta(6, {1: 98.0}))]),
    )
    deltas.reaches(5)
    deltas.expect(1, 40.0)
    deltas.is_in("caught up", applied=2, duplicates=0, parked=0, lag_messages=0)


def test_aborted_rows_are_not_seen(scene: RowScene) -> None:
    scene.follow()
    in_transactions(
        scene,
        (False, [(b"1", value_of(99.0)), (b"2", value_of(99.0))]),
        (True, [(b"1", value_of(10.0))]),
        (False, [(b"1", value_of(98.0))]),
    )
    scene.expect(1, 10.0)
    scene.is_in("caught up", rows=1, parked=0, lost=0, lag_messages=0)
    scene.reopen()
    scene.row(3, 30.0)
    scene.expect(3, 30.0)
    scene.is_in("caught up", rows=1)


def short_lived(scene: Any, broker: RealBrokers) -> None:
    """Have the topic's messages so far be deleted as too old."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in (("retention.ms", "1"), ("segment.ms", "1"), ("file.delete.delay.ms", "1"))
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, scene.topic, incremental_configs=entries)
    admin = broker.admin
    admin.incremental_alter_configs([resource])[resource].result(60)
    eventually(lambda: low_of(scene) > 0, "messages to be deleted")


def test_retention_that_ran_out_before_rows_were_read_is_reported(scene: RowScene, broker: RealBrokers) -> None:
    scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    scene.close()
    for key in (1, 2, 3):
        scene.row(key, 20.0)
    short_lived(scene, broker)
    low = low_of(scene)
    scene.store = scene.open()
    scene.follow()
    eventually(lambda: scene.status()["lost"] == low - 1, f"{low - 1} lost offsets; {scene.status()}")
    assert "deleted before" in str(scene.is_in("caught up", lost=low - 1)["problem"])


def test_retention_that_ran_out_before_deltas_were_read_holds_the_model_up(deltas: Scene, broker: RealBrokers) -> None:
    deltas.follow()
    deltas.delta(4, {1: 40.0})
    deltas.reaches(4)
    deltas.close()
    deltas.delta(5, {1: 50.0})
    short_lived(deltas, broker)
    deltas.store = deltas.open()
    deltas.follow()
    deltas.delta(6, {1: 60.0})
    deltas.is_in("held up", "delta 5 is missing")
    deltas.store.apply_delta(delta(5, {2: 50.0}))
    deltas.reaches(6)
    deltas.expect(1, 60.0)


def test_a_compacted_topic_has_what_is_left(tmp_path: Path, broker: RealBrokers) -> None:
    topic = broker.new_topic(
        1, cleanup_policy="compact", segment_ms="1", min_cleanable_dirty_ratio="0.01", delete_retention_ms="600000"
    )
    scene = RowScene(tmp_path, broker, topic=topic)
    for value in range(1, 6):
        for key in (1, 2, 3):
            scene.row(key, float(value))
    scene.put(2, None)

    def left() -> int:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": broker.address, "group.id": "left", "enable.partition.eof": True}
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        count = 0
        while (message := consumer.poll(30)) is not None and message.error() is None:
            count += 1
        consumer.close()
        return count

    eventually(lambda: left() < 10, "the topic to be compacted")
    scene.follow()
    scene.expect(1, 5.0)
    scene.expect(2, None)
    scene.expect(3, 5.0)
    assert scene.is_in("caught up", lost=0)["rows"] < 10
    scene.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["while it is read", "while the service is stopped"])
@pytest.mark.parametrize("count", [3, 10, 50], ids=["fewer messages", "as many messages", "more messages"])
def test_rows_of_a_topic_made_anew_are_all_applied(
    scene: RowScene, monkeypatch: pytest.MonkeyPatch, count: int, stopped: bool
) -> None:
    monkeypatch.setattr("tierstore.service.sources.topic_thread.CHECK_S", 0.2)
    check_rows_of_both(scene, count, stopped=stopped)


def test_deltas_of_a_topic_made_anew_are_all_applied(deltas: Scene) -> None:
    check_deltas_of_both(deltas)


def test_a_topic_made_anew_with_fewer_partitions_is_read(tmp_path: Path, broker: RealBrokers) -> None:
    scene = RowScene(tmp_path, broker, partitions=3)
    scene.follow()
    for key in range(3):
        scene.row(key, 10.0, partition=key)
    scene.is_in("caught up", rows=3)
    scene.remake(1)
    scene.row(7, 70.0)
    scene.expect(7, 70.0)
    assert list(scene.is_in("caught up", lag_messages=0)["partitions"]) == ["0"]
    scene.close()


def test_a_deleted_topic_is_named(scene: RowScene) -> None:
    scene.follow()
    scene.row(1, 10.0)
    scene.is_in("caught up", rows=1)
    scene.brokers.delete_topic(scene.topic)
    scene.is_in("unknown topic", scene.topic)


def test_a_rewind_reads_nothing_of_a_partition_that_is_quiet_since(tmp_path: Path, broker: RealBrokers) -> None:
    scene = RowScene(tmp_path, broker, 3, kafka_rewind_s="2h")
    now_ms = int(time.time() * 1000)
    for partition, age_h, key in ((0, 72, 1), (0, 71, 2), (1, 72, 3), (1, 1, 4)):
        moment = now_ms - age_h * 3_600_000
        scene.producer.produce(scene.topic, value_of(99.0), str(key).encode(), partition=partition, timestamp=moment)
    assert scene.producer.flush(60) == 0
    scene.follow()
    scene.expect(4, 99.0)
    scene.row(5, 50.0, partition=2)
    scene.row(6, 60.0, partition=0)
    scene.expect(5, 50.0)
    scene.expect(6, 60.0)
    scene.is_in("caught up", rows=3, lost=0)
    for key in (1, 2, 3):
        scene.expect(key, float(key))  # as the snapshot has it
    scene.close()


class OpenTransaction:
    """A transaction with one message in partition 0 of a topic, until it is aborted or committed."""

    def __init__(self, scene: Any, key: bytes, value: bytes, headers: list[tuple[str, bytes]] | None = None) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": scene.brokers.address, "transactional.id": scene.topic, "log_level": 0}
        )
        self._producer.init_transactions(60)
        self._producer.begin_transaction()
        self._producer.produce(scene.topic, value, key, partition=0, headers=headers or [])
        self._producer.flush(60)

    def end(self, *, commit: bool = False) -> None:
        (self._producer.commit_transaction if commit else self._producer.abort_transaction)(60)


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
def test_an_open_transaction_and_what_waits_behind_it_are_shown(
    scene: RowScene, monkeypatch: pytest.MonkeyPatch, commit: bool
) -> None:
    monkeypatch.setattr("tierstore.kafka.reader.LOOK_S", 0.1)
    monkeypatch.setattr("tierstore.kafka.reader.STANDS_S", 0.5)
    scene.follow()
    scene.row(1, 10.0)
    scene.is_in("caught up", rows=1)
    transaction = OpenTransaction(scene, b"2", value_of(20.0))
    for key in range(100, 200):
        scene.producer.produce(scene.topic, value_of(float(key)), str(key).encode(), partition=0)
    assert scene.producer.flush(60) == 0
    scene.is_in("held up", "a transaction is open since offset 1, and 101 messages wait", lag_messages=101, rows=1)
    transaction.end(commit=commit)
    scene.expect(199, 199.0)
    scene.is_in("caught up", rows=101 + commit, lag_messages=0)
    scene.expect(2, 20.0 if commit else 2.0)


def test_a_delta_behind_an_open_transaction_is_not_missing(deltas: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.service.sources.kafka.GAP_S", 0.2)
    monkeypatch.setattr("tierstore.kafka.reader.LOOK_S", 0.1)
    monkeypatch.setattr("tierstore.kafka.reader.STANDS_S", 0.5)
    deltas.follow()
    deltas.delta(5, {1: 50.0})
    transaction = OpenTransaction(deltas, b"other", b"")
    deltas.delta(4, {1: 40.0})
    deltas.is_in("held up", "a transaction is open since offset 1, and 2 messages wait", lag_messages=2)
    transaction.end()
    deltas.reaches(5)
    deltas.is_in("caught up", applied=2, lag_messages=0, parked=0)


def test_a_writer_waits_for_a_transaction_of_anybody_and_names_it(
    deltas: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas.delta(4, {1: 40.0})
    other = [("model", b"ctr"), ("seq", b"6")]
    transaction = OpenTransaction(deltas, b"ctr", delta(6, {1: 99.0}), other)
    deltas.delta(5, {1: 50.0})
    monkeypatch.setattr(writer, "_OPEN_S", 0.0)
    with pytest.raises(tierstore.Unreachable, match=r"is open on partition 0 of .* since offset 1, and the 2 messages"):
        tierstore.KafkaDeltaWriter(deltas.brokers.address, deltas.topic, "ctr")
    left = [transaction]

    def end_once(seconds: float) -> None:
        if left:
            left.pop().end()
        else:  # the brokers settle it a moment later
            time.sleep(seconds)

    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end_once))
    monkeypatch.setattr(writer, "_OPEN_S", 60.0)
    with tierstore.KafkaDeltaWriter(deltas.brokers.address, deltas.topic, "ctr") as made:
        assert made.next_seq == 6  # what was aborted does not count


def test_partitions_that_are_added_are_read(
    scene: RowScene, broker: RealBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import NewPartitions

    monkeypatch.setattr("tierstore.service.sources.topic_thread.CHECK_S", 0.2)
    scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    admin = broker.admin
    admin.create_partitions([NewPartitions(scene.topic, 3)])[scene.topic].result(60)
    eventually(lambda: len(scene.status()["partitions"]) == 3, "the new partitions")
    scene.producer = confluent_kafka.Producer({"bootstrap.servers": broker.address})
    scene.row(2, 20.0, partition=2)
    scene.expect(2, 20.0)
    scene.is_in("caught up", rows=2, rebalances=1)


def test_two_services_of_one_group_each_have_every_row(tmp_path: Path, broker: RealBrokers) -> None:
    topic = broker.new_topic(2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    options = tmp_path / "options"
    options.write_text("group.id=both\n")
    scenes = [RowScene(tmp_path / name, broker, topic=topic, kafka_config=options) for name in ("a", "b")]
    for scene in scenes:
        scene.follow()
    for key in range(1, 20):
        scenes[0].row(key, float(key), partition=key % 2)
    for scene in scenes:
        scene.expect(18, 18.0)
        scene.expect(19, 19.0)
        scene.is_in("caught up", rows=19)
        scene.close()


def test_leaders_that_are_killed_and_moved(tmp_path: Path, three: RealBrokers) -> None:
    for name in ("rows", "deltas"):
        (tmp_path / name).mkdir()
    scene, others = RowScene(tmp_path / "rows", three), Scene(tmp_path / "deltas", three)
    scene.follow()
    others.follow()
    for number in range(3):
        seq = 4 + 2 * number
        scene.row(1, float(seq))
        others.delta(seq, {1: float(seq)})
        leaders = {three.leader(scene.topic), three.leader(others.topic)}
        node = leaders.pop()
        three.kill(node)
        scene.row(2, float(seq))
        others.delta(seq + 1, {2: float(seq)})
        others.reaches(seq + 1)
        for one in (scene, others):
            one.expect(1, float(seq))
            one.expect(2, float(seq))
        three.start(node)
        three.await_in_sync(scene.topic)
        three.await_in_sync(others.topic)
    scene.is_in("caught up", rows=6, parked=0, lost=0)
    others.is_in("caught up", applied=6, duplicates=0, parked=0)
    scene.close()
    others.close()


def test_rows_that_a_leader_without_the_newest_ones_got_since_are_read(tmp_path: Path, three: RealBrokers) -> None:
    """An unclean election cuts the end of a partition off, and others are written there before the service looks."""
    topic = three.new_topic(1, replicas=2, unclean_leader_election_enable="true", min_insync_replicas="1")
    scene = RowScene(tmp_path, three, topic=topic)
    scene.follow()
    leader = three.leader(topic)
    (other,) = three.replicas(topic) - {leader}
    write(scene, range(1, 11), 0.0)
    scene.is_in("caught up", rows=10)
    three.kill(other)
    eventually(lambda: three.in_sync(topic) == {leader}, "the other replica to be out of sync")
    write(scene, range(11, 21), 0.0)
    scene.is_in("caught up", rows=20)
    three.kill(leader)
    three.start(other)
    eventually(lambda: three.leader(topic) == other, "the election")
    write(scene, range(21, 51), 0.5)  # from offset 10 on
    for key in (21, 30, 31, 50):
        scene.expect(key, key + 0.5)
    scene.is_in("caught up", lost=0)
    scene.close()
    three.start(leader)
    three.await_in_sync(topic, 2)


@with_large_counts
def test_the_tests_of_deltas_and_rows_pass_with_a_broker(broker: RealBrokers) -> None:
    """What is run with the mock, with Kafka itself."""
    files = ("test_kafka.py", "test_kafka_rows.py", "test_kafka_cluster.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not thorough", "-p", "no:cacheprovider", *(f"tests/service/sources/{name}" for name in files)],
        cwd=Path(__file__).parents[3], env={**os.environ, "TIERSTORE_TEST_KAFKA": broker.address},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(900)
def test_kills_of_brokers_service_and_producer_lose_and_repeat_no_row() -> None:
    """The short form of `tools/kafka_rows_chaos.py`."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tools.kafka_rows_chaos", "--kills", str(few_or_many(4, 8))]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is as the topic has it" in done.stdout


def test_rows_that_come_while_others_are_read(scene: RowScene) -> None:
    """Counts of a few thousand rows, at full speed."""
    scene.follow()
    for number in range(20_000):
        scene.producer.produce(scene.topic, value_of(float(number % 100)), str(number % 500).encode())
        if number % 1000 == 0:
            scene.producer.poll(0)
    assert scene.producer.flush(60) == 0
    scene.is_in("caught up", rows=20_000, parked=0)
    got = scene.store.model("ctr").lookup("item_id", np.arange(500))
    assert np.array_equal(got, rows("item", [float(key % 100) for key in range(500)]))
