"""What a user may not expect of a dense part is said at its load, and in the status: features that no input takes, and
post-transforms that ONNX Runtime applies otherwise than specified.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tests.predict.test_post_transforms import model, trees
from tierstore.engine.store import Store
from tierstore.status import dense_notes

pytestmark = pytest.mark.usefixtures("quick_loads")


def write(root: Path, version: int, **graphs: bytes) -> Path:
    """A snapshot whose dense part is `graphs["own"]`, and its heads the others."""
    where = root / str(version)
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        writer.table("item", dim=8).write(np.arange(4), np.ones((4, 8), np.float32))
        for name, combiner in (("item_id", None), ("clicked", "mean"), ("bought", "sum")):
            writer.feature(name, table="item", combiner=combiner)
        for head, graph in graphs.items():
            writer.dense(graph, head="" if head == "own" else head)
    return where


def entry(store: Store, version: int) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for one in store.status()["models"]["ctr"]["versions"] if one["version"] == version
    )
    return found


def takes(*features: str) -> bytes:
    return om.linear(dict.fromkeys(features, np.ones(8)))


def test_features_that_no_input_takes_are_named(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        store.load_snapshot(write(tmp_path, 1, own=takes("item_id")))
    said = "no input of the dense part takes the features clicked, bought"
    assert f"model ctr: version 1: {said}" in caplog.messages
    assert entry(store, 1)["unused_features"] == ["clicked", "bought"]
    assert dense_notes(entry(store, 1)) == [said]


def test_a_feature_that_one_of_the_heads_takes_is_not_named(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path, 1, own=takes("item_id"), cvr=takes("clicked", "bought")))
    assert entry(store, 1)["unused_features"] == []
    assert dense_notes(entry(store, 1)) == []


def test_all_are_named_where_the_graph_takes_none(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        store.load_snapshot(write(tmp_path, 1, own=takes("hour")))
    assert any(line.endswith("takes the features item_id, clicked, bought") for line in caplog.messages)
    assert entry(store, 1)["unused_features"] == ["item_id", "clicked", "bought"]


def test_without_a_dense_part_none_is_expected_to_be_taken(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path, 1))
    assert entry(store, 1)["unused_features"] == []


def test_the_delta_that_brings_the_input_counts(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path, 1, own=takes("item_id")))
    with tierstore.DeltaWriter(tmp_path / "1.arrow", model="ctr", seq=1) as delta:
        delta.dense(takes("item_id", "bought"))
    store.apply_delta(tmp_path / "1.arrow")
    assert entry(store, 1)["unused_features"] == ["clicked"]


def test_a_post_transform_that_is_applied_otherwise_is_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scores show whether it is: a later ONNX Runtime may apply it."""
    right = model(trees(2, "LOGISTIC"), 2)
    with caplog.at_level(logging.WARNING, "tierstore"):
        store.load_snapshot(write(tmp_path, 1, own=right, calibrated=model(trees(1, "LOGISTIC"), 1)))
    scores = store.model("ctr").predict({"item_id": np.arange(4)}, head="calibrated")
    margins = bool(np.allclose(scores, 0.5))
    assert margins or np.allclose(scores, 1 / (1 + np.exp(-0.5)))
    assert entry(store, 1)["misapplied_transforms"] == (["calibrated"] if margins else [])
    named = any(
        "'calibrated' has a TreeEnsembleRegressor with post_transform LOGISTIC" in one for one in caplog.messages
    )
    assert named == margins
    assert any("margins for probabilities" in note for note in dense_notes(entry(store, 1))) == margins
