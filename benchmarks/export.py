"""An export beside look-ups: how fast it is, and what the look-ups notice.

    python -m benchmarks.export [--rows 3_000_000] [--dim 32] [--changed 500_000] [--tiny] [--json FILE]

One thread looks 64 random keys up, a thousand times a second at most, with a host tier that holds a part of the rows. It does so in quiet,
beside an export of the base alone, in quiet again, and beside an export once deltas have changed some of the rows. At the end one export runs alone.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ten_million import keys_of, write

MODEL, KEYS, PAUSE_S = "bench", 64, 0.001


class Lookups:
    """A thread that looks keys up until `close`."""

    def __init__(self, store: tierstore.Store, rows: int) -> None:
        self._store, self._rows = store, rows
        self._seconds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        random, model = np.random.default_rng(5), self._store.model(MODEL)
        while not self._stop.is_set():
            keys = keys_of(random.integers(0, self._rows, KEYS))
            began = time.perf_counter()
            model.lookup("item_id", keys)
            self._seconds.append(time.perf_counter() - began)
            time.sleep(PAUSE_S)

    def during(self, work: Callable[[], Any]) -> dict[str, float]:
        """Latencies while `work` runs, in µs, and how long it took."""
        before, began = len(self._seconds), time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        p50, p99 = np.percentile(np.array(self._seconds[before:]), [50, 99]) * 1e6
        return {"seconds": seconds, "p50_us": float(p50), "p99_us": float(p99)}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def change(store: tierstore.Store, rows: int, dim: int, changed: int) -> None:
    """Ten deltas, folded."""
    random = np.random.default_rng(7)
    for seq, keys in enumerate(np.array_split(random.choice(rows, changed, replace=False), 10), 1):
        buffer = io.BytesIO()
        with tierstore.DeltaWriter(buffer, model=MODEL, seq=seq, event_time=datetime.now(UTC)) as delta:
            delta.upsert("item", keys_of(keys), random.standard_normal((len(keys), dim), dtype=np.float32))
        store.apply_delta(buffer.getvalue())
    while store.status()["models"][MODEL]["overlays"]:
        time.sleep(0.05)


def measure(root: Path, rows: int, dim: int, changed: int, quiet_s: float) -> list[dict[str, Any]]:
    write(root / "snapshot", rows, dim, "float16")
    results = []
    with tierstore.open(root / "data", host_budget="64MiB") as store:
        store.load_snapshot(root / "snapshot")
        lookups = Lookups(store, rows)

        def export(name: str) -> None:
            assert store.export(MODEL, root / name).rows == rows

        try:
            lookups.during(lambda: time.sleep(quiet_s))
            for name, before in (("base", 0), ("changed", changed)):
                if before:
                    change(store, rows, dim, before)
                results.append({"run": f"quiet, {name}", **lookups.during(lambda: time.sleep(quiet_s))})
                results.append({"run": f"export, {name}", **lookups.during(lambda name=name: export(name))})  # type: ignore[misc]
        finally:
            lookups.close()
        began = time.perf_counter()
        export("alone")
        results.append({"run": "export, changed, alone", "seconds": time.perf_counter() - began})
    return results


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny", rows=3_000_000, dim=32, changed=500_000).parse_args()
    rows, changed, quiet_s = (20_000, 2_000, 0.2) if options.tiny else (options.rows, options.changed, 5.0)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=Path.cwd()) as folder:
        results = measure(Path(folder), rows, options.dim, changed, quiet_s)
    print(f"{describe()}; {rows:,} rows of {options.dim} float16, {changed:,} of them changed\n")
    print("| run | s | M rows/s | p50 µs | p99 µs |\n|---|---|---|---|---|")
    for one in results:
        rate = f"{rows / one['seconds'] / 1e6:.2f}" if one["run"].startswith("export") else ""
        p50, p99 = (f"{one[name]:.0f}" if name in one else "" for name in ("p50_us", "p99_us"))
        print(f"| {one['run']} | {one['seconds']:.1f} | {rate} | {p50} | {p99} |")
    document = {"benchmark": "export", "machine": describe(), "rows": rows, "results": results, "headlines": []}
    report.write(options.json, document)


if __name__ == "__main__":
    main()
