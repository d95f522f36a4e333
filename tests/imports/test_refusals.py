"""What an import refuses rather than guesses: what no snapshot has, parts that do not agree, columns nobody meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.imports.test_tables import COLUMNS, imported, rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table


@pytest.mark.parametrize("types", [(pa.int64(), pa.uint64()), (pa.uint64(), pa.int64())], ids=["signed", "unsigned"])
def test_parts_with_integers_of_two_types_are_read_as_one_of_them(tmp_path: Path, types: tuple[Any, Any]) -> None:
    for i, kind in enumerate(types):
        columns = {"item_id": pa.array([i + 1, 1 << 62], kind).slice(0, 1), "embedding": [[float(i)]]}
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
    paths = sorted(tmp_path.glob("*.parquet"))
    with pytest.raises(SnapshotError, match=r"1.parquet: expected u?int64 keys, .*; --key-type uint64 .*, or int64"):
        imported(paths, tmp_path / "refused")
    imported(paths, tmp_path / "s", key_type="uint64")
    assert rows_of(tmp_path / "s") == {1: [0], 2: [1]}


def test_numbers_are_never_stored_narrower_than_a_later_part_has_them(tmp_path: Path) -> None:
    for i, kind in enumerate((pa.float16(), pa.float32())):
        vectors = pa.array([[0.1]], pa.list_(pa.float32())).cast(pa.list_(kind))
        pq.write_table(pa.table({"item_id": [i], "embedding": vectors}), tmp_path / f"{i}.parquet")
    paths = sorted(tmp_path.glob("*.parquet"))
    with pytest.raises(
        SnapshotError, match=r"1.parquet: expected float16 numbers, as in earlier blocks, got float32; --dtype"
    ):
        imported(paths, tmp_path / "refused")
    for dtype in ("float16", "float32"):
        assert imported(paths, tmp_path / dtype, dtype=dtype).manifest.table("item").dtype == dtype
    assert imported(paths[::-1], tmp_path / "s").manifest.table("item").dtype == "float32"
    assert rows_of(tmp_path / "s")[1] == [np.float32(0.1)]


def test_a_name_that_two_columns_have(tmp_path: Path) -> None:
    columns = [pa.array([1]), pa.array([[2.0]]), pa.array([5]), pa.array([6])]
    table = pa.table(columns, names=["item_id", "embedding", "price", "price"])
    imported(table, tmp_path / "s")
    assert rows_of(tmp_path / "s") == {1: [2]}, "it matters only where it is meant"
    pq.write_table(table, tmp_path / "items.parquet")
    with pytest.raises(SnapshotError, match=r"items.parquet: .*duplicate field names.*; rename columns of one name"):
        imported(tmp_path / "items.parquet", tmp_path / "file")  # Arrow does not read such a file


def test_a_pattern_for_numbered_columns_takes_no_other(tmp_path: Path) -> None:
    table = {"item_id": [5], "e0": [0.5], "e1": [1.5], "event_time": [7.0]}
    with pytest.raises(SnapshotError, match=r"'e\*' names numbered columns and also 'event_time': .*'e\[0-9\]\*'"):
        imported(pa.table(table), tmp_path / "refused", vector="e*")
    imported(pa.table(table), tmp_path / "s", vector="e[0-9]*")
    assert rows_of(tmp_path / "s") == {5: [0.5, 1.5]}
    imported(pa.table({"item_id": [5], "x_mean": [1.0], "x_std": [2.0]}), tmp_path / "words", vector="x_*")
    assert rows_of(tmp_path / "words") == {5: [1, 2]}


def test_where_every_row_was_left_out_the_error_says_so(tmp_path: Path) -> None:
    table = pa.table({"item_id": [1, 2], "embedding": pa.array([None, [None]], pa.list_(pa.float32()))})
    with pytest.raises(SnapshotError, match="got none: 2 rows with a null were left out"):
        imported(table, tmp_path / "s", on_null="skip")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"table": "a b"}, "table name 'a b' is not allowed"),
        ({"feature": "имя"}, "feature name 'имя' is not allowed"),
        ({"ttl_s": "30x"}, "ttl_s: expected seconds, or a time such as 30d"),
        ({"default": "median"}, 'default: expected "zeros", "mean" or a list'),
        ({"default": [1.0, 2.0], "dim": 1}, "default: expected 1 numbers, as dim says, got 2"),
        ({"padding_key": "x", "key_type": "int64", "combiner": "sum"}, "padding_key: expected an int64 key, got 'x'"),
        ({"version": 0}, "version: .*greater than or equal to 1, got 0"),
        ({"version": 1 << 63}, "version: .*less than or equal to"),
        ({"delta_seq": -1}, "delta_seq: .*greater than or equal to 0"),
        ({"model": "a.b"}, "model name 'a.b' is not allowed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_row_is_read(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    read: list[pa.RecordBatch] = []

    def batches() -> Iterator[pa.RecordBatch]:
        read.append(pa.record_batch({"item_id": [1], "embedding": [[1.0]]}))
        yield from read

    source = pa.RecordBatchReader.from_batches(
        pa.record_batch({"item_id": [1], "embedding": [[1.0]]}).schema, batches()
    )
    named = {"model": "ctr", "table": "item", "out": tmp_path / "s", **COLUMNS, **options}
    with pytest.raises(SnapshotError, match=reason):
        import_table(source, **named)
    assert not read
    assert not (tmp_path / "s").exists()


def test_a_directory_above_the_rows_of_dynamicemb_names_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "dump/model.ebc"
    folder.mkdir(parents=True)
    np.array([1, 2]).tofile(folder / "item_emb_keys.rank_0.world_size_1")
    np.ones((2, 3), np.float32).tofile(folder / "item_emb_values.rank_0.world_size_1")
    with pytest.raises(
        SnapshotError, match=r"rows of TFRA or dynamicemb in 1 of its .*: name one of them, as .*model.ebc"
    ):
        imported(tmp_path / "dump", tmp_path / "s")
    imported(folder, tmp_path / "s")
    assert rows_of(tmp_path / "s") == {1: [1, 1, 1], 2: [1, 1, 1]}


@pytest.mark.parametrize("text", ["2026-11-20", "10%3A00%3A00", "2026-11-20%2010%3A00%3A00", "2026-W47-5"])
def test_a_key_of_a_folders_name_is_text_though_it_looks_like_a_date(tmp_path: Path, text: str) -> None:
    for number, name in enumerate((text, "other")):
        (tmp_path / f"items/day={name}").mkdir(parents=True)
        rows = pa.table({"embedding": [[float(number)]]})
        pq.write_table(rows, tmp_path / f"items/day={name}/a.parquet")
    imported(tmp_path / "items", tmp_path / "s", key="day")
    assert rows_of(tmp_path / "s") == {unquote(text): [0], "other": [1]}


@pytest.mark.parametrize(
    "name",
    [
        "ckpt-1.index",
        "ckpt-1.data-00000-of-00001",
        "saved_model.pb",
        "0/manifest.ocdbt",
        "default/_METADATA",
    ],
)
def test_what_only_its_trainer_reads_is_refused_with_where_to_look(tmp_path: Path, name: str) -> None:
    (tmp_path / "model" / name).parent.mkdir(parents=True)
    (tmp_path / "model" / name).write_bytes(b"")
    for path in (tmp_path / "model", tmp_path / "model" / name):
        with pytest.raises(
            SnapshotError, match=r"is a file of an? (TensorFlow|Orbax) .*numpy.savez.*docs/trainers\.md"
        ):
            imported(path, tmp_path / "s")


def test_a_program_for_orbax_names_the_directory_that_is_restored(tmp_path: Path) -> None:
    for name in ("7/_CHECKPOINT_METADATA", "7/default/_METADATA", "7/default/ocdbt.process_0/manifest.ocdbt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    restored = tmp_path / "7/default"
    for path in (tmp_path, tmp_path / "7", tmp_path / "7/_CHECKPOINT_METADATA", restored, restored / "_METADATA"):
        with pytest.raises(SnapshotError, match=rf"Orbax .*path = orbax.PyTreeCheckpointer\(\), '{restored}';"):
            imported(path, tmp_path / "s")
    (tmp_path / "8/default").mkdir(parents=True)
    (tmp_path / "8/default/_METADATA").write_bytes(b"")
    with pytest.raises(SnapshotError, match=rf"checkpoints of Orbax in 2 .*name one of them, as {restored}"):
        imported(tmp_path, tmp_path / "s")


SPARK = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
DENSE = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
ZEROS = {"type": 0, "size": 3, "indices": [], "values": []}
FEW = {"type": 0, "size": 3, "indices": [2, 0], "values": [7.0, 8.0]}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2], [1], [0]])
def test_sparse_vectors_of_spark_are_read_beside_dense_ones(tmp_path: Path, order: list[int]) -> None:
    rows = [[1, 2, 3], [0, 0, 0], [8, 0, 7]]
    vectors = pa.array([DENSE, *([DENSE, ZEROS, FEW][one] for one in order)], SPARK).slice(1)
    for on_null in ("fail", "skip"):
        table = pa.table({"item_id": order, "embedding": vectors})
        imported(table, tmp_path / on_null, on_null=on_null)
        assert rows_of(tmp_path / on_null) == {one: rows[one] for one in order}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**FEW, "size": 4}, "row 1: column 'embedding': expected 3 numbers"),
        ({**FEW, "indices": [3, 0]}, "row 1: column 'embedding': expected 3 numbers"),
        ({**FEW, "indices": None}, "row 1: .*expected dense vectors, got a sparse one"),
        ({**FEW, "values": [7.0]}, "row 1: .*expected as many"),
    ],
)
def test_a_sparse_vector_that_does_not_fit_is_refused(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        imported(pa.table({"item_id": [1, 2], "embedding": pa.array([DENSE, row], SPARK)}), tmp_path / "s")


@pytest.mark.parametrize("kind", [pa.list_view(pa.float32()), pa.large_list_view(pa.float64())])
def test_rows_with_a_null_are_left_out_of_views_in_any_order(tmp_path: Path, kind: pa.DataType) -> None:
    width = pa.int32() if kind.id == pa.list_view(pa.float32()).id else pa.int64()
    made = pa.ListViewArray if width == pa.int32() else pa.LargeListViewArray
    numbers = pa.array([1, 2, 3, None, 5, 6], kind.value_type)
    views = made.from_arrays(pa.array([4, 0, 2, 2], width), pa.array([2, 2, 2, 1], width), numbers)
    left: list[Any] = []
    table = pa.table({"item_id": [10, 11, 12], "embedding": views.slice(0, 3)})
    imported(table, tmp_path / "s", on_null="skip", left_out=left.append)
    assert rows_of(tmp_path / "s") == {10: [5, 6], 11: [1, 2]}
    assert left[0].nulls == 1
