"""ONNX models for tests, built by hand: small enough that what they answer can be said in a line of NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as `tierstore.predict.runtime` does
pytest.importorskip("onnx", reason="needs the extra `dense`")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

from onnx import ModelProto, TensorProto, helper, numpy_helper

FLOAT, HALF, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE
INT64, STRING, BOOL = TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL

Ports = dict[str, tuple[int, Sequence[Any] | None]]  # name → (type, shape)


def build(nodes: Sequence[Any], inputs: Ports, outputs: Ports, constants: dict[str, Any] | None = None) -> bytes:
    """The bytes of a model of these nodes."""
    values = [
        [
            helper.make_tensor_value_info(name, *port) if isinstance(port, tuple) else port
            for name, port in ports.items()
        ]
        for ports in (inputs, outputs)
    ]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "test", *values, held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return model


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """A node; names are separated by spaces."""
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def linear(weights: dict[str, Any], bias: float = 0.0, *, output: str = "score") -> bytes:
    """output [batch, 1] = sum over inputs of input [batch, dim] @ weights [dim], plus bias."""
    constants = {f"w_{name}": np.asarray(w, np.float32).reshape(-1, 1) for name, w in weights.items()}
    constants["bias"] = np.float32(bias)
    nodes = [node("MatMul", f"{name} w_{name}", f"p_{name}") for name in weights]
    nodes += [node("Sum", " ".join(f"p_{name}" for name in weights), "sum"), node("Add", "sum bias", output)]
    inputs: Ports = {name: (FLOAT, ["batch", len(np.asarray(w))]) for name, w in weights.items()}
    return build(nodes, inputs, {output: (FLOAT, ["batch", 1])}, constants)


def telltale(stamp: int, dims: dict[str, int]) -> bytes:
    """Outputs `stamp` [batch, 1], its own number, and `off` [batch, 1]: how far the rows are from naming it too.

    Rows of a version or delta hold its number in every element; `off` is zero if all of them are of `stamp`.
    """
    constants = {"n": np.float32(stamp), "axis": np.array([1], np.int64)}
    nodes = []
    for name in dims:
        nodes += [node("Sub", f"{name} n", f"d_{name}"), node("Abs", f"d_{name}", f"a_{name}")]
        nodes.append(node("ReduceSum", f"a_{name} axis", f"s_{name}", keepdims=1))
    first = next(iter(dims))
    nodes += [node("Sum", " ".join(f"s_{name}" for name in dims), "off")]
    constants["zero"] = np.float32(0)
    nodes += [node("Mul", f"s_{first} zero", "nothing"), node("Add", "nothing n", "stamp")]
    inputs: Ports = {name: (FLOAT, ["batch", dim]) for name, dim in dims.items()}
    return build(nodes, inputs, {"stamp": (FLOAT, ["batch", 1]), "off": (FLOAT, ["batch", 1])}, constants)


def witness(number: int, dims: dict[str, int]) -> bytes:
    """Output `seen` [batch, 3]: the least and the greatest number among the rows, and the graph's own."""
    nodes = [
        node("Concat", " ".join(dims), "rows", axis=1),
        node("ReduceMin", "rows", "least", axes=[1], keepdims=1),
        node("ReduceMax", "rows", "greatest", axes=[1], keepdims=1),
        node("Sub", "least least", "zero"),
        node("Add", "zero own", "graph"),
        node("Concat", "least greatest graph", "seen", axis=1),
    ]
    inputs: Ports = {name: (FLOAT, ["batch", dim]) for name, dim in dims.items()}
    return build(nodes, inputs, {"seen": (FLOAT, ["batch", 3])}, {"own": np.float32(number)})


def witnessed(seen: Any) -> tuple[int, int]:
    """(the number in the rows, that of the graph) of an answer of a `witness`, all of which must be one each."""
    ((least, greatest, graph),) = {tuple(map(int, row)) for row in seen.tolist()}
    assert least == greatest, seen
    return least, graph


