"""Inputs that are spoiled in every way, for everything that reads what others wrote: refused by name, never a traceback.

`python -m tools.fuzz --count 100000 [--only manifest --only grpc]`, from the root of the repository; `make fuzz` runs all.

A target (`tools/fuzz_targets.py`) begins with the files of `tests/corpus/<target>`. They are changed at random (`tools/fuzz_mutator.py`). An input whose outcome
(an error's kind and words, a status) was not seen before is changed further in its turn; `--keep` adds those that are
small to the corpus. An outcome that is no answer to give (an exception that is not ours, a 500, a traceback in the log,
more than SLOWEST_S, more than MOST_BYTES of memory) is printed, and the input kept in `tests/corpus/<target>`, where the tests run it from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tools.fuzz_mutator import spoil
from tools.fuzz_targets import TARGETS, Failure
from tools.fuzz_targets import Run as RunInput

CORPUS = Path(__file__).parents[1] / "tests/corpus"
SLOWEST_S = 20.0  # of one input, on a machine that has other things to do
MOST_BYTES = 512 << 20  # by which the process may grow for one input
LARGEST_KEPT, MOST_KEPT = 4096, 24  # bytes of an input in the corpus, inputs of a target


def signature(outcome: str) -> str:
    """What kind of outcome it is: without names, numbers and bytes."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|b?[0-9]+|\\x..|/\S*", "?", outcome)[:100]


def _peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Failure in what takes longer, where it is Python; the main thread alone can be interrupted."""

    def interrupt(*_: object) -> None:
        raise Failure(f"it took more than {seconds:.0f} s")

    began_s, before = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # of somebody else, such as the tests' own
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, remaining_s - time.monotonic() + began_s) if remaining_s else 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began_s > seconds:
        raise Failure(f"it took {time.monotonic() - began_s:.0f} s")


@dataclass
class Run:
    """Counts of one target."""

    run: RunInput
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, bytes] = field(default_factory=dict)  # by what happened
    pool: list[bytes] = field(default_factory=list)
    fresh: list[bytes] = field(default_factory=list)  # that had a new outcome

    def attempt(self, data: bytes) -> None:
        before = _peak_bytes()
        try:
            with _interrupted_after(SLOWEST_S):
                outcome = self.run(data)
            if (grown := _peak_bytes() - before) > MOST_BYTES:
                raise Failure(f"it took {grown >> 20} MiB of memory")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what this program looks for
            self.faults.setdefault(signature(f"{type(error).__name__}: {error}"), data)
            outcome = f"FAULT {type(error).__name__}: {error}"
        self.inputs += 1
        kind = signature(outcome)
        if not self.outcomes[kind]:
            self.fresh.append(data)
            self.pool.append(data)
        self.outcomes[kind] += 1


def save(name: str, inputs: list[bytes], most: int) -> None:
    """Put inputs into the corpus, under a hash of theirs."""
    folder = CORPUS / name
    for data in inputs:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.iterdir())) < most:
            (folder / xxhash.xxh3_64_hexdigest(data)).write_bytes(data)


def fuzz(name: str, count: int, seed: int, until: float = float("inf"), most_faults: int = 1 << 20) -> Run:
    """Run a target on what it has, and on others made of it: `count` in all, until a time, or until there are so many faults."""
    rng = random.Random(f"{name} {seed}")
    with TARGETS[name]() as target:
        run = Run(target)
        for data in [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]:
            run.attempt(data)
            run.pool.append(data)
        run.fresh.clear()
        while run.inputs < count and time.monotonic() < until and len(run.faults) < most_faults:
            run.attempt(spoil(rng.choice(run.pool), rng))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="inputs a target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--seconds", type=float, default=86_400.0, help="at most, a target")
    parser.add_argument("--only", action="append", choices=sorted(TARGETS), help="a target; may be given again")
    parser.add_argument("--keep", action="store_true", help="add inputs with new outcomes to the corpus")
    options = parser.parse_args()
    total = faults = 0
    for name in options.only or TARGETS:
        began = time.monotonic()
        run = fuzz(name, options.count, options.seed, began + options.seconds)
        if options.keep:
            save(name, [data for data in run.fresh if len(data) <= LARGEST_KEPT], MOST_KEPT)
        save(name, list(run.faults.values()), 1 << 20)
        for what in run.faults:
            print(f"FAULT {name}: {what}")
        total, faults = total + run.inputs, faults + len(run.faults)
        print(
            f"{name}: {run.inputs} inputs, {len(run.outcomes)} kinds of outcome, {len(run.faults)} faults, "
            f"{time.monotonic() - began:.0f} s, seed {options.seed}",
            flush=True,
        )
    print(f"{total} inputs, {faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
