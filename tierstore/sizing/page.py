"""A plan as one page of HTML: what is chosen, how it is loaded, how it grows and what moves its price, with
plots as SVG. Pure functions.

The page needs nothing but itself: no script, no font, no image from elsewhere. It fits a phone, and is dark
where the reader's system is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from tierstore.sizing.outlook import SWING, Growth, Month, Swing
from tierstore.sizing.plan import GIB, HOST_ROW_BYTES, Design, SizingPlan
from tierstore.sizing.reuse import hit_rate
from tierstore.sizing.served import Compared

_WIDTH, _HEIGHT, _BOTTOM = 640, 260, 40
_LONG = 30  # characters of a cell, from which on it is broken into lines
_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #5b6675; --line: #d5dae1; --back: #ffffff; --card: #f5f7f9; --one: #1f6feb; --two: #d9822b; --bad: #c62f2f }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --dim: #9aa5b4; --line: #36404d; --back: #12161c; --card: #1b212a; --one: #6aa9ff; --two: #f0a858; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: .5rem 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .25rem }
p { margin: .25rem 0 .75rem } .dim { color: var(--dim) } .bad { color: var(--bad) }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap } th:first-child, td:first-child { text-align: left }
tr.chosen td { font-weight: 600 } td.long { text-align: left; white-space: normal; min-width: 16rem }
figure { margin: .5rem 0; padding: .5rem; background: var(--card); border-radius: 6px } svg { display: block; width: 100%; height: auto }
svg text { fill: var(--text); font: 14px system-ui, sans-serif } svg .dim { fill: var(--dim) } svg .axis { stroke: var(--line) }
@media (max-width: 40rem) { svg text { font-size: 19px } th, td { padding: .3rem .4rem } }
"""


def page(
    made: SizingPlan,
    swings: Sequence[Swing],
    growth: Growth | None = None,
    compared: Sequence[Compared] = (),
    title: str = "",
) -> str:
    """The page. Figures are those of the plan; nothing is computed here but the points of curves."""
    load, chosen = made.load, made.chosen
    head = (
        f"{load.rows:,.0f} rows of {load.dim} {load.dtype.value}, {load.qps:,.0f} requests a second of "
        f"{load.keys:,.0f} keys"
    )
    parts = [f"<h1>{escape(title or 'Sizing of a table')}</h1>", f"<p>{escape(head)}; {escape(load.reuse.name)}.</p>"]
    if chosen is None:
        parts.append('<p class="bad">No design can serve this with such nodes.</p>')
    else:
        kind = f" ({chosen.machine.kind})" if chosen.machine.kind else ""
        price = f"{_price(made, chosen.monthly)} a month"
        parts.append(f"<p>Cheapest: <b>{escape(chosen.name)}</b>, {chosen.nodes} nodes{escape(kind)}, {price}.</p>")
    parts += [_section("Designs", "Each node, while all are there.", _designs(made)), _notes(made.designs)]
    if chosen is not None:
        parts += [
            _section("How busy a node is", _busy_text(chosen), _boxed(_busy(chosen))),
            _section(
                "Memory and hit rate",
                "Keys that are answered from memory, by the memory for rows that all nodes together have of the table "
                "(one copy of each row). The mark is the chosen design.",
                _boxed(_hit_rates(made, chosen)),
            ),
        ]
    if swings and chosen is not None:
        text = (
            f"The price of the cheapest design if one input is {100 * SWING:.0f}% smaller or larger, and the "
            "others as they are."
        )
        parts.append(_section("What moves the price", text, _boxed(_tornado(swings, chosen.monthly))))
    if growth is not None:
        text = (
            f"Rows and requests grow by {100 * growth.share:g}% a month. The price is that of the cheapest design then."
        )
        parts.append(
            _section("Growth", text, _boxed(_prices(made, growth.months)) + _ends(growth) + _needs(made, growth))
        )
    if compared:
        text = "What the plan says of the table as it is served now, and what the service measured."
        parts.append(_section("Beside what is measured", text, _compared(compared)))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title or 'Sizing of a table')}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        '<p class="dim">Made by tierstore plan.</p>\n</body>\n</html>\n'
    )


def _section(title: str, text: str, content: str) -> str:
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="dim">{escape(text)}</p>\n{content}\n</section>'


