"""Rows as Kafka Connect and Debezium write them: a deletion is one in each of their forms, and what is no row is refused by
name.

The messages are as the documents of Debezium ("Data change events", "New Record State Extraction") and of Kafka
Connect's JsonConverter show them.
"""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tierstore.errors import DeltaError
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.row_formats import avro_decoder, json_decoder
from tierstore.kafka.row_messages import RowReader

NAMES = {"key": "item_id", "vector": "embedding"}
ROW = {"item_id": 17, "embedding": [1.5, -2.0]}
KEY = {"schema": {"type": "struct", "name": "shop.items.Key"}, "payload": {"item_id": 17}}
SOURCE = {"connector": "postgresql", "db": "shop", "table": "items", "ts_ms": 1_795_000_000_000, "snapshot": "false"}


def read(value: Any, key: Any = 17, *, envelope: Any = "none") -> tuple[Any, Any]:
    """(key, vector) of a message; of a tombstone for the value None."""
    data = b"" if value is None else json.dumps(value).encode()
    own = None if key is None else json.dumps(key).encode()
    message = KafkaMessage(0, 0, data, [], 1000, own, value is None)
    row = RowReader(json_decoder, json_decoder, NAMES, envelope).read("item", message)
    return row.key, None if row.vector is None else row.vector.tolist()


def with_schema(payload: Any) -> dict[str, Any]:
    return {"schema": {"type": "struct", "fields": [], "optional": True}, "payload": payload}


def event(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    return {
        "before": before,
        "after": after,
        "source": SOURCE,
        "op": op,
        "ts_ms": 1_795_000_000_001,
        "transaction": None,
    }


WRITTEN, GONE = (17, [1.5, -2.0]), (17, None)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ({"__deleted": "true"}, GONE),
        ({"__deleted": True}, GONE),
        ({"__deleted": "false"}, WRITTEN),
        ({"__deleted": False}, WRITTEN),
        ({"__deleted": None}, WRITTEN),
        ({"__op": "d"}, GONE),
        ({"op": "d"}, GONE),
        ({"__op": "d", "__deleted": "false"}, GONE),
        ({"__op": "c", "__deleted": "false"}, WRITTEN),
        ({"__op": "u"}, WRITTEN),
        ({"__op": "r"}, WRITTEN),
        ({"op": "m"}, WRITTEN),  # a field of the row itself
        ({"op": 5, "__op": None}, WRITTEN),
    ],
)
@pytest.mark.parametrize("envelope", ["none", "connect"])
def test_a_row_that_is_marked_as_deleted_is_deleted(mark: dict[str, Any], expected: Any, envelope: str) -> None:
    row = {**ROW, **mark}
    assert read(row, envelope=envelope) == expected
    if envelope == "connect":
        assert read(with_schema(row), KEY, envelope=envelope) == expected
        assert read(with_schema({"embedding": [1.5, -2.0], **mark}), KEY, envelope=envelope) == expected


def test_a_deleted_row_needs_no_vector() -> None:
    """Of a deleted row a database may log its key alone."""
    assert read({"item_id": 17, "embedding": None, "__deleted": "true"}) == GONE
    assert read({"item_id": 17, "__deleted": "true"}) == GONE
    assert read({"__deleted": "true"}, 17) == GONE


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"__deleted": "yes"}, "'__deleted': expected true or false, got 'yes'"),
        ({"__deleted": 1_795_000_000}, "'__deleted': expected true or false"),
        ({"__op": "t"}, "'__op' is 't', which is no row: its table was truncated"),
        ({"__op": "m"}, "'__op' is 'm', which is no row"),
    ],
)
def test_a_mark_that_is_neither_is_refused_by_name(mark: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaError, match=words):
        read({**ROW, **mark})


@pytest.mark.parametrize("wrap", [lambda found: found, with_schema], ids=["plain", "with a schema"])
@pytest.mark.parametrize("key", [17, KEY, {"item_id": 17}])
def test_debeziums_change_events(wrap: Any, key: Any) -> None:
    for op in ("c", "r", "u"):
        assert read(wrap(event(op, {"item_id": 17}, ROW)), key, envelope="debezium") == WRITTEN
    for before in (ROW, {"item_id": 17, "embedding": None}, {"embedding": None}, {}, None):
        assert read(wrap(event("d", before)), key, envelope="debezium") == GONE
    assert read(None, key, envelope="debezium") == GONE
    assert read(with_schema(None), key, envelope="debezium") == GONE
    assert read(with_schema(None), key, envelope="connect") == GONE
    for envelope in ("none", "connect", "debezium"):
        assert read(None, {"item_id": 17}, envelope=envelope) == GONE


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"source": SOURCE, "op": "t", "ts_ms": 1}, "`op` is 't', which is no row: its table was truncated"),
        ({"source": SOURCE, "op": "m", "ts_ms": 1, "message": {}}, "`op` is 'm', which is no row"),
        (event("x", ROW, ROW), "`op` is 'x', which is no row: expected one of c, r, u, or d"),
        (event("u", ROW, None), "the row in Debezium's `after`, got NoneType"),
        (event("c", None, '{"_id": 17}'), "the row in Debezium's `after`, got str"),  # of MongoDB
        (event("c", None, {"item_id": 17}), "expected a field 'embedding'"),
        (ROW, "expected Debezium's `op`, `before` and `after`"),
        ([1], "expected Debezium's `op`, `before` and `after`"),
        ({"ts_ms": 1}, "got 'ts_ms'"),  # a heartbeat
    ],
)
def test_what_is_no_change_of_a_row_is_refused_by_name(value: Any, words: str) -> None:
    for one in (value, with_schema(value)):
        with pytest.raises(DeltaError, match=words):
            read(one, KEY, envelope="debezium")


def test_an_envelope_that_is_not_set_is_named() -> None:
    with pytest.raises(DeltaError, match="kafka_rows_envelope = connect"):
        read(with_schema(ROW))
    with pytest.raises(DeltaError, match="kafka_rows_envelope = debezium"):
        read(event("u", None, ROW))
    with pytest.raises(DeltaError, match="kafka_rows_envelope = debezium"):
        read(with_schema(event("u", None, ROW)), KEY, envelope="connect")
    with pytest.raises(DeltaError, match=r"message's key.*kafka_rows_envelope = connect"):
        read(None, KEY)
    with pytest.raises(DeltaError, match="expected an object"):
        read([1])


def test_a_table_may_have_columns_of_these_names() -> None:
    assert read({**ROW, "schema": "public", "payload": [1]}) == WRITTEN
    assert read({**ROW, "schema": "public", "payload": [1]}, envelope="connect") == WRITTEN


def test_avros_marks_count_too() -> None:
    fastavro = pytest.importorskip("fastavro", reason="the extra `kafka` is not installed")
    schema = {
        "type": "record", "name": "Row", "fields": [
            {"name": "item_id", "type": "long"},
            {"name": "embedding", "type": {"type": "array", "items": "float"}},
            {"name": "__deleted", "type": ["null", "string"]},
        ],
    }  # fmt: skip
    reader = RowReader(avro_decoder(json.dumps(schema)), json_decoder, NAMES)
    for deleted, expected in (("true", None), ("false", [1.5, -2.0]), (None, [1.5, -2.0])):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), {**ROW, "__deleted": deleted})
        row = reader.read("item", KafkaMessage(0, 0, stream.getvalue(), [], 1000))
        assert (None if row.vector is None else row.vector.tolist()) == expected
