"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data directory (default: ./data).", show_default=False),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="A running service to do it through, such as http://127.0.0.1:8000.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.", show_default=False)]
VersionNumber = Annotated[int, typer.Argument(metavar="VERSION", help="Number of the version.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Take a version that lacks deltas which the log no longer holds.")]
