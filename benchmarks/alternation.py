"""Timing several contenders in turn: A B C A B C …, so that a busy neighbour slows all of them.

A contender works through numbered batches in blocks of a few milliseconds. What is compared are blocks of the same
round, and what is quoted are medians over the rounds. `alternate` is called from one thread; it starts the others.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_CALLS = 1024  # a block; more would only make rounds long
Work = Callable[[int], Any]  # does one batch, given its number; numbers run on for ever
Block = Callable[[int, int], "Taken"]  # (first batch, batches) → what they took


@dataclass(frozen=True)
class Taken:
    """One block: seconds of all of it, of each call, and of processor time that the process got meanwhile."""

    whole: float
    calls: list[float]
    cpu: float


@dataclass
class Samples:
    """Every block of one contender: seconds a call of each round, and single calls of all rounds."""

    keys_a_call: int
    rounds: list[float] = field(default_factory=list)  # of the whole block, divided by its calls
    calls: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)  # that the process had, of each round

    def add(self, taken: Taken) -> None:
        self.rounds.append(taken.whole / len(taken.calls))
        self.calls.extend(taken.calls)
        self.cores.append(taken.cpu / taken.whole)

    def per_cpu_second(self) -> Samples:
        """The samples in processor time: what remains comparable when something else takes the cores away."""
        return Samples(self.keys_a_call, [wall * cores for wall, cores in zip(self.rounds, self.cores, strict=True)])

    def as_dict(self) -> dict[str, float]:
        """Median keys a second, what a call took (p50, p99, microseconds), and how many cores it ran on."""
        return {
            "keys_per_s": self.keys_a_call / statistics.median(self.rounds),
            "p50_us": float(np.percentile(self.calls, 50)) * 1e6,
            "p99_us": float(np.percentile(self.calls, 99)) * 1e6,
            "cores_had": statistics.median(self.cores),
        }


def one_thread(work: Work) -> Block:
    """A block of `work` in the calling thread."""

    def block(first: int, calls: int) -> Taken:
        took = []
        cpu = time.process_time()
        began = last = time.perf_counter()
        for number in range(first, first + calls):
            work(number)
            now = time.perf_counter()
            took.append(now - last)
            last = now
        return Taken(last - began, took, time.process_time() - cpu)

    return block


def threads(works: list[Work]) -> Block:
    """A block in which each of `works` runs in a thread of its own, `calls` batches each, different ones.

    `whole` is the wall time until the last is done; the calls of all threads came out of it.
    """
    count = len(works)

    def block(first: int, calls: int) -> Taken:
        barrier = threading.Barrier(count + 1)
        took: list[list[float]] = [[] for _ in works]

        def run(number: int) -> None:
            mine = one_thread(works[number])
            barrier.wait()
            took[number] = mine(first + number * calls, calls).calls
            barrier.wait()

        runners = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
        for runner in runners:
            runner.start()
        barrier.wait()
        cpu, began = time.process_time(), time.perf_counter()
        barrier.wait()
        whole, cpu = time.perf_counter() - began, time.process_time() - cpu
        for runner in runners:
            runner.join()
        if any(len(of) != calls for of in took):
            raise RuntimeError("a thread of the benchmark failed; its error is above")
        calls_taken = [seconds for of in took for seconds in of]
        return Taken(whole, calls_taken, cpu)

    return block


def alternate(blocks: Mapping[str, Block], keys_a_call: int, rounds: int, block_s: float) -> dict[str, Samples]:
    """Run every block once a round. Each gets as many calls as fit in about `block_s`, at least one.

    No two blocks of a round begin with the same batches: of two that read the same table, the second would
    find in the processor's cache what the first has read.
    """
    calls: dict[str, int] = {}
    for name, block in blocks.items():
        block(0, 1)
        once = block(1, 1).whole
        calls[name] = max(1, min(MOST_CALLS, round(block_s / max(once, 1e-6))))
    samples = {name: Samples(keys_a_call) for name in blocks}
    stretch = 2 * max(calls.values())  # two threads read twice as many
    first = 0
    for _ in range(rounds):
        for name, block in blocks.items():
            samples[name].add(block(first, calls[name]))
            first += stretch
    return samples


def ratio(ours: Samples, theirs: Samples) -> float:
    """How many times as fast `ours` is: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(ours.rounds, theirs.rounds, strict=True))
