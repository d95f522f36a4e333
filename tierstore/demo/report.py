"""What the demo found: figures as a document (`DemoReport.document`) and as tables for a person (`show`).

Plain values; any thread may read them once the story is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tierstore.demo.traffic import Samples

TIERS = ("overlay", "device", "host", "disk", "remote", "absent")


@dataclass(frozen=True, slots=True)
class Window:
    """Latency of the requests that were due within one part of the story. Milliseconds; NaN-free: zeros if none."""

    name: str
    seconds: float
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, name: str, samples: Samples, start: float, end: float) -> Window:
        part = samples.between(start, end)
        failed = int(part.failed.sum())
        times = part.latency_s[~part.failed] * 1e3
        p50, p99, top = np.percentile(times, [50, 99, 100]).tolist() if len(times) else (0.0, 0.0, 0.0)
        return cls(name, end - start, len(part.due), failed, p50, p99, top)


@dataclass(frozen=True, slots=True)
class Quality:
    """AUC on the newest events, which no version was trained on, scored from rows looked up in the service."""

    events: int
    new_item_share: float  # of these events, on items that the daily snapshot does not have
    daily: float  # rows of the daily snapshot
    deltas: float  # the same rows after the deltas
    daily_known_items: float  # the same two on the events of items that the daily snapshot has
    deltas_known_items: float


@dataclass(slots=True)
class DemoReport:
    """The figures of one run. Seconds and milliseconds as named; shares are 0 to 1."""

    seed: int = 0
    scale: float = 1.0
    rows: int = 0  # of the daily snapshot, both tables
    table_bytes: int = 0  # of these rows and keys
    host_budget: str = ""
    load_rows_per_s: float = 0.0
    beside_rows_per_s: float = 0.0  # the second snapshot, under load
    deltas: int = 0
    delta_rows: int = 0  # upserts and deletes of all deltas
    freshness_median_s: float = 0.0  # event time to acknowledged, which is visible
    freshness_p99_s: float = 0.0
    freshness_max_s: float = 0.0
    windows: list[Window] = field(default_factory=list)
    tiers: dict[str, float] = field(default_factory=dict)  # share of keys by where they were answered, all traffic
    quality: Quality | None = None
    requests: int = 0
    failed_requests: int = 0
    first_error: str = ""
    mixed_answers: int = 0  # from more than one version or delta
    stale_answers: int = 0  # older than a delta acknowledged before the request was due
    versions_seen: list[int] = field(default_factory=list)
    rows_checked: int = 0
    mismatches: int = 0
    served_scores: bool = False  # whether the service scored, dense part and all
    scores_checked: int = 0  # of those, compared with the trainer's dense part on rows looked up
    score_mismatches: int = 0
    steps_s: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    url: str = ""

    @property
    def ok(self) -> bool:
        """Nothing failed, no answer was mixed or stale, no row differed, and the deltas were worth it."""
        wrong = self.failed_requests + self.mixed_answers + self.stale_answers + self.mismatches + self.score_mismatches
        return (
            wrong == 0 and self.requests > 0 and self.quality is not None and self.quality.deltas > self.quality.daily
        )

    def document(self) -> dict[str, Any]:
        """The figures as JSON-ready values."""
        return {**asdict(self), "ok": self.ok}


class TierCounter:
    """Where keys were answered, summed over status documents taken now and then.

    A version counts for itself and from zero each time it is opened, so every step of a version's
    counter is added up; a counter that fell began anew.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str, str], int] = {}
        self._sum = dict.fromkeys(TIERS, 0)

    def start(self, model: Mapping[str, Any]) -> None:
        """Begin to count at this document."""
        self._step(model)
        self._sum = dict.fromkeys(TIERS, 0)

    def add(self, model: Mapping[str, Any]) -> dict[str, float]:
        """Count up to this document. Returns the shares of each tier that answered any."""
        self._step(model)
        total = sum(self._sum.values())
        return {tier: count / total for tier, count in self._sum.items() if count} if total else {}

    def _step(self, model: Mapping[str, Any]) -> None:
        for table, figures in model["tables"].items():
            for tier, count in figures["lookup_keys"].items():
                place = (model["active_version"], table, tier)
                last = self._last.get(place, 0)
                self._sum[tier] += count - last if count >= last else count
                self._last[place] = count


def show(report: DemoReport, console: Console) -> None:
    """Print the figures, compactly."""
    console.print()
    console.print(_latency(report))
    console.print()
    console.print(_figures(report))
    if not report.ok:
        console.print("Something is wrong: a count above is not zero, or the deltas did not help.", style="bold red")
    if report.first_error:
        console.print(f"first failure: {report.first_error}", style="red", markup=False)


def _latency(report: DemoReport) -> Table:
    table = Table(
        title="Look-ups while all this went on", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("")
    for name in ("requests", "failed", "p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right")
    for window in report.windows:
        numbers = (f"{window.p50_ms:.1f}", f"{window.p99_ms:.1f}", f"{window.max_ms:.1f}")
        table.add_row(window.name, f"{window.requests:,}", f"{window.failed:,}", *numbers)
    return table


def _figures(report: DemoReport) -> Table:
    table = Table(
        title="In short", title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )
    table.add_column("", no_wrap=True)
    table.add_column("")
    table.add_row(
        "loaded",
        f"{report.rows:,} rows at {report.load_rows_per_s:,.0f} a second; the second snapshot, under load, at {report.beside_rows_per_s:,.0f}",
    )
    shares = ", ".join(f"{tier} {share:.1%}" for tier, share in report.tiers.items())
    table.add_row(
        "answered from",
        f"{shares}  (host budget {report.host_budget}, rows and keys {report.table_bytes / 2**20:.0f} MiB)",
    )
    table.add_row(
        "freshness",
        f"median {report.freshness_median_s * 1e3:.0f} ms, p99 {report.freshness_p99_s * 1e3:.0f} ms from event to visible, "
        f"training included ({report.deltas} deltas, {report.delta_rows:,} rows)",
    )
    if report.quality is not None:
        q = report.quality
        table.add_row(
            "AUC, newest events", f"{q.daily:.3f} daily snapshot alone → [bold green]{q.deltas:.3f}[/] with the deltas"
        )
        table.add_row(
            "",
            f"{q.daily_known_items:.3f} → {q.deltas_known_items:.3f} on items the snapshot has; {q.new_item_share:.0%} of the events are of newer items",
        )
    table.add_row("failed requests", _count(report.failed_requests, report.requests))
    table.add_row("answers from two states", _count(report.mixed_answers, report.requests))
    table.add_row("stale answers", _count(report.stale_answers, report.requests))
    table.add_row("rows read back", f"{_count(report.mismatches, report.rows_checked)} differ from the trainer's")
    if report.served_scores:
        checked = _count(report.score_mismatches, report.scores_checked)
        table.add_row("scores of the service", f"{checked} differ from the trainer's dense part on the same rows")
    else:
        table.add_row("scores", "made by the demo: the service predicts where tierstore[dense] is installed")
    table.add_row("took", f"{report.total_s:.0f} s")
    return table


def _count(bad: int, total: int) -> str:
    return f"[{'bold green' if bad == 0 else 'bold red'}]{bad:,}[/] of {total:,}"
