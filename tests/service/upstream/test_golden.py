"""Golden examples of nodes behind a front: what a node refuses never comes to it, and what it serves answers as they expect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.service.upstream.scenes import COUNT, Scene, Upstream, of_share
from tierstore.engine.store import Store
from tierstore.errors import SnapshotError

om = pytest.importorskip("tests.predict.onnx_models", reason="needs the extra `dense`")

KEYS = np.arange(32)


def write(root: Path, version: int, off: float = 0.0) -> Path:
    """Each key is an example of its own, as a node may hold some partitions alone."""
    where = root / f"golden-{version}-{off}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        rows = scenes.vectors("item", version, np.arange(scenes.ROWS["item"]))
        writer.table("item", dim=8).write(np.arange(len(rows)), rows)
        writer.feature("item_id", table="item")
        writer.dense(om.linear({"item_id": np.arange(1.0, 9.0)}, bias=0.5))
        scores = rows @ np.arange(1.0, 9.0)[:, None] + 0.5 + off
        for key in KEYS:
            writer.golden({"item_id": [key]}, {"score": scores[[key]], "item_id": rows[[key]]})
    return where


def golden(store: Store, version: int) -> dict[str, int] | None:
    entries = store.status()["models"]["ctr"]["versions"]
    found: dict[str, int] | None = next(entry["golden"] for entry in entries if entry["version"] == version)
    return found


def answers(front: Store, version: int) -> None:
    rows = scenes.vectors("item", version, np.arange(scenes.ROWS["item"]))
    scores = front.model("ctr").predict({"item_id": KEYS})
    np.testing.assert_allclose(scores, rows[KEYS] @ np.arange(1.0, 9.0)[:, None] + 0.5, rtol=1e-5)


def load(nodes: list[Upstream], where: Path) -> None:
    for node in nodes:
        node.store.load_snapshot(where)


@pytest.mark.parametrize("shares", [[None], [(0, 3), (4, 7)]], ids=["one node", "two halves"])
def test_a_front_serves_what_its_nodes_held_to_their_examples_and_never_what_they_refused(
    scene: Scene, tmp_path: Path, shares: list[tuple[int, int] | None]
) -> None:
    nodes = [scene.node(own) for own in shares]
    load(nodes, write(tmp_path, 1))
    for node in nodes:
        report = golden(node.store, 1)
        assert report is not None
        own = len(of_share(KEYS, node.own))
        assert (report["held"], report["left_out"]) == (own, len(KEYS) - own)
        assert own > len(KEYS) // COUNT
    front = scene.front()
    answers(front, 1)
    assert golden(front, 1) in [golden(node.store, 1) for node in nodes], "a node's report, as the load was there"
    wrong = write(tmp_path, 2, off=1000.0)
    for node in nodes:
        with pytest.raises(SnapshotError, match=r"golden example \d+: output 'score'"):
            node.store.load_snapshot(wrong)
    assert [entry["version"] for entry in front.status()["models"]["ctr"]["versions"]] == [1]
    answers(front, 1)
    load(nodes, write(tmp_path, 2))
    scenes.eventually(lambda: front.model("ctr").active_version == 2, "the version that is right comes to the front")
    answers(front, 2)
