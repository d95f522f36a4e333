"""`tierstore hot`: the keys of a table that are looked up most, and what its cache does for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, ModelName, Url, argument
from tierstore.cli.target import open_target, say


def hot(
    model: ModelName,
    table: Annotated[str, argument("TABLE", "Name of the table.")],
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, max=1000, help="How many keys.")] = 20,
    data: Data = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Show the keys that are looked up most.

    With the share of the look-ups that each has, the hit rate by size, and by the minute of the last hour.

    Without a service: the keys that were in memory when the model was last served, hottest first.
    """
    with open_target(data, url) as target:
        document = target.model(model).cache(table, n)
    say(json, document, _show)


def _show(document: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tierstore.cli import show

    out = show.console()
    keys = Table("key", "of the look-ups", box=None, header_style="bold")
    for entry in document["hottest"]:
        keys.add_row(escape(str(entry["key"])), _share(entry["share"]))
    out.print(keys if document["hottest"] else "nothing was looked up yet")
    if document["key"] == "string" and document["hottest"]:
        out.print("keys are strings; one that the version does not keep is shown by its hash")
    for line in _since(document):
        out.print(line)
    sizes = Table("memory", "rows", "from memory", box=None, header_style="dim")
    for point in document["curve"]:
        sizes.add_row(f"{point['scale']:g} times", f"{point['rows']:,}", _share(point["hit_rate"]))
    if document["curve"]:
        out.print(sizes)
    minutes = Table("minute until", "keys looked up", "from memory", "", box=None, header_style="dim")
    for minute in document["history"]:
        minutes.add_row(_clock(minute["at_s"]), f"{minute['keys']:,}", _share(_rate(minute)), _cause(minute))
    if document["history"]:
        out.print(minutes)


def _since(document: dict[str, Any]) -> Iterator[str]:
    """What the keys are counted over."""
    if not (hottest := document["hottest"]):
        return
    if hottest[0]["share"] is None:
        yield "nothing was counted since the start: these keys were hot when the table was last served"
        return
    *_, last = [None, *(minute for minute in document["history"] if minute["switch"])]
    if document["history"] and document["history"][-1]["version"] != document["version"]:
        yield f"version {document['version']} serves for less than a minute; {_GO_ON}"
    elif last is not None:
        yield f"version {last['version']} serves since the minute until {_clock(last['at_s'])}; {_GO_ON}"


_GO_ON = (
    "counts go on over a switch, so look-ups of the versions before are among them; after 10 minutes they count half"
)


def _rate(minute: dict[str, Any]) -> float | None:
    return 1.0 - minute["read"] / minute["keys"] if minute["keys"] else None


def _cause(minute: dict[str, Any]) -> str:
    causes = [f"switch to version {minute['version']}"] if minute["switch"] else []
    causes += [f"{minute['deltas']:,} deltas"] if minute["deltas"] else []
    return ", ".join(causes)


def _clock(at_s: int) -> str:
    import time

    return time.strftime("%H:%M UTC", time.gmtime(at_s))


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}%"
