"""Post-transforms of trees and linear models, which ONNX Runtime may apply otherwise than ONNX specifies.

Releases up to 1.32 at least apply LOGISTIC and SOFTMAX only where there are several targets
(https://github.com/microsoft/onnxruntime/issues/26596), and read the number that says which in a `TreeEnsemble` as that
of the other. Margins are then served for probabilities, and nothing else shows it. So the operator is tried, with
numbers whose answer is known. Free functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_DOMAIN = "ai.onnx.ml"
_REGRESSOR, _LINEAR, _LATEST = "TreeEnsembleRegressor", "LinearRegressor", "TreeEnsemble"
_TARGETS = {_REGRESSOR: "n_targets", _LATEST: "n_targets", _LINEAR: "targets"}  # the attribute with their number
_NUMBERED = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # by the number that `TreeEnsemble` has
_SPECIFIED: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "LOGISTIC": lambda margins: 1 / (1 + np.exp(-margins)),
    "SOFTMAX": lambda margins: np.exp(margins) / np.exp(margins).sum(),
}
_MARGINS = (0.5, -0.25)  # that the probe gets
_ATOL = 1e-5


class PostTransform(NamedTuple):
    """What an operator makes of its sums, `several` of them or one."""

    operator: str
    transform: str
    several: bool


def transforms_of(nodes: Iterable[Any]) -> frozenset[PostTransform]:
    """The post-transforms among these nodes whose answer a probe knows."""
    found = set()
    for node in nodes:
        if node.domain != _DOMAIN or node.op_type not in _TARGETS:
            continue
        given = {attribute.name: attribute for attribute in node.attribute}
        transform, targets = given.get("post_transform"), given.get(_TARGETS[node.op_type])
        if transform is None:
            continue
        name = transform.s.decode("utf-8", "replace")
        if node.op_type == _LATEST:
            name = _NUMBERED[transform.i] if 0 <= transform.i < len(_NUMBERED) else ""
        if name in _SPECIFIED:
            found.add(PostTransform(node.op_type, name, targets is not None and targets.i > 1))
    return frozenset(found)


def is_as_specified(of: PostTransform, answer: Callable[[bytes], Any]) -> bool:
    """Whether the ONNX Runtime here applies it so. `answer` runs a model on a number, and gives its output."""
    from onnx import TensorProto, helper

    margins = _MARGINS[: 1 + of.several]
    attributes = {_REGRESSOR: _leaf, _LINEAR: _intercepts, _LATEST: _trees}[of.operator](margins)
    latest = of.operator == _LATEST
    attributes["post_transform"] = _NUMBERED.index(of.transform) if latest else of.transform
    node = helper.make_node(of.operator, ["x"], ["y"], domain=_DOMAIN, **attributes)
    sizes = {"x": 1, "y": len(margins)}
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in sizes.items()]
    graph = helper.make_graph([node], "probe", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 5 if latest else 3)]
    got = answer(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return bool(np.allclose(np.ravel(got), _SPECIFIED[of.transform](np.array(margins)), rtol=0, atol=_ATOL))


def _intercepts(margins: tuple[float, ...]) -> dict[str, Any]:
    return {"coefficients": [0.0] * len(margins), "intercepts": list(margins), "targets": len(margins)}


def _leaf(margins: tuple[float, ...]) -> dict[str, Any]:
    """A tree of one leaf, with a weight for each target."""
    targets = len(margins)
    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    return {f"nodes_{name}": [0] for name in names} | {
        "nodes_modes": ["LEAF"],
        "nodes_values": [0.0],
        "n_targets": targets,
        "target_treeids": [0] * targets,
        "target_nodeids": [0] * targets,
        "target_ids": list(range(targets)),
        "target_weights": list(margins),
    }


def _trees(margins: tuple[float, ...]) -> dict[str, Any]:
    """A tree for each target, with two equal leaves."""
    from onnx import numpy_helper

    def tensor(values: list[Any], dtype: npt.DTypeLike) -> Any:
        return numpy_helper.from_array(np.array(values, dtype))

    trees = list(range(len(margins)))
    return {
        "n_targets": len(margins),
        "tree_roots": trees,
        "nodes_modes": tensor([0] * len(trees), np.uint8),
        "nodes_featureids": [0] * len(trees),
        "nodes_splits": tensor([0.0] * len(trees), np.float32),
        "nodes_truenodeids": [2 * tree for tree in trees],
        "nodes_falsenodeids": [2 * tree + 1 for tree in trees],
        "nodes_trueleafs": [1] * len(trees),
        "nodes_falseleafs": [1] * len(trees),
        "leaf_targetids": [tree for tree in trees for _ in range(2)],
        "leaf_weights": tensor([margin for margin in margins for _ in range(2)], np.float32),
    }
