"""Deltas from a Kafka topic: each is applied once, in order, whatever comes between; what cannot be applied is parked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.kafka_broker import REAL, Brokers
from tests.service.conftest import eventually, settings_for
from tests.service.scenes import delta, rows, write_small, write_snapshot
from tests.service.sources.kafka_scenes import TopicScene, confluent_kafka
from tierstore.engine.deltas.origin import read as read_origin
from tierstore.engine.store import Store
from tierstore.errors import Conflict, NotFound, Overloaded
from tierstore.kafka import reader
from tierstore.kafka.messages import split
from tierstore.kafka.reorder_window import Held
from tierstore.service.server import ServerThread
from tierstore.service.sources.kafka import KafkaSource
from tierstore.service.sources.start import check_sources
from tools.crash_check import Wrong
from tools.crash_kafka import Crash


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


class Scene(TopicScene):
    """A topic of deltas."""

    source: KafkaSource | None = None

    def __init__(self, root: Path, brokers: Any, partitions: int = 1) -> None:
        topic = brokers.new_topic(partitions)
        super().__init__(root, brokers, topic, kafka_topic=topic)

    def follow(self) -> KafkaSource:
        self.source = KafkaSource(self.store, self.store.settings)
        return self.source

    def put(self, value: bytes, *, partition: int = 0, **headers: object) -> None:
        """One message."""
        named = [(name, str(text).encode()) for name, text in headers.items()]
        self.producer.produce(self.topic, value, partition=partition, headers=named)
        assert self.producer.flush(60) == 0

    def delta(self, seq: int, values: dict[int, float], *, partition: int = 0, **options: Any) -> None:
        self.put(delta(seq, values, **options), partition=partition, model="ctr", seq=seq)

    def reaches(self, seq: int, model: str = "ctr") -> None:
        eventually(lambda: self.store.model(model).log.last == seq, f"seq {seq}; {self.shown()}")


@pytest.fixture
def scene(tmp_path: Path, brokers: Brokers) -> Iterator[Scene]:
    made = Scene(tmp_path, brokers)
    yield made
    made.close()


@pytest.fixture
def wide(tmp_path: Path, brokers: Brokers) -> Iterator[Scene]:
    made = Scene(tmp_path, brokers, partitions=3)
    yield made
    made.close()


def test_deltas_are_applied_in_order_over_partitions(wide: Scene) -> None:
    wide.follow()
    wide.delta(6, {1: 60.0}, partition=0)
    wide.delta(5, {1: 50.0, 2: 51.0}, partition=2)
    wide.delta(4, {1: 40.0, 3: 41.0}, partition=1)
    wide.reaches(6)
    wide.expect(1, 60.0)
    wide.expect(2, 51.0)
    wide.expect(3, 41.0)
    assert wide.is_in("caught up", applied=3, duplicates=0)["problem"] is None
    eventually(lambda: wide.status()["lag_messages"] == 0, "no message lags")


def test_parts_over_messages_and_what_comes_twice(scene: Scene) -> None:
    scene.follow()
    large, after = delta(4, {key: float(key) for key in range(1, 200)}), delta(5, {1: 50.0})
    parts = list(split("ctr", 4, large, 1000))
    assert len(parts) > 3
    for headers, value in [*parts[:2], parts[1], *parts[2:], *parts]:
        scene.put(bytes(value), **{name: text.decode() for name, text in headers})
    for _ in range(2):
        scene.put(after, model="ctr", seq=5)
    scene.reaches(5)
    scene.expect(1, 50.0)
    scene.expect(150, 150.0)
    assert scene.is_in("caught up", applied=2, parked=0)["duplicates"] > len(parts)
    assert scene.store.parked() == []


def test_a_delta_needs_no_headers(scene: Scene) -> None:
    scene.follow()
    scene.put(delta(4, {1: 40.0}))
    scene.reaches(4)
    scene.expect(1, 40.0)


def test_what_a_new_model_needs_is_read_though_the_reading_pauses_meanwhile(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = scene.follow()
    scene.put(delta(1, {1: 10.0}, model="late"), model="late", seq=1)
    scene.delta(4, {1: 40.0})
    scene.reaches(4)
    accept, refused = scene.store.apply_delta, []

    def refuse(*_: Any, **__: Any) -> Any:
        refused.append(1)
        raise Overloaded("too many deltas are not folded", retry_after_s=0.5)

    monkeypatch.setattr(scene.store, "apply_delta", refuse)
    scene.delta(5, {1: 50.0})
    scene.is_in("waiting", "not folded")
    scene.store.load_snapshot(write_small(tmp_path, "late", "item"))
    eventually(lambda: source.stats.rewinds == 1, "it is read again for the new model")
    assert refused
    monkeypatch.setattr(scene.store, "apply_delta", accept)
    scene.reaches(1, "late")
    scene.reaches(5)


def test_a_start_goes_on_where_the_log_says(scene: Scene) -> None:
    scene.follow()
    for seq in (4, 5, 6):
        scene.delta(seq, {1: seq * 10.0})
    scene.reaches(6)
    origin = scene.store.model("ctr").log.newest_origin("kafka")
    assert origin is not None
    assert (origin["topic"], origin["offsets"], origin["resume"]) == (scene.topic, [2], {"0": 3})
    scene.delta(8, {1: 80.0})  # waits for 7, so that its offset is still needed
    scene.is_in("held up", "delta 7 is missing")
    scene.reopen()
    scene.delta(7, {2: 70.0})
    scene.reaches(8)
    scene.expect(1, 80.0)
    scene.expect(2, 70.0)
    scene.is_in("caught up", applied=2, duplicates=0)  # neither again, nor less
    assert scene.store.verify().ok


def test_a_start_without_positions_reads_from_the_beginning(scene: Scene) -> None:
    scene.follow()
    for seq in (4, 5):
        scene.delta(seq, {1: seq * 10.0})
    scene.reaches(5)
    scene.close()
    shutil.rmtree(scene.store.root.kafka_positions.parent)
    scene.delta(6, {1: 60.0})
    scene.store = scene.open()
    scene.follow()
    scene.reaches(6)
    scene.is_in("caught up", applied=1, duplicates=2)


def test_poison_is_parked_and_later_deltas_wait_until_a_person_decides(scene: Scene) -> None:
    scene.follow()
    scene.put(b"not a delta at all")
    scene.put(b"nor this", model="ctr", seq=4)
    scene.put(delta(9, {1: 1.0}), model="ctr", seq=5)  # its headers say something else
    scene.delta(6, {1: 60.0})
    scene.is_in("held up", "delta 4 is parked as")
    nameless, first = scene.store.parked()
    assert (nameless["model"], first["model"], first["seq"], first["offset"]) == (None, "ctr", 4, 1)
    assert scene.store.parked_payload(first["id"]) == b"nor this"
    with pytest.raises(tierstore.DeltaError):
        scene.store.retry_parked(first["id"])
    scene.store.skip_parked(first["id"])
    scene.is_in("held up", "delta 5 is parked as", "expected delta 5")
    second = scene.store.parked()[-1]
    scene.delta(5, {2: 50.0})  # the same seq, by another message
    scene.reaches(6)
    scene.expect(1, 60.0)
    scene.expect(2, 50.0)
    scene.is_in("caught up", parked=2)
    assert scene.store.skip_parked(second["id"])["applied"] is False
    scene.store.skip_parked(nameless["id"])
    assert scene.store.parked() == []
    assert {record["state"] for record in scene.store.parked(all_states=True)} == {"skipped"}
    scene.close()
    scene.store.root.kafka_positions.unlink()  # so that all is read again: nothing is parked again
    scene.store = scene.open()
    scene.follow()
    scene.is_in("caught up")
    scene.delta(7, {1: 70.0})
    scene.reaches(7)
    assert scene.store.parked() == []


def test_other_content_under_a_held_seq_is_parked(scene: Scene) -> None:
    scene.follow()
    scene.delta(4, {1: 40.0})
    scene.delta(4, {1: 41.0})
    scene.delta(5, {2: 50.0})
    scene.reaches(5)
    eventually(lambda: len(scene.store.parked()) == 1, "the other content")
    record = scene.store.parked()[0]
    assert "other content" in record["reason"]
    scene.expect(1, 40.0)
    with pytest.raises(Conflict):
        scene.store.retry_parked(record["id"])
    scene.is_in("caught up")


def test_retry_applies_what_fits_by_then(scene: Scene) -> None:
    source = scene.follow()
    good = delta(4, {1: 40.0})
    held = Held("ctr", 4, 0, 1, None)
    held.values[1], held.offsets[1] = good, 0
    source._applier._park_delta(held, "it did not fit", "ctr", 4)
    scene.is_in("held up", "it did not fit")
    (record,) = scene.store.parked()
    assert scene.store.retry_parked(record["id"])["applied"] is True
    scene.expect(1, 40.0)
    scene.is_in("caught up")
    with pytest.raises(NotFound):
        scene.store.retry_parked(record["id"])


def cut(scene: Scene, seq: int) -> list[tuple[Any, bytes]]:
    """Send the first two of a delta's parts. Returns all of them."""
    parts = [(headers, bytes(value)) for headers, value in split("ctr", seq, delta(seq, {1: seq * 10.0}), 300)]
    assert len(parts) > 2
    send(scene, parts[:2])
    return parts


