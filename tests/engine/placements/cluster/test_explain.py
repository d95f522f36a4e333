"""What `explain` says of a key whose row is in a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode
from tests.redis_cluster import RedisCluster
from tierstore.engine.placements.following.rows import RemoteRows

pytestmark = pytest.mark.usefixtures("quick_loads")


def test_a_key_names_its_server_and_what_that_and_memory_hold(
    open_node: OpenNode, cluster: RedisCluster, tmp_path: Path
) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(scenes.stamped(1, {"item": [3]}, deletes={"item": [4]}))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "the delta is folded", 60)
    written, deleted, old, never = store.explain("ctr", "item_id", [3, 4, 500, 99_999])["keys"]
    assert (written["state"], written["written"]["seq"], written["row"]) == ("present", 1, [67.0] * 8)
    assert (deleted["state"], deleted["found"]) == ("deleted", False)
    assert (old["tier"], old["state"], never["state"]) == ("remote", "present", "never_there")
    for entry in (written, deleted, old, never):
        assert entry["node"].rpartition(":")[2].isdigit()
        assert entry["partition"]["number"] < entry["partition"]["count"]
    store.model("ctr").lookup("item_id", [500])
    (hot,) = store.explain("ctr", "item_id", [500])["keys"]
    assert (hot["tier"], hot["agree"], hot["row"]) == ("host", True, old["row"])


def test_while_the_cluster_is_silent_memory_answers_and_other_keys_are_unreadable(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_node()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.model("ctr").lookup("item_id", [500])
    with store.model("ctr").view() as view:
        rows = view.open_version.rows
        assert isinstance(rows, RemoteRows)

        def silent(*_: object, **__: object) -> None:
            raise scenes.tierstore.errors.RemoteUnavailable("no server answers")

        for table in rows._tables.values():
            monkeypatch.setattr(table, "fetch", silent)
    hot, cold = store.explain("ctr", "item_id", [500, 600])["keys"]
    assert (hot["tier"], hot["found"], hot["agree"]) == ("host", True, None)
    assert (cold["state"], cold["default"], cold["why"]) == ("unreadable", False, "no server answers")
