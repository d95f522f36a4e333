"""Prints what commands answer: JSON, or tables for a person, for which alone rich is imported."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierstore.sizes import size_text
from tierstore.status import dense_notes, golden_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TIERS = ("overlay", "device", "host", "disk", "remote", "absent")
NUMBERS_SHOWN = 6
_NUMBERS = re.compile(r"\[\n[-+.,\w\s]*\]")  # strings have quotes, and no line breaks as JSON


def as_json(document: Any) -> None:
    """Print `document` on standard output, lists of numbers on one line each."""
    text = json.dumps(document, indent=2)
    sys.stdout.write(
        _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n"
    )


def escape(text: str) -> str:
    """A text whose brackets rich does not take for markup."""
    from rich.markup import escape as of_rich

    return of_rich(text)


def printable(value: Any) -> str:
    """A text of others as a terminal may have it; nothing for None."""
    return escape(plain(value))


def plain(value: Any) -> str:
    """A text of others without what a terminal would act on; nothing for None."""
    text = "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def span(seconds: float) -> str:
    """`seconds` for a person, as on the status page: `3 h`, `90 s`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def shares(lookup_keys: dict[str, int]) -> str:
    """Where keys were answered, in percent: `host 93.1% · disk 6.2% · absent 0.7%`."""
    total = sum(lookup_keys.values())
    parts = [f"{tier} {100 * lookup_keys[tier] / total:.1f}%" for tier in TIERS if lookup_keys.get(tier)]
    return " · ".join(parts) or "no look-ups yet"


def rows(keys: list[int] | list[str], found: list[bool], vectors: list[list[float]]) -> None:
    """Rows of a look-up as a table; long rows are cut."""
    from rich.table import Table

    table = Table("key", "found", f"row ({len(vectors[0]) if vectors else 0} numbers)", box=None, header_style="bold")
    for key, is_found, vector in zip(keys, found, vectors, strict=True):
        text = " ".join(f"{number: .4g}" for number in vector[:NUMBERS_SHOWN])
        cut = " …" if len(vector) > NUMBERS_SHOWN else ""
        table.add_row(escape(str(key)), "yes" if is_found else "[yellow]no[/]", text + cut)
    console().print(table)


def entries(found: Sequence[tuple[Sequence[str], str]]) -> None:
    """Entries of a few short words, in columns, each with a text of any length: below it on a terminal, so that nothing
    is squeezed, and behind it in a pipe, where a line is an entry.
    """
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    widths = [max(map(len, column)) for column in zip(*(words for words, _ in found), strict=True)]
    for words, text in found:
        line = "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()
        if out.soft_wrap:
            out.print(f"{line}  {text}".rstrip(), markup=False, highlight=False)
            continue
        out.print(line, style="bold", markup=False, highlight=False)
        if text:
            out.print(Padding(Text(text), (0, 0, 0, 4)))


def status(document: Mapping[str, Any]) -> None:
    """A status document as tables."""
    out = console()
    for problem in document.get("problems", []):
        where = f"{problem['kind']} of {problem['model']}" if problem["model"] else problem["kind"]
        out.print(f"[red]problem, {escape(where)}:[/] {escape(problem['text'])}")
    if not document["models"]:
        out.print("no models yet; `tierstore load SNAPSHOT` adds one")
    for name, model in document["models"].items():
        active = model["active_version"]
        state = (
            f"version [bold]{active}[/], watermark {model['watermark']}"
            if active is not None
            else "[yellow]nothing active[/]"
        )
        out.print(f"[bold]{escape(name)}[/]  {state}")
        if held := model.get("partitions"):
            ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in held["own"])
            out.print(f"  partitions {ranges} of {held['count']}")
        if canary := model.get("canary"):
            out.print(
                f"  canary [bold]{canary['version']}[/] gets {100 * canary['share']:g}% of the requests, watermark "
                f"{canary['watermark']}"
            )
        for line in itertools.chain.from_iterable(map(_notes, model["versions"])):
            out.print(f"  {line}")
        for version, unfinished in model.get("unfinished", {}).items():
            out.print(
                f"  the load of version {version} was interrupted; {size_text(unfinished['bytes'])} are kept to "
                "continue from"
            )
        if undone := model.get("undone"):
            ranges = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in undone)
            out.print(f"  undone deltas: {ranges}")
        if model.get("last_event_time"):
            out.print(f"  {_newest_delta(model)}")
        if model["versions"]:
            out.print(_versions(model["versions"]))
        if model["tables"]:
            out.print(_tables(model["tables"]))
        for table, entry in model["tables"].items():
            if line := memory_line(entry.get("cache") or {}):
                out.print(f"  {escape(table)}: {line}")
    for line in _surroundings(document):
        out.print(escape(line))
    for key, what in (
        ("device_budget", "GPU memory"), ("host_budget", "host memory"), ("overlay_budget", "overlays"),
        ("ssd_cache", "cache on SSD"),
    ):  # fmt: skip
        budget = document.get(key)
        if budget and budget["total"]:
            out.print(f"{what}: {size_text(budget['used'])} of {size_text(budget['total'])}")
    disk = document.get("disk") or {}
    if disk.get("free") is not None:
        out.print(
            f"disk: {size_text(disk['free'])} free, of which {size_text(disk['reserve'])} are kept (disk_reserve)"
        )


