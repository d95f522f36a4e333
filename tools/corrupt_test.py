"""Corruption test of the store: damage any file of a data directory, and look that no row comes out wrong.

`python -m tools.corrupt_test --cases 500 --seed 1`, from the root of the repository.

A data directory is made once: a model with two versions, dense parts, a label, deltas that are folded, undone and deltas that are
only in the log, and another model beside it. Each case is a copy of it, a process of its own, and one damaged file: a
bit flipped, cut short, zeros, bytes behind its end, removed, or an older or another file of the same name in its
place, while the store is closed or while it is open. Demanded of each:

- The store starts, and the model whose files are whole answers all rows.
- Every answer of the damaged model is an error that says so, or has the rows of the version that is said to serve, with
  every delta that was acknowledged.
- What is not as before is named: by an error, by `status` or by `verify`. What may stay unnoticed is in `HARMLESS`.
- (One thing is not tried: an older sealed file copied over an open one, in place. It is noticed, but answers until it is put right.)
- With the file put back, the next start has everything (not where RocksDB has gone on writing beside it).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tierstore.errors import TierstoreError
from tools.crash_check import Wrong, check_rows
from tools.crash_work import (
    DENSE,
    DIM,
    KEYS,
    MODEL,
    SETTINGS,
    delta,
    expected,
    expected_dense,
    warm_kernels,
    write_snapshot,
)

SEED, LAST = 7, 30  # of the deltas
UNDONE = frozenset({18, 19, 20})
DELTA_SEQ = {1: 0, 2: 10}
OTHER = "other"
FOLDED_BY_S = 60.0

# what nothing is read from, or what only speeds a start up
HARMLESS = {"LOCK", "format.json", "db/LOCK", "db/LOG", "db/IDENTITY", "db/OPTIONS", "hot", "warmup", "audit"}
KINDS = [
    (r"(LOCK|format\.json)", r"\1"),
    (r"audit/.*", "audit"),
    (r"models/[^/]+/log/\d+-.*", "log entry"),
    (r"models/[^/]+/(state\.json|log\.end)", r"\1"),
    (r"models/[^/]+/\d+(?:\.\d+)?/(hot|warmup)/.*", r"\1"),
    (r"models/[^/]+/\d+(?:\.\d+)?/dense-\d+(\.\w+)?\.onnx", r"dense-N\1.onnx"),
    (r"models/[^/]+/\d+(?:\.\d+)?/db/base/.*", "db/base"),
    (r"models/[^/]+/\d+(?:\.\d+)?/db/[^/]+\.(sst|log)", r"db/*.\1"),
    (r"models/[^/]+/\d+(?:\.\d+)?/db/(LOG|MANIFEST|OPTIONS)[^/]*", r"db/\1"),
    (r"models/[^/]+/\d+(?:\.\d+)?/(.*)", r"\1"),
]


def kind_of(path: str) -> str:
    for pattern, kind in KINDS:
        if match := re.fullmatch(pattern, path):
            return match.expand(kind)
    raise ValueError(f"no kind of file: {path}")


def make(root: Path) -> None:
    """`root/whole`, and `root/older`: the same directory earlier."""
    for version, seq in DELTA_SEQ.items():
        write_snapshot(root / f"{MODEL}-{version}", version, seq)
    write_snapshot(root / OTHER, 1, 0, model=OTHER)
    whole = root / "whole"
    with tierstore.open(whole, fold_grace_s=0.0, **SETTINGS) as store:
        store.load_snapshot(root / OTHER)
        store.load_snapshot(root / f"{MODEL}-1")
        for seq in range(1, 11):
            store.apply_delta(delta(SEED, seq))
        _await_folds(store)
    shutil.copytree(whole, root / "older")
    with tierstore.open(whole, fold_grace_s=0.0, **SETTINGS) as store:
        store.load_snapshot(root / f"{MODEL}-2")
        store.label(MODEL, "best", 2)
        for seq in range(11, 21):
            store.apply_delta(delta(SEED, seq))
        _await_folds(store)
        store.rollback(MODEL, to_seq=17)
    with tierstore.open(whole, fold_grace_s=60.0, **SETTINGS) as store:
        for seq in range(21, LAST + 1):
            store.apply_delta(delta(SEED, seq))
        store.activate(MODEL, 1)
        store.activate(MODEL, 2)
        look(store, MODEL)  # so that something is hot


def _await_folds(store: tierstore.Store) -> None:
    until = time.monotonic() + FOLDED_BY_S
    while store.status()["models"][MODEL]["overlays"] and time.monotonic() < until:
        time.sleep(0.01)


def look(store: tierstore.Store, model: str) -> list[str]:
    """The errors of looking up every key, and of a predict. Raises Wrong where an answer is not what it must be."""
    errors = []
    of = store.model(model)
    active = store.status(model)["models"][model]["active_version"]
    last = LAST if model == MODEL else 0
    want = {} if active is None else expected(SEED, active, DELTA_SEQ[active] if model == MODEL else 0, last, UNDONE)
    for table in [*DIM, *DIM]:  # from disk, then from memory
        try:
            rows, found = of.lookup(table, KEYS[table], return_found=True)
        except TierstoreError as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        check_rows(f"{model} version {active}", table, want[table], rows, found)
    if DENSE:
        try:
            score = float(of.predict({"user": KEYS["user"][:1]}).item())
        except TierstoreError as error:
            return [*errors, f"{type(error).__name__}: {error}"]
        right = float(np.nan_to_num(want["user"][:1]).sum()) + expected_dense(
            active, DELTA_SEQ[active] if model == MODEL else 0, last, UNDONE
        )
        if not np.isclose(score, right):
            raise Wrong(f"{model} version {active}: scored {score}, expected {right}")
    return errors


# --- damage


def _flip(data: bytes, rng: random.Random, _: bytes) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"x"


def _zeros(data: bytes, rng: random.Random, _: bytes) -> bytes:
    at, size = rng.randrange(len(data) or 1), rng.choice([1, 16, 512, len(data)])
    return (data[:at] + bytes(size))[: len(data)] + data[at + size :]


def _longer(data: bytes, rng: random.Random, _: bytes) -> bytes:
    return data + rng.choice([b"\n", bytes(40), rng.randbytes(40), data])


DAMAGES: dict[str, Callable[[bytes, random.Random, bytes], bytes | None]] = {
    "flipped": _flip,
    "cut": lambda data, rng, _: data[: rng.choice([0, rng.randrange(len(data) or 1), max(0, len(data) - 1)])],
    "zeros": _zeros,
    "longer": _longer,
    "removed": lambda *_: None,
    "older": lambda data, rng, older: older,
}


def _files(root: Path) -> list[str]:
    """Paths within `root`. What is being removed meanwhile may be among them or not."""
    found = [os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names]
    return sorted(path for path in found if not any(part.startswith((".tmp-", ".trash-")) for part in path.split("/")))


class Case:
    """One file to damage; `run` is for a process that ends with it."""

    def __init__(self, root: Path, number: int, seed: int) -> None:
        self._root, self.where, self._rng = root, root / "case", random.Random(f"{seed}-{number}")
        kinds = sorted({kind_of(path) for path in _files(root / "whole")})
        self.kind, self.damage = self._rng.choice(kinds), self._rng.choice(sorted(DAMAGES))
        # an older file over an open one of the rows as loaded, in place, answers: its blocks are whole
        self.running = self._rng.random() < 0.5 and (self.kind, self.damage) != ("db/base", "older")
        self.file, self._original = "", b""

    def _damage(self) -> bool:
        """Damage a file of the kind; False where there is none, or it is as it was. An open file is changed in place."""
        of_kind = [path for path in _files(self.where) if kind_of(path) == self.kind]
        if not of_kind:
            return False
        self.file = self._rng.choice(of_kind)
        path = self.where / self.file
        self._original = path.read_bytes()
        content = DAMAGES[self.damage](self._original, self._rng, self._another())
        if content is None:
            path.unlink()
        else:
            with open(path, "r+b") as file:
                file.write(content)
                file.truncate()
        return content != self._original

    def _another(self) -> bytes:
        """An older content of the file, or that of one of the same name elsewhere."""
        earlier, name = self._root / "older" / self.file, Path(self.file).name
        others = [path for path in _files(self._root / "whole") if Path(path).name == name and path != self.file]
        if earlier.exists() and (not others or self._rng.random() < 0.7):
            return earlier.read_bytes()
        return (self._root / "whole" / self._rng.choice(others)).read_bytes() if others else b""

    def __str__(self) -> str:
        return f"{self.kind} {self.damage} while {'open' if self.running else 'closed'}"

    def run(self) -> dict[str, Any]:
        """Returns what was noticed. Raises Wrong."""
        noticed: list[str] = []
        if self.running:
            with self._open() as store:
                if not self._damage():
                    return {}
                noticed += self._check(store)
        elif not self._damage():
            return {}
        with self._open() as store:
            noticed += self._check(store)
        if not self.running and "/db/" not in self.file:
            (self.where / self.file).write_bytes(self._original)
            with self._open() as store:
                for model in (MODEL, OTHER):
                    if errors := look(store, model):
                        raise Wrong(f"put back, and still: {errors[0]}")
        return {"noticed": noticed, "file": self.file}

    def _open(self) -> tierstore.Store:
        try:
            return tierstore.open(self.where, fold_grace_s=60.0, **SETTINGS)
        except Exception as error:
            raise Wrong(f"the store does not start: {type(error).__name__}: {error}") from error

    def _check(self, store: tierstore.Store) -> list[str]:
        noticed = []
        for model in (MODEL, OTHER):
            if model not in store.models():
                raise Wrong(f"{model} is gone")
            errors = look(store, model)
            if errors and not self.file.startswith(f"models/{model}/"):
                raise Wrong(f"{model} is whole, and says {errors[0]}")
            noticed += errors
            status = store.status(model)["models"][model]
            problems = [entry["problem"] for entry in status["versions"]]
            noticed += [str(why) for why in (status["problem"], *problems) if why]
            # an older document is whole: nothing else says which version served
            before = self.kind == "state.json" and self.damage == "older"
            if status["active_version"] != {MODEL: 2, OTHER: 1}[model] and not noticed and not before:
                raise Wrong(f"version {status['active_version']} of {model} serves, and nothing says why")
        return noticed + list(store.verify().problems)


class CorruptTest:
    """Cases under `root`, each in a process of its own. A context manager."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self._seed = root, seed
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.unnoticed: Counter[str] = Counter()
        warm_kernels()
        if said := self._forked(lambda: make(root)).get("wrong"):
            raise Wrong(said)

    def case(self, number: int) -> None:
        case = Case(self.root, number, self._seed)
        shutil.copytree(self.root / "whole", case.where)
        try:
            outcome = self._forked(case.run)
        finally:
            shutil.rmtree(case.where)
        if not outcome:
            self.counts["nothing changed"] += 1
            return
        self.counts["cases"] += 1
        self.counts[f"{case.damage}"] += 1
        self.counts["while open" if case.running else "while closed"] += 1
        if why := outcome.get("wrong"):
            self.wrong.append(f"case {number}, {case}: {why}")
        elif outcome["noticed"]:
            self.counts["named"] += 1
        else:
            self.counts["harmless"] += 1
            self.unnoticed[f"{case.kind} {case.damage}"] += case.kind not in HARMLESS

    def _forked(self, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """What `work` returns in a child; a damaged file must not end this process."""
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            try:
                logging.disable()
                try:
                    document = work() or {}
                except Exception as error:  # noqa: BLE001
                    document = {"wrong": f"{type(error).__name__}: {error}"}
                report.write_text(json.dumps(document))
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status or not report.exists():
            return {"wrong": f"the process ended with {status}"}
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin none after that")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="tierstore-corrupt-") as root:
        test = CorruptTest(Path(root), options.seed)
        for number in range(options.cases) if options.only is None else (options.only,):
            if time.monotonic() > until:
                break
            test.case(number)
        print(f"seed {options.seed}: {dict(test.counts.most_common())}")
        print(f"not noticed, and right all the same: {dict(+test.unnoticed)}")
    for line in test.wrong:
        print(f"WRONG {line}")
    if test.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
