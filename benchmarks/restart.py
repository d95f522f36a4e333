"""How long a service is away when it starts again: after a clean end, and after a kill.

    python -m benchmarks.restart [--rows 5000000] [--budget 128MiB] [--changed 200000] [--warm-rate 200000] [--within 600] [--full] [--json FILE]

A model is loaded, its cache filled, and so many keys changed by deltas. Then a process opens the data directory, serves it
over HTTP, and looks keys up every 20 ms, changed ones among them, until the cache is warm or `--within` seconds are over, which
the line "warmed" says; the clock begins when its modules are
imported and their kernels compiled. Before each start the system's cache of the data directory is dropped, and for two seconds
single pages are read at random from the same files, many at a time: "drive_reads_s", what the drive gives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.ten_million import BATCH, write
from tierstore.bench import Drive, keys_of
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.formats.files import drop_from_cache
from tierstore.service.server import ServerThread

DIM = 16
DELTAS = 10
SHOWN = 64  # keys of one request
PAUSE_S = 0.02  # between two requests
CHANGED = 3.0  # what every number of a changed row is


def prepare(root: Path, rows: int, budget: str, changed: int) -> dict[str, Any]:
    """Load, fill the cache, and change so many keys."""
    write(root / "snapshot", rows, DIM, "float16")
    with tierstore.open(root / "data", host_budget=budget, fold_grace_s=0.0) as store:
        began = time.perf_counter()
        store.load_snapshot(root / "snapshot")
        loaded_s = time.perf_counter() - began
        shutil.rmtree(root / "snapshot")
        model = store.model("bench")
        for seq, part in enumerate(np.array_split(np.arange(changed) * (rows // changed), DELTAS), 1):
            where = root / "delta.arrow"
            with tierstore.DeltaWriter(where, model="bench", seq=seq, event_time=datetime.now(UTC)) as writer:
                writer.upsert("item", np.sort(keys_of(part)), np.full((len(part), DIM), CHANGED, np.float32))
            store.apply_delta(where)
        with model.view() as view:
            host = view.open_version.tables["item"].host
            assert host is not None
            capacity = host.capacity_rows
        for first in range(0, min(rows, int(capacity * 1.1)), BATCH):
            model.lookup("item_id", keys_of(np.arange(first, min(first + BATCH, rows))))
        while store.status()["models"]["bench"]["overlays"]:
            time.sleep(0.05)
        return {"load_s": loaded_s, "cache_rows": host.rows_resident, "cache_bytes": host.bytes_in_use}


def drop_cache(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            drop_from_cache(path)


def child(args: argparse.Namespace) -> None:
    """One start, until it is warm or the time is over; then an end."""
    began = time.perf_counter()
    settings = load_settings(None, data=args.child, host_budget=args.budget, warm_rate=args.warm_rate, port=0, grpc_port="off")  # fmt: skip
    store = Store(settings)
    opened_s = time.perf_counter() - began
    rng = np.random.default_rng(3)
    step = args.rows // args.changed
    failed = wrong = asked = 0
    first_s, told_s, took = 0.0, 0.0, []
    with ServerThread(store, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        listening_s = time.perf_counter() - began
        while True:
            numbers = rng.integers(0, args.rows, SHOWN)
            numbers[::2] = rng.integers(0, args.changed, SHOWN // 2) * step
            keys = keys_of(numbers)
            inputs = [{"name": "item_id", "datatype": "INT64", "shape": [SHOWN], "data": keys.tolist()}]
            at = time.perf_counter()
            answer = http.post("/v2/models/bench/infer", json={"inputs": inputs})
            took.append(time.perf_counter() - at)
            asked += 1
            if answer.status_code != 200:
                failed += 1
                continue
            rows = np.array(answer.json()["outputs"][0]["data"], np.float32).reshape(SHOWN, DIM)
            wrong += int(not (rows[::2] == CHANGED).all() or (rows[1::2] == 0).all(axis=1).any())
            now_s = time.perf_counter() - began
            if not first_s:
                first_s = now_s
                print(f"first right answer after {first_s:.3f} s, {failed} failed before", file=sys.stderr, flush=True)
            warming = store.warming()
            if warming is None or now_s > args.within:
                break
            if now_s > told_s + 10:
                told_s = now_s
                print(
                    f"{now_s:.0f} s: {warming['done']:,} of {warming['total']:,} rows, {failed} failed",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(PAUSE_S)
        warm_s = time.perf_counter() - began
        warmed = 1.0 if warming is None else warming["done"] / warming["total"]
    result = {
        "open_s": opened_s, "listening_s": listening_s, "first_answer_s": first_s, "warm_s": warm_s, "warmed": warmed, "requests": asked, "failed": failed,
        "wrong": wrong, "p50_ms": float(np.percentile(took, 50)) * 1e3, "p99_ms": float(np.percentile(took, 99)) * 1e3,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    if args.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


def drive_reads_s(root: Path, seconds: float = 2.0) -> float:
    """Pages of 4 KiB a second that the drive gives at random."""
    count, began = 0, time.perf_counter()
    with Drive(sorted(root.rglob("*.sealed"))) as drive:
        while (took := time.perf_counter() - began) < seconds:
            count += drive.read(0)
    return count / took


def start(root: Path, args: argparse.Namespace, end: str) -> dict[str, Any]:
    drop_cache(root / "data")
    drive = drive_reads_s(root / "data")
    drop_cache(root / "data")
    command = [sys.executable, "-m", "benchmarks.restart", "--child", str(root / "data"), "--end", end]
    command += ["--rows", str(args.rows), "--budget", args.budget, "--changed", str(args.changed)]
    command += ["--warm-rate", str(args.warm_rate), "--within", str(args.within)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600)
    if not done.stdout:
        raise SystemExit(f"the start {end} ended with {done.returncode}")
    return {"drive_reads_s": drive, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    args = parser_of(
        __file__,
        __doc__,
        "tiny",
        "full",
        rows=5_000_000,
        budget="128MiB",
        changed=200_000,
        warm_rate=200_000,
        within=(600.0, "seconds after which a start is ended, warm or not"),
        child=(str, HIDDEN),
        end=("clean", HIDDEN),
    ).parse_args()
    if args.tiny:
        args.rows, args.budget, args.changed = 20_000, "1MiB", 1000
    if args.full:
        args.rows, args.budget, args.changed = 400_000_000, "4GiB", 1_000_000
    if args.child:
        child(args)
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    try:
        prepared = prepare(root, args.rows, args.budget, args.changed)
        results = [
            {"after": "a clean end", **start(root, args, "kill")},
            {"after": "a kill", **start(root, args, "clean")},
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    marks = [report.headline(f"first right answer after {r['after']}", "the start", r["first_answer_s"], at_most=1.0, unit="s") for r in results]  # fmt: skip
    document = {
        "benchmark": "restart",
        "machine": describe(),
        **{name: getattr(args, name) for name in ("rows", "budget", "changed", "warm_rate", "within")},
        **prepared,
        "headlines": marks,
        "results": results,
    }
    print(report.markdown(document))
    report.write(args.json, document)
    return 0 if not any(r["failed"] or r["wrong"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
