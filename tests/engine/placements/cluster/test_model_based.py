"""Two nodes over a real cluster keep what `docs/consistency.md` promises, whichever is asked, also where a master loses what it had."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import precondition, rule

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.model_based import KEYS, Stores, StoresAgainstHistory, check
from tests.engine.promises import History
from tests.redis_cluster import RedisCluster, redis_cluster
from tierstore.engine.model import Model
from tierstore.engine.store import Store
from tierstore.errors import NotFound
from tierstore.tiers.cluster.redis_keys import slot_of

NAMES = ("a", "b")
WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as servers:
        yield servers


class Nodes(Stores):
    """Each change goes to the node whose turn it is."""

    can = frozenset({"canary", "turns"})
    killable = folds = verifies = False
    cluster: RedisCluster

    def __init__(self, root: Path, options: dict[str, Any]) -> None:
        self.cluster.flush()
        self.turn = 0
        super().__init__(root, options)

    def begin(self) -> None:
        self.nodes = [self._open(name) for name in NAMES]

    def _open(self, name: str) -> Store:
        return tierstore.open(
            self.root / name, remote=self.cluster.url, host_budget="1MiB", load_workers=1, disk_threads=1, fold_grace_s=0.0,
            keep_versions=99, remote_timeout_s=20.0, remote_lease_s=2.0, **self.options,
        )  # fmt: skip

    def end(self) -> None:
        for store in self.nodes:
            store.close()

    def begin_anew(self) -> None:
        """The node whose turn it is has lost its directory."""
        self.nodes[self.turn].close()
        shutil.rmtree(self.root / NAMES[self.turn])
        self.nodes[self.turn] = self._open(NAMES[self.turn])

    def changed(self) -> list[Store]:
        return [self.nodes[self.turn]]

    def asked(self) -> list[Store]:
        return self.nodes

    def settle(self, history: History) -> None:
        wanted = tuple(number for number in (history.active, history.canary) if number is not None)

        def has_all(model: Model) -> bool:
            seen = min((view.seq for view in model.served.views), default=0)
            return model.served.versions == wanted and seen >= (history.last or 0)

        self._everywhere(has_all, f"{wanted} at {history.last}")
        self._everywhere(lambda model: set(model.versions) == set(history.versions), f"{set(history.versions)}")

    def _everywhere(self, holds: Callable[[Model], bool], what: str) -> None:
        for store in self.nodes:
            scenes.eventually(lambda store=store: "ctr" in store.models() and holds(store.model("ctr")), what, WAIT_S)  # type: ignore[misc]

    def await_dropped(self, number: int) -> None:
        def is_gone() -> bool:
            """Until then it is being dropped: to drop it again changes nothing."""
            try:
                self.changed()[0].drop("ctr", number)
            except NotFound:
                return True
            return False

        scenes.eventually(is_gone, f"version {number} is gone", WAIT_S)


class NodesAgainstHistory(StoresAgainstHistory):
    stores = Nodes
    of: Nodes

    def __init__(self) -> None:
        super().__init__()
        self._lost = False

    @rule()
    def the_other_node_is_next(self) -> None:
        self.of.turn = 1 - self.of.turn

    @rule()
    def a_node_begins_anew(self) -> None:
        self.of.begin_anew()

    @precondition(lambda self: not self._lost and (self.history.last or 0) % 4 == 3)
    @rule()
    def a_master_ends_with_a_delta_that_its_replica_lacks(self) -> None:
        """Once in a history, as it takes seconds. The nodes have the delta, and put it back."""
        self._lost = True
        cluster = self.of.cluster
        master = cluster.master_of(slot_of(b"ts:ctr"))
        cluster.replicate([master])
        replica = cluster.cut_replica(master)
        self.delta({"user": KEYS[:3], "item": KEYS[2:5]}, {"user": [], "item": []}, None, False)
        self.of.settle(self.history)
        cluster.lose(master, replica)
        master.start()
        cluster.wait_until_ok()
        data = self.history.deltas[self.history.last or 0].data
        scenes.eventually(lambda: self._is_held(data), "the cluster has it again", WAIT_S)

    def _is_held(self, data: bytes) -> bool:
        try:
            return not self.of.changed()[0].apply_delta(data).applied
        except (tierstore.Overloaded, tierstore.errors.StorageError):
            return False


@pytest.mark.thorough
def test_two_nodes_keep_their_promises(cluster: RedisCluster) -> None:
    Nodes.cluster = cluster
    check(NodesAgainstHistory, histories=few_or_many(3, 8), steps=12)
