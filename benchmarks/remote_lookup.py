"""Look-ups of rows in a cluster on this machine: ours, redis-py's cluster client, and what `redis-benchmark` reaches.

    python -m benchmarks.remote_lookup [--rows 200_000] [--row-bytes 64] [--batch 4096] [--rounds 5] [--seconds 1] [--json FILE]

Three masters on loopback, each with a replica that nobody asks, hold the same rows twice: in hashes as the remote tier has them, and as strings, a
key a row, as programs that use redis-py do. All read the same batches of keys, in turn, in each round; a table gives
medians over the rounds.

redis-py is used as its pages say: `mget_nonatomic` of the cluster client, and a pipeline of GETs; and, for comparison, with HMGET
on our tags; valkey-glide and coredis where they are installed (`make bench-tools`). The limit is `redis-benchmark`, one process a tag at the same time, with the commands that our look-up sends:
HMGET of hashes with as many rows of the same size, as many fields a command. "cpu us a key" is processor time of the client, and
"server cpu us a key" of the servers: on a machine that has other work, compare those.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.remote_peers import STRING, Call, names, peers
from benchmarks.report import headline, markdown, write
from tests.redis_cluster import SERVER, redis_cluster
from tierstore.tiers.machines import Options
from tierstore.tiers.remote.cluster import Cluster, connect
from tierstore.tiers.remote.tier import RemoteTable
from tierstore.tiers.remote.write import Writer
from tierstore.types import Keys, Rows

MODEL, TABLE = "bench", "t"
PER_MASTER = (1, 2, 4)


def load(cluster: Cluster, keys: Keys, rows: Rows, per_master: int, version: int) -> RemoteTable:
    tags = cluster.tags(per_master)
    with Writer(cluster, MODEL, version, {TABLE: rows.shape[1]}, tags, timeout_s=120) as writer:
        for start in range(0, len(keys), 100_000):
            writer.write_rows(TABLE, keys[start : start + 100_000], rows[start : start + 100_000])
        writer.finish(seq=0)
    return RemoteTable(cluster, MODEL, version, TABLE, tags, rows.shape[1])


def load_strings(cluster: Cluster, keys: Keys, rows: Rows) -> None:
    for start in range(0, len(keys), 5000):
        part = slice(start, start + 5000)
        cluster.client.mset_nonatomic(
            {STRING + key: row for key, row in zip(names(keys[part]), rows[part].view(f"V{rows.shape[1]}").ravel().tolist(), strict=True)}
        )  # fmt: skip


def ours(table: RemoteTable, row_bytes: int) -> Call:
    rows, state = np.empty((1 << 16, row_bytes), np.uint8), np.zeros(1 << 16, np.uint8)

    def call(keys: Keys) -> Rows:
        table.fetch(keys, rows[: len(keys)], state[: len(keys)])
        return rows[: len(keys)]

    return call


def cpu_ns(pids: list[int]) -> int:
    """Processor time of processes so far."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids)


class Sample(NamedTuple):
    """One run of one client."""

    keys: int
    seconds: float
    cpu_s: float  # of the client

    def values(self, server_ns: int) -> tuple[float, float, float]:
        return self.keys / self.seconds, 1e6 * self.cpu_s / self.keys, server_ns / 1e3 / self.keys


def measure(calls: list[Call], batches: list[Keys], seconds: float) -> Sample:
    """Time as many callers as `calls`, each on a thread with batches of its own."""
    done = [0] * len(calls)
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        mine, i = batches[number :: len(calls)], 0
        while time.perf_counter() < until or not i:
            calls[number](mine[i % len(mine)])
            done[number] += len(mine[i % len(mine)])
            i += 1

    began, cpu = time.perf_counter(), time.process_time()
    running = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return Sample(sum(done), time.perf_counter() - began, time.process_time() - cpu)


def load_digits(cluster: Cluster, table: RemoteTable, rows: Rows) -> int:
    """Each tag's hash once more, with fields of 12 digits, which `redis-benchmark` can draw. Returns how many fields each has."""
    tags = table.layout.tags
    each = len(rows) // len(tags)
    values = rows.view(f"V{rows.shape[1]}").ravel().tolist()
    for tag in tags:
        for start in range(0, each, 5000):
            part = range(start, min(start + 5000, each))
            cluster.client.hset(b"d:{%s}" % tag, items=[x for i in part for x in (b"%012d" % i, values[i])])
    return each


