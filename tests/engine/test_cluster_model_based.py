"""Two nodes over a real cluster against plain dictionaries: any order of loads, deltas, switches, canaries, drops and restarts, asked of either node."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
    precondition,
    rule,
    run_state_machine_as_test,
)

import tierstore
from tests.engine import scenes
from tests.engine.quick_build import in_process
from tests.redis_cluster import RedisCluster, redis_cluster
from tierstore.engine.store import Store
from tierstore.errors import Conflict, NotFound

KEYS = range(12)
DIM = 8
NODES = ("a", "b")
WAIT_S = 60.0

Rows = dict[int, np.ndarray]
node = st.sampled_from(NODES)
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with in_process(), redis_cluster() as servers:
        yield servers


def row(stamp: int, key: int) -> np.ndarray:
    return np.full(DIM, stamp * 100 + key, np.float32)


class NodesAgainstDicts(RuleBasedStateMachine):
    versions_seen = Bundle("versions")
    cluster: RedisCluster

    def __init__(self) -> None:
        super().__init__()
        self.cluster.flush()
        self.root = Path(tempfile.mkdtemp(prefix="cluster-model-"))
        self.versions: dict[int, tuple[int, Rows]] = {}  # (the delta that the snapshot has, its rows)
        self.deltas: dict[int, dict[int, np.ndarray | None]] = {}
        self.active = 0
        self.canary: int | None = None
        self.last = 0
        self._snapshots = 0
        self.nodes = {name: self._open(name) for name in NODES}

    def _open(self, name: str) -> Store:
        return tierstore.open(
            self.root / name, remote=self.cluster.url, host_budget="1MiB", load_workers=1, disk_threads=1, fold_grace_s=0.0,
            keep_versions=99, remote_timeout_s=20.0, remote_lease_s=2.0,
        )  # fmt: skip

    def teardown(self) -> None:
        for store in self.nodes.values():
            store.close()
        shutil.rmtree(self.root)

    def _everywhere(self, holds: Callable[[Any], bool], what: str) -> None:
        for name, store in self.nodes.items():
            scenes.eventually(
                lambda store=store: "ctr" in store.models() and holds(store.model("ctr")), f"{what} on {name}", WAIT_S
            )

    # --- versions

    @initialize(target=versions_seen, at=node)
    def first_load(self, at: str) -> int:
        return self.load(1, [*KEYS[:6]], True, at)

    @rule(target=versions_seen, number=st.integers(1, 4), keys=some_keys, activate=st.booleans(), at=node)
    def load(self, number: int, keys: list[int], activate: bool, at: str) -> int:
        self._snapshots += 1
        stamp, where = 1000 + self._snapshots, self.root / f"snapshot-{self._snapshots}"
        rows = {key: row(stamp, key) for key in keys or [0]}
        with tierstore.SnapshotWriter(where, model="ctr", version=number, delta_seq=self.last) as writer:
            writer.table("item", dim=DIM).write(np.array([*rows]), np.stack([*rows.values()]))
            writer.feature("item_id", table="item")
        if number in self.versions:
            with pytest.raises(Conflict):
                self.nodes[at].load_snapshot(where, activate=activate)
            return number
        assert self.nodes[at].load_snapshot(where, activate=activate) == number
        self.versions[number] = self.last, rows
        if activate:
            self.active, self.canary = number, None
        return number

    @rule(number=versions_seen, at=node)
    def activate(self, number: int, at: str) -> None:
        if number not in self.versions:
            with pytest.raises(NotFound):
                self.nodes[at].activate("ctr", number)
            return
        self.nodes[at].activate("ctr", number)
        if number != self.active:
            self.active, self.canary = number, None

    @rule(number=versions_seen, share=st.sampled_from((0.0, 0.5)), at=node)
    def serve_beside(self, number: int, share: float, at: str) -> None:
        if number not in self.versions:
            with pytest.raises((NotFound, Conflict)):
                self.nodes[at].canary("ctr", number, share)
        elif number == self.active or self.canary not in (None, number):
            with pytest.raises(Conflict):
                self.nodes[at].canary("ctr", number, share)
        else:
            self.nodes[at].canary("ctr", number, share)
            self.canary = number

    @rule(promote=st.booleans(), at=node)
    def end_the_canary(self, promote: bool, at: str) -> None:
        store = self.nodes[at]
        if self.canary is None:
            with pytest.raises(Conflict):
                store.promote("ctr") if promote else store.withdraw("ctr")
        elif promote:
            assert store.promote("ctr") == self.canary
            self.active, self.canary = self.canary, None
        else:
            assert store.withdraw("ctr") == self.canary
            self.canary = None

    @rule(at=node)
    def rollback(self, at: str) -> None:
        older = [number for number in self.versions if number < self.active]
        if not older:
            with pytest.raises(Conflict):
                self.nodes[at].rollback("ctr")
            return
        assert self.nodes[at].rollback("ctr") == max(older)
        self.active, self.canary = max(older), None

    @rule(number=versions_seen, at=node)
    def drop(self, number: int, at: str) -> None:
        if number not in self.versions:
            with pytest.raises(NotFound):
                self.nodes[at].drop("ctr", number)
        elif number in (self.active, self.canary):
            with pytest.raises(Conflict):
                self.nodes[at].drop("ctr", number)
        else:
            self.nodes[at].drop("ctr", number)
            scenes.eventually(lambda: self._is_gone(number, at), f"version {number} is gone", WAIT_S)
            del self.versions[number]

    def _is_gone(self, number: int, at: str) -> bool:
        """Until then it is being dropped: to drop it again changes nothing."""
        try:
            self.nodes[at].drop("ctr", number)
        except NotFound:
            return True
        return False

    # --- deltas, and the rest

    @rule(upserts=some_keys, deletes=some_keys, at=node, again=node)
    def delta(self, upserts: list[int], deletes: list[int], at: str, again: str) -> None:
        seq = self.last + 1
        written = {"item": (upserts, np.stack([row(seq, key) for key in upserts]))} if upserts else {}
        data = scenes.delta(seq, written, {"item": deletes} if deletes else {})
        assert self.nodes[at].apply_delta(data).applied
        assert not self.nodes[again].apply_delta(data).applied, "sent again, to whichever node"
        self.last = seq
        self.deltas[seq] = {key: row(seq, key) for key in upserts} | dict.fromkeys(deletes)

    @precondition(lambda self: self.deltas)
    @rule()
    def wait_until_rows_have_all_deltas(self) -> None:
        self._everywhere(lambda model: not overlays(model), "no overlay is left")

    @rule(at=node, empty=st.booleans())
    def restart(self, at: str, empty: bool) -> None:
        self.nodes[at].close()
        if empty:
            shutil.rmtree(self.root / at)
        self.nodes[at] = self._open(at)

    @invariant()
    def every_node_answers_as_the_dictionaries(self) -> None:
        if not self.versions:
            return
        wanted = tuple(number for number in (self.active, self.canary) if number is not None)
        self._everywhere(lambda model: model.served.versions == wanted, f"versions {wanted}")
        self._everywhere(lambda model: seen(model) >= self.last, f"delta {self.last}")
        for number in wanted:
            expected = self._rows_of(number)
            for name, store in self.nodes.items():
                got, found = store.model("ctr").lookup("item_id", np.array(KEYS), version=number, return_found=True)
                assert found.tolist() == [key in expected for key in KEYS], (name, number)
                want = np.stack([expected.get(key, np.zeros(DIM, np.float32)) for key in KEYS])
                np.testing.assert_array_equal(got, want, err_msg=f"{name}, version {number}")

    def _rows_of(self, number: int) -> Rows:
        begins, rows = self.versions[number]
        expected = dict(rows)
        for seq, changes in sorted(self.deltas.items()):
            for key, new in changes.items() if seq > begins else ():
                if new is None:
                    expected.pop(key, None)
                else:
                    expected[key] = new
        return expected


def seen(model: Any) -> int:
    """The newest delta that all of its answers have."""
    return min(int(view.seq) for view in model.served.views)


def overlays(model: Any) -> int:
    return sum(len(view.overlays) for view in model.served.views)


@pytest.mark.thorough
def test_two_nodes_do_as_dictionaries_do(cluster: RedisCluster) -> None:
    """Set STORE_MODEL_EXAMPLES to look for longer, in another place each time."""
    longer = int(os.environ.get("STORE_MODEL_EXAMPLES", 0))
    NodesAgainstDicts.cluster = cluster
    run_state_machine_as_test(
        NodesAgainstDicts,
        settings=settings(max_examples=longer or 8, stateful_step_count=12, derandomize=not longer, database=None),
    )
