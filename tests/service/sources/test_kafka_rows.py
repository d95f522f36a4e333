"""Rows from a Kafka topic: each counts once, in its order, whatever ends in between; what is no row, or does not fit, is parked."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests import int4_model
from tests.hashed_keys import FEATURES, vectors, write_hashed
from tests.kafka_broker import Brokers
from tests.service.conftest import eventually, settings_for
from tests.service.scenes import delta, write_small
from tests.service.sources.kafka_scenes import TopicScene, vector
from tierstore.errors import InvalidInput, Overloaded
from tierstore.kafka.reader import TopicReader
from tierstore.service.server import ServerThread
from tierstore.service.sources.kafka_routes import TopicRoute
from tierstore.service.sources.kafka_rows import RowTopic
from tierstore.service.sources.start import check_sources


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    cluster = Brokers()
    yield cluster
    cluster.close()


class RowScene(TopicScene):
    """A topic of rows of the table `item`."""

    source: RowTopic | None = None

    def __init__(self, root: Path, brokers: Any, partitions: int = 1, **settings: Any) -> None:
        topic, self.route = (
            settings.pop("topic", None) or brokers.new_topic(partitions),
            settings.pop("route", "=ctr/item"),
        )
        rows_of = {"kafka_rows": [topic + self.route], "kafka_rows_gather_s": 0.05}
        super().__init__(root, brokers, topic, **rows_of | settings)

    def follow(self) -> RowTopic:
        self.source = RowTopic(self.store, self.store.settings, TopicRoute.parse(self.topic + self.route))
        return self.source

    def put(self, key: object, value: bytes | None, *, partition: int = 0, **headers: str) -> None:
        raw = key if key is None or isinstance(key, bytes) else str(key).encode()
        self.producer.produce(self.topic, value, raw, partition=partition, headers=list(headers.items()))
        assert self.producer.flush(60) == 0

    def row(self, key: object, value: float, *, partition: int = 0, **fields: object) -> None:
        document = {"key": key, "vector": vector(value), "event_time": int(time.time() * 1000), **fields}
        self.put(key, json.dumps(document).encode(), partition=partition)

    def parked(self, count: int) -> list[dict[str, Any]]:
        eventually(lambda: len(self.store.parked()) == count, f"{count} to be parked; {self.store.parked()}")
        return self.store.parked()


@pytest.fixture
def scene(tmp_path: Path, brokers: Brokers) -> Iterator[RowScene]:
    made = RowScene(tmp_path, brokers)
    yield made
    made.close()


@pytest.fixture
def wide(tmp_path: Path, brokers: Brokers) -> Iterator[RowScene]:
    made = RowScene(tmp_path, brokers, partitions=3)
    yield made
    made.close()


def test_rows_become_deltas_and_a_tombstone_deletes(wide: RowScene) -> None:
    wide.follow()
    for key in range(1, 30):
        wide.row(key, key + 0.5, partition=key % 3)
    wide.row(3, 99.0, partition=0)
    wide.put(4, None, partition=1)
    wide.put(None, json.dumps({"key": 5, "vector": None}).encode(), partition=2)
    wide.expect(1, 1.5)
    wide.expect(29, 29.5)
    wide.expect(3, 99.0)
    wide.expect(4, None)
    wide.expect(5, None)
    status = wide.is_in("caught up", rows=32, deleted=2, parked=0, pending=0)
    log = wide.store.model("ctr").log
    assert log.last == 3 + status["deltas"]
    origin = log.newest_origin(f"kafka rows {wide.topic}")
    assert origin is not None
    assert set(origin["resume"]) == {"0", "1", "2"}
    assert wide.store.verify().ok


def test_changes_of_a_database_are_applied_and_deletions_in_each_form(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(
        tmp_path, brokers, kafka_rows_envelope="debezium", kafka_rows_key_format="json",
        kafka_rows_fields={"key": "item_id", "vector": "embedding"},
    )  # fmt: skip
    scene.follow()

    def change(op: str, key: int, value: float | None = None) -> None:
        before, after = (
            ({"item_id": key}, None) if value is None else (None, {"item_id": key, "embedding": vector(value)})
        )
        event = {"before": before, "after": after, "op": op, "source": {}, "ts_ms": 1}
        scene.put(
            json.dumps({"schema": {}, "payload": {"item_id": key}}).encode(),
            json.dumps({"schema": {}, "payload": event}).encode(),
        )

    change("r", 1, 10.0)
    change("c", 1001, 20.0)
    change("u", 2, 30.0)
    change("d", 3)
    scene.put(json.dumps({"schema": {}, "payload": {"item_id": 3}}).encode(), None)  # the tombstone behind it
    change("t", 4)
    scene.expect(1, 10.0)
    scene.expect(1001, 20.0)
    scene.expect(2, 30.0)
    scene.expect(3, None)
    scene.expect(4, 4.0)
    assert "truncated" in scene.parked(1)[0]["reason"]
    scene.is_in("caught up", rows=5, deleted=2)
    scene.close()


def test_a_row_that_is_marked_as_deleted_is_deleted(scene: RowScene) -> None:
    scene.follow()
    scene.row(17, 170.0)
    scene.expect(17, 170.0)
    scene.row(17, 170.0, __deleted="true")
    scene.expect(17, None)
    scene.row(17, 171.0, __deleted="false")
    scene.expect(17, 171.0)


def test_the_last_row_of_a_key_wins_within_a_delta(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(tmp_path, brokers)
    for value in (1.0, 2.0, 3.0):
        scene.row(7, value)
    scene.row(8, 1.0)
    scene.put(8, None)
    scene.put(9, None)
    scene.row(9, 9.0)
    scene.row(10, 1.0)
    scene.row(10, float("inf"))  # does not fit: the row before it counts
    scene.follow()  # all of it in one delta
    scene.expect(7, 3.0)
    scene.expect(8, None)
    scene.expect(9, 9.0)
    scene.expect(10, 1.0)
    scene.close()


def test_rows_of_a_table_of_four_bits_are_rounded_as_documented(tmp_path: Path, brokers: Brokers) -> None:
    model, scene = int4_model.Model(), RowScene(tmp_path, brokers, route="=ctr/even")
    scene.store.load_snapshot(model.snapshot(tmp_path / "four", 2, delta_seq=3))
    keys = np.arange(0, int4_model.ROWS + 20, 9)
    scene.follow()
    for key, row in zip(keys.tolist(), int4_model.vectors("even", 5, keys).tolist(), strict=True):
        scene.put(key, json.dumps({"key": key, "vector": row}).encode())
    scene.put(4, json.dumps({"key": 4, "vector": [65520.0] * 64}).encode())
    assert "too large for int4" in str(scene.parked(1))
    model.stamps["even"][keys] = 5
    served, last = scene.store.model("ctr"), keys[-1:]
    eventually(lambda: bool(np.array_equal(served.lookup("even", last), model.rows("even", last))), "the last row")
    model.check(served)
    scene.close()


def test_rows_of_hashed_keys_come_by_their_row_numbers(scene: RowScene) -> None:
    scene.store.load_snapshot(write_hashed(scene.root / "hashed", 2, delta_seq=3))
    scene.follow()
    model = scene.store.model("ctr")
    row, gone, beyond = FEATURES["by_seed"][2][0], FEATURES["word"][2][3], 1 << 62
    assert row != gone
    scene.put(row, json.dumps({"vector": [row + 100.0] * 4}).encode())
    scene.put(gone, None)
    scene.put(
        beyond, json.dumps({"vector": [7.0] * 4}).encode()
    )  # no row number: only a feature without a hash can ask for it
    scene.is_in("caught up", rows=3, deleted=1, parked=0, pending=0)
    expected = {number: 0.0 if number == gone else number + 100.0 * (number == row) for number in range(50)}
    for feature, (_, keys, rows_of_keys) in FEATURES.items():
        got, found = model.lookup(feature, keys, return_found=True)
        np.testing.assert_array_equal(got, vectors([expected[number] for number in rows_of_keys]), feature)
        assert found.tolist() == [number != gone for number in rows_of_keys], feature
    np.testing.assert_array_equal(model.lookup("row", [beyond]), vectors([7.0]))


def test_a_start_goes_on_behind_the_log_and_applies_nothing_twice(scene: RowScene) -> None:
    scene.follow()
    scene.row(1, 10.0)
    scene.row(2, 20.0)
    scene.expect(2, 20.0)
    scene.is_in("caught up", rows=2)
    (scene.store.root.kafka_rows(scene.topic, "ctr")).unlink()  # the log itself says it
    scene.reopen()
    scene.row(3, 30.0)
    scene.expect(3, 30.0)
    scene.is_in("caught up", rows=1)
    scene.expect(1, 10.0)


def test_rows_before_a_kill_count_once(scene: RowScene) -> None:
    source = scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    source.save = lambda: None  # type: ignore[method-assign] # as if the process ended before
    scene.row(2, 20.0)
    scene.expect(2, 20.0)
    last = scene.store.model("ctr").log.last
    scene.reopen()
    scene.is_in("caught up", rows=0)
    assert scene.store.model("ctr").log.last == last


def test_what_is_no_row_is_parked_and_stops_no_other(scene: RowScene) -> None:
    scene.follow()
    good = json.dumps({"vector": vector(1.0)}).encode()
    for key, value in (
        (1, b"{"),
        (1, b"[1]"),
        (1, json.dumps({"vectors": [1]}).encode()),
        (1, json.dumps({"vector": [1.0]}).encode()),
        (1, json.dumps({"vector": [*vector(1.0)[:-1], "x"]}).encode()),
        (1, json.dumps({"vector": [*vector(1.0)[:-1], None]}).encode()),
        (1, json.dumps({"vector": [*vector(1.0)[:-1], 1e39]}).encode()),
        (1, json.dumps({"vector": 5}).encode()),
        (1, json.dumps({"vector": vector(1.0), "event_time": "yesterday"}).encode()),
        (1, json.dumps({"key": 1.5, "vector": vector(1.0)}).encode()),
        (1, json.dumps({"key": True, "vector": vector(1.0)}).encode()),
        ("one", good),
        (1 << 63, good),
        (None, good),
        (b"\xff", good),
        (None, None),
    ):
        scene.put(key, value)
    scene.row(2, 20.0)
    scene.expect(2, 20.0)
    found = scene.parked(16)
    assert {(record["kind"], record["model"], record["seq"]) for record in found} == {("row", "ctr", None)}
    reasons = [record["reason"] for record in found]
    for number, words in enumerate((
        "JSON", "object", "'vectors'", "numbers, got 1", "got str in it", "got NoneType in it", "infinite", "got int",
        "event time", "float", "bool", "'one'", "9223372036854775808", "neither", "UTF-8", "neither",
    )):  # fmt: skip
        assert words in reasons[number], (words, reasons[number])
    assert scene.store.parked_payload(found[0]["id"]) == b"{"
    with pytest.raises(InvalidInput, match="produce the row again"):
        scene.store.retry_parked(found[0]["id"])
    last = scene.store.model("ctr").log.last
    for record in found:
        scene.store.skip_parked(record["id"])
    assert scene.store.model("ctr").log.last == last
    scene.expect(1, 1.0)  # as the snapshot has it
    scene.is_in("caught up", parked=0)


def test_too_many_parked_messages_stop_the_reading(scene: RowScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.service.sources.kafka_rows.MOST_PARKED", 3)
    scene.follow()
    for _ in range(3):
        scene.put(1, b"{")
    scene.is_in("held up", "3 messages are parked")
    scene.row(2, 20.0)
    time.sleep(0.3)
    assert scene.status()["rows"] == 0
    for record in scene.store.parked():
        scene.store.skip_parked(record["id"])
    scene.expect(2, 20.0)


def test_headers_say_model_and_table(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(tmp_path, brokers, route="")
    scene.follow()
    value = json.dumps({"vector": vector(5.0)}).encode()
    scene.put(5, value, model="ctr", table="item")
    scene.put("u9", json.dumps({"vector": vector(2.0, "user")}).encode(), model="ctr", table="user")
    scene.put(5, value, model="ctr", table="none")
    scene.put(5, value)
    scene.put(6, value, model="late", table="item")
    scene.expect(5, 5.0)
    eventually(lambda: scene.store.model("ctr").lookup("user", ["u9"]).sum() == sum(vector(2.0, "user")), "the user")
    reasons = sorted(record["reason"] for record in scene.parked(2))
    assert "no table 'none'" in reasons[1]
    assert "expected headers" in reasons[0]
    assert scene.is_in("caught up")["passed_over"] == {"late": 1}
    scene.store.load_snapshot(write_small(tmp_path, "late", "item"))
    eventually(lambda: scene.store.model("late").lookup("item_id", [6])[0, 0] == vector(5.0)[0], "what came before")
    scene.is_in("caught up", rows=3, rewinds=1)
    scene.close()


def test_a_model_that_is_loaded_after_its_topic_is_followed_gets_its_rows(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(tmp_path, brokers, empty=True)
    scene.row(1, 10.0)
    scene.row(2, 20.0)
    scene.follow()
    waits = scene.is_in("held up", "no such model is loaded yet")
    eventually(lambda: scene.status()["lag_messages"] == 2, f"what waits is counted; {waits}")
    scene.load()
    scene.expect(1, 10.0)
    scene.expect(2, 20.0)
    scene.row(3, 30.0)
    scene.expect(3, 30.0)
    scene.is_in("caught up", rows=3)
    eventually(lambda: scene.status()["lag_messages"] == 0, "nothing waits any more")
    scene.close()


def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = threading.Event()

    def nothing(*_: Any) -> list[Any]:
        stands.set()
        time.sleep(0.02)
        return []

    monkeypatch.setattr(TopicReader, "poll", nothing)
    assert stands.wait(60)  # a call that was under way would read the next message yet


def test_a_topic_that_stands_still_is_a_problem(scene: RowScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.kafka.reader.STANDS_S", 0.5)
    monkeypatch.setattr("tierstore.kafka.reader.LOOK_S", 0.1)
    source = scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    scene.is_in("caught up", rows=1)
    reader = type(source._thread.reader)
    read = reader.poll
    nothing_is_read(monkeypatch)
    scene.row(2, 20.0)
    scene.row(3, 30.0)
    status = scene.is_in("held up", f"{scene.topic}: partition 0 stands still at 1: 2 messages more are there")
    assert status["lag_messages"] == 2
    monkeypatch.setattr(reader, "poll", read)
    scene.expect(3, 30.0)
    scene.is_in("caught up", rows=3)


def test_deltas_of_another_sender_go_between(scene: RowScene) -> None:
    scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    scene.store.apply_delta(delta(scene.store.model("ctr").log.last + 1, {2: 20.0}))
    scene.row(3, 30.0)
    scene.expect(3, 30.0)
    scene.expect(2, 20.0)
    scene.is_in("caught up", rows=2, deltas=2)


def test_a_delta_that_failed_after_it_was_logged_is_not_made_again(
    scene: RowScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, fails = scene.store.apply_delta, [True]

    def failing(*arguments: Any, **options: Any) -> Any:
        result = apply(*arguments, **options)
        if fails.pop() if fails else False:
            raise Overloaded("no room", retry_after_s=0.1)
        return result

    monkeypatch.setattr(scene.store, "apply_delta", failing)
    scene.follow()
    scene.row(1, 10.0)
    scene.row(2, 10.0)
    scene.is_in("caught up", rows=2, pending=0)
    assert scene.store.model("ctr").log.last == 3 + scene.status()["deltas"]


def test_more_rows_than_a_delta_may_have_become_several(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(tmp_path, brokers, max_delta="8KiB")
    for key in range(1, 1000):
        scene.producer.produce(scene.topic, json.dumps({"vector": vector(key)}).encode(), str(key).encode())
    assert scene.producer.flush(60) == 0
    scene.follow()
    scene.expect(999, 999.0)
    scene.is_in("caught up", rows=999)
    for key in (1, 17, 500):
        scene.expect(key, float(key))
    scene.close()


def test_a_model_that_was_dropped_and_is_loaded_again_has_its_rows(scene: RowScene) -> None:
    scene.follow()
    scene.row(1, 10.0)
    scene.expect(1, 10.0)
    scene.store.deactivate("ctr")
    scene.store.drop("ctr", 1)
    scene.row(2, 20.0)
    eventually(lambda: "ctr" in scene.status()["held_up"], "nothing to apply to")
    scene.store.load_snapshot(scene.root / "ctr-1")
    scene.expect(1, 10.0)
    scene.expect(2, 20.0)


def test_a_service_reports_rows_and_their_freshness(tmp_path: Path, brokers: Brokers) -> None:
    scene = RowScene(tmp_path, brokers)
    check_sources(scene.store.settings)
    with scene.store as store, ServerThread(store) as server, tierstore.Client(server.url) as client:
        scene.row(1, 10.0)
        eventually(lambda: client.lookup("ctr", "item_id", [1])[0, 0] == vector(10.0)[0], "the row")
        eventually(
            lambda: client.status()["service"]["kafka_rows"]["topics"][scene.topic]["state"] == "caught up", "the state"
        )
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'tierstore_kafka_rows_rows_total{{topic="{scene.topic}"}} 1.0' in metrics
        assert f'tierstore_kafka_rows_freshness_seconds_count{{topic="{scene.topic}"}} 1.0' in metrics
        assert 'tierstore_delta_freshness_seconds_count{model="ctr"} 1.0' in metrics
        scene.put(2, b"{")
        eventually(lambda: client.parked(), "the parked row")


def test_the_program_of_the_page(scene: RowScene) -> None:
    page = (Path(__file__).parents[3] / "docs/kafka.md").read_text(encoding="utf-8")
    _, program = re.findall("```python\n(.*?)```", page, flags=re.DOTALL)
    program = program.replace("broker-1:9092", scene.brokers.address).replace("item-embeddings", scene.topic)
    scene.follow()
    scene.row(17, 1.0)
    exec(program, {"changed": {1: vector(10.0)}, "newest_event": "2026-11-24T12:00:00Z"})
    scene.expect(1, 10.0)
    scene.expect(17, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kafka_rows": ["a=b"]}, "TOPIC=MODEL/TABLE"),
        ({"kafka_rows": ["a=ctr/item", "a=ctr/user"]}, "each topic once"),
        ({"kafka_rows": ["a"], "kafka_topic": "a"}, "not both"),
        ({"kafka_rows": ["a"], "kafka": None}, "both or neither"),
        (
            {"kafka_rows": ["a"], "kafka_rows_format": "avro"},
            "schema.registry.url in kafka_config, or kafka_rows_schema",
        ),
        ({"kafka_rows": ["a"], "kafka_rows_format": "protobuf-raw"}, "needs its schema: set kafka_rows_schema"),
        ({"kafka_rows": ["a"], "kafka_rows_format": "avro", "kafka_rows_schema": "/no/such"}, "/no/such"),
        ({"kafka_rows": ["a"], "kafka_config": "schema.registry.url=registry:8081"}, "http or https URL"),
        ({"kafka_rows": ["a"], "kafka_config": "schema.registry.url=http://a:b@c"}, "basic.auth.user.info"),
        ({"kafka_rows": ["a"], "kafka_rows_fields": {"keys": "id"}}, "kafka_rows_fields"),
        (
            {
                "kafka_rows": ["a"],
                "kafka_rows_format": "protobuf",
                "kafka_config": "schema.registry.url=http://registry:8081",
                "kafka_rows_envelope": "debezium",
            },
            "have no envelope",
        ),
        ({"kafka_rows": ["a"], "remote": "redis://127.0.0.1:1"}, "kafka_rows and remote"),
        ({"kafka_rows": ["a"], "upstream": "http://127.0.0.1:1"}, "upstream"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    (tmp_path / "options").write_text(settings.get("kafka_config", ""))
    settings = {"kafka": "127.0.0.1:1", **settings, "kafka_config": tmp_path / "options"}
    with pytest.raises(tierstore.ConfigError, match=words):
        check_sources(settings_for(tmp_path, **settings))
