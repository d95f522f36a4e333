"""What many small models cost one process: files, threads and memory at rest, and how long it takes to open them.

    python -m benchmarks.many_models [--models 500] [--tables 5] [--rows 200] [--json FILE]

The models are loaded, and a new process opens them in process, looks a row of each up, changes one of each by a delta,
waits until all are folded, switches one in fifty to a second version, and is counted again once nothing is read any
more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of

DIM = 8
BUDGET = "256MiB"
SWITCHED = 50  # one in so many
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write(where: Path, model: str, version: int, args: argparse.Namespace) -> Path:
    with tierstore.SnapshotWriter(where / f"{model}-{version}", model=model, version=version) as writer:
        for table in range(args.tables):
            keys = np.arange(args.rows)
            writer.table(f"t{table}", dim=DIM).write(keys, np.full((len(keys), DIM), version, np.float32))
            writer.feature(f"f{table}", table=f"t{table}")
    return where / f"{model}-{version}"


def held(at: str) -> dict[str, Any]:
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"part": "held", "at": at, "files": files, "threads": threads, "memory_mib": memory >> 20}


def child(args: argparse.Namespace) -> None:
    data, results, took = Path(args.child), [held("before")], dict[str, float]()
    began, began_cpu = time.perf_counter(), time.process_time()

    def lap(name: str) -> None:
        nonlocal began
        took[name], began = time.perf_counter() - began, time.perf_counter()
        results.append(held(name))

    with tierstore.open(data, host_budget=BUDGET, fold_grace_s=0.0) as store:
        names = store.models()
        assert len(names) == args.models
        cpu_s = time.process_time() - began_cpu
        lap("opened")

        def all_have(value: float) -> bool:
            return all(store.model(name).lookup("f0", [3])[0, 0] == value for name in names)

        wrong = int(not all_have(1))
        lap("looked up")
        for name in names:
            change = data.parent / "delta.arrow"
            with tierstore.DeltaWriter(change, model=name, seq=1, event_time=datetime.now(UTC)) as writer:
                writer.upsert("t0", np.array([3]), np.full((1, DIM), 9, np.float32))
            store.apply_delta(change)
        wrong += int(not all_have(9))
        lap("changed")
        while any(view.overlays for name in names for view in store.model(name).served.views):
            time.sleep(0.01)
        wrong += int(not all_have(9))
        lap("folded")
        for name in names[::SWITCHED]:
            store.load_snapshot(write(data.parent, name, 2, args))
            wrong += int(store.model(name).lookup("f1", [3])[0, 0] != 2)
        lap("switched")
        for name in names * 2:  # the second time finds that nothing was read since the first
            store.model(name).housekeeping.tasks.run()
        lap("at rest")
    print(json.dumps({"took_s": took, "open_cpu_s": cpu_s, "wrong": wrong, "results": results}), flush=True)


def main() -> int:
    args = parser_of(__file__, __doc__, "tiny", models=500, tables=5, rows=200, child=(str, HIDDEN)).parse_args()
    if args.tiny:
        args.models = 3
    if args.child:
        child(args)
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    sizes = {name: getattr(args, name) for name in ("models", "tables", "rows")}
    try:
        began = time.perf_counter()
        with tierstore.open(root / "data", host_budget=BUDGET) as store:
            for number in range(args.models):
                store.load_snapshot(where := write(root, f"model-{number:04}", 1, args))
                shutil.rmtree(where)
        load_s = (time.perf_counter() - began) / args.models
        command = [sys.executable, "-m", "benchmarks.many_models", "--child", str(root / "data")]
        command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    found: dict[str, Any] = json.loads(done.stdout)
    marks = [report.headline("models opened", "the start", found["took_s"]["opened"], at_most=5.0, unit="s")]
    document = {
        "benchmark": "many_models",
        "machine": describe(),
        **sizes,
        "load_s": load_s,
        "headlines": marks,
        **found,
    }
    print(report.markdown(document))
    report.write(args.json, document)
    return 0 if not found["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
