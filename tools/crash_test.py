"""Crash test of the store: kill it at any moment, over and over, and look whether anything acknowledged is missing.

`python -m tools.crash_test --rounds 200 --seed 1`, from the root of the repository.

A child process does a random stream of work on a store (deltas over two tables, loads, switches, canaries, labels, drops, restarts)
and notes each step in a journal outside of the store, before it begins and after it was acknowledged. It is killed
with SIGKILL at a random moment. Then the store is opened here and compared with what the journal and the stream,
which is a function of the seed, say that it must hold.

Children are forked from one process that has imported everything and opened nothing, so a round takes a fraction of
a second; what they do with the store goes through the public API only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tierstore.engine.overlay import OverlayTable
from tierstore.errors import Conflict, NotFound, SequenceGap
from tierstore.kernels import codec
from tierstore.tiers.host import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec

MODEL = "ctr"
DIM = {"user": 4, "item": 8}
ROWS = {"user": 300, "item": 600}
SPAN = 800  # deltas touch keys below
KEYS = np.arange(SPAN + 10)
SETTINGS: dict[str, Any] = {"host_budget": "1MiB", "disk_threads": 1, "load_workers": 1, "keep_versions": 2}
ROOT = Path(__file__).parents[1]


# --- the stream: what a seq or a version brings is a function of the seed


def changes(seed: int, seq: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By table: keys, and which of them are deleted. Both tables change in every delta."""
    rng = np.random.default_rng([seed, seq])
    keys = {table: rng.choice(SPAN, rng.integers(1, 40), replace=False) for table in DIM}
    return {table: (of, rng.random(len(of)) < 0.2) for table, of in keys.items()}


def values(table: str, stamp: int, keys: np.ndarray) -> np.ndarray:
    return np.repeat((stamp * 1000.0 + keys)[:, None], DIM[table], axis=1).astype(np.float32)


def delta(seed: int, seq: int, *, other: bool = False) -> bytes:
    buffer = io.BytesIO()
    event_time = datetime.fromtimestamp(seq, UTC)  # the same bytes each time
    with tierstore.DeltaWriter(buffer, model=MODEL, seq=seq, event_time=event_time) as writer:
        for table, (keys, gone) in changes(seed, seq).items():
            writer.upsert(table, keys[~gone], values(table, seq + other, keys[~gone]))
            writer.delete(table, keys[gone])
    return buffer.getvalue()


def write_snapshot(where: Path, version: int, delta_seq: int) -> None:
    with tierstore.SnapshotWriter(where, model=MODEL, version=version, delta_seq=delta_seq) as writer:
        for table, rows in ROWS.items():
            keys = np.arange(rows)
            writer.table(table, dim=DIM[table]).write(keys, values(table, -version, keys))
            writer.feature(table, table=table)


def expected(seed: int, version: int, delta_seq: int, last: int) -> dict[str, np.ndarray]:
    """By table: the row of each of KEYS, NaN where there is none: the snapshot and the deltas after `delta_seq`."""
    rows = {}
    for table in DIM:
        rows[table] = np.full((len(KEYS), DIM[table]), np.nan, np.float32)
        rows[table][: ROWS[table]] = values(table, -version, np.arange(ROWS[table]))
    for seq in range(delta_seq + 1, last + 1):
        for table, (keys, gone) in changes(seed, seq).items():
            rows[table][keys] = np.where(gone[:, None], np.nan, values(table, seq, keys))
    return rows


# --- the child

CHANCES = {"load": 0.0, "activate": 0.03, "drop": 0.055, "canary": 0.07, "label": 0.1, "promote": 0.11}  # in `step`
LABELS = 3


