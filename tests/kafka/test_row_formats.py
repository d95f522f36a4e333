"""Rows as JSON, Avro and Protobuf, in Confluent's wire format by a registry, and without it by a file."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, DeltaError, Unreachable
from tierstore.formats.delta.reader import read_delta
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.registry import Registry
from tierstore.kafka.row_formats import (
    ProtobufFiles,
    avro_decoder,
    decoder,
    int64_decoder,
    json_decoder,
    registry_of,
    text_decoder,
)  # fmt: skip
from tierstore.kafka.row_messages import Row, RowReader, event_ms, fit, make_delta
from tierstore.types import KeyType, StorageDtype, TableSpec

fastavro = pytest.importorskip("fastavro", reason="the extra `kafka` is not installed")

NAMES = ("key", "vector", "event_time")
MOMENT = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
MOMENT_MS = int(MOMENT.timestamp() * 1000)
ROW = {
    "type": "record", "name": "Row", "namespace": "shop", "fields": [
        {"name": "key", "type": ["null", "long"]},
        {"name": "vector", "type": ["null", {"type": "array", "items": "float"}]},
        {"name": "event_time", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}  # fmt: skip


class Schemas:
    """A registry of the documented API: answers what it was given, counts, and may fail or want a password."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}  # documents, or bytes as they are
        self.asked: list[str] = []
        self.failing = False
        self.user: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                found = outer.answers.get(self.path)
                status = 500 if outer.failing else 404 if found is None else 200
                if outer.user is not None:
                    expected = f"Basic {base64.b64encode(outer.user.encode()).decode()}"
                    status = status if self.headers["Authorization"] == expected else 401
                found = {"error_code": 40403} if found is None else found
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def schemas() -> Iterator[Schemas]:
    server = Schemas()
    yield server
    server.close()


def avro(schema: Any, record: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), record)
    return stream.getvalue()


def framed(number: int, content: bytes) -> bytes:
    return b"\0" + struct.pack(">I", number) + content


def message(value: bytes | None, key: bytes | None = b"7") -> KafkaMessage:
    return KafkaMessage(0, 11, value or b"", [], 1234, key, value is None)


def row_file(**more: Any) -> descriptor_pb2.FileDescriptorProto:
    """`message Other {}`, `message Row { int64 key; repeated float vector; Timestamp event_time; message Inner { bytes vector; } }`"""
    file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="shop", syntax="proto3", **more)
    file.dependency.append("google/protobuf/timestamp.proto")
    file.message_type.add(name="Other").field.add(name="vector", number=1, type=1, label=3)
    kind = file.message_type.add(name="Row")
    kind.field.add(name="key", number=1, type=3, label=1)
    kind.field.add(name="vector", number=2, type=2, label=3)
    kind.field.add(name="event_time", number=3, type=11, label=1, type_name=".google.protobuf.Timestamp")
    kind.nested_type.add(name="Inner").field.add(name="vector", number=1, type=12, label=1)
    return file


