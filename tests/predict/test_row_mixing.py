"""What the warm-up of a graph shows before it serves: rows that change each other, shapes, inputs that an exporter renamed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tierstore.errors import InvalidInput
from tierstore.predict.session import DenseSession
from tierstore.predict.warmup import mixes_rows, warm

Load = Callable[..., DenseSession]


def quantizing() -> bytes:
    """Scores by weights of 8 bits, whose input is quantized by the largest number of the whole batch."""
    nodes = [
        om.node("DynamicQuantizeLinear", "item_id", "q scale zero"),
        om.node("MatMulInteger", "q w zero", "sum"),
        om.node("Cast", "sum", "total", to=om.FLOAT),
        om.node("Mul", "total scale", "score"),
    ]
    ports = {"item_id": (om.FLOAT, ["batch", 8])}
    return om.build(nodes, ports, {"score": (om.FLOAT, ["batch", 1])}, {"w": np.full((8, 1), 3, np.int8)})


def normalizing() -> bytes:
    """Rows minus the mean of the batch."""
    nodes = [om.node("ReduceMean", "item_id", "mean", axes=[0], keepdims=1), om.node("Sub", "item_id mean", "score")]
    return om.build(nodes, {"item_id": (om.FLOAT, ["batch", 8])}, {"score": (om.FLOAT, ["batch", 8])})


@pytest.mark.parametrize("graph", [quantizing(), normalizing()], ids=["quantized at run time", "mean of the batch"])
def test_a_graph_that_mixes_the_rows_of_a_batch_is_noticed(load: Load, graph: bytes) -> None:
    assert mixes_rows(load(graph))


def test_one_that_scores_row_by_row_is_not_taken_for_it(load: Load) -> None:
    assert not mixes_rows(load(om.linear({"item_id": np.ones(8), "user_id": np.arange(4.0), "hour": [1.0]})))


def test_metadata_have_the_shape_that_the_warm_up_answered(load: Load) -> None:
    nodes = [om.node("MatMul", "item_id w", "score")]
    graph = om.build(nodes, {"item_id": (om.FLOAT, ["n", 8])}, {"score": (om.FLOAT, ["n"])}, {"w": np.ones((8, 1), np.float32)})  # fmt: skip
    session = load(graph)
    assert session.sizes("score") == (-1,)
    warm(session, lambda feature, lead: np.zeros((*lead, feature.dim), np.float32), lambda: None)
    assert session.sizes("score") == (-1, 1)


@pytest.mark.parametrize("name", ["item_id_orig", "item_id.1", "item_id_2"])
def test_an_input_that_was_renamed_from_a_feature_is_refused_by_the_features_name(load: Load, name: str) -> None:
    graph = om.build([om.node("Neg", name, "score")], {name: (om.FLOAT, ["n", 8])}, {"score": (om.FLOAT, ["n", 8])})
    with pytest.raises(InvalidInput, match=f"'{name}'.*no input takes those of feature 'item_id'"):
        load(graph)


def test_an_input_of_ones_own_that_only_looks_like_it_is_taken(load: Load) -> None:
    ports = {"item_id": (om.FLOAT, ["n", 8]), "item_id_2": (om.FLOAT, ["n", 8]), "user_id_1": (om.FLOAT, ["n", 2])}
    nodes = [om.node("Add", "item_id item_id_2", "sum"), om.node("Concat", "sum user_id_1", "score", axis=1)]
    session = load(om.build(nodes, ports, {"score": (om.FLOAT, ["n", 10])}))
    assert set(session.bindings.plain) == {"item_id_2", "user_id_1"}
