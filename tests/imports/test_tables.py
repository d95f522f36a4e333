"""What other tools hold or leave becomes a snapshot, each row where it belongs, or is refused by file, row and reason."""

from __future__ import annotations

import decimal
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

import tierstore
from tests.formats.shards import save_hugectr
from tests.formats.test_directories import DIM, DIRECTORIES, KEYS, VECTORS, N, as_spark, frame
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.snapshot.reader import Snapshot, open_snapshot
from tierstore.imports.tables import LeftOut, import_table, import_tables
from tierstore.imports.tables_file import TablesFile
from tierstore.types import KeyHash, KeyType

COLUMNS = {"key": "item_id", "vector": "embedding"}
ROWS = dict(zip(KEYS.tolist(), VECTORS.tolist(), strict=True))


def rows_of(where: Path, table: str = "item") -> dict[Any, list[float]]:
    snapshot = open_snapshot(where)
    rows: dict[Any, list[float]] = {}
    for shard_no in range(len(snapshot.manifest.table(table).shards)):
        snapshot.check_checksum(table, shard_no)
        for batch in snapshot.batches(table, shard_no):
            keys = batch.keys.tolist() if batch.strings is None else batch.strings.to_pylist()
            rows.update(zip(keys, batch.vectors.tolist(), strict=True))
    return rows


def imported(source: Any, where: Path, **options: Any) -> Snapshot:
    out = import_table(source, model="ctr", table="item", out=where, **{**COLUMNS, **options})
    assert out == where
    return open_snapshot(where)


@pytest.mark.parametrize("write", DIRECTORIES.values(), ids=DIRECTORIES)
def test_directories(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "items")
    imported(tmp_path / "items", tmp_path / "s")
    assert rows_of(tmp_path / "s") == ROWS


VECTOR_TYPES = {"lists": pa.list_(pa.float32()), "fixed-size lists": pa.list_(pa.float32(), 2)}


def test_a_null_among_duckdbs_arrays_is_named_with_what_to_do(tmp_path: Path) -> None:
    """DuckDB writes such a Parquet file with levels that Arrow refuses; as a relation, and as lists, it is read."""
    rows = "(VALUES (1, [1.0, 1.0]), (2, NULL), (3, [3.0, 3.0])) AS items(item_id, embedding)"
    for kind in ("FLOAT[2]", "FLOAT[]"):
        items = duckdb.sql(f"SELECT item_id, embedding::{kind} AS embedding FROM {rows}")
        file = str(tmp_path / f"{kind}.parquet")
        items.write_parquet(file)
        imported(items, tmp_path / "relation", on_null="skip")
        assert rows_of(tmp_path / "relation") == {1: [1, 1], 3: [3, 3]}
        shutil.rmtree(tmp_path / "relation")
        if kind == "FLOAT[2]":
            with pytest.raises(SnapshotError, match=r"FLOAT\[2\]\.parquet: .*; in DuckDB, write lists .*::FLOAT\[\]"):
                imported(file, tmp_path / "s", on_null="skip")
        else:
            imported(file, tmp_path / "s", on_null="skip")
            assert rows_of(tmp_path / "s") == {1: [1, 1], 3: [3, 3]}


@pytest.mark.parametrize("kind", VECTOR_TYPES.values(), ids=VECTOR_TYPES)
@pytest.mark.parametrize("keys", [[7, None, 8, 9, 7, 9], ["a", None, "ü", "c", "a", "c"]], ids=["numbers", "strings"])
def test_rows_with_nulls_and_earlier_rows_of_a_key_are_left_out(tmp_path: Path, keys: Any, kind: pa.DataType) -> None:
    vectors = [[1, 1], [2, 2], [3, None], None, [5, 5], [6, 6]]
    for part in (0, 1):  # over two files, the second with a key of the first
        rows = slice(3 * part, 3 * part + 3)
        columns = {"item_id": pa.array(keys[rows]), "embedding": pa.array(vectors[rows], kind)}
        (tmp_path / "items").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / f"items/{part}.parquet")
    with pytest.raises(SnapshotError, match="null"):
        imported(tmp_path / "items", tmp_path / "refused")
    left: list[LeftOut] = []
    imported(tmp_path / "items", tmp_path / "s", on_null="skip", on_duplicate="last", left_out=left.append)
    assert rows_of(tmp_path / "s") == {keys[4]: [5, 5], keys[5]: [6, 6]}
    assert left == [LeftOut("item", nulls=3, duplicates=1)]