def protobuf_row() -> bytes:
    """The row by its bytes, as the encoding's page has it: field 1 = 7, field 2 packed floats, field 3 a Timestamp."""
    moment = timestamp_pb2.Timestamp(seconds=MOMENT_MS // 1000).SerializeToString()
    return b"\x08\x07" + b"\x12\x08" + struct.pack("<2f", 1.5, -2) + b"\x1a" + bytes([len(moment)]) + moment


def said(row: Row) -> tuple[Any, ...]:
    """(table, key, numbers, milliseconds)"""
    return row.table, row.key, None if row.vector is None else row.vector.tolist(), row.event_ms


def test_avro_by_a_registry_is_asked_for_once(schemas: Schemas) -> None:
    schemas.answers["/schemas/ids/5"] = {"schema": json.dumps(ROW)}
    reader = RowReader(decoder("avro", NAMES, registry=Registry(schemas.url), schema=None), text_decoder, {})
    value = framed(5, avro(ROW, {"key": 7, "vector": [1.5, -2], "event_time": MOMENT}))
    for _ in range(3):
        row = reader.read("item", message(value))
    assert said(row) == ("item", 7, [1.5, -2.0], MOMENT_MS)
    assert schemas.asked == ["/schemas/ids/5"]
    gone = framed(5, avro(ROW, {"key": None, "vector": None, "event_time": MOMENT}))
    assert reader.read("item", message(gone))[:3] == ("item", "7", None)  # the message's own key
    assert said(reader.read("item", message(None))) == ("item", "7", None, 1234)
    for other, words in (
        (value + b"\0", "1 bytes more"),
        (value[:-9], "expected Avro"),
        (b"\1" + value[1:], "wire format"),
        (b"", "wire format"),
        (framed(6, b""), "no schema 6"),
    ):
        with pytest.raises(DeltaError, match=words):
            reader.read("item", message(other))


def test_a_registry_that_fails_is_not_the_rows_fault(schemas: Schemas) -> None:
    schemas.failing = True
    decode = decoder("avro", NAMES, registry=Registry(schemas.url), schema=None)
    with pytest.raises(Unreachable, match="answers 500"):
        decode(framed(5, b""))
    schemas.failing = False
    schemas.answers["/schemas/ids/5"] = {"schema": '"long"'}
    assert decode(framed(5, b"\x0e")) == 7
    with pytest.raises(Unreachable, match="does not answer"):
        decoder("avro", NAMES, registry=Registry("http://127.0.0.1:1"), schema=None)(framed(5, b""))


def chain(schemas: Schemas, count: int) -> dict[str, Any]:
    """A schema that refers to one that refers to one, and so on."""
    refers = [{"name": f"n{n}", "subject": f"s{n}", "version": 1} for n in range(count)]
    for n in range(count):
        schemas.answers[f"/subjects/s{n}/versions/1"] = {"schema": '"long"', "references": refers[n + 1 : n + 2]}
    return {"schema": '"long"', "references": refers[:1]}


NONSENSE: dict[str, Any] = {
    "deep": b"[" * 100_000,
    "deep within": b'{"schema": "x", "references": ' + b"[" * 100_000,
    "no object": [1],
    "nothing": {},
    "a schema that is no text": {"schema": {"type": "long"}},
    "a type that is no text": {"schema": '"long"', "schemaType": 5},
    "references that are none": {"schema": '"long"', "references": 5},
    "a reference without a name": {"schema": '"long"', "references": [{"subject": "s", "version": 1}]},
    "a reference with a name that is none": {
        "schema": '"long"', "references": [{"name": [], "subject": "s", "version": 1}],
    },
    "a subject that is none": {"schema": '"long"', "references": [{"name": "n", "subject": 7, "version": 1}]},
    "a version that leads elsewhere": {
        "schema": '"long"', "references": [{"name": "n", "subject": "s", "version": "1/../../../ids/5"}],
    },
    "a reference to itself": {"schema": '"long"', "references": [{"name": "s0", "subject": "s0", "version": 1}]},
    "more bytes than a schema has": b'{"schema": "' + b"x" * (17 << 20) + b'"}',
    "deep as a schema": {"schema": '{"type": "array", "items": ' * 5000},
    "half a character": {"schema": '"\ud800"'},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["avro", "protobuf"])
@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_what_a_registry_says_and_is_no_schema_is_the_fault_of_that_row(
    schemas: Schemas, kind: str, answer: Any
) -> None:
    schemas.answers["/schemas/ids/5"] = schemas.answers["/schemas/ids/5?format=serialized"] = answer
    schemas.answers["/subjects/s0/versions/1"] = {**answer, "schema": '"x"'} if isinstance(answer, dict) else answer
    reader = RowReader(decoder(kind, NAMES, registry=Registry(schemas.url), schema=None), text_decoder, {})
    with pytest.raises(DeltaError):
        reader.read("item", message(framed(5, b"\0\x0e")))
    assert len(schemas.asked) < 4


@pytest.mark.parametrize("count", [100, 979, 5000])
def test_a_chain_of_references_is_followed_up_to_a_bound(schemas: Schemas, count: int) -> None:
    schemas.answers["/schemas/ids/5"] = chain(schemas, count)
    decode = decoder("avro", NAMES, registry=Registry(schemas.url), schema=None)
    if count == 100:
        assert decode(framed(5, b"\x0e")) == 7
        return
    with pytest.raises(DeltaError, match="more than 200 references"):
        decode(framed(5, b"\x0e"))
    assert len(schemas.asked) <= 202


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": one, "type": kind} for one, kind in fields.items()]}


def laughs(depth: int) -> dict[str, Any]:
    """A record of two records of two records, and so on, which is no byte in all."""
    inner: Any = record("R0")
    for number in range(1, depth):
        inner = record(f"R{number}", first=inner, second=f"R{number - 1}")
    return inner


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        (record("N", next=["null", "N"]), b"\x02" * 300_000 + b"\0"),
        (record("N", next={"type": "array", "items": "N"}), b"\x02" * 300_000 + b"\0"),
        ({"type": "array", "items": "null"}, b"\xfe" + b"\xff" * 7 + b"\x7f\0"),
        ({"type": "array", "items": record("E")}, b"\xfe" + b"\xff" * 7 + b"\x7f\0"),
        ({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}, b"\xfe" + b"\xff" * 7 + b"\x7f\0"),
        ({"type": "array", "items": record("I", one="boolean", none="null")}, b"\x02\x01\0"),
        (laughs(60), b""),
    ],
    ids=["itself", "itself in a list", "nulls", "empty records", "no bytes", "a part of no bytes", "twice each"],
)
def test_a_schema_by_which_a_few_bytes_are_without_end_is_refused(schemas: Schemas, schema: Any, data: bytes) -> None:
    schemas.answers["/schemas/ids/5"] = {"schema": json.dumps(schema)}
    decode = decoder("avro", NAMES, registry=Registry(schemas.url), schema=None)
    with pytest.raises(DeltaError, match="Avro schema"):
        decode(framed(5, data))


