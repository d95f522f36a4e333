"""The demo's results: as a document (`DemoReport.document`), and as lines for a person (`show`). Plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from tierstore.demo.traffic import Samples


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Latency of the requests that were due within one part of the story, in milliseconds; zeros if there are none."""

    name: str
    seconds: float
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, name: str, samples: Samples, start: float, end: float) -> LatencyWindow:
        part = samples[(samples["due"] >= start) & (samples["due"] < end)]
        times = part["latency_s"][~part["failed"]] * 1e3
        p50, p99, top = np.percentile(times, [50, 99, 100]).tolist() if len(times) else (0.0, 0.0, 0.0)
        return cls(name, end - start, len(part), int(part["failed"].sum()), p50, p99, top)


@dataclass(frozen=True, slots=True)
class Quality:
    """AUC on the newest events, which no version was trained on."""

    events: int
    new_item_share: float  # share of these events that are on items which the daily snapshot does not have
    daily: float  # with the daily snapshot
    deltas: float  # after the deltas
    daily_old_items: float  # the same two on the events of items that the daily snapshot has
    deltas_old_items: float


@dataclass(slots=True)
class DemoReport:
    """The results of one run. Shares are 0 to 1."""

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
    windows: list[LatencyWindow] = field(default_factory=list)
    servers: list[LatencyWindow] = field(default_factory=list)  # the same requests, by who answered
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
        """Nothing failed, no answer was mixed or stale, no row differed, and the deltas raised the AUC."""
        wrong = self.failed_requests + self.mixed_answers + self.stale_answers + self.mismatches + self.score_mismatches
        better = self.quality is not None and self.quality.deltas > self.quality.daily
        return wrong == 0 and self.requests > 0 and better

    def document(self) -> dict[str, Any]:
        """The results as JSON-ready values."""
        return {**asdict(self), "ok": self.ok}


class TierCounter:
    """Where keys were answered, summed over status documents that are read now and then.

    A version has counters of its own, which start at zero each time it is opened: a counter
    that fell has started again.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._last: dict[tuple[int, str, str], int] = {}
        self._sum: Counter[str] = Counter()
        self.add(model)
        self._sum.clear()

    def add(self, model: Mapping[str, Any]) -> dict[str, float]:
        """Count up to this document. Returns the shares of the tiers that answered any."""
        for table, stats in model["tables"].items():
            for tier, count in stats["lookup_keys"].items():
                counter = (model["active_version"], table, tier)
                last = self._last.get(counter, 0)
                self._sum[tier] += count - last if count >= last else count
                self._last[counter] = count
        return {tier: count / self._sum.total() for tier, count in self._sum.items() if count}


def show(report: DemoReport, console: Console) -> None:
    """Print the results, compactly."""
    lines = ["", f"[bold]{'Look-ups during all this':<34}requests  failed   p50 ms   p99 ms   max ms[/]"]
    lines += [
        f"{w.name:<34}{w.requests:>8,}{w.failed:>8,}{w.p50_ms:>9.1f}{w.p99_ms:>9.1f}{w.max_ms:>9.1f}"
        for w in report.windows
    ]
    lines += ["", "[bold]In short[/]", *(f"{name:<24}{text}" for name, text in _summary(report))]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if not report.ok:
        console.print("Something is wrong: a count above is not zero, or the deltas did not help.", style="bold red")
    if report.first_error:
        console.print(f"first failure: {report.first_error}", style="red", markup=False)


def _summary(r: DemoReport) -> list[tuple[str, str]]:
    q = r.quality or Quality(0, 0, 0, 0, 0, 0)
    speed = f"{r.load_rows_per_s:,.0f} a second; the second snapshot, under load, at {r.beside_rows_per_s:,.0f}"
    tiers = ", ".join(f"{tier} {share:.1%}" for tier, share in r.tiers.items())
    servers = "; ".join(f"{w.name}: {w.requests:,}, p50 {w.p50_ms:.1f} ms, p99 {w.p99_ms:.1f}" for w in r.servers)
    fresh = f"median {r.freshness_median_s * 1e3:.0f} ms, p99 {r.freshness_p99_s * 1e3:.0f} ms from event to visible"
    old = f"{q.daily_old_items:.3f} → {q.deltas_old_items:.3f} on items the snapshot has"
    scores = f"{_count(r.score_mismatches, r.scores_checked)} differ from the trainer's dense part on the same rows"
    return [
        ("loaded", f"{r.rows:,} rows at {speed}"),
        ("answered from", f"{tiers}  (host budget {r.host_budget}, rows and keys {r.table_bytes / 2**20:.0f} MiB)"),
        ("answered by", servers),
        ("freshness", f"{fresh}, training included ({r.deltas} deltas, {r.delta_rows:,} rows)"),
        ("AUC, newest events", f"{q.daily:.3f} daily snapshot alone → [bold green]{q.deltas:.3f}[/] with the deltas"),
        ("", f"{old}; {q.new_item_share:.0%} of the events are of newer items"),
        ("failed requests", _count(r.failed_requests, r.requests)),
        ("answers from two states", _count(r.mixed_answers, r.requests)),
        ("stale answers", _count(r.stale_answers, r.requests)),
        ("rows read back", f"{_count(r.mismatches, r.rows_checked)} differ from the trainer's"),
        (
            "scores of the service",
            scores if r.served_scores else "none: it predicts where tierstore[dense] is installed",
        ),
        ("took", f"{r.total_s:.0f} s"),
    ]


def _count(bad: int, total: int) -> str:
    return f"[{'bold green' if bad == 0 else 'bold red'}]{bad:,}[/] of {total:,}"
