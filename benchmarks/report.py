"""Results as JSON and as Markdown tables. Plain functions, no state.

A benchmark's JSON document has `benchmark` and `machine`, and may have `headlines` (see `headline`), `results` (flat
dicts, grouped by `part` if they have one), `skipped` (sentences) and any other values. Documents of another shape are
shown too: a list of dicts becomes a table, plain values become lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]
_OWN = (
    "benchmark",
    "plan",
    "machine",
    "load_before",
    "load_after",
    "seconds",
    "headlines",
    "results",
    "skipped",
    "command",
)
_NAMES = {"keys_per_s": "M keys/s", "memory_bytes_a_row": "memory, B/row", "p50_us": "p50 µs", "p99_us": "p99 µs"}  # fmt: skip
_SCALE = {"keys_per_s": 1e-6}


def headline(
    measured: str, against: str, value: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = "times"
) -> dict[str, Any]:  # fmt: skip
    """One figure that the project has set itself a mark for; `met` says whether this run reached it."""
    value = float(value)  # one of NumPy's, and what is compared with it, is nothing that JSON can say
    met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return {"measured": measured, "against": against, "value": value, "unit": unit, "at_least": at_least, "at_most": at_most, "met": met}  # fmt: skip


def write(path: Path, document: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def markdown(document: Document, *, level: int = 2) -> str:
    """One benchmark's document."""
    mark = "#" * level
    lines = [f"{mark} {document.get('benchmark', 'benchmark')}", "", *_context(document), ""]
    if document.get("headlines"):
        lines += [*headlines(document["headlines"]), ""]
    for part, rows in _parts(document.get("results", [])):
        lines += [*([f"{mark}# {part}", ""] if part else []), *table(rows), ""]
    rest = {name: value for name, value in document.items() if name not in _OWN}
    plain = {name: value for name, value in flat(rest) if not isinstance(value, list)}
    if plain:
        lines += ["| | |", "|---|---|", *(f"| {name} | {shown(value)} |" for name, value in plain.items()), ""]
    for name, value in rest.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{mark}# {name}", "", *table([dict(flat(row)) for row in value]), ""]
    if document.get("skipped"):
        lines += ["Left out:", "", *(f"- {reason}" for reason in document["skipped"]), ""]
    return "\n".join(lines)


def headlines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The figures with a mark, as a table."""
    lines = ["| measured | against | came out | mark | |", "|---|---|---|---|---|"]
    for row in rows:
        mark = f"at least {row['at_least']:g}" if row["at_least"] is not None else f"at most {row['at_most']:g}"
        unit = "" if row["unit"] == "times" else f" {row['unit']}"
        verdict = "met" if row["met"] else "**missed**"
        lines.append(f"| {row['measured']} | {row['against']} | {shown(row['value'])}{unit} | {mark} | {verdict} |")
    return lines


def table(rows: list[Mapping[str, Any]]) -> list[str]:
    """Flat dicts as a table: a column for every name that any of them has a value for. What all share stands above it."""
    columns = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if value is not None and name != "part")
    )
    shared = [name for name in columns if len(rows) > 1 and all(row.get(name) == rows[0].get(name) for row in rows)]
    columns = [name for name in columns if name not in shared]
    lines = [", ".join(f"{_title(name)} {_cell(rows[0], name)}" for name in shared) + ".", ""] if shared else []
    lines += ["| " + " | ".join(map(_title, columns)) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(row, name) for name in columns) + " |" for row in rows]
    return lines


def _title(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return shown(value * _SCALE[name] if name in _SCALE and value is not None else value)


def shown(value: Any) -> str:
    """A value in a table's cell; three or four digits of a fraction."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        return (
            f"{value:,.0f}"
            if size >= 1000
            else f"{value:.1f}"
            if size >= 100
            else f"{value:.2f}"
            if size >= 1
            else f"{value:.3g}"
        )
    return str(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as pairs with dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parts(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    parts = dict.fromkeys(row.get("part", "") for row in rows)
    for part in parts:
        yield part, [dict(flat(row)) for row in rows if row.get("part", "") == part]


def _context(document: Document) -> list[str]:
    lines = []
    if document.get("machine"):
        lines.append(str(document["machine"]) + ".")
    if document.get("load_before"):
        loads = " → ".join(f"{document[name][0]:.1f}" for name in ("load_before", "load_after") if document.get(name))
        lines.append(f"Load average (1 min) {loads}.")
    if document.get("seconds"):
        lines.append(f"{document['seconds']:.0f} s.")
    return [" ".join(lines)]
