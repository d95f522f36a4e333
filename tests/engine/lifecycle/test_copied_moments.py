"""Copies whose files are of different moments, as `cp -a` beside a working store makes them: right for one moment, or refused.

A history of one model is written down moment by moment, in the middle of rollbacks too. A copy takes each part of the model's
directory as it was at one of two moments, in whichever way. What opens then must be a state that was acknowledged, and go on as one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.quick_build import in_process
from tierstore.errors import TierstoreError
from tierstore.formats import files
from tierstore.types import Progress

MODEL = "ctr"
ROWS = {"user": 20, "item": 30}
KEYS = np.arange(40)
OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 1, "fold_grace_s": 0.0, "keep_versions": 9}
FORKED = 7  # a delta that only the copy has is stamped so much higher

Seqs = frozenset[int]


def keys_of(seq: int) -> list[int]:
    """The items that a delta writes: some of them the next deltas write too."""
    return [seq % 40, (seq + 1) % 40, (seq + 2) % 40]


def rows_of(seq: int, forked: Collection[int]) -> np.ndarray:
    return scenes.vectors("item", seq + FORKED * (seq in forked), keys_of(seq))


def delta(seq: int, forked: Collection[int] = ()) -> bytes:
    return scenes.delta(seq, {"item": (keys_of(seq), rows_of(seq, forked))})


def expected(version: int, delta_seq: int, last: int, undone: Seqs, forked: Collection[int]) -> np.ndarray:
    """float32[40]: the first number of each item."""
    rows = np.zeros(len(KEYS), np.float32)
    rows[: ROWS["item"]] = scenes.vectors("item", version, KEYS[: ROWS["item"]])[:, 0]
    for seq in range(delta_seq + 1, last + 1):
        if seq not in undone:
            rows[keys_of(seq)] = rows_of(seq, forked)[:, 0]
    return rows


def undone_in(store: tierstore.Store) -> Seqs:
    ranges: list[list[int]] = store.status()["models"][MODEL]["undone"]
    return frozenset(seq for first, last in ranges for seq in range(first, last + 1))


class History(files.FileSystem):
    """The data directory of a store as it was at named moments, and which states were acknowledged."""

    def __init__(self, root: Path) -> None:
        self.root, self.data, self.moments = root, root / "data", dict[str, Path]()
        self.states = {(0, Seqs())}  # the newest delta, what is undone
        self.delta_seqs: dict[int, int] = {}
        self._thread = threading.get_ident()

    def moment(self, name: str, store: tierstore.Store | None = None) -> None:
        """Keep the directory as it is now; that of a `store` once its deltas are folded."""
        if store is not None:
            scenes.eventually(lambda: store.status()["models"][MODEL]["overlays"] == 0, "they are folded")
        to = self.moments[name] = self.root / f"moment-{len(self.moments)}"

        def copied() -> bool:
            shutil.rmtree(to, ignore_errors=True)
            before = self._files()
            with contextlib.suppress(shutil.Error):
                shutil.copytree(self.data, to, ignore=shutil.ignore_patterns(".trash-*", ".tmp-*"))
            return self._files() == before

        scenes.eventually(copied, "nothing in the background changes a file while it is copied")

    def _files(self) -> list[tuple[str, int, int]]:
        """All but what is being removed, with size and time."""
        found = []
        for folder, folders, names in os.walk(self.data):
            folders[:] = [name for name in folders if not name.startswith(".trash-")]
            for path in [Path(folder, name) for name in names]:
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    found.append((str(path), stat.st_size, stat.st_mtime_ns))
        return sorted(found)

    def rename(self, old: Path, new: Path) -> None:
        """Within `files.use`: a moment after each step of this thread."""
        super().rename(old, new)
        if threading.get_ident() == self._thread:
            self.moment(f"{len(self.moments)}: {new.name}")

    def load(self, store: tierstore.Store, version: int, delta_seq: int) -> None:
        where = scenes.write_snapshot(self.root, version, stamp=version, delta_seq=delta_seq, rows=ROWS)
        store.load_snapshot(where)
        self.delta_seqs[version] = delta_seq
        self.acknowledge(store)

    def send(self, store: tierstore.Store, *seqs: int) -> None:
        for seq in seqs:
            store.apply_delta(delta(seq))
            self.acknowledge(store)

    def acknowledge(self, store: tierstore.Store) -> None:
        self.states.add((store.status()["models"][MODEL]["log"]["last"], undone_in(store)))

    def roll_back(self, store: tierstore.Store, seq: int) -> None:
        with files.use(self):
            store.rollback(MODEL, to_seq=seq)
        self.acknowledge(store)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    history = History(tmp_path_factory.mktemp("history"))
    with in_process():
        with tierstore.open(history.data, **OPTIONS) as store:
            history.load(store, 1, 0)
            history.send(store, 1, 2, 3)
            history.load(store, 2, 1)
            history.send(store, 4, 5)
            history.moment("before", store)
            history.roll_back(store, 2)  # version 1 holds delta 3
            history.moment("undone", store)
            history.send(store, 6, 7)
            history.moment("deltas came", store)
            store.activate(MODEL, 1)
            history.moment("1 again", store)
            history.send(store, 8)
            store.activate(MODEL, 2)
            history.moment("2 again", store)
            store.activate(MODEL, 1)
            history.send(store, 9)
            history.moment("1 has more", store)
            history.roll_back(store, 4)  # before the first rollback: that is taken back
            history.moment("undone twice", store)
            history.roll_back(store, 9)
            history.send(store, 10)
            store.canary(MODEL, 2, 0.5)
            history.send(store, 11, 12)
            history.moment("a canary", store)
            store.promote(MODEL)
            history.load(store, 3, 20)
            history.send(store, 21, 22)
            history.moment("beyond the log", store)
            store.drop(MODEL, 1)
            history.send(store, 23)
            history.moment("dropped", store)
        with tierstore.open(history.data, **OPTIONS | {"fold_grace_s": 60.0, "log_retention_s": 0.0}) as store:
            history.send(store, 24, 25)
            scenes.housekeep(store)
            history.moment("pruned")
        yield history


# --- copies


def parts_of(model: Path) -> list[str]:
    """What is copied one after the other; a version's RocksDB apart from the files beside it."""
    parts = [name for name in sorted(os.listdir(model)) if not name.startswith(".")]
    return parts + [f"{name}/db" for name in parts if (model / name / "db").is_dir()]


