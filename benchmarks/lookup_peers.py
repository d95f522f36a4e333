"""Look-ups in process: tierstore, what users would pick instead, and numpy.take, in turn on the same keys and rows.

    python -m benchmarks.lookup_peers [--full | --tiny] [--rows N] [--part NAME …] [--tfra PYTHON] [--json FILE]

Before anything is timed every contender must answer the rows that NumPy says. docs/benchmarks.md tells how to read
the result. Needs up to 10 GiB of memory; parts that do not fit into what is available are left out, and named.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import access_traces, report
from benchmarks.alternation import Block, Samples, alternate, one_thread, ratio, threads
from benchmarks.contenders import PEERS, SPARE, Positions, Rows, Take, Tierstore, keys_of
from benchmarks.footprint import available_bytes, load
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.tfra_peer import Unavailable, tfra_table
from tierstore.types import StorageDtype

F32, F16, INT8, INT4 = StorageDtype.FLOAT32, StorageDtype.FLOAT16, StorageDtype.INT8, StorageDtype.INT4
WORKLOADS: dict[str, Callable[[int], np.ndarray] | None] = {
    "uniform": None,
    "Zipf 0.8": lambda universe: access_traces.zipf_weights(universe, 0.8),
    "Zipf 1.05": lambda universe: access_traces.zipf_weights(universe, 1.05),
    "Zipf 1.2": lambda universe: access_traces.zipf_weights(universe, 1.2),
    "ads reuse": access_traces.meta_weights,
}
BAG = 20
PEER_BYTES_A_ROW = {"dict of arrays": 420, "cachetools.LRUCache": 520}  # about


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    block_s: float
    pool: int  # keys drawn a workload; a call's batch is a piece of them, so that answers are not cached by accident
    small: int  # rows of the table that all peers hold
    large: int  # rows of the table of the headline
    growth: tuple[int, ...]
    large_peers: tuple[str, ...]
    batches: tuple[int, ...] = (64, 1024, 4096, 65536)
    peer_batches: tuple[int, ...] = (64, 4096)
    peer_workloads: tuple[str, ...] = ("uniform", "Zipf 1.05")
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    shapes: tuple[tuple[int, StorageDtype], ...] = (
        (16, F32), (32, F32), (64, F32), (128, F32), (32, F16), (32, INT8), (32, INT4), (128, F16), (128, INT8), (128, INT4),
    )  # fmt: skip
    batch: int = 4096


EVERY_SHAPE = tuple((dim, dtype) for dim in (16, 32, 64, 128) for dtype in (F32, F16, INT8, INT4))
PLANS = {
    "tiny": Plan(
        rounds=2, block_s=0.001, pool=1 << 13, small=3_000, large=6_000, growth=(3_000, 6_000),
        large_peers=("cachetools.LRUCache",), batches=(64, 1024), peer_batches=(64,), shapes=((16, F32), (32, INT8), (32, INT4), (32, F16)), batch=1024,
    ),
    "default": Plan(
        rounds=15, block_s=0.008, pool=1 << 20, small=1_000_000, large=10_000_000, growth=(1_000_000, 10_000_000),
        large_peers=("cachetools.LRUCache",),
    ),
    "full": Plan(
        rounds=41, block_s=0.02, pool=1 << 21, small=1_000_000, large=10_000_000,
        growth=(1_000_000, 10_000_000, 100_000_000), large_peers=tuple(PEERS), shapes=EVERY_SHAPE,
        peer_batches=(64, 1024, 4096, 65536), peer_workloads=tuple(WORKLOADS),
    ),
}  # fmt: skip


@dataclass
class Findings:
    """What becomes the report."""

    results: list[dict[str, Any]] = field(default_factory=list)
    headlines: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, part: str, rows: Rows, workload: str, batch: int, samples: dict[str, Samples], ours: str, **more: Any) -> None:  # fmt: skip
        """One result a contender; its ratio says how many times as fast `ours` is."""
        for name, of in samples.items():
            self.results.append(
                {"part": part, "contender": name, "workload": workload, "rows": rows.count, "dim": rows.spec.dim,
                 "dtype": rows.spec.dtype.value, "batch": batch, "threads": 1, **of.as_dict(),
                 "ratio": ratio(samples[ours], of)} | {key: value.get(name) if isinstance(value, dict) else value for key, value in more.items()}
            )  # fmt: skip

    def headline(self, measured: str, against: str, value: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = "times") -> None:  # fmt: skip
        self.headlines.append(report.headline(measured, against, value, at_least=at_least, at_most=at_most, unit=unit))


class Bench:
    """One run: a plan, where files go, and what was found."""

    def __init__(self, plan: Plan, folder: Path, tfra: Path | None) -> None:
        self.plan, self.folder, self.tfra, self.found = plan, folder, tfra, Findings()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def fits(self, bytes_wanted: float, what: str) -> bool:
        if bytes_wanted < 0.85 * available_bytes():
            return True
        self.found.skipped.append(
            f"{what}: needs about {bytes_wanted / 2**30:.1f} GiB of memory, {available_bytes() / 2**30:.1f} GiB are available"
        )
        return False

    def draw(self, there: Positions, workload: str, seed: int = 3) -> Positions:
        """`pool` accesses to the rows at positions `there`."""
        weigh = WORKLOADS[workload]
        if weigh is None:
            return there[np.random.default_rng(seed).integers(0, len(there), self.plan.pool)]
        return there[access_traces.draw(weigh(len(there)), self.plan.pool, seed=seed)]

    def blocks(
        self, contenders: Iterable[Any], rows: Rows, positions: Positions, batch: int, thread_count: int = 1
    ) -> dict[str, Block]:
        """A block for each contender, once it has answered right."""
        of_keys = np.resize(keys_of(positions), max(len(positions), batch) // batch * batch).reshape(-1, batch)
        of_positions = np.resize(positions, of_keys.size).reshape(-1, batch)
        blocks: dict[str, Block] = {}
        for contender in contenders:
            asked = of_keys if contender.wants_keys else of_positions
            works = []
            for _ in range(thread_count):
                out, session = np.empty((batch, rows.spec.dim), np.float32), contender.session()

                def work(number: int, session: Any = session, asked: Any = asked, out: Any = out) -> None:
                    session(asked[number % len(asked)], out)

                if not (
                    contender.name == "numpy.take" and rows.spec.dtype is not F32
                ):  # that one answers rows as stored
                    check(contender.name, rows, of_positions[0], work, out)
                works.append(work)
            blocks[contender.name] = one_thread(works[0]) if thread_count == 1 else threads(works)
        return blocks

    def time(self, blocks: dict[str, Block], batch: int, *, times_longer: float = 1) -> dict[str, Samples]:
        return alternate(blocks, batch, self.plan.rounds, self.plan.block_s * times_longer)

    # the parts

    def peers(self) -> None:
        """All peers on the smaller table, over workloads and batches."""
        plan = self.plan
        rows = Rows(plan.small, 32, F32)
        ours, contenders, there, memory = self.fill(rows, tuple(PEERS), "peers")
        for workload in plan.workloads:
            drawn = self.draw(there, workload)
            for batch in plan.batches:
                whole = workload in plan.peer_workloads and batch in plan.peer_batches
                if not whole and workload != "uniform" and batch != plan.batch:
                    continue
                who = contenders if whole else contenders[:2]
                samples = self.time(self.blocks(who, rows, drawn, batch), batch)
                self.found.add("peers", rows, workload, batch, samples, ours.name, memory_bytes_a_row=memory)  # fmt: skip
        for contender in contenders:
            contender.close()

    def fill(
        self, rows: Rows, peers: Sequence[str], part: str
    ) -> tuple[Tierstore, list[Any], Positions, dict[str, Any]]:
        """tierstore, numpy.take and these peers, filled; where rows are; bytes of memory a row of each."""
        ours = Tierstore(rows)
        contenders: list[Any] = [ours, Take(rows)]
        for name in peers:
            wanted = rows.count * PEER_BYTES_A_ROW[name]
            if self.fits(wanted, f"{part}: {name} of {rows.count:,} rows"):
                contenders.append(PEERS[name](rows))
        memory = {c.name: None if c.memory is None else c.memory / c.rows_held for c in contenders}
        return ours, contenders, ours.resident(rows), memory

    def large(self) -> None:
        """The larger table: against numpy.take and the cache that users write themselves, threads, and bags."""
        plan, batch = self.plan, self.plan.batch
        if not self.fits(plan.large * 128 * 2.5, f"large table: {plan.large:,} rows"):
            return
        rows = Rows(plan.large, 32, F32)
        ours, contenders, there, memory = self.fill(rows, plan.large_peers, "large table")
        what = f"look-up in process, all in the host tier, dim 32 float32, {batch:,} keys, {plan.large:,} rows"
        for workload in plan.workloads:
            drawn = self.draw(there, workload)
            who = contenders if workload == "uniform" else contenders[:2]
            with ExitStack() as stack:
                blocks = self.blocks(who, rows, drawn, batch)
                if workload == "uniform" and self.tfra is not None:
                    self.add_tfra(stack, blocks, memory, rows, drawn)
                samples = self.time(blocks, batch)
            huge_pages = {ours.name: ours.host.huge_page_bytes() / ours.host.bytes_in_use}
            self.found.add("large table", rows, workload, batch, samples, ours.name, memory_bytes_a_row=memory, huge_pages=huge_pages)  # fmt: skip
            if workload != "uniform":
                continue
            for name, least in (("numpy.take", 0.6), ("TFRA CPU table", 4), ("cachetools.LRUCache", 40)):
                if name in samples:
                    self.found.headline(what, name, ratio(samples[ours.name], samples[name]), at_least=least)
            self.threads(rows, contenders[:2], drawn)
            self.bags(rows, ours, drawn)
        for contender in contenders:
            contender.close()

    def add_tfra(self, stack: ExitStack, blocks: dict[str, Block], memory: dict[str, Any], rows: Rows, drawn: Positions) -> None:  # fmt: skip
        assert self.tfra is not None
        if not self.fits(rows.count * 400, f"large table: TFRA CPU table of {rows.count:,} rows"):
            return
        try:
            table = stack.enter_context(tfra_table(self.tfra, 1, rows, Path(tempfile.mkdtemp(dir=self.folder))))
        except Unavailable as error:
            self.found.skipped.append(f"large table: TFRA CPU table: {error}")
            return
        batch = self.plan.batch
        used = drawn[: len(drawn) // batch * batch]
        table.use(keys_of(used), batch)
        if not np.array_equal(table.answer(0), rows.answer(used[:batch])):
            raise AssertionError("TFRA CPU table answers other rows than NumPy")
        blocks[table.name], memory[table.name] = table.block, table.memory / table.rows_held
        self.say(f"TFRA {table.versions['tfra']}, TensorFlow {table.versions['tensorflow']}")

    def threads(self, rows: Rows, contenders: Sequence[Any], drawn: Positions) -> None:
        """Two threads against one, of tierstore and of numpy.take, which shows what the memory gives."""
        batch = self.plan.batch
        # a busy scheduler takes some milliseconds to give a new thread a core of its own, hence longer blocks
        blocks = self.blocks(contenders, rows, drawn, batch)
        pairs = self.blocks(contenders, rows, drawn, batch, thread_count=2)
        samples = self.time(
            blocks | {f"{name}, 2 threads": block for name, block in pairs.items()}, batch, times_longer=10
        )
        for name in blocks:
            one, two = samples[name], samples[f"{name}, 2 threads"]
            part = {name: one, f"{name}, 2 threads": two}
            self.found.add("threads", rows, "uniform", batch, part, f"{name}, 2 threads")
            self.found.results[-1]["threads"] = 2
        ours = contenders[0].name
        one, two = samples[ours], samples[f"{ours}, 2 threads"]
        had, per_cpu = two.as_dict()["cores_had"], ratio(two.per_cpu_second(), one.per_cpu_second())
        self.found.headline(
            "two threads", f"one thread (the two had {had:.2f} cores; keys a CPU second: {per_cpu:.2f} times)", ratio(two, one), at_least=1.8
        )  # fmt: skip

    def bags(self, rows: Rows, ours: Tierstore, drawn: Positions) -> None:
        """Sums of bags: pooled by the store, against looking up the same keys and np.add.reduceat."""
        bags = self.plan.batch // BAG
        batch = bags * BAG
        asked = keys_of(drawn[: len(drawn) // batch * batch]).reshape(-1, batch)
        offsets = np.arange(0, batch, BAG)
        pooled, summed = np.empty((bags, rows.spec.dim), np.float32), np.empty((bags, rows.spec.dim), np.float32)
        buffer, session = np.empty((batch, rows.spec.dim), np.float32), ours.session()

        def pool(number: int) -> None:
            ours.bags(asked[number % len(asked)], offsets, pooled)

        def reduce(number: int) -> None:
            session(asked[number % len(asked)], buffer)
            np.add.reduceat(buffer, offsets, axis=0, out=summed)

        pool(0)
        reduce(0)
        np.testing.assert_allclose(pooled, rows.answer(drawn[:batch]).reshape(bags, BAG, -1).sum(axis=1), rtol=1e-5)
        np.testing.assert_allclose(summed, pooled, rtol=1e-5)
        theirs = "look-up, then np.add.reduceat"
        samples = self.time({"tierstore, pooled": one_thread(pool), theirs: one_thread(reduce)}, batch)
        self.found.add("bags", rows, "uniform", batch, samples, "tierstore, pooled")
        self.found.headline(
            f"bags of {BAG} pooled (sum), buffers reused", theirs, ratio(samples["tierstore, pooled"], samples[theirs]), at_least=1.8
        )  # fmt: skip

    def shapes(self) -> None:
        """Dims and storage dtypes on the smaller table, against taking rows as they are stored."""
        for dim, dtype in self.plan.shapes:
            rows = Rows(self.plan.small, dim, dtype)
            ours = Tierstore(rows)
            contenders = [ours, Take(rows)] + ([Take(rows, decode=True)] if dtype is not F32 else [])
            drawn = self.draw(ours.resident(rows), "uniform")
            samples = self.time(self.blocks(contenders, rows, drawn, self.plan.batch), self.plan.batch)
            memory = {ours.name: ours.memory / ours.rows_held, "numpy.take": rows.spec.row_bytes}
            self.found.add("shapes", rows, "uniform", self.plan.batch, samples, ours.name, memory_bytes_a_row=memory)
            ours.close()

    def growth(self) -> None:
        """The cost of a key that is found, as the table grows; rows of 32 bytes, so that the largest fits."""
        batch = self.plan.batch
        tables: list[tuple[Rows, Tierstore, Positions]] = []
        for count in self.plan.growth:
            if self.fits(count * (32 + SPARE * 48 + 8) + (2 << 30 if count > 1e7 else 0), f"growth: {count:,} rows"):
                rows = Rows(count, 16, F16)
                ours = Tierstore(rows)
                tables.append((rows, ours, ours.resident(rows)))
        for workload in ("uniform", "Zipf 1.05"):
            blocks: dict[str, Block] = {}
            for rows, ours, there in tables:
                if workload != "uniform" and not self.fits(
                    56 * len(there), f"growth: {workload} over {len(there):,} rows"
                ):
                    continue
                made = self.blocks([ours, Take(rows)], rows, self.draw(there, workload), batch)
                blocks |= {f"{name}, {rows.count:,} rows": block for name, block in made.items()}
            samples = self.time(blocks, batch)
            smallest = tables[0][0]
            for rows, ours, _ in tables:
                if f"{ours.name}, {rows.count:,} rows" not in samples:
                    continue
                pair = {name: samples[f"{name}, {rows.count:,} rows"] for name in (ours.name, "numpy.take")}
                base = {name: samples[f"{name}, {smallest.count:,} rows"] for name in pair}
                cost = {name: ratio(base[name], pair[name]) for name in pair}
                memory = {ours.name: ours.memory / ours.rows_held, "numpy.take": rows.spec.row_bytes}
                self.found.add("growth", rows, workload, batch, pair, ours.name, memory_bytes_a_row=memory, cost_of_smallest=cost)  # fmt: skip
                if rows is not smallest:
                    self.found.headline(
                        f"cost of a key found, {rows.count:,} rows, {workload}", f"{smallest.count:,} rows, all found too "
                        f"(numpy.take: {cost['numpy.take']:.2f})", cost[ours.name], at_most=1.5,
                    )  # fmt: skip
        for _, ours, _ in tables:
            ours.close()

    def memory(self) -> None:
        """What a cached row costs beyond its vector, when more rows came than there is room for."""
        rows = Rows(self.plan.small, 32, F32)
        full = Tierstore(rows, slots_a_row=0.5)
        held = full.rows_held
        touched, bound = full.memory / held, full.host.bytes_in_use / held
        beyond = max(touched, bound) - rows.spec.row_bytes  # pages that only absent keys touch are in the bound alone
        self.found.results.append(
            {
                "part": "memory",
                "contender": full.name,
                "rows": held,
                "dim": 32,
                "dtype": F32.value,
                "memory_bytes_a_row": touched,
                "bound_bytes_a_row": bound,
                "beyond_the_vector": beyond,
                "filled": held / full.host.capacity_rows,
            }
        )
        self.found.headline(
            "host memory of a cached row beyond its vector", "cache full, all bookkeeping", beyond, at_most=16, unit="bytes"
        )  # fmt: skip
        full.close()


PARTS = ("large", "peers", "shapes", "growth", "memory")


def check(name: str, rows: Rows, positions: Positions, work: Callable[[int], Any], out: np.ndarray) -> None:
    """The contender must answer batch 0 as NumPy does, to the last bit that its dtype has."""
    out.fill(np.nan)
    work(0)
    expected = rows.answer(positions)
    if not (
        np.allclose(out, expected, rtol=1e-6, atol=1e-7) if rows.spec.dtype is INT8 else np.array_equal(out, expected)
    ):
        raise AssertionError(f"{name} answers other rows than NumPy for dim {rows.label}")


def main() -> None:
    parser = parser_of(
        __file__,
        __doc__,
        "tiny",
        "full",
        tfra=(Path, "a Python that has tensorflow-recommenders-addons"),
        rows=(int, "rows of the larger table"),
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    name = "tiny" if options.tiny else "full" if options.full else "default"
    began, load_before = time.perf_counter(), load()
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")) as folder:
        plan = replace(PLANS[name], large=options.rows) if options.rows else PLANS[name]
        bench = Bench(plan, Path(folder), options.tfra)
        for part in PARTS:
            if part in options.part:
                bench.say(f"{part}: {getattr(Bench, part).__doc__.splitlines()[0]}")
                getattr(bench, part)()
    if options.tfra is None:
        bench.found.skipped.append("TFRA CPU table: not asked for; `make bench-tfra` sets it up and runs it")
    document = {
        "benchmark": "lookup_peers", "plan": name, "machine": describe(), "load_before": load_before, "load_after": load(),
        "seconds": time.perf_counter() - began, "headlines": bench.found.headlines, "results": bench.found.results,
        "skipped": bench.found.skipped, "rounds": bench.plan.rounds,
    }  # fmt: skip
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
