"""Commands that write versions: finished files of a snapshot, and what a model serves."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from tierstore.cli.options import AsJson, Data, ModelName, Url, argument, option
from tierstore.cli.target import check_directory, fate, open_target, ready_kernels, say, written_to
from tierstore.sizes import size_text


def build(
    snapshot: Annotated[str, argument("SNAPSHOT", "The snapshot's directory, or its URL.")],
    out: Annotated[str, argument("OUT", "The directory to make: a new one, or empty; or a URL with nothing below it.")],
    partitions: Annotated[
        int, typer.Option("--partitions", metavar="P", min=1, help="Make a folder for each of P shares of the keys.")
    ] = 1,
    json: AsJson = False,
) -> None:
    """Make a snapshot's files once, for `load` to copy anywhere.

    Needs no data directory and no service. A build that was interrupted continues when it is started again.
    """
    from tierstore.cli.progress import shown_progress
    from tierstore.formats.files import tree_bytes
    from tierstore.formats.objects import is_url
    from tierstore.formats.snapshot.reader import local_path
    from tierstore.ingest.build import build_snapshot

    check_directory(snapshot)
    started_s = time.monotonic()
    ready_kernels()
    with shown_progress("build", "the same command goes on with the files that are whole") as progress:
        version = build_snapshot(snapshot, out, partitions=partitions, progress=progress)
    seconds, nbytes = time.monotonic() - started_s, None if is_url(out) else tree_bytes(local_path(out))
    size = "" if nbytes is None else f": {size_text(nbytes)}"
    say(
        json,
        {"version": version, "directory": out, "bytes": nbytes, "seconds": round(seconds, 3)},
        f"version {version} is built in {out}{size} ({seconds:.1f} s)",
    )


def export(
    model: ModelName,
    directory: Annotated[
        str, argument("DIR", "The directory or URL to make; with --url as the service sees it, below its export_root.")
    ],
    data: Data = None,
    url: Url = None,
    version: Annotated[
        str | None, option("VERSION", "Number or label of a version that is served; by default the active one.")
    ] = None,
    as_version: Annotated[
        int | None,
        typer.Option("--as-version", metavar="N", min=1, help="Number of the snapshot; by default the same."),
    ] = None,
    built: Annotated[bool, typer.Option("--built", help="Write a built version, which loads only copy.")] = False,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", metavar="P", min=1, help="With --built: a folder for each of P shares of the keys."
        ),
    ] = 1,
    json: AsJson = False,
) -> None:
    """Write what a model serves now as a snapshot.

    Or, with --built, as a built version.

    It holds the base and all deltas up to one seq. Look-ups, deltas and switches go on.
    """
    from tierstore.cli.progress import shown_progress

    if partitions > 1 and not built:
        raise typer.BadParameter("--partitions: expected --built as well, as a snapshot has no partitions")
    wanted = int(version) if version is not None and version.isdigit() else version
    kept = fate(data, url, "nothing is exported, and nothing of it is left")
    with open_target(data, url) as target, shown_progress("export", kept) as progress:
        report = target.export(
            model,
            directory,
            version=wanted,
            as_version=as_version,
            partitions=partitions if built else None,
            progress=progress,
        )
    where = written_to(data, url, directory)
    say(
        json,
        {**asdict(report), "directory": directory},
        f"{model} version {report.version} at seq {report.seq} is exported to {where}: {report.rows:,} rows",
    )