@pytest.mark.parametrize(
    "kind",
    [
        ["null", {"type": "array", "items": ["null", "float"]}],
        {"type": "array", "items": {"type": "array", "items": "double"}},
        {"type": "map", "values": "null"},
        {"type": "array", "items": record("Pair", left=["null", "long"], right={"type": "map", "values": "bytes"})},
        record("Deep", one=record("Deeper", two={"type": "fixed", "name": "F", "size": 4}, three="F")),
        "null",
        {"type": "long", "logicalType": "timestamp-millis"},
        {"type": "enum", "name": "E", "symbols": ["A", "B"]},
    ],
)
def test_a_schema_as_trainers_have_them_is_taken(schemas: Schemas, kind: Any) -> None:
    schemas.answers["/schemas/ids/5"] = {"schema": json.dumps(record("Row", key="long", vector=kind))}
    decode = decoder("avro", NAMES, registry=Registry(schemas.url), schema=None)
    with pytest.raises(DeltaError, match="expected Avro"):
        decode(framed(5, b""))  # its content is none, which is looked at after the schema


def test_what_its_decoder_did_not_expect_is_the_fault_of_that_row(schemas: Schemas) -> None:
    file = row_file()
    file.message_type[1].field[1].type, file.message_type[1].field[1].label = 11, 1
    file.message_type[1].field[1].type_name = ".shop.Other"  # no list, and no moment
    schemas.answers["/schemas/ids/5"] = {
        "schemaType": "PROTOBUF", "schema": base64.b64encode(file.SerializeToString()).decode(),
    }  # fmt: skip
    schemas.answers["/schemas/ids/5?format=serialized"] = schemas.answers["/schemas/ids/5"]
    reader = RowReader(decoder("protobuf", NAMES, registry=Registry(schemas.url), schema=None), text_decoder, {})
    with pytest.raises(DeltaError, match="cannot be read"):
        reader.read("item", message(framed(5, b"\x02\x02" + b"\x08\x07\x12\0")))


