"""Rows a second of the host tier beside numpy.take: `python -m benchmarks.host_lookup [--rows N…] [--json FILE]`.

All keys are resident, dim 32 float32, 4,096 uniform keys a call, buffers reused. The host tier finds the
rows by key, numpy.take is told where they are in one plain array. Calls of the two alternate within
short rounds, so that a busy neighbour slows both; the median of the rounds' ratios is what counts.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier

DIM, KEYS_A_CALL = 32, 4096
CALLS = 24  # of each kind a round
SPEC = TableSpec("t", KeyType.INT64, DIM, StorageDtype.FLOAT32)


def filled(rows: int) -> tuple[HostTable, np.ndarray, np.ndarray]:
    """A table with `rows` keys resident, those keys (random 64-bit), and their vectors in one array."""
    keys = np.random.default_rng(1).integers(-(1 << 63), (1 << 63) - 1, rows)
    vectors = np.empty((rows, DIM), np.float32)
    table = HostTable(SPEC, rows * 250, default_vector=np.zeros(DIM, np.float32))
    for begin in range(0, rows, 1 << 18):
        part = slice(begin, begin + (1 << 18))
        vectors[part] = keys[part, None] >> 40
        table.warm(keys[part], vectors[part].view(np.uint8))
    return table, keys, vectors


def rate(work: Callable[[int], None], threads: int) -> float:
    """Million keys a second of CALLS calls of `work` in each of `threads` threads; the argument is the thread's number."""
    barrier = threading.Barrier(threads + 1)

    def run(number: int) -> None:
        barrier.wait()
        for _ in range(CALLS):
            work(number)
        barrier.wait()

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = time.perf_counter()
    barrier.wait()
    elapsed = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return threads * CALLS * KEYS_A_CALL / elapsed / 1e6


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds, in million keys a second, and of the ratios of each round."""
    table, keys, vectors = filled(rows)
    rng = np.random.default_rng(2)
    resident = np.zeros(rows, np.bool_)
    for begin in range(0, rows, 1 << 18):
        part, state = keys[begin : begin + (1 << 18)], np.zeros(min(1 << 18, rows - begin), np.uint8)
        table.lookup(part, np.empty((len(part), DIM), np.float32), state)
        resident[begin : begin + (1 << 18)] = state == Tier.HOST
    there = np.flatnonzero(resident)
    batches = [[there[rng.integers(0, len(there), KEYS_A_CALL)] for _ in range(CALLS)] for _ in range(2)]
    wanted = [[keys[batch] for batch in mine] for mine in batches]
    outs = [np.empty((KEYS_A_CALL, DIM), np.float32) for _ in range(2)]
    states = [np.zeros(KEYS_A_CALL, np.uint8) for _ in range(2)]
    turn = [0, 0]

    def look_up(number: int) -> None:
        turn[number] = (turn[number] + 1) % CALLS
        states[number][:] = 0
        table.lookup(wanted[number][turn[number]], outs[number], states[number])

    def take(number: int) -> None:
        turn[number] = (turn[number] + 1) % CALLS
        np.take(vectors, batches[number][turn[number]], axis=0, out=outs[number], mode="clip")

    for work in (look_up, take):  # both must answer the same, and all of it
        work(0)
        np.testing.assert_array_equal(outs[0], vectors[batches[0][turn[0]]])
    assert (states[0] == Tier.HOST).all()
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for threads in (1, 2):
            ours, numpys = rate(look_up, threads), rate(take, threads)
            for name, value in (("lookup", ours), ("take", numpys), ("ratio", ours / numpys)):
                samples.setdefault(f"{name}_{threads}", []).append(value)
        samples.setdefault("lookup_2_over_1", []).append(samples["lookup_2"][-1] / samples["lookup_1"][-1])
    table.close()
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    options = parser_of(__file__, __doc__, rows=[1_000_000, 10_000_000], rounds=41).parse_args()
    print(f"{describe()}; dim {DIM} float32, {KEYS_A_CALL} keys a call, medians of {options.rounds} rounds\n")
    print(
        "| rows | threads | host tier, M keys/s | numpy.take, M keys/s | ratio | two threads over one |\n|---|---|---|---|---|---|"
    )
    results = {}
    for rows in options.rows:
        got = results[rows] = measure(rows, options.rounds)
        for threads in (1, 2):
            scaling = f"{got['lookup_2_over_1']:.2f}" if threads == 2 else ""
            print(
                f"| {rows:,} | {threads} | {got[f'lookup_{threads}']:.1f} | {got[f'take_{threads}']:.1f} "
                f"| {got[f'ratio_{threads}']:.2f} | {scaling} |",
                flush=True,
            )
    report.write(options.json, {"machine": describe(), "rows": results})


if __name__ == "__main__":
    main()