def test_a_bad_row_is_named_by_its_number_in_the_file_though_others_are_left_out(tmp_path: Path) -> None:
    columns = {"item_id": [1, None, 1, 2], "embedding": [[1.0], [2.0], [3.0], [float("inf")]]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    with pytest.raises(SnapshotError, match=r"items\.parquet, row 3: "):
        imported(tmp_path / "items.parquet", tmp_path / "s", on_null="skip", on_duplicate="last")


def test_a_reader_of_batches_cannot_be_read_twice(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="read twice"):
        imported(arrow().to_reader(), tmp_path / "s", on_duplicate="last")


def arrow() -> pa.Table:
    return pa.Table.from_pandas(frame(), preserve_index=False)


def as_stream(path: Path, compression: str | None = None) -> None:
    """Several batches, as `write` of a stream leaves them."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, arrow().schema, options=options) as stream:
        stream.write_table(arrow(), max_chunksize=7)


FILES: dict[str, Callable[[Path], object]] = {
    "arrow": as_stream,
    "ipc": lambda path: as_stream(path, "zstd"),
    "parquet": lambda path: frame().to_parquet(path),
    "feather": lambda path: feather.write_feather(arrow(), str(path)),
    "orc": lambda path: orc.write_table(arrow(), str(path)),
}


@pytest.mark.parametrize(("ending", "write"), FILES.items(), ids=FILES)
def test_files(tmp_path: Path, ending: str, write: Callable[[Path], object]) -> None:
    write(tmp_path / f"items.{ending}")
    imported(str(tmp_path / f"items.{ending}"), tmp_path / "s")
    assert rows_of(tmp_path / "s") == ROWS


def test_a_stream_of_arrow_that_was_cut_or_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    as_stream(tmp_path / "items/0.arrow")
    with pa.OSFile(str(tmp_path / "items/1.arrow"), "wb") as file:  # as Spark leaves parts without rows
        pa.ipc.new_stream(file, pa.schema([("item_id", pa.null())])).close()
    left: list[LeftOut] = []
    imported(tmp_path / "items", tmp_path / "s", on_duplicate="last", left_out=left.append, progress=lambda _: None)
    assert rows_of(tmp_path / "s") == ROWS
    assert left == [LeftOut("item", 0, 0)]
    content = (tmp_path / "items/0.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(SnapshotError, match=r"cut.arrow: cannot be read"):
        imported(tmp_path / "cut.arrow", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def in_duckdb() -> Any:
    return duckdb.sql("SELECT range * 7 AS item_id, [range / 2.0, range / 4.0, 0, 1]::FLOAT[4] AS embedding FROM range(100)")  # fmt: skip


def torch_columns() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return {"item_id": torch.tensor(KEYS), "embedding": torch.nn.Parameter(torch.tensor(VECTORS))}


FRAMES: dict[str, Callable[[], Any]] = {
    "pandas": frame,
    "pandas with keys as its index": lambda: frame().set_index("item_id"),
    "pandas in parts of an index": lambda: frame().sample(frac=1, random_state=1),
    "polars": lambda: pl.DataFrame({"item_id": KEYS, "embedding": VECTORS}),
    "polars lazy": lambda: pl.LazyFrame({"item_id": KEYS, "embedding": VECTORS}),
    "polars lists": lambda: pl.DataFrame({"item_id": KEYS, "embedding": VECTORS.tolist()}),
    "arrow table": arrow,
    "arrow batch": lambda: arrow().to_batches()[0],
    "arrow reader": lambda: arrow().to_reader(7),
    "arrow dataset": lambda: ds.dataset(arrow()),
    "arrays": lambda: {"item_id": KEYS, "embedding": VECTORS},
    "tensors": torch_columns,
}


@pytest.mark.parametrize("made", FRAMES.values(), ids=FRAMES)
def test_frames(tmp_path: Path, made: Callable[[], Any]) -> None:
    imported(made(), tmp_path / "s")
    assert rows_of(tmp_path / "s") == ROWS


def test_a_relation_of_duckdb(tmp_path: Path) -> None:
    imported(in_duckdb(), tmp_path / "s")
    assert rows_of(tmp_path / "s") == {i * 7: [i / 2, i / 4, 0, 1] for i in range(100)}


def udt(dense: bool = True) -> pa.Array:
    kind = pa.struct([("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))])  # fmt: skip
    rows = [{"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}]
    rows += [{"type": 1 if dense else 0, "size": 2, "indices": None, "values": [3.0, 4.0]}]
    return pa.array(rows, kind)


VECTOR_COLUMNS: dict[str, Any] = {
    "halves": pa.array([[1, 2], [3, 4]], pa.list_(pa.float16(), 2)),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([[1.0, 2.0], [3.0, 4.0]])),
    "views": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_view(pa.float32())),
    "spark's vectors": udt(),
}


@pytest.mark.parametrize("column", VECTOR_COLUMNS.values(), ids=VECTOR_COLUMNS)
def test_kinds_of_vectors(tmp_path: Path, column: Any) -> None:
    snapshot = imported(pa.table({"item_id": [5, 6], "embedding": column}), tmp_path / "s")
    assert rows_of(tmp_path / "s") == {5: [1.0, 2.0], 6: [3.0, 4.0]}
    halves = pa.types.is_fixed_size_list(column.type) and pa.types.is_float16(column.type.value_type)
    assert snapshot.manifest.table("item").dtype == ("float16" if halves else "float32")


def test_one_column_a_number(tmp_path: Path) -> None:
    numbers = {f"f{i}": np.array([i, i + 0.5]) for i in (10, 2, 0, 1)}
    table = pa.table({"item_id": [5, 6], **numbers, "fresh": ["x", "y"]})
    pq.write_table(table, tmp_path / "items.parquet")
    with pytest.raises(SnapshotError, match="column 'fresh': expected numbers, got string"):
        imported(tmp_path / "items.parquet", tmp_path / "bad", vector="f*")
    imported(tmp_path / "items.parquet", tmp_path / "s", vector="f[0-9]*")
    assert rows_of(tmp_path / "s") == {5: [0, 1, 2, 10], 6: [0.5, 1.5, 2.5, 10.5]}, "f2 comes before f10"
    imported(table.to_pandas(), tmp_path / "named", vector=["f10", "f0"])
    assert rows_of(tmp_path / "named") == {5: [10, 0], 6: [10.5, 0.5]}
    imported({"item_id": [5], "x": [1.0], "y": [2.0]}, tmp_path / "arrays", vector=["x", "y"])
    assert rows_of(tmp_path / "arrays") == {5: [1, 2]}


KEY_COLUMNS: dict[str, tuple[Any, KeyType, list[Any]]] = {
    "narrow": (pa.array([5, 6], pa.int16()), KeyType.INT64, [5, 6]),
    "unsigned": (pa.array([5, 1 << 63], pa.uint64()), KeyType.UINT64, [5, -(1 << 63)]),
    "decimal": (pa.array([decimal.Decimal(5), decimal.Decimal(6)], pa.decimal128(38, 0)), KeyType.INT64, [5, 6]),
    "text": (pa.array(["a", "ß"]), KeyType.STRING, ["a", "ß"]),
    "views of text": (pa.array(["a", "ß"], pa.string_view()), KeyType.STRING, ["a", "ß"]),
    "categories": (pd.Series(["a", "b"], dtype="category"), KeyType.STRING, ["a", "b"]),
    "categories of Polars": (pl.Series(["a", "ß"], dtype=pl.Categorical), KeyType.STRING, ["a", "ß"]),
    "categories of numbers": (pd.Series([5, 6], dtype="category"), KeyType.INT64, [5, 6]),
    "pandas' own integers": (pd.Series([5, 6], dtype="Int64"), KeyType.INT64, [5, 6]),
}


@pytest.mark.parametrize(("keys", "kind", "expected"), KEY_COLUMNS.values(), ids=KEY_COLUMNS)
def test_kinds_of_keys(tmp_path: Path, keys: Any, kind: KeyType, expected: list[Any]) -> None:
    snapshot = imported(pa.table({"item_id": keys, "embedding": [[1.0], [2.0]]}), tmp_path / "s")
    assert snapshot.manifest.table("item").key is kind
    assert rows_of(tmp_path / "s") == dict(zip(expected, [[1.0], [2.0]], strict=True))


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["a", "ß", "c"]), pl.String])
def test_rows_of_a_polars_frame_with_nulls_are_left_out(tmp_path: Path, kind: Any) -> None:
    words = pl.Series(["a", None, "ß", "a", "c"], dtype=pl.String).cast(kind)
    vectors = [[1.0], [2.0], [3.0], [4.0], None]
    left: list[LeftOut] = []
    frame = pl.DataFrame({"item_id": words, "embedding": vectors})
    imported(frame, tmp_path / "s", on_null="skip", on_duplicate="last", left_out=left.append)
    assert rows_of(tmp_path / "s") == {"a": [4.0], "ß": [3.0]}
    assert left == [LeftOut("item", nulls=2, duplicates=1)]


def test_a_key_that_comes_again_in_another_width_is_found(tmp_path: Path) -> None:
    for part, kind in enumerate((pa.int32(), pa.int64(), pa.decimal128(20, 0))):
        column = pa.array([7, 100 + part], pa.int64()).cast(kind)
        pq.write_table(pa.table({"item_id": column, "embedding": [[float(part)]] * 2}), tmp_path / f"{part}.parquet")
    imported(sorted(tmp_path.glob("*.parquet")), tmp_path / "s", on_duplicate="last")
    assert rows_of(tmp_path / "s") == {7: [2.0], 100: [0.0], 101: [1.0], 102: [2.0]}


def test_a_frame_with_columns_of_128_bits_is_refused_with_what_to_do(tmp_path: Path) -> None:
    keys = pl.Series([1, 2], dtype=pl.Int128)
    with pytest.raises(SnapshotError, match="cast columns of 128 bits to Int64"):
        imported(pl.DataFrame({"item_id": keys, "embedding": [[1.0], [2.0]]}), tmp_path / "s")


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_a_number_that_cannot_be_stored_is_named_by_row_and_value(tmp_path: Path, dtype: str) -> None:
    rows = pa.array([[1.0, 2.0], [3.0, 70000.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"item_id": [1, 2], "embedding": rows}), tmp_path / "items.parquet")
    with pytest.raises(
        SnapshotError, match=rf"items.parquet, row 1: .*overflows {dtype}: its number 1 is 70000.0 \(rows"
    ):
        imported(tmp_path / "items.parquet", tmp_path / "s", dtype=dtype)


def test_what_tierstore_has_written_below_a_directory_is_passed_over(tmp_path: Path) -> None:
    """As `tierstore import .` finds its own data directory, and the snapshots of earlier imports."""
    as_spark(tmp_path / "items")
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        imported(tmp_path, tmp_path / "snapshots/1")
        store.load_snapshot(tmp_path / "snapshots/1")
        imported(tmp_path, tmp_path / "snapshots/2")
    assert rows_of(tmp_path / "snapshots/2") == ROWS
    with pytest.raises(SnapshotError, match="data: is a data directory of tierstore: `tierstore export`"):
        imported(tmp_path / "data", tmp_path / "s")
    with pytest.raises(SnapshotError, match="snapshots/1: is a snapshot of tierstore: `tierstore load` loads it"):
        imported(tmp_path / "snapshots/1", tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"got none; passed over: .*snapshots/1, which is a snapshot of tierstore"):
        imported(tmp_path / "snapshots", tmp_path / "s")


def test_a_lock_of_another_tool_hides_nothing(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    (tmp_path / "items/LOCK").touch()
    with pytest.raises(SnapshotError, match=r"items/LOCK: expected \.parquet"):
        imported(tmp_path / "items", tmp_path / "s")


def test_keys_may_be_turned_into_another_type(tmp_path: Path) -> None:
    table = pa.table({"item_id": [5, 6], "embedding": [[1.0], [2.0]]})
    imported(table, tmp_path / "s", key_type="string")
    assert rows_of(tmp_path / "s") == {"5": [1.0], "6": [2.0]}
    assert imported(table, tmp_path / "u", key_type="uint64").manifest.table("item").key is KeyType.UINT64
    words = table.set_column(0, "item_id", [["5", "six"]])
    with pytest.raises(
        SnapshotError, match=r"row 1: column 'item_id': expected int64 keys: .*six.*; --key-type string"
    ):
        imported(words, tmp_path / "bad", key_type="int64")


def test_the_dim_of_hugectr_folders_is_read_from_them(tmp_path: Path) -> None:
    folder = tmp_path / save_hugectr()(tmp_path)
    assert imported(folder, tmp_path / "s").manifest.table("item").dim == 2
    (folder / "emb_vector").write_bytes(b"\0" * 39)
    with pytest.raises(SnapshotError, match="expected int64 keys and as many rows of float32; got 40 bytes"):
        imported(folder, tmp_path / "bad")


def test_what_the_table_becomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = int(datetime.now(UTC).strftime("%Y%m%d%H%M%S"))
    where = import_table(
        arrow(), model="ctr", table="item", feature="clicked", combiner="mean", padding_key=-1, default="mean",
        dtype="int8", delta_seq=7, **COLUMNS,
    )  # fmt: skip
    manifest = open_snapshot(where).manifest
    assert where == Path("snapshots") / "ctr" / str(manifest.version)
    assert before <= manifest.version <= int(datetime.now(UTC).strftime("%Y%m%d%H%M%S"))
    (table,), (feature,) = manifest.tables, manifest.features
    assert (table.name, table.dim, table.dtype, table.default) == ("item", DIM, "int8", "mean")
    assert (feature.name, feature.table, feature.combiner, feature.padding_key) == ("clicked", "item", "mean", -1)
    assert manifest.delta_seq == 7


def test_parts_that_do_not_agree_are_refused_by_file(tmp_path: Path) -> None:
    for i, keys in enumerate(([1, 2], ["a", "b"])):
        pq.write_table(pa.table({"item_id": keys, "embedding": [[1.0], [2.0]]}), tmp_path / f"{i}.parquet")
    paths = sorted(tmp_path.glob("*.parquet"))
    with pytest.raises(SnapshotError, match=r"1.parquet: expected int64 keys, as in earlier blocks, got string"):
        imported(paths, tmp_path / "s")
    pq.write_table(pa.table({"item_id": [3], "embedding": [[1.0, 2.0]]}), paths[1])
    with pytest.raises(
        SnapshotError, match=r"1.parquet, row 0: expected vectors of 1 numbers, as in earlier blocks, got 2"
    ):
        imported(paths, tmp_path / "s")
    assert not (tmp_path / "s").exists(), "nothing is left of it"


ITEMS = {"item_id": [1, 2, 3], "embedding": [[1.0], [2.0], [3.0]]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"item_id": [1, None, 3]},
            r"row 1: expected a key in column 'item_id', got null; --on-null skip .*counted from 0",
        ),
        ({"item_id": [1.0, 2.0, 3.0]}, "column 'item_id': expected keys that are integers or strings, got double"),
        ({"item_id": [[1], [2], [3]]}, "column 'item_id': expected keys that are integers or strings, got list"),
        ({"embedding": [[1.0], None, [3.0]]}, "row 1: column 'embedding': the vector is null; --on-null skip"),
        (
            {"embedding": [[1.0], [2.0], [None]]},
            "row 2: column 'embedding': number 0 of the vector is null; --on-null skip",
        ),
        (
            {"embedding": [[1.0], [2.0, 2.5], [3.0]]},
            "row 1: column 'embedding': the vector has 2 numbers, those before it 1",
        ),
        ({"embedding": [[1.0], [float("nan")], [3.0]]}, "row 1: the vector holds NaN or Inf, or overflows float32"),
        (
            {"embedding": ["[1.0]", "[2.0]", "[3.0]"]},
            r"column 'embedding': expected lists of numbers, got string; .*embedding::FLOAT\[\]",
        ),
        (
            {"embedding": [np.float32([1]).tobytes()] * 3},
            r"column 'embedding': expected lists of numbers, got binary; .*numpy.frombuffer",
        ),
        (
            {"embedding": pa.array([[], [], []], pa.list_(pa.float32()))},
            "row 0: the vector has no numbers, expected at least one",
        ),
        ({"embedding": [[[1.0]], [[2.0]], [[3.0]]]}, "column 'embedding': expected lists of numbers, got list<"),
        (
            {"embedding": [[decimal.Decimal("1.5")]] * 3},
            r"expected lists of numbers, got list<.*decimal.*; .*embedding::FLOAT\[\]",
        ),
    ],
)
def test_rows_that_cannot_be(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    pq.write_table(pa.table({**ITEMS, **change}), tmp_path / "items.parquet")
    with pytest.raises(SnapshotError, match=f"items.parquet.*{reason}"):
        imported(tmp_path / "items.parquet", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_sparse_vector_of_spark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SnapshotError, match=r"row 1: column 'embedding': expected dense vectors, got a sparse one; .*vector_to_array"
    ):
        imported(pa.table({"item_id": [1, 2], "embedding": udt(dense=False)}), tmp_path / "s")


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        (
            "items",
            {"key": "id"},
            r"expected one column 'id' for keys; there are item_id \(int64\), price \(double\), emb",
        ),
        ("items", {"vector": "vec"}, "expected one column 'vec' for vectors; there are item_id"),
        (
            "items",
            {"dtype": "float8"},
            "table 'item': dtype: expected float32, float16, bfloat16, int8, int4, got 'float8'",
        ),
        ("items", {"combiner": "avg"}, "table 'item': combiner of feature '.*': expected sum, mean, sqrtn, got 'avg'"),
        ("items", {"key_type": "int32"}, "key_type: expected int64, uint64, string, got 'int32'"),
        ("nowhere", {}, "nowhere: is missing"),
        ("empty", {}, "expected a directory with Parquet, Arrow or ORC files; got none"),
        ("notes", {}, "notes.csv: expected .parquet, .*got .csv; DuckDB or pandas can convert"),
        ("broken", {}, "broken.parquet: cannot be read"),
        ("none", {}, "expected at least one row, to know the length of a vector; got none"),
    ],
)
def test_sources_that_cannot_be(tmp_path: Path, source: str, options: dict[str, Any], reason: str) -> None:
    as_spark(tmp_path / "items")
    (tmp_path / "empty").mkdir()
    for file, content in (("notes/notes.csv", b"a,b"), ("broken/broken.parquet", b"PAR1 but not really")):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(content)
    (tmp_path / "none").mkdir()
    pq.write_table(arrow().slice(0, 0), tmp_path / "none" / "part-0.parquet")
    with pytest.raises(SnapshotError, match=reason):
        imported(tmp_path / source, tmp_path / "s", **options)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (5, "expected paths, a data frame .*, got int; write it as Parquet"),
        ({"item_id": [1]}, "expected a column 'embedding'; there are 'item_id'"),
        ({"item_id": [1, 2], "embedding": [[1.0]]}, "expected a vector for each key, got 2 keys and 1 vectors"),
    ],
)
def test_data_that_cannot_be(tmp_path: Path, source: Any, reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        imported(source, tmp_path / "s")


def test_an_import_never_writes_over_a_snapshot(tmp_path: Path) -> None:
    imported(arrow(), tmp_path / "s")
    with pytest.raises(SnapshotError, match="holds a snapshot already"):
        imported(arrow(), tmp_path / "s")
    assert rows_of(tmp_path / "s") == ROWS


TABLES = """
model = "ctr"
version = 5
delta_seq = 3

[tables.item]
path = "items"
key = "item_id"
vector = "embedding"
dtype = "float16"
[tables.item.features]
item_id = {}
clicked = { combiner = "mean", padding_key = 0 }
any_id = { hash = { mod = 50, seed = 7 } }

[tables.word]
path = ["words.parquet"]
key = "word"
vector = "f*"
default = [0.5, 1.5]
"""


def test_several_tables_of_one_file(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    pq.write_table(pa.table({"word": ["a", "b"], "f0": [1.0, 2.0], "f1": [3.0, 4.0]}), tmp_path / "words.parquet")
    (tmp_path / "tables.toml").write_text(TABLES)
    file = TablesFile.read(tmp_path / "tables.toml")
    assert (file.model, file.version, file.delta_seq) == ("ctr", 5, 3)
    out = import_tables(file.sources(tmp_path), model="ctr", out=tmp_path / "s", version=5, delta_seq=3)
    manifest = open_snapshot(out).manifest
    assert [(table.name, table.key, table.dtype, table.rows) for table in manifest.tables] == [
        ("item", "int64", "float16", N),
        ("word", "string", "float32", 2),
    ]
    assert [(f.name, f.table, f.combiner, f.padding_key, f.spec().hash) for f in manifest.features] == [
        ("item_id", "item", None, None, None),
        ("clicked", "item", "mean", 0, None),
        ("any_id", "item", None, None, KeyHash(50, 7)),
        ("word", "word", None, None, None),
    ]
    assert rows_of(out, "word") == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tables = 1", "tables: "),
        ("[tables.item]\n", "tables.item.path: Field required"),
        ('[tables.item]\npath = "x"\nkeys = "id"', r"tables.item.keys: there is no such entry; did you mean .*key\b"),
        ('[tables.item]\npath = "x"\nttl = "30d"', r"tables.item.ttl: there is no such entry; did you mean ttl_s"),
        ('[tables.item]\npath = "x"\nfeatures.f.combine = "sum"', r"features.f.combine: .* did you mean combiner\?"),
        ('[tables.item]\npath = "x"\nzzz = 1', r"tables.item.zzz: there is no such entry; there are path, key, vector"),
        ('modle = "m"\n[tables.item]\npath = "x"', r"modle: there is no such entry; did you mean model\?"),
        ('[tables.item]\npath = "x"\n[golden]\npath = "x"\nrtoll = 1', r"golden.rtoll: .* did you mean rtol"),
        ("not toml", "cannot be read"),
    ],
)
def test_a_file_of_tables_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "tables.toml").write_text(text)
    with pytest.raises(SnapshotError, match=f"tables.toml: .*{reason}"):
        TablesFile.read(tmp_path / "tables.toml")


def test_progress_counts_the_rows(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    steps: list[Any] = []
    import_table(tmp_path / "items", model="ctr", table="item", out=tmp_path / "s", progress=steps.append, **COLUMNS)
    assert [(step.phase, step.done, step.total) for step in steps] == [("import", n, N) for n in (25, 50, 75, 100)]


def test_it_is_served(tmp_path: Path) -> None:
    where = import_table(frame(), model="ctr", table="item", out=tmp_path / "s", combiner="sum", **COLUMNS)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(where)
        rows, found = store.model("ctr").lookup("item", [*KEYS.tolist(), 5], return_found=True)
        assert rows[:-1].tolist() == VECTORS.tolist()
        assert found.tolist() == [True] * N + [False]


# --- rows that expire


def times_in(where: Path) -> dict[int, int]:
    (batch,) = open_snapshot(where).batches("item", 0)
    assert batch.times is not None
    return dict(zip(batch.keys.tolist(), batch.times.tolist(), strict=True))


SEEN = [datetime(2026, 11, 20, tzinfo=UTC), datetime(2026, 11, 21, 0, 0, 9, tzinfo=UTC)]
TIMED = {"item_id": [1, 2], "embedding": [[1.0, 2.0], [3.0, 4.0]], "seen": SEEN}


@pytest.mark.parametrize("form", ["frame", "polars", "parquet", "columns", "seconds"])
def test_times_of_rows_are_imported(tmp_path: Path, form: str) -> None:
    source: Any = pd.DataFrame(TIMED)
    if form == "polars":
        source = pl.DataFrame(TIMED)
    elif form == "parquet":
        pd.DataFrame(TIMED).to_parquet(tmp_path / "items.parquet")
        source = tmp_path / "items.parquet"
    elif form == "columns":
        source = {name: np.array(column) if name != "seen" else column for name, column in TIMED.items()}
    elif form == "seconds":
        source = pd.DataFrame({**TIMED, "seen": [moment.timestamp() for moment in SEEN]})
    manifest = imported(source, tmp_path / "s", ttl_s="30d", time_column="seen").manifest
    assert (manifest.table("item").ttl_s, manifest.table("item").time_column) == (2_592_000, "time")
    assert times_in(tmp_path / "s") == {1: int(SEEN[0].timestamp()), 2: int(SEEN[1].timestamp())}


def test_without_a_column_the_time_is_that_of_the_import(tmp_path: Path) -> None:
    manifest = imported(pd.DataFrame(TIMED), tmp_path / "s", ttl_s=60).manifest
    assert manifest.created_at is not None
    assert set(times_in(tmp_path / "s").values()) == {int(manifest.created_at.timestamp())}


@pytest.mark.parametrize(
    ("seen", "options", "reason"),
    [
        (SEEN, {"ttl_s": "1d", "time_column": "when"}, "expected one column 'when' for times; there are item_id"),
        (SEEN, {"time_column": "seen"}, "time_column: of no use without ttl_s"),
        (SEEN, {"ttl_s": "soon"}, "expected seconds, or a time such as 30d"),
        ([SEEN[0], None], {"ttl_s": "1d", "time_column": "seen"}, "row 1: column 'seen': time is null"),
        (["yesterday", "today"], {"ttl_s": "1d", "time_column": "seen"}, "column 'seen': expected seconds since 1970"),
    ],
)
def test_times_that_cannot_be_are_refused(tmp_path: Path, seen: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError) as refused:
        imported(pa.table({**TIMED, "seen": seen}), tmp_path / "s", **options)
    assert reason in str(refused.value)
    assert not (tmp_path / "s").exists()


def test_a_checkpoint_has_no_times(tmp_path: Path) -> None:
    (tmp_path / "item").mkdir()
    np.array([1, 2]).tofile(tmp_path / "item" / "key")
    np.ones((2, 3), np.float32).tofile(tmp_path / "item" / "emb_vector")
    with pytest.raises(SnapshotError, match="expected a column 'seen' for times, which a checkpoint does not have"):
        imported(tmp_path / "item", tmp_path / "s", ttl_s="1d", time_column="seen")
    imported(tmp_path / "item", tmp_path / "s", ttl_s="1d")
    assert len(times_in(tmp_path / "s")) == 2


def test_a_file_of_tables_says_what_expires(tmp_path: Path) -> None:
    pd.DataFrame(TIMED).to_parquet(tmp_path / "items.parquet")
    text = 'ttl_s = "2w"\ntime_column = "seen"\nkey = "item_id"\nvector = "embedding"\n'
    (tmp_path / "tables.toml").write_text(f'[tables.item]\npath = "items.parquet"\n{text}')
    sources = TablesFile.read(tmp_path / "tables.toml").sources(tmp_path)
    import_tables(sources, model="ctr", out=tmp_path / "s")
    assert open_snapshot(tmp_path / "s").manifest.table("item").ttl_s == 14 * 86400
    assert times_in(tmp_path / "s")[2] == int(SEEN[1].timestamp())


class OthersDataset(ds.Dataset):
    """A dataset of somebody else's, who implements Arrow's class and refuses what they do not have."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def scanner(self, **options: Any) -> ds.Scanner:
        if options:
            raise ValueError(f"{next(iter(options))} not supported")
        return ds.dataset(self._table).scanner()


def test_a_dataset_of_others_is_asked_for_nothing_that_they_may_not_have(tmp_path: Path) -> None:
    table = pa.table({"key": [1, 2], "vector": [[1.0, 2.0], [3.0, 4.0]]})
    import_table(OthersDataset(table), model="ctr", table="item", out=tmp_path / "s")
    assert rows_of(tmp_path / "s") == {1: [1.0, 2.0], 2: [3.0, 4.0]}


def test_a_dataset_of_vortex_is_read(tmp_path: Path) -> None:
    vortex = pytest.importorskip("vortex", reason="vortex-data is not installed")
    table = pa.table({"key": [1, 2], "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))})
    vortex.io.write(vortex.array(table), str(tmp_path / "a.vortex"))
    for source in (
        vortex.open(str(tmp_path / "a.vortex")).to_dataset(),
        vortex.open(str(tmp_path / "a.vortex")).to_arrow(),
    ):
        import_table(source, model="ctr", table="item", out=tmp_path / type(source).__name__)
        assert rows_of(tmp_path / type(source).__name__) == {1: [1.0, 2.0], 2: [3.0, 4.0]}
