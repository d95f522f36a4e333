"""Crash test of the store: end it at any moment, over and over, and look whether anything acknowledged is missing.

`python -m tools.crash_test --points 1000 --seed 1`, from the root of the repository.

A child process does a random stream of work on a store (`tools/crash_work.py`) and notes each step in a journal, before it
begins and after it was acknowledged. It is killed with SIGKILL at a random moment, and the store is opened here and compared
with what the journal says that it must hold (`tools/crash_check.py`).

All that the child and its load helpers changed on disk is recorded meanwhile (`tools/disk_trace.py`, which takes a C
compiler). From that record the directory is made again as it was after single operations, ours and RocksDB's, and as it
may look if the power failed there; each of these is a point that is opened and compared too. The next child goes on from
one of them. Children are forked from one process that has imported everything and opened nothing.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import tierstore
from tools.crash_check import Acknowledged, Wrong, check
from tools.crash_work import SETTINGS
from tools.disk_trace import MODES, Disk, Mode, Operation, found
from tools.nursery import Nursery

STEPS = [
    "",
    "",
    "",
    "load",
    "activate",
    "rollback",
    "drop",
    "close",
    "canary",
    "label",
    "promote",
    "housekeeping",
    "undo",
]


class CrashTest:
    """A store under `root` and the children that are killed on it. A context manager; `round` kills one and checks."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self._rng, self.acknowledged = root, random.Random(seed), Acknowledged(seed)
        self.points: Counter[str] = Counter()  # by how they were made, "killed" by SIGKILL as "signal"
        self.steps: Counter[str] = Counter()  # under way at these points
        self.operations = 0
        (root / "disk").mkdir()
        self._journal = root / "disk/journal"
        self._journal.touch()
        self._nursery = Nursery(root, "tools.crash_work")

    @property
    def records(self) -> bool:
        """Whether operations are recorded; else there are kills alone."""
        return self._nursery.records

    def __enter__(self) -> CrashTest:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__()

    def round(self, points: int = 0, favour: str | None = None) -> str:
        """Start a child, kill it, open what it leaves, and what it would have left at `points` moments before.

        It is killed within a step of the kind `favour`, if it gets there, or with "" after some steps; None: one by chance.
        Returns the step that was under way when it was killed. Raises Wrong.
        """
        before = copy.deepcopy(self.acknowledged)
        self._journal.write_bytes(b"")
        disk = Disk(self.root / "disk") if points else None
        history = self._run_child(self._choose_kind() if favour is None else favour, traced=points > 0)
        self.operations += len(history)
        self.acknowledged.read(self._journal.read_text().splitlines())
        under_way = " ".join(self.acknowledged.unfinished) or "nothing"
        self._count("signal", under_way)
        self._look(self.acknowledged, self.root / "disk")
        if disk is not None and history:
            self._replay(before, disk, history, points)
        return under_way

    def _choose_kind(self) -> str:
        # where there is nothing yet, mostly wait until there is: a load takes a second or more
        return self._rng.choice(STEPS) if self.acknowledged.versions or self._rng.random() < 0.2 else ""

    def _run_child(self, favour: str, *, traced: bool) -> list[Operation]:
        shuffle = self._rng.getrandbits(32)
        self._nursery.start(traced=traced, seed=self.acknowledged.seed, shuffle=shuffle, favour=favour)
        self._await_the_moment(favour)
        return self._nursery.kill()

    def _await_the_moment(self, kind: str) -> None:
        """After so many steps, or within a step of some kind, and then some."""
        steps = self._rng.randint(0, 60)
        wanted, deadline = f"begin {kind}".encode(), time.monotonic() + 15.0
        while time.monotonic() < deadline:
            seen = self._journal.read_bytes()
            if (kind and wanted in seen) or (not kind and seen.count(b"done") >= steps):
                break
            time.sleep(0.001)
        time.sleep(self._rng.random() ** 3 * (1.5 if kind == "load" else 0.02))

    def _look(self, acknowledged: Acknowledged, where: Path) -> None:
        with tierstore.open(where / "data", fold_grace_s=0.0, **SETTINGS) as store:
            check(acknowledged, store)

    def _count(self, how: str, under_way: str) -> None:
        self.points[how] += 1
        self.steps[under_way.split()[0]] += 1

    def _replay(self, before: Acknowledged, disk: Disk, history: list[Operation], points: int) -> None:
        """Open what there was after some of the operations; the next round may go on from the last of them."""
        chosen = Counter(self._choose(history, points))
        last = max(chosen)
        for number, operation in enumerate(history):
            disk.play(operation)
            for _ in range(chosen[number]):
                self._point(before, disk, self._rng.choice(MODES), f"operation {number} of {len(history)}", last=False)
            if number == last and self._rng.random() < 0.5:
                self._point(before, disk, self._rng.choice(MODES[1:]), f"operation {number}", last=True)
                break

    def _choose(self, history: list[Operation], points: int) -> list[int]:
        """Numbers of operations, no kind of operation more often than another: most are writes of RocksDB."""
        by_kind: dict[str, list[int]] = {}
        for number, operation in enumerate(history):
            by_kind.setdefault(operation.kind, []).append(number)
        return [self._rng.choice(by_kind[self._rng.choice(sorted(by_kind))]) for _ in range(points)]

    def _point(self, before: Acknowledged, disk: Disk, mode: Mode, name: str, *, last: bool) -> None:
        """Check what is found at this moment; with `last`, go on with it."""
        acknowledged = copy.deepcopy(before)
        journal = disk.top.names["journal"]
        acknowledged.read(bytes(journal.content).decode().splitlines())  # type: ignore[union-attr]
        under_way = " ".join(acknowledged.unfinished) or "nothing"
        where = self.root / ("disk" if last else "point")
        if last:
            shutil.rmtree(where)
        try:
            if last:
                disk.write(where, mode, self._rng)
                self._journal.touch()
                self._look(acknowledged, where)
                self.acknowledged = acknowledged
            else:
                with found(disk, where, mode, self._rng):
                    self._look(acknowledged, where)
        except Exception as error:
            disk.write(self.root / "wrong", mode, random.Random(0))
            raise Wrong(f"{mode} after {name}, in {under_way}; like it: {self.root / 'wrong'}: {error}") from error
        self._count(mode, under_way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000, help="moments to check, kills among them")
    parser.add_argument("--per-round", type=int, default=25, help="of these, from the record of one child")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin no round after that")
    parser.add_argument(
        "--keep", action="store_true", help="leave the directory for inspection where something is wrong"
    )
    options = parser.parse_args()
    root, until = Path(tempfile.mkdtemp(prefix="tierstore-crash-")), time.monotonic() + options.seconds
    print(f"seed {options.seed}, store in {root}", flush=True)
    keep = options.keep
    with CrashTest(root, options.seed) as test:
        if not test.records:
            print("no C compiler: kills at random moments alone, no power loss")
        try:
            while test.points.total() < options.points and time.monotonic() < until:
                test.round(options.per_round if test.records else 0)
                print(f"{test.points.total()} points, {test.acknowledged.last} deltas", flush=True)
            keep = False
        finally:
            print(f"points: {dict(test.points.most_common())}, from {test.operations} file operations")
            print(f"under way: {dict(test.steps.most_common())}; done: {dict(test.acknowledged.done.most_common())}")
            if not keep:
                shutil.rmtree(root)
    print("nothing acknowledged was lost, nothing else half there; rows, scores, routing and `verify` checked at each")


if __name__ == "__main__":
    main()
