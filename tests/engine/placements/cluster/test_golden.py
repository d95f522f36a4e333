"""Golden examples of a model in a real cluster: the node that loads runs them on the cluster's rows, for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, has_version
from tierstore.errors import SnapshotError

pytestmark = pytest.mark.usefixtures("quick_loads")


def write(root: Path, version: int, *, off: float = 0.0) -> Path:
    with tierstore.SnapshotWriter(root / str(version), model="ctr", version=version) as writer:
        keys = np.arange(500)
        writer.table("user", dim=4).write(keys, scenes.vectors("user", version, keys))
        writer.feature("user_id", table="user")
        writer.golden({"user_id": keys[:64]}, {"user_id": scenes.vectors("user", version, keys[:64]) + off})
    return root / str(version)


def test_a_version_that_answers_otherwise_never_comes_to_the_cluster(open_node: OpenNode, tmp_path: Path) -> None:
    a, b = open_node("a"), open_node("b")
    a.load_snapshot(write(tmp_path, 1))
    scenes.eventually(lambda: "ctr" in b.models() and has_version(b, 1), "the other node serves it")
    (entry,) = b.status()["models"]["ctr"]["versions"]
    assert entry["golden"] is not None
    assert entry["golden"]["held"] == 1
    with pytest.raises(SnapshotError, match="the rows of feature 'user_id'"):
        a.load_snapshot(write(tmp_path, 2, off=1.0))
    assert [entry["version"] for entry in a.status()["models"]["ctr"]["versions"]] == [1]
    a.load_snapshot(write(tmp_path / "mended", 2))
    scenes.eventually(lambda: has_version(b, 2), "the other node serves it once it is right")
