"""A model that takes one matrix is served with inputs of its own names: rows of features, and what the request brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tierstore.errors import InvalidInput
from tierstore.onnx import join_inputs

WIDTHS = {"user_id": 2, "item_id": 3, "hour": 1}
RNG = np.random.default_rng(0)
USERS, ITEMS = (RNG.normal(size=(20, WIDTHS[name])).astype(np.float32) for name in ("user_id", "item_id"))


def doubled(name: str = "x", **ports: Any) -> bytes:
    """A matrix, twice."""
    return om.build([om.node("Add", f"{name} {name}", "y")], ports or {name: (om.FLOAT, ["n", 6])}, {"y": (om.FLOAT, ["n", 6])})  # fmt: skip


def served(tmp_path: Path, dense: bytes, users: Any, items: Any, hours: Any) -> Any:
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("user", dim=2).write(np.arange(20), USERS)
        snapshot.table("item", dim=3).write(np.arange(20), ITEMS)
        snapshot.feature("user_id", table="user")
        snapshot.feature("item_id", table="item")
        snapshot.dense(dense)
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "s")
        asked = {"user_id": users, "item_id": items, "hour": hours}
        scores = store.model("ctr").predict(asked)
        return scores if isinstance(scores, np.ndarray) else next(reversed(scores.values()))


def asked(n: int = 9) -> tuple[Any, Any, Any]:
    return RNG.integers(0, 20, n), RNG.integers(0, 20, n), RNG.random((n, 1)).astype(np.float32)


@pytest.mark.parametrize("name", ["x", "user_id", "joined"])
def test_the_inputs_are_its_columns_in_order(tmp_path: Path, name: str) -> None:
    users, items, hours = asked()
    scores = served(tmp_path, join_inputs(doubled(name), WIDTHS), users, items, hours)
    assert np.array_equal(scores, 2 * np.hstack([USERS[users], ITEMS[items], hours]))


def train() -> tuple[Any, Any]:
    x = np.hstack([USERS[RNG.integers(0, 20, 500)], ITEMS[RNG.integers(0, 20, 500)], RNG.random((500, 1))])
    return x.astype(np.float32), (x[:, 0] + x[:, 2] > x[:, 5]).astype(np.int32)


@pytest.mark.parametrize("zipmap", [False, True])
def test_lightgbm(tmp_path: Path, zipmap: bool) -> None:
    lightgbm, tools = pytest.importorskip("lightgbm"), pytest.importorskip("onnxmltools")
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = lightgbm.LGBMClassifier(n_estimators=5, num_leaves=7, verbose=-1, n_jobs=1).fit(*train())
    graph = tools.convert_lightgbm(
        model, initial_types=[("x", FloatTensorType([None, 6]))], zipmap=zipmap, target_opset=15
    )
    users, items, hours = asked()
    scores = served(tmp_path, join_inputs(graph, WIDTHS), users, items, hours)
    matrix = np.hstack([USERS[users], ITEMS[items], hours])
    np.testing.assert_allclose(scores, model.predict_proba(matrix), atol=1e-5)


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [0, 1]}, {"classlabels_strings": ["no", "yes"]}])
def test_maps_of_probabilities_are_served_as_a_matrix(tmp_path: Path, labels: Any) -> None:
    pair = [om.node("Slice", "x from to columns", "p")]
    zipmap = om.helper.make_node("ZipMap", ["p"], ["probabilities"], domain="ai.onnx.ml", **labels)
    key = om.INT64 if "classlabels_int64s" in labels else om.STRING
    tensor = om.helper.make_tensor_type_proto(om.FLOAT, [])
    maps = om.helper.make_sequence_type_proto(om.helper.make_map_type_proto(key, tensor))
    model = om.build(
        [*pair, zipmap],
        {"x": (om.FLOAT, ["n", 6])},
        {"probabilities": om.helper.make_value_info("probabilities", maps)},
        {"from": np.array([0]), "to": np.array([2]), "columns": np.array([1])},
    )
    users, items, hours = asked()
    scores = served(tmp_path, join_inputs(model, WIDTHS), users, items, hours)
    assert np.array_equal(scores, USERS[users])


def test_xgboost(tmp_path: Path) -> None:
    xgboost, tools = pytest.importorskip("xgboost"), pytest.importorskip("onnxmltools")
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = xgboost.XGBClassifier(n_estimators=5, max_depth=3, n_jobs=1).fit(*train())
    graph = tools.convert_xgboost(model, initial_types=[("x", FloatTensorType([None, 6]))], target_opset=15)
    users, items, hours = asked()
    scores = served(tmp_path, join_inputs(graph, WIDTHS), users, items, hours)
    matrix = np.hstack([USERS[users], ITEMS[items], hours])
    np.testing.assert_allclose(scores, model.predict_proba(matrix), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (doubled(), {"user_id": 2}, r"input 'x' has 6 columns, the inputs together 2 \(2 of user_id\)"),
        (doubled(), {"y": 6}, "'y' is already used inside the graph"),
        (doubled(), {"user_id": 0, "item_id": 6}, "expected a number of columns for each input"),
        (doubled(), {}, "expected a number of columns for each input"),
        (doubled("x", x=(om.FLOAT, ["n", 6]), z=(om.FLOAT, ["n"])), WIDTHS, "expected a model with one input, .*got x, z"),
        (doubled("x", x=(om.DOUBLE, ["n", 6])), WIDTHS, r"input 'x': expected float32 of shape \[n, width\]"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused(model: bytes, inputs: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        join_inputs(model, inputs)
