"""Stores against the promises: a driver of any order of loads, deltas, switches, rollbacks, canaries, drops, kills and restarts.

What is to be served is said by a history (`promises.py`). The driver is one; what it drives is a store on this machine, nodes over a
cluster (`placements/cluster/test_model_based.py`), or a front of nodes (`tests/service/upstream/test_model_based.py`). A subclass sets `stores`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

import tierstore
from tests.engine import quick_build, scenes
from tests.engine.promises import Delta, History, Rows
from tests.engine.test_store import folded
from tests.tiers.devices import to_host
from tierstore.engine.store import Store
from tierstore.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    SnapshotError,
    StorageError,
)

DIM = {"user": 2, "item": 3}
KEYS = [-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 7, 64, 1 << 40]
ALL_KEYS = np.array([*KEYS, 12345, -777])
DEFAULT = {"user": np.zeros(2, np.float32), "item": np.array([9, 8, 7], np.float32)}

CAN_PREDICT = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))

keys_of_a_table = st.lists(st.sampled_from(KEYS), max_size=6)


def row(table: str, stamp: int, key: int) -> np.ndarray:
    return (np.arange(DIM[table]) + (stamp * 100 + KEYS.index(key))).astype(np.float32)


class Stores:
    """What the driver changes and asks. This one is a store on this machine; others say what differs."""

    can = frozenset({"deactivate", "stale", "canary", "undo", "dense", "tasks"})
    killable = True
    first_grace_s = 60.0
    verifies = True  # rows that are on this machine

    def __init__(self, root: Path, options: dict[str, Any]) -> None:
        self.root, self.options, self.data = root, options, root / "data"
        self._grace_s = self.first_grace_s
        self.begin()

    def begin(self) -> None:
        """Open what is changed. Folded at once with a grace of 0; else deltas pile up in overlays."""
        self.store = tierstore.open(
            self.data, host_budget="1MiB", disk_threads=1, fold_grace_s=self._grace_s, keep_versions=99, **self.options
        )  # fmt: skip

    def end(self) -> None:
        self.store.close()

    def reopen(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.end()
        self.begin()

    @property
    def folds(self) -> bool:
        return not self._grace_s

    def changed(self) -> list[Store]:
        """The stores that the next change goes to; one that is killed comes first."""
        return [self.store]

    def asked(self) -> list[Store]:
        """The stores that answer."""
        return [self.store]

    def later(self) -> list[Store]:
        """Those of them that see a change after a while."""
        return []

    def settle(self, history: History) -> None:
        """Wait until all that answer have come so far; on one machine they have."""

    def await_dropped(self, number: int) -> None:
        """Wait until a version is gone; on one machine it is."""

    def close(self) -> None:
        self.end()

    def killed(self, change: Callable[[Store], Any], delay_s: float) -> bool:
        """Have a store killed while it does something; then it is started again. Whether that was acknowledged before.

        The directory is copied while all threads stand still: it is what a process that is killed leaves.
        """
        image, done = self.root / "image", threading.Event()

        def work() -> None:
            change(self.changed()[0])
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        done.wait(delay_s)
        acknowledged = done.is_set()
        # the signal is not at once heard by all threads: on a busy machine those that run go on for a while
        stopped = 'until [ -z "$(grep -L "^State:.*T (stopped)" /proc/"$1"/task/*/status)" ]; do sleep 0.001; done'
        script = f'kill -STOP "$1"; {stopped}; cp -a "$2" "$3"; kill -CONT "$1"'
        subprocess.run(["sh", "-c", script, "-", str(os.getpid()), str(self.data), str(image)], check=True)
        thread.join()
        self.end()
        shutil.rmtree(self.data)
        image.rename(self.data)
        self.begin()
        return acknowledged


def needs(what: str) -> Callable[[Any], Any]:
    """A rule for stores that can do something."""
    return precondition(lambda self: what in self.of.can)


class StoresAgainstHistory(RuleBasedStateMachine):
    versions_seen = Bundle("versions")
    stores: Callable[[Path, dict[str, Any]], Stores] = Stores
    options: dict[str, Any] = {}  # noqa: RUF012 - settings beside the usual ones
    devices: tuple[str | None, ...] = (None,)  # where answers are asked for

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="model-based-"))
        self._quick = quick_build.in_process()
        self._quick.__enter__()
        self.history = History()
        self._snapshots = 0
        self.of = type(self).stores(self.root, self.options)

    @property
    def store(self) -> Store:
        """One that answers."""
        return self.of.asked()[0]

    @property
    def versions(self) -> dict[int, Any]:
        return self.history.versions

    def _do(self, verb: Callable[[Store], Any]) -> Any:
        """Do it wherever such a change has to be done. What it returns, the same everywhere."""
        first, *others = [verb(store) for store in self.of.changed()]
        assert all(other == first for other in others), (first, others)
        return first

    def _refused(self, kind: type[Exception] | tuple[type[Exception], ...], verb: Callable[[Store], Any]) -> None:
        for store in self.of.changed():
            try:
                verb(store)
            except kind:
                continue
            raise AssertionError(f"expected {kind}")

    @property
    def start(self) -> int | None:
        """Where the log begins. It depends on how far versions were folded, so the history does not foretell it.

        Neither must what the machine does next: Hypothesis replays it.
        """
        if "stale" not in self.of.can or "ctr" not in self.store.models():
            return None
        start: int | None = self.store.status()["models"]["ctr"]["log"]["start"]
        return start

    def teardown(self) -> None:
        self.of.close()
        self._quick.__exit__(None, None, None)
        shutil.rmtree(self.root)

    # --- versions

    @initialize(target=versions_seen, canary=st.booleans())
    def first_load(self, canary: bool) -> Any:
        first = self.load(1, 0, dict.fromkeys(DIM, KEYS[:5]), True)
        if not canary:
            return first
        second = self.load(2, 0, dict.fromkeys(DIM, KEYS[3:8]), False)
        if "canary" in self.of.can:
            self.set_canary(second, 0.5, False)
        return multiple(first, second)

    @rule(
        target=versions_seen,
        number=st.integers(1, 5),
        ahead=st.sampled_from([-6, -2, 0, 0, 3]),
        keys=st.fixed_dictionaries(dict.fromkeys(DIM, keys_of_a_table)),
        activate=st.booleans(),
    )
    def load(self, number: int, ahead: int, keys: dict[str, list[int]], activate: bool) -> int:
        self._snapshots += 1
        ahead = ahead if "stale" in self.of.can else 0
        delta_seq = max(self.start or 0, (self.history.last or 0) + ahead)
        where = self.root / f"snapshot-{self._snapshots}"
        rows: Rows = {}
        with tierstore.SnapshotWriter(where, model="ctr", version=number, delta_seq=delta_seq) as writer:
            for table, dim in DIM.items():
                distinct = sorted({*keys[table]}, key=lambda key: (key % 7, key)) or [2]  # in no order
                rows[table] = {key: row(table, self._snapshots, key) for key in distinct}
                default: Any = "zeros" if table == "user" else DEFAULT["item"].tolist()
                writer.table(table, dim=dim, default=default).write(
                    np.array(distinct, np.int64), np.stack([*rows[table].values()])
                )
                writer.feature(f"{table}_id", table=table)
            writer.feature("bag", table="item", combiner="sum", padding_key=7)
        if number in self.versions:
            self._refused(Conflict, lambda store: store.load_snapshot(where, activate=activate))
            return number
        assert self._do(lambda store: store.load_snapshot(where, activate=activate)) == number
        self.history.loaded(number, delta_seq, rows, activate=activate)
        return number

    @precondition(lambda self: self.versions)
    @rule()
    def a_snapshot_from_before_the_log(self) -> None:
        if self.start:
            self._snapshots += 1
            where = scenes.write_snapshot(self.root / f"old-{self._snapshots}", 9, delta_seq=self.start - 1)
            self._refused(SnapshotError, lambda store: store.load_snapshot(where))

    def _beyond_repair(self, number: int) -> bool:
        """Whether the version holds what is undone, and the log does not reach back to its snapshot."""
        if "stale" not in self.of.can:
            return False
        entries = self.store.status()["models"]["ctr"]["versions"]
        state = next(entry["state"] for entry in entries if entry["version"] == number)
        return state == "outdated" and (self.start or 0) > self.versions[number].delta_seq

    def _stale(self, number: int) -> tuple[int, int] | None:
        """What the version lacks: depends on how far it was folded, which is not for the history to know."""
        if "stale" not in self.of.can:
            return None
        entries = self.store.status()["models"]["ctr"]["versions"]
        watermark = next(entry["watermark"] for entry in entries if entry["version"] == number)
        start = self.start
        return None if start is None or watermark >= start else (watermark, start)

    @rule(number=versions_seen, force=st.booleans())
    def activate(self, number: int, force: bool) -> None:
        force = force and "stale" in self.of.can
        if number not in self.versions:
            self._refused(NotFound, lambda store: store.activate("ctr", number))
            return
        hole = None if number == self.history.active else self._stale(number)
        if number != self.history.active and self._beyond_repair(number):
            self._refused(Conflict, lambda store: store.activate("ctr", number))
            return
        if hole is not None and not force:
            self._refused(Conflict, lambda store: store.activate("ctr", number))
            return
        self._do(lambda store: store.activate("ctr", number, force=force))
        if hole is not None:
            self.versions[number].holes.append(hole)
        self.history.activated(number)

    @precondition(lambda self: self.versions)
    @rule()
    def rollback(self) -> None:
        back = self.history.served_last
        if back is None or self._stale(back) is not None or self._beyond_repair(back):
            self._refused(Conflict, lambda store: store.rollback("ctr"))
            return
        assert self._do(lambda store: store.rollback("ctr")) == back
        self.history.activated(back, by_rollback=True)

    @needs("undo")
    @precondition(lambda self: self.history.active is not None)
    @rule(back=st.integers(-1, 6))
    def rollback_to(self, back: int) -> None:
        assert self.history.active is not None
        assert self.history.last is not None
        seq, base = self.history.last - back, self.versions[self.history.active].delta_seq
        if not base <= seq <= self.history.last:
            self._refused(Conflict if seq >= 0 else InvalidInput, lambda store: store.rollback("ctr", to_seq=seq))
            return
        undone = self.history.undone_by(seq)
        if undone != self.history.undone and (self.start or 0) > base:
            self._refused(Conflict, lambda store: store.rollback("ctr", to_seq=seq))
            return
        assert self._do(lambda store: store.rollback("ctr", to_seq=seq)) == self.history.active
        self.history.rolled_back_to(seq)

    @rule(number=versions_seen)
    def drop(self, number: int) -> None:
        if number not in self.versions:
            self._refused(NotFound, lambda store: store.drop("ctr", number))
        elif number in (self.history.active, self.history.canary):
            self._refused(Conflict, lambda store: store.drop("ctr", number))
        else:
            self._do(lambda store: store.drop("ctr", number))
            self.of.await_dropped(number)
            self.history.dropped(number)

    @needs("deactivate")
    @precondition(lambda self: self.history.active is not None)
    @rule()
    def deactivate(self) -> None:
        self._do(lambda store: store.deactivate("ctr"))
        self.history.deactivated()

    @needs("canary")
    @rule(number=versions_seen, share=st.sampled_from([0.0, 0.5, 1.0]), force=st.booleans())
    def set_canary(self, number: int, share: float, force: bool) -> None:
        force = force and "stale" in self.of.can
        hole = None
        if number not in self.versions:
            self._refused(NotFound, lambda store: store.canary("ctr", number, share))
            return
        if number != self.history.canary:
            hole = self._stale(number)
            if self._beyond_repair(number):
                self._refused(Conflict, lambda store: store.canary("ctr", number, share))
                return
            if (
                None not in (self.history.active, self.history.canary)
                or self.history.active in (None, number)
                or (hole and not force)
            ):
                self._refused(Conflict, lambda store: store.canary("ctr", number, share, force=force))
                return
        self._do(lambda store: store.canary("ctr", number, share, force=force))
        if hole is not None:
            self.versions[number].holes.append(hole)
        self.history.canary = number

    @needs("canary")
    @precondition(lambda self: self.versions)
    @rule()
    def promote(self) -> None:
        if self.history.canary is None:
            self._refused(Conflict, lambda store: store.promote("ctr"))
            return
        assert self._do(lambda store: store.promote("ctr")) == self.history.canary
        self.history.activated(self.history.canary)

    @needs("canary")
    @precondition(lambda self: self.versions)
    @rule()
    def withdraw(self) -> None:
        if self.history.canary is None:
            self._refused(Conflict, lambda store: store.withdraw("ctr"))
            return
        assert self._do(lambda store: store.withdraw("ctr")) == self.history.canary
        self.history.canary = None

    # --- deltas

    @rule(
        upserts=st.fixed_dictionaries(dict.fromkeys(DIM, keys_of_a_table)),
        deletes=st.fixed_dictionaries(dict.fromkeys(DIM, keys_of_a_table)),
        base_version=st.sampled_from([None, None, None, 1, 2, 3]),
        dense=st.sampled_from([False, False, CAN_PREDICT]),
    )
    def delta(
        self, upserts: dict[str, list[int]], deletes: dict[str, list[int]], base_version: int | None, dense: bool
    ) -> None:
        seq, delta = self._made(upserts, deletes, base_version, dense)
        if self.history.active is None:
            self._refused(NotReady, lambda store: store.apply_delta(delta.data))
            return
        result = self._do(lambda store: store.apply_delta(delta.data))
        assert (result.seq, result.applied) == (seq, True)
        self.history.acknowledged(seq, delta)

    def _made(
        self, upserts: dict[str, list[int]], deletes: dict[str, list[int]], base_version: int | None, dense: bool
    ) -> tuple[int, Delta]:
        """The next seq, and a delta of it."""
        seq, written = (self.history.last or 0) + 1, {}
        changes: dict[str, dict[int, np.ndarray | None]] = {table: {} for table in DIM}
        for table, keys in upserts.items():
            if keys:  # later rows win
                rows = np.stack([row(table, seq, key) + at / 8 for at, key in enumerate(keys)])
                written[table] = (keys, rows)
                changes[table] |= dict(zip(keys, rows, strict=True))
        for table, keys in deletes.items():
            changes[table] |= dict.fromkeys(keys)
        gone = {table: keys for table, keys in deletes.items() if keys}
        dense = dense and "dense" in self.of.can
        model = self._dense_part(seq) if dense else None
        twin = {"twin": model} if model else {}
        data = scenes.delta(seq, written, gone, base_version=base_version, dense=model, heads=twin)
        return seq, Delta(data, changes, base_version, dense)

    @staticmethod
    def _dense_part(seq: int) -> bytes:
        """The sum of a user's row and `seq`."""
        from tests.predict import onnx_models

        return onnx_models.linear({"user_id": np.ones(DIM["user"])}, bias=float(seq))

    @precondition(lambda self: self.history.deltas)
    @rule()
    def the_same_delta_again(self) -> None:
        seq = max(self.history.deltas)
        assert not self._do(lambda store: store.apply_delta(self.history.deltas[seq].data)).applied
        other = scenes.delta(seq, {"user": ([1], np.full((1, 2), -5, np.float32))})
        for store in self.of.changed():
            try:
                assert not store.apply_delta(other).applied
                assert (self.start or 0) >= seq, "only what is pruned cannot be compared"
            except Conflict:
                pass

    @precondition(lambda self: self.history.last is not None)
    @rule(beyond=st.integers(2, 9))
    def a_delta_out_of_turn(self, beyond: int) -> None:
        assert self.history.last is not None
        out_of_turn = scenes.delta(self.history.last + beyond, {"user": ([1], np.zeros((1, 2), np.float32))})
        for store in self.of.changed():
            with pytest.raises(SequenceGap) as gap:
                store.apply_delta(out_of_turn)
            assert gap.value.expected_seq == self.history.last + 1

    @precondition(lambda self: self.history.active is not None and self.of.folds)
    @rule()
    def wait_for_folding(self) -> None:
        for store in self.of.asked():
            folded(store)

    # --- kills: what was under way is done or not; sent again, it is done once

    @precondition(lambda self: self.of.killable and self.history.active is not None)
    @rule(delay_ms=st.sampled_from([0, 1, 3, 10, 60]), keys=keys_of_a_table, dense=st.booleans())
    def killed_in_a_delta(self, delay_ms: int, keys: list[int], dense: bool) -> None:
        seq, delta = self._made({"user": keys, "item": keys}, {}, None, dense and CAN_PREDICT)
        after = self.history.copy()
        after.acknowledged(seq, delta)
        self._killed(lambda store: store.apply_delta(delta.data), after, delay_ms)

    @needs("undo")
    @precondition(lambda self: self.of.killable and self.history.active is not None)
    @rule(delay_ms=st.sampled_from([0, 3, 10, 30, 60, 120]), back=st.integers(0, 4))
    def killed_in_a_rollback_to_a_delta(self, delay_ms: int, back: int) -> None:
        assert self.history.last is not None
        assert self.history.active is not None
        seq, base = self.history.last - back, self.versions[self.history.active].delta_seq
        if seq < base or (self.start or 0) > base:
            return
        after = self.history.copy()
        after.rolled_back_to(seq)
        self._killed(lambda store: store.rollback("ctr", to_seq=seq), after, delay_ms)

    @precondition(lambda self: self.of.killable)
    @rule(number=versions_seen, delay_ms=st.sampled_from([0, 3, 10, 30, 60, 120]))
    def killed_in_a_switch(self, number: int, delay_ms: int) -> None:
        if number not in self.versions or self._stale(number) is not None or self._beyond_repair(number):
            return
        after = self.history.copy()
        after.activated(number)
        self._killed(lambda store: store.activate("ctr", number), after, delay_ms)

    def _killed(self, change: Callable[[Store], Any], after: History, delay_ms: int) -> None:
        acknowledged = self.of.killed(change, delay_ms / 1000)
        store = self.of.changed()[0]
        wrong = [self._wrong(store, after)] + ([] if acknowledged else [self._wrong(store, self.history)])
        assert None in wrong, ("acknowledged" if acknowledged else "not acknowledged", wrong)
        for other in self.of.changed():
            change(other)
        self.history = after

    # --- the rest

    @rule(grace_s=st.sampled_from([0.0, 60.0]))
    def reopen(self, grace_s: float) -> None:
        self.of.reopen(grace_s)

    @needs("tasks")
    @precondition(lambda self: self.versions)
    @rule()
    def run_tasks(self) -> None:
        stale = {number for number in self.versions if number != self.history.active and self._stale(number)}
        shared = self.store.shared
        kept = shared.settings
        shared.settings = kept.model_copy(update={"log_retention_s": 0.0})
        self.store.model("ctr").housekeeping.tasks.run()
        shared.settings = kept
        assert stale == {number for number in self.versions if number != self.history.active and self._stale(number)}
        assert (self.start or 0) <= (self.history.last or 0)

    @rule()
    def verify(self) -> None:
        for store in self.of.changed():
            report = store.verify()
            assert report.versions == (len(self.versions) if self.of.verifies else 0)
            if self.versions or not self.of.verifies:
                assert report.ok, report.problems
            else:
                assert ["nothing was verified" in problem for problem in report.problems] == [True]

    @precondition(lambda self: self.history.active is not None)
    @rule(bags=st.lists(st.lists(st.sampled_from([*KEYS, 12345]), max_size=4), max_size=4), data=st.data())
    def pooled(self, bags: list[list[int]], data: st.DataObject) -> None:
        keys = np.array([key for bag in bags for key in bag], np.int64)
        offsets = np.cumsum([0, *map(len, bags)])[:-1]
        weights = np.array([data.draw(st.sampled_from([0, 1, 2])) for _ in keys], np.float32)
        item = self._expected()["item"]
        of_key = lambda key: np.zeros(3) if key == 7 else item.get(key, DEFAULT["item"])  # noqa: E731
        rows = np.array([weight * of_key(int(key)) for key, weight in zip(keys, weights, strict=True)]).reshape(-1, 3)
        expected = [part.sum(0) for part in np.split(rows, offsets[1:])] if bags else np.zeros((0, 3))
        for device, store in itertools.product(self.devices, self.of.asked()):
            ctr = store.model("ctr")
            pooled = ctr.lookup_bags("bag", keys, offsets, weights=weights, device=device, version="stable")
            np.testing.assert_allclose(to_host(pooled), expected, rtol=1e-6)

    def _expected(self) -> Rows:
        assert self.history.active is not None
        return self.history.rows_of(self.history.active)

    @invariant()
    def what_is_served_is_what_was_promised(self) -> None:
        if not self.versions:
            return
        self.of.settle(self.history)
        for store in self.of.asked():
            if (
                store in self.of.later()
            ):  # as long as it is behind it may be right, of rows that it has, and refuse others
                scenes.eventually(
                    lambda store=store: self._wrong(store, self.history) is None, "it has what was promised", 60.0
                )  # type: ignore[misc]
                continue
            wrong = self._wrong(store, self.history)
            assert wrong is None, wrong

    def _wrong(self, store: Store, history: History) -> str | None:
        """What of a store is not as a history says; None where all is."""
        try:
            self._check(store, history)
        except (
            AssertionError,
            NotFound,
            NotReady,
            Overloaded,
            StorageError,
        ) as error:  # a front that is behind refuses
            return str(error) or "not as promised"
        return None

    def _check(self, store: Store, history: History) -> None:
        model, status = store.model("ctr"), store.status()["models"]["ctr"]
        if store in self.of.changed():
            if "undo" in self.of.can:
                assert {seq for first, last in status["undone"] for seq in range(first, last + 1)} == history.undone
            assert model.active_version == history.active, "the active version"
            assert set(model.versions) == set(history.versions), "the versions"
        served = [number for number in (history.active, history.canary) if number is not None]
        assert list(model.served.versions) == served, "the versions that serve"
        for number in served:
            self._check_version(store, number, history)

    def _check_version(self, store: Store, number: int, history: History) -> None:
        expected, dense = history.rows_of(number), history.dense_of(number)
        with store.model("ctr").view(number) as view:
            for table, device in itertools.product(DIM, self.devices):
                rows, found = view.lookup(f"{table}_id", ALL_KEYS, return_found=True, device=device)
                want = np.stack([expected[table].get(key, DEFAULT[table]) for key in ALL_KEYS.tolist()])
                np.testing.assert_array_equal(to_host(rows), want, err_msg=f"{table} of {number}")
                assert found.tolist() == [key in expected[table] for key in ALL_KEYS.tolist()], f"keys of {table}"
            try:
                scores = view.predict({"user_id": ALL_KEYS}).reshape(-1)
            except InvalidInput:
                scores = None
            assert (scores is None) == (dense is None), "a dense part"
            if dense is not None:
                users = [expected["user"].get(key, DEFAULT["user"]).sum() for key in ALL_KEYS.tolist()]
                np.testing.assert_array_equal(scores, np.float32(users) + dense)
                np.testing.assert_array_equal(view.predict({"user_id": ALL_KEYS}, head="twin").reshape(-1), scores)


def check(machine: type[StoresAgainstHistory], histories: int, steps: int) -> None:
    """Try so many histories of so many steps. Set STORE_MODEL_EXAMPLES to try as many others, in another place each time."""
    longer = int(os.environ.get("STORE_MODEL_EXAMPLES", 0))
    run_machine(
        machine,
        settings=settings(
            max_examples=longer or histories, stateful_step_count=steps, derandomize=not longer, database=None,
            deadline=None, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
