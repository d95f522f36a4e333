"""Rows in a cluster, by the engine of its servers: `python -m benchmarks.engines [--tiny] [--server PATH …] [--json FILE]`.

For each server (of Redis, Valkey or Kvrocks; by default that on the PATH) three masters on this machine, without replicas: read by the
tier alone, and by two nodes, each with a third of the disk that a version takes. As the last one the disk tier of a store. All have the
same rows of 64 bytes and answer the same look-ups of random keys, which memory lacks:

    load         rows a second of one writer, and bytes a row: of memory, or of disk (of nodes: the most that one of them had)
    look-ups     of 16, 256 and 4,096 keys: processor time a key of the servers and of this process, p50 and p99
    deltas       of 20,000 rows, one after the other: how long one takes, and p50 and p99 of look-ups of 256 keys beside them
    switch       p50 and p99 of look-ups of 256 keys beside the load of another version and the switch to it
    cold         4,096 keys after the system's cache of files was emptied, of what has rows on disk

Answers are checked. Servers and clients share the processors, so wall times are of a machine that does both.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tierstore
from benchmarks import report
from benchmarks.footprint import load
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tests.redis_cluster import SERVER, RedisCluster, engine, redis_cluster
from tierstore.engine.store import Store
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import connect
from tierstore.tiers.cluster.write import Change, Writer
from tierstore.tiers.connection_pools import Options
from tierstore.types import Tier

DIM = 16  # float32: rows of 64 bytes
ROW_BYTES = 4 * DIM
BATCH, DELTA_ROWS, SIZES = 16384, 20_000, (16, 256, 4096)
DELTA_KEYS = 256  # of a look-up beside changes
MEMORY = "1MiB"  # of a store for rows, so that look-ups go beyond it
Keys = npt.NDArray[np.int64]


def vectors(keys: Keys) -> npt.NDArray[np.float32]:
    """Of each key another row, the same in all versions and deltas."""
    return (keys[:, None] * np.float32(0.5) + np.arange(DIM, dtype=np.float32)).astype(np.float32)


@dataclass
class Contender:
    """What has the rows. `fetch` raises where a row is wrong; `apply` takes a delta of these keys; `processes`: whose time is its servers'."""

    name: str
    load_rows_s: float
    fetch: Callable[[Keys], None]
    apply: Callable[[Keys], None]
    processes: list[int]
    memory_row: float | None
    disk_row: float | None
    files: list[Path]
    switch: Callable[[], None] | None = None


@contextmanager
def on_engine(program: str, rows: int) -> Iterator[Contender]:
    with ExitStack() as stack:
        servers: RedisCluster = stack.enter_context(redis_cluster(replicas=0, program=program))
        cluster = connect(servers.url, Options(timeout_s=120.0))
        stack.callback(cluster.close)
        tags, before = cluster.tags(2), _memory(servers)
        writer = stack.enter_context(Writer(cluster, "engines", 1, {"t": ROW_BYTES}, tags, timeout_s=120.0))
        began = time.perf_counter()
        for start in range(0, rows, BATCH):
            keys = np.arange(start, min(rows, start + BATCH))
            writer.write_rows("t", keys, vectors(keys).view(np.uint8))
        writer.finish(seq=0)
        took, table, seqs = (
            time.perf_counter() - began,
            ClusterTable(cluster, "engines", 1, "t", tags, ROW_BYTES),
            iter(range(1, 1 << 30)),
        )

        def fetch(keys: Keys) -> None:
            got, state = np.empty((len(keys), ROW_BYTES), np.uint8), np.zeros(len(keys), np.uint8)
            table.fetch(keys, got, state)
            if not (state == Tier.REMOTE).all() or not np.array_equal(got.view(np.float32), vectors(keys)):
                raise AssertionError(f"{program} answers wrong rows")

        def apply(keys: Keys) -> None:
            change = Change("t", keys, vectors(keys).view(np.uint8), np.zeros(len(keys), np.bool_))
            writer.apply_delta(1, next(seqs), [change])

        on_disk = engine(program) == "kvrocks"
        yield Contender(
            str(cluster.engine), rows / took, fetch, apply,
            [one.process.pid for one in servers.servers if one.process is not None],
            None if on_disk else (_memory(servers) - before) / rows,
            _bytes(servers.directory) / rows if on_disk else None,
            [servers.directory] if on_disk else [],
        )  # fmt: skip


