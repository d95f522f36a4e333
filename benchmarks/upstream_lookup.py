"""Cold keys through a node in front of others, against the same keys from one node directly.

    python -m benchmarks.upstream_lookup [--rows 200_000] [--keys 4096] [--rounds 9] [--tiny] [--profile] [--json FILE]

Four nodes on loopback have a quarter of 64 partitions each, a fifth has them all, and all have their rows in memory; two fronts
of the four have memory for hardly any row: one is asked over HTTP, as a node is, the other in this process. The client asks for keys at random, one request after the
other, the ways in turn within a round; all answers are compared with the rows. Wall time is a median over rounds, and
processor time that of all processes together, and of the front and of the nodes behind it apart: on a machine with few cores the nodes of a front wait for each other. `--profile`
says where the front in this process spends its own.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.report import headline, markdown, write
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, keys_of, vectors_of

NODES, PARTITIONS = 4, 64
Way = Callable[[np.ndarray], np.ndarray]


def serve(where: Path, rows: int, number: int | None, upstream: str | None) -> None:
    """A node of all partitions or of one quarter, or a front, until it is told to stop; prints its port."""
    from tierstore.config import load_settings
    from tierstore.engine.store import Store
    from tierstore.service.server import ServerThread

    each = PARTITIONS // NODES
    own = None if number is None else f"{number * each}-{(number + 1) * each - 1}/{PARTITIONS}"
    budget = "256KiB" if upstream else f"{max(4, rows * (ROW_BYTES + 16) * 2 >> 20)}MiB"
    settings = load_settings(
        None, data=where, port=0, grpc_port="off", host_budget=budget, upstream=upstream, partition=own
    )
    with Store(settings) as store:
        if upstream is None:
            keys = keys_of(np.arange(rows))
            with tierstore.SnapshotWriter(where / "snapshot", model=MODEL, version=1) as writer:
                writer.table("item", dim=DIM).write(keys, vectors_of(keys))
                writer.feature(FEATURE, table="item")
                writer.warmup("item", keys)
            store.load_snapshot(where / "snapshot")
        with ServerThread(store) as server:
            print(server.url, flush=True)
            sys.stdin.read()


@contextlib.contextmanager
def started(where: Path, rows: int, *arguments: str) -> Iterator[tuple[str, int]]:
    """(url, process) of a node that is started."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.upstream_lookup",
        "--serve",
        str(where),
        "--rows",
        str(rows),
        *arguments,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError("a node did not start; see its log above")
            yield url, process.pid
        finally:
            process.stdin.close()
            process.wait(60)


def cpu_s(pids: list[int]) -> float:
    """Processor time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(ways: dict[str, Way], pids: dict[str, list[int]], rows: int, n: int, rounds: int) -> list[dict[str, Any]]:
    """`pids`: whose processor time is counted, by what they are."""
    rng = np.random.default_rng(n)
    batches = [keys_of(rng.integers(0, rows, n)) for _ in range(max(16, min(rows // 2, 65536) // n))]
    calls = max(2, min(200, 400_000 // n))
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, dict[str, list[float]]] = {name: {who: [] for who in pids} for name in ways}
    for way in ways.values():
        for keys in batches:
            np.testing.assert_array_equal(way(keys), vectors_of(keys))
    for _ in range(rounds):
        for name, way in ways.items():
            used, began = {who: cpu_s(of) for who, of in pids.items()}, time.perf_counter()
            for call in range(calls):
                way(batches[call % len(batches)])
            wall[name].append((time.perf_counter() - began) / calls * 1e6)
            for who, of in pids.items():
                cpu[name][who].append((cpu_s(of) - used[who]) / calls * 1e6)
    direct = wall["one node"]
    return [
        {
            "keys": n,
            "way": name,
            "wall_us": statistics.median(wall[name]),
            **{who: statistics.median(cpu[name][who]) for who in pids},
            "wall_over_one_node": statistics.median(a / b for a, b in zip(wall[name], direct, strict=True)),
        }
        for name in ways
    ]


def profile(way: Way, rows: int, n: int) -> None:
    """Print what takes the processor time of this thread."""
    keys = keys_of(np.random.default_rng(n).integers(0, rows, (16, n)))
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for call in range(320):
        way(keys[call % 16])
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows = options.rows
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upstream-")))
        nodes = [
            stack.enter_context(started(root / f"node-{number}", rows, "--number", str(number)))
            for number in range(NODES)
        ]
        whole_url, whole_pid = stack.enter_context(started(root / "whole", rows))
        urls = ",".join(url for url, _ in nodes)
        front_url, front_pid = stack.enter_context(started(root / "front", rows, "--upstream", urls))
        store = stack.enter_context(tierstore.open(root / "here", upstream=urls, host_budget="256KiB"))
        direct = stack.enter_context(tierstore.Client(whole_url))
        through = stack.enter_context(tierstore.Client(front_url))
        ways: dict[str, Way] = {
            "one node": lambda keys: direct.lookup(MODEL, FEATURE, keys),
            "front": lambda keys: through.lookup(MODEL, FEATURE, keys),
            "front, in process": lambda keys: store.model(MODEL).lookup(FEATURE, keys),
        }
        owners = [pid for _, pid in nodes]
        pids = {
            "cpu_us": [os.getpid(), front_pid, whole_pid, *owners],
            "front_cpu_us": [front_pid],
            "owners_cpu_us": owners,
            "one_node_cpu_us": [whole_pid],
        }
        if options.profile:
            profile(ways["front, in process"], rows, options.keys[-1])
        results = [row for n in options.keys for row in measure(ways, pids, rows, n, options.rounds)]
        counts = store.status()["models"][MODEL]["tables"]
    lookups = next(iter(counts.values()))["lookup_keys"]
    return {
        "benchmark": "upstream_lookup",
        "machine": describe(),
        "rows": rows,
        "nodes": NODES,
        "cold_share": lookups["remote"] / sum(lookups.values()),
        "headlines": [
            headline(f"{row['keys']:,} cold keys through a front", "one node", row["wall_over_one_node"], at_most=4)
            for row in results
            if row["way"] == "front" and row["keys"] == 4096
        ],
        "results": results,
    }


def main() -> None:
    options = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=200_000,
        keys=[64, 1024, 4096],
        rounds=9,
        profile=False,
        serve=(Path, HIDDEN),
        number=(int, HIDDEN),
        upstream=(str, HIDDEN),
    ).parse_args()
    if options.serve is not None:
        serve(options.serve, options.rows, options.number, options.upstream)
        return
    if options.tiny:
        options.rows, options.keys, options.rounds = 3000, [256], 1
    document = run(options)
    print(markdown(document))
    write(options.json, document)


if __name__ == "__main__":
    main()
