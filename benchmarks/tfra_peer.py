"""Drives `tfra_table.py` from the benchmark: a contender in another process, whose blocks are timed over there.

One caller. While it waits for a command the other process sleeps, so the two never compete for a core.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternation import Taken
from benchmarks.contenders import Rows, keys_of

SCRIPT = Path(__file__).with_name("tfra_table.py")


class Unavailable(Exception):
    """TFRA cannot run here; says why."""


class TfraTable:
    """CuckooHashTable with all of `rows`. `block` runs batches of the keys given to `use`."""

    name = "TFRA CPU table"

    def __init__(self, process: subprocess.Popen[str], rows: Rows, folder: Path) -> None:
        self._process, self._folder = process, folder
        self.versions = self._heard()
        keys, vectors = folder / "keys.npy", folder / "vectors.npy"
        np.save(keys, keys_of(np.arange(rows.count)))
        np.save(vectors, rows.stored.view(np.float32))
        filled = self._ask(do="fill", keys=str(keys), vectors=str(vectors))
        vectors.unlink()
        if filled["rows"] != rows.count:
            raise RuntimeError(f"TFRA's table holds {filled['rows']} rows instead of {rows.count}")
        self.memory, self.rows_held = filled["memory"], rows.count

    def use(self, keys: np.ndarray, batch: int) -> None:
        """`keys` are cut into batches, which `block` numbers."""
        np.save(self._folder / "asked.npy", keys)
        self._ask(do="batches", keys=str(self._folder / "asked.npy"), batch=batch)

    def answer(self, number: int) -> Any:
        """What it answers for this batch."""
        self._ask(do="answer", number=number, to=str(self._folder / "answer.npy"))
        return np.load(self._folder / "answer.npy")

    def block(self, first: int, calls: int) -> Taken:
        return Taken(**self._ask(do="run", first=first, calls=calls))

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"{SCRIPT.name} ended with code {self._process.wait()}")
        heard = json.loads(line)
        if "failed" in heard:
            raise Unavailable(heard["failed"])
        return heard


@contextmanager
def tfra_table(python: Path, threads: int, rows: Rows, folder: Path) -> Iterator[TfraTable]:
    """TFRA's table in a process of the interpreter `python`. Raises Unavailable."""
    if not python.exists():
        raise Unavailable(f"there is no {python}; `make bench-tfra` tries to make it")
    with subprocess.Popen(
        [str(python), str(SCRIPT), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            yield TfraTable(process, rows, folder)
        finally:
            process.kill()