def looping(*, always: bool = True) -> bytes:
    """score [batch, 4] = user_id; by way of a loop without an end, or, where not `always`, without one if a row sums to more than 100."""
    body = helper.make_graph(
        [node("Identity", "go", "goes_on"), node("Mul", "was one", "is")],
        "body",
        [
            helper.make_tensor_value_info(name, *port)
            for name, port in {"round": (INT64, []), "go": (BOOL, []), "was": (FLOAT, None)}.items()
        ],
        [
            helper.make_tensor_value_info(name, *port)
            for name, port in {"goes_on": (BOOL, []), "is": (FLOAT, None)}.items()
        ],
        [numpy_helper.from_array(np.float32(1), "one")],
    )
    nodes = [
        node("ReduceSum", "user_id", "sum", keepdims=0),
        node("Greater", "sum most", "go"),
        helper.make_node("Loop", ["", "go", "user_id"], ["score"], body=body),
    ]
    most = {"most": np.float32(-np.inf if always else 100)}
    return build(nodes, {"user_id": (FLOAT, ["batch", 4])}, {"score": (FLOAT, ["batch", 4])}, most)


def swelling(elements: int, *, ahead: bool = False) -> bytes:
    """score [batch, 4] = user_id, by way of a tensor of so many float32; `ahead`: of constants, that can be computed at the load."""
    filled = "zero" if ahead else "nothing"
    nodes = [
        node("ReduceSum", "user_id", "sum", keepdims=0),
        node("Mul", "sum zero", "nothing"),
        node("Expand", f"{filled} size", "large"),
        node("ReduceSum", "large", "still_nothing", keepdims=0),
        node("Add", "user_id still_nothing", "score"),
    ]
    constants = {"size": np.array([elements], np.int64), "zero": np.float32(0)}
    return build(nodes, {"user_id": (FLOAT, ["batch", 4])}, {"score": (FLOAT, ["batch", 4])}, constants)


def laughing(depth: int) -> bytes:
    """score [batch, 4] = user_id, by way of local functions that each call the one before twice: 2^depth nodes in all."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]

    def function(level: int, nodes: Sequence[Any]) -> Any:
        return helper.make_function("local", f"level{level}", ["a"], ["b"], nodes, opsets)

    functions = [function(0, [node("Neg", "a", "b")])]
    for level in range(1, depth + 1):
        twice = [
            node(f"level{level - 1}", "a", "c", domain="local"),
            node(f"level{level - 1}", "c", "b", domain="local"),
        ]
        functions.append(function(level, twice))
    ports = [helper.make_tensor_value_info(name, FLOAT, ["batch", 4]) for name in ("user_id", "score")]
    graph = helper.make_graph([node(f"level{depth}", "user_id", "score", domain="local")], "test", ports[:1], ports[1:])
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions).SerializeToString()
    return model


def folding(times: int, size: int, seed: int = 0) -> bytes:
    """score [batch, 4] = user_id, by way of so many products of constant matrices, which ONNX Runtime computes ahead."""
    nodes = [node("MatMul", f"m{number} m0", f"m{number + 1}") for number in range(times)]
    nodes += [node("ReduceSum", f"m{times}", "sum", keepdims=0), node("Mul", "sum zero", "nothing")]
    matrix = np.random.default_rng(seed).standard_normal((size, size), np.float32) / np.float32(size)
    constants = {"m0": matrix, "zero": np.float32(0)}
    nodes.append(node("Add", "user_id nothing", "score"))
    return build(nodes, {"user_id": (FLOAT, ["batch", 4])}, {"score": (FLOAT, ["batch", 4])}, constants)


def concatenating(times: int) -> bytes:
    """score [batch, 4] = user_id, by way of a constant string that is joined with itself so many times: 16 << times bytes."""
    nodes = [node("StringConcat", f"t{number} t{number}", f"t{number + 1}") for number in range(times)]
    nodes.append(node("StringSplit", f"t{times}", "parts count", delimiter="-"))
    nodes += [node("Cast", "count", "number", to=FLOAT), node("ReduceSum", "number", "sum", keepdims=0)]
    nodes += [node("Mul", "sum zero", "nothing"), node("Add", "user_id nothing", "score")]
    constants = {"t0": np.array(["0123456789abcdef"], object), "zero": np.float32(0)}
    model = build(nodes, {"user_id": (FLOAT, ["batch", 4])}, {"score": (FLOAT, ["batch", 4])}, constants)
    return changed(model, lambda proto: setattr(proto.opset_import[0], "version", 20))


def changed(model: bytes, change: Callable[[Any], object]) -> bytes:
    """A model after a change to its ModelProto."""
    proto = ModelProto.FromString(model)
    change(proto)
    result: bytes = proto.SerializeToString()
    return result
