"""Loading what was built elsewhere, against what the drive can do, and beside it the load of the snapshot itself.

    python -m benchmarks.built_load [--rows 16_000_000] [--dim 64] [--rounds 3] [--tiny] [--json FILE]

Each round reads as many bytes as the built version has from the drive, one after the other, and writes as many, flushed; then it loads
the built version into an empty store, its files not in the system's cache: copied, flushed, read back from the drive, compared. The mark
is the drive's time (one reading and one writing) over the load's. A load that reads back moves half as much again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.report import headline
from benchmarks.ten_million import keys_of, write
from tierstore.formats.files import drop_from_cache, tree_bytes

MODEL = "bench"
BLOCK = 8 << 20


def drive(built: Path, scratch: Path) -> tuple[float, float]:
    """Seconds to read all built files from the drive, and to write as many bytes to it."""
    files = sorted(built.glob("base-*"))
    for path in files:
        drop_from_cache(path)
    block = memoryview(bytearray(os.urandom(BLOCK)))
    began = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(block):
                pass
    read = time.perf_counter() - began
    began = time.perf_counter()
    with open(scratch, "wb", buffering=0) as file:
        for path in files:
            left = path.stat().st_size
            while left:
                left -= file.write(block[: min(left, BLOCK)])
        os.fsync(file.fileno())
    wrote = time.perf_counter() - began
    scratch.unlink()
    return read, wrote


def load(source: Path, data: Path, dropped: list[Path], rows: int) -> tuple[float, dict[str, float]]:
    """Seconds of a load into an empty store, and by phase; a thousand rows are looked up to see that it is right."""
    for path in dropped:
        drop_from_cache(path)
    phases: dict[str, float] = {}
    last = ["begin", time.perf_counter()]

    def note(progress: tierstore.Progress) -> None:
        now = time.perf_counter()
        phases[str(last[0])] = phases.get(str(last[0]), 0.0) + now - float(last[1])
        last[:] = [progress.phase, now]

    with tierstore.open(data, host_budget="64MiB") as store:
        began = time.perf_counter()
        last[1] = began
        store.load_snapshot(source, progress=note)
        seconds = time.perf_counter() - began
        keys = keys_of(np.linspace(0, rows - 1, 1000).astype(np.int64))
        assert store.model(MODEL).lookup("item_id", keys, return_found=True)[1].all()
    shutil.rmtree(data)
    return seconds, phases


def measure(root: Path, rows: int, dim: int, rounds: int) -> dict[str, Any]:
    source, built = root / "snapshot", root / "built"
    write(source, rows, dim, "float16")
    began = time.perf_counter()
    tierstore.build_snapshot(source, built)
    build_s = time.perf_counter() - began
    nbytes = tree_bytes(built)
    results = []
    for _ in range(rounds):
        read_s, write_s = drive(built, root / "scratch")
        load_s, phases = load(built, root / "data", sorted(built.glob("base-*")), rows)
        sort_s, _ = load(source, root / "data", sorted(path for path in source.rglob("*") if path.is_file()), rows)
        results.append(
            {
                "drive_read_s": read_s,
                "drive_write_s": write_s,
                "built_load_s": load_s,
                "snapshot_load_s": sort_s,
                "of_the_drive": (read_s + write_s) / load_s,
                "phases_s": {name: round(seconds, 3) for name, seconds in phases.items() if seconds > 0.05},
            }
        )
    ratio = statistics.median(result["of_the_drive"] for result in results)
    return {
        "benchmark": "built_load",
        "machine": describe(),
        "rows": rows,
        "dim": dim,
        "bytes": nbytes,
        "build_s": build_s,
        "headlines": [headline("load of a built version", "the drive, read and write once", ratio, at_least=0.6)],
        "results": results,
    }


def show(document: dict[str, Any]) -> str:
    lines = [
        document["machine"],
        "",
        f"{document['rows']:,} rows × {document['dim']} float16, {document['bytes'] / 1e9:.2f} GB; built in {document['build_s']:.1f} s",
        "",
        "| drive: read, write | load of the built version | of the drive | load of the snapshot | phases of the built one |",
        "|---|---|---|---|---|",
    ]
    for of in document["results"]:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in of["phases_s"].items())
        lines.append(
            f"| {of['drive_read_s']:.2f} s, {of['drive_write_s']:.2f} s | {of['built_load_s']:.2f} s | {of['of_the_drive']:.2f} "
            f"| {of['snapshot_load_s']:.2f} s | {phases} |"
        )
    return "\n".join(lines)


def main() -> int:
    args = parser_of(__file__, __doc__, "tiny", rows=16_000_000, dim=64, rounds=3).parse_args()
    if args.tiny:
        args.rows, args.rounds = 20_000, 1
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    try:
        document = measure(root, args.rows, args.dim, args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(show(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
