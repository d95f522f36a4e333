"""A load beside look-ups: `python -m benchmarks.lookup_load [--tiny] [--rows N] [--ratios R …] [--json FILE]`.

A process of its own asks over HTTP for 1,024 rows that are in memory, in an open loop as in `benchmarks.lookup_swap`: first
nothing else happens, then a snapshot of `--rows` rows is loaded (not activated), then it is quiet again. So once for each
setting `load_p99_ratio`: 0 lets the load go as fast as it can, 1.3 has it slow down where look-ups get slower. Beside the p99
of clients, over that of quiet, stand the load's rate, the share of the time that its helpers were at work, and both p99 by
the service's own clock, which is what the setting is about: it does not see how long a request waits to be taken up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.lookup_swap import DIM, FEATURE, HOT, STEP, ask, write_snapshot
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import MODEL, Served
from benchmarks.swap import Admin

RATE = 400
_BATCH = 250_000


def write_large(where: Path, version: int, rows: int) -> Path:
    """Write a large snapshot, in batches and of float16."""
    source = where / f"large-{version}"
    with tierstore.SnapshotWriter(source, model=MODEL, version=version) as writer:
        table = writer.table("item", dim=DIM, dtype="float16")
        for begin in range(0, rows, _BATCH):
            keys = np.arange(begin, min(begin + _BATCH, rows), dtype=np.int64)
            table.write(keys, np.full((len(keys), DIM), 1.0, np.float32))
        writer.feature(FEATURE, table="item")
    return source


class Watch:
    """The throttle's document, now and then."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self._url, self._over = f"http://127.0.0.1:{port}/admin/models", threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            with urllib.request.urlopen(self._url, timeout=30) as answer:
                self.seen.append((time.perf_counter(), json.loads(answer.read())["throttle"]))

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def median(self, name: str, began: float, ended: float) -> float | None:
        values = [seen[name] for at, seen in self.seen if began < at < ended and seen[name] is not None]
        return float(np.median(values)) if values else None


def measure(where: Path, source: Path, rows: int, quiet_s: float, ratio: float, host_budget: str) -> dict[str, Any]:
    data = where / f"data-{ratio}"
    with tierstore.open(data, host_budget=host_budget, load_workers=1) as store:
        store.load_snapshot(write_snapshot(where / f"hot-{ratio}", 1, HOT * 10))
    with Served(data, host_budget=host_budget, source_root=where, load_p99_ratio=ratio) as served:
        out = where / f"seen-{ratio}.npy"
        asker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lookup_load", "--ask", str(served.port), str(out)], stdin=subprocess.PIPE
        )
        watch = Watch(served.port)
        time.sleep(2 + quiet_s)
        admin = Admin(served)
        admin.load(source)
        ((_, began, ended),) = admin.spans
        time.sleep(quiet_s)
        watch.end()
        assert asker.stdin is not None
        asker.stdin.close()
        asker.wait(60)
    due, answered, status, mixed = np.load(out).T
    kept = due > due[0] + 1.0  # the first second meets cold code and rows
    took, during = (answered - due) * 1e3, (answered >= began) & (due <= ended)
    quiet, beside = (np.quantile(took[kept & which], (0.5, 0.99)) for which in (~during, during))
    return {
        "load_p99_ratio": ratio, "load_s": ended - began, "load_m_rows_per_s": rows / (ended - began) / 1e6,
        "share": watch.median("share", began, ended), "requests": int(during.sum()), "p50_ms": float(beside[0]), "p99_ms": float(beside[1]),
        "quiet_p99_ms": float(quiet[1]), "p99_over_quiet": float(beside[1] / quiet[1]),
        "service_p99_ms": _ms(watch.median("p99_s", began, ended)),
        "service_quiet_p99_ms": _ms(watch.median("quiet_p99_s", began, ended)),
        "watched": [
            {"s": round(at - began, 1)} | {name: seen[name] for name in ("share", "p99_s", "quiet_p99_s")}
            for at, seen in watch.seen
        ],
        "failed": int((status != 200).sum()), "mixed": int(mixed.sum()),
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def main() -> None:
    parser = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=10_000_000,
        quiet=(10.0, "seconds before, and after"),
        ratios=[0.0, 1.3],
        host_budget=("256MiB", "512KiB: most rows that are asked for are on disk"),
    )
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask(int(options.ask[0]), Path(options.ask[1]), RATE)
        return
    rows, quiet_s = (30_000, 0.5) if options.tiny else (options.rows, options.quiet)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
        where = Path(folder)
        source = write_large(where, STEP, rows)
        ratios = options.ratios[-1:] if options.tiny else options.ratios
        results = [measure(where, source, rows, quiet_s, ratio, options.host_budget) for ratio in ratios]
    document: dict[str, Any] = {"benchmark": "lookup_load", "machine": describe(), "results": results, "rows": rows}
    last = results[-1]
    document["watched"] = [{"load_p99_ratio": r["load_p99_ratio"]} | seen for r in results for seen in r.pop("watched")]
    document["headlines"] = [
        report.headline("look-ups that failed", "all", float(sum(r["failed"] for r in results)), at_most=0, unit="requests"),
        report.headline(
            f"p99 of look-ups beside a load, load_p99_ratio {last['load_p99_ratio']}", "p99 quiet", last["p99_over_quiet"], at_most=1.3
        ),
    ]  # fmt: skip
    report.write(options.json, document)
    print(report.markdown({name: value for name, value in document.items() if name != "watched"}))


if __name__ == "__main__":
    main()