def files_in(model: Path, part: str) -> list[str]:
    """The files of a part, below the model's directory."""
    if not (model / part).is_dir():
        return [part] if (model / part).exists() else []
    found = [path.relative_to(model).as_posix() for path in (model / part).rglob("*") if path.is_file()]
    return sorted(name for name in found if part.endswith("/db") or not name.startswith(f"{part}/db/"))


def differing(early: Path, late: Path) -> list[str]:
    """The parts of the earlier moment that are others at the later one."""

    def content(model: Path, part: str) -> list[tuple[str, int, int]]:
        stats = [(name, (model / name).stat()) for name in files_in(model, part)]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    return [part for part in parts_of(early) if content(early, part) != content(late, part)]


def mix(history: History, early: str, late: str, late_parts: Collection[str], to: Path) -> Path:
    """A copy that listed the model's directory at one moment, and came to some of the parts at a later one."""
    first, second = (history.moments[name] for name in (early, late))
    for name in ("LOCK", "format.json"):
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copy2(first / name, to / name)
    for part in parts_of(first / "models" / MODEL):
        model = (second if part in late_parts else first) / "models" / MODEL
        for name in files_in(model, part):
            target = to / "models" / MODEL / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(model / name, target)
    return to


def check_rows(history: History, store: tierstore.Store, last: int, undone: Seqs, forked: Collection[int] = ()) -> None:
    """What serves has the rows of that state."""
    for version in store.model(MODEL).served.versions:
        want = expected(version, history.delta_seqs[version], last, undone, forked)
        got = store.model(MODEL).lookup("item_id", KEYS, version=version)[:, 0]
        np.testing.assert_array_equal(got, want, err_msg=f"version {version} at {last} without {sorted(undone)}")


def check_copy(history: History, where: Path) -> str | None:
    """Open a copy, and go on with it as with one's own. Returns why it was refused, None where it was not."""
    with tierstore.open(where, **OPTIONS) as store:
        if MODEL not in store.models():
            return "there is no model"
        status = store.status()["models"][MODEL]
        if status["active_version"] is None:
            assert "was copied while a process had the original open" in status["problem"]
            return str(status["problem"])
        log, undone = status["log"], undone_in(store)
        states = {(last, frozenset(seq for seq in of if seq > log["start"])) for last, of in history.states}
        assert (log["last"], frozenset(seq for seq in undone if seq > log["start"])) in states
        check_rows(history, store, log["last"], undone)
        if log["entries"] < log["last"] - log["start"]:
            assert "missing" in status["problem"]
            return None
        forked = [log["last"] + 1, log["last"] + 2]
        for seq in forked:
            assert store.apply_delta(delta(seq, forked)).applied
        check_rows(history, store, forked[-1], undone, forked)
        for version in [entry["version"] for entry in status["versions"]]:
            with contextlib.suppress(TierstoreError):  # a stale one, or one that cannot be built again
                store.activate(MODEL, version)
                last = store.status()["models"][MODEL]["log"]["last"]
                check_rows(history, store, last, undone_in(store), forked)
        return None


