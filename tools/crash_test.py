"""Crash test: end what works on a directory at any moment, over and over, and look whether anything acknowledged is missing.

`python -m tools.crash_test --rounds 40 --seed 1`, from the root of the repository, of a store's own work (`tools/crash_store.py`);
`--of export` while a model is exported (`tools/crash_export.py`), `--of kafka` while deltas come from a topic (`tools/crash_kafka.py`).

A child process works and notes each step in a journal, before it begins and after it was acknowledged. It is killed with SIGKILL at a
random moment, and what it leaves is opened here and compared with what the journal says that it must hold.

All that the child and its load helpers changed on disk is recorded meanwhile (`tools/disk_trace.py`, which takes a C
compiler). From that record the directory is made again as it was after single operations, and as it
may look if the power failed there; each of these is a point that is opened and compared too. Children are forked from one process that
has imported everything and opened nothing. Exit code 1, and the directory is left, where something is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Self

from tools.crash_check import Wrong
from tools.disk_trace import Disk, Mode, Operation
from tools.nursery import Nursery


class Rounds(ABC):
    """Children that are killed at their work on `root/disk`, and the points that are looked at. A context manager."""

    proven: str  # what is said in the end

    def __init__(self, root: Path, seed: int, module: str) -> None:
        self._root, self._top, self._rng = root, root / "disk", random.Random(seed)
        self._journal = self._top / "journal"
        self._journal.touch()
        self.points: Counter[str] = Counter()  # by how they were made, "killed" by SIGKILL as "signal"
        self.operations = 0
        self._nursery = Nursery(root, module)
        self.records = self._nursery.records  # whether operations are recorded; else there are kills alone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__()

    @abstractmethod
    def one(self, number: int, most: int | None) -> None:
        """Kill a child, and look at what it leaves, and left at `most` moments before; None: as many as are usual."""

    @abstractmethod
    def said(self) -> str:
        """What was done so far."""

    @abstractmethod
    def _look(self, where: Path, how: str) -> object:
        """Compare what is there with its journal, and count the point. Raises Wrong."""

    def _kill(self) -> list[Operation]:
        history = self._nursery.kill()
        self.operations += len(history)
        return history

    def _replay(self, disk: Disk, history: list[Operation], points: list[tuple[int, Mode]]) -> None:
        """Look at what there was after operations, each as it is found in some mode."""
        points = sorted(points)
        for number, operation in enumerate(history):
            disk.play(operation)
            while points and points[0][0] == number:
                self._point(disk, points.pop(0)[1], f"operation {number} of {len(history)}", self._root / "point")
                shutil.rmtree(self._root / "point")

    def _point(self, disk: Disk, mode: Mode, name: str, where: Path) -> None:
        disk.write(where, mode, self._rng)
        # of a journal nothing is flushed
        (where / "journal").write_bytes(bytes(disk.top.names["journal"].content))  # type: ignore[union-attr]
        try:
            self._look(where, mode)
        except Exception as error:
            shutil.copytree(where, self._root / "wrong")
            raise Wrong(f"{mode} after {name}; like it: {self._root / 'wrong'}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("store", "export", "kafka"), default="store", help="what is killed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--points", type=int, help="of each round; by default 25 of a store, every operation of the others"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin no round after that")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # poison of Kafka is parked at each point anew
    root, until = Path(tempfile.mkdtemp(prefix="tierstore-crash-")), time.monotonic() + options.seconds
    print(f"seed {options.seed}, under {root}", flush=True)
    test: Rounds
    with importlib.import_module(f"tools.crash_{options.of}").Crash(root, options.seed) as test:
        if not test.records:
            print("no C compiler: kills at random moments alone, no power loss")
        for number in range(options.rounds):
            if time.monotonic() < until:
                test.one(number, options.points)
                print(f"points: {dict(test.points)}, from {test.operations} file operations; {test.said()}", flush=True)
    shutil.rmtree(root)
    print(test.proven)


if __name__ == "__main__":
    main()
