"""A front of nodes keeps what `docs/consistency.md` promises, as the nodes do, whatever is done to them and wherever one is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.counts import few_or_many
from tests.engine.model_based import Stores, StoresAgainstHistory, check
from tests.service.upstream.scenes import NO_CACHE, Scene
from tierstore.engine.store import Store


class Front(Stores):
    """Two nodes with all rows, to which each change goes, and a front of both. The first one is killed."""

    can = frozenset({"undo"})

    def __init__(self, root: Path, options: dict[str, Any]) -> None:
        self.scene = Scene(root)
        self._budgets = ["1MiB", NO_CACHE]
        for _ in range(2):
            self.scene.node(host_budget="1MiB", disk_threads=1, keep_versions=99, **options)
        self._front = self.scene.front()
        self.root, self.options, self.data, self._grace_s = root, options, self.scene.nodes[0].data, 0.0

    def begin(self) -> None:
        self.scene.nodes[0].start()

    def end(self) -> None:
        self.scene.nodes[0].stop()

    def reopen(self, grace_s: float) -> None:
        """The first node, and the front: its cache is of another size each time."""
        super().reopen(0.0)
        self.scene.fronts.remove(self._front)
        self._front.close()
        self._budgets.reverse()
        self._front = self.scene.front(host_budget=self._budgets[0])

    def changed(self) -> list[Store]:
        return [node.store for node in self.scene.nodes]

    def asked(self) -> list[Store]:
        return [*self.changed(), self._front]

    def later(self) -> list[Store]:
        return [self._front]

    def close(self) -> None:
        self.scene.close()


class FrontAgainstHistory(StoresAgainstHistory):
    stores = Front


@pytest.mark.thorough
def test_a_front_keeps_the_promises_of_its_nodes() -> None:
    check(FrontAgainstHistory, histories=few_or_many(4, 8), steps=15)
