"""Tables of Delta Lake and Iceberg: the rows that the format's own library has at a version, or a refusal with its reason."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
import sys
import uuid
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.imports.make_corpus import CORPUS
from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table
from tierstore.imports.tables_file import TablesFile

LISTS = pa.list_(pa.float32())
OPTIONS: dict[str, Any] = {"model": "ctr", "table": "item", "key": "item_id", "vector": "emb"}


def library(name: str) -> Any:
    pytest.importorskip(name.partition(".")[0], reason=f"{name.partition('.')[0]} is not installed: make trainers")
    return importlib.import_module(name)


def rows(*keys: int, **others: Any) -> pa.Table:
    return pa.table({"item_id": pa.array(keys, pa.int64()), "emb": pa.array([[key, 0.5] for key in keys], LISTS), **others})  # fmt: skip


def expected(table: pa.Table) -> dict[int, list[float]]:
    """The rows of an Arrow table, as a library gives it."""
    return dict(zip(table["item_id"].to_pylist(), table["emb"].to_pylist(), strict=True))


def imported(source: Any, out: Path, **options: Any) -> dict[int, list[float]]:
    import_table(source, out=out, **OPTIONS | options)
    found = rows_of(out)
    shutil.rmtree(out)
    return found


# --- Delta


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Four versions: a partition column, a delete, and a column that came later."""
    deltalake = library("deltalake")
    where = tmp_path / "wärm items"
    deltalake.write_deltalake(where, rows(1, 2, 3, day=["a", "a", "b"]), partition_by=["day"])
    deltalake.write_deltalake(where, rows(4, day=["c"]), mode="append")
    deltalake.DeltaTable(where).delete("item_id = 2")
    later = rows(5, day=["d/e"], score=pa.array([1.0]))
    deltalake.write_deltalake(where, later, mode="append", schema_mode="merge")
    return where


def test_a_delta_table_has_the_live_rows_of_its_newest_version_or_of_one_that_is_named(
    tmp_path: Path, delta: Path
) -> None:
    table = library("deltalake").DeltaTable
    live = [[1, 2, 3], [1, 2, 3, 4], [1, 3, 4], [1, 3, 4, 5]]
    for version, keys in enumerate(live):
        own = expected(pa.table(table(delta, version=version).scan()))
        assert sorted(own) == keys
        assert imported(delta, tmp_path / "s", as_of=version) == own
        assert imported(table(delta, version=version), tmp_path / "s") == own
    assert imported(delta, tmp_path / "s") == own
    assert imported([delta], tmp_path / "s", as_of="2") == {key: [key, 0.5] for key in live[2]}
    with pytest.raises(SnapshotError, match=r"wärm items: expected a version up to 3, .*, got 4"):
        imported(delta, tmp_path / "s", as_of=4)
    with pytest.raises(SnapshotError, match=r"--as-of.*expected the path of a Delta or Iceberg table"):
        imported(table(delta), tmp_path / "s", as_of=1)


def test_columns_of_partitions_and_such_that_came_later_are_columns_of_a_delta_table(
    tmp_path: Path, delta: Path
) -> None:
    assert imported(delta, tmp_path / "s", key="day", as_of=2, on_null="fail") == {"a": [1, 0.5], "b": [3, 0.5], "c": [4, 0.5]}  # fmt: skip
    assert "d/e" in imported(delta, tmp_path / "s", key="day", on_null="skip")
    with pytest.raises(SnapshotError, match=r"column 'score' is null; --on-null skip"):
        imported(delta, tmp_path / "s", vector="score")
    assert imported(delta, tmp_path / "s", vector="score", on_null="skip") == {5: [1.0]}
    with pytest.raises(SnapshotError, match=r"expected one column 'score' for vectors; there are item_id"):
        imported(delta, tmp_path / "s", vector="score", as_of=2)


def test_a_delta_table_at_a_time(tmp_path: Path, delta: Path) -> None:
    """The time of a version is that of its file in the log."""
    now = datetime(2026, 11, 20, tzinfo=UTC)
    for version, hours in enumerate((0, 10, 20, 30)):
        written_s = (now + timedelta(hours=hours)).timestamp()
        os.utime(delta / f"_delta_log/{version:020}.json", (written_s, written_s))
    assert sorted(imported(delta, tmp_path / "s", as_of=now + timedelta(hours=12))) == [1, 2, 3, 4]
    assert sorted(imported(delta, tmp_path / "s", as_of="2026-11-20T23:00:00+01:00")) == [1, 3, 4]
    assert sorted(imported(delta, tmp_path / "s", as_of="2030-01-01T00:00:00Z")) == [1, 3, 4, 5]
    before = r"expected a version from before 2026-11-19T23:00:00Z; the oldest is version 0, .* 2026-11-20T00:00:00Z"
    with pytest.raises(SnapshotError, match=before):
        imported(delta, tmp_path / "s", as_of="2026-11-19T23:00:00Z")
    with pytest.raises(SnapshotError, match=r"--as-of.*with an offset, got '2026-11-20T23:00:00' without one"):
        imported(delta, tmp_path / "s", as_of="2026-11-20T23:00:00")
    with pytest.raises(SnapshotError, match=r"--as-of.*a snapshot's id of Iceberg, or a time: .*got 'latest'"):
        imported(delta, tmp_path / "s", as_of="latest")


