"""Commands that back models up while they serve, and bring them back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.options import AsJson, Data, Url, argument, option
from tierstore.cli.target import fate, local_user, open_target, say, written_to
from tierstore.sizes import size_text


def backup(
    words: Annotated[
        list[str],
        argument(
            "[MODEL] OUT",
            "The model, and a directory or URL; with --url as the service sees it, below its export_root.",
        ),
    ],
    all_models: Annotated[bool, typer.Option("--all", help="Every model; then OUT alone is expected.")] = False,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="How many backups of a model stay in OUT, the newest.")
    ] = 1,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Copy a model as it is at one moment.

    All its versions and its log; it goes on serving. OUT may have earlier backups: files that are there
    already are not written again.
    """
    from tierstore.cli.progress import shown_progress

    if len(words) != (1 if all_models else 2):
        raise typer.BadParameter("expected MODEL OUT, or --all OUT")
    out = words[-1]
    kept = fate(data, url, "there is no new backup; files that are copied are kept, for the next one")
    with open_target(data, url) as target, shown_progress("backup", kept) as progress:
        models = target.models() if all_models else words[:1]
        reports = [target.backup(model, out, keep=keep, progress=progress) for model in models]
    where = written_to(data, url, out)
    lines = (
        f"{each.model} is backed up at seq {each.seq} in {where}: {each.files:,} files, {size_text(each.bytes)}, of "
        f"which {size_text(each.new_bytes)} are new"
        for each in reports
    )
    say(json, {"directory": out, "models": [asdict(each) for each in reports]}, "\n".join(lines) or "there is no model")


def restore(
    out: Annotated[str, argument("OUT", "The directory or URL of the backups.")],
    models: Annotated[list[str] | None, argument("[MODEL]...", "The models to restore; by default all.")] = None,
    data: Data = None,
    number: Annotated[
        int | None, option("N", "Number of the backup, as its name in OUT begins; by default the newest.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Bring models back from a backup.

    The data directory must be one that no service has open. Every file is compared with its checksum. A model that is
    there already is not overwritten.
    """
    from tierstore.cli.progress import shown_progress
    from tierstore.config import load_settings
    from tierstore.engine.events.changes import REQUESTER
    from tierstore.engine.operations.restore import restore as restored

    where: Path = load_settings(data=data).data
    before = REQUESTER.set(local_user())
    try:
        with shown_progress("restore", "nothing is restored, and nothing of it is left") as progress:
            reports = restored(out, where, models or (), number=number, progress=progress)
    finally:
        REQUESTER.reset(before)
    lines = (
        f"{each.model} is restored at seq {each.seq} in {where}: {each.files:,} files, {size_text(each.bytes)}"
        for each in reports
    )
    say(json, {"data": str(where), "models": [asdict(each) for each in reports]}, "\n".join(lines))
