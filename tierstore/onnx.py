"""Prepares ONNX graphs as dense parts: `join_inputs` for models with one input matrix, as LightGBM and XGBoost export.

Needs the extra `dense`. Pure functions; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.errors import InvalidInput, MissingExtra
from tierstore.formats.onnx_file import read_onnx

__all__ = ["join_inputs"]


def join_inputs(model: bytes | str | Path | Any, inputs: Mapping[str, int]) -> bytes:
    """The same model with several inputs in place of its one matrix: they are its columns, in order.

    >>> graph = onnxmltools.convert_lightgbm(ranker, initial_types=[("x", FloatTensorType([None, 34]))])
    >>> snapshot.dense(join_inputs(graph, {"user_id": 16, "item_id": 16, "hour": 2}))

    Args:
        model: ONNX bytes, the path of a file, or a ModelProto, with one float32 input [n, width].
        inputs: by name, how many columns each has: a feature has as many as its table's `dim`.

    A classifier's ZipMap, which makes a map of each example's probabilities, is dropped: its output is float32
    [batch, classes], in the order of its labels.

    Returns ONNX bytes; the inputs are float32 [batch, columns]. Raises InvalidInput for a model with other inputs, or
    one whose matrix has another width than the inputs together.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra("join_inputs needs the package onnx: install tierstore[dense]") from error
    proto = onnx.ModelProto()
    if isinstance(model, (str, Path)):
        model = read_onnx(Path(model), Path(model).parent)
    proto.ParseFromString(model if isinstance(model, bytes) else model.SerializeToString())
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    matrices = [value for value in graph.input if value.name not in constants]
    if len(matrices) != 1:
        names = ", ".join(value.name for value in matrices) or "none"
        raise InvalidInput(f"expected a model with one input, a matrix; got {names}")
    (matrix,) = matrices
    kind, dims = matrix.type.tensor_type.elem_type, matrix.type.tensor_type.shape.dim
    if kind != onnx.TensorProto.FLOAT or len(dims) != 2:
        raise InvalidInput(f"input {matrix.name!r}: expected float32 of shape [n, width]")
    if not inputs or any(not isinstance(width, int) or width < 1 for width in inputs.values()):
        raise InvalidInput(f"expected a number of columns for each input, at least 1; got {dict(inputs)}")
    width, declared = sum(inputs.values()), dims[1].dim_value
    if declared and declared != width:
        shown = " + ".join(f"{columns} of {name}" for name, columns in inputs.items())
        raise InvalidInput(f"input {matrix.name!r} has {declared} columns, the inputs together {width} ({shown})")
    used = {name for node in graph.node for name in (*node.input, *node.output)} | constants
    clash = (inputs.keys() & used) - {matrix.name}
    if clash:
        raise InvalidInput(f"{min(clash)!r} is already used inside the graph: rename the input, or rename it there")
    joined = next(name for name in ("joined", *(f"joined_{i}" for i in range(len(used) + 1))) if name not in used)
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == matrix.name:
                node.input[i] = joined
    graph.input.remove(matrix)
    for name, columns in inputs.items():
        graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", columns]))
    graph.node.insert(0, onnx.helper.make_node("Concat", list(inputs), [joined], axis=1))
    _drop_maps(graph)
    if not any(opset.domain in ("", "ai.onnx") for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid("", 15))  # a graph of trees only has none
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _drop_maps(graph: Any) -> None:
    """Have what goes into each ZipMap come out under the name of its output."""
    import onnx

    outputs = {value.name: value for value in graph.output}
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == "ai.onnx.ml":
            classes = max(len(labels.ints) or len(labels.strings) for labels in node.attribute)
            node.CopyFrom(onnx.helper.make_node("Identity", node.input, node.output))
            if (value := outputs.get(node.output[0])) is not None:
                value.CopyFrom(
                    onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, ["batch", classes])
                )
