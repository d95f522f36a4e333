"""Look-ups from disk: sealed base files, a base of RocksDB, one row a key in RocksDB through rocksdict, and raw reads.

    python -m benchmarks.disk_lookup [--rows 3_000_000] [--row-bytes 64] [--batch 4096] [--rounds 5] [--changed] [--json FILE]

All hold the same rows and are asked for the same batches of sorted, distinct keys, in turn, in one run; a table gives
medians over the rounds, and ratios. "warm" has every file in the system's cache. "cold" drops a store's files from it
before each batch and counts the blocks' worth of keys; the raw reads beside it are the limit of the drive: 4 KiB at
random places of the sealed file, by as many threads, and with as many reads on their way, as the store has (4 × 32 for a batch of 4,096).

The peer is tuned: raw mode, 4 KiB blocks, a hash index within blocks, no compression, index and filters in memory,
sorted batches of 512 keys; in one of its two columns it reads mapped files, which is faster warm. "keys/s" are those of all
threads together, each with batches of its own.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import rocksdict
from numba import njit

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.report import headline
from tierstore.kernels.sysio import WILL_NEED, advise, read_at
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import SealedTier, base_record
from tierstore.tiers.disk.sealed_file import write_sealed
from tierstore.tiers.disk.sst import sst_keys, write_sst
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys, Rows

SCATTER = -7046029254386353131  # odd, so that k → k * SCATTER (mod 2^64) gives distinct keys all over the key space
BLOCK_CACHE = 32 << 20
FILE_ROWS = 1_000_000
PEER_BATCH = 512
DEEP = "cold raw 4 threads × 32 ahead"  # what a batch of 4,096 keys has on its way
PAGE = 4096

CHANGED = (0.01, 0.1, 0.3)

Call = Callable[[Keys, Rows, np.ndarray], None]


def all_keys(rows: int) -> Keys:
    with np.errstate(over="ignore"):
        return np.sort(np.arange(rows) * np.int64(SCATTER))


class Ours:
    """A disk tier of ours, with a base of either kind. `threads` help a caller beside its own."""

    def __init__(self, kind: type[DiskTier], path: Path, keys: Keys, rows: Rows, threads: int) -> None:
        self.path = path
        self.pool = ReaderPool(threads)
        scratch = path.with_suffix(".build")
        scratch.mkdir()
        built: list[Any] = []
        began = time.perf_counter()
        for number, start in enumerate(range(0, len(keys), FILE_ROWS)):
            part, file = slice(start, start + FILE_ROWS), scratch / f"base-{number}"
            if kind is SealedTier:
                built.append(write_sealed(file, 1, keys[part], rows[part]))
            else:
                built.append(write_sst(file, tables=[(1, keys[part], rows[part], None)], delta=False))
        self.build_s = time.perf_counter() - began
        records = {"watermark": b"0", **(base_record(built) if kind is SealedTier else {})}
        tier = kind.create(path, block_cache_bytes=BLOCK_CACHE, reader=self.pool)
        tier.ingest([*built, write_sst(scratch / "records", records=records, delta=True)])
        tier.close()
        self.kind = kind
        self.open()

    def open(self) -> float:
        began = time.perf_counter()
        self.tier = self.kind.open(self.path, block_cache_bytes=BLOCK_CACHE, reader=self.pool)
        return time.perf_counter() - began

    def get(self, keys: Keys, rows: Rows, state: np.ndarray) -> None:
        self.tier.get(1, keys, rows, state)

    def change(self, keys: Keys, rows: Rows, number: int) -> None:
        """As a fold does, with what its thread does afterwards."""
        self.tier.change(self.path.with_suffix(f".{number}"), {}, [(1, keys, rows, None)])
        if self.tier.needs_tidying:
            self.tier.tidy(self.path.with_suffix(".tidy"), {}, {1: rows.shape[1]}, lambda: False)

    def close(self) -> None:
        self.tier.close()
        self.pool.close()


class Peer:
    """rocksdict, one row a key, as a careful user would set it up."""

    def __init__(self, path: Path, keys: Keys, rows: Rows, *, mapped: bool) -> None:
        self.path = path
        table = rocksdict.BlockBasedOptions()
        table.set_block_size(PAGE)
        table.set_format_version(5)
        table.set_block_cache(rocksdict.Cache(BLOCK_CACHE))
        table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_block_based_table_factory(table)
        options.set_allow_mmap_reads(mapped)
        self._options = options
        self.reopen()
        files = []
        for start in range(0, len(keys), FILE_ROWS):
            file = path.with_suffix(f".{start}")
            writer = rocksdict.SstFileWriter(options)
            writer.open(str(file))
            values = rows[start : start + FILE_ROWS].view(f"V{rows.shape[1]}").ravel().tolist()
            for key, value in zip(sst_keys(1, keys[start : start + FILE_ROWS]), values, strict=True):
                writer[key] = value
            writer.finish()
            files.append(str(file))
        move = rocksdict.IngestExternalFileOptions()
        move.set_move_files(True)
        self.db.ingest_external_file(files, move)

    def reopen(self) -> None:
        self.db = rocksdict.Rdict(str(self.path), self._options, column_families={"default": self._options})

    def get(self, keys: Keys, rows: Rows, state: np.ndarray) -> None:
        for start in range(0, len(keys), PEER_BATCH):
            stored = sst_keys(1, keys[start : start + PEER_BATCH])
            rows[start : start + PEER_BATCH] = np.frombuffer(b"".join(self.db.get(stored)), np.uint8).reshape(
                len(stored), -1
            )

    def close(self) -> None:
        self.db.close()


@njit(nogil=True)
def _raw(fd, offsets, buffer, window):  # type: ignore[no-untyped-def]
    at = buffer.ctypes.data
    for i in range(min(window, len(offsets))):
        advise(fd, offsets[i], 4096, WILL_NEED)
    for i in range(len(offsets)):
        if window and i + window < len(offsets):
            advise(fd, offsets[i + window], 4096, WILL_NEED)
        if read_at(fd, at, 4096, offsets[i], 0) <= 0:
            return -1
    return 0


def raw_reads(fd: int, size: int, count: int, threads: int, window: int, rng: np.random.Generator) -> float:
    """Random 4 KiB reads a second of a file that is not in the cache."""
    offsets = rng.choice(size // PAGE, count, replace=False).astype(np.int64) * PAGE
    _raw(fd, offsets[:1], np.empty(PAGE, np.uint8), window)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    parts = np.array_split(offsets, threads)
    return count / in_threads([lambda part=part: _raw(fd, part, np.empty(PAGE, np.uint8), window) for part in parts])


def in_threads(work: list[Callable[[], Any]]) -> float:
    """Seconds until all are done."""
    threads = [threading.Thread(target=one) for one in work]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def drop_cache(path: Path) -> None:
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm_cache(path: Path) -> None:
    drop_cache(path)  # pages that came one by one stay single pages, which costs a read a third more
    for file in files_of(path):
        with open(file, "rb", buffering=0) as opened:
            while opened.read(1 << 20):
                pass


def cached_share(path: Path) -> float:
    """Whether dropping the cache has worked: the part of the base's bytes that are still in memory (by mincore)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pages = held = 0
    for file in files_of(path):
        if not (size := file.stat().st_size):
            continue
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            count = -(-size // PAGE)
            vector = (ctypes.c_ubyte * count)()
            view = np.frombuffer(mapped, np.uint8)
            address = view.ctypes.data
            del view
            libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector)
            pages, held = pages + count, held + sum(byte & 1 for byte in vector)
    return held / max(1, pages)


