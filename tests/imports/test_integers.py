"""Integers for rows: refused in every way in alike, as they are most often codes; taken where the caller says so."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.imports.make_corpus import safetensors
from tests.imports.test_tables import rows_of
from tierstore.errors import DeltaError, SnapshotError
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.imports.tables import import_table
from tierstore.imports.tables_file import TablesFile

CODES = np.array([[1, 2], [3, -4]], np.int8)
ROWS = {7: [1.0, 2.0], 8: [3.0, -4.0]}
COLUMNS = {"key": [7, 8], "vector": pa.array(CODES.tolist(), pa.list_(pa.int8()))}


def parquet(kind: pa.DataType) -> Callable[[Path], Any]:
    def made(where: Path) -> Path:
        pq.write_table(pa.table({**COLUMNS, "vector": pa.array(CODES.tolist(), kind)}), where / "a.parquet")
        return where / "a.parquet"

    return made


def arrays(where: Path) -> Path:
    np.savez(where / "a.npz", key=np.array([7, 8]), vector=CODES)
    return where / "a.npz"


def checkpoint(where: Path) -> Path:
    safetensors(where / "a.safetensors", {"key": np.array([7, 8]), "vector": CODES})
    return where / "a.safetensors"


def saved(where: Path) -> Path:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    torch.save({"key": torch.tensor([7, 8]), "vector": torch.tensor(CODES)}, where / "a.pt")
    return where / "a.pt"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "an array": lambda _: {"key": [7, 8], "vector": CODES},
    "a frame of pandas with lists": lambda _: pd.DataFrame({"key": [7, 8], "vector": CODES.tolist()}),
    "a frame of pandas with arrays": lambda _: pd.DataFrame({"key": [7, 8], "vector": list(CODES)}),
    "a frame of Polars with arrays": lambda _: pl.DataFrame({"key": [7, 8], "vector": CODES}),
    "a frame of Polars with lists": lambda _: pl.DataFrame({"key": [7, 8], "vector": CODES.tolist()}),
    "an Arrow table": lambda _: pa.table(COLUMNS),
    "an Arrow dataset": lambda _: ds.dataset(pa.table(COLUMNS)),
    "fixed-shape tensors": lambda _: pa.table(
        {"key": [7, 8], "vector": pa.FixedShapeTensorArray.from_numpy_ndarray(CODES)}
    ),
    "list views": lambda _: pa.table({"key": [7, 8], "vector": pa.array(CODES.tolist(), pa.list_view(pa.int32()))}),
    "BigQuery's items": lambda _: pa.table(
        {
            "key": [7, 8],
            "vector": pa.array(
                [[{"item": number} for number in row] for row in CODES.tolist()],
                pa.list_(pa.struct([("item", pa.int64())])),
            ),
        }
    ),
    "Parquet of int8": parquet(pa.list_(pa.int8())),
    "Parquet of int64": parquet(pa.list_(pa.int64())),
    "Parquet of fixed-size lists": parquet(pa.list_(pa.int16(), 2)),
    "arrays in .npz": arrays,
    "safetensors": checkpoint,
    "what torch.save wrote": saved,
}


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_an_import_takes_integers_only_where_they_are_meant(tmp_path: Path, made: Callable[[Path], Any]) -> None:
    with pytest.raises(SnapshotError, match=r"expected rows of floats, got .*int.*codes of a quantized table"):
        import_table(made(tmp_path), model="ctr", table="item", out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    import_table(made(tmp_path), model="ctr", table="item", out=tmp_path / "s", integers=True)
    assert rows_of(tmp_path / "s") == ROWS


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64])
@pytest.mark.parametrize("form", ["file", "frame", "arrays"])
def test_so_it_is_with_one_column_a_number(tmp_path: Path, kind: Any, form: str) -> None:
    columns = {"key": np.array([7, 8]), "f0": np.array([1, 3], kind), "f1": np.array([2, 4], np.uint64)}
    if form == "file":
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = {"file": tmp_path / "a.parquet", "frame": pd.DataFrame(columns), "arrays": columns}[form]
    options: dict[str, Any] = {"model": "ctr", "table": "item", "vector": ["f0", "f1"]}
    with pytest.raises(SnapshotError, match=r"columns 'f0' to 'f1': expected rows of floats, got .*--integers"):
        import_table(source, out=tmp_path / "refused", **options)
    import_table(source, out=tmp_path / "s", integers=True, **options)
    assert rows_of(tmp_path / "s") == {7: [1, 2], 8: [3, 4]}


def test_columns_of_which_some_are_whole_are_numbers(tmp_path: Path) -> None:
    columns = {"key": np.array([7, 8]), "f0": np.array([0, 3]), "f1": np.array([0.5, 4])}
    for name, source in {"arrow": pa.table(columns), "arrays": columns}.items():
        import_table(source, model="ctr", table="item", vector=["f0", "f1"], out=tmp_path / name)
        assert rows_of(tmp_path / name) == {7: [0, 0.5], 8: [3, 4]}


@pytest.mark.parametrize(
    "column", [np.array([True, False]), np.array([1j, 2j]), np.array(["2026-11-20"] * 2, "M8[s]"), np.ones((2, 1))]
)
def test_what_are_no_numbers_is_refused_beside_numbers(tmp_path: Path, column: np.ndarray) -> None:
    columns = {"key": [7, 8], "f0": [0.5, 1.5], "f1": column}
    with pytest.raises(SnapshotError, match="column 'f1': expected numbers, got"):
        import_table(columns, model="ctr", table="item", vector=["f0", "f1"], out=tmp_path / "s", integers=True)


def test_codes_with_their_scale_beside_them_are_refused_though_integers_are_meant(tmp_path: Path) -> None:
    table = pa.table({**COLUMNS, "vector_scale": [0.5, 0.25]})
    with pytest.raises(SnapshotError, match="with 'vector_scale' beside it: these are codes"):
        import_table(table, model="ctr", table="item", out=tmp_path / "s", integers=True)
    safetensors(tmp_path / "a.safetensors", {"item.weight": CODES, "item.scale": np.ones(2, np.float32)})
    with pytest.raises(SnapshotError, match=r"the codes of a quantized table.* item.scale \[2\] beside it"):
        import_table(tmp_path / "a.safetensors", model="ctr", table="item", out=tmp_path / "s", integers=True)


def test_a_file_of_tables_says_that_integers_are_meant(tmp_path: Path) -> None:
    parquet(pa.list_(pa.int8()))(tmp_path)
    (tmp_path / "tables.toml").write_text('[tables.item]\npath = "a.parquet"\nintegers = true\n')
    (source,) = TablesFile.read(tmp_path / "tables.toml").sources(tmp_path)
    import_table(source.source, model="ctr", table="item", out=tmp_path / "s", integers=source.integers)
    assert rows_of(tmp_path / "s") == ROWS


GIVEN: dict[str, Callable[[], Any]] = {
    "an array": lambda: CODES,
    "an array of int64": lambda: CODES.astype(np.int64),
    "a list of arrays": lambda: list(CODES),
    "a list of lists of NumPy's numbers": lambda: [list(row) for row in CODES],
    "Arrow lists": lambda: pa.array(CODES.tolist()),
    "a column of pandas": lambda: pd.Series(CODES.tolist()),
    "a frame of pandas": lambda: pd.DataFrame(CODES),
    "a column of Polars": lambda: pl.Series(CODES.tolist()),
    "a tensor": lambda: pytest.importorskip("torch", reason="PyTorch is not installed: make trainers").tensor(CODES),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_writers_take_none(tmp_path: Path, given: Callable[[], Any]) -> None:
    refused = r"table 'item': expected rows of floats, got int.*\.astype\('float32'\)"
    with pytest.raises(SnapshotError, match=refused):
        SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=2).write([7, 8], given())
    with pytest.raises(DeltaError, match=refused):
        DeltaWriter(io.BytesIO(), model="ctr", seq=1).upsert("item", [7, 8], given())


def test_numbers_that_somebody_types_are_numbers(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=2).write([7, 8], [[1, 2], (3, -4)])
    assert rows_of(tmp_path) == ROWS


@pytest.mark.parametrize("bits", [8, 4])
def test_what_keras_has_quantized_is_refused(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed: make trainers")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras has another backend in this process")
    layer = keras.layers.Embedding(6, 4)
    model = keras.Sequential([layer, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model(np.zeros((1, 2), np.int64))
    model.quantize(f"int{bits}")
    codes = keras.ops.convert_to_numpy(layer.embeddings)
    assert codes.dtype.kind in "iu", "which Keras gives for the rows"
    with pytest.raises(SnapshotError, match=r"expected rows of floats, got u?int8"):
        SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=codes.shape[1]).write(np.arange(6), codes)


def test_a_matrix_a_row_is_no_vector(tmp_path: Path) -> None:
    blocks = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 2, 2), np.float32))
    with pytest.raises(
        SnapshotError, match=r"column 'vector': expected lists of numbers, got extension<.*shape=\[2,2\]"
    ):
        import_table(pa.table({"key": [7, 8], "vector": blocks}), model="ctr", table="item", out=tmp_path / "s")


KEYS: dict[str, Any] = {
    "floats": pa.array([7.0, 8.0]),
    "floats beyond 2^63": pa.array([2.0**63, 2.0**64 - 2048]),
    "booleans": pa.array([True, False]),
    "booleans in bytes": pa.array([1, 0], pa.int8()).cast(pa.int8()).view(pa.bool8()),
    "times": pa.array([7, 8], pa.timestamp("s")),
    "dates": pa.array([7, 8], pa.date32()),
    "fractions": pa.array(["7.5", "8.5"]).cast(pa.decimal128(5, 1)),
    "categories of floats": pa.array([7.0, 8.0]).dictionary_encode(),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_keys_that_are_neither_integers_nor_text_are_refused(tmp_path: Path, keys: pa.Array) -> None:
    table = pa.table({"key": keys, "vector": [[1.0], [2.0]]})
    for key_type in (None, "int64", "string"):
        with pytest.raises(SnapshotError, match="column 'key': expected keys that are integers or strings, got"):
            import_table(table, model="ctr", table="item", out=tmp_path / "s", key_type=key_type)


VECTORS: dict[str, Any] = {
    "booleans": pa.array([[True], [False]]),
    "decimals": pa.array([["1.5"], ["2.5"]]).cast(pa.list_(pa.decimal128(5, 1))),
    "categories": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([[1.0], [2.0]])),
    "lists of categories": pa.ListArray.from_arrays([0, 1, 2], pa.array([1.0, 2.0]).dictionary_encode()),
    "lists of booleans in bytes": pa.ListArray.from_arrays([0, 1, 2], pa.array([1, 0], pa.int8()).view(pa.bool8())),
}


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
def test_vectors_of_what_are_no_numbers_are_refused(tmp_path: Path, vectors: pa.Array) -> None:
    table = pa.table({"key": [7, 8], "vector": vectors})
    with pytest.raises(SnapshotError, match="column 'vector': expected lists of numbers, got"):
        import_table(table, model="ctr", table="item", out=tmp_path / "s", integers=True)
