"""`tierstore explain`: why keys are answered as they are."""

from __future__ import annotations

from typing import Annotated, Any

from tierstore.cli.options import AsJson, Data, ModelName, ServedVersion, Url, argument, number_or_label
from tierstore.cli.target import key_type, open_target, parse_keys, say


def explain(
    model: ModelName,
    feature: Annotated[str, argument("FEATURE", "Name of the feature.")],
    keys: Annotated[list[str], argument("KEY", "Keys, at most 100.")],
    data: Data = None,
    url: Url = None,
    version: ServedVersion = None,
    json: AsJson = False,
) -> None:
    """Say why keys are answered as they are.

    For each key: which tier answers, what every tier holds of it and whether they agree, how often it is asked for, and
    which delta wrote or deleted it last. Looking changes nothing.
    """
    with open_target(data, url) as target:
        parsed = parse_keys(keys, key_type(target.status(model), model, feature))
        document = target.explain(model, feature, parsed, version=number_or_label(version))
    say(json, document, _show)


def _show(document: dict[str, Any]) -> None:
    from rich.markup import escape

    from tierstore.cli import show

    out = show.console()
    folded = "" if document["folded"] == document["seq"] else f", folded up to {document['folded']}"
    out.print(
        f"[bold]{escape(document['model'])}[/]  table {escape(document['table'])}, version {document['version']}, "
        f"seq {document['seq']}{folded}"
    )
    for entry in document["keys"]:
        for line in _lines(entry):
            out.print(line)
        if entry["tiers"]:
            out.print(_tiers(entry["tiers"]))
        if owner := entry.get("owner"):
            out.print(f"  on {escape(entry['node'])}, which has the row:")
            out.print(_tiers(owner["tiers"]))


def _lines(entry: dict[str, Any]) -> list[str]:
    from rich.markup import escape

    found = f"found, answered by {entry['tier']}" if entry["found"] else "[yellow]not found[/]: the default is answered"
    if not (entry["found"] or entry["default"]):
        found = "[yellow]not answered[/]" if entry["state"] != "padding" else "not found: zeros are answered"
    where = [f"code {entry['code']}"]
    if partition := entry["partition"]:
        where.append(f"partition {partition['number']} of {partition['count']}")
    if entry["node"]:
        where.append(f"on {entry['node']}")
    lines = [
        "",
        f"[bold]{escape(str(entry['key']))}[/]  {found}",
        f"  {entry['state'].replace('_', ' ')}: {escape(entry['why'])}",
        f"  {escape(', '.join(where))}",
    ]
    if written := entry["written"]:
        received = "" if written["received_at"] is None else f", received {written['received_at']}"
        lines.append(f"  {_did(written)} by delta {written['seq']}, event of {written['event_time']}{received}")
    lines += [
        f"  undone: delta {one['seq']} had {_did(one)} it, until a rollback to {one['rolled_back_to']}"
        for one in entry["undone"]
    ]
    lines += [
        f"  passed over: delta {one['seq']} has {_did(one)} it for version {one['base_version']} alone"
        for one in entry["passed_over"]
    ]
    if entry["row_time"]:
        lines.append(f"  its row is of {entry['row_time']}, and expires {entry['expires_at']}")
    if entry["differ"]:
        lines.append(
            f"  [red]tiers disagree:[/] {escape(', '.join(entry['differ']))} holds something else than what lies "
            "beneath"
        )
    elif entry["agree"]:
        lines.append("  tiers agree")
    return lines


def _did(write: dict[str, Any]) -> str:
    return "deleted" if write["deleted"] else "written"


def _tiers(tiers: list[dict[str, Any]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from tierstore.cli.show import NUMBERS_SHOWN

    table = Table("tier", "holds", "asked for", "row", box=None, header_style="dim", padding=(0, 2))
    for one in tiers:
        if "error" in one:
            table.add_row(one["tier"], "[red]not read[/]", "", escape(one["error"]))
            continue
        row = one["row"] or []
        text = " ".join(f"{number: .4g}" for number in row[:NUMBERS_SHOWN]) + (" …" if len(row) > NUMBERS_SHOWN else "")
        table.add_row(one["tier"], one["holds"], _heat(one), text)
    return table


def _heat(tier: dict[str, Any]) -> str:
    if "seqs" in tier:
        first, last = tier["seqs"]
        return f"delta {first}" if first == last else f"deltas {first} to {last}"
    if "hits" in tier:
        return f"heat {tier['hits']} of 3" + (f", {tier['queue']}" if "queue" in tier else "")
    if tier.get("filtered"):
        return "the filter denies it"
    return "evicted lately" if tier.get("evicted_lately") else ""
