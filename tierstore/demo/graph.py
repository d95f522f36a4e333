"""The dense part of the demo's model as an ONNX graph, built node by node.

Its inputs are the rows of the features, looked up by the service, and the event's context; its output is the logit of
`trainer.Dense.score`. Free functions; any thread may call them. Needs the package `onnx` (extra `dense`).
"""

from __future__ import annotations

import importlib.util

import numpy as np

from tierstore.demo.clicklog import CONTEXT
from tierstore.demo.trainer import DIM, Dense

CONTEXT_INPUT, LOGIT = "context", "logit"
IR_VERSION, OPSET = 9, 17  # read by every release of ONNX Runtime that the extra takes


def can_predict() -> bool:
    """Whether graphs can be built and served here: the extra `dense` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))


def graph(dense: Dense, *, user: str, item: str, bag: str) -> bytes:
    """The bytes of an ONNX model that scores rows of these features, [batch, DIM] each, and `context` [batch, CONTEXT]."""
    from onnx import TensorProto, helper, numpy_helper

    weights = dense.weights
    constants = {
        "bias": weights[:1],
        "of_context": weights[1 : 1 + CONTEXT].reshape(CONTEXT, 1),
        "of_bag": weights[1 + CONTEXT :],
        "first": np.eye(1, DIM, dtype=np.float32).reshape(DIM, 1),  # picks number 0 of a row, which is its bias
        "others": 1 - np.eye(1, DIM, dtype=np.float32).reshape(DIM, 1),
    }
    nodes = [
        helper.make_node("Mul", [bag, "of_bag"], ["recent"]),
        helper.make_node("Add", [user, "recent"], ["taste"]),
        helper.make_node("Mul", [item, "taste"], ["products"]),
        helper.make_node("MatMul", ["products", "others"], ["affinity"]),
        helper.make_node("Add", [user, item], ["rows"]),
        helper.make_node("MatMul", ["rows", "first"], ["biases"]),
        helper.make_node("MatMul", [CONTEXT_INPUT, "of_context"], ["circumstances"]),
        helper.make_node("Sum", ["affinity", "biases", "circumstances", "bias"], [LOGIT]),
    ]
    widths = {user: DIM, item: DIM, bag: DIM, CONTEXT_INPUT: CONTEXT}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in widths.items()
    ]
    outputs = [helper.make_tensor_value_info(LOGIT, TensorProto.FLOAT, ["batch", 1])]
    held = [numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "ctr", inputs, outputs, held)
    model: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    ).SerializeToString()
    return model
