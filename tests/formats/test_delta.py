"""A delta is read whole or refused whole, with the reason."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collisions import digest, pair
from tests.counts import few_or_many
from tests.formats.disks import FailingDisk
from tierstore.errors import DeltaError, InvalidInput, StorageError
from tierstore.formats import files
from tierstore.formats.delta.reader import DeltaTable, read_delta
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.types import KeyType

HEAD = {"model": "ctr", "seq": "41821", "event_time": "2026-11-20T02:00:00Z"}
Batches = list[tuple[str | None, pa.RecordBatch]]


def stream(batches: Batches, options: Any = None, schema: pa.Schema | None = None, **head: str | None) -> bytes:
    """One Arrow stream, made without the code under test. A head value of None leaves that one out."""
    metadata = {name: value for name, value in {**HEAD, **head}.items() if value is not None}
    schema = (schema or batches[0][1].schema).with_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for table, batch in batches:
            writer.write_batch(batch, custom_metadata=None if table is None else {"table": table})
    return sink.getvalue()


def rows(keys: Any = (1, 2), vectors: Any = ([1.0, 2.0], None), kind: Any = None, **others: Any) -> pa.RecordBatch:
    column = vectors if isinstance(vectors, pa.Array) else pa.array(vectors, kind or pa.list_(pa.float32()))
    return pa.record_batch(
        {"key": pa.array(keys) if not isinstance(keys, pa.Array) else keys, "vector": column, **others}
    )


def dense(*models: bytes | None, kind: Any = None) -> pa.RecordBatch:
    return pa.record_batch({"onnx": pa.array(models, kind or pa.binary())})


def as_dict(table: DeltaTable) -> dict[int, list[float] | None]:
    assert (table.keys[1:] > table.keys[:-1]).all()
    values = [None if gone else vector for gone, vector in zip(table.deleted, table.vectors.tolist(), strict=True)]
    return dict(zip(table.keys.tolist(), values, strict=True))


# what is good


def test_a_delta_by_hand() -> None:
    data = stream([("item", rows()), ("user", rows((7,), ([1.0],)))], base_version="20261120")
    delta = read_delta(data)
    assert (delta.model, delta.seq, delta.base_version) == ("ctr", 41821, 20261120)
    assert delta.event_time == datetime(2026, 11, 20, 2, tzinfo=UTC)
    assert delta.digest == xxhash.xxh3_64_hexdigest(data)
    assert delta.nbytes == len(data)
    assert delta.dense == {}
    assert {name: as_dict(table) for name, table in delta.tables.items()} == {
        "item": {1: [1.0, 2.0], 2: None},
        "user": {7: [1.0]},
    }
    assert delta.tables["item"].dim == 2
    assert delta.tables["item"].vectors[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.float16()),
        pa.list_(pa.float16(), 2),
    ],
)
def test_vectors_may_be_any_list_of_float32_or_float16(kind: pa.DataType) -> None:
    data = stream([("item", rows((3, 1, 2), ([1.0, 2.0], None, [3.0, 4.0]), kind))])
    table = read_delta(data).tables["item"]
    assert as_dict(table) == {1: None, 2: [3.0, 4.0], 3: [1.0, 2.0]}
    assert table.vectors.dtype == kind.value_type.to_pandas_dtype()


@pytest.mark.parametrize(
    ("keys", "key_type", "codes"),
    [
        (pa.array([-1, 5], pa.int64()), KeyType.INT64, [-1, 5]),
        (pa.array([5, 1 << 63], pa.uint64()), KeyType.UINT64, [-(1 << 63), 5]),
        (pa.array([5, 6], pa.int32()), KeyType.INT64, [5, 6]),
    ],
)
def test_integer_keys(keys: pa.Array, key_type: KeyType, codes: list[int]) -> None:
    table = read_delta(stream([("item", rows(keys))])).tables["item"]
    assert table.key is key_type
    assert table.keys.tolist() == codes


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_string_keys(kind: pa.DataType) -> None:
    table = read_delta(stream([("item", rows(pa.array(["b", "a"]).cast(kind), ([1.0], [2.0])))])).tables["item"]
    expected = {xxhash.xxh3_64_intdigest(b"b"): [1.0], xxhash.xxh3_64_intdigest(b"a"): [2.0]}
    assert {int(np.uint64(key & (1 << 64) - 1)): row for key, row in as_dict(table).items()} == expected


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_buffers(codec: str) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    assert as_dict(read_delta(stream([("item", rows())], options)).tables["item"]) == {1: [1.0, 2.0], 2: None}


def test_later_rows_win_over_batches_and_streams() -> None:
    first = stream([("item", rows((1, 2, 1), ([1.0], [2.0], [3.0]))), ("item", rows((2, 4), (None, [4.0])))], parts="2")
    second = stream([("item", rows((4, 9), ([5.0], [6.0]), pa.list_(pa.float16(), 1)))], parts="2")
    assert as_dict(read_delta(first + second).tables["item"]) == {1: [3.0], 2: None, 4: [5.0], 9: [6.0]}
    assert as_dict(read_delta(second + first).tables["item"]) == {1: [3.0], 2: None, 4: [4.0], 9: [6.0]}


def test_only_deletes_know_no_dim() -> None:
    for kind in (pa.list_(pa.float32()), pa.list_(pa.float32(), 7), pa.null()):
        table = read_delta(stream([("item", rows((2, 1), (None, None), kind))])).tables["item"]
        assert as_dict(table) == {1: None, 2: None}
        assert table.dim is None
        assert table.vectors.shape == (2, 0)


def test_a_delta_without_rows_is_a_delta() -> None:
    empty = rows(pa.array([], pa.int64()), ())
    assert read_delta(stream([], schema=empty.schema)).tables == {}
    table = read_delta(stream([("item", empty)])).tables["item"]
    assert len(table.keys) == len(table.deleted) == len(table.vectors) == 0


def test_heads_are_told_by_the_names_of_their_batches_and_null_takes_one_away() -> None:
    data = stream([("__dense__.cvr", dense(b"one")), ("__dense__", dense(None)), ("__dense__.a-5", dense(b"two"))])
    assert read_delta(data).dense == {"cvr": b"one", "": b"", "a-5": b"two"}
    writer = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    writer.dense(b"first", head="cvr")
    writer.dense(b"two", head="a-5")
    writer.dense(None)
    writer.dense(b"one", head="cvr")
    assert read_delta(writer.to_bytes()).dense == {"cvr": b"one", "": b"", "a-5": b"two"}
    with pytest.raises(InvalidInput, match="head name 'a b' is not allowed"):
        writer.dense(b"one", head="a b")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_the_last_dense_part_counts(kind: pa.DataType) -> None:
    data = stream([("__dense__", dense(b"one", kind=kind)), ("__dense__", dense(b"two", kind=kind))])
    delta = read_delta(data)
    assert delta.dense == {"": b"two"}
    assert delta.tables == {}


@pytest.mark.parametrize(
    "text", ["2026-11-20T02:00:00", "2026-11-20T03:00:00+01:00", "2026-11-20T02:00:00.000Z", "20261120T020000Z"]
)
def test_event_times(text: str) -> None:
    assert read_delta(stream([("item", rows())], event_time=text)).event_time == datetime(2026, 11, 20, 2, tzinfo=UTC)


def test_bytes_of_any_kind_and_files(tmp_path: Path) -> None:
    data = stream([("item", rows())])
    (tmp_path / "1.arrow").write_bytes(data)
    padded = memoryview(b"xyz" + data)[3:]
    for source in (data, bytearray(data), memoryview(data), padded, tmp_path / "1.arrow", str(tmp_path / "1.arrow")):
        assert read_delta(source).digest == xxhash.xxh3_64_hexdigest(data)
    with pytest.raises(StorageError, match=r"cannot read the delta .*2\.arrow: No such file"):
        read_delta(tmp_path / "2.arrow")


def test_the_result_shares_nothing_with_the_bytes() -> None:
    data = bytearray(stream([("item", rows((1, 2), ([1.0], [2.0])))]))
    table = read_delta(data).tables["item"]
    data[:] = bytes(len(data))
    assert as_dict(table) == {1: [1.0], 2: [2.0]}


# what is not


def test_cut_anywhere_it_is_refused() -> None:
    data = stream([("item", rows()), ("item", rows())], parts="2") + stream([("__dense__", dense(b"x"))], parts="2")
    read_delta(data)
    for end in range(len(data)):
        with pytest.raises(DeltaError):
            read_delta(data[:end])


def test_a_stream_cut_between_two_batches_is_refused() -> None:
    """Arrow's reader takes the end of the bytes for the end of the stream; here every stream has its mark."""
    data = stream([("item", rows())])
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    with pytest.raises(DeltaError, match="no end marker: the stream was cut"):
        read_delta(data[:-8])


