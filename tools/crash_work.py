"""The work that `tools/crash_test.py` kills: a random stream of steps on a store, each noted in a journal outside of it.

What a seq or a version brings is a function of the seed, so that anyone can say what a store must hold. Three tables, one
of them keyed by strings of which some share a hash; snapshots and some deltas bring a dense part that names its number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import random
from collections.abc import Collection
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.collisions import pair
from tierstore.engine.data.overlay import OverlayTable
from tierstore.errors import NotFound
from tierstore.kernels import codec
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec

MODEL = "ctr"
DIM = {"user": 4, "item": 8, "word": 3}
TABLES = tuple(DIM)
ROWS = {"user": 300, "item": 600, "word": 40}
SPAN = {"user": 800, "item": 800, "word": 40}  # deltas change keys below; all words are in the snapshots
WORDS = np.array([*(text for number in range(3) for text in pair(number)), *(f"w{n}" for n in range(44))], object)
NUMBERS = {table: np.arange(span + 10) for table, span in SPAN.items()}
KEYS: dict[str, Any] = NUMBERS | {"word": WORDS[NUMBERS["word"]].tolist()}
SETTINGS: dict[str, Any] = {"host_budget": "1MiB", "disk_threads": 1, "load_workers": 1, "keep_versions": 2}
DENSE_EVERY = 7  # deltas
HEAD = "second"
DENSE = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))


# --- the stream: what a seq or a version brings is a function of the seed


def changes(seed: int, seq: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The changes of a delta by table: keys, and which of them are deleted. All tables change in every delta."""
    rng = np.random.default_rng([seed, seq])
    keys = {table: rng.choice(SPAN[table], rng.integers(1, 40), replace=False) for table in DIM}
    return {table: (of, rng.random(len(of)) < 0.2) for table, of in keys.items()}


def named(table: str, numbers: np.ndarray) -> Any:
    """The keys of these numbers."""
    return WORDS[numbers].tolist() if table == "word" else numbers


def key_type(table: str) -> KeyType:
    return KeyType.STRING if table == "word" else KeyType.INT64


@cache
def dense_part(stamp: int) -> bytes:
    """score = sum of the user's row + stamp."""
    from tests.predict import onnx_models

    return onnx_models.linear({"user": np.ones(DIM["user"])}, bias=float(stamp))


def brings_dense(seq: int) -> bool:
    return DENSE and seq % DENSE_EVERY == 0


def has_head(stamp: int) -> bool:
    """Whether the dense part of that stamp comes with a head beside it; every second delta with one takes the head away."""
    return stamp <= 0 or stamp % (2 * DENSE_EVERY) != 0


def values(table: str, stamp: int, keys: np.ndarray) -> np.ndarray:
    return np.repeat((stamp * 1000.0 + keys)[:, None], DIM[table], axis=1).astype(np.float32)


def delta(seed: int, seq: int, *, other: bool = False, tables: Collection[str] = TABLES) -> bytes:
    buffer = io.BytesIO()
    event_time = datetime.fromtimestamp(seq, UTC)  # the same bytes each time
    with tierstore.DeltaWriter(buffer, model=MODEL, seq=seq, event_time=event_time) as writer:
        for table, (keys, gone) in changes(seed, seq).items():
            if table not in tables:
                continue
            kept, kind = keys[~gone], key_type(table)
            writer.upsert(table, named(table, kept), values(table, seq + other, kept), key=kind)
            writer.delete(table, named(table, keys[gone]), key=kind)
        if brings_dense(seq):
            writer.dense(dense_part(seq))
            writer.dense(dense_part(seq) if has_head(seq) else None, head=HEAD)
    return buffer.getvalue()


def write_snapshot(
    where: Path, version: int, delta_seq: int, *, model: str = MODEL, tables: Collection[str] = TABLES
) -> None:
    with tierstore.SnapshotWriter(where, model=model, version=version, delta_seq=delta_seq) as writer:
        for table in tables:
            keys = np.arange(ROWS[table])
            writer.table(table, dim=DIM[table], key=key_type(table)).write(
                named(table, keys), values(table, -version, keys)
            )
            writer.feature(table, table=table)
        if DENSE:
            writer.dense(dense_part(-version))
            writer.dense(dense_part(-version), head=HEAD)


Seqs = frozenset[int]


def expected(seed: int, version: int, delta_seq: int, last: int, undone: Seqs = frozenset()) -> dict[str, np.ndarray]:
    """The rows that are right, by table: of each of NUMBERS, NaN where there is none. Deltas count after `delta_seq`."""
    rows = {}
    for table in DIM:
        rows[table] = np.full((len(NUMBERS[table]), DIM[table]), np.nan, np.float32)
        rows[table][: ROWS[table]] = values(table, -version, np.arange(ROWS[table]))
    for seq in range(delta_seq + 1, last + 1):
        if seq in undone:
            continue
        for table, (keys, gone) in changes(seed, seq).items():
            rows[table][keys] = np.where(gone[:, None], np.nan, values(table, seq, keys))
    return rows


