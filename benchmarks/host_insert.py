"""Taking rows into the host cache, beside writing the same rows to random places of an array.

    python -m benchmarks.host_insert [--rounds 5] [--tiny] [--json FILE]

Cold keys, each of them once, into a table that is full, so that each row takes the place of another; and into one that is not full. That is
what a promotion from disk does, a start, and a front with what its nodes answer. Processor time of the thread, medians of rounds in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import describe
from benchmarks.report import headline, markdown, write
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec

DIM = 32
ROW_BYTES = 4 * DIM
_BESIDE = 14  # bytes of the cache beside a row


class Case(NamedTuple):
    capacity: int  # rows
    a_call: int  # keys
    full: bool

    def __str__(self) -> str:
        return f"{self.capacity:,} rows, {'full' if self.full else 'not full'}, {self.a_call:,} keys a call"


CASES = (Case(1800, 4096, True), Case(1_000_000, 4096, True), Case(1_000_000, 100, True), Case(2_000_000, 4096, False))
TINY = (Case(1800, 4096, True), Case(50_000, 100, False))


class Filling:
    """A table, and the places of an array, that go on taking rows."""

    def __init__(self, case: Case, rows_a_round: int, rounds: int) -> None:
        self._case, self._rows = case, rows_a_round // case.a_call * case.a_call
        spec = TableSpec("item", KeyType.INT64, DIM, StorageDtype.FLOAT32)
        self._table = HostTable(
            spec, case.capacity * (spec.row_bytes + _BESIDE) + 4096, default_vector=np.zeros(DIM, np.float32)
        )
        rng, self._at = np.random.default_rng(7), 0
        before = 2 * case.capacity if case.full else 0
        self._keys = rng.permutation(np.arange(before + (rounds + 1) * self._rows, dtype=np.int64)) * 1_000_003
        self._source = np.zeros((case.a_call, ROW_BYTES), np.uint8)
        self._array = np.ones((case.capacity, ROW_BYTES), np.uint8)
        self._places = rng.integers(0, case.capacity, self._rows)
        while self._at < before:
            self._insert()

    def _insert(self) -> None:
        keys = self._keys[self._at : self._at + self._case.a_call]
        self._table.insert(keys, self._source[: len(keys)], 1)
        self._at += len(keys)

    def insert_ns(self) -> float:
        """Nanoseconds of the processor for a row."""
        began = time.thread_time()
        for _ in range(self._rows // self._case.a_call):
            self._insert()
        return (time.thread_time() - began) / self._rows * 1e9

    def write_ns(self) -> float:
        """The same, to the array."""
        began = time.thread_time()
        for at in range(0, self._rows, self._case.a_call):
            self._array[self._places[at : at + self._case.a_call]] = self._source
        return (time.thread_time() - began) / self._rows * 1e9

    def close(self) -> None:
        self._table.close()


def run(cases: tuple[Case, ...], rows_a_round: int, rounds: int) -> dict[str, Any]:
    results = []
    for case in cases:
        filling = Filling(case, rows_a_round, rounds)
        pairs = [(filling.insert_ns(), filling.write_ns()) for _ in range(rounds)]
        filling.close()
        insert, scatter = (statistics.median(of) for of in zip(*pairs, strict=True))
        results.append({"table": str(case), "insert_ns": insert, "write_ns": scatter, "ratio": insert / scatter})
    large = results[max(range(len(cases)), key=lambda i: (cases[i].full, cases[i].capacity, cases[i].a_call))]
    return {
        "benchmark": "host_insert", "machine": describe(), "row_bytes": ROW_BYTES, "results": results,
        "headlines": [headline(f"a row taken in, {large['table']}", "written to a random place", large["ratio"], at_most=4)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="so little that it only shows that this runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = run(TINY, 8192, 1) if options.tiny else run(CASES, 200_000, options.rounds)
    print(markdown(document))
    if options.json:
        write(options.json, document)


if __name__ == "__main__":
    main()