GOOD = stream([("item", rows())])
INF = float("inf")
CASES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no bytes at all"),
    "garbage": (b"PAR1" * 100, "expected an Arrow IPC message at byte 0"),
    "trailing garbage": (GOOD + b"\0" * 8, f"expected an Arrow IPC message at byte {len(GOOD)}, got other bytes"),
    "trailing byte": (GOOD + b"x", "no end marker"),
    "only an end": (b"\xff\xff\xff\xff\0\0\0\0", "got an end marker"),
    "too few parts": (stream([("item", rows())], parts="2"), "expected 2 streams, as its metadata `parts` says, got 1"),
    "too many parts": (GOOD + GOOD, "expected 1 streams, as its metadata `parts` says, got 2"),
    "other seq": (stream([("item", rows())], parts="2") + stream([("item", rows())], parts="2", seq="5"), "its streams differ in model, seq"),
    "other time": (stream([("item", rows())], parts="2") + stream([("item", rows())], parts="2", event_time="2026-11-21"), "its streams differ"),
    "no model": (stream([("item", rows())], model=None), "expected schema metadata `model`, `seq` and `event_time`"),
    "no seq": (stream([("item", rows())], seq=None), "expected schema metadata"),
    "no time": (stream([("item", rows())], event_time=None), "expected schema metadata"),
    "bad model": (stream([("item", rows())], model="a b"), "model name 'a b' is not allowed"),
    "bad seq": (stream([("item", rows())], seq="-1"), "'seq': expected a decimal number from 1 to"),
    "seq 0": (stream([("item", rows())], seq="0"), "'seq': expected a decimal number from 1 to"),
    "seq too large": (stream([("item", rows())], seq=str(1 << 63)), "'seq': expected a decimal number from 1 to"),
    "seq not ASCII": (stream([("item", rows())], seq="٣"), "'seq': expected a decimal number"),
    "bad base": (stream([("item", rows())], base_version="x"), "'base_version': expected a decimal number"),
    "bad parts": (stream([("item", rows())], parts="0"), "'parts': expected a decimal number"),
    "bad time": (stream([("item", rows())], event_time="noon"), "expected an ISO 8601 time such as 2026-11-20T02:00:00Z, got 'noon'"),
    "no table": (stream([(None, rows())]), "does not name its table"),
    "bad table": (stream([("a/b", rows())]), "table name 'a/b' is not allowed"),
    "unknown column": (stream([("item", rows(extra=pa.array([1, 2])))]), "table 'item': expected columns 'key' and 'vector', got 'key' (int64), 'vector' (list<item: float>), 'extra' (int64)"),
    "no vector": (stream([("item", pa.record_batch({"key": [1]}))]), "table 'item': expected columns 'key' and 'vector'"),
    "null key": (stream([("item", rows()), ("item", rows((1, None)))]), "table 'item', row 3: key is null"),
    "float key": (stream([("item", rows((1.0, 2.0)))]), "table 'item': column 'key': expected int64, uint64 or string, got double"),
    "key types": (stream([("item", rows())], parts="2") + stream([("item", rows(("a", "b")))], parts="2"), "table 'item': column 'key': expected int64, got string"),
    "bad UTF-8": (stream([("item", rows(pa.array([b"a", b"\xff"])))]), "table 'item', row 1: string keys must be UTF-8"),
    "float64": (stream([("item", rows(kind=pa.list_(pa.float64())))]), "column 'vector': expected float32 or float16, got double"),
    "int vectors": (stream([("item", rows((1, 2), ([1, 2], None), pa.list_(pa.int32())))]), "expected a list or fixed-size list of floats, got list<item: int32>"),
    "no list": (stream([("item", rows((1, 2), pa.array([1.0, 2.0])))]), "expected a list or fixed-size list of floats, got double"),
    "two lengths": (stream([("item", rows((1, 2, 3), ([1.0, 2.0], None, [1.0])))]), "table 'item', row 2: expected a vector of 2 numbers, got 1"),
    "two lengths in two": (stream([("item", rows()), ("item", rows((3,), ([1.0],)))]), "table 'item', row 2: expected a vector of 2 numbers, got 1"),
    "empty vector": (stream([("item", rows((1,), ([],)))]), "expected a vector of 1 to 65536 numbers, got 0"),
    "null number": (stream([("item", rows((1, 2), (None, [1.0, None])))]), "table 'item', row 1: number 1 of the vector is null"),
    "NaN": (stream([("item", rows()), ("item", rows((3, 4), (None, [1.0, float("nan")])))]), "table 'item', row 3: the vector holds NaN or Inf"),
    "Inf": (stream([("item", rows((3, 4), ([INF, 1.0], None)))]), "table 'item', row 0: the vector holds NaN or Inf"),
    "half Inf": (stream([("item", rows((3,), ([-INF],), pa.list_(pa.float16(), 1)))]), "table 'item', row 0: the vector holds NaN or Inf"),
    "NaN replaced later": (stream([("item", rows((3, 3), ([INF], [1.0])))]), "table 'item', row 0: the vector holds NaN or Inf"),
    "dense rows": (stream([("__dense__", dense(b"a", b"b"))]), "table __dense__: expected one row, got 2 rows"),
    "dense empty": (stream([("__dense__", dense(b""))]), "table __dense__: expected an ONNX model, or null to take it away"),
    "head without a name": (stream([("__dense__.", dense(b"a"))]), "head name '' is not allowed"),
    "head with a dot": (stream([("__dense__.a.b", dense(b"a"))]), "head name 'a.b' is not allowed"),
    "dense none": (stream([("__dense__", dense())]), "table __dense__: expected one row, got 0 rows"),
    "dense text": (stream([("__dense__", dense("a", kind=pa.string()))]), "table __dense__: expected one binary column 'onnx', got 'onnx' (string)"),
    "dense columns": (stream([("__dense__", rows())]), "table __dense__: expected one binary column 'onnx'"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), CASES.values(), ids=CASES)
