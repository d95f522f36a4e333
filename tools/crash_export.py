"""The crash test of exports: end the store at any moment of one, and look at what is there then.

A child exports a model as a snapshot and as a built version, in turn, while it applies deltas, and is killed. At each point of its
record, which are operations on an export,

- the store holds every delta that was acknowledged, and serves its rows;
- an export that was acknowledged is there. Each export loads and has the rows of its seq, or is refused as none;
- one that is refused keeps others from its directory, and once it is removed the export is made again, of what is served.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

import tierstore
from tierstore.errors import Conflict, SnapshotError
from tierstore.formats.snapshot.built import BuiltSnapshot, open_source
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.tiers.disk.sealed_file import open_sealed, read_blocks
from tools.crash_check import Wrong
from tools.crash_test import Rounds
from tools.crash_work import (
    DENSE,
    DIM,
    MODEL,
    NUMBERS,
    SETTINGS,
    Journal,
    delta,
    dense_part,
    expected,
    expected_dense,
    write_snapshot,
)
from tools.disk_trace import MODES, Disk, Mode

TABLES = ("user", "item")  # a model with string keys cannot be exported
KINDS = ("snapshot", "built")
DELTA_S = 0.02  # between two deltas
START_S = 60.0


def partitions_of(name: str) -> int | None:
    """How an export of this name is made: see `Store.export`."""
    return 1 if name.startswith("built") else None


# --- the child


def work(root: Path, *, seed: int, fold_grace_s: float, kinds: list[str]) -> None:
    """Export until killed, while a thread applies deltas. The model is there."""
    journal, exports = Journal(root / "disk/journal"), root / "disk/exports"
    with tierstore.open(root / "disk/data", fold_grace_s=fold_grace_s, **SETTINGS) as store:
        threading.Thread(target=_deltas, args=(store, seed, journal), daemon=True).start()
        for number, kind in enumerate(itertools.cycle(kinds)):
            name = f"{kind}-{number}"
            with journal.step("export", name):
                store.export(MODEL, exports / name, partitions=partitions_of(name))


def _deltas(store: tierstore.Store, seed: int, journal: Journal) -> None:
    for seq in itertools.count((store.model(MODEL).log.last or 0) + 1):
        with journal.step("delta", seq):
            store.apply_delta(delta(seed, seq, tables=TABLES))
        time.sleep(DELTA_S)


# --- what is found


class Said:
    """What the journal says at some moment."""

    def __init__(self, lines: list[str], last: int) -> None:
        self.last = self.begun = last  # of the deltas
        self.exports: dict[str, bool] = {}  # name → whether it was acknowledged
        self.first: dict[str, int] = {}  # name → the delta that was acknowledged when it began
        for kind, verb, what in (line.split() for line in lines):
            if verb == "export":
                self.exports[what] = kind == "done"
                self.first.setdefault(what, self.last)
            elif kind == "begin":
                self.begun = int(what)
            else:
                self.last = int(what)


def content(source: Snapshot) -> tuple[dict[str, np.ndarray], bytes | None]:
    """The rows of an export, as `expected` has them, all checksums verified, and its dense part."""
    rows = {}
    for table in TABLES:
        rows[table] = np.full((len(NUMBERS[table]), DIM[table]), np.nan, np.float32)
    if isinstance(source, BuiltSnapshot):
        for file in source.built.files:
            opened = open_sealed(Path(source.root / file.name), xxh3=file.xxh3, size=file.bytes)  # type: ignore[arg-type]
            try:
                keys, stored = read_blocks(opened, 0, len(opened.first_keys), None)
            finally:
                os.close(opened.fd)
            rows[file.table][keys] = np.ascontiguousarray(stored).view(np.float32)
    else:
        for table in source.manifest.tables:
            for shard in range(len(table.shards)):
                for batch in source.batches(table.name, shard):
                    rows[table.name][batch.keys] = batch.vectors
    dense = source.manifest.dense
    return rows, None if dense is None else Path(source.root / dense.path).read_bytes()  # type: ignore[arg-type]


class Crash(Rounds):
    proven = "nothing that was broken off passed for an export, nothing acknowledged was lost"

    def __init__(self, root: Path, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        (root / "disk/exports").mkdir(parents=True)
        write_snapshot(root / "snapshot", 1, 0, tables=TABLES)
        with tierstore.open(root / "disk/data", **SETTINGS) as store:
            store.load_snapshot(root / "snapshot")
        super().__init__(root, seed, "tools.crash_export")
        self._seed, self._kinds = seed, kinds
        self.found: Counter[str] = Counter()  # exports, by how they were found
        self._last = 0

    def one(self, number: int, most: int | None) -> None:
        self.round(exports=1 + number % 3, most=most)

    def said(self) -> str:
        return f"exports: {dict(self.found)}"

    def round(self, exports: int, *, most: int | None = None, load: bool = True) -> None:
        """Kill a child some time after so many exports, and look at what it leaves, and left after its operations.

        `most` bounds how many of these points there are; else it is every operation on exports, in every mode. The last
        moment without power is always one: what was acknowledged must be on the disk. With `load` another store loads
        one of the exports. Raises Wrong.
        """
        self._journal.write_bytes(b"")
        disk, exported = Disk(self._top), self._top / "exports"
        grace_s = self._rng.choice([0.0, 0.02, 60.0])
        self._nursery.start(traced=self.records, seed=self._seed, fold_grace_s=grace_s, kinds=list(self._kinds))
        self._await(exports)
        history = self._kill()
        of_exports = disk.numbers(history, lambda path: path.startswith(str(exported)))
        points: list[tuple[int, Mode]] = [(number, mode) for number in of_exports for mode in MODES]
        if most is not None:
            points = self._rng.sample(points, min(most, len(points)))
        self._replay(disk, history, [*points, (len(history) - 1, "flushed")])
        said = self._look(self._top, "signal")
        if load:
            self._load(exported / self._rng.choice([name for name, done in said.exports.items() if done]))
        self._last = said.last
        shutil.rmtree(exported)
        exported.mkdir()

    def _await(self, exports: int) -> None:
        """Wait until so many exports are done, and a random time of the next."""
        until = time.monotonic() + START_S * exports
        while sum(line.startswith("done export") for line in self._journal.read_text().splitlines()) < exports:
            if time.monotonic() > until:
                raise Wrong(f"{exports} exports were not done in {START_S * exports} s: {self._journal.read_text()}")
            time.sleep(0.001)
        time.sleep(self._rng.random() ** 2)

    def _look(self, where: Path, how: str) -> Said:
        """Check what is there, and go on with it."""
        said = Said((where / "journal").read_text().splitlines(), self._last)
        self.points[how] += 1
        with tierstore.open(where / "data", fold_grace_s=0.0, **SETTINGS) as store:
            said.last = self._check_served(said, store)
            for name, done in said.exports.items():
                if not self._is_whole(where / "exports" / name, said.first[name], said.begun, done):
                    self._export_again(store, where / "exports" / name)
        return said

    def _check_served(self, said: Said, store: tierstore.Store) -> int:
        last = store.model(MODEL).log.last or 0
        if last not in (said.last, said.begun):
            raise Wrong(f"the log ends with {last}; {said.last} was acknowledged, {said.begun} begun")
        want = expected(self._seed, 1, 0, last)
        got = store.model(MODEL).lookup_many({table: NUMBERS[table] for table in TABLES}, return_found=True)
        for table, (rows, there) in got.items():
            if not np.array_equal(np.where(there[:, None], rows, np.nan), want[table], equal_nan=True):
                raise Wrong(f"rows of {table!r} at {last} are wrong")
        if not (report := store.verify()).ok:
            raise Wrong(f"verify: {report.problems}")
        return last

    def _is_whole(self, path: Path, first: int, last: int, done: bool) -> bool:
        """Whether the export at `path` is one; then it is right, and of a delta from `first` to `last`."""
        try:
            source = open_source(path)
        except SnapshotError as error:
            if done:
                raise Wrong(f"{path.name} was acknowledged, and is refused: {error}") from error
            self.found["refused" if path.exists() else "not there"] += 1
            return False
        seq = source.manifest.delta_seq
        if not first <= seq <= last:
            raise Wrong(f"{path.name} is of {seq}; expected {first} to {last}")
        self._check_content(path, source, seq)
        self.found["whole"] += 1
        return True

    def _check_content(self, path: Path, source: Snapshot, seq: int) -> None:
        rows, dense = content(source)
        for table, want in expected(self._seed, 1, 0, seq).items():
            if table in TABLES and not np.array_equal(rows[table], want, equal_nan=True):
                raise Wrong(f"{path.name}, at {seq}: rows of {table!r} are wrong")
        if DENSE and dense != dense_part(expected_dense(1, 0, seq)):
            raise Wrong(f"{path.name}, at {seq}: another dense part")

    def _load(self, path: Path) -> None:
        seq = open_source(path).manifest.delta_seq
        with tierstore.open(self._root / "other", **SETTINGS) as store:
            store.load_snapshot(path)
            self._check_served(Said([], seq), store)
        shutil.rmtree(self._root / "other")
        self.found["loaded"] += 1

    def _export_again(self, store: tierstore.Store, path: Path) -> None:
        if path.exists():
            try:
                store.export(MODEL, path)
            except Conflict:
                shutil.rmtree(path)
            else:
                raise Wrong(f"{path.name}: an export wrote over what another had left")
        if partitions_of(path.name) and self._rng.random() > 0.1:
            return  # it takes seconds
        report = store.export(MODEL, path, partitions=partitions_of(path.name))
        if not self._is_whole(path, report.seq, store.model(MODEL).log.last or 0, done=True):
            raise Wrong(f"{path.name}: it was made again, and is none")
        self.found["made again"] += 1