def send(scene: Scene, parts: list[tuple[Any, bytes]]) -> None:
    for headers, value in parts:
        scene.put(value, **{name: text.decode() for name, text in headers})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.service.sources.kafka.GAP_S", 0.2)


def test_a_delta_whose_writer_was_killed_between_its_parts_can_be_skipped(scene: Scene, impatient: None) -> None:
    scene.follow()
    cut(scene, 4)
    scene.delta(5, {2: 50.0})
    scene.is_in("held up", "delta 4 is parked as", "only 2 of", "write delta 4 again, or skip it")
    scene.reopen()
    scene.is_in("held up", "delta 4 is parked as", "only 2 of")
    (record,) = scene.store.parked()
    assert (record["model"], record["seq"], record["messages"], record["complete"]) == ("ctr", 4, 2, False)
    with pytest.raises(tierstore.InvalidInput, match="only some parts"):
        scene.store.retry_parked(record["id"])
    assert scene.store.skip_parked(record["id"])["applied"] is True
    scene.reaches(5)
    scene.expect(2, 50.0)
    scene.is_in("caught up", parked=0, abandoned=1)


def test_a_delta_whose_other_parts_come_late_is_applied(scene: Scene, impatient: None) -> None:
    scene.follow()
    parts = cut(scene, 4)
    scene.is_in("held up", "delta 4 is parked as")
    send(scene, parts[2:])
    scene.reaches(4)
    scene.expect(1, 40.0)
    (record,) = scene.store.parked()
    assert scene.store.skip_parked(record["id"])["applied"] is False
    scene.is_in("caught up", applied=1)