def test_a_registry_with_a_password_and_references(schemas: Schemas) -> None:
    schemas.user = "reader:secret"
    vector = {"type": "record", "name": "Vector", "namespace": "shop", "fields": [{"name": "numbers", "type": "bytes"}]}
    outer = {"type": "record", "name": "Outer", "fields": [{"name": "vector", "type": "shop.Vector"}]}
    schemas.answers["/schemas/ids/9"] = {
        "schema": json.dumps(outer), "references": [{"name": "shop.Vector", "subject": "shop/Vector", "version": 3}],
    }  # fmt: skip
    schemas.answers["/subjects/shop%2FVector/versions/3"] = {"schema": json.dumps(vector)}
    options = {"schema.registry.url": schemas.url, "schema.registry.basic.auth.user.info": "reader:secret"}
    decode = decoder("avro", NAMES, registry=registry_of({**options, "security.protocol": "ssl"}), schema=None)
    assert decode(framed(9, b"\x04ab")) == {"vector": {"numbers": b"ab"}}
    with pytest.raises(Unreachable, match="401"):
        decoder("avro", NAMES, registry=Registry(schemas.url), schema=None)(framed(9, b""))
    with pytest.raises(ConfigError, match="no such property"):
        registry_of({**options, "schema.registry.ssl.keystore": "x"})


def test_protobuf_by_a_registry(schemas: Schemas) -> None:
    file = row_file()
    schemas.answers["/schemas/ids/5?format=serialized"] = {
        "schemaType": "PROTOBUF", "schema": base64.b64encode(file.SerializeToString()).decode()
    }  # fmt: skip
    reader = RowReader(decoder("protobuf", NAMES, registry=Registry(schemas.url), schema=None), text_decoder, {})
    at = b"\x02\x02"  # one number, 1: the second message type
    assert said(reader.read("item", message(framed(5, at + protobuf_row())))) == ("item", 7, [1.5, -2.0], MOMENT_MS)
    other = reader.read("item", message(framed(5, b"\0\x0a\x08" + struct.pack("<d", 3.0))))
    assert said(other) == ("item", "7", [3.0], 1234)
    inner = reader.read("item", message(framed(5, b"\x04\x02\0\x0a\x08" + struct.pack("<2f", 1, 2))))
    assert inner.vector.tolist() == [1, 2]
    for content, words in (
        (b"\x02\x08", "no message type"),
        (b"", "place of a Protobuf"),
        (b"\x02\x01", "place of a"),
        (at + b"\x08", "expected Protobuf"),
    ):
        with pytest.raises(DeltaError, match=words):
            reader.read("item", message(framed(5, content)))
    schemas.answers["/schemas/ids/6?format=serialized"] = {"schema": json.dumps(ROW)}
    with pytest.raises(DeltaError, match="expected PROTOBUF"):
        reader.read("item", message(framed(6, b"\0")))


def test_schemas_in_files(tmp_path: Path) -> None:
    (tmp_path / "row.avsc").write_text(json.dumps(ROW))
    files = descriptor_pb2.FileDescriptorSet(file=[row_file()])
    (tmp_path / "row.desc").write_bytes(files.SerializeToString())
    record = avro(ROW, {"key": 7, "vector": [1.5, -2], "event_time": MOMENT})
    by_name = f"{tmp_path}/row.desc#shop.Row"
    for kind, schema, value in (
        ("avro-raw", f"{tmp_path}/row.avsc", record),
        ("avro", f"{tmp_path}/row.avsc", framed(1, record)),
        ("protobuf-raw", by_name, protobuf_row()),
        ("protobuf", by_name, framed(1, b"\x02\x02" + protobuf_row())),
    ):
        reader = RowReader(decoder(kind, NAMES, registry=None, schema=schema), text_decoder, {})
        assert said(reader.read("item", message(value))) == ("item", 7, [1.5, -2.0], MOMENT_MS), kind
    (tmp_path / "bad.avsc").write_text('{"type": "nothing"}')
    for kind, schema, words in (
        ("avro-raw", "bad.avsc", "cannot be used"),
        ("avro-raw", "none.avsc", "No such file"),
        ("protobuf-raw", "row.avsc", "kafka_rows_schema"),
        ("protobuf-raw", "row.desc#shop.None", "no message type 'shop.None'"),
    ):
        with pytest.raises(ConfigError, match=words):
            decoder(kind, NAMES, registry=None, schema=f"{tmp_path}/{schema}")