def _newest_delta(model: Mapping[str, Any]) -> str:
    """How old the newest delta is, who sent it, and what would say that it is too old."""
    age_s, sender = model.get("delta_age_s"), model.get("last_received_from")
    text = f"newest event {model['last_event_time']}"
    text += f", {span(age_s)} ago" if age_s is not None else ""
    text += f", received {_minute(model['last_received_time'])}" if model.get("last_received_time") else ""
    text += f" from {printable(sender)}" if sender else ""
    text += "" if model.get("freshness_max_s") else "; no limit is set (freshness_max_s)"
    return f"{text}; {model.get('overlays', 0)} overlays of {size_text(model.get('overlay_bytes', 0))} not folded yet"


def _notes(entry: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of one version beside its row in the table."""
    of = f"version {entry['version']}:"
    if report := entry.get("golden"):
        yield f"{of} golden examples: {printable(golden_text(report))}"
    for table, why in (entry.get("hashes_only") or {}).items():
        yield f"{of} table {plain(table)} has string keys, and {plain(why)}"
    for note in dense_notes(entry):
        yield f"[yellow]{of}[/] {escape(note)}"


def _surroundings(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines about what a store works with: a cluster, a topic, watched places, and work beside look-ups."""
    if remote := document.get("remote"):
        engines = "".join(f", {plain(engine)}" for engine in remote.get("engines", ()))
        yield f"cluster {remote['cluster']}: {'reachable' if remote['reachable'] else 'unreachable'}{engines}"
        for warning in remote.get("warnings", ()):
            yield f"cluster: {plain(warning)}"
    service = document.get("service", {})
    if kafka := service.get("kafka"):
        behind = "" if kafka["lag_messages"] is None else f", {kafka['lag_messages']:,} messages behind"
        yield f"kafka topic {kafka['topic']}: {kafka['state']}, {kafka['applied']:,} deltas applied{behind}"
    for rows in (service.get("kafka_rows") or {"topics": {}})["topics"].values():
        behind = "" if rows["lag_messages"] is None else f", {rows['lag_messages']:,} messages behind"
        yield f"rows of kafka topic {rows['topic']}: {rows['state']}, {rows['rows']:,} rows applied{behind}"
    if watch := service.get("watch"):
        yield f"deltas in {watch['directory']}: {watch['applied']:,} applied"
    for place in (service.get("watch_snapshots") or {}).get("locations", ()):
        yield f"snapshots in {place['location']}: {place['state']}, {place['snapshots']:,} found"
    throttle = document.get("throttle") or {}
    if throttle.get("work"):
        yield f"background work: {', '.join(throttle['work'])}, {100 * throttle['share']:.0f}% of the time"


def _versions(versions: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("version", "state", "labels", "watermark", "created", box=None, header_style="dim", padding=(0, 2))
    for column in table.columns:
        column.no_wrap = True
    for entry in versions:
        state = entry["state"]
        if state == "loading":
            state += f": {entry.get('phase', '')} {_percent(entry.get('done'), entry.get('total'))}"
        if warming := entry.get("warming"):
            state += f", warming {_percent(warming['done'], warming['total'])}"
        labels = escape(", ".join(entry.get("labels", ())))
        table.add_row(
            str(entry["version"]), state, labels, _text(entry.get("watermark")), _minute(entry.get("created_at"))
        )
    return table


def _tables(tables: dict[str, dict[str, Any]]) -> Table:
    from rich.table import Table

    shown = Table(
        "table", "rows", "keys looked up", "answered by", "held", box=None, header_style="dim", padding=(0, 2)
    )
    for name, table in tables.items():
        held = (
            f"{tier} {size_text(n)}" + _room(table, tier)
            for tier, n in table["tier_bytes"].items()
            if n or tier != "device"  # most machines have none
        )
        counts = table["lookup_keys"]
        rows = f"{'' if table['rows_exact'] else 'about '}{table['rows']:,}"
        if ttl := table.get("ttl"):
            rows += f", {ttl['expired_at_load'] + ttl['expired_since']:,} expired"
        shown.add_row(escape(name), rows, f"{sum(counts.values()):,}", shares(counts), " · ".join(held))
    return shown


def _room(table: dict[str, Any], tier: str) -> str:
    """How much more of a table a tier has room for; of memory in rows, as its bytes are taken before rows come."""
    budget, rows = table["tier_budget_bytes"].get(tier), table.get("host", {}).get("capacity_rows")
    if tier != "host" or rows is None:
        return f" of {size_text(budget)}" if budget else ""
    return ", room for every row" if rows >= table["rows"] else f", room for {rows:,} rows"


def memory_line(cache: dict[str, Any]) -> str:
    """What more or less memory would do: `about 83.1% from memory, with twice 3.1 points more`. Empty where unknown."""
    rates = {point["scale"]: point["hit_rate"] for point in cache.get("curve", ())}
    now, half, twice = rates.get(1.0), rates.get(0.5), rates.get(2.0)
    if now is None:
        return ""
    parts = [f"about {100 * now:.1f}% from memory"]
    if half is not None:
        parts.append(f"with half of it {100 * (now - half):.1f} points less")
    if twice is not None:
        parts.append(f"with twice {100 * (twice - now):.1f} points more")
    return ", ".join(parts)


def _percent(done: int | None, total: int | None) -> str:
    return f"{100 * done / total:.0f}%" if done is not None and total else ""


def _minute(time: str | None) -> str:
    """`2026-11-20T02:00:00Z` so that a row fits into 80 columns."""
    return "–" if time is None else f"{time[:16].replace('T', ' ')} UTC"


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def console() -> Console:
    """Where tables go: the terminal, or standard output."""
    from rich.console import Console

    # Into a pipe or a file lines are never folded: a program or `grep` reads them.
    return Console() if sys.stdout.isatty() else Console(width=250, soft_wrap=True)