def test_a_bad_delta_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DeltaError) as refusal:
        read_delta(data)
    assert reason in str(refusal.value)


def test_metadata_that_is_not_utf8_is_refused() -> None:
    data = stream([("item", rows())], model="ABCDEFGH").replace(b"ABCDEFGH", b"\xffBCDEFGH")
    with pytest.raises(DeltaError, match="'model' is not UTF-8"):
        read_delta(data)


def test_of_two_strings_with_one_hash_the_last_rows_of_both_are_there() -> None:
    (a, b), (other, _) = pair(0), pair(1)
    names = [a, other, b, a, b, other, a]
    given = [[1.0], [2.0], [3.0], None, [5.0], None, [7.0]]
    table = read_delta(stream([("user", rows(names[:4], given[:4])), ("user", rows(names[4:], given[4:]))])).tables[
        "user"
    ]
    assert table.keys.tolist() == sorted([digest(a), digest(b), digest(other)])
    names = table.strings_at(np.arange(3)).to_pylist()
    assert dict(zip(names, table.deleted.tolist(), strict=True)) == {a: False, b: False, other: True}
    assert dict(zip(names, table.vectors[:, 0].tolist(), strict=True)) == {a: 7.0, b: 5.0, other: 0.0}
    assert len(read_delta(stream([("user", rows(["a", "a"], [[1.0], [2.0]]))])).tables["user"].keys) == 1