def test_json_and_keys_and_names() -> None:
    names = {"key": "item_id", "vector": "embedding", "event_time": "ts"}
    reader = RowReader(json_decoder, json_decoder, names)
    value = json.dumps({"item_id": "a", "embedding": [1, 2.5], "ts": "2026-11-24 12:00:00"}).encode()
    for data in (value, framed(77, value)):
        assert said(reader.read("t", message(data))) == ("t", "a", [1, 2.5], MOMENT_MS)
    assert reader.read("t", message(None, b'{"item_id": 9, "shop": 1}')).key == 9
    assert reader.read("t", message(None, b'{"id": 9}')).key == 9
    with pytest.raises(DeltaError, match="'item_id'"):
        reader.read("t", message(None, b'{"id": 9, "shop": 1}'))
    assert int64_decoder(struct.pack(">q", -5)) == -5
    with pytest.raises(DeltaError, match="8 bytes"):
        int64_decoder(b"5")


@pytest.mark.parametrize(
    "value", [MOMENT_MS / 1000, MOMENT_MS // 1000, MOMENT_MS, MOMENT_MS * 1000, MOMENT_MS * 1_000_000, MOMENT,
              MOMENT.replace(tzinfo=None), "2026-11-24T12:00:00Z", "2026-11-24T13:00:00+01:00", "2026-11-24 12:00:00.000"]
)  # fmt: skip
def test_an_event_time_in_any_unit(value: Any) -> None:
    assert event_ms(value) == MOMENT_MS


@pytest.mark.parametrize("value", [-1, float("nan"), True, 1e30, "soon", "", "9999-12-31T23:59:59-14:00", [1], 1 << 80])
def test_what_is_no_event_time(value: Any) -> None:
    with pytest.raises(DeltaError, match="event time"):
        event_ms(value)


def spec(key: KeyType = KeyType.INT64, dtype: StorageDtype = StorageDtype.FLOAT32) -> dict[str, TableSpec]:
    return {"t": TableSpec("t", key, 2, dtype)}


def as_row(key: Any, vector: Any) -> Row:
    """What is read off a message of this key and vector."""
    reader = RowReader(lambda _: {"key": key, "vector": vector}, json_decoder, {})
    return reader.read("t", message(b""))


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        ([[1, 2], [3, 4]], "got list in it"),
        ([True, 0.5], "got bool in it"),
        ([1 << 2000, 1], "too large"),
        ({"a": 1, "b": 2}, "got dict"),
        (b"abc", "4 bytes a number"),
    ],
)
def test_what_is_no_vector(vector: Any, words: str) -> None:
    with pytest.raises(DeltaError, match=words):
        as_row(1, vector)


