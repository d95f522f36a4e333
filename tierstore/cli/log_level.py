"""`tierstore log-level`: how much a running service logs, without a restart."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstore.cli.options import AsJson, Url, argument
from tierstore.cli.target import make_client, say, service_url
from tierstore.logs import LogLevel


def log_level(
    level: Annotated[LogLevel, argument("LEVEL", "debug, info, warning or error: the lowest level that is logged.")],
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Have a running service log from this level up, until its process ends."""
    where = service_url(None, url)
    if where is None:
        raise typer.BadParameter("expected the running service, as --url or in TIERSTORE_URL; got none")
    with make_client(where) as client:
        before = client.log_level(level)
    say(json, {"level": level, "before": before}, f"logs from {level} up, before from {before} up")
