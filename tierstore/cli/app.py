"""The commands: each reads its options, calls the verb that does the work, and prints what came of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore import __version__
from tierstore.cli.imports import import_, import_hps
from tierstore.cli.options import AsJson, Data, Force, ModelName, Url, VersionNumber
from tierstore.cli.place import key_type, local, parse_keys, parse_share, place, warn_of_dense
from tierstore.cli.serve import ServeCommand, serve

app = typer.Typer(
    help="A tiered embedding store: rows in memory and on SSD, daily snapshots, deltas in between.",
    epilog="Commands work on the data directory in --data (default ./data), or with --url through the service that holds it open.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and errors: they start faster, and are read by `grep` as well
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ServeCommand)(serve)
app.command("import")(import_)
app.command()(import_hps)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierstore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def load(
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="SNAPSHOT",
            help="The directory of a snapshot, or of a built version; with --url as the service sees it.",
            show_default=False,
        ),
    ],
    data: Data = None,
    url: Url = None,
    no_activate: Annotated[bool, typer.Option("--no-activate", help="Keep the version without serving it.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The model expected; read from the snapshot if not given.", show_default=False
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Load a snapshot and serve it.

    It is checked, caught up with the deltas it lacks, and warmed; then the service switches to it in one step.
    """
    from tierstore.cli import show
    from tierstore.cli.progress import shown_progress

    begun_s = time.monotonic()
    # A path that is here goes to the service as an absolute one, since its working directory may be another.
    source = str(Path(snapshot).resolve()) if Path(snapshot).is_dir() else snapshot
    with place(data, url, create=True) as held, shown_progress("load") as progress:
        version = held.load_snapshot(source, activate=not no_activate, progress=progress, model=model)
        warn_of_dense(held, source, version)
    seconds = time.monotonic() - begun_s
    if json:
        show.as_json({"version": version, "active": not no_activate, "seconds": round(seconds, 3)})
    else:
        typer.echo(f"version {version} is loaded and {'kept' if no_activate else 'active'} ({seconds:.1f} s)")


@app.command()
def build(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="The snapshot's directory.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The directory to make: a new one, or empty.", show_default=False)
    ],
    partitions: Annotated[
        int, typer.Option("--partitions", metavar="P", min=1, help="Make a folder for each of P shares of the keys.")
    ] = 1,
    json: AsJson = False,
) -> None:
    """Make the finished files of a snapshot, for `tierstore load` to copy on any number of machines.

    Needs no data directory and no service. One that was broken off goes on when it is begun again.
    """
    from tierstore.cli import show
    from tierstore.cli.progress import shown_progress
    from tierstore.formats.files import tree_bytes
    from tierstore.ingest.building import build_snapshot

    begun_s = time.monotonic()
    with shown_progress("build") as progress:
        version = build_snapshot(snapshot, out, partitions=partitions, progress=progress)
    seconds, nbytes = time.monotonic() - begun_s, tree_bytes(out)
    _say(
        json,
        {"version": version, "directory": str(out), "bytes": nbytes, "seconds": round(seconds, 3)},
        f"version {version} is built in {out}: {show.size(nbytes)} ({seconds:.1f} s)",
    )


@app.command()
def delta(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="Deltas (Arrow IPC), in the order of their seq.",
            show_default=False,
        ),
    ],
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Apply deltas.

    One after the other, up to the first that is refused. One that is held already changes nothing.
    """
    from tierstore.cli import show

    results = []
    try:
        with place(data, url) as held:
            for file in files:
                result = held.apply_delta(file)
                results.append(result)
                if not json:
                    typer.echo(
                        f"{result.model} delta {result.seq} {'is applied' if result.applied else 'was held already'}"
                    )
    finally:
        if json:
            show.as_json([asdict(result) for result in results])


@app.command()
def activate(
    model: ModelName,
    version: VersionNumber,
    data: Data = None,
    url: Url = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Serve a version that is kept."""
    with place(data, url) as held:
        held.activate(model, version, force=force)
    _say(json, {"model": model, "active_version": version}, f"{model} serves version {version}")


@app.command()
def rollback(model: ModelName, data: Data = None, url: Url = None, force: Force = False, json: AsJson = False) -> None:
    """Serve the kept version before the active one."""
    with place(data, url) as held:
        version = held.rollback(model, force=force)
    _say(json, {"model": model, "active_version": version}, f"{model} serves version {version}")