def test_what_would_not_fit_in_memory_is_refused_before_it_is_unpacked() -> None:
    zeros = rows(
        np.zeros(1 << 20, np.int64), pa.array(np.zeros((1 << 20, 4), np.float32).tolist(), pa.list_(pa.float32(), 4))
    )
    data = stream([("item", zeros)], pa.ipc.IpcWriteOptions(compression="zstd"))
    assert len(data) < 100_000
    with pytest.raises(DeltaError, match="would take more than 1000000 bytes in memory"):
        read_delta(data, max_decoded_bytes=1_000_000)


def test_a_few_rows_among_many_deletes_may_not_blow_up() -> None:
    """Answered deletes carry zeros, so a delete costs as much memory as a row."""
    data = stream([("item", rows(np.arange(100_000), [[0.5] * 1000] + [None] * 99_999))])
    assert len(data) < 2_000_000
    with pytest.raises(
        DeltaError, match="table 'item': its 100000 rows of 1000 numbers would take more than 50000000 bytes"
    ):
        read_delta(data, max_decoded_bytes=50_000_000)


# what DeltaWriter writes


KEYS = st.integers(-5, 5)
ROWS = st.lists(st.tuples(KEYS, st.none() | st.floats(-100, 100, width=16)), max_size=8)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["item", "user", "word", "raw"]), ROWS), max_size=8)
DIMS = {"item": 2, "user": 3, "word": 2, "raw": 2}


