"""`tierstore import` and `import-hps`: tables of other tools, as a snapshot or served at once."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, Url, argument, option
from tierstore.cli.target import make_client, open_target, say_aside, service_url, warn_of_dense
from tierstore.cli.triton import Batch, write_hps
from tierstore.errors import ConfigError, Conflict, Forbidden, NotFound, SnapshotError, TierstoreError, Unauthorized

if TYPE_CHECKING:
    from tierstore.client import Client
    from tierstore.engine.store import Store
    from tierstore.formats.snapshot.manifest import TableEntry
    from tierstore.imports.tables import GoldenFile, TableSource
    from tierstore.types import ProgressFn

_POLL_S = 0.1

Out = Annotated[Path | None, option("DIR", "Write the snapshot here; it is loaded only with --data or --url.")]
Version = Annotated[
    int | None, typer.Option(metavar="VERSION", min=1, help="Its number (default: the time, as 20261120093000).")
]
DeltaSeq = Annotated[int, typer.Option("--delta-seq", min=0, help="Deltas up to this one are in the rows already.")]
Ttl = Annotated[str | None, option("TIME", "Rows that were not written for so long expire: 30d, 12h, or seconds.")]
TimeColumn = Annotated[
    str | None, option("COLUMN", "When each row was written (default: the time of the import for all).")
]
Key = Annotated[str, typer.Option(metavar="COLUMN", help="The column, field (a.b) or tensor of the keys.")]
Vector = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        help="The column, field or tensor of the vectors; or a pattern, such as 'f*', of columns of numbers.",
    ),
]
Dim = Annotated[
    int | None,
    typer.Option(
        "--dim",
        min=1,
        metavar="N",
        help="Numbers of a vector: others are refused, and files that do not say it (HugeCTR; TFRA, which needs it) "
        "compared with it.",
    ),
]
Integers = Annotated[
    bool,
    typer.Option(
        "--integers",
        help="Vectors of integers are the numbers themselves; else refused, as codes of a quantized table.",
    ),
]
AsOf = Annotated[
    str | None,
    option("VERSION", "Of a Delta or Iceberg table: its version, its snapshot's id, or a time (default: the newest)."),
]
OnNull = Annotated[str | None, option("WHAT", "Rows with a null: fail (default), or skip.")]
OnDuplicate = Annotated[
    str | None, option("WHAT", "Keys that come again: fail (default), or last, which keeps the last row.")
]
DType = Annotated[str | None, option("DTYPE", "How rows are stored: float32, float16, bfloat16, int8 or int4.")]
Dense = Annotated[Path | None, option("FILE", "An ONNX model that scores the rows.", exists=True, dir_okay=False)]
Golden = Annotated[
    Path | None,
    option(
        "FILE",
        "Parquet of golden examples: a column a feature or input, and expected outputs. A load that answers otherwise "
        "fails.",
        exists=True,
        dir_okay=False,
    ),
]


Paths = Annotated[
    list[Path],
    argument(
        "PATH",
        "Parquet, Arrow or ORC files, directories of them, a Delta or Iceberg table, a HugeCTR folder, a checkpoint of "
        "PyTorch, TFRA or dynamicemb, .npz, .npy of keys and of vectors, word2vec's text; or one tables.toml.",
    ),
]
Default = Annotated[
    str | None,
    option("WHAT", "What absent keys get: zeros or mean (default: the source's own row for them, or zeros)."),
]


def import_(
    paths: Paths,
    model: Annotated[str | None, option("MODEL", "Name of the model.")] = None,
    table: Annotated[str | None, option("TABLE", "Name of the table.")] = None,
    key: Key = "key",
    vector: Vector = "vector",
    dim: Dim = None,
    feature: Annotated[str | None, option("NAME", "Its name in requests (default: the table's).")] = None,
    combiner: Annotated[str | None, option("HOW", "Pool bags of it: sum, mean or sqrtn.")] = None,
    key_type: Annotated[str | None, option("TYPE", "int64, uint64 or string (default: as the column has it).")] = None,
    dtype: DType = None,
    default: Default = None,
    ttl: Ttl = None,
    time_column: TimeColumn = None,
    on_null: OnNull = None,
    on_duplicate: OnDuplicate = None,
    integers: Integers = False,
    as_of: AsOf = None,
    dense: Dense = None,
    golden: Golden = None,
    out: Out = None,
    version: Version = None,
    delta_seq: DeltaSeq = 0,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Load tables of Parquet, Arrow, PyTorch, HugeCTR and others.

    They are made into a snapshot, of what pandas, Spark, Ray, DuckDB, trainers of PyTorch or HugeCTR have written.
    With --out it is written there. Otherwise it is loaded into --data, or through --url.
    """
    from tierstore.imports.raw_pairs import pairs_in
    from tierstore.imports.tables import Feature, GoldenFile, TableSource
    from tierstore.imports.tables_file import TablesFile

    examples = None if golden is None else GoldenFile(golden)
    if missing := [path for path in paths if not path.exists() and not pairs_in(path)]:
        raise typer.BadParameter(f"{missing[0]} does not exist")
    if len(paths) == 1 and paths[0].suffix == ".toml":
        if table is not None:
            raise typer.BadParameter(f"expected no --table with {paths[0]}, which names the tables")
        tables = (file := TablesFile.read(paths[0])).sources(paths[0].parent)
        model, version, delta_seq = model or file.model, version or file.version, delta_seq or file.delta_seq
        dense = dense or (None if file.dense is None else paths[0].parent / file.dense)
        examples = examples or file.examples(paths[0].parent)
    elif table is None:
        raise typer.BadParameter("expected --table, the name for the table, or one tables.toml")
    else:
        of = (Feature(feature or table, combiner),)
        tables = [TableSource(table, paths, key, vector, key_type, dtype, default, of, ttl, time_column)]
    if model is None:
        raise typer.BadParameter("expected --model, the name for the model")
    given = {"on_null": on_null, "on_duplicate": on_duplicate, "dim": dim, "integers": integers or None}
    given["as_of"] = as_of
    tables = _with_given(tables, given)
    _say(json, [_imported(model, tables, dense, out, version, delta_seq, data, url, examples)])


