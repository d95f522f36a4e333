"""Heads at a node in front of others: those of the nodes, whenever they come and the front begins."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.engine import scenes
from tests.service.upstream.scenes import Scene, await_watermark
from tierstore.errors import NotFound


def test_a_front_has_the_heads_of_its_nodes_and_follows_them(scene: Scene, heads: ModuleType, tmp_path: Path) -> None:
    scene.node().store.load_snapshot(heads.snapshot(tmp_path))
    first = scene.front()
    assert heads.every(first) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    scene.apply(scenes.delta(1, heads.rows(2), heads={"cvr": heads.graph("cvr", 20), "ltv": None}))
    for store in (first, scene.front()):
        await_watermark(store, 1)
        assert (heads.predict(store, ""), heads.predict(store, "cvr")) == ((2, 1), (2, 20))
        with pytest.raises(NotFound, match="no head 'ltv'"):
            heads.predict(store, "ltv")
    scene.apply(scenes.delta(2, heads={"ltv": heads.graph("ltv", 30)}))
    for store in (*scene.fronts, scene.front()):
        await_watermark(store, 2)
        assert heads.predict(store, "ltv") == (2, 30)
