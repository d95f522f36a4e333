"""Delta tables in the hands of other readers: the live rows under the names of the table, or a refusal with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.imports.make_corpus import CORPUS
from tests.imports.test_tables import rows_of
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.imports.tables import import_table

LISTS = pa.list_(pa.float32())
OPTIONS: dict[str, Any] = {"model": "ctr", "table": "item", "key": "item_id", "vector": "emb"}
MAPPED = r"column mapping.*Import the table by its directory, or the deltalake\.DeltaTable itself"


def renamed(where: Path) -> Path:
    """A table with column mapping whose `emb` was renamed to `emb_old`, and then `emb_new` to `emb`."""
    files = {"item_id": pa.array([1, 2]), "emb": pa.array([[1.0], [2.0]], LISTS), "emb_new": pa.array([[3.0], [4.0]], LISTS)}  # fmt: skip
    where.mkdir()
    pq.write_table(pa.table(files), where / "part-0.parquet")
    lists = {"type": "array", "elementType": "float", "containsNull": True}
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": of}}
        for number, (name, kind, of) in enumerate([("item_id", "long", "item_id"), ("emb_old", lists, "emb"), ("emb", lists, "emb_new")], 1)
    ]  # fmt: skip
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "3"}
    size = (where / "part-0.parquet").stat().st_size
    log: list[Any] = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {"metaData": {"id": "a", "format": {"provider": "parquet", "options": {}}, "schemaString": json.dumps({"type": "struct", "fields": fields}), "partitionColumns": [], "configuration": configuration, "createdTime": 0}},
        {"add": {"path": "part-0.parquet", "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}},
    ]  # fmt: skip
    (where / "_delta_log").mkdir()
    (where / "_delta_log/00000000000000000000.json").write_text("\n".join(map(json.dumps, log)))
    return where


def as_pyarrow_has_it() -> pa.Table:
    """What deltalake's `to_pyarrow_table` gives of such a table: the schema of the log, and other columns' values."""

    def kept(name: str, kind: pa.DataType, of: str) -> pa.Field:
        return pa.field(name, kind, metadata={"delta.columnMapping.physicalName": of})

    schema = pa.schema([kept("item_id", pa.int64(), "item_id"), kept("emb_old", LISTS, "emb"), kept("emb", LISTS, "emb_new")])  # fmt: skip
    return pa.table({"item_id": [1, 2], "emb_old": [None, None], "emb": [[1.0], [2.0]]}, schema=schema)


@pytest.mark.parametrize("form", ["dataset", "union", "table", "batch", "reader", "file"])
def test_what_pyarrow_has_of_a_table_with_column_mapping_is_refused(tmp_path: Path, form: str) -> None:
    table = as_pyarrow_has_it()
    pq.write_table(table, tmp_path / "a.parquet")
    source = {
        "dataset": ds.dataset(table),
        "union": ds.dataset([ds.dataset(table)]),
        "table": table,
        "batch": table.to_batches()[0],
        "reader": table.to_reader(),
        "file": tmp_path / "a.parquet",
    }[form]
    with pytest.raises(SnapshotError, match=MAPPED):
        import_table(source, out=tmp_path / "s", **OPTIONS)
    assert not (tmp_path / "s").exists()


def test_a_dataset_of_the_files_of_a_table_with_a_log_is_refused(tmp_path: Path) -> None:
    for source in (ds.dataset(CORPUS / "delta", exclude_invalid_files=True), ds.dataset([str(CORPUS / "delta/part-0.parquet")])):  # fmt: skip
        with pytest.raises(SnapshotError, match=r"delta is a Delta table .*`tierstore import .*/delta`"):
            import_table(source, out=tmp_path / "s", **OPTIONS | {"vector": "embedding"})


def test_what_the_advice_names_gives_the_live_rows(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: make trainers")
    table = deltalake.DeltaTable(str(renamed(tmp_path / "items")))
    live = deltalake.QueryBuilder().register("t", table).execute("SELECT * FROM t")
    for i, source in enumerate((tmp_path / "items", table, live)):
        import_table(source, out=tmp_path / f"s{i}", **OPTIONS)
        assert rows_of(tmp_path / f"s{i}") == {1: [3.0], 2: [4.0]}
    for source in (table.to_pyarrow_dataset(), table.to_pyarrow_table()):
        with pytest.raises(SnapshotError, match=MAPPED):
            import_table(source, out=tmp_path / "refused", **OPTIONS)
    with pytest.raises(SnapshotError, match=r"is a Delta table"):
        import_table(table.file_uris(), out=tmp_path / "refused", **OPTIONS)


class Once:
    """A stream of another library than PyArrow, which can be gone through once."""

    def __init__(self) -> None:
        table = pa.table({"item_id": [1, 1], "emb": pa.array([[1.0], [2.0]], LISTS)})
        self._reader = table.to_reader()

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(schema)


class Counted(Once):
    """The same with a method that tells it."""

    def read_next_batch(self) -> None:
        raise AssertionError("it is enough that there is one")


@pytest.mark.parametrize("kind", [Once, Counted])
def test_a_stream_that_can_be_read_once_gives_no_last_rows(tmp_path: Path, kind: Any) -> None:
    with pytest.raises((InvalidInput, SnapshotError), match=r"read twice|consumed|released"):
        import_table(kind(), out=tmp_path / "refused", on_duplicate="last", **OPTIONS)
    assert not (tmp_path / "refused").exists()
    import_table(kind(), out=tmp_path / "s", **OPTIONS)
    assert list(rows_of(tmp_path / "s")) == [1]
