"""The dense part of the demo's model as an ONNX graph. Free functions; needs the package `onnx` (extra `dense`).

Its inputs are the rows of the features, which the service looks up, and the event's context; its output is the logit of
`trainer.Dense.score`.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from tierstore.demo.clicklog import CONTEXT
from tierstore.demo.trainer import DIM, Dense

USER, ITEM, CLICKED = "user_id", "item_id", "clicked"  # the features; the last two read one table
CONTEXT_INPUT, LOGIT = "context", "logit"
_MODEL = f"""
<ir_version: 9, opset_import: ["" : 17]>
ctr (float[batch, {DIM}] {USER}, float[batch, {DIM}] {ITEM}, float[batch, {DIM}] {CLICKED}, float[batch, {CONTEXT}] {CONTEXT_INPUT})
=> (float[batch, 1] {LOGIT}) {{
    recent = Mul({CLICKED}, of_bag)
    taste = Add({USER}, recent)
    products = Mul({ITEM}, taste)
    affinity = MatMul(products, others)
    rows = Add({USER}, {ITEM})
    biases = MatMul(rows, first)
    circumstances = MatMul({CONTEXT_INPUT}, of_context)
    {LOGIT} = Sum(affinity, biases, circumstances, bias)
}}
"""


def can_predict() -> bool:
    """Whether graphs can be built and served here: the extra `dense` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))


def graph(dense: Dense) -> bytes:
    """The bytes of an ONNX model that scores rows of the features, [batch, DIM] each,
    and `context` [batch, CONTEXT].
    """
    from onnx import numpy_helper, parser

    first = np.eye(DIM, 1, dtype=np.float32)  # number 0 of a row is its bias
    constants = {
        "bias": dense.weights[:1],
        "of_context": dense.weights[1 : 1 + CONTEXT].reshape(CONTEXT, 1),
        "of_bag": dense.weights[1 + CONTEXT :],
        "first": first,
        "others": 1 - first,
    }
    model = parser.parse_model(_MODEL)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return bytes(model.SerializeToString())