@contextmanager
def on_disk_tier(rows: int) -> Iterator[Contender]:
    with _snapshots(rows) as (root, snapshots), tierstore.open(root / "data", host_budget=MEMORY) as store:
        took, most = _timed_load([store], snapshots[0], [root / "data"])
        yield _of_stores("tierstore's disk tier", [store], snapshots, [root / "data"], rows / took, most / rows)


@contextmanager
def on_nodes(program: str, rows: int) -> Iterator[Contender]:
    """Two nodes over a cluster, with less disk than a version takes: each has a third of it for a load."""
    with (
        redis_cluster(replicas=0, program=program) as servers,
        _snapshots(rows) as (root, snapshots),
        ExitStack() as stack,
    ):
        homes, third = [root / "a", root / "b"], max(1 << 20, rows * (ROW_BYTES + 8) // 3)
        stores = [
            stack.enter_context(
                tierstore.open(home, remote=servers.url, host_budget=MEMORY, load_disk=third, remote_timeout_s=120.0)
            )
            for home in homes
        ]
        took, most = _timed_load(stores, snapshots[0], homes)
        name = f"two nodes over {_engine_of(servers)}"
        of = _of_stores(name, stores, snapshots, [], rows / took, most / rows)
        of.processes += [one.process.pid for one in servers.servers if one.process is not None]
        yield of


def _engine_of(servers: RedisCluster) -> str:
    cluster = connect(servers.url)
    try:
        return str(cluster.engine)
    finally:
        cluster.close()


@contextmanager
def _snapshots(rows: int) -> Iterator[tuple[Path, list[Path]]]:
    """A directory, and in it two versions of the same rows."""
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")) as directory:
        root = Path(directory)
        for version in (1, 2):
            with tierstore.SnapshotWriter(root / f"v{version}", model="engines", version=version) as snapshot:
                table = snapshot.table("t", dim=DIM)
                for start in range(0, rows, 1 << 18):
                    keys = np.arange(start, min(rows, start + (1 << 18)))
                    table.write(keys, vectors(keys))
                snapshot.feature("t", table="t")
        yield root, [root / "v1", root / "v2"]


def _timed_load(stores: list[Store], snapshot: Path, homes: list[Path]) -> tuple[float, int]:
    """The seconds of a load until all serve it, and the most bytes that one of their directories had meanwhile."""
    most, began = 0, time.perf_counter()

    def progress(_: object) -> None:
        nonlocal most
        most = max(most, *map(_bytes, homes))

    stores[0].load_snapshot(snapshot, progress=progress)
    for store in stores[1:]:
        while "engines" not in store.models() or store.model("engines").active_version is None:
            time.sleep(0.01)
    took = time.perf_counter() - began
    progress(None)
    return took, most


def _of_stores(
    name: str, stores: list[Store], snapshots: list[Path], files: list[Path], rows_s: float, disk_row: float
) -> Contender:
    """What stores answer, in turns; the first one takes what changes."""
    seqs, turns, models = (
        iter(range(1, 1 << 30)),
        itertools.cycle(range(len(stores))),
        [one.model("engines") for one in stores],
    )

    def fetch(keys: Keys) -> None:
        if not np.array_equal(models[next(turns)].lookup("t", keys), vectors(keys)):
            raise AssertionError(f"{name}: wrong rows")

    def apply(keys: Keys) -> None:
        with tierstore.DeltaWriter(sink := io.BytesIO(), model="engines", seq=next(seqs)) as delta:
            delta.upsert("t", keys, vectors(keys))
        stores[0].apply_delta(sink.getvalue())

    def switch() -> None:
        stores[0].load_snapshot(snapshots[1])

    return Contender(name, rows_s, fetch, apply, [], None, disk_row, files, switch)


def measure(of: Contender, rows: int, seconds: float, deltas: int) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(7), []
    one: dict[str, Any] = {"engine": of.name}
    found.append(
        {
            "part": "load",
            **one,
            "rows_s": of.load_rows_s,
            "memory_bytes_a_row": of.memory_row,
            "disk_bytes_a_row": of.disk_row,
        }
    )
    for size in SIZES:
        _look(of, rng, rows, size, min(1.0, seconds))
        servers, own, took = _cpu(of.processes), time.process_time(), _look(of, rng, rows, size, seconds)
        keys = len(took) * size
        found.append({
            "part": "look-ups", **one, "keys": size, "servers_us_a_key": (_cpu(of.processes) - servers) / keys * 1e6,
            "client_us_a_key": (time.process_time() - own) / keys * 1e6, **_percentiles(took),
        })  # fmt: skip
    spent = list[float]()

    def send() -> None:
        for _ in range(deltas):
            keys, began = rng.choice(rows, min(rows, DELTA_ROWS), replace=False), time.perf_counter()
            of.apply(keys)
            spent.append(time.perf_counter() - began)

    took = _beside(of, rows, send)
    found.append(
        {"part": "deltas", **one, "a_delta_ms": float(np.median(spent)) * 1e3, **_percentiles(took or [np.nan])}
    )
    if of.switch is not None:
        found.append({"part": "switch", **one, **_percentiles(_beside(of, rows, of.switch))})
    if of.files:
        _empty_cache(of.files)
        (cold,) = _look(of, rng, rows, SIZES[-1], 0.0)
        found.append({"part": "cold", **one, "keys": SIZES[-1], "ms": cold * 1e3})
    return found


def _beside(of: Contender, rows: int, change: Callable[[], None]) -> list[float]:
    """The seconds of each look-up beside a change."""
    stop, took = threading.Event(), list[float]()

    def look() -> None:
        while not stop.is_set():
            took.extend(_look(of, np.random.default_rng(len(took)), rows, DELTA_KEYS, 0.0))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        change()
    finally:
        stop.set()
        looking.join()
    return took


def _look(of: Contender, rng: np.random.Generator, rows: int, size: int, seconds: float) -> list[float]:
    """The seconds of each of the look-ups that fit into that time, one at least."""
    took, until = [], time.perf_counter() + seconds
    while True:
        keys, began = np.unique(rng.integers(0, rows, size)), time.perf_counter()
        of.fetch(keys)
        took.append(time.perf_counter() - began)
        if time.perf_counter() >= until:
            return took


def _percentiles(took: list[float]) -> dict[str, float]:
    return {f"p{at}_us": float(np.percentile(took, at)) * 1e6 for at in (50, 99)}


def _cpu(processes: list[int]) -> float:
    """The processor seconds of processes so far."""
    words = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(of[11]) + int(of[12]) for of in words) / os.sysconf("SC_CLK_TCK")