@pytest.mark.parametrize(
    ("key", "vector", "kind", "dtype", "words"),
    [
        (1, [1, 70000.0], KeyType.INT64, StorageDtype.FLOAT16, "too large"),
        (1, [1, float("nan")], KeyType.INT64, StorageDtype.FLOAT32, "NaN"),
        (1, [1, 1e39], KeyType.INT64, StorageDtype.FLOAT32, "infinite"),
        (1, b"abcd", KeyType.INT64, StorageDtype.FLOAT32, "got 1"),
        (1, [], KeyType.INT64, StorageDtype.FLOAT32, "got 0"),
        (-1, [1, 2], KeyType.UINT64, StorageDtype.FLOAT32, "-1"),
        (1, [1, 2], KeyType.STRING, StorageDtype.FLOAT32, "int"),
        (b"\xff", [1, 2], KeyType.STRING, StorageDtype.FLOAT32, "UTF-8"),
        ([1], [1, 2], KeyType.INT64, StorageDtype.FLOAT32, "dimension"),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_the_others_are_kept(
    key: Any, vector: Any, kind: KeyType, dtype: StorageDtype, words: str
) -> None:
    name: Callable[[int], Any] = str if kind is KeyType.STRING else int
    good = [as_row(name(number), [number, 0.5]) for number in range(10, 30)]
    (fitting,), ((bad, reason),) = fit([*good[:7], as_row(key, vector), *good[7:]], spec(kind, dtype))
    assert bad.key is key
    assert words in reason
    assert list(fitting.keys) == [row.key for row in good]
    assert np.array_equal(fitting.vectors[:, 0], np.arange(10, 30, dtype=np.float32))


@given(
    st.lists(st.tuples(st.sampled_from(["1", 1, 2, 3, "3"]), st.none() | st.integers(0, 99)), min_size=1, max_size=30),
    st.integers(1, 30),
)
def test_a_delta_of_rows_has_the_last_of_each_key(sent: list[tuple[Any, int | None]], at_once: int) -> None:
    """However many rows are fitted at once."""
    rows = [as_row(key, None if value is None else [value, 1]) for key, value in sent]
    fitted = [fit(rows[begin : begin + at_once], spec()) for begin in range(0, len(rows), at_once)]
    assert not any(bad for _, bad in fitted)
    tables = [part for parts, _ in fitted for part in parts]
    expected = {int(key): value for key, value in sent}
    table = read_delta(make_delta("m", 5, tables, 1000)).tables["t"]
    vectors = iter(table.vectors[~table.deleted] if table.dim else ())
    got = {
        int(key): None if deleted else int(next(vectors)[0])
        for key, deleted in zip(table.keys, table.deleted, strict=True)
    }
    assert got == expected


def test_keys_that_are_text_and_bytes_are_one() -> None:
    (fitting,), _ = fit([as_row(b"a", None), as_row("a", [1, 2])], spec(KeyType.STRING))
    table = read_delta(make_delta("m", 5, [fitting], 1000)).tables["t"]
    assert table.deleted.tolist() == [False]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*NAMES, "id"]), inner, max_size=4),
    max_leaves=12,
)


def takes_or_refuses(reader: RowReader, one: KafkaMessage, kind: KeyType) -> None:
    """A message becomes a row of a delta, or is refused by name."""
    try:
        row = reader.read("t", one)
    except DeltaError:
        return
    tables, bad = fit([row], spec(kind))
    assert len(tables) + len(bad) == 1
    make_delta("m", 1, tables, max(0, row.event_ms))


@given(JSON_VALUES, st.none() | JSON_VALUES, st.sampled_from(KeyType))
def test_any_json_is_taken_or_refused(value: Any, key: Any, kind: KeyType) -> None:
    own = None if key is None else json.dumps(key).encode()
    takes_or_refuses(RowReader(json_decoder, json_decoder, {}), message(json.dumps(value).encode(), own), kind)


@given(st.binary(max_size=60), st.none() | st.binary(max_size=12), st.sampled_from(KeyType))
def test_any_bytes_are_taken_or_refused(value: bytes, key: bytes | None, kind: KeyType) -> None:
    kinds = [json_decoder, text_decoder, int64_decoder, _avro(), _protobuf()]
    for decode in kinds:
        for own in kinds[:3]:
            takes_or_refuses(RowReader(decode, own, {}), message(value, key), kind)


@cache
def _avro() -> Callable[[bytes], Any]:
    return avro_decoder(json.dumps(ROW))


@cache
def _protobuf() -> Callable[[bytes], Any]:
    files = descriptor_pb2.FileDescriptorSet(file=[row_file()]).file
    google = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return ProtobufFiles([google, *files]).decoder(NAMES, message="shop.Row")


@pytest.mark.parametrize(("kind", "bytes_of_op", "deleted"), [(9, b"d", True), (9, b"u", False), (12, b"d", False)])
def test_a_mark_of_protobuf_counts_where_it_is_text(kind: int, bytes_of_op: bytes, deleted: bool) -> None:
    """Field 4 is `op`, as `string` (9) or `bytes` (12), of which the second is a field of somebody's own."""
    file = row_file()
    file.message_type[1].field.add(name="op", number=4, type=kind, label=1)
    google = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    reader = RowReader(ProtobufFiles([google, file]).decoder(NAMES, message="shop.Row"), text_decoder, {})
    row = reader.read("item", message(protobuf_row() + b"\x22" + bytes([len(bytes_of_op)]) + bytes_of_op))
    assert said(row) == ("item", 7, None if deleted else [1.5, -2.0], MOMENT_MS)
