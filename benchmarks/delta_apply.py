"""Deltas at production rates: `python -m benchmarks.delta_apply [--tiny] [--rows N] [--seconds S] [--json FILE]`.

Each delta has `--rows` rows (100,000) of 32 float16 of a table of four million. Three measurements:

- flat out, in process: `apply_delta` one after the other, each durable (fsync) and visible when it returns; then how long
  the folding behind it takes. Beside it the drive: the same bytes written to a file and synced, one after the other.
- one delta a second, in process: look-ups of 1,024 keys that are in memory, 500 a second in an open loop, p50 and p99
  over those of quiet phases in between.
- the same over HTTP, with the service and those who ask in processes of their own.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.lookup_swap import DIM, FEATURE, HOT, STEP
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import MODEL, Served
from benchmarks.swap import Admin

KEYS = 1024
RATE, HTTP_RATE = 500, 400  # look-ups a second, in process and over HTTP
PHASES = 4  # of quiet, and as many of deltas
_BATCH = 250_000
_VALUE = np.float16(STEP)  # of every row, before and after each delta: `ask` checks that rows are of one version


def write_snapshot(where: Path, rows: int) -> Path:
    with tierstore.SnapshotWriter(where, model=MODEL, version=1) as writer:
        table = writer.table("item", dim=DIM, dtype="float16")
        for begin in range(0, rows, _BATCH):
            keys = np.arange(begin, min(begin + _BATCH, rows), dtype=np.int64)
            table.write(keys, np.full((len(keys), DIM), _VALUE))
        writer.feature(FEATURE, table="item")
    return where


def deltas(table_rows: int, rows: int) -> Iterator[bytes]:
    """Deltas without end; seq counts from 1."""
    rng = np.random.default_rng(1)
    seq = 0
    while True:
        seq += 1
        sink = io.BytesIO()
        with tierstore.DeltaWriter(sink, model=MODEL, seq=seq, event_time=time.time()) as writer:
            keys = rng.choice(table_rows, rows, replace=False).astype(np.int64)
            writer.upsert("item", keys, np.full((rows, DIM), _VALUE))
        yield sink.getvalue()


def folded(store: tierstore.Store) -> None:
    while store.model(MODEL).publisher.current.overlays:
        time.sleep(0.005)


def flat_out(where: Path, source: Path, made: Iterator[bytes], rows: int, count: int) -> dict[str, Any]:
    ready = [next(made) for _ in range(count + 3)]
    with tierstore.open(where / "flat", host_budget="1GiB") as store:
        store.load_snapshot(source)
        for data in ready[:3]:
            store.apply_delta(data)
        folded(store)
        cpu_s, began, each = time.process_time(), time.perf_counter(), []
        for data in ready[3:]:
            start = time.perf_counter()
            store.apply_delta(data)
            each.append(time.perf_counter() - start)
        applied_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        folded(store)
        folded_s = time.perf_counter() - began
    began = time.perf_counter()
    for number, data in enumerate(ready[3:]):
        with open(where / f"drive-{number}", "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
    drive_s = time.perf_counter() - began
    total = rows * count
    return {
        "deltas": count, "m_rows_per_s": total / applied_s / 1e6, "ack_ms": float(np.median(each)) * 1e3,
        "ack_p99_ms": float(np.quantile(each, 0.99)) * 1e3, "folded_m_rows_per_s": total / folded_s / 1e6,
        "drive_m_rows_per_s": total / drive_s / 1e6, "cpu_ms_per_delta": cpu_s / count * 1e3,
    }  # fmt: skip


def every_second(apply: Callable[[], None], seconds: float) -> None:
    began = time.perf_counter()
    for turn in range(round(seconds)):
        time.sleep(max(0.0, began + turn - time.perf_counter()))
        apply()
    time.sleep(max(0.0, began + seconds - time.perf_counter()))


def beside_in_process(where: Path, source: Path, made: Iterator[bytes], seconds: float, phases: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    with tierstore.open(where / "beside", host_budget="1GiB") as store:
        store.load_snapshot(source)
        model = store.model(MODEL)
        requests = [rng.integers(0, HOT, KEYS) for _ in range(256)]
        for keys in requests * 2:
            model.lookup(FEATURE, keys)
        spans: list[tuple[float, float]] = []
        seen: list[tuple[float, float]] = []
        over = threading.Event()

        def look_up() -> None:
            begin, turn = time.perf_counter(), 0
            while not over.is_set():
                due = begin + turn / RATE
                time.sleep(max(0.0, due - time.perf_counter()))
                model.lookup(FEATURE, requests[turn % 256])
                seen.append((due, time.perf_counter()))
                turn += 1

        ready = [next(made) for _ in range(phases * round(seconds))]
        asker = threading.Thread(target=look_up)
        asker.start()
        for _ in range(phases):
            time.sleep(seconds)
            began = time.perf_counter()
            every_second(lambda: store.apply_delta(ready.pop(0)) and None, seconds)
            spans.append((began, time.perf_counter()))
            folded(store)
        over.set()
        asker.join()
    return compared(np.array(seen), spans)


def beside_http(where: Path, source: Path, made: Iterator[bytes], seconds: float, phases: int) -> dict[str, Any]:
    data = where / "served"
    with tierstore.open(data, host_budget="1GiB") as store:
        store.load_snapshot(source)
    ready = [next(made) for _ in range(phases * round(seconds))]
    with Served(data, host_budget="1GiB") as served:
        out = where / "seen.npy"
        asker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lookup_swap", "--ask", str(served.port), str(out), str(HTTP_RATE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert asker.stdout is not None
        asker.stdout.readline()  # it asks
        time.sleep(3)
        admin, spans = Admin(served), []
        for _ in range(phases):
            time.sleep(seconds)
            began = time.perf_counter()
            every_second(lambda: admin.delta(ready.pop(0)), seconds)
            spans.append((began, time.perf_counter()))
            time.sleep(1)
        assert asker.stdin is not None
        asker.stdin.close()
        asker.wait(60)
    due, answered, status, mixed = np.load(out).T
    failed = {"failed": int((status != 200).sum()), "mixed": int(mixed.sum())}
    return compared(np.stack([due, answered], 1)[due > due[0] + 2], spans) | failed


def compared(seen: np.ndarray, spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians over the phases: each of deltas over the quiet one before it."""
    due, took = seen[:, 0], (seen[:, 1] - seen[:, 0]) * 1e3
    rows, ended = [], 0.0
    for began, until in spans:
        quiet, busy = took[(due > ended) & (due < began)], took[(due >= began) & (due <= until)]
        rows.append([np.quantile(part, q) for part in (quiet, busy) for q in (0.5, 0.99)])
        ended = until + 0.5
    p50, p99, with_p50, with_p99 = np.array(rows).T
    return {
        "lookups": len(due), "quiet_p50_ms": float(np.median(p50)), "quiet_p99_ms": float(np.median(p99)),
        "p50_ms": float(np.median(with_p50)), "p99_ms": float(np.median(with_p99)),
        "p50_over_quiet": float(np.median(with_p50 / p50)), "p99_over_quiet": float(np.median(with_p99 / p99)),
    }  # fmt: skip


