"""One table sorted by `tierstore build`, by Spark and by Ray, with one worker and with two: rows a second, and processor time.

    python -m benchmarks.engine_build [--rows 1_000_000] [--dim 32] [--partitions 8] [--rounds 1] [--limit-s 300] [--tiny] [--json FILE]

All read the same Parquet files and leave the same built version in a directory of this machine. Processor time is that of all processes
of a run, the engine's own and its start among them; seconds begin when the engine is up. Spark and Ray are those of `make engines`: without
them, or without Java, the table is shorter. A run that takes longer than `--limit-s` is ended with all of its processes, and fails the benchmark.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.ten_million import keys_of

ENGINES = Path(__file__).parents[1] / ".clients/engines"
FILES = 8
MARK = "BENCH_RUN_MARK"
SECONDS = "seconds"  # the file in which a run leaves how long it took
NAMES = {"key": "item_id", "vector": "embedding"}
TICKS_A_S = os.sysconf("SC_CLK_TCK")


def write_parquet(where: Path, rows: int, dim: int) -> None:
    """The table as an engine would have left it, and a manifest over it for one machine."""
    where.mkdir()
    rng, shards = np.random.default_rng(1), []
    for number, part in enumerate(np.array_split(np.arange(rows), FILES)):
        vectors = rng.standard_normal((len(part), dim), dtype=np.float32)
        columns = {"item_id": keys_of(part), "embedding": pa.FixedSizeListArray.from_arrays(vectors.ravel(), dim)}
        pq.write_table(pa.table(columns), where / f"part-{number}.parquet", row_group_size=1 << 16)
        shards.append({"path": f"part-{number}.parquet", "rows": len(part)})
    table = {"name": "item", "dim": dim, "dtype": "float16", "rows": rows, "shards": shards, "columns": NAMES}
    document = {"format": 1, "model": "bench", "version": 1, "tables": [table]}
    (where / "snapshot.json").write_text(json.dumps(document), encoding="utf-8")


def begun(root: Path, out: Path, dim: int, partitions: int) -> tierstore.PartitionedBuild:
    template = root / f"template-{uuid.uuid4().hex}"
    with tierstore.SnapshotWriter(template, model="bench", version=1) as writer:
        writer.table("item", dim=dim, dtype="float16")
    return tierstore.begin_build(template, out, partitions=partitions)


def alone(args: Any, out: Path) -> float:
    began = time.perf_counter()
    tierstore.build_snapshot(args.root / "table", out, partitions=args.partitions, load_workers=args.workers)
    return time.perf_counter() - began


def on_spark(args: Any, out: Path) -> float:
    from pyspark import TaskContext
    from pyspark.sql import SparkSession

    build = begun(args.root, out, args.dim, args.partitions)

    def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.append_column("partition", pa.array(build.partition_of("item", batch["item_id"]), pa.int32()))

    def built(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield pa.record_batch({"rows": pa.array([build.write("item", context.partitionId(), batches, **NAMES)])})

    options = {"spark.ui.enabled": "false", "spark.driver.memory": "2g"}
    builder = SparkSession.builder.master(f"local[{args.workers}]")
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    began = time.perf_counter()
    parts = spark.read.parquet(str(args.root / "table/*.parquet")).mapInArrow(
        numbered, "item_id long, embedding array<float>, partition int"
    )
    parts.repartitionById(args.partitions, "partition").mapInArrow(built, "rows long").collect()
    build.commit({"item": args.rows})
    seconds = time.perf_counter() - began
    spark.stop()
    return seconds


def on_ray(args: Any, out: Path) -> float:
    import ray

    build = begun(args.root, out, args.dim, args.partitions)

    def numbered(batch: pa.Table) -> pa.Table:
        return batch.append_column("partition", pa.array(build.partition_of("item", batch["item_id"])))

    def built(group: pa.Table) -> pa.Table:
        return pa.table({"rows": [build.write("item", group["partition"][0].as_py(), group, **NAMES)]})

    ray.init(num_cpus=args.workers, include_dashboard=False, object_store_memory=2 << 30)
    began = time.perf_counter()
    files = sorted(str(path) for path in (args.root / "table").glob("*.parquet"))
    parts = ray.data.read_parquet(files).map_batches(numbered, batch_format="pyarrow")
    groups = parts.groupby("partition", num_partitions=args.partitions)
    groups.map_groups(built, batch_format="pyarrow").materialize()
    build.commit({"item": args.rows})
    seconds = time.perf_counter() - began
    ray.shutdown()
    return seconds


CONTENDERS = {"tierstore build": alone, "Spark": on_spark, "Ray": on_ray}


class RunProcesses:
    """All processes of a run, by a mark in their environment, and their processor time: sampled twice a second, so what one does after its last sample is missing."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex
        self.environment = {MARK: mark}
        self._mark, self._ended = f"{MARK}={mark}".encode(), threading.Event()
        self._ticks: dict[int, int] = {}
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            for pid in self._running():
                with suppress(OSError):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._ticks[pid] = int(fields[11]) + int(fields[12])

    def _running(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark in (path / "environ").read_bytes():
                    yield int(path.name)

    def stop(self) -> float:
        """End those that still run. Returns the processor seconds of all."""
        self._ended.set()
        self._thread.join()
        while left := list(self._running()):
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        return sum(self._ticks.values()) / TICKS_A_S


def missing(contender: str) -> str | None:
    """Why a contender cannot run; None if it can."""
    if contender != "tierstore build" and not ENGINES.is_dir():
        return "no .clients/engines: make engines"
    return "no java on the PATH" if contender == "Spark" and shutil.which("java") is None else None


def run(contender: str, workers: int, args: Any) -> dict[str, float]:
    """RuntimeError with the end of what it said, where it failed or took longer than `limit_s`."""
    out, log, processes = args.root / "out", args.root / "log", RunProcesses()
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(ENGINES)])
    settings = {"PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable, "RAY_raylet_start_wait_time_s": "240"}
    numbers = [f"--{name}={getattr(args, name)}" for name in ("rows", "dim", "partitions", "root")]
    command = [sys.executable, "-m", "benchmarks.engine_build", *numbers]
    try:
        with log.open("wb") as said:  # no pipe, which processes that are left would hold open
            done = subprocess.run(
                [*command, f"--workers={workers}", f"--contender={contender}"],
                env=os.environ | settings | processes.environment,
                stdout=said, stderr=said, check=False, timeout=args.limit_s,
            )  # fmt: skip
        problem = f"ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        problem = f"was not done after {args.limit_s:g} s"
    finally:
        cpu_s = processes.stop()
    if problem is not None:
        raise RuntimeError(f"{contender} with {workers}: {problem}: {log.read_text(errors='replace')[-3000:]}")
    assert (out / "built.json").is_file()
    shutil.rmtree(out)
    return {"seconds": float((args.root / SECONDS).read_text()), "cpu_s": cpu_s}


def measure(args: Any) -> dict[str, Any]:
    write_parquet(args.root / "table", args.rows, args.dim)
    results = []
    for contender in CONTENDERS:
        why = missing(contender)
        for workers in (2,) if args.tiny else (1, 2):
            runs = [] if why else [run(contender, workers, args) for _ in range(args.rounds)]
            of = {name: statistics.median(one[name] for one in runs) for name in ("seconds", "cpu_s")} if runs else {}
            results.append({"contender": contender, "workers": workers, "missing": why, **of})
    return {
        "benchmark": "engine_build",
        "machine": describe(),
        "rows": args.rows,
        "dim": args.dim,
        "partitions": args.partitions,
        "headlines": [],
        "results": results,
    }


def show(document: dict[str, Any]) -> str:
    rows = document["rows"]
    lines = [
        document["machine"],
        "",
        f"{rows:,} rows × {document['dim']} float16, {document['partitions']} partitions",
        "",
        "| by | workers | seconds | rows a second | processor seconds |",
        "|---|---|---|---|---|",
    ]
    for of in document["results"]:
        if of["missing"]:
            lines.append(f"| {of['contender']} | {of['workers']} | {of['missing']} | | |")
        else:
            shown = f"{of['seconds']:.1f} | {rows / of['seconds']:,.0f} | {of['cpu_s']:.1f}"
            lines.append(f"| {of['contender']} | {of['workers']} | {shown} |")
    return "\n".join(lines)


def main() -> int:
    options = {"rows": 1_000_000, "dim": 32, "partitions": 8, "rounds": 1, "limit_s": (300.0, "of a run")}
    hidden = {"contender": (str, HIDDEN), "workers": (int, HIDDEN), "root": (Path, HIDDEN)}
    args = parser_of(__file__, __doc__, "tiny", **options, **hidden).parse_args()
    if args.contender:
        (args.root / SECONDS).write_text(str(CONTENDERS[args.contender](args, args.root / "out")))
        return 0
    if args.tiny:
        args.rows, args.partitions, args.limit_s = 20_000, 2, 120.0
    args.root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    try:
        document = measure(args)
    finally:
        shutil.rmtree(args.root, ignore_errors=True)
    print(show(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
