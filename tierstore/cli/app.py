"""The commands: each reads its options, calls the verb that does the work, and prints the result."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore import __version__
from tierstore.cli.options import (
    AsJson,
    Command,
    Data,
    Group,
    ModelName,
    ServedVersion,
    Url,
    argument,
    number_or_label,
    option,
)
from tierstore.cli.target import (
    check_directory,
    fate,
    key_type,
    open_data,
    open_target,
    parse_keys,
    say,
    say_aside,
    say_what_goes,
    service_url,
    shown_kernels,
    warn_of_dense,
)
from tierstore.sizes import size_text

if TYPE_CHECKING:  # what `_found` imports
    from tierstore.cli import audit as audit
    from tierstore.cli import backup as backup
    from tierstore.cli import bench as bench
    from tierstore.cli import caches as caches
    from tierstore.cli import delta as delta
    from tierstore.cli import explain as explain
    from tierstore.cli import export as export
    from tierstore.cli import fleet as fleet
    from tierstore.cli import imports as imports
    from tierstore.cli import jobs as jobs
    from tierstore.cli import parked as parked
    from tierstore.cli import plan as plan
    from tierstore.cli import serve as serve
    from tierstore.cli import tokens as tokens
    from tierstore.cli import triton as triton
    from tierstore.cli import versions as versions


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierstore {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def load(
    snapshot: Annotated[
        str,
        argument(
            "SNAPSHOT", "The directory of a snapshot or built version; with --url as the service sees it, or sent."
        ),
    ],
    data: Data = None,
    url: Url = None,
    no_activate: Annotated[bool, typer.Option("--no-activate", help="Keep the version without serving it.")] = False,
    model: Annotated[str | None, option("MODEL", "The expected model; by default read from the snapshot.")] = None,
    json: AsJson = False,
) -> None:
    """Load a snapshot and serve it.

    It is checked, caught up with the deltas it lacks, and warmed; then the service switches to it in one step.
    """
    from tierstore.cli.progress import shown_progress

    started_s = time.monotonic()
    if service_url(data, url) is None:
        check_directory(snapshot)
    # A path that exists here is sent as an absolute one: the working directory of the service may be another.
    source = str(Path(snapshot).resolve()) if Path(snapshot).is_dir() else snapshot
    kept = fate(data, url, "what served before does so; the same command goes on with the files that are whole")
    with open_target(data, url, create=True) as target, shown_progress("load", kept) as progress:
        if not no_activate:
            say_what_goes(target, model, source)
        version = target.load_snapshot(source, activate=not no_activate, progress=progress, model=model)
        warn_of_dense(target, source, version)
    seconds, state = time.monotonic() - started_s, "kept" if no_activate else "active"
    document = {"version": version, "active": not no_activate, "seconds": round(seconds, 3)}
    say(json, document, f"version {version} is loaded and {state} ({seconds:.1f} s)")


def lookup(
    model: ModelName,
    feature: Annotated[str, argument("FEATURE", "Name of the feature.")],
    keys: Annotated[list[str], argument("KEY", "Keys.")],
    data: Data = None,
    url: Url = None,
    version: ServedVersion = None,
    json: AsJson = False,
) -> None:
    """Look up rows."""
    from tierstore.cli import show

    with open_target(data, url) as target:
        parsed = parse_keys(keys, key_type(target.status(model), model, feature))
        wanted = number_or_label(version)
        rows, found = target.model(model).lookup(feature, parsed, return_found=True, version=wanted)
    vectors = [[float(str(number)) for number in row] for row in rows]  # through text: 0.1, not 0.10000000149011612
    if json:
        entries = [
            {"key": key, "found": bool(is_found), "row": row}
            for key, is_found, row in zip(parsed, found, vectors, strict=True)
        ]
        show.as_json({"model": model, "feature": feature, "rows": entries})
    else:
        show.rows(parsed, found.tolist(), vectors)


def status(
    model: Annotated[str | None, argument("MODEL", "One model; by default all.")] = None,
    data: Data = None,
    url: Annotated[
        list[str] | None, option("URL", "A running service; given again, the services are compared.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show versions, watermarks, tiers and hit rates.

    With several --url: whether these nodes serve the same versions, deltas and rows. Exit code 1 if they do not.
    """
    from tierstore.cli import show

    if url and len(url) > 1:
        if data is not None:
            raise typer.BadParameter("expected --data or --url, got both")
        from tierstore.cli.fleet import compare_nodes

        compare_nodes(url, model, json)
        return
    with open_target(data, url[0] if url else None) as target:
        document = target.status(model)
    say(json, document, show.status)


