"""`tierstore import` and `import-hps`: what people have, as a snapshot or served at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, Url
from tierstore.cli.place import place, service_url, warn_of_dense
from tierstore.errors import ConfigError, SnapshotError

if TYPE_CHECKING:
    from tierstore.imports.tables import TableSource
    from tierstore.types import ProgressFn


def _option(metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False, **more)


Out = Annotated[
    Path | None, _option("DIR", "Write the snapshot here; it is loaded only where --data or --url say so too.")
]
Version = Annotated[int | None, _option("VERSION", "Its number (default: the time, as 20261120093000).")]
DeltaSeq = Annotated[int, typer.Option("--delta-seq", min=0, help="Deltas up to this one are in the rows already.")]
Dense = Annotated[Path | None, _option("FILE", "An ONNX model that takes the rows.", exists=True, dir_okay=False)]


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            exists=True,
            help="Parquet, Arrow or ORC files, directories of them, a HugeCTR folder; or one tables.toml.",
            show_default=False,
        ),
    ],
    model: Annotated[str | None, _option("MODEL", "Name of the model.")] = None,
    table: Annotated[str | None, _option("TABLE", "Name of the table.")] = None,
    key: Annotated[str, typer.Option(metavar="COLUMN", help="The column of the keys.")] = "key",
    vector: Annotated[
        str, typer.Option(metavar="COLUMN", help="The column of the vectors; or a pattern, such as 'f*', of numbers.")
    ] = "vector",
    feature: Annotated[str | None, _option("NAME", "Its name in requests (default: the table's).")] = None,
    combiner: Annotated[str | None, _option("HOW", "Pool bags of it: sum, mean or sqrtn.")] = None,
    key_type: Annotated[str | None, _option("TYPE", "int64, uint64 or string (default: as the column has it).")] = None,
    dtype: Annotated[str | None, _option("DTYPE", "How rows are stored: float32, float16, bfloat16 or int8.")] = None,
    default: Annotated[str, typer.Option(metavar="WHAT", help="What absent keys get: zeros or mean.")] = "zeros",
    dense: Dense = None,
    out: Out = None,
    version: Version = None,
    delta_seq: DeltaSeq = 0,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Make a snapshot of what pandas, Spark, Ray, DuckDB or HugeCTR left, and serve it.

    With --out it is written there; else it is loaded into --data, or through --url.
    """
    from tierstore.imports.tables import Feature, TablesFile, TableSource

    if len(paths) == 1 and paths[0].suffix == ".toml":
        if table is not None:
            raise typer.BadParameter(f"--table: {paths[0]} names the tables")
        file = TablesFile.read(paths[0])
        tables = file.sources(paths[0].parent)
        model, version, delta_seq = model or file.model, version or file.version, delta_seq or file.delta_seq
        dense = dense or (None if file.dense is None else paths[0].parent / file.dense)
    elif table is None:
        raise typer.BadParameter("give --table, the name that the table is to have, or one tables.toml")
    else:
        features = (Feature(feature or table, combiner),)
        tables = [TableSource(table, paths, key, vector, key_type, dtype, default, features)]
    if model is None:
        raise typer.BadParameter("give --model, the name that the model is to have")
    _say(json, [_imported(model, tables, dense, out, version, delta_seq, data, url)])


def import_hps(
    file: Annotated[
        Path,
        typer.Argument(metavar="PS.JSON", exists=True, dir_okay=False, help="HPS's configuration.", show_default=False),
    ],
    root: Annotated[
        Path | None, _option("DIR", "Where its paths begin, if it was written for a container (default: beside it).")
    ] = None,
    model: Annotated[str | None, _option("MODEL", "Only this one of its models.")] = None,
    dense: Dense = None,
    out: Out = None,
    version: Version = None,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Make a snapshot of each model of an HPS configuration, and serve them.

    Each table is a feature of its own name. With --out and several models each has a directory in it.
    """
    from tierstore.imports.hps import read_ps_json

    models = [one for one in read_ps_json(file, root) if model in (None, one.name)]
    if not models:
        raise ConfigError(f"{file} names no model {model!r}" if model else f"{file} names no models")
    results = []
    for one in models:
        where = None if out is None else out / one.name if len(models) > 1 else out
        results.append(_imported(one.name, list(one.tables), dense, where, version, 0, data, url))
    _say(json, results)


def _imported(
    model: str,
    tables: list[TableSource],
    dense: Path | None,
    out: Path | None,
    version: int | None,
    delta_seq: int,
    data: Path | None,
    url: str | None,
) -> dict[str, Any]:
    from tierstore.cli.progress import shown_progress
    from tierstore.imports.tables import import_tables, version_of_now

    begun_s = time.monotonic()
    number = version or version_of_now()
    loads = out is None or data is not None or url is not None
    with _directory(out, data, url, number) as where, shown_progress("import") as progress:

        def write() -> Path:
            return import_tables(
                tables, model=model, dense=dense, out=where, version=number, delta_seq=delta_seq, progress=progress
            )

        if loads:
            _load(write, data, url, progress)
        else:
            write()
        rows = _rows(where)
    return {
        "model": model,
        "version": number,
        "rows": rows,
        "active": loads,
        "snapshot": None if out is None else str(out),
        "seconds": round(time.monotonic() - begun_s, 3),
    }


def _load(write: Callable[[], Path], data: Path | None, url: str | None, progress: ProgressFn) -> None:
    with place(data, url, create=True) as held:  # first, so that a directory that is held open is told at once
        where = write()
        try:
            version = held.load_snapshot(where.resolve(), progress=progress)
            warn_of_dense(held, where, version)
        except SnapshotError as error:
            if service_url(data, url) and "source root" in str(error):
                raise SnapshotError(f"{error}; write it where the service reads, with --out") from error
            raise


@contextmanager
def _directory(out: Path | None, data: Path | None, url: str | None, number: int) -> Iterator[Path]:
    """Where the snapshot is written: `out`, or a directory that is removed at the end."""
    if out is not None:
        yield out
        return
    beside = Path.cwd() if service_url(data, url) else (data or Path("data")).absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-import-", dir=beside) as scratch:
        yield Path(scratch) / str(number)


def _rows(where: Path) -> dict[str, int]:
    from tierstore.formats.snapshot import open_snapshot

    return {table.name: table.rows for table in open_snapshot(where).manifest.tables}


def _say(json: bool, results: list[dict[str, Any]]) -> None:
    if json:
        from tierstore.cli import show

        show.as_json(results[0] if len(results) == 1 else results)
        return
    for result in results:
        rows = ", ".join(f"{count:,} rows of {name}" for name, count in result["rows"].items())
        done = "is active" if result["active"] else f"is in {result['snapshot']}"
        typer.echo(f"{result['model']} version {result['version']} {done}: {rows} ({result['seconds']:.1f} s)")
