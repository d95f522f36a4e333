"""Ten million rows on one machine: write a snapshot, load it, check every row, and serve it from a small memory.

    python -m benchmarks.ten_million [--rows 10_000_000] [--dim 32] [--dtype float16] [--host-budget 256MiB] [--json FILE]

Every present key is looked up once and compared with the source files, and as many absent keys must be reported as
not found. Then Zipf(1.05) traffic runs from one thread. Figures depend on the machine and on what else it does:
quote them with its description, which the report begins with.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.access_traces import draw, zipf_weights
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.bench import keys_of
from tierstore.formats.snapshot.reader import Snapshot, open_snapshot

BATCH = 65_536
CALL_KEYS = 4_096


def write(where: Path, rows: int, dim: int, dtype: str) -> float:
    began = time.perf_counter()
    rng = np.random.default_rng(1)
    with tierstore.SnapshotWriter(where, model="bench", version=1) as writer:
        table = writer.table("item", dim=dim, dtype=dtype)
        for first in range(0, rows, BATCH):
            count = min(BATCH, rows - first)
            table.write(
                keys_of(np.arange(first, first + count)),
                rng.standard_normal((count, dim), dtype=np.float32).astype(np.float16),
            )
        writer.feature("item_id", table="item")
    return time.perf_counter() - began


def check_present(model: tierstore.Model, snapshot: Snapshot) -> tuple[int, int, float]:
    """Look up every key of the source files. Returns (keys, wrong rows, seconds spent in look-ups)."""
    checked = wrong = 0
    spent = 0.0
    for shard in range(len(snapshot.manifest.tables[0].shards)):
        for batch in snapshot.batches("item", shard, BATCH):
            began = time.perf_counter()
            rows, found = model.lookup("item_id", batch.keys, return_found=True)
            spent += time.perf_counter() - began
            wrong += int(np.count_nonzero(~found | (rows != batch.vectors.astype(np.float32)).any(axis=1)))
            checked += len(batch.keys)
    return checked, wrong, spent


def check_absent(model: tierstore.Model, rows: int, count: int) -> int:
    """Look up keys that no row has. Returns how many were answered as if they existed."""
    wrong = 0
    for first in range(0, count, BATCH):
        answer, found = model.lookup(
            "item_id", keys_of(rows + np.arange(first, min(first + BATCH, count))), return_found=True
        )
        wrong += int(np.count_nonzero(found)) + int(np.count_nonzero(answer))
    return wrong


def zipf_traffic(model: tierstore.Model, rows: int, calls: int) -> dict[str, float]:
    """Zipf(1.05) over all rows, `CALL_KEYS` a call; the first half warms the cache and is not counted."""
    trace = keys_of(draw(zipf_weights(rows, 1.05), calls * CALL_KEYS, seed=2)).reshape(calls, CALL_KEYS)
    took: list[float] = []
    before: dict[str, int] = {}
    for call, keys in enumerate(trace):
        if call == calls // 2:
            before = lookup_keys(model)
        began = time.perf_counter()
        model.lookup("item_id", keys)
        if call >= calls // 2:
            took.append(time.perf_counter() - began)
    after = lookup_keys(model)
    keys_counted = sum(after.values()) - sum(before.values())
    return {
        "hit_rate": (after["host"] - before["host"]) / keys_counted,
        "keys_per_s": keys_counted / sum(took),
        "p50_ms": float(np.percentile(took, 50)) * 1e3,
        "p99_ms": float(np.percentile(took, 99)) * 1e3,
    }


def lookup_keys(model: tierstore.Model) -> dict[str, int]:
    with model.view() as view:
        return view.open_version.tables["item"].counts.as_dict()


def measure(root: Path, rows: int, dim: int, dtype: str, host_budget: str, zipf_calls: int) -> dict[str, Any]:
    source = root / "snapshot"
    wrote = write(source, rows, dim, dtype)
    phases: dict[str, float] = {}
    last = ["open", time.perf_counter()]

    def note(progress: Any) -> None:
        if progress.phase != last[0]:
            now = time.perf_counter()
            phases[str(last[0])] = phases.get(str(last[0]), 0.0) + now - float(last[1])
            last[:] = [progress.phase, now]

    with tierstore.open(root / "data", host_budget=host_budget) as store:
        began = time.perf_counter()
        store.load_snapshot(source, progress=note)
        loaded = time.perf_counter() - began
        phases[str(last[0])] = phases.get(str(last[0]), 0.0) + time.perf_counter() - float(last[1])
        model = store.model("bench")
        checked, wrong, spent = check_present(model, open_snapshot(source))
        absent_wrong = check_absent(model, rows, min(rows, 1_000_000))
        zipf = zipf_traffic(model, rows, zipf_calls)
        table = store.status()["models"]["bench"]["tables"]["item"]
        report = store.verify()
    return {
        "machine": describe(),
        "rows": rows,
        "dim": dim,
        "dtype": dtype,
        "snapshot_write_s": wrote,
        "load_s": loaded,
        "load_rows_per_s": rows / loaded,
        "load_phases_s": phases,
        "present_checked": checked,
        "present_wrong": wrong,
        "present_keys_per_s": checked / spent,
        "absent_checked": min(rows, 1_000_000),
        "absent_wrong": absent_wrong,
        "zipf_1.05": zipf,
        "host_bytes": table["tier_bytes"]["host"],
        "host_budget_bytes": table["tier_budget_bytes"]["host"],
        "disk_bytes_per_row": table["tier_bytes"]["disk"] / rows,
        "verify_ok": report.ok,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def show(result: dict[str, Any]) -> str:
    zipf = result["zipf_1.05"]
    lines = [
        f"{result['machine']}",
        "",
        f"| {result['rows']:,} rows × {result['dim']} {result['dtype']} | |",
        "|---|---|",
        f"| loaded and verified | {result['load_s']:.1f} s, {result['load_rows_per_s'] / 1e6:.2f} M rows/s |",
        f"| of which | {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in result['load_phases_s'].items() if seconds > 0.05)} |",
        f"| present keys looked up, wrong | {result['present_checked']:,}, {result['present_wrong']} |",
        f"| absent keys looked up, wrong | {result['absent_checked']:,}, {result['absent_wrong']} |",
        f"| every key once, mostly from disk | {result['present_keys_per_s'] / 1e3:,.0f} thousand keys/s |",
        f"| Zipf(1.05), {CALL_KEYS:,} keys a call | hit rate {zipf['hit_rate']:.3f}, {zipf['keys_per_s'] / 1e6:.2f} M keys/s, "
        f"p50 {zipf['p50_ms']:.2f} ms, p99 {zipf['p99_ms']:.2f} ms |",
        f"| host tier | {result['host_bytes'] / 2**20:.1f} MiB of {result['host_budget_bytes'] / 2**20:.1f} MiB |",
        f"| disk | {result['disk_bytes_per_row']:.1f} bytes a row |",
        f"| read back by verify | {'ok' if result['verify_ok'] else 'NOT ok'} |",
        f"| peak resident memory of the process | {result['peak_rss_bytes'] / 2**20:,.0f} MiB |",
    ]
    return "\n".join(lines)


def main() -> int:
    args = parser_of(
        __file__, __doc__, rows=10_000_000, dim=32, dtype="float16", host_budget="256MiB", zipf_calls=2_000
    ).parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    try:
        result = measure(root, args.rows, args.dim, args.dtype, args.host_budget, args.zipf_calls)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(show(result))
    report.write(args.json, result)
    return 0 if result["present_wrong"] == result["absent_wrong"] == 0 and result["verify_ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