def verify(
    data: Data = None,
    url: Url = None,
    against: Annotated[
        str | None, option("URL", "Compare every row that is served with this node, and say which keys differ.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Read everything back and check it, or compare two nodes.

    Exit code 1 if something is wrong. Without --against it works on a data directory that no service has open; with it
    on a service too, and every row of both is read while they serve.
    """
    from tierstore.cli import fleet, show
    from tierstore.cli.progress import shown_progress

    if against is not None:
        fleet.compare_whole(data, url, against, json)
        return
    if url is not None:
        raise typer.BadParameter("--url goes with --against; stop the service, and verify its data directory")
    with open_data(data) as store, shown_progress("verify", "nothing was changed") as progress:
        report = store.verify(progress)
    if json:
        show.as_json({"ok": report.ok, **asdict(report)})
    else:
        typer.echo(
            f"read {report.versions} versions, {report.rows:,} rows ({size_text(report.bytes_read)}) and "
            f"{report.deltas:,} deltas back"
        )
        for line in report.golden:
            typer.echo(f"golden examples of {line}")
        for problem in report.problems:
            typer.echo(f"problem: {problem}")
        typer.echo("all is well" if report.ok else f"{len(report.problems)} problems")
    if not report.ok:
        raise typer.Exit(1)


def compile_(
    data: Data = None,
    timings: Annotated[
        bool, typer.Option("--timings", help="Show which kernels took how much processor time, the dearest first.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Compile all kernels ahead of the first start.

    They are cached for this version and this kind of processor: next to the package or in the home directory, or in the
    data directory where neither can be written. NUMBA_CACHE_DIR names another directory.
    """
    from tierstore import kernels
    from tierstore.config import load_settings
    from tierstore.kernels import ahead
    from tierstore.machine import processors

    kernels.use_data(load_settings(data=data).data)
    with shown_kernels() as report:
        took: dict[str, float] = {}
        seconds = ahead.compile_all(min(ahead.MOST, processors()), say_aside, report, took)
    where = str(kernels.directory())
    done = f"compiled in {seconds:.1f} s" if seconds else "compiled already"
    dearest = dict(sorted(took.items(), key=lambda each: -each[1])) if timings else {}
    lines = [f"{cost:7.2f} s  {name}" for name, cost in dearest.items()]
    document = {"directory": where, "seconds": round(seconds, 3)} | ({"timings": dearest} if timings else {})
    say(json, document, "\n".join([*lines, f"kernels are {done}: {where}"]))


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the service up at the end, until Ctrl-C.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1, help="How long deltas stream.", show_default=False)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the demo's service; 0 picks a free one.")] = 0,
    json: AsJson = False,
) -> None:
    """Tell the whole story in a minute.

    A click model is trained on the spot and served by a real service, with snapshots, deltas and live traffic.
    Exit code 1 if a request failed, an answer was wrong, or the deltas did not help.
    """
    from rich.console import Console

    from tierstore.cli import show
    from tierstore.demo import run

    report = run(keep=keep, seconds=seconds, port=port, console=Console(stderr=True) if json else None)
    if json:
        show.as_json(report.document())
    if not report.ok:
        raise typer.Exit(1)


# Where each is, in the order in which `--help` lists them: what comes first in a user's day is first.
_COMMANDS = {
    "demo": "app.demo",
    "import": "imports.import_",
    "import-hps": "imports.import_hps",
    "serve": "serve.serve",
    "compile": "app.compile_",
    "load": "app.load",
    "delta": "delta.delta",
    "lookup": "app.lookup",
    "explain": "explain.explain",
    "status": "app.status",
    "hot": "caches.hot",
    "activate": "versions.activate",
    "rollback": "versions.rollback",
    "canary": "versions.canary",
    "promote": "versions.promote",
    "withdraw": "versions.withdraw",
    "label": "versions.label",
    "drop": "versions.drop",
    "build": "export.build",
    "export": "export.export",
    "rollout": "fleet.rollout",
    "jobs": "jobs.jobs",
    "backup": "backup.backup",
    "restore": "backup.restore",
    "verify": "app.verify",
    "audit": "audit.audit",
    "plan": "plan.plan",
    "bench": "bench.bench",
    "triton-model": "triton.triton_model",
    "log-level": "jobs.log_level",
    "token": "tokens.token",
    "parked": "parked.parked",
}
_CLASSES = {"serve": "serve.ServeCommand", "lookup": "options.KeysCommand", "explain": "options.KeysCommand"}


def _found(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"tierstore.cli.{module}"), name)


def application(name: str = "") -> typer.Typer:
    """With the command of this name, or with all, which takes three times as long: all are imported and read."""
    made = typer.Typer(
        cls=Group,
        help="A tiered embedding store: rows in memory and on SSD, daily snapshots, deltas in between.",
        epilog="Commands work on the data directory in --data (default ./data), or with --url through the service that "
        "holds it open.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help and errors: faster to start, and readable for `grep`
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root)
    needed = {name: _COMMANDS[name]} if name in _COMMANDS else {} if name == "--version" else _COMMANDS
    for of, place in needed.items():
        command = _found(place)
        if isinstance(command, typer.Typer):
            made.add_typer(command, name=of)
        else:
            made.command(of, cls=_found(_CLASSES[of]) if of in _CLASSES else Command)(command)
    return made
