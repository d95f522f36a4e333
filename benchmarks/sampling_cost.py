"""What sampling look-ups costs them: `python -m benchmarks.sampling_cost [--rows N] [--rounds N]`.

Look-ups of the host tier, all keys resident, dim 32 float32, Zipf 1.0: while nothing is noted, while keys are noted by the bound that
a store has for a table of that size, and while every key is noted. Processor time of blocks that take turns; medians of the rounds'
ratios. A store notes keys for a part of the time only, so these are the most that it costs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks import access_traces
from benchmarks.host_lookup import DIM, SPEC
from benchmarks.machine import describe
from tierstore.tiers.host.sample import ALL, AccessSample
from tierstore.tiers.host.table import HostTable
from tierstore.tiers.host.trials import CacheTrials

CALLS = {64: 600, 4096: 20}  # of a block, by keys a call


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    sample = AccessSample()
    table = HostTable(SPEC, options.rows * 250, default_vector=np.zeros(DIM, np.float32), sample=sample)
    keys = np.arange(options.rows)
    for begin in range(0, options.rows, 1 << 18):
        part = keys[begin : begin + (1 << 18)]
        table.warm(part, np.zeros((len(part), SPEC.row_bytes), np.uint8))
    bound = CacheTrials(table.capacity_rows).bound
    trace = access_traces.draw(access_traces.zipf_weights(options.rows, 1.0), 1 << 20)
    print(f"{describe()}; {options.rows:,} rows of dim {DIM} float32, {options.rounds} rounds\n")
    print("| keys a call | ns a key, nothing noted | by the bound of a store | every key |\n|---|---|---|---|")
    for n, calls in CALLS.items():
        out, state, at = np.empty((n, DIM), np.float32), np.zeros(n, np.uint8), 0
        times: dict[int, list[float]] = {0: [], bound: [], ALL: []}
        for turn in range(options.rounds):
            for kind in list(times) if turn % 2 else list(times)[::-1]:
                sample.collect(kind)
                began = time.thread_time_ns()
                for _ in range(calls):
                    at = at + n if at + 2 * n <= len(trace) else 0
                    state[:] = 0
                    table.lookup(trace[at : at + n], out, state)
                times[kind].append((time.thread_time_ns() - began) / calls / n)
        off = statistics.median(times[0])
        more = [statistics.median(a / b for a, b in zip(times[kind], times[0], strict=True)) for kind in (bound, ALL)]
        print(f"| {n:,} | {off:.1f} | {more[0]:.3f} times | {more[1]:.3f} times |", flush=True)
    table.close()


if __name__ == "__main__":
    main()
