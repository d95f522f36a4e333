"""`tierstore audit`: who changed what. Reads the files of the audit, whether or not a service runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, option

Model = Annotated[str | None, option("MODEL", "Only what is about a model.")]
Directory = Annotated[
    Path | None,
    option(
        "DIR", "The directory that holds `audit` (default: the data directory); that of a file of tokens, for those."
    ),
]


def audit(
    data: Data = None,
    directory: Directory = None,
    model: Model = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", min=1, help="Only the newest N lines.", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Show who changed what, and whom the service refused.

    With time and outcome, oldest first.
    """
    from tierstore.access.audit import read
    from tierstore.cli import show
    from tierstore.config import load_settings

    lines = read(directory or load_settings(data=data).data)
    wanted = deque((line for line in lines if model is None or line.get("model") == model), maxlen=last)
    if json:
        show.as_json(list(wanted))
        return
    if not wanted:
        typer.echo("no changes")
        return
    show.entries([_entry(line) for line in wanted])


def _entry(line: Mapping[str, Any]) -> tuple[list[str], str]:
    """A line of the audit in short words, and who it was, what has moved, and everything else."""
    from tierstore.cli.show import plain

    words = [plain(line.get(name)) for name in ("time", "what", "model", "outcome")]
    parts = [f"by {line['who']}" if line.get("who") else "", _moved(line.get("before"), line.get("after"))]
    parts += [f"{name} {value}" for name, value in line.items() if name not in _COLUMNS]
    return words, plain(", ".join(filter(None, parts)))


_COLUMNS = frozenset({"time", "who", "what", "model", "outcome", "before", "after"})


def _moved(before: Any, after: Any) -> str:
    """What a change has moved."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    changed = {name: (value, after.get(name)) for name, value in before.items() if value != after.get(name)}
    return ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