def _table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Rows of texts, and whether each is the chosen one."""
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = [
        ('<tr class="chosen">' if is_chosen else "<tr>") + "".join(map(_cell, row)) + "</tr>" for row, is_chosen in rows
    ]
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=long' if len(text) > _LONG else ''}>{escape(text)}</td>"


def _designs(made: SizingPlan) -> str:
    head = ("design", "nodes", "a month", "memory for rows", "hit rate", "disk", "network out", "reads/s", "cores")
    rows = (
        (
            (
                of.name + (f" ({of.machine.kind})" if of.machine.kind else ""), str(of.nodes),
                "not possible" if of.limits else _price(made, of.monthly), _bytes(of.node.host_budget),
                f"{100 * of.node.hit_rate:.1f}%", _bytes(of.node.disk) if of.node.disk else "–",
                f"{_bytes(of.node.network)}/s",
                f"{of.node.reads:,.0f}", f"{of.node.cores:.1f}",
            ),
            of is made.chosen,
        )
        for of in made.designs
    )  # fmt: skip
    return _table(head, rows)


def _notes(designs: Iterable[Design]) -> str:
    texts = []
    for of in designs:
        texts += [f'<li class="bad">{escape(of.name)}: not possible, {escape(limit)}</li>' for limit in of.limits]
        texts += [f"<li>{escape(of.name)}: behind the nodes {escape(of.behind)}</li>"] if of.behind else []
        texts += [f"<li>{escape(of.name)}: {escape(note.replace('`', ''))}</li>" for note in of.notes]
    return f"<ul>{''.join(texts)}</ul>"


def _ends(growth: Growth) -> str:
    rows = (
        (
            (
                of.design,
                str(of.nodes),
                "never within these" if of.month is None else "now" if not of.month else f"in month {of.month}",
                of.why or "",
            ),
            False,
        )
        for of in growth.ends
    )
    return _table(("design", "nodes", "runs out", "by what"), rows)


def _needs(made: SizingPlan, growth: Growth) -> str:
    rows = (
        (
            (
                str(of.month), f"{of.rows:,.0f}", f"{of.qps:,.0f}", of.design or "none", str(of.nodes or "–"),
                "–" if of.monthly is None else _price(made, of.monthly),
            ),
            False,
        )
        for of in growth.months
        if of.month % 6 == 0
    )  # fmt: skip
    return _table(("month", "rows", "requests/s", "cheapest then", "nodes", "a month"), rows)


def _compared(compared: Sequence[Compared]) -> str:
    return _table(
        ("", "planned", "measured"),
        (((of.what, of.shown(of.planned), of.shown(of.measured)), False) for of in compared),
    )


# --- plots


def _boxed(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _busy_text(chosen: Design) -> str:
    if chosen.away is None:
        return "Of what one node can do. While it is down nothing answers."
    return (
        f"Of what one of the {chosen.nodes} nodes can do: while all are there (above), and the busiest one while "
        "one is away (below). More than 70% leaves no room for peaks."
    )


def _busy(chosen: Design) -> str:
    machine = chosen.machine
    parts, y = [], 8.0
    nodes = [node for node in (chosen.node, chosen.away) if node is not None]
    for name, values, most in (
        ("processor", [node.cores for node in nodes], machine.cores),
        ("network", [node.network for node in nodes], machine.network),
        ("drive", [node.reads if node.disk else 0.0 for node in nodes], machine.reads),
        ("disk", [node.disk for node in nodes], machine.disk),
        ("memory", [node.memory for node in nodes], machine.memory),
    ):
        parts.append(_text(0, y + 20, name))
        for at, value in enumerate(values):
            share, top = value / most, y + 18 * at
            width = 440 * min(1.0, share)
            colour = "--bad" if share > 1 else "--two" if at else "--one"
            parts.append(
                f'<rect x="100" y="{top:.1f}" width="{max(1.0, width):.1f}" height="14" fill="var({colour})"/>'
            )
            parts.append(_text(106 + width, top + 12, f"{100 * share:.0f}%"))
        y += 48
    parts.append(
        f'<line class="axis" x1="{100 + 440 * 0.7}" x2="{100 + 440 * 0.7}" y1="4" y2="{y - 8:.1f}" stroke-dasharray="4 3"/>'
    )
    return _svg(y, "how busy a node is", parts)


def _plot(
    label: str, points: Sequence[tuple[float, float]], across: Callable[[float], str], up: Callable[[float], str], *,
    logarithmic: bool = False, mark: tuple[float, float, str] | None = None, most: float | None = None,
) -> str:  # fmt: skip
    """A curve over an axis. `across` and `up` write the numbers of the axes."""
    xs = [math.log(x) if logarithmic else x for x, _ in points]
    low, high = min(xs), max(max(xs), min(xs) + 1e-9)
    top = most or 1.1 * max(y for _, y in points) or 1.0
    left = 16 + 10 * max(len(up(top * step / 4)) for step in range(5))

    def place(x: float, y: float) -> tuple[float, float]:
        at = ((math.log(x) if logarithmic else x) - low) / (high - low)
        return left + min(1.0, max(0.0, at)) * (_WIDTH - left - 24), 12 + (_HEIGHT - _BOTTOM - 12) * (1 - y / top)

    parts = []
    for step in range(5):
        y = top * step / 4
        _, at = place(points[0][0], y)
        parts.append(f'<line class="axis" x1="{left}" x2="{_WIDTH - 24}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 6, at + 5, up(y), "end", "dim"))
    for step in (0, 2, 4):
        value = low + (high - low) * step / 4
        x = math.exp(value) if logarithmic else value
        parts.append(
            _text(place(x, 0)[0], _HEIGHT - 14, across(x), "end" if step == 4 else "middle" if step else "start", "dim")
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts.append(f'<polyline points="{path}" fill="none" stroke="var(--one)" stroke-width="2.5"/>')
    if mark is not None:
        x, y = place(mark[0], mark[1])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="var(--two)"/>')
        right = x > _WIDTH / 2
        parts.append(_text(x + (-10 if right else 10), y + 22, mark[2], "end" if right else "start"))
    return _svg(_HEIGHT, label, parts)


def _hit_rates(made: SizingPlan, chosen: Design) -> str:
    load, row_bytes = made.load, made.load.row_bytes + HOST_ROW_BYTES
    shares = [10 ** (-4 + 4 * step / 60) for step in range(61)]
    points = [(share * load.rows * row_bytes, hit_rate(load.reuse, share * load.rows, load.rows)) for share in shares]
    rows = min(load.rows, chosen.node.cached_rows * (chosen.nodes / 2 if chosen.name == "partitions" else 1))
    mark = max(points[0][0], rows * row_bytes), chosen.node.hit_rate, f"{100 * chosen.node.hit_rate:.1f}%"
    return _plot(
        "hit rate by memory", points, _bytes, lambda y: f"{100 * y:.0f}%", logarithmic=True, mark=mark, most=1.0
    )


def _prices(made: SizingPlan, months: Sequence[Month]) -> str:
    points = [(float(of.month), of.monthly) for of in months if of.monthly is not None]
    if len(points) < 2:
        return '<p class="bad">no design can serve it later</p>'
    return _plot("price by month", points, lambda x: f"month {x:.0f}", lambda y: _price(made, y))


def _tornado(swings: Sequence[Swing], now: float) -> str:
    finite = [abs(price / now - 1) for of in swings for price in (of.less, of.more) if price is not None]
    most, middle = max([*finite, 0.01]), 400.0
    parts, y = [], 8.0
    for of in swings:
        parts.append(_text(0, y + 19, of.what))
        for top, price, colour in ((y, of.less, "--one"), (y + 15, of.more, "--two")):
            if price is None:
                parts.append(_text(_WIDTH - 4, top + 12, "not possible", "end", "dim"))
                continue
            change = price / now - 1
            width = 150 * abs(change) / most
            x = middle - width if change < 0 else middle
            parts.append(f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="13" fill="var({colour})"/>')
            if abs(change) >= 0.005:
                side = -1 if change < 0 else 1
                anchor = "end" if side < 0 else "start"
                parts.append(_text(middle + side * (width + 6), top + 12, f"{100 * change:+.0f}%", anchor))
        y += 38
    parts.append(f'<line class="axis" x1="{middle}" x2="{middle}" y1="4" y2="{y:.1f}"/>')
    parts.append(_text(0, y + 18, f"blue: {100 * SWING:.0f}% less, orange: {100 * SWING:.0f}% more", kind="dim"))
    return _svg(y + 26, "what moves the price", parts)


def _price(made: SizingPlan, value: float) -> str:
    return f"{value:,.0f} {made.prices.currency}".strip()


def _bytes(value: float) -> str:
    for unit, size in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.{0 if value >= 100 * size else 1}f} {unit}"
    return f"{value:.0f} B"