@settings(max_examples=few_or_many(40, 150))
@given(OPERATIONS, st.booleans())
def test_a_written_delta_reads_as_a_dict_of_its_last_rows(operations: Any, half: bool) -> None:
    expected: dict[str, dict[Any, float | None]] = {}
    writer = DeltaWriter(io.BytesIO(), model="ctr", seq=9, event_time="2026-11-20T02:00:00Z")
    for table, changes in operations:
        for key, value in changes:
            name: Any = f"k{key}" if table == "word" else key + 5 if table == "raw" else key
            key_type = "uint64" if table == "raw" else None
            expected.setdefault(table, {})[name] = value
            if value is None:
                writer.delete(table, [name], key=key_type)
            else:
                writer.upsert(
                    table, [name], np.full((1, DIMS[table]), value, np.float16 if half else np.float32), key=key_type
                )
    delta = read_delta(writer.to_bytes())
    assert delta.tables.keys() == expected.keys()
    for name, changes in expected.items():
        codes = {
            xxhash.xxh3_64_intdigest(k.encode()) if isinstance(k, str) else k % (1 << 64): v for k, v in changes.items()
        }
        got = as_dict(delta.tables[name])
        assert {k % (1 << 64): v and v[0] for k, v in got.items()} == codes
        assert all(v is None or len(v) == DIMS[name] for v in got.values())


