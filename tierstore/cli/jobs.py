"""`tierstore jobs` and `tierstore log-level`: what only a running service has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
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
    from tierstore.cli import show

    show.entries([_entry(job) for job in found])


def _entry(job: Mapping[str, Any]) -> tuple[list[str], str]:
    """A job in short words, and what it works on, how far it is, and why it failed."""
    from tierstore.cli import show

    began, running = datetime.fromtimestamp(job["created_at"], UTC), job["state"] == "running"
    seconds = (job["finished_at"] or time.time()) - job["created_at"]
    words = [
        job["job"], job["kind"], show.plain(job["model"]), show.plain(job["version"]) or "–", job["state"],
        f"{began:%Y-%m-%d %H:%M} UTC", f"{seconds:,.0f} s",
    ]  # fmt: skip
    parts = [show.plain(job["source"] or job["directory"])]
    if running:
        parts.append(job["phase"] + (f" {job['done']:,} of {job['total']:,}" if job["total"] else ""))
        parts += [f"{job['eta_s']:,.0f} s to go"] if job["eta_s"] is not None else []
        parts += [f"waits: {show.plain(job['waits_for'])}"] if job["waits_for"] else []
    if job["error"]:
        parts.append(show.plain(job["error"]) + (" (acknowledged)" if job["acknowledged"] else ""))
    return words, ", ".join(filter(None, parts))
