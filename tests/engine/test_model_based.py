"""The store against plain dictionaries: any order of loads, deltas, switches, rollbacks, canaries, drops and restarts gives the same rows."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tierstore
from tests.engine import quick_build, scenes
from tests.engine.test_store import folded
from tierstore.errors import Conflict, InvalidInput, NotFound, NotReady, SequenceGap, SnapshotError

DIM = {"user": 2, "item": 3}
KEYS = [-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 7, 64, 1 << 40]
ALL_KEYS = np.array([*KEYS, 12345, -777])
DEFAULT = {"user": np.zeros(2, np.float32), "item": np.array([9, 8, 7], np.float32)}

CAN_PREDICT = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))

Rows = dict[str, dict[int, np.ndarray]]
keys_of_a_table = st.lists(st.sampled_from(KEYS), max_size=6)


def row(table: str, stamp: int, key: int) -> np.ndarray:
    return (np.arange(DIM[table]) + (stamp * 100 + KEYS.index(key))).astype(np.float32)


class Delta:
    """A delta that was accepted."""

    def __init__(
        self, data: bytes, base_version: int | None, changes: dict[str, dict[int, np.ndarray | None]], dense: bool
    ) -> None:
        self.data, self.base_version, self.changes, self.dense = data, base_version, changes, dense


class Version:
    """What a version should hold: its snapshot, and of the deltas after it that are not undone all but those in `holes`."""

    def __init__(self, number: int, delta_seq: int, rows: Rows) -> None:
        self.number, self.delta_seq, self.rows = number, delta_seq, rows
        self.holes: list[tuple[int, int]] = []

    def applied(self, deltas: dict[int, Delta]) -> list[int]:
        """Those of the deltas that it holds, ascending."""
        return [
            number
            for number, delta in sorted(deltas.items())
            if self.delta_seq < number
            and not any(low < number <= high for low, high in self.holes)
            and delta.base_version in (None, self.number)
        ]

    def dense_of(self, deltas: dict[int, Delta]) -> int | None:
        """The delta that brought the newest dense part; snapshots bring none."""
        return max((number for number in self.applied(deltas) if deltas[number].dense), default=None)

    def with_deltas(self, deltas: dict[int, Delta]) -> Rows:
        rows = {table: dict(of) for table, of in self.rows.items()}
        for number in self.applied(deltas):
            for table, changes in deltas[number].changes.items():
                for key, new in changes.items():
                    if new is None:
                        rows[table].pop(key, None)
                    else:
                        rows[table][key] = new
        return rows


class StoreAgainstDicts(RuleBasedStateMachine):
    versions_seen = Bundle("versions")
    options: dict[str, Any] = {}  # noqa: RUF012 - settings beside the usual ones
    devices: tuple[str | None, ...] = (None,)  # where answers are asked for

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="model-based-"))
        self._quick = quick_build.in_process()
        self._quick.__enter__()
        self.versions: dict[int, Version] = {}
        self.active: int | None = None
        self.canary: int | None = None
        self.last: int | None = None
        self.deltas: dict[int, Delta] = {}
        self.undone: frozenset[int] = frozenset()
        self.undone_at: dict[int, frozenset[int]] = {}  # by delta: what was undone when it was applied
        self._snapshots = 0
        self._open(60.0)

    def _open(self, grace_s: float) -> None:
        self._grace_s = grace_s  # 0: folded at once; 60: deltas pile up in overlays
        self.store = tierstore.open(
            self.root / "data",
            host_budget="1MiB",
            disk_threads=1,
            fold_grace_s=grace_s,
            keep_versions=99,
            **self.options,
        )

    @property
    def start(self) -> int | None:
        """Where the log begins. It depends on how far versions were folded, so the model does not foretell it.

        Neither must what the machine does next: Hypothesis replays it.
        """
        if "ctr" not in self.store.models():
            return None
        start: int | None = self.store.status()["models"]["ctr"]["log"]["start"]
        return start

    def teardown(self) -> None:
        self.store.close()
        self._quick.__exit__(None, None, None)
        shutil.rmtree(self.root)

    # --- versions

    @initialize(target=versions_seen, canary=st.booleans())
    def first_load(self, canary: bool) -> Any:
        first = self.load(1, 0, dict.fromkeys(DIM, KEYS[:5]), True)
        if not canary:
            return first
        second = self.load(2, 0, dict.fromkeys(DIM, KEYS[3:8]), False)
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
        delta_seq = max(self.start or 0, (self.last or 0) + ahead)
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
            self._refused(Conflict, lambda: self.store.load_snapshot(where, activate=activate))
            return number
        assert self.store.load_snapshot(where, activate=activate) == number
        self.versions[number] = Version(number, delta_seq, rows)
        if activate:
            self._activated(number)
        return number

    @precondition(lambda self: self.versions)
    @rule()
    def a_snapshot_from_before_the_log(self) -> None:
        if self.start:
            self._snapshots += 1
            where = scenes.write_snapshot(self.root / f"old-{self._snapshots}", 9, delta_seq=self.start - 1)
            self._refused(SnapshotError, lambda: self.store.load_snapshot(where))

    def _activated(self, number: int) -> None:
        if number == self.active:
            return
        self.active, self.canary = number, None
        version = self.versions[number]
        if self.last is None or version.delta_seq > self.last:
            self._moved_on(version.delta_seq)

    def _moved_on(self, last: int) -> None:
        self.last = last
        self.undone_at[last] = self.undone

    def _beyond_repair(self, number: int) -> bool:
        """Whether the version holds what is undone, and the log does not reach back to its snapshot."""
        entries = self.store.status()["models"]["ctr"]["versions"]
        state = next(entry["state"] for entry in entries if entry["version"] == number)
        return state == "outdated" and (self.start or 0) > self.versions[number].delta_seq

    def _stale(self, number: int) -> tuple[int, int] | None:
        """What the version lacks: depends on how far it was folded, which is not for the model to know."""
        entries = self.store.status()["models"]["ctr"]["versions"]
        watermark = next(entry["watermark"] for entry in entries if entry["version"] == number)
        start = self.start
        return None if start is None or watermark >= start else (watermark, start)

    @rule(number=versions_seen, force=st.booleans())
    def activate(self, number: int, force: bool) -> None:
        if number not in self.versions:
            self._refused(NotFound, lambda: self.store.activate("ctr", number))
            return
        hole = None if number == self.active else self._stale(number)
        if number != self.active and self._beyond_repair(number):
            self._refused(Conflict, lambda: self.store.activate("ctr", number))
            return
        if hole is not None and not force:
            self._refused(Conflict, lambda: self.store.activate("ctr", number))
            return
        self.store.activate("ctr", number, force=force)
        if hole is not None:
            self.versions[number].holes.append(hole)
        self._activated(number)

    @precondition(lambda self: self.versions)
    @rule()
    def rollback(self) -> None:
        older = [number for number in self.versions if self.active is not None and number < self.active]
        if not older or self._stale(max(older)) is not None or self._beyond_repair(max(older)):
            self._refused(Conflict, lambda: self.store.rollback("ctr"))
            return
        assert self.store.rollback("ctr") == max(older)
        self._activated(max(older))

    @precondition(lambda self: self.active is not None)
    @rule(back=st.integers(-1, 6))
    def rollback_to(self, back: int) -> None:
        assert self.active is not None
        assert self.last is not None
        seq, base = self.last - back, self.versions[self.active].delta_seq
        if not base <= seq <= self.last:
            self._refused(Conflict, lambda: self.store.rollback("ctr", to_seq=seq))
            return
        # the state right after that delta was applied: what was undone then, and all that came since
        undone = self.undone_at[seq] | {*range(seq + 1, self.last + 1)}
        if undone != self.undone and (self.start or 0) > base:
            self._refused(Conflict, lambda: self.store.rollback("ctr", to_seq=seq))
            return
        assert self.store.rollback("ctr", to_seq=seq) == self.active
        if undone != self.undone:
            self.undone, self.canary = undone, None

    @rule(number=versions_seen)
    def drop(self, number: int) -> None:
        if number not in self.versions:
            self._refused(NotFound, lambda: self.store.drop("ctr", number))
        elif number in (self.active, self.canary):
            self._refused(Conflict, lambda: self.store.drop("ctr", number))
        else:
            self.store.drop("ctr", number)
            del self.versions[number]

    @precondition(lambda self: self.active is not None)
    @rule()
    def deactivate(self) -> None:
        self.store.deactivate("ctr")
        self.active = self.canary = None

    @rule(number=versions_seen, share=st.sampled_from([0.0, 0.5, 1.0]), force=st.booleans())
    def set_canary(self, number: int, share: float, force: bool) -> None:
        hole = None
        if number not in self.versions:
            self._refused(NotFound, lambda: self.store.canary("ctr", number, share))
            return
        if number != self.canary:
            hole = self._stale(number)
            if self._beyond_repair(number):
                self._refused(Conflict, lambda: self.store.canary("ctr", number, share))
                return
            if None not in (self.active, self.canary) or self.active in (None, number) or (hole and not force):
                self._refused(Conflict, lambda: self.store.canary("ctr", number, share, force=force))
                return
        self.store.canary("ctr", number, share, force=force)
        if hole is not None:
            self.versions[number].holes.append(hole)
        self.canary = number

    @precondition(lambda self: self.versions)
    @rule()
    def promote(self) -> None:
        if self.canary is None:
            self._refused(Conflict, lambda: self.store.promote("ctr"))
            return
        assert self.store.promote("ctr") == self.canary
        self._activated(self.canary)

    @precondition(lambda self: self.versions)
    @rule()
    def withdraw(self) -> None:
        if self.canary is None:
            self._refused(Conflict, lambda: self.store.withdraw("ctr"))
            return
        assert self.store.withdraw("ctr") == self.canary
        self.canary = None

    @staticmethod
    def _refused(kind: type[Exception], verb: Any) -> None:
        try:
            verb()
        except kind:
            return
        raise AssertionError(f"expected {kind.__name__}")

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
        seq = (self.last or 0) + 1
        changes: dict[str, dict[int, np.ndarray | None]] = {table: {} for table in DIM}
        written = {}
        for table, keys in upserts.items():
            if keys:  # later rows win
                rows = np.stack([row(table, seq, key) + at / 8 for at, key in enumerate(keys)])
                written[table] = (keys, rows)
                changes[table] |= dict(zip(keys, rows, strict=True))
        for table, keys in deletes.items():
            changes[table] |= dict.fromkeys(keys)
        gone = {table: keys for table, keys in deletes.items() if keys}
        model = self._dense_part(seq) if dense else None
        data = scenes.delta(seq, written, gone, base_version=base_version, dense=model)
        if self.active is None:
            self._refused(NotReady, lambda: self.store.apply_delta(data))
            return
        result = self.store.apply_delta(data)
        assert (result.seq, result.applied) == (seq, True)
        self._moved_on(seq)
        self.deltas[seq] = Delta(data, base_version, changes, dense)

    @staticmethod
    def _dense_part(seq: int) -> bytes:
        """The sum of a user's row and `seq`."""
        from tests.predict import onnx_models

        return onnx_models.linear({"user_id": np.ones(DIM["user"])}, bias=float(seq))

    @precondition(lambda self: self.deltas)
    @rule()
    def the_same_delta_again(self) -> None:
        seq = max(self.deltas)
        assert not self.store.apply_delta(self.deltas[seq].data).applied
        other = scenes.delta(seq, {"user": ([1], np.full((1, 2), -5, np.float32))})
        try:
            assert not self.store.apply_delta(other).applied
            assert (self.start or 0) >= seq, "only what is pruned cannot be compared"
        except Conflict:
            pass

    @precondition(lambda self: self.last is not None)
    @rule(beyond=st.integers(2, 9))
    def a_delta_out_of_turn(self, beyond: int) -> None:
        assert self.last is not None
        with pytest.raises(SequenceGap) as gap:
            self.store.apply_delta(scenes.delta(self.last + beyond, {"user": ([1], np.zeros((1, 2), np.float32))}))
        assert gap.value.expected_seq == self.last + 1

    @precondition(lambda self: self.active is not None and not self._grace_s)
    @rule()
    def wait_for_folding(self) -> None:
        folded(self.store)

    # --- the rest

    @rule(grace_s=st.sampled_from([0.0, 60.0]))
    def reopen(self, grace_s: float) -> None:
        self.store.close()
        self._open(grace_s)

    @precondition(lambda self: self.versions)
    @rule()
    def run_tasks(self) -> None:
        stale = {number for number in self.versions if number != self.active and self._stale(number)}
        shared = self.store.shared
        kept = shared.settings
        shared.settings = kept.model_copy(update={"log_retention_s": 0.0})
        self.store.model("ctr").housekeeping.run_tasks()
        shared.settings = kept
        assert stale == {number for number in self.versions if number != self.active and self._stale(number)}
        assert (self.start or 0) <= (self.last or 0)

    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert report.ok, report.problems
        assert report.versions == len(self.versions)

    @precondition(lambda self: self.active is not None)
    @rule(bags=st.lists(st.lists(st.sampled_from([*KEYS, 12345]), max_size=4), max_size=4), data=st.data())
    def pooled(self, bags: list[list[int]], data: st.DataObject) -> None:
        keys = np.array([key for bag in bags for key in bag], np.int64)
        offsets = np.cumsum([0, *map(len, bags)])[:-1]
        weights = np.array([data.draw(st.sampled_from([0, 1, 2])) for _ in keys], np.float32)
        item = self._expected()["item"]
        of_key = lambda key: np.zeros(3) if key == 7 else item.get(key, DEFAULT["item"])  # noqa: E731
        rows = np.array([weight * of_key(int(key)) for key, weight in zip(keys, weights, strict=True)]).reshape(-1, 3)
        expected = [part.sum(0) for part in np.split(rows, offsets[1:])] if bags else np.zeros((0, 3))
        for device in self.devices:
            ctr = self.store.model("ctr")
            pooled = ctr.lookup_bags("bag", keys, offsets, weights=weights, device=device, version="stable")
            np.testing.assert_allclose(pooled, expected, rtol=1e-6)

    def _expected(self) -> Rows:
        assert self.active is not None
        return self.versions[self.active].with_deltas(self._counting())

    def _counting(self) -> dict[int, Delta]:
        """The deltas that are not undone."""
        return {seq: delta for seq, delta in self.deltas.items() if seq not in self.undone}

    @invariant()
    def rows_are_as_in_the_dictionaries(self) -> None:
        if "ctr" not in self.store.models():
            return
        model = self.store.model("ctr")
        ranges = self.store.status()["models"]["ctr"]["undone"]
        assert {seq for first, last in ranges for seq in range(first, last + 1)} == self.undone
        assert model.active_version == self.active
        assert model.versions == sorted(self.versions)
        served = [number for number in (self.active, self.canary) if number is not None]
        assert list(model.served.versions) == served
        for number in served:
            self._is_as_in_the_dictionaries(number)

    def _is_as_in_the_dictionaries(self, number: int) -> None:
        version = self.versions[number]
        expected, dense = version.with_deltas(self._counting()), version.dense_of(self._counting())
        with self.store.model("ctr").view(number) as view:
            for table, device in itertools.product(DIM, self.devices):
                rows, found = view.lookup(f"{table}_id", ALL_KEYS, return_found=True, device=device)
                want = np.stack([expected[table].get(key, DEFAULT[table]) for key in ALL_KEYS.tolist()])
                np.testing.assert_array_equal(rows, want, err_msg=table)
                assert found.tolist() == [key in expected[table] for key in ALL_KEYS.tolist()]
            if dense is None:
                self._refused(InvalidInput, lambda: view.predict({"user_id": ALL_KEYS}))
                return
            users = [expected["user"].get(key, DEFAULT["user"]).sum() for key in ALL_KEYS.tolist()]
            np.testing.assert_array_equal(view.predict({"user_id": ALL_KEYS}).reshape(-1), np.float32(users) + dense)


def test_the_store_does_as_dictionaries_do():
    """Set STORE_MODEL_EXAMPLES to look for longer, in another place each time."""
    longer = int(os.environ.get("STORE_MODEL_EXAMPLES", 0))
    run_state_machine_as_test(
        StoreAgainstDicts,
        settings=settings(max_examples=longer or 40, stateful_step_count=30, derandomize=not longer, database=None),
    )