def test_the_writer_writes_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "41821.arrow"

    def write(fail: bool = False) -> None:
        with DeltaWriter(path, model="ctr", seq=41821) as delta:
            delta.upsert("item", [1], [[1.0]])
            if fail:
                raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        write(fail=True)
    assert list(tmp_path.iterdir()) == []
    count = FailingDisk()
    with files.use(count):
        write()
    path.unlink()
    for fail_at in range(count.operations):
        with files.use(FailingDisk(fail_at)), pytest.raises(StorageError, match="injected failure"):
            write()
        assert path.exists() == (fail_at == count.operations - 1)
    assert as_dict(read_delta(path).tables["item"]) == {1: [1.0]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["41821.arrow"]


def test_the_writer_keeps_one_stream_a_schema() -> None:
    writer = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    for table, dim in (("a", 2), ("b", 2), ("c", 3)):
        writer.upsert(table, [1], np.ones((1, dim), np.float16))
    writer.delete("d", ["x"])
    writer.dense(b"onnx")
    data = writer.to_bytes()
    assert pa.ipc.open_stream(data).schema.metadata[b"parts"] == b"4"
    delta = read_delta(data)
    assert delta.tables.keys() == {"a", "b", "c", "d"}
    assert delta.tables["a"].vectors.dtype == np.float16
    assert delta.dense == {"": b"onnx"}


def test_the_writer_copies_what_it_is_given() -> None:
    writer = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    keys, vectors = np.array([1]), np.array([[1.0]], np.float32)
    writer.upsert("item", keys, vectors)
    keys[:], vectors[:] = 9, 9
    assert as_dict(read_delta(writer.to_bytes()).tables["item"]) == {1: [1.0]}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda d: d.upsert("item", [1], [1.0]), r"expected vectors of shape \[n, dim\], or .*got \[1\]"),
        (lambda d: d.upsert("item", [1, 2], [[1.0]]), r"expected vectors of shape \[2, dim\]"),
        (lambda d: d.upsert("item", [1], [[]]), "expected vectors of 1 to 65536 numbers, got 0"),
        (
            lambda d: (d.upsert("item", [1], [[1.0]]), d.upsert("item", [1], [[1.0, 2.0]])),
            "expected vectors of 1 numbers, got 2",
        ),
        (lambda d: d.upsert("item", [1, 2], [[1.0], [np.nan]]), "table 'item', row 1: the vector holds NaN or Inf"),
        (lambda d: d.upsert("item", [1], [["a"]]), r"expected vectors of shape .* got \[1, 1\] of <U1"),
        (
            lambda d: (d.delete("item", [1]), d.delete("item", ["a"])),
            "expected int64 keys, as came before, got string",
        ),
        (lambda d: d.delete("item", [1.5]), "got float"),
        (lambda d: d.delete("item", [1], key="int32"), "'int32' is not a valid KeyType"),
        (lambda d: d.delete("a/b", [1]), "not allowed"),
        (lambda d: (d.close(), d.delete("item", [1])), "written already"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(call: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        call(DeltaWriter(io.BytesIO(), model="ctr", seq=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "a b"),
        ("seq", 0),
        ("seq", True),
        ("seq", "5"),
        ("seq", 1 << 63),
        ("base_version", 0),
        ("event_time", "noon"),
    ],
)
def test_a_head_that_cannot_be_is_refused_at_once(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        DeltaWriter(io.BytesIO(), **{"model": "ctr", "seq": 1, field: value})


def test_keys_of_an_iterator_are_refused_since_they_are_read_twice() -> None:
    delta = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    for keys in (iter([1, 2]), (key for key in ["a", "b"])):
        with pytest.raises(InvalidInput, match=r"expected a sequence of .* keys, got"):
            delta.delete("item" if isinstance(keys, type(iter([]))) else "word", keys)


def test_keys_beyond_int64_in_a_list_are_uint64() -> None:
    delta = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    delta.upsert("item", [1, (1 << 64) - 1], [[1.0], [2.0]])
    assert read_delta(delta.to_bytes()).tables["item"].key is KeyType.UINT64
    with pytest.raises(InvalidInput, match="expected uint64 keys of 64 bits, got keys from -1 to 9223372036854775808"):
        DeltaWriter(io.BytesIO(), model="ctr", seq=1).upsert("item", [-1, 1 << 63], [[1.0], [2.0]])


def test_an_argument_of_another_kind_is_refused_by_its_name() -> None:
    writer: Any = DeltaWriter
    with pytest.raises(DeltaError, match="seq: expected an integer from 1"):
        writer(io.BytesIO(), model="ctr", seq=None)
    for target in (None, 5):
        with pytest.raises(DeltaError, match="target: expected a path, or a file that is open for writing"):
            writer(target, model="ctr", seq=1)
    with pytest.raises(DeltaError, match="dense: expected the path of an ONNX file, or its bytes"):
        writer(io.BytesIO(), model="ctr", seq=1).dense(5)
