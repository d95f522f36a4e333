"""A large load: how fast, in how much memory, and what is done again when it is killed in each of its phases.

    python -m benchmarks.large_load [--rows 5000000] [--full] [--scratch DIR] [--json FILE]

A snapshot of rows of 16 float16 is made on the spot. It is loaded once without a break, by a process of its own. Then it
is loaded into another store by one process after the other: each is killed, with SIGKILL, in the middle of a phase, and the
next goes on. What a phase had done when it was killed is compared with what it has done when it is entered again.

Memory is anonymous memory of the process and of its helpers together, as Linux counts it (RssAnon), sampled five times a second.
Rows of some shards are compared with the snapshot's in the end. Needs room on disk for the rows four times.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.ten_million import write
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.types import Progress

DIM = 16
KILLED = ("read", "write", "ingest", "verify")  # phases
SHARDS_CHECKED = 3
RATE_MARK, MEMORY_MARK = 4e6, 1.2e9  # rows a second, bytes
AGAIN_MARK = 0.1


def child(root: Path) -> None:
    """Load, and print every step."""

    def progress(step: Progress) -> None:
        print(json.dumps([step.phase, step.done, step.total]), flush=True)

    with tierstore.open(root, host_budget="64MiB") as store:
        store.load_snapshot(root.parent / "snapshot", progress=progress)
        print(json.dumps(["loaded", 1, 1]), flush=True)


class Load:
    """A process that loads into `data`; `steps` as far as it is."""

    def __init__(self, data: Path) -> None:
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.large_load", "--child", str(data)], stdout=subprocess.PIPE, text=True
        )
        self.peak_bytes = 0
        self.first: dict[str, int] = {}  # by phase: what was done already when it was entered
        self.last: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self, killed_in: str | None = None) -> None:
        """Run a load to its end, or until the middle of a phase, where it is killed."""
        assert self.process.stdout is not None
        phase, entered = "", self.began
        for line in self.process.stdout:
            name, done, total = json.loads(line)
            now = time.perf_counter()
            if name != phase:
                self.seconds[phase or "start"] = self.seconds.get(phase or "start", 0.0) + now - entered
                phase, entered = name, now
            self.first.setdefault(name, done)
            self.last[name] = done
            if name == killed_in and done >= total // 2:
                self.process.send_signal(signal.SIGKILL)
                break
        self.process.stdout.read()
        code = self.process.wait()
        if code != (-signal.SIGKILL if killed_in else 0):
            raise SystemExit(f"the load ended with {code}")

    def _watch(self) -> None:
        while self.process.poll() is None:
            pids = [self.process.pid, *_children(self.process.pid)]
            self.peak_bytes = max(self.peak_bytes, sum(map(_anonymous_bytes, pids)))
            time.sleep(0.2)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def wrong_rows(root: Path, data: Path) -> int:
    """How many rows of some shards differ from the snapshot's."""
    snapshot = open_snapshot(root / "snapshot")
    shards = len(snapshot.manifest.tables[0].shards)
    wrong = 0
    with tierstore.open(data, host_budget="64MiB") as store:
        model = store.model("bench")
        for shard in range(0, shards, max(1, shards // SHARDS_CHECKED)):
            for batch in snapshot.batches("item", shard):
                rows, found = model.lookup("item_id", batch.keys, return_found=True)
                wrong += int((~found | (rows != batch.vectors).any(axis=1)).sum())
    return wrong


def measure(root: Path, rows: int, killed: Sequence[str] = KILLED) -> dict[str, Any]:
    write(root / "snapshot", rows, DIM, "float16")
    os.sync()
    whole = Load(root / "whole")
    whole.run()
    whole_s = sum(seconds for phase, seconds in whole.seconds.items() if phase not in ("start", "loaded"))
    shutil.rmtree(root / "whole")
    loads, again, peak = [], {}, whole.peak_bytes
    for phase in killed:
        load = Load(root / "data")
        load.run(phase)
        loads.append(load)
    last = Load(root / "data")
    last.run()
    loads.append(last)
    for number, phase in enumerate(killed):
        before, after = loads[number].last, loads[number + 1].first
        done = {name: of for name, of in before.items() if name in ("read", "join", "write")}
        repeated = sum(max(0, of - after.get(name, of)) for name, of in done.items())
        again[phase] = {"done": sum(done.values()), "again": repeated, "share": repeated / max(1, sum(done.values()))}
        peak = max(peak, loads[number + 1].peak_bytes)
    return {
        "rows": rows,
        "load_s": whole_s,
        "rows_per_s": rows / whole_s,
        "seconds": whole.seconds,
        "peak_bytes": peak,
        "killed": again,
        "goes_on_s": [load.seconds for load in loads],
        "wrong": wrong_rows(root, root / "data"),
    }


def main() -> int:
    args = parser_of(
        __file__,
        __doc__,
        "tiny",
        "full",
        rows=5_000_000,
        scratch=(Path, "where to work (default: the system's directory)"),
        child=(Path, HIDDEN),
    ).parse_args()
    if args.child is not None:
        child(args.child)
        return 0
    rows = 200_000 if args.tiny else 400_000_000 if args.full else args.rows
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="tierstore-bench-") as scratch:
        result = measure(Path(scratch), rows, KILLED[1:2] if args.tiny else KILLED)
    what = f"{rows:,} rows of {DIM} float16"
    worst = max(of["share"] for of in result["killed"].values())
    document = {
        "benchmark": "large_load",
        "machine": describe(),
        "headlines": [
            report.headline(f"load of {what}", "rows a second", result["rows_per_s"], at_least=RATE_MARK),
            report.headline(
                f"load of {what}: anonymous memory of all processes", "bytes", result["peak_bytes"], at_most=MEMORY_MARK
            ),
            report.headline(
                "killed in the middle of a phase: rows read or written again", "finished", worst, at_most=AGAIN_MARK
            ),
            report.headline("wrong rows afterwards", "rows of some shards", result["wrong"], at_most=0),
        ],
        "results": [
            {"killed in": phase, "finished rows": of["done"], "done again": of["again"], "share": of["share"]}
            for phase, of in result["killed"].items()
        ],
        "facts": {key: result[key] for key in ("load_s", "rows_per_s", "peak_bytes", "wrong")},
        "phases_s": result["seconds"],
        "goes_on_s": result["goes_on_s"],
    }
    report.write(args.json, document)
    print(report.markdown(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
