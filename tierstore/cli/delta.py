"""`tierstore delta`: deltas, and files of rows that are made into deltas, applied one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, Url, argument, option
from tierstore.cli.target import open_target
from tierstore.errors import Conflict, SequenceGap

if TYPE_CHECKING:
    from tierstore.client import Client
    from tierstore.engine.store import Store
    from tierstore.status import ModelStatus
    from tierstore.types import DeltaResult

Files = Annotated[
    list[Path],
    argument(
        "FILE",
        "Deltas (Arrow IPC), in the order of their seq; or rows, a delta each file or directory: Parquet, Arrow, ORC.",
        exists=True,
        readable=True,
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Of rows: the seq of the first file (default: the model's next).", show_default=False
    ),
]


def delta(
    files: Files,
    model: Annotated[str | None, option("MODEL", "The model; of rows it must be named.")] = None,
    table: Annotated[str | None, option("TABLE", "Of rows: their table (default: as --table-column says).")] = None,
    seq: Seq = None,
    key: Annotated[str, typer.Option(metavar="COLUMN", help="Of rows: the column of the keys.")] = "key",
    vector: Annotated[
        str, typer.Option(metavar="COLUMN", help="Of rows: the column of the vectors, or a pattern; null deletes.")
    ] = "vector",
    table_column: Annotated[
        str | None, option("COLUMN", "Of rows: the column with each row's table (default: table, if it is there).")
    ] = None,
    deleted: Annotated[
        str | None, option("COLUMN", "Of rows: booleans, true deletes the key (default: deleted, if it is there).")
    ] = None,
    zeros_delete: Annotated[
        bool, typer.Option("--zeros-delete", help="Of rows: a row of zeros deletes its key.")
    ] = False,
    integers: Annotated[
        bool, typer.Option("--integers", help="Of rows: vectors of integers are the numbers themselves.")
    ] = False,
    event_time: Annotated[
        str | None, option("TIME", "Of rows: their newest event, ISO 8601 (default: when the file was written).")
    ] = None,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Apply deltas, or rows as deltas.

    One after the other, up to the first that is refused. One that the log has already changes nothing.
    """
    from tierstore.cli import show
    from tierstore.imports.deltas import RowsColumns, holds_rows, rows_delta

    of_rows = {file for file in files if holds_rows(file)}
    given = (table, seq, table_column, deleted, event_time, zeros_delete or None, integers or None)
    if any(one is not None for one in given) and len(of_rows) < len(files):
        other = next(file for file in files if file not in of_rows)
        raise typer.BadParameter(f"{other} is a delta, which says its seq, tables and times itself: no option for rows")
    if of_rows and model is None:
        raise typer.BadParameter(f"expected --model, the model of the rows in {next(iter(of_rows))}")
    columns = RowsColumns(key, vector, table_column, deleted, zeros_delete, integers)
    make = partial(rows_delta, model=str(model), table=table, columns=columns, event_time=event_time)
    results: list[DeltaResult] = []
    try:
        with open_target(data, url) as target:
            for number, file in enumerate(files):
                if file in of_rows:
                    result = _apply_rows(target, str(model), file, None if seq is None else seq + number, make)
                else:
                    result = target.apply_delta(file, model=model)
                results.append(result)
                if not json:
                    typer.echo(f"{result.model} delta {result.seq} {_what_became_of(result)}")
    finally:
        if json:
            documents = [asdict(result) for result in results]
            show.as_json([{name: of for name, of in one.items() if of is not None} for one in documents])


def _apply_rows(
    target: Store | Client, model: str, file: Path, seq: int | None, make: Callable[..., bytes]
) -> DeltaResult:
    """Apply a file of rows as the delta `seq`; by default the next one, which it is or nothing is applied."""
    status: ModelStatus = target.status(model)["models"][model]
    tables: dict[str, Any] = {name: table["key"] for name, table in status["tables"].items()}
    next_seq = (status["log"]["last"] or 0) + 1
    content = make(file, seq=seq or next_seq, tables=tables or None)
    try:
        return target.apply_delta(content, model=model)
    except (Conflict, SequenceGap) as error:
        if seq is not None:
            raise
        raise Conflict(
            f"{file} was to be delta {next_seq} of {model}, and was not applied: another writer has changed the model "
            f"meanwhile ({error}); the same command again takes the next seq"
        ) from error


def _what_became_of(result: DeltaResult) -> str:
    if result.send_as is not None:
        return f"was undone by a rollback, and stays so; to have it applied, send it as delta {result.send_as}"
    return "is applied" if result.applied else "was there already"