def test_the_last_row_of_a_key_is_not_to_be_had_of_rows_without_an_order(tmp_path: Path, delta: Path) -> None:
    with pytest.raises(SnapshotError, match=r"--on-duplicate last.*expected rows in an order, which this table"):
        imported(delta, tmp_path / "s", on_duplicate="last")


def test_files_and_parents_of_a_delta_table_are_refused_with_the_table_to_name(tmp_path: Path, delta: Path) -> None:
    for path in (delta / "_delta_log", next(delta.glob("day=a/*.parquet")), delta.parent):
        with pytest.raises(SnapshotError, match=r"is a Delta table.*`tierstore import .*/wärm items` reads it"):
            imported(path, tmp_path / "s")


def log_of(where: Path, features: list[str], add: dict[str, Any], types: tuple[Any, Any] = ("long", "float")) -> Path:
    """A table of ten rows whose log is written by hand, as the protocol has it, for what deltalake reads and does not
    write.
    """
    where.mkdir()
    pq.write_table(rows(*range(10)), where / "part-0.parquet")
    lists = {"type": "array", "elementType": types[1], "containsNull": True}
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in (("item_id", types[0]), ("emb", lists))]  # fmt: skip
    schema = json.dumps({"type": "struct", "fields": fields})
    size = (where / "part-0.parquet").stat().st_size
    actions: list[Any] = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}},
        {"metaData": {"id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "schemaString": schema, "partitionColumns": [], "configuration": {}, "createdTime": 0}},
        {"add": {"path": "part-0.parquet", "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True, **add}},
    ]  # fmt: skip
    (where / "_delta_log").mkdir()
    (where / "_delta_log/00000000000000000000.json").write_text("\n".join(map(json.dumps, actions)))
    return where


def deletion_vector(where: Path, deleted: list[int]) -> dict[str, Any]:
    """A deletion vector in a file of its own, in Z85's text by its UUID (the Delta protocol, "Deletion Vector Format")."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(deleted) - 1, 16) + struct.pack(f"<{len(deleted)}H", *deleted)
    content = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    name = uuid.uuid4()
    numbers = struct.unpack(">4I", name.bytes)
    text = "".join(letters[number // 85**place % 85] for number in numbers for place in (4, 3, 2, 1, 0))
    checksum = struct.pack(">I", zlib.crc32(content))
    (where / f"deletion_vector_{name}.bin").write_bytes(b"\1" + struct.pack(">i", len(content)) + content + checksum)
    return {"storageType": "u", "pathOrInlineDv": text, "offset": 1, "sizeInBytes": len(content), "cardinality": len(deleted)}  # fmt: skip


def test_rows_that_a_deletion_vector_marks_are_gone(tmp_path: Path) -> None:
    library("deltalake")
    vector = deletion_vector(tmp_path, [2, 5])
    where = log_of(tmp_path / "items", ["deletionVectors"], {"deletionVector": vector})
    shutil.move(next(tmp_path.glob("*.bin")), where)
    assert sorted(imported(where, tmp_path / "s")) == [0, 1, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("feature", ["typeWidening", "someNewFeature"])
def test_what_deltalake_cannot_read_is_refused_with_its_reason(tmp_path: Path, feature: str) -> None:
    library("deltalake")
    where = log_of(tmp_path / "items", [feature], {}, ("long", "double"))
    with pytest.raises(SnapshotError, match=rf"items: cannot be read: .*(?i:{feature})"):
        imported(where, tmp_path / "s")
    assert not (tmp_path / "s").exists()


# --- Iceberg


@pytest.fixture
def iceberg(tmp_path: Path) -> Any:
    """A table of PyIceberg's: partitions, a delete, a column that came later and one of another name."""
    sql = library("pyiceberg.catalog.sql")
    catalog = sql.SqlCatalog("c", uri="sqlite:///:memory:", warehouse=(tmp_path / "lake").as_uri())
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.items", schema=rows(1, day=["a"]).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(rows(1, 2, 3, day=["a", "a", "b"]))
    table.append(rows(4, day=["c"]))
    table.delete("item_id = 2")
    with table.update_schema() as schema:
        schema.add_column("score", library("pyiceberg.types").DoubleType())
        schema.rename_column("day", "date")
    table.append(rows(5, date=["d"], score=pa.array([1.0])))
    return table


def metadata_of(table: Any) -> Path:
    return Path(table.metadata_location.removeprefix("file://"))


def test_an_iceberg_table_has_the_live_rows_of_its_current_snapshot_or_of_one_that_is_named(
    tmp_path: Path, iceberg: Any
) -> None:
    own = expected(iceberg.scan().to_arrow())
    assert sorted(own) == [1, 3, 4, 5]
    assert imported(iceberg, tmp_path / "s") == own
    assert imported(metadata_of(iceberg), tmp_path / "s") == own
    seen = []
    for snapshot in iceberg.snapshots():
        then = expected(iceberg.scan(snapshot_id=snapshot.snapshot_id).to_arrow())
        if then:
            assert imported(metadata_of(iceberg), tmp_path / "s", as_of=snapshot.snapshot_id) == then
            at = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)
            assert imported(metadata_of(iceberg), tmp_path / "s", as_of=at) == then
        seen.append(sorted(then))
    assert {(1, 2, 3), (1, 2, 3, 4), (1, 3, 4), (1, 3, 4, 5)} <= set(map(tuple, seen))
    with pytest.raises(SnapshotError, match=r"expected the id of one of its snapshots, of which the last are .*got 7"):
        imported(metadata_of(iceberg), tmp_path / "s", as_of=7)
    with pytest.raises(SnapshotError, match=r"expected a snapshot from before 2020-01-01T00:00:00Z"):
        imported(metadata_of(iceberg), tmp_path / "s", as_of="2020-01-01T00:00:00Z")


def test_columns_that_came_later_or_have_another_name_are_read_as_the_iceberg_table_has_them(
    tmp_path: Path, iceberg: Any
) -> None:
    own = iceberg.scan().to_arrow()
    by_date = dict(zip(own["date"].to_pylist(), own["emb"].to_pylist(), strict=True))
    assert imported(iceberg, tmp_path / "s", key="date") == by_date
    assert imported(iceberg, tmp_path / "s", vector="score", on_null="skip") == {5: [1.0]}
    first = next(one for one in iceberg.snapshots() if one.summary["total-records"] == "3")
    assert set(imported(metadata_of(iceberg), tmp_path / "s", key="day", as_of=first.snapshot_id)) == {"a", "b"}


def test_a_directory_of_an_iceberg_table_needs_the_hint_of_what_is_current(tmp_path: Path, iceberg: Any) -> None:
    where = metadata_of(iceberg).parent.parent
    named = r"expected a version-hint.text.*name that file, as .*/metadata/\d+-[^/]+\.metadata\.json"
    with pytest.raises(SnapshotError, match=named):
        imported(where, tmp_path / "s")
    written = sorted((where / "metadata").glob("*.metadata.json"))
    for version, file in enumerate(written, 1):
        shutil.copy(file, where / f"metadata/v{version}.metadata.json")
    own = expected(iceberg.scan().to_arrow())
    for hint in (str(len(written)), f"v{len(written)}", written[-1].name, "1"):  # the last is behind
        (where / "metadata/version-hint.text").write_text(f"{hint}\n")
        assert imported(where, tmp_path / "s") == own
    with pytest.raises(SnapshotError, match=r"is an Iceberg table"):
        imported(where / "data", tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"--on-duplicate last"):
        imported(where, tmp_path / "s", on_duplicate="last")


def with_deletes(table: Any, content: str, deletes: pa.Table, equality_ids: list[int] | None) -> Path:
    """Metadata of the table with one more snapshot, whose delete file an engine that merges on read has written."""
    manifest = library("pyiceberg.manifest")
    folder, base = metadata_of(table).parent, table.metadata.current_snapshot()
    pq.write_table(deletes, folder.parent / "data/deletes.parquet")

    class Deletes(manifest.ManifestWriterV2):
        def content(self) -> Any:
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    spec, schema = table.specs()[0], table.schema()
    file = manifest.DataFile.from_args(
        content=manifest.DataFileContent[content], file_path=(folder.parent / "data/deletes.parquet").as_uri(),
        file_format="PARQUET", partition=library("pyiceberg.typedef").Record(), record_count=len(deletes),
        file_size_in_bytes=100, equality_ids=equality_ids,
    )  # fmt: skip
    with Deletes(spec, schema, table.io.new_output((folder / "d.avro").as_uri()), 77, "null") as writer:
        writer.add_entry(manifest.ManifestEntry.from_args(status=1, snapshot_id=77, sequence_number=None, file_sequence_number=None, data_file=file))  # fmt: skip
    sequence = base.sequence_number + 1
    listed = table.io.new_output((folder / "list.avro").as_uri())
    with manifest.write_manifest_list(2, listed, 77, base.snapshot_id, sequence, "null") as lists:
        lists.add_manifests([*base.manifests(table.io), writer.to_manifest_file()])
    document = json.loads(metadata_of(table).read_text())
    document["snapshots"].append({"snapshot-id": 77, "parent-snapshot-id": base.snapshot_id, "sequence-number": sequence, "timestamp-ms": document["last-updated-ms"], "manifest-list": (folder / "list.avro").as_uri(), "summary": {"operation": "delete"}, "schema-id": 0})  # fmt: skip
    document |= {"current-snapshot-id": 77, "last-sequence-number": sequence, "refs": {}}
    path = folder / "merged.metadata.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def plain_iceberg(tmp_path: Path) -> Any:
    sql = library("pyiceberg.catalog.sql")
    catalog = sql.SqlCatalog("c", uri="sqlite:///:memory:", warehouse=(tmp_path / "lake").as_uri())
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.items", schema=rows(1).schema)
    table.append(rows(*range(5)))
    table.append(rows(*range(5, 9)))
    return table


def test_rows_that_delete_files_of_iceberg_mark_by_position_are_gone(tmp_path: Path, plain_iceberg: Any) -> None:
    files = [task.file for task in plain_iceberg.scan().plan_files()]
    first = next(file.file_path for file in files if file.record_count == 5)
    deletes = pa.table({"file_path": [first, first], "pos": pa.array([1, 3], pa.int64())})
    path = with_deletes(plain_iceberg, "POSITION_DELETES", deletes, None)
    own = library("pyiceberg.table").StaticTable.from_metadata(str(path)).scan().to_arrow()
    assert sorted(expected(own)) == [0, 2, 4, 5, 6, 7, 8]
    assert imported(path, tmp_path / "s") == expected(own)


def test_deletes_of_iceberg_by_value_are_refused_with_pyicebergs_reason(tmp_path: Path, plain_iceberg: Any) -> None:
    path = with_deletes(plain_iceberg, "EQUALITY_DELETES", pa.table({"item_id": pa.array([1], pa.int64())}), [1])
    with pytest.raises(SnapshotError, match=r"merged.metadata.json: cannot be read: .*equality deletes"):
        imported(path, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_one_data_file_of_an_iceberg_table_is_in_memory_at_a_time(
    tmp_path: Path, plain_iceberg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = library("pyiceberg.io.pyarrow")
    asked: list[int] = []
    read = scans.ArrowScan.to_record_batches

    def counted(self: Any, tasks: Any) -> Any:
        asked.append(len(tasks))
        return read(self, tasks)

    monkeypatch.setattr(scans.ArrowScan, "to_record_batches", counted)
    assert len(imported(plain_iceberg, tmp_path / "s")) == 9
    assert asked == [1, 1]


# --- both


@pytest.mark.parametrize(("package", "folder"), [("deltalake", "delta"), ("pyiceberg", "iceberg")])
def test_without_its_library_a_table_with_a_log_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, folder: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SnapshotError, match=rf"{folder} is an? .* table .*pip install 'tierstore\[{package}\]'"):
        imported(CORPUS / folder, tmp_path / "s", vector="embedding")


def test_a_version_of_what_has_none_is_refused(tmp_path: Path) -> None:
    pq.write_table(rows(1), tmp_path / "items.parquet")
    for source in (tmp_path / "items.parquet", rows(1), CORPUS / "text/word2vec.txt"):
        with pytest.raises(SnapshotError, match=r"--as-of \(as_of=\): expected the path of a Delta or Iceberg table"):
            imported(source, tmp_path / "s", as_of=1)


def test_tables_toml_names_a_version(tmp_path: Path, delta: Path) -> None:
    (tmp_path / "tables.toml").write_text(
        f"[tables.item]\npath = '{delta.name}'\nas_of = 1\n[tables.then]\npath = '{delta.name}'\nas_of = 2026-11-20T00:00:00Z\n"
    )
    item, then = TablesFile.read(tmp_path / "tables.toml").sources(tmp_path)
    assert (item.as_of, then.as_of) == (1, datetime(2026, 11, 20, tzinfo=UTC))
