"""Delta Lake's and Iceberg's tables, read by their log: the live rows of one version, batch by batch.

The log is read by each format's own library: deltalake (https://delta-io.github.io/delta-rs) and PyIceberg
(https://py.iceberg.apache.org). What those do not read right they refuse, and so does the import, with their reason.
Neither promises an order of rows. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from tierstore.errors import InvalidInput
from tierstore.formats.snapshot.table_logs import DELTA, ICEBERG, reason_of
from tierstore.formats.times import as_utc, format_time
from tierstore.imports.column_files import ColumnSource, sliced
from tierstore.imports.places import ICEBERG_METADATA

AsOf = int | str | datetime


def as_of(value: AsOf) -> int | datetime:
    """A version of Delta or a snapshot's id of Iceberg, or a moment: from a number, digits, or a time with a zone.

    InvalidInput for anything else.
    """
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return as_utc(value)
    except ValueError as error:
        raise InvalidInput(
            f"--as-of (as_of=): expected a version of Delta, a snapshot's id of Iceberg, or a time: {error}"
        ) from error


def open_delta(path: Path, at: int | datetime | None) -> ColumnSource:
    """The table of Delta in a directory: its newest version, the version `at`, or the one at that time."""
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise InvalidInput(reason_of(DELTA, path)) from error
    table = DeltaTable(str(path))
    if isinstance(at, int):
        if at > table.version():
            raise InvalidInput(f"expected a version up to {table.version()}, the newest of this table, got {at}")
        table.load_as_version(at)
    elif at is not None:
        table.load_as_version(at)
        _refuse_later(path, table.version(), at)
    return delta_columns(table)


def _refuse_later(path: Path, version: int, at: datetime) -> None:
    """Raise InvalidInput where a version is younger than the moment that was asked for.

    deltalake takes the oldest version that it finds where all are younger. A version's time is that of its file.
    """
    written_s = (path / f"_delta_log/{version:020}.json").stat().st_mtime
    if written_s > at.timestamp():
        raise InvalidInput(
            f"expected a version from before {format_time(at)}; the oldest is version {version}, which was written at "
            f"{format_time(datetime.fromtimestamp(written_s, at.tzinfo))}"
        )


def delta_columns(table: Any) -> ColumnSource:
    """A `deltalake.DeltaTable`, at the version that it is."""

    def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for batch in pa.RecordBatchReader.from_stream(table.scan(columns=list(names))):
            yield from sliced(batch)

    return ColumnSource(pa.schema(table.schema().to_arrow()), batches, table.count, is_ordered=False)


def open_iceberg(path: Path, at: int | datetime | None) -> ColumnSource:
    """The table of Iceberg in a directory with a version hint, or that of a metadata file: its current snapshot, the
    snapshot `at`, or the one that was current at that time.
    """
    is_file = ICEBERG_METADATA.fullmatch(path.name) is not None
    try:
        from pyiceberg.table import StaticTable
    except ImportError as error:
        raise InvalidInput(reason_of(ICEBERG, path.parent.parent if is_file else path)) from error
    table = StaticTable.from_metadata(str((path if is_file else _current_metadata(path)).absolute()))
    return iceberg_columns(table, None if at is None else _snapshot_id(table, at))


def _current_metadata(path: Path) -> Path:
    """The metadata file that a table's version hint leads to.

    A hint may be behind: a commit writes it after its metadata file (Iceberg's HadoopTableOperations goes on from it to
    the last version that is there).
    """
    folder = path / "metadata"
    try:
        hint = (folder / "version-hint.text").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        newest = max(folder.iterdir(), key=lambda file: (bool(ICEBERG_METADATA.fullmatch(file.name)), file.name))
        raise InvalidInput(
            "expected a version-hint.text, as a table without a catalogue has; a catalogue knows which metadata file "
            f"is current: name that file, as {newest} (the last here by its name), or give what "
            "pyiceberg.catalog.load_catalog(…).load_table(…) returns to tierstore.import_table"
        ) from None
    if not hint.isdecimal():
        return folder / (hint if ICEBERG_METADATA.fullmatch(hint) else f"{hint}.metadata.json")
    number = int(hint)
    while (folder / f"v{number + 1}.metadata.json").exists():
        number += 1
    return folder / f"v{number}.metadata.json"


def _snapshot_id(table: Any, at: int | datetime) -> int:
    if isinstance(at, int):
        if table.snapshot_by_id(at) is None:
            known = ", ".join(str(one.snapshot_id) for one in table.snapshots()[-3:]) or "none"
            raise InvalidInput(f"expected the id of one of its snapshots, of which the last are {known}, got {at}")
        return at
    snapshot = table.snapshot_as_of_timestamp(int(at.timestamp() * 1000))
    if snapshot is None:
        raise InvalidInput(f"expected a snapshot from before {format_time(at)}, got none that is still there")
    return int(snapshot.snapshot_id)


def iceberg_columns(table: Any, snapshot_id: int | None = None) -> ColumnSource:
    """A `pyiceberg.table.Table`, at a snapshot or at its current one.

    A data file at a time is in memory: PyIceberg's own `to_arrow_batch_reader` reads all of them ahead.
    """
    from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow

    def scan(*names: str) -> Any:
        return table.scan(snapshot_id=snapshot_id, **({"selected_fields": names} if names else {}))

    def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        scanned = scan(*names)
        reader = ArrowScan(scanned.table_metadata, scanned.io, scanned.projection(), scanned.row_filter)
        for file in scanned.plan_files():
            for batch in reader.to_record_batches([file]):
                yield from sliced(batch)

    def count() -> int:
        return sum(file.file.record_count for file in scan().plan_files())

    return ColumnSource(schema_to_pyarrow(scan().projection()), batches, count, is_ordered=False)


def lake_object(source: Any) -> ColumnSource | None:
    """A table that deltalake or PyIceberg has opened; None for any other object."""
    kind = type(source)
    names = {f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in kind.__mro__}
    opened: Callable[[Any], ColumnSource] | None = None
    if "deltalake.DeltaTable" in names:
        opened = delta_columns
    elif "pyiceberg.Table" in names:
        opened = iceberg_columns
    return None if opened is None else opened(source)