class RedisBenchmark:
    """One `redis-benchmark` a tag, all at once, each over one connection: together they ask for all rows, as a look-up does.

    A command is HMGET of a tag's part of a batch, keys drawn anew each time.
    """

    def __init__(self, program: str, cluster: Cluster, table: RemoteTable, each: int, batch: int) -> None:
        tags = table.layout.tags
        self._fields = batch // len(tags)
        of_tag = {tag: cluster.master_of(slot) for tag, slot in zip(tags, table.layout.slots, strict=True)}
        self._commands = [
            [
                program, "-h", address.host, "-p", str(address.port), "-c", "1", "-r", str(each), "--csv", "HMGET", b"d:{%s}" % tag, *["__rand_int__"] * self._fields,
            ]
            for tag, address in of_tag.items()
        ]  # fmt: skip
        self._requests = 200

    def run(self, seconds: float) -> Sample:
        """Run for about so long, by the speed of the last run."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = [
            subprocess.Popen(
                [*command[:1], "-n", str(self._requests), *command[1:]],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for command in self._commands
        ]
        outputs = [process.communicate()[0].decode().strip().splitlines()[-1] for process in running]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        speed = sum(float(line.split('","')[1]) for line in outputs) * self._fields
        keys = self._requests * self._fields * len(running)
        self._requests = max(100, int(speed * seconds / self._fields / len(running)))
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Sample(keys, keys / speed, cpu_s)


def compare(cluster: Cluster, pids: list[int], args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, args.rows))
    rows = rng.integers(0, 256, (len(keys), args.row_bytes), np.uint8)
    tables = {n: load(cluster, keys, rows, n, version) for version, n in enumerate(PER_MASTER, 1)}
    load_strings(cluster, keys, rows)
    batches = [np.sort(rng.choice(keys, args.batch, replace=False)) for _ in range(16)]
    calls = {f"ours, {n} tags a master": ours(table, args.row_bytes) for n, table in tables.items()}
    calls |= stack.enter_context(peers(cluster, list(tables[1].layout.tags), args.row_bytes))
    for name, call in calls.items():
        assert np.array_equal(call(batches[0]), rows[np.searchsorted(keys, batches[0])]), name

    runs: dict[str, Callable[[], Sample]] = {
        name: lambda call=call: measure([call], batches, args.seconds) for name, call in calls.items()
    }  # fmt: skip
    program = shutil.which("redis-benchmark")
    for n, table in tables.items():
        two = [ours(table, args.row_bytes), ours(table, args.row_bytes)]
        runs[f"ours, {n} tags a master, 2 threads"] = lambda two=two: measure(two, batches, args.seconds)
        if program is not None:
            limit = RedisBenchmark(program, cluster, table, load_digits(cluster, table, rows), args.batch)
            limit.run(args.seconds)
            runs[f"redis-benchmark, {n} tags a master"] = lambda limit=limit: limit.run(args.seconds)
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            before = cpu_ns(pids)
            samples[name].append(run().values(cpu_ns(pids) - before))
    names = ("keys_per_s", "cpu_us_a_key", "server_cpu_us_a_key")
    medians = {name: [median(column) for column in zip(*values, strict=True)] for name, values in samples.items()}
    return {
        "benchmark": "remote_lookup", "machine": describe(), "rows": len(keys), "row_bytes": args.row_bytes, "batch": args.batch,
        "results": [{"client": name, **dict(zip(names, values, strict=True))} for name, values in medians.items()],
        "headlines": headlines(medians),
    }  # fmt: skip


def headlines(medians: dict[str, list[float]]) -> list[dict[str, Any]]:
    documented = max(medians["redis-py mget_nonatomic"][0], medians["redis-py pipeline of GET"][0])
    lines = []
    for n in PER_MASTER:
        one, two = medians[f"ours, {n} tags a master"], medians[f"ours, {n} tags a master, 2 threads"]
        what = f"4,096 cold keys, {n} tags a master"
        lines.append(headline(what, "redis-py's cluster client as its pages say", one[0] / documented, at_least=3))
        if limit := medians.get(f"redis-benchmark, {n} tags a master"):
            against = "redis-benchmark, a process a tag"
            lines.append(headline(f"{what}, 2 threads", against, two[0] / limit[0], at_least=0.6))
            spent = sum(limit[1:]) / sum(two[1:])
            lines.append(headline(f"{what}, a second of all processors", against, spent, at_least=0.6))
    return lines


def main() -> int:
    args = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=200_000,
        row_bytes=64,
        batch=4096,
        rounds=5,
        seconds=(1.0, "of each client in each round"),
    ).parse_args()
    if args.tiny:
        args.rows, args.batch, args.rounds, args.seconds = 6000, 512, 1, 0.1
    if SERVER is None:
        result: dict[str, Any] = {
            "benchmark": "remote_lookup",
            "machine": describe(),
            "skipped": ["there is no redis-server"],
        }
    else:
        with redis_cluster() as servers:
            cluster = connect(servers.url, Options(timeout_s=30, other_after_s=0))
            with ExitStack() as stack:
                stack.callback(cluster.close)
                result = compare(cluster, [server.process.pid for server in servers.running()], args, stack)
    print(markdown(result))
    write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