def keys_per_s(call: Call, batches: list[Keys], row_bytes: int, threads: int = 1) -> tuple[float, float]:
    """Keys a second, and keys a second of processor time: what remains comparable when the cores are taken away."""

    def work(mine: list[Keys]) -> None:
        rows = np.empty((max(map(len, mine)), row_bytes), np.uint8)
        for keys in mine:
            call(keys, rows[: len(keys)], np.zeros(len(keys), np.uint8))

    before = time.process_time()
    spent = in_threads([lambda part=batches[number::threads]: work(part) for number in range(threads)])
    count = sum(map(len, batches))
    return count / spent, count / (time.process_time() - before)


class Figures:
    """Medians over rounds, by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def note(self, name: str, value: float | tuple[float, float]) -> None:
        """One round's figure, or two: by the clock and by processor time."""
        clock, cpu = value if isinstance(value, tuple) else (value, None)
        self.samples.setdefault(name, []).append(clock)
        if cpu is not None:
            self.samples.setdefault(f"{name}, per CPU second", []).append(cpu)

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.samples.items()}


def measure(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    keys = all_keys(args.rows)
    rows = rng.integers(0, 256, (args.rows, args.row_bytes), np.uint8)
    alone = {  # no helping threads: as many threads as callers
        "sealed": Ours(SealedTier, root / "sealed", keys, rows, 0),
        "rocksdb": Ours(DiskTier, root / "rocksdb", keys, rows, 0),
    }
    peers = {
        f"rocksdict{'-mapped' if m else ''}": Peer(root / f"peer-{m}", keys, rows, mapped=m)
        for m in (() if args.changed else (False, True))
    }
    figures = Figures()
    facts: dict[str, Any] = {f"{name} build rows/s": args.rows / ours.build_s for name, ours in alone.items()}
    facts |= {f"{name} bytes a row": ours.tier.bytes_on_disk() / args.rows for name, ours in alone.items()}
    sealed_stats, rocks_stats = alone["sealed"].tier.stats(), alone["rocksdb"].tier.stats()
    facts["sealed memory bytes a row"] = sealed_stats["base_index_memory_bytes"] / args.rows
    facts["rocksdb memory bytes a row"] = rocks_stats["index_bytes"] / args.rows

    def batches(count: int) -> list[Keys]:
        return [np.unique(keys[rng.integers(0, args.rows, args.batch)]) for _ in range(count)]

    calls: dict[str, Call] = {name: store.get for name, store in (*alone.items(), *peers.items())}
    check = batches(1)[0]
    want = rows[np.searchsorted(keys, check)]
    for name, call in calls.items():
        got = np.zeros((len(check), args.row_bytes), np.uint8)
        call(check, got, np.zeros(len(check), np.uint8))
        assert np.array_equal(got, want), name

    for path in (root / "sealed", root / "rocksdb", *(peer.path for peer in peers.values())):
        warm_cache(path)
    for _ in range(0 if args.changed else args.rounds):
        for threads in (1, 2):
            asked = batches(args.warm_batches)
            for name, call in calls.items():
                figures.note(f"warm {threads} {name}", keys_per_s(call, asked, args.row_bytes, threads))

    if not args.changed:
        cold(root, args, alone, peers, figures, facts, batches)
    changed_share(root, args, alone, keys, rows, figures, facts, batches)
    for store in (*alone.values(), *peers.values()):
        store.close()
    medians = figures.medians()
    return {
        "benchmark": "disk_lookup",
        "machine": describe(),
        "rows": args.rows,
        "row_bytes": args.row_bytes,
        "batch": args.batch,
        "rounds": args.rounds,
        "headlines": [] if args.changed else headlines(medians),
        "results": [{"part": "medians", "what": name, "keys_per_s": value} for name, value in medians.items()],
        "facts": facts,
        "samples": figures.samples,
    }


def headlines(medians: dict[str, float]) -> list[dict[str, Any]]:
    found = []
    for threads in (1, 2):
        for peer in ("rocksdict", "rocksdict-mapped"):
            name = f"warm {threads} {{}}, per CPU second"
            found.append(
                headline(
                    f"look-up from disk, OS cache warm, {threads} threads",
                    "rocksdict, one row a key, tuned" + (", reading mapped files" if "mapped" in peer else ""),
                    medians[name.format("sealed")] / medians[name.format(peer)],
                    at_least=2,
                )
            )
    against = f"4 KiB reads at random, {DEEP[9:]}"
    found.append(
        headline("cold look-up, OS cache dropped", against, medians["cold sealed"] / medians[DEEP], at_least=0.7)
    )
    return found


def cold(
    root: Path,
    args: argparse.Namespace,
    alone: dict[str, Ours],
    peers: dict[str, Peer],
    figures: Figures,
    facts: dict[str, Any],
    batches: Callable[[int], list[Keys]],
) -> None:
    """Batches as they come to a service: one caller, `disk_threads` helpers; and the drive asked as deeply."""
    largest = max(files_of(root / "sealed" / "base"), key=lambda file: file.stat().st_size)
    fd = os.open(largest, os.O_RDONLY)
    for ours in alone.values():
        ours.tier.close()
        ours.pool = ReaderPool(8)
        ours.open()
    stores: dict[str, tuple[Path, Call]] = {name: (ours.path, ours.get) for name, ours in alone.items()}
    stores |= {name: (peer.path, peer.get) for name, peer in peers.items()}
    for _ in range(args.rounds):
        for threads, window in ((1, 0), (8, 0), (16, 0), (1, 32), (4, 32)):
            name = f"cold raw {threads} threads" + (f" × {window} ahead" if window else "")
            figures.note(
                name,
                raw_reads(
                    fd, largest.stat().st_size // PAGE * PAGE, args.batch, threads, window, np.random.default_rng()
                ),
            )
        (asked,) = batches(1)
        for name, (path, call) in stores.items():
            if name in peers:
                peers[name].close()  # what is mapped cannot be dropped
            drop_cache(path)
            if name in peers:
                peers[name].reopen()
            facts.setdefault(f"{name} still cached", cached_share(path))
            figures.note(f"cold {name}", keys_per_s(call, [asked], args.row_bytes))
    os.close(fd)
    for ours in alone.values():
        ours.tier.close()
        ours.pool.close()
        ours.pool = ReaderPool(0)
        ours.open()
        warm_cache(ours.path)


def changed_share(
    root: Path,
    args: argparse.Namespace,
    alone: dict[str, Ours],
    keys: Keys,
    rows: Rows,
    figures: Figures,
    facts: dict[str, Any],
    batches: Callable[[int], list[Keys]],
) -> None:
    """Warm, one thread, after deltas of 20,000 rows have changed some of the keys; beside a base of which none were."""
    order = np.random.default_rng(3).permutation(args.rows)
    unchanged = Ours(SealedTier, root / "unchanged", keys, rows, 0)
    warm_cache(unchanged.path)
    over: dict[str, list[float]] = {}
    done = number = 0
    for share in CHANGED:
        while done < share * args.rows:
            some = np.sort(order[done : done + 20_000])
            for ours in alone.values():
                ours.change(keys[some], rows[some], number)
            done, number = done + len(some), number + 1
        for name, ours in alone.items():
            ours.tier.compact()
            ours.tier.close()
            facts[f"{name} open s, {share:.0%} changed"] = ours.open()
            warm_cache(ours.path)
        for _ in range(args.rounds):
            asked = batches(args.warm_batches)
            none = keys_per_s(unchanged.get, asked, args.row_bytes)
            for name, ours in alone.items():
                found = keys_per_s(ours.get, asked, args.row_bytes)
                figures.note(f"changed {share:.0%} {name}", found)
                over.setdefault(f"{name}, {share:.0%} changed, keys a CPU second over none changed", []).append(
                    found[1] / none[1]
                )
            figures.note("changed 0% sealed", none)
    unchanged.close()
    facts |= {name: median(ratios) for name, ratios in over.items()}
    stats = alone["sealed"].tier.stats()
    facts["changed keys"], facts["filter bytes"] = stats["changed_keys"], stats["changed_filter_memory_bytes"]


def show(result: dict[str, Any]) -> str:
    medians = {row["what"]: row["keys_per_s"] for row in result["results"]}
    facts = result["facts"]
    kinds = ("sealed", "rocksdb", "rocksdict", "rocksdict-mapped")
    lines = [
        f"{result['machine']}; load {os.getloadavg()[0]:.1f}",
        "",
        f"{result['rows']:,} rows of {result['row_bytes']} bytes, batches of {result['batch']:,} sorted keys; "
        f"thousand keys a second by the clock / of processor time, medians of {result['rounds']}",
        "",
        "| | sealed | base of RocksDB | rocksdict | rocksdict, mapped files |",
        "|---|---|---|---|---|",
    ]
    titles = {
        "warm 1": "warm, 1 thread",
        "warm 2": "warm, 2 threads",
        "cold": "cold, one batch",
        "changed 0%": "warm, 1 thread, none changed, beside these:",
        "changed 1%": "warm, 1 thread, 1% changed by deltas",
        "changed 10%": "warm, 1 thread, 10% changed by deltas",
        "changed 30%": "warm, 1 thread, 30% changed by deltas",
    }
    for prefix, title in titles.items():
        cells = []
        for kind in kinds:
            clock, cpu = (medians.get(f"{prefix} {kind}{of}") for of in ("", ", per CPU second"))
            cells.append("" if clock is None or cpu is None else f"{clock / 1e3:,.0f} / {cpu / 1e3:,.0f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    raw = {name: value for name, value in medians.items() if name.startswith("cold raw")}
    lines += ["", "| 4 KiB reads at random, cold | thousand a second | sealed / this |", "|---|---|---|"]
    lines += [
        f"| {name[9:]} | {value / 1e3:,.0f} | {medians['cold sealed'] / value:.2f} |" for name, value in raw.items()
    ]
    lines += ["", "| | times | at least | |", "|---|---|---|---|"]
    lines += [
        f"| {row['measured']} against {row['against']} | {row['value']:.2f} | {row['at_least']} | {'met' if row['met'] else 'missed'} |"
        for row in result["headlines"]
    ]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {name} | {value:,.3f} |" for name, value in facts.items()]
    return "\n".join(lines)


def main() -> int:
    args = parser_of(
        __file__, __doc__, "tiny", rows=3_000_000, row_bytes=64, batch=4096, warm_batches=12, rounds=5,
        changed=(False, "only what reading rows costs once deltas have changed some"),
    ).parse_args()  # fmt: skip
    if args.tiny:
        args.rows, args.batch, args.warm_batches, args.rounds = 30_000, 512, 2, 1
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    try:
        result = measure(root, args)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(show(result))
    report.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