def main() -> None:
    options = parser_of(
        __file__, __doc__, "tiny", rows=(100_000, "of a delta"), seconds=(6.0, "of each phase")
    ).parse_args()
    table_rows, rows, seconds, count, phases = 4_000_000, options.rows, options.seconds, 30, PHASES
    if options.tiny:
        table_rows, rows, seconds, count, phases = 20_000, 1_000, 1.0, 3, 1
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
        where = Path(folder)
        source = write_snapshot(where / "snapshot", table_rows)
        flat = flat_out(where, source, deltas(table_rows, rows), rows, count)
        inside = beside_in_process(where, source, deltas(table_rows, rows), seconds, phases)
        http = beside_http(where, source, deltas(table_rows, rows), seconds, phases)
    document: dict[str, Any] = {
        "benchmark": "delta_apply", "machine": describe(), "rows_of_a_delta": rows, "flat_out": [flat],
        "one_a_second": [{"look-ups": "in process"} | inside, {"look-ups": "HTTP"} | http],
    }  # fmt: skip
    document["headlines"] = [
        report.headline("deltas applied flat out", "2 M rows/s", flat["m_rows_per_s"] / 2, at_least=1),
        report.headline("p99 of look-ups beside a delta a second, in process", "p99 quiet", inside["p99_over_quiet"], at_most=1.2),
        report.headline("p99 of look-ups beside a delta a second, HTTP", "p99 quiet", http["p99_over_quiet"], at_most=1.2),
    ]  # fmt: skip
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
