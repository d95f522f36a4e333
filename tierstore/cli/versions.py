"""Commands that change which version answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, Force, ModelName, Url, VersionNumber, argument
from tierstore.cli.target import open_target, parse_share, say, say_what_goes

if TYPE_CHECKING:
    from tierstore.client import Client
    from tierstore.engine.store import Store


def activate(
    model: ModelName,
    version: VersionNumber,
    data: Data = None,
    url: Url = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Serve a kept version."""
    with open_target(data, url) as target:
        before = _canary(target, model)
        target.activate(model, version, force=force)
        ended = _ended(target, model, before)
    _say_switch(json, {"model": model, "active_version": version}, f"{model} serves version {version}", ended)


def rollback(
    model: ModelName,
    data: Data = None,
    url: Url = None,
    to_seq: Annotated[
        int | None,
        typer.Option(
            "--to-seq", metavar="SEQ", min=0, help="Keep the version, and undo all deltas above this sequence number."
        ),
    ] = None,
    force: Force = False,
    expected_active: Annotated[
        int | None,
        typer.Option("--expected-active", metavar="VERSION", help="Refuse where another version is active."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Serve the version before, or undo the last deltas.

    The kept version before the active one; with --to-seq the active one, without the deltas above that seq.
    """
    with open_target(data, url) as target:
        before = _canary(target, model)
        version = target.rollback(model, to_seq=to_seq, force=force, expected_active=expected_active)
        ended = _ended(target, model, before)
    document = {"model": model, "active_version": version} | ({} if to_seq is None else {"to_seq": to_seq})
    as_of = "" if to_seq is None else f" as of delta {to_seq}"
    _say_switch(json, document, f"{model} serves version {version}{as_of}", ended)


def _canary(target: Store | Client, model: str) -> int | None:
    canary = target.status(model)["models"][model]["canary"]
    return None if canary is None else canary["version"]


def _ended(target: Store | Client, model: str, before: int | None) -> int | None:
    """The version that was the canary before a switch, and is not served after it."""
    if before is None:
        return None
    status = target.status(model)["models"][model]
    canary = status["canary"]
    return None if before in (status["active_version"], canary and canary["version"]) else before


def _say_switch(json: bool, document: dict[str, Any], text: str, ended: int | None) -> None:
    if ended is not None:
        document, text = {**document, "withdrawn": ended}, f"{text}; the canary, version {ended}, is withdrawn"
    say(json, document, text)


def canary(
    model: ModelName,
    version: VersionNumber,
    share: Annotated[
        str, typer.Option("--share", metavar="SHARE", help="Share of the requests that name no version: 5% or 0.05.")
    ] = "5%",
    data: Data = None,
    url: Url = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Serve a kept version to a share of the requests.

    Next to the active one.

    If that version is the canary already, only its share changes.
    """
    part = parse_share(share)
    with open_target(data, url) as target:
        target.canary(model, version, part, force=force)
        memory = _memory(target.status(model)["models"][model]["versions"])
    say(
        json,
        {"model": model, "canary": {"version": version, "share": part}},
        f"{model} serves version {version} as canary, to {100 * part:g}% of the requests{memory}",
    )


def _memory(versions: Iterable[Mapping[str, Any]]) -> str:
    """How much memory for rows the canary has, and what is left to the active version; empty where that is unknown."""
    from tierstore.sizes import size_text

    has = {one["state"]: size_text(one["host_bytes"]["budget"]) for one in versions if one.get("host_bytes")}
    if not {"active", "canary"} <= has.keys():
        return ""
    return f"; it has {has['canary']} of memory for rows, the active version {has['active']}"


def promote(model: ModelName, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Make the canary the active version."""
    with open_target(data, url) as target:
        say_what_goes(target, model)
        version = target.promote(model)
    say(json, {"model": model, "active_version": version}, f"{model} serves version {version}")


def withdraw(model: ModelName, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Stop serving the canary; the version is kept."""
    with open_target(data, url) as target:
        version = target.withdraw(model)
    say(json, {"model": model, "withdrawn": version}, f"{model} version {version} is withdrawn, and kept")


def label(
    model: ModelName,
    name: Annotated[str, argument("LABEL", "Name of the label.")],
    version: Annotated[int | None, argument("VERSION", "Number of a version that is served.")] = None,
    data: Data = None,
    url: Url = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the label.")] = False,
    json: AsJson = False,
) -> None:
    """Make a label stand for a version that is served.

    It is removed when that version is no longer served. `stable` and `canary` always exist.
    """
    if (version is None) is not remove:
        raise typer.BadParameter("expected the VERSION that the label should stand for, or --remove")
    with open_target(data, url) as target:
        if version is None:
            target.unlabel(model, name)
        else:
            target.label(model, name, version)
    done = "is removed" if version is None else f"stands for version {version}"
    say(json, {"model": model, "label": name, "version": version}, f"{model} label {name} {done}")


def drop(model: ModelName, version: VersionNumber, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Delete a version that is not served."""
    with open_target(data, url) as target:
        target.drop(model, version)
    say(json, {"model": model, "dropped": version}, f"{model} version {version} is dropped")