def expected_dense(version: int, delta_seq: int, last: int, undone: Seqs = frozenset()) -> int:
    """The number that the dense part of a version names: its own, or that of the newest delta that brought one."""
    seqs = range(last, delta_seq, -1)
    return next((seq for seq in seqs if brings_dense(seq) and seq not in undone), -version)


# --- the child

CHANCES = {  # in `step`
    "load": 0.0, "activate": 0.03, "rollback": 0.045, "drop": 0.055, "canary": 0.07, "label": 0.1, "promote": 0.115, "housekeeping": 0.13,
    "undo": 0.145,
}  # fmt: skip
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


def work(root: Path, *, seed: int, shuffle: int, favour: str) -> None:
    """Until killed, open the store, do random steps, close it, open it again. Steps of the kind `favour` come often."""
    rng, journal = random.Random(shuffle), Journal(root / "disk/journal")
    while True:
        with journal.step("open"):
            store = tierstore.open(root / "disk/data", fold_grace_s=rng.choice([0.0, 0.0, 0.02, 60.0]), **SETTINGS)
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
    start = status["log"]["start"] or 0
    fresh = [entry["version"] for entry in status["versions"] if _can_serve(entry, start)][-3:]
    if not versions or chance < 0.01:
        version = max(versions, default=0) + 1
        delta_seq = max(status["log"]["start"] or 0, (last or 0) + rng.choice([-3, 0, 0, 4]))
        where = root / f"snapshot-{version}-{delta_seq}"
        if not where.exists():
            write_snapshot(where, version, delta_seq)
        with journal.step("load", version, delta_seq):
            store.load_snapshot(where)
    elif active is not None and 0.04 <= chance < 0.05 and (back := _rollback_to(status, start)):
        with journal.step("rollback", back):
            store.rollback(MODEL)
    elif active is None or chance < 0.05:
        with journal.step("activate", version := rng.choice(fresh)):
            store.activate(MODEL, version)
    elif chance < 0.06 and (unserved := [number for number in versions if number not in (active, canary)]):
        version = rng.choice(unserved)
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
    elif 0.12 <= chance < 0.14:
        with journal.step("housekeeping"):
            store.model(MODEL).housekeeping.tasks.run()
    elif 0.14 <= chance < 0.15 and (seq := _undo_to(status, rng)) is not None:
        with journal.step("undo", seq):
            store.rollback(MODEL, to_seq=seq)
    else:
        seq = (last or 0) + 1
        together = rng.choice((0, 0, 2, 5))
        if together and not any(map(brings_dense, range(seq, seq + together))):
            run = [(each, delta(seed, each), None) for each in range(seq, seq + together)]
            with journal.step("run", seq, seq + together - 1):
                for each, data, _ in run[store.apply_run(MODEL, run) :]:  # a canary may be ahead
                    if not store.apply_delta(data).applied:
                        raise AssertionError(f"delta {each} is new, but was taken for one that is held")
            return
        data = delta(seed, seq)
        with journal.step("delta", seq):
            if not store.apply_delta(data).applied:
                raise AssertionError(f"delta {seq} is new, but was taken for one that is held")


def _can_serve(entry: dict[str, Any], start: int) -> bool:
    """Whether a version, as status has it, lacks no deltas, or can be built again without undone ones."""
    return entry["state"] != "stale" and (entry["state"] != "outdated" or start <= entry["delta_seq"])


def _undo_to(status: dict[str, Any], rng: random.Random) -> int | None:
    """A delta to roll back to, which changes something; None where that cannot be."""
    last, start = status["log"]["last"] or 0, status["log"]["start"] or 0
    bases = [entry["delta_seq"] for entry in status["versions"] if entry["version"] == status["active_version"]]
    seq = last - rng.randint(0, 9)
    possible = bool(bases) and start <= bases[0] <= seq
    ranges = status["undone"]
    changes = any(high == last for _, high in ranges) if seq == last else [seq + 1, last] not in ranges
    return seq if possible and changes else None


def _rollback_to(status: dict[str, Any], start: int) -> int | None:
    """The version that a rollback goes to; None where there is none, or it lacks deltas."""
    back = status["rollback_to"]
    of = {entry["version"]: entry for entry in status["versions"]}
    return back if back is not None and _can_serve(of[back], start) else None


def warm_kernels() -> None:
    """Load the compiled kernels once, for all children. Nothing here may start a thread: they do not survive a fork."""
    spec = TableSpec("warm", KeyType.INT64, 4, StorageDtype.FLOAT32)
    host = HostTable(spec, 1 << 20, default_vector=np.zeros(4, np.float32))
    keys, gone = np.arange(64), np.zeros(64, np.bool_)
    rows = codec.encode(np.zeros((64, 4), np.float32), spec.dtype)
    out = np.empty((64, 4), np.float32)
    overlay = OverlayTable(spec, keys, rows, gone)
    overlay.merged(overlay).prepare()
    host.warm(keys, rows)
    host.insert(keys, rows, 0)
    host.insert_absent(keys + 64, 0)
    host.update(keys, rows, gone)
    host.lookup(keys, out, np.zeros(64, np.uint8))
    host.resize(0.5)
    host.resize(1.0)
    host.hot_keys(64)
    host.close()