def test_a_writer_that_begins_again_writes_the_delta_that_was_cut(scene: Scene) -> None:
    scene.follow()
    scene.delta(4, {1: 40.0})
    cut(scene, 5)
    with tierstore.KafkaDeltaWriter(scene.brokers.address, scene.topic, "ctr") as writer:
        assert writer.next_seq == 5
        for value in (51.0, 61.0):
            with writer.delta() as new:
                new.upsert("item", [1], rows("item", [value]))
    scene.reaches(6)
    scene.expect(1, 61.0)
    scene.is_in("caught up", applied=3, parked=0, abandoned=1)


def test_a_delta_above_max_delta_is_parked(scene: Scene) -> None:
    scene.follow()
    large = delta(4, {key: float(key) for key in range(80_000)})
    assert len(large) > scene.store.settings.max_delta
    for headers, value in split("ctr", 4, large, 500_000):
        scene.put(bytes(value), **{name: text.decode() for name, text in headers})
    scene.is_in("held up", "max_delta")
    record = scene.store.parked()[0]
    scene.store.skip_parked(record["id"])
    scene.delta(5, {1: 50.0})
    scene.reaches(5)


def test_a_model_that_is_loaded_later_is_read_from_earlier_messages(wide: Scene) -> None:
    wide.follow()
    for seq in (1, 2):
        wide.put(delta(seq, {1: seq * 10.0}, model="late"), partition=seq, model="late", seq=seq)
    wide.delta(4, {1: 40.0})
    wide.reaches(4)
    eventually(lambda: wide.status()["passed_over"] == {"late": 2}, f"passed over; {wide.shown()}")
    wide.store.load_snapshot(write_small(wide.root, "late", "item"))
    wide.reaches(2, "late")
    wide.is_in("caught up", rewinds=1, applied=3)


def test_a_window_without_room_reads_again(scene: Scene) -> None:
    source = scene.follow()
    scene.is_in("caught up")
    source._window._limit = 3000
    for seq in range(24, 4, -1):
        scene.delta(seq, {1: float(seq), seq: float(seq)})
    scene.is_in("held up", "delta 4 is missing")
    assert source.stats.window_bytes <= 3000
    scene.delta(4, {1: 4.0})
    scene.reaches(24)
    scene.expect(1, 24.0)
    scene.expect(11, 11.0)
    scene.is_in("caught up", applied=21)


