"""`tierstore jobs` and `tierstore log-level`: what only a running service has."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from tierstore.cli.options import AsJson, Url, argument, option
from tierstore.cli.target import make_client, say, service_url
from tierstore.logs import LogLevel


def jobs(
    url: Url = None,
    cancel: Annotated[str | None, option("JOB", "Ask one to stop, by its id. It ends as failed.")] = None,
    acknowledge: Annotated[
        str | None,
        option("JOB", "Say that a failed load is known, by its id: it is no problem in the status any more."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List loads, exports and backups of a service.

    Those under way, those that wait, and those that ended lately.
    """
    if (url := service_url(None, url)) is None:
        raise typer.BadParameter("expected --url: only a running service has jobs")
    with make_client(url) as client:
        if cancel is not None:
            client.cancel(cancel)
            say(json, {"cancelled": cancel}, f"job {cancel} is asked to stop")
            return
        if acknowledge is not None:
            client.acknowledge(acknowledge)
            say(json, {"acknowledged": acknowledge}, f"job {acknowledge} is known to have failed")
            return
        found = client.jobs()
    say(json, found, _show if found else "no job is running, waiting or recently ended")


def log_level(
    level: Annotated[LogLevel, argument("LEVEL", "debug, info, warning or error: the lowest level that is logged.")],
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Change how much a running service logs."""
    if (url := service_url(None, url)) is None:
        raise typer.BadParameter("expected the running service, as --url or in TIERSTORE_URL; got none")
    with make_client(url) as client:
        before = client.log_level(level)
    say(json, {"level": level, "before": before}, f"logs from {level} up, before from {before} up")


def _show(found: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tierstore.cli import show

    now_s = time.time()
    table = Table("job", "kind", "model", "state", "done", "", box=None, header_style="bold")
    for job in found:
        total = job["total"]
        done = f"{job['done']:,}" + (f" of {total:,}" if total else "") if job["state"] == "running" else ""
        seconds = (job["finished_at"] or now_s) - job["created_at"]
        words = job["error"] or job["phase"] or job["waits_for"] or ("waits" if job["state"] == "running" else "")
        eta = f", {job['eta_s']:,.0f} s to go" if job["eta_s"] is not None and job["state"] == "running" else ""
        table.add_row(
            job["job"], job["kind"], escape(job["model"]), job["state"], done, escape(f"{seconds:,.0f} s{eta}  {words}")
        )
    show.console().print(table)