def _with_given(tables: list[TableSource], options: dict[str, Any]) -> list[TableSource]:
    """The tables with the options that the command line has."""
    given = {name: value for name, value in options.items() if value is not None}
    return [replace(one, **given) for one in tables]


def import_hps(
    file: Annotated[Path, argument("PS.JSON", "HPS's configuration.", exists=True, dir_okay=False)],
    root: Annotated[
        Path | None,
        option("DIR", "The directory that its paths start from, if it was written for a container (default: its own)."),
    ] = None,
    model: Annotated[str | None, option("MODEL", "Only this model.")] = None,
    dense: Dense = None,
    out: Out = None,
    triton: Annotated[
        Path | None,
        option("DIR", "Write each loaded model into this Triton model repository too, asked as HPS's backend is."),
    ] = None,
    max_batch_size: Batch = 0,
    version: Version = None,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Load the models of an HPS configuration.

    Each is made into a snapshot.
    Each table is a feature of the same name. With --out and several models, each has a directory in it.
    """
    from tierstore.imports.hps import read_ps_json

    if triton is not None and out is not None and data is None and url is None:
        raise typer.BadParameter(
            "--triton: expected --data or --url beside --out, because its models answer from what is loaded"
        )
    models = [one for one in read_ps_json(file, root) if model in (None, one.name)]
    if not models:
        raise ConfigError(
            f"expected a model {model!r} in {file}, got none" if model else f"expected models in {file}, got none"
        )
    results = []
    for one in models:
        where = None if out is None else out / one.name if len(models) > 1 else out
        results.append(_imported(one.name, list(one.tables), dense, where, version, 0, data, url))
        if triton is not None:
            write_hps(triton / one.name, one.name, data, url, max_batch_size)
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
    golden: GoldenFile | None = None,
) -> dict[str, Any]:
    from tierstore.cli.progress import shown_progress
    from tierstore.imports.tables import LeftOut, check_tables, import_tables, version_of_now

    started_s = time.monotonic()
    number = version_of_now() if version is None else version
    loads = out is None or data is not None or url is not None
    left_out: list[LeftOut] = []
    check_tables(
        tables, model=model, version=number, delta_seq=delta_seq
    )  # before anything is compiled, opened or read
    with (
        _directory(out, data, url, number) as where,
        shown_progress("import", lambda: _stopped(model, where, service_url(data, url))) as progress,
    ):

        def write() -> Path:
            return import_tables(
                tables,
                model=model,
                dense=dense,
                out=where,
                version=number,
                delta_seq=delta_seq,
                progress=progress,
                left_out=left_out.append,
                golden=golden,
            )

        expired = _load(write, tables, model, data, url, progress) if loads else {}
        if not loads:
            write()
        written = _written(where)
    return {
        "model": model,
        "version": number,
        "rows": {table.name: table.rows - expired.get(table.name, 0) for table in written},
        "expired": expired,
        "dims": {table.name: table.dim for table in written},
        "left_out": {one.table: {"nulls": one.nulls, "duplicates": one.duplicates} for one in left_out},
        "dtypes": {table.name: table.dtype for table in written},
        "rounding": {one.table: {"largest": one.largest_error, "mean": one.mean_error} for one in left_out},
        "active": loads,
        "snapshot": None if out is None else str(out),
        "seconds": round(time.monotonic() - started_s, 3),
    }


def _load(
    write: Callable[[], Path],
    tables: list[TableSource],
    model: str,
    data: Path | None,
    url: str | None,
    progress: ProgressFn,
) -> dict[str, int]:
    """Write a snapshot of `tables` and load it. Returns how many of its rows were too old for that, by table."""
    from tierstore.imports.tables import duplicate_in

    try:
        with open_target(
            data, url, create=True
        ) as target:  # first, so that a locked data directory is reported before the work
            where = write()
            try:
                version = target.load_snapshot(where.resolve(), progress=progress)
                warn_of_dense(target, where, version)
            except KeyboardInterrupt:
                if service_url(data, url) is None:
                    _forget_unfinished(target, where)
                raise
            return _expired(target, model, version)
    except SnapshotError as error:
        raise (duplicate_in(tables, error) or error) from None


def _expired(target: Store | Client, model: str, version: int) -> dict[str, int]:
    """How many rows of the active version were too old to be loaded, by table; none of another version."""
    status = target.status(model)["models"][model]
    if status["active_version"] != version:  # another one was loaded meanwhile
        return {}
    ttls = {name: table["ttl"] for name, table in status["tables"].items()}
    return {name: ttl["expired_at_load"] for name, ttl in ttls.items() if ttl and ttl["expired_at_load"]}


class _StillRead(KeyboardInterrupt):
    """Ctrl-C while a service may go on with the load of a snapshot, which is left to it."""


def _stopped(model: str, where: Path, url: str | None) -> str:
    """What became of an import that Ctrl-C has ended. A service's load of the snapshot is stopped first: its files are
    there until then.
    """
    from tierstore.client.identify import snapshot_version
    from tierstore.client.upload import files_to_send

    none = "there is no new version, what was read is removed, and what served before does so"
    if url is None:
        return none
    try:
        with make_client(url) as client:
            sent = files_to_send(where, model)
            names = {str(where.resolve()), *([] if sent is None else [sent.id])}
            jobs = [
                job
                for job in client.jobs()
                if job["kind"] == "load" and names & {job["source"], *Path(job["source"]).parts}
            ]
            if not jobs:
                return none
            say_aside(f"import: the service is asked to stop loading {where}; Ctrl-C again leaves it that")
            ended = _cancelled(client, jobs[0]["job"])
            if ended["state"] == "done":
                return (
                    f"the service had switched already: {model} serves version {ended['version']}, and "
                    f"`tierstore rollback {model}` goes back"
                )
            try:
                client.status(model)
            except NotFound:  # it was its first load
                return none
            _forget_unfinished(client, where)
            number = snapshot_version(where)
            if any(one["version"] == number for one in client.status(model)["models"][model]["versions"]):
                return f"version {number} is loaded and kept, and not active; what served before does so"
            return none
    except (KeyboardInterrupt, TierstoreError) as error:
        why = f" ({error})" if isinstance(error, TierstoreError) else ""
        say_aside(
            f"import: the service may still load {where}, which is left to it{why}: `tierstore jobs --url {url}` says "
            "how that ends; remove it then"
        )
        raise _StillRead from None


def _cancelled(client: Client, job: str) -> dict[str, Any]:
    """Have a job stopped. Returns its document once it has ended, however."""
    with suppress(Conflict):  # it has ended
        client.cancel(job)
    while (document := client.job(job))["state"] == "running":
        time.sleep(_POLL_S)
    return document


def _forget_unfinished(store: Store | Client, where: Path) -> None:
    """Remove what the load of a snapshot has left to go on with: the snapshot goes as well."""
    from tierstore.client.identify import snapshot_model, snapshot_version

    model, version = snapshot_model(where), snapshot_version(where)
    if str(version) in store.status(model)["models"][model]["unfinished"]:
        store.drop(model, version)


@contextmanager
def _directory(out: Path | None, data: Path | None, url: str | None, number: int) -> Iterator[Path]:
    """Where the snapshot is written: `out`, or a directory that is removed at the end."""
    if out is not None:
        yield out
        return
    target = service_url(data, url)
    parent = _data_directory(data).absolute().parent if target is None else _source_directory(target)
    from tierstore.formats import files

    with files.new_dirs(parent):
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-import-", dir=parent))
        try:
            yield scratch / str(number)
        except _StillRead:
            raise
        except BaseException:
            shutil.rmtree(scratch)
            raise
        shutil.rmtree(scratch)


def _source_directory(url: str) -> Path:
    """A directory that this machine can write to, if possible one that the service reads snapshots from: the working
    directory, or a source root. What the service does not see is sent.
    """
    here = Path.cwd().resolve()
    with make_client(url) as client:
        try:
            roots = client.status().get("service", {}).get("source_roots")
        except Unauthorized:  # before the work
            raise
        except Forbidden:  # a token for one model may not ask
            return here
    if roots is None:  # of an earlier release
        return here
    local = [Path(root) for root in roots if "://" not in root]
    if any(here.is_relative_to(root) for root in local):
        return here
    for root in local:
        if os.access(root, os.W_OK | os.X_OK):
            return root
    return here


def _data_directory(data: Path | None) -> Path:
    from tierstore.config import load_settings

    return load_settings(data=data).data


def _written(where: Path) -> Sequence[TableEntry]:
    from tierstore.formats.snapshot.reader import open_snapshot

    return open_snapshot(where).manifest.tables


def _say(json: bool, results: list[dict[str, Any]]) -> None:
    if json:
        from tierstore.cli import show

        show.as_json(results[0] if len(results) == 1 else results)
        return
    for result in results:
        rows = ", ".join(_table_line(result, name) for name in result["rows"])
        done = "is active" if result["active"] else f"is in {result['snapshot']}"
        typer.echo(f"{result['model']} version {result['version']} {done}: {rows} ({result['seconds']:.1f} s)")


def _table_line(result: dict[str, Any], name: str) -> str:
    without = _without(result["left_out"][name], result["expired"].get(name, 0))
    off = _off(result["dtypes"][name], result["rounding"][name])
    return f"{result['rows'][name]:,} rows of {name}, dim {result['dims'][name]}{without}{off}"


def _off(dtype: str, rounding: dict[str, float]) -> str:
    if not rounding["largest"]:
        return ""
    return f" as {dtype}, which is off by {rounding['largest']:.3g} at most and {rounding['mean']:.3g} on average"


def _without(left_out: dict[str, int], expired: int) -> str:
    nulls, duplicates = left_out["nulls"], left_out["duplicates"]
    parts = [f"{expired:,} older than their ttl"] if expired else []
    parts += [f"{nulls:,} with a null"] if nulls else []
    parts += [f"{duplicates:,} whose key comes again"] if duplicates else []
    return f" (left out: {', '.join(parts)})" if parts else ""