class Journal:
    """Lines outside of the store, `begin …` and `done …`. A killed process loses none: the kernel has them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @contextlib.contextmanager
    def step(self, *words: object) -> Any:
        text = " ".join(map(str, words))
        os.write(self._file, f"begin {text}\n".encode())
        yield words[0]
        os.write(self._file, f"done {text}\n".encode())


def work(root: Path, seed: int, shuffle: int, favour: str) -> None:
    """Until killed: open the store, do random steps, close it, open it again. Steps of the kind `favour` come often."""
    rng, journal = random.Random(shuffle), Journal(root / "journal")
    while True:
        with journal.step("open"):
            store = tierstore.open(root / "data", fold_grace_s=rng.choice([0.0, 0.0, 0.02, 60.0]), **SETTINGS)
        for _ in range(rng.randint(3, 12 if favour == "close" else 200)):
            chance = CHANCES[favour] if favour in CHANCES and rng.random() < 0.1 else rng.random()
            step(store, root, seed, rng, journal, chance)
        with journal.step("close"):
            store.close()


def step(store: tierstore.Store, root: Path, seed: int, rng: random.Random, journal: Journal, chance: float) -> None:
    status = store.status()["models"].get(
        MODEL, {"versions": [], "active_version": None, "log": {"start": None, "last": None}}
    )
    versions, active = [entry["version"] for entry in status["versions"]], status["active_version"]
    last, canary = status["log"]["last"], (status.get("canary") or {}).get("version")
    fresh = [entry["version"] for entry in status["versions"] if entry["state"] != "stale"][-3:]
    if not versions or chance < 0.01:
        version = max(versions, default=0) + 1
        delta_seq = max(status["log"]["start"] or 0, (last or 0) + rng.choice([-3, 0, 0, 4]))
        where = root / f"snapshot-{version}-{delta_seq}"
        if not where.exists():
            write_snapshot(where, version, delta_seq)
        with journal.step("load", version, delta_seq):
            store.load_snapshot(where)
    elif active is None or chance < 0.05:
        with journal.step("activate", version := rng.choice(fresh)):
            store.activate(MODEL, version)
    elif chance < 0.06 and len(versions) > 1:
        version = rng.choice([number for number in versions if number not in (active, canary)] or [0])
        # not found: more versions than are kept, and the store dropped it itself
        with journal.step("drop", version), contextlib.suppress(NotFound):
            store.drop(MODEL, version)
    elif chance < 0.065:
        with journal.step("deactivate"):
            store.deactivate(MODEL)
    elif chance < 0.09 and (others := [number for number in fresh if number != active]):
        version, percent = canary or rng.choice(others), rng.randint(0, 100)
        with journal.step("canary", version, percent):
            store.canary(MODEL, version, percent / 100)
    elif chance < 0.11:
        with journal.step("label", number := rng.randrange(LABELS), version := canary or active):
            store.label(MODEL, f"label{number}", version)
    elif chance < 0.12 and canary is not None:
        with journal.step("promote" if rng.random() < 0.5 else "withdraw") as verb:
            getattr(store, verb)(MODEL)
    else:
        seq = (last or 0) + 1
        data = delta(seed, seq)
        with journal.step("delta", seq):
            if not store.apply_delta(data).applied:
                raise AssertionError(f"delta {seq} is new, but was taken for one that is held")


def warm_kernels() -> None:
    """Load the compiled kernels once, for all children. Nothing here may start a thread: they do not survive a fork."""
    spec = TableSpec("warm", KeyType.INT64, 4, StorageDtype.FLOAT32)
    host = HostTable(spec, 1 << 20, default_vector=np.zeros(4, np.float32))
    keys, gone = np.arange(64), np.zeros(64, np.bool_)
    rows = codec.encode(np.zeros((64, 4), np.float32), spec.dtype)
    out, state = np.empty((64, 4), np.float32), np.zeros(64, np.uint8)
    overlay = OverlayTable(spec, keys, rows, gone)
    overlay.merged(overlay).lookup(keys, out, state, np.zeros(4, np.float32))
    host.warm(keys, rows)
    host.insert(keys, rows, 0)
    host.insert_absent(keys + 64, 0)
    host.update(keys, rows, gone)
    host.lookup(keys, out, np.zeros(64, np.uint8))
    host.resize(0.5)
    host.resize(1.0)
    host.hot_keys(64)
    host.close()


def nursery() -> None:
    """Fork a child for each line of stdin, print its pid, and reap it at the next line."""
    warm_kernels()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                work(Path(order["root"]), order["seed"], order["shuffle"], order["favour"])
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(1)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitpid(pid, 0)[1], flush=True)


# --- the parent


@dataclass(frozen=True)
class Routing:
    """Which version is active, which the canary with how many percent, and what the labels stand for."""

    active: int | None = None
    canary: int | None = None
    percent: int = 0
    labels: frozenset[tuple[int, int]] = frozenset()

    def after(self, verb: str, *numbers: int) -> Routing:
        """What it is once that is done."""
        if verb == "promote" or (verb == "activate" and numbers[0] == self.canary):
            return Routing(self.canary, labels=frozenset(pair for pair in self.labels if pair[1] == self.canary))
        if verb == "load" or (verb == "activate" and numbers[0] != self.active):
            return Routing(numbers[0])
        if verb == "deactivate":
            return Routing()
        if verb == "withdraw":
            return Routing(self.active, labels=frozenset(pair for pair in self.labels if pair[1] != self.canary))
        if verb == "canary":
            return replace(self, canary=numbers[0], percent=numbers[1])
        if verb == "label":
            others = {pair for pair in self.labels if pair[0] != numbers[0]}
            return replace(self, labels=frozenset({*others, (numbers[0], numbers[1])}))
        return self

    @classmethod
    def of(cls, status: dict[str, Any]) -> Routing:
        canary = status["canary"]
        free = {(int(name.removeprefix("label")), of) for name, of in status["labels"].items() if name[-1].isdigit()}
        if canary is None:
            return cls(status["active_version"], labels=frozenset(free))
        return cls(status["active_version"], canary["version"], round(canary["share"] * 100), frozenset(free))


@dataclass
class Known:
    """What the journal says. `begun` is the step that was under way, which may have happened or not."""

    seed: int
    last: int = 0
    routing: Routing = Routing()
    versions: dict[int, int] = field(default_factory=dict)  # version → delta_seq
    loaded: set[int] = field(default_factory=set)  # ever
    begun: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def read(self, lines: list[str]) -> None:
        for line in lines:
            kind, verb, *numbers = line.split()
            self.begun = [verb, *numbers] if kind == "begin" else []
            if kind == "done":
                self.done[verb] += 1
                self._apply(verb, *map(int, numbers))

    def _apply(self, verb: str, *numbers: int) -> None:
        self.routing = self.routing.after(verb, *numbers)
        if verb == "delta":
            self.last = numbers[0]
        elif verb == "load":
            self.versions[numbers[0]] = numbers[1]
            self.loaded.add(numbers[0])
            self.last = max(self.last, numbers[1])
        elif verb == "drop":
            self.versions.pop(numbers[0], None)


class Wrong(AssertionError):
    """The store does not hold what it must."""


def check(known: Known, store: tierstore.Store) -> None:
    """Compare the store with what is known, and take over what the killed step turned out to have done."""
    verb, numbers = (known.begun or [""])[0], [int(number) for number in known.begun[1:]]
    if MODEL not in store.models():
        _demand(not known.versions, f"the model is gone; it had versions {known.versions}")
        return
    status = store.status()["models"][MODEL]
    _demand(status["problem"] is None, f"problem: {status['problem']}")
    routing, last = Routing.of(status), status["log"]["last"] or 0
    active = routing.active
    versions = {entry["version"]: entry["delta_seq"] for entry in status["versions"]}

    may = {known.routing, known.routing.after(verb, *numbers)}
    _demand(routing in may, f"{routing} serves, {known.routing} did, and {known.begun} was under way")
    new = set(versions) - set(known.versions)
    _demand(not new or (verb == "load" and new == {numbers[0]}), f"version {new} came from nowhere")
    surplus = set(known.versions) - set(versions) - ({numbers[0]} if verb == "drop" else set())
    # the store drops what is older than the active one and the two before it
    _demand(surplus <= set(sorted(known.loaded)[:-3]), f"versions {surplus} are gone")
    ends = {known.last}
    if verb == "delta":
        ends.add(numbers[0])
    if verb == "load" and active == numbers[0]:
        ends.add(max(known.last, numbers[1]))
    _demand(last in ends, f"the log ends with {last}, acknowledged was {known.last}, under way {known.begun}")
    known.last, known.routing, known.versions, known.begun = last, routing, versions, []
    known.loaded |= set(versions)

    report = store.verify()
    _demand(report.ok, f"verify: {report.problems}")
    if active is None:
        return
    for version in (active, routing.canary):
        if version is not None:
            _check_rows(known, store, version)
    _check_order(known, store, status["log"]["start"])


def _check_rows(known: Known, store: tierstore.Store, version: int) -> None:
    want = expected(known.seed, version, known.versions[version], known.last)
    for _ in range(2):  # from disk, then from memory
        got = store.model(MODEL).lookup_many(dict.fromkeys(DIM, KEYS), version=version, return_found=True)
        for table, (rows, found) in got.items():
            there = ~np.isnan(want[table][:, 0])
            wrong = np.flatnonzero((found != there) | (rows != np.nan_to_num(want[table])).any(axis=1))
            if wrong.size:
                key = KEYS[wrong[0]]
                raise Wrong(
                    f"version {version} at {known.last}: {wrong.size} rows of {table!r} are wrong, the first of key {key}: "
                    f"expected {want[table][key][0]}, came {rows[key][0]} (found: {found[key]})"
                )


def _check_order(known: Known, store: tierstore.Store, start: int) -> None:
    with contextlib.suppress(SequenceGap):
        store.apply_delta(delta(known.seed, known.last + 2))
        raise Wrong("a gap was accepted")
    if known.last > start:
        _demand(not store.apply_delta(delta(known.seed, known.last)).applied, "a delta was applied twice")
        with contextlib.suppress(Conflict):
            store.apply_delta(delta(known.seed, known.last, other=True))
            raise Wrong("other content under a seq that is held was accepted")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


class CrashTest:
    """A store under `root` and the children that are killed on it. A context manager; `round` kills one and checks."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self._rng, self.known = root, random.Random(seed), Known(seed)
        self._journal, self._read = root / "journal", 0
        self._journal.touch()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tools.crash_test", "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(root / "stderr").open("wb"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> CrashTest:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait(30)

    def _say(self, line: str) -> int:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(line + "\n")
        self._nursery.stdin.flush()
        return int(self._nursery.stdout.readline())

    def round(self) -> str:
        """Start a child, kill it, open what it leaves. Returns the step that was under way. Raises Wrong."""
        order = {"root": str(self.root), "seed": self.known.seed, "shuffle": self._rng.getrandbits(32)}
        order["favour"] = favour = self._rng.choice(
            ["", "", "", "load", "activate", "drop", "close", "canary", "label", "promote"]
        )
        pid = self._say(json.dumps(order))
        try:
            self._await_the_moment(favour)
        finally:
            os.kill(pid, signal.SIGKILL)  # a zombie at worst: only the next line has it reaped
            status = self._say("")
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise Wrong(f"the child failed: {(self.root / 'stderr').read_text()}")
        self.known.read(self._lines())
        under_way = " ".join(self.known.begun) or "nothing"
        with tierstore.open(self.root / "data", fold_grace_s=0.0, **SETTINGS) as store:
            check(self.known, store)
        self._lines()
        return under_way

    def _lines(self) -> list[str]:
        """Whole lines of the journal that were not read yet."""
        content = self._journal.read_bytes()[self._read :]
        self._read += len(content)
        return content.decode().splitlines()

    def _await_the_moment(self, kind: str) -> None:
        """After so many steps, or within a step of some kind, and then some."""
        steps = self._rng.randint(0, 60)
        wanted, deadline = f"begin {kind}".encode(), time.monotonic() + 3.0
        while time.monotonic() < deadline:
            seen = self._journal.read_bytes()[self._read :]
            if (kind and wanted in seen) or (not kind and seen.count(b"done") >= steps):
                break
            time.sleep(0.001)
        time.sleep(self._rng.random() ** 3 * (1.5 if kind == "load" else 0.02))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument(
        "--keep", action="store_true", help="leave the directory for inspection where something is wrong"
    )
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nursery:
        nursery()
        return
    root = Path(tempfile.mkdtemp(prefix="tierstore-crash-"))
    print(f"seed {options.seed}, store in {root}", flush=True)
    killed: Counter[str] = Counter()
    keep = options.keep
    try:
        with CrashTest(root, options.seed) as test:
            for number in range(1, options.rounds + 1):
                killed[test.round().split()[0]] += 1
                if number % 20 == 0:
                    print(f"{number} kills, {test.known.last} deltas", flush=True)
        keep = False
    finally:
        print(f"killed in: {dict(killed.most_common())}; done: {dict(test.known.done.most_common())}")
        if not keep:
            shutil.rmtree(root)
    print("nothing acknowledged was lost")


if __name__ == "__main__":
    main()
