"""The second look-up of cold keys: from the cache on the local SSD, from a Redis Cluster on this machine, and by bare reads.

    python -m benchmarks.ssd_cache [--rows 1_000_000] [--row-bytes 128] [--batch 4096] [--rounds 15] [--json FILE]

Three masters on loopback hold the rows; a node's row store has read all of them once, so that they are on its SSD. Each round reads a
batch of random keys once with each contender, and a table gives medians over the rounds. "warm" has the cache's file in the system's
cache; "cold" drops it from there before each batch, so that the drive is read. The limit is what reads the same slots of the same file and
looks at nothing, by as many threads with as many reads on their way; and `numpy.take` of the rows in memory.
"cpu us a key" is processor time of this process, "server cpu us a key" of the servers: on a machine that has other work, compare those.
The cluster is on the same machine: on one of its own it costs the network besides.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numba import njit

from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.remote_lookup import cpu_ns, load
from benchmarks.report import headline, markdown, write
from tests.redis_cluster import SERVER, redis_cluster
from tierstore.engine.placements.following.rows import RemoteRows
from tierstore.kernels.sysio import WILL_NEED, advise, read_at
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.machines import Options
from tierstore.tiers.remote.cluster import connect
from tierstore.tiers.remote.tier import RemoteTable
from tierstore.tiers.ssd.cache import SsdCache
from tierstore.types import Keys, Rows, Tier

THREADS, WINDOW, CHUNK = 2, 32, 512  # of the cache's reads, and of bare ones
NAMES = ("us_a_batch", "cpu_us_a_key", "server_cpu_us_a_key")


@njit(nogil=True)  # type: ignore[untyped-decorator]
def bare_reads(fd, offsets, size, buffer, window):  # type: ignore[no-untyped-def]
    for i in range(min(window, len(offsets))):
        advise(fd, offsets[i], size, WILL_NEED)
    for i in range(len(offsets)):
        if window and i + window < len(offsets):
            advise(fd, offsets[i + window], size, WILL_NEED)
        read_at(fd, buffer.ctypes.data, size, offsets[i], 0)


class Scene:
    """All rows in the cluster and, once `fill` has read them, in the cache as well."""

    def __init__(self, table: RemoteTable, keys: Keys, rows: Rows, directory: Path) -> None:
        self.keys, self.rows, self.readers = keys, rows, ReaderPool(THREADS)
        size = rows.shape[1] + 24
        self.cache = SsdCache(directory, max(1 << 20, int(len(keys) * size * 1.2)), self.readers)
        self.alone = RemoteRows("rows", {1: table}, 0, "refuse")
        self.cached = RemoteRows("rows", {1: table}, 0, "refuse", cache=self.cache)
        self.cached.keep(1, len(keys), rows.shape[1])
        self.slots = self.cached._cached[1]

    def fill(self) -> None:
        for start in range(0, len(self.keys), 16384):
            self.read(self.cached, self.keys[start : start + 16384])
            self.cache.drain()
        os.fsync(self.cache.file._fd)  # what is not written yet cannot be dropped from the system's cache

    def read(self, base: RemoteRows, keys: Keys) -> tuple[Rows, np.ndarray]:
        rows, state = np.empty((len(keys), self.rows.shape[1]), np.uint8), np.zeros(len(keys), np.uint8)
        base.get_at(1, keys, rows, state, 0)
        return rows, state

    def drop(self) -> None:
        os.posix_fadvise(self.cache.file._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def warm(self) -> None:
        file = self.cache.file
        for start in range(0, file.bytes_in_use, 1 << 20):
            os.pread(file._fd, 1 << 20, start)

    def places(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random places of rows, or of slots that hold some."""
        return rng.integers(0, int(len(self.keys) * 0.95), count)

    def offsets(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """The offsets in the file of as many slots."""
        file, slots = self.cache.file, self.places(count, rng)
        return (
            slots // self.slots.per_segment * file.segment_bytes
            + slots % self.slots.per_segment * self.slots.slot_bytes
        )

    def bare(self, offsets: np.ndarray, window: int) -> None:
        size, fd = self.slots.slot_bytes, self.cache.file._fd
        self.readers.run(
            len(offsets), lambda a, b: bare_reads(fd, offsets[a:b], size, np.empty(size, np.uint8), window), CHUNK
        )

    def close(self) -> None:
        self.cached.close()
        self.cache.close()
        self.readers.close()


def compare(scene: Scene, pids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    rng, keys = np.random.default_rng(1), scene.keys
    scene.fill()
    batch = np.sort(rng.choice(keys, args.batch, replace=False))
    for base, tier in ((scene.alone, Tier.REMOTE), (scene.cached, Tier.DISK)):
        rows, state = scene.read(base, batch)
        assert np.array_equal(rows, scene.rows[np.searchsorted(keys, batch)])
        share = float(np.mean(state == tier))
        assert share > 0.95, (tier, share)
    scene.bare(scene.offsets(args.batch, rng), 0)  # compiled

    def nothing() -> None: ...

    runs: dict[str, tuple[Callable[[], None], Callable[[Keys], Any]]] = {
        "cluster": (nothing, lambda batch: scene.read(scene.alone, batch)),
        "SSD, warm": (scene.warm, lambda batch: scene.read(scene.cached, batch)),
        "bare reads, warm": (scene.warm, lambda batch: scene.bare(scene.offsets(len(batch), rng), 0)),
        "numpy.take of rows in memory": (nothing, lambda batch: scene.rows.take(scene.places(len(batch), rng), axis=0)),
        "SSD, cold": (scene.drop, lambda batch: scene.read(scene.cached, batch)),
        "bare reads, cold": (scene.drop, lambda batch: scene.bare(scene.offsets(len(batch), rng), WINDOW)),
    }
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
    for number in range(args.rounds + 1):
        batch = np.sort(rng.choice(keys, args.batch, replace=False))
        for name, (prepare, run) in runs.items():
            prepare()
            wall, cpu, servers = time.perf_counter(), time.process_time(), cpu_ns(pids)
            run(batch)
            wall, cpu, servers = time.perf_counter() - wall, time.process_time() - cpu, cpu_ns(pids) - servers
            if number:
                samples[name].append((wall * 1e6, cpu * 1e6 / args.batch, servers / 1e3 / args.batch))
    medians = {name: [median(column) for column in zip(*of, strict=True)] for name, of in samples.items()}
    return {
        "benchmark": "ssd_cache", "machine": describe(), "rows": len(keys), "row_bytes": args.row_bytes, "batch": args.batch,
        "held": scene.slots.stats()["rows"] / len(keys), "index_bytes_a_row": scene.slots.index_bytes / len(keys),
        "results": [{"read from": name, **dict(zip(NAMES, values, strict=True))} for name, values in medians.items()],
        "headlines": headlines(medians),
    }  # fmt: skip


def headlines(medians: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        headline("servers' processor time of a second look-up", "of the first", medians["SSD, warm"][2] / medians["cluster"][2], at_most=0.1),
        headline("processor time of a key, warm", "bare reads", medians["SSD, warm"][1] / medians["bare reads, warm"][1], at_most=1.5),
        headline("a batch from the drive", "bare reads", medians["SSD, cold"][0] / medians["bare reads, cold"][0], at_most=1.25),
    ]  # fmt: skip


def main() -> int:
    args = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=1_000_000,
        row_bytes=128,
        batch=4096,
        rounds=15,
        data=(Path, "a directory on the drive to measure; default: the temporary one"),
    ).parse_args()
    if args.tiny:
        args.rows, args.batch, args.rounds = 6000, 512, 1
    if SERVER is None:
        result: dict[str, Any] = {
            "benchmark": "ssd_cache",
            "machine": describe(),
            "skipped": ["there is no redis-server"],
        }
    else:
        rng = np.random.default_rng(0)
        keys = np.unique(rng.integers(-(2**63), 2**63 - 1, args.rows))
        rows = rng.integers(0, 256, (len(keys), args.row_bytes), np.uint8)
        with redis_cluster() as servers, tempfile.TemporaryDirectory(dir=args.data) as folder:
            cluster = connect(servers.url, Options(timeout_s=30, other_after_s=0))
            scene = Scene(load(cluster, keys, rows, 2, 1), keys, rows, Path(folder))
            try:
                result = compare(scene, [server.process.pid for server in servers.running()], args)
            finally:
                scene.close()
                cluster.close()
    print(markdown(result))
    write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