def _memory(servers: RedisCluster) -> int:
    return sum(int(server.client.info("memory").get("used_memory", 0)) for server in servers.servers)


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _empty_cache(files: list[Path]) -> None:
    """Have the system forget what it keeps of these files."""
    for path in (path for root in files for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    args = parser_of(
        __file__, __doc__, "tiny", rows=1_000_000, seconds=5.0, deltas=20, server=[SERVER or ""]
    ).parse_args()
    rows, seconds, deltas = (20_000, 0.1, 2) if args.tiny else (args.rows, args.seconds, args.deltas)
    document: dict[str, Any] = {"benchmark": "engines", "machine": describe(), "load_before": load(), "skipped": []}
    document["results"] = []
    programs = [program for program in args.server if program]
    if not programs:
        document["skipped"].append("no redis-server is on the PATH: give --server PATH")
    on_engines = [on(program, rows) for program in programs for on in (on_engine, on_nodes)]
    for contender in [*on_engines, on_disk_tier(rows)]:
        with contender as of:
            document["results"] += measure(of, rows, seconds, deltas)
    document["results"].sort(key=lambda row: ("load", "look-ups", "deltas", "switch", "cold").index(row["part"]))
    document |= {"rows": rows, "seconds_each": seconds, "deltas": deltas, "load_after": load()}
    print(report.markdown(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