@pytest.mark.thorough
def test_each_moment_by_itself_opens(history, tmp_path):
    for name in history.moments:
        assert check_copy(history, mix(history, name, name, (), tmp_path / "copy")) is None, name
        shutil.rmtree(tmp_path / "copy")


LOG = ("log", "log.end")
TORN = {
    "a log from after a rollback, and what was undone before": (
        ("before", "deltas came", LOG),
        r"state\.json is of an earlier moment than delta 6",
    ),
    "a rollback, and a log from before it": (
        ("2 again", "undone twice", ["state.json"]),
        r"state\.json is of a later moment .* delta 9 had come then, and the log ends with 8",
    ),
    "a document from before a version was built again": (
        ("deltas came", "1 again", ["state.json"]),
        r"which is damaged: \S+/1 is a whole line of the version, and \S+/1\.1 should be",
    ),
    "rows and a document from before the log began again": (
        ("a canary", "beyond the log", LOG),
        r"deltas 1 to 20 are missing, before 0+21-",
    ),
}


@pytest.mark.parametrize(("parts", "why"), TORN.values(), ids=TORN)
def test_parts_that_never_were_together_are_refused(history, tmp_path, parts, why):
    problem = check_copy(history, mix(history, *parts, tmp_path / "copy"))
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(problem)


def test_a_kept_version_with_deltas_that_the_copy_will_have_others_for_is_built_again(history, tmp_path):
    where = mix(history, "2 again", "1 has more", ["1.1/db", "1.1"], tmp_path / "copy")
    with tierstore.open(where, **OPTIONS) as store:
        states = {entry["version"]: entry["state"] for entry in store.status()["models"][MODEL]["versions"]}
        assert states == {1: "outdated", 2: "active"}
    assert check_copy(history, where) is None


def test_rows_without_deltas_that_the_copy_has_are_refused_or_built_again(quick_loads, tmp_path):
    """A version that was kept, holds none of what a rollback undoes, and is switched to afterwards."""
    history = History(tmp_path)
    with tierstore.open(history.data, **OPTIONS) as store:
        history.load(store, 1, 0)
        history.send(store, 1, 2)
        history.load(store, 2, 0)
        history.send(store, 3, 4, 5)
        history.moment("before", store)
        history.roll_back(store, 2)
        store.activate(MODEL, 1)
        history.moment("switched", store)
    whole = mix(history, "before", "switched", ["1", "1/db", "state.json"], tmp_path / "one")
    assert check_copy(history, whole) is None, "what is undone changes with what serves, in one document"
    assert check_copy(history, mix(history, "before", "switched", ["1", "1/db"], tmp_path / "two")) is None


def test_a_line_of_a_rollback_that_was_broken_off_does_not_pass_for_that_of_the_next(quick_loads, tmp_path):
    history = History(tmp_path)
    with tierstore.open(history.data, **OPTIONS) as store:
        history.load(store, 1, 0)
        history.send(store, 1, 2, 3, 4, 5)
        history.roll_back(store, 4)

        def break_off(step: Progress) -> None:
            if step.phase == "switch":
                history.moment("half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.rollback(MODEL, to_seq=1, progress=break_off)
        store.rollback(MODEL, to_seq=3)
        history.moment("after", store)
    late_parts = differing(*(history.moments[name] / "models" / MODEL for name in ("half", "after")))
    assert {"1.2/db", "state.json"} <= {*late_parts}
    problem = check_copy(history, mix(history, "half", "after", {*late_parts} - {"1.2/db"}, tmp_path / "copy"))
    assert "version 1 of 'ctr' served at another moment than that of its rows" in str(problem)


@pytest.mark.counted
def test_a_copy_of_two_moments_is_right_for_one_or_refused(history, tmp_path):
    rng, refused = random.Random(5), 0
    pairs = list(itertools.combinations(history.moments, 2))
    count = few_or_many(20, 250)
    for number in range(count):
        early, late = rng.choice(pairs)
        parts = differing(*(history.moments[name] / "models" / MODEL for name in (early, late)))
        late_parts = [part for part in parts if rng.random() < 0.5]
        try:
            refused += check_copy(history, mix(history, early, late, late_parts, tmp_path / "copy")) is not None
        except AssertionError as error:
            error.add_note(f"copy {number}: {late_parts} of {late!r}, the others of {early!r}")
            raise
        shutil.rmtree(tmp_path / "copy")
    assert 0 < refused < count
