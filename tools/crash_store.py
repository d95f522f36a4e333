"""The crash test of a store: a random stream of work (`tools/crash_work.py`), compared with its journal (`tools/crash_check.py`).

The next child goes on from what the one before left, or from one of the points that were made of its record.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections import Counter
from pathlib import Path

import tierstore
from tools.crash_check import Acknowledged, Wrong, check
from tools.crash_test import Rounds
from tools.crash_work import SETTINGS
from tools.disk_trace import MODES, Disk, Operation

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
POINTS = 25  # a round


class Crash(Rounds):
    proven = (
        "nothing acknowledged was lost, nothing else half there; rows, scores, routing and `verify` checked at each"
    )

    def __init__(self, root: Path, seed: int) -> None:
        (root / "disk").mkdir()
        super().__init__(root, seed, "tools.crash_work")
        self.acknowledged = Acknowledged(seed)
        self.steps: Counter[str] = Counter()  # under way at the points

    def one(self, number: int, most: int | None) -> None:
        self.round((POINTS if most is None else most) if self.records else 0)

    def said(self) -> str:
        return f"under way: {dict(self.steps.most_common())}; done: {dict(self.acknowledged.done.most_common())}"

    def round(self, points: int = 0, favour: str | None = None) -> str:
        """Start a child, kill it, open what it leaves, and what it would have left at `points` moments before.

        It is killed within a step of the kind `favour`, if it gets there, or with "" after some steps; None: one by chance.
        Returns the step that was under way when it was killed. Raises Wrong.
        """
        self._before = copy.deepcopy(self.acknowledged)
        self._journal.write_bytes(b"")
        disk = Disk(self._top) if points else None
        favour = self._choose_kind() if favour is None else favour
        shuffle = self._rng.getrandbits(32)
        self._nursery.start(traced=points > 0, seed=self.acknowledged.seed, shuffle=shuffle, favour=favour)
        self._await_the_moment(favour)
        history = self._kill()
        under_way = self._look(self._top, "signal")
        if disk is not None and history:
            numbers = self._choose(history, points)
            last = max(numbers)
            self._replay(disk, history[: last + 1], [(number, self._rng.choice(MODES)) for number in numbers])
            if self._rng.random() < 0.5:  # go on with what is found there
                shutil.rmtree(self._top)
                self._point(disk, self._rng.choice(MODES[1:]), f"operation {last}", self._top)
        return under_way

    def _choose_kind(self) -> str:
        # where there is nothing yet, mostly wait until there is: a load takes a second or more
        return self._rng.choice(STEPS) if self.acknowledged.versions or self._rng.random() < 0.2 else ""

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

    def _choose(self, history: list[Operation], points: int) -> list[int]:
        """Numbers of operations, no kind of operation more often than another: most are writes of RocksDB."""
        by_kind: dict[str, list[int]] = {}
        for number, operation in enumerate(history):
            by_kind.setdefault(operation.kind, []).append(number)
        return [self._rng.choice(by_kind[self._rng.choice(sorted(by_kind))]) for _ in range(points)]

    def _look(self, where: Path, how: str) -> str:
        acknowledged = copy.deepcopy(self._before)
        acknowledged.read((where / "journal").read_text().splitlines())
        under_way = " ".join(acknowledged.unfinished) or "nothing"
        with tierstore.open(where / "data", fold_grace_s=0.0, **SETTINGS) as store:
            try:
                check(acknowledged, store)
            except Wrong as error:
                raise Wrong(f"in {under_way}: {error}") from error
        self.points[how] += 1
        self.steps[under_way.split()[0]] += 1
        if where == self._top:
            self.acknowledged = acknowledged
        return under_way