@app.command()
def canary(
    model: ModelName,
    version: VersionNumber,
    share: Annotated[
        str, typer.Option("--share", metavar="SHARE", help="Of the requests that name no version: 5% or 0.05.")
    ] = "5%",
    data: Data = None,
    url: Url = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Serve a kept version beside the active one, to a share of the requests.

    For the version that is the canary already, only the share changes.
    """
    part = parse_share(share)
    with place(data, url) as held:
        held.canary(model, version, part, force=force)
    _say(
        json,
        {"model": model, "canary": {"version": version, "share": part}},
        f"{model} serves version {version} as canary, to {100 * part:g}% of the requests",
    )


@app.command()
def promote(model: ModelName, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Make the canary the active version."""
    with place(data, url) as held:
        version = held.promote(model)
    _say(json, {"model": model, "active_version": version}, f"{model} serves version {version}")


@app.command()
def withdraw(model: ModelName, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Stop serving the canary; the version is kept."""
    with place(data, url) as held:
        version = held.withdraw(model)
    _say(json, {"model": model, "withdrawn": version}, f"{model} version {version} is withdrawn, and kept")


@app.command()
def label(
    model: ModelName,
    name: Annotated[str, typer.Argument(metavar="LABEL", help="Name of the label.", show_default=False)],
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", help="Number of a version that is served.", show_default=False)
    ] = None,
    data: Data = None,
    url: Url = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the label.")] = False,
    json: AsJson = False,
) -> None:
    """Let a label stand for a version that is served.

    It goes when that version is served no more. `stable` and `canary` are always there.
    """
    if (version is None) is not remove:
        raise typer.BadParameter("give the VERSION that the label is to stand for, or --remove")
    with place(data, url) as held:
        if version is None:
            held.unlabel(model, name)
        else:
            held.label(model, name, version)
    done = "is removed" if version is None else f"stands for version {version}"
    _say(json, {"model": model, "label": name, "version": version}, f"{model} label {name} {done}")


@app.command()
def drop(model: ModelName, version: VersionNumber, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Delete a version that is not served."""
    with place(data, url) as held:
        held.drop(model, version)
    _say(json, {"model": model, "dropped": version}, f"{model} version {version} is dropped")


@app.command()
def lookup(
    model: ModelName,
    feature: Annotated[str, typer.Argument(metavar="FEATURE", help="Name of the feature.", show_default=False)],
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Keys; put `--` before negative ones.", show_default=False)
    ],
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Look rows up."""
    from tierstore.cli import show

    with place(data, url) as held:
        parsed = parse_keys(keys, key_type(held.status(model), model, feature))
        rows, found = held.model(model).lookup(feature, parsed, return_found=True)
    vectors = [[float(str(number)) for number in row] for row in rows]  # by way of text: 0.1, not 0.10000000149011612
    if json:
        entries = [
            {"key": key, "found": bool(is_found), "row": row}
            for key, is_found, row in zip(parsed, found, vectors, strict=True)
        ]
        show.as_json({"model": model, "feature": feature, "rows": entries})
    else:
        show.rows(parsed, found.tolist(), vectors)


@app.command()
def status(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="One model; all if not given.", show_default=False)
    ] = None,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Show versions, watermarks, tiers and hit rates."""
    from tierstore.cli import show

    with place(data, url) as held:
        document = held.status(model)
    if json:
        show.as_json(document)
    else:
        show.status(document)


@app.command()
def verify(data: Data = None, json: AsJson = False) -> None:
    """Read everything back and check it.

    Exit code 1 if something is wrong. Works on a data directory that no service holds open.
    """
    from tierstore.cli import show
    from tierstore.cli.progress import shown_progress

    with local(data) as store, shown_progress("verify") as progress:
        report = store.verify(progress)
    if json:
        show.as_json({"ok": report.ok, **asdict(report)})
    else:
        typer.echo(
            f"read {report.versions} versions, {report.rows:,} rows ({show.size(report.bytes_read)}) and {report.deltas:,} deltas back"
        )
        for problem in report.problems:
            typer.echo(f"problem: {problem}")
        typer.echo("all is well" if report.ok else f"{len(report.problems)} problems")
    if not report.ok:
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    data: Data = None,
    json: AsJson = False,
) -> None:
    """Compile all kernels ahead of the first start.

    They are kept for this version and this kind of processor: beside the package or in the home directory, or in the data
    directory where neither can be written. NUMBA_CACHE_DIR names another place.
    """
    from tierstore import kernels
    from tierstore.config import cores, load_settings
    from tierstore.kernels import ahead

    kernels.use_data(load_settings(data=data).data)
    seconds = ahead.compile_all(min(ahead.MOST, cores()), lambda line: typer.echo(f"tierstore: {line}", err=True))
    where = str(kernels.directory())
    done = f"compiled in {seconds:.1f} s" if seconds else "compiled already"
    _say(json, {"directory": where, "seconds": round(seconds, 3)}, f"kernels are {done}: {where}")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the service up at the end, until Ctrl-C.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1, help="How long deltas stream.", show_default=False)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the demo's service; 0 picks a free one.")] = 0,
    json: AsJson = False,
) -> None:
    """Tell the whole story in a minute.

    A click model is trained on the spot and served by a real service, with snapshots, deltas and live traffic.
    Exit code 1 if a request failed, an answer was wrong, or the deltas were of no use.
    """
    from rich.console import Console

    from tierstore.cli import show
    from tierstore.demo import run

    report = run(keep=keep, seconds=seconds, port=port, console=Console(stderr=True) if json else None)
    if json:
        show.as_json(report.document())
    if not report.ok:
        raise typer.Exit(1)


def _say(json: bool, document: dict[str, Any], text: str) -> None:
    if json:
        from tierstore.cli import show

        show.as_json(document)
    else:
        typer.echo(text)
