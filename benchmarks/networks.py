"""Small models to rank with, as ONNX: those that most services of this kind run. Needs the extra `dense`.

Each takes the rows of its features, float32 [batch, dim], and gives a score [batch, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

DIM = 16
FEATURES = tuple(f"f{number:02}" for number in range(8))
MANY = tuple(f"f{number:02}" for number in range(16))
TREES, DEPTH = 100, 6


def hidden_layer(features: Sequence[str]) -> bytes:
    """One hidden layer of 128."""
    from onnx import helper, numpy_helper

    width = len(features) * DIM
    rng = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32), name)
        for name, shape in (("w1", (width, 128)), ("w2", (128, 1)))
    ]
    nodes = [
        helper.make_node("Concat", list(features), ["rows"], axis=1),
        helper.make_node("MatMul", ["rows", "w1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["score"]),
    ]
    return _model(features, nodes, weights)


def trees(features: Sequence[str]) -> bytes:
    """Gradient-boosted trees over all columns, as exporters of LightGBM and XGBoost write them."""
    from onnx import helper

    rng = np.random.default_rng(2)
    inner, nodes = 2**DEPTH - 1, 2 ** (DEPTH + 1) - 1  # a full tree, its nodes numbered by breadth
    ids = np.tile(np.arange(nodes), TREES)
    is_leaf = ids >= inner
    leaves = np.flatnonzero(is_leaf)
    of_tree = np.repeat(np.arange(TREES), nodes)
    ensemble = helper.make_node(
        "TreeEnsembleRegressor", ["rows"], ["z"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=of_tree.tolist(), nodes_nodeids=ids.tolist(),
        nodes_featureids=np.where(is_leaf, 0, rng.integers(0, len(features) * DIM, len(ids))).tolist(),
        nodes_modes=np.where(is_leaf, "LEAF", "BRANCH_LEQ").tolist(),
        nodes_values=np.where(is_leaf, 0, rng.standard_normal(len(ids))).astype(np.float32).tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, 2 * ids + 1).tolist(),
        nodes_falsenodeids=np.where(is_leaf, 0, 2 * ids + 2).tolist(),
        target_treeids=of_tree[leaves].tolist(), target_nodeids=ids[leaves].tolist(),
        target_ids=[0] * len(leaves), target_weights=(rng.standard_normal(len(leaves)) / TREES).astype(np.float32).tolist(),
    )  # fmt: skip
    concat = helper.make_node("Concat", list(features), ["rows"], axis=1)
    return _model(features, [concat, ensemble, helper.make_node("Sigmoid", ["z"], ["score"])], [])


def factorisation_machine(features: Sequence[str]) -> bytes:
    """Half of the squared sum of all rows less the sum of their squares: every pair of features' product."""
    from onnx import helper, numpy_helper

    squares = [f"{name}.squared" for name in features]
    nodes = [
        helper.make_node("Sum", list(features), ["sum"]),
        helper.make_node("Mul", ["sum", "sum"], ["of_sum"]),
        *(helper.make_node("Mul", [name, name], [square]) for name, square in zip(features, squares, strict=True)),
        helper.make_node("Sum", squares, ["of_each"]),
        helper.make_node("Sub", ["of_sum", "of_each"], ["twice"]),
        helper.make_node("ReduceSum", ["twice", "axis"], ["pairs"], keepdims=1),
        helper.make_node("Mul", ["pairs", "half"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["score"]),
    ]
    constants = {"axis": np.array([1], np.int64), "half": np.array([0.5 / DIM], np.float32)}
    return _model(features, nodes, [numpy_helper.from_array(value, name) for name, value in constants.items()])


def deep(features: Sequence[str]) -> bytes:
    """512 → 256 → 128 → 1, which costs most of a request by itself."""
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(7)
    nodes, weights = [helper.make_node("Concat", list(features), ["h0"], axis=1)], []
    for i, shape in enumerate(pairwise((len(features) * DIM, 512, 256, 128, 1))):
        values = (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], ["score" if shape[1] == 1 else f"m{i}"]))
        if shape[1] > 1:
            nodes.append(helper.make_node("Relu", [f"m{i}"], [f"h{i + 1}"]))
    return _model(features, nodes, weights)


NETWORKS: dict[str, tuple[tuple[str, ...], Callable[[Sequence[str]], bytes]]] = {
    "hidden_layer": (FEATURES, hidden_layer),
    "trees": (FEATURES, trees),
    "factorisation_machine": (FEATURES, factorisation_machine),
    "deep": (MANY, deep),
}


def _model(features: Sequence[str], nodes: list[Any], constants: list[Any]) -> bytes:
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", DIM]) for name in features]
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch", 1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph(nodes, "ranking", inputs, [score], constants)
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return made
