"""Look-ups while one thing at a time changes: `python -m benchmarks.switch_latency [--tiny] [--json FILE]`.

A process of its own asks over HTTP for 1,024 rows that are in memory, 200 times a second, each when it is due (an open loop). Changes
come one by one, with a rest after each: a load with its activation, a delta, a rollback to the version before, an
activation of a version that was kept. Each request counts for the change that was under way between the moment when it
was due and the last byte of its answer, or for the quiet.

Beside it a process does nothing but wake up as often. How late it does is what the processors and the kernel take of anybody; so the mark
is p99 of look-ups by p99 of that process, during the same changes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.lookup_swap import STEP, Answers, asked, delta, write_snapshot
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import Served
from benchmarks.swap import Admin

MARK = 2.0
REST_S = 0.15  # after a change, beside what `Admin` waits
LOAD, DELTA, ROLLBACK, ACTIVATION = "load with activation", "delta", "rollback", "activation of a kept version"
CHANGES = (LOAD, DELTA, ROLLBACK, ACTIVATION)


def change(admin: Admin, sources: list[Path], switches: int) -> None:
    """Each snapshot in turn, and for each `switches` deltas, rollbacks and activations of what was left."""
    seq = 0
    for version, source in enumerate(sources, 2):
        admin.load(source, activate=True)
        for _ in range(switches):
            seq += 1
            admin.delta(delta(seq, version, version * STEP + seq % 100), DELTA)
            time.sleep(REST_S)
            admin.post(ROLLBACK, "rollback", {})
            time.sleep(REST_S)
            admin.post(ACTIVATION, "activate", {"version": version})
            time.sleep(REST_S)


def measure(where: Path, rows: int, quiet_s: float, rounds: int, switches: int) -> dict[str, Any]:
    sources = [write_snapshot(where / "snapshots", version, rows) for version in range(1, rounds + 2)]
    data = where / "data"
    with tierstore.open(data, host_budget="256MiB", load_workers=1) as store:
        store.load_snapshot(sources[0])
    with Served(data, host_budget="256MiB", source_root=where, keep_versions=2) as served:
        admin = Admin(served)
        with asked(served.port, where) as answers:
            time.sleep(3 + quiet_s)
            change(admin, sources[1:], switches)
            time.sleep(quiet_s)
    return result(answers, admin.spans)


def result(answers: Answers, spans: list[tuple[str, float, float]]) -> dict[str, Any]:
    due, answered, status, mixed = answers.seen.T
    awaited, awake = answers.ticks.T

    def row(name: str, of: list[tuple[float, float]]) -> dict[str, Any]:
        asked_then, waking_then = within(due, answered, of), within(awaited, awake, of)
        if name == "quiet":
            asked_then, waking_then = ~asked_then, ~waking_then
        took, late = (answered - due)[asked_then] * 1e3, (awake - awaited)[waking_then] * 1e3
        found: dict[str, Any] = {"while": name, "times": None if name == "quiet" else len(of), "requests": len(took)}
        if name != "quiet":
            found["seconds_each"] = float(np.median([end - begin for begin, end in of]))
        for label, of_them in (("", took), ("waking_", late)):
            p50, p99, most = np.quantile(of_them, (0.5, 0.99, 1.0))
            found |= {f"{label}p50_ms": p50, f"{label}p99_ms": p99, f"{label}max_ms": most}
        return found | {"p99_over_waking": found["p99_ms"] / found["waking_p99_ms"]}

    rows = [row("quiet", [(begin, end) for _, begin, end in spans])]
    rows += [row(kind, [(begin, end) for what, begin, end in spans if what == kind]) for kind in CHANGES]
    by_name = {found["while"]: found for found in rows}
    return {
        "headlines": [
            report.headline("look-ups that failed", "all", float((status != 200).sum()), at_most=0, unit="requests"),
            report.headline("answers of two states", "all", float(mixed.sum()), at_most=0, unit="requests"),
            *(
                report.headline(
                    f"p99 of look-ups, {kind}", "waking up alone", by_name[kind]["p99_over_waking"], at_most=MARK
                )
                for kind in (ROLLBACK, ACTIVATION)
            ),
        ],
        "results": rows,
    }


def within(begin: np.ndarray, end: np.ndarray, spans: list[tuple[float, float]]) -> np.ndarray:
    """Which of them were under way during one of the spans."""
    which = np.zeros(len(begin), bool)
    for first, last in spans:
        which |= (end >= first) & (begin <= last)
    return which


def main() -> None:
    options = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=300_000,
        rounds=(2, "snapshots that are loaded"),
        switches=(25, "rollbacks and activations for each"),
        quiet=(8.0, "seconds before, and after"),
    ).parse_args()
    plan = (25_000, 1.0, 1, 2) if options.tiny else (options.rows, options.quiet, options.rounds, options.switches)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
        document = {"benchmark": "switch_latency", "machine": describe()}
        document |= measure(Path(folder), *plan)
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