def test_a_store_that_accepts_nothing_pauses_reading(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.follow()
    model = scene.store.model("ctr")
    refuse = [True]

    def apply(*arguments: Any) -> Any:
        if refuse[0]:
            raise Overloaded("deltas come faster than they are folded", retry_after_s=0.1)
        return type(model).apply_delta(model, *arguments)

    monkeypatch.setattr(model, "apply_delta", apply)
    monkeypatch.setattr(model, "apply_run", lambda run: 0)
    scene.delta(4, {1: 40.0})
    scene.delta(5, {1: 50.0})
    scene.is_in("waiting", "faster than they are folded")
    refuse[0] = False
    scene.reaches(5)
    scene.is_in("caught up", applied=2, parked=0)


def test_a_delta_from_a_topic_is_decoded_within_what_is_reserved(scene: Scene) -> None:
    decoding = scene.store.shared.decoding
    with decoding.reserved(decoding.total):
        scene.follow()
        scene.delta(4, {1: 40.0})
        scene.is_in("waiting", "being decoded")
    scene.reaches(4)
    scene.expect(1, 40.0)
    eventually(lambda: decoding.used == 0, "all of it is released")


def test_brokers_that_go_and_come_back(tmp_path: Path) -> None:
    cluster = Brokers()
    if not cluster.is_mock:
        pytest.skip("real brokers are not stopped")
    scene = Scene(tmp_path, cluster)
    scene.follow()
    scene.delta(4, {1: 40.0})
    scene.is_in("caught up")
    for number in (1, 2, 3):
        cluster.command(f"down {number}")
    scene.is_in("broker unreachable")
    for number in (1, 2, 3):
        cluster.command(f"up {number}")
    scene.delta(5, {1: 50.0})
    scene.reaches(5)
    scene.is_in("caught up")
    scene.close()
    cluster.close()


def test_the_writer_counts_on_from_the_topic(scene: Scene) -> None:
    scene.follow()
    with tierstore.KafkaDeltaWriter(scene.brokers.address, scene.topic, "ctr", next_seq=4, max_message=700) as writer:
        for value in (40.0, 50.0):
            with writer.delta() as new:
                new.upsert("item", np.arange(1, 60), rows("item", [value] * 59))
    scene.reaches(5)
    scene.expect(59, 50.0)
    with tierstore.KafkaDeltaWriter(scene.brokers.address, scene.topic, "ctr") as writer:
        assert writer.next_seq == 6
        with pytest.raises(tierstore.DeltaError, match="the headers say delta 6"):
            writer.send(delta(9, {1: 1.0}))
        assert writer.send(delta(6, {1: 60.0})) == 6
    scene.reaches(6)
    with pytest.raises(NotFound, match="next_seq"):
        tierstore.KafkaDeltaWriter(scene.brokers.address, scene.topic, "other")


def test_a_writer_without_brokers_says_so() -> None:
    options = {"message.timeout.ms": 1000}
    writer = tierstore.KafkaDeltaWriter("127.0.0.1:1", "deltas", "ctr", next_seq=4, options=options)
    writer.send(delta(4, {1: 40.0}))
    with pytest.raises(tierstore.Unreachable, match="delta 4"):
        writer.flush(30)


def test_a_service_follows_a_topic_and_says_how_it_stands(tmp_path: Path, brokers: Brokers) -> None:
    topic = brokers.new_topic()
    settings = settings_for(tmp_path, kafka=brokers.address, kafka_topic=topic, grpc_port="off")
    assert settings_for(tmp_path, kafka_rewind_s="2h").kafka_rewind_s == 7200
    check_sources(settings)
    with Store(settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_snapshot(tmp_path, 1, delta_seq=3))
        producer = confluent_kafka.Producer({"bootstrap.servers": brokers.address})
        for seq in (4, 6):
            producer.produce(topic, delta(seq, {1: seq * 10.0}), headers={"model": "ctr", "seq": str(seq)})
        producer.flush(60)
        with tierstore.Client(server.url) as client:

            def problems() -> Any:
                return [text for text in client.status()["service"]["problems"] if "delta 5 is missing" in text]

            eventually(problems, "the gap among the problems")
            assert client.status()["service"]["kafka"]["state"] == "held up"
            metrics = httpx.get(f"{server.url}/metrics").text
            assert 'tierstore_kafka_state{state="held up"} 1.0' in metrics
            assert 'tierstore_kafka_held_up{model="ctr"} 1.0' in metrics
            assert "tierstore_kafka_applied_total 1.0" in metrics
            client.apply_delta(delta(5, {2: 50.0}))  # by another way than the topic
            eventually(lambda: store.model("ctr").log.last == 6, "the delta that waited")
            eventually(lambda: not client.status()["service"]["problems"], "no problem")


def test_a_topic_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        monkeypatch.setattr(reader, "METADATA_S", 0.5)  # no broker is there to answer
    name = REAL or "127.0.0.1:1"
    with Store(settings_for(tmp_path, kafka=name, kafka_topic="tierstore-no-such-topic")) as store:
        source = KafkaSource(store, store.settings)
        state = "unknown topic" if REAL else "broker unreachable"
        eventually(lambda: source.status()["state"] == state, f"{state}; {source.status()}")
        source.close()


def test_bad_settings_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(tierstore.ConfigError, match="both or neither"):
        check_sources(settings_for(tmp_path, kafka="127.0.0.1:1"))
    options = tmp_path / "kafka.properties"
    for text, why in (("acks=0", "acks cannot be set"), ("no.such.name=1", "no.such.name"), ("nothing", "name=value")):
        options.write_text(f"# a comment\n\n{text}\n")
        with pytest.raises(tierstore.ConfigError, match=why):
            check_sources(settings_for(tmp_path, kafka="127.0.0.1:1", kafka_topic="t", kafka_config=options))


def test_the_program_of_the_page(scene: Scene) -> None:
    page = (Path(__file__).parents[3] / "docs/kafka.md").read_text(encoding="utf-8")
    program, _ = re.findall("```python\n(.*?)```", page, flags=re.DOTALL)
    program = program.replace("broker-1:9092", scene.brokers.address).replace("embeddings", scene.topic)
    given = {"changed_keys": [1], "changed_vectors": rows("item", [40.0]), "newest_event": 1.7e9}
    scene.follow()
    exec(program.replace("41821", "4"), {"tierstore": tierstore, **given})
    scene.reaches(4)
    scene.expect(1, 40.0)


@pytest.mark.thorough
def test_kills_lose_and_repeat_nothing() -> None:
    """The short form of `tools/kafka_chaos.py`."""
    command = [sys.executable, "-m", "tools.kafka_chaos", "--kills", "3", "--poison", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is as produced" in done.stdout


@pytest.mark.thorough
def test_each_delta_comes_in_once_wherever_the_process_ends(tmp_path: Path) -> None:
    """The short form of `tools/crash_kafka.py`."""
    with in_process(), Crash(tmp_path, seed=3) as test:
        test.round(2, most=6)
        assert test.applied > 0
        if test.records:
            assert test.points.total() == 7
        test.producer.digests["ads"][0] = "0" * 16  # it notices what is not as it was produced
        with pytest.raises(Wrong, match="delta 1 is not what was produced"):
            test._look(tmp_path / "disk", "signal")


def test_deltas_that_were_read_together_are_applied_together(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is logged with its own place in the topic, and one that is bad is parked in its turn."""
    runs: list[int] = []
    together = scene.store.apply_run

    def noted(*arguments: Any) -> int:
        runs.append(together(*arguments))
        return runs[-1]

    monkeypatch.setattr(scene.store, "apply_run", noted)
    for seq in range(5, 10):
        scene.delta(seq, {1: seq * 10.0, 100 + seq: float(seq)})
    scene.put(b"no delta", model="ctr", seq=10)
    scene.delta(11, {1: 110.0})
    scene.follow()
    scene.is_in("held up", "delta 4 is missing")
    scene.delta(4, {1: 40.0})
    scene.is_in("held up", "delta 10 is parked")
    scene.expect(1, 90.0)
    assert max(runs) == 6
    scene.expect(105, 5.0)
    log = scene.store.model("ctr").log
    where = scene.store.root.model("ctr")
    stored = [read_origin(where.log_entry(seq, str(log.digest(seq)))) for seq in range(4, 10)]
    assert [origin["offsets"] for origin in stored if origin] == [[7], [0], [1], [2], [3], [4]]
    assert [origin["resume"] for origin in stored if origin] == [{"0": n} for n in range(6)]
    scene.is_in("held up", applied=6, parked=1)
