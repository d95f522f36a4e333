"""Checks of an ONNX graph before ONNX Runtime sees it.

Pure functions; any thread may use them.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from tierstore.errors import InvalidInput
from tierstore.formats.onnx_file import constants_of
from tierstore.predict.transforms import PostTransform, transforms_of

MAX_JOINED = 256  # strings in one string: the bytes of strings are not among those that a session limits
MAX_NODES = 100_000  # ONNX Runtime's time to optimize grows faster than their number

# Types of tensors whose values are no sizes: numbers of TensorProto.DataType
_WEIGHTS = frozenset({1, 2, 3, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23})  # floats, and integers of 8 bits or less

_JOIN = "StringConcat"
_REPEATING = frozenset({"Loop", "Scan"})

_Name = tuple[str, str, str]  # of an operator: domain, type, overload


@dataclass(frozen=True, slots=True)
class Graph:
    """`scalars`: inputs without dimensions. `structure`: a digest of all but the values of weights. `transforms`:
    what its trees and linear models make of their sums.

    Graphs of one structure take about the same time and memory to be made ready.
    """

    scalars: frozenset[str]
    structure: bytes
    transforms: frozenset[PostTransform]


def inspect(model: bytes) -> Graph:
    """InvalidInput for what is no ONNX, what refers to files beside it, and what is larger than it looks."""
    import onnx

    try:
        proto = onnx.ModelProto.FromString(model)
    except Exception as error:  # protobuf's error, which we do not import
        raise InvalidInput("the dense part is not an ONNX model: its bytes are not a ModelProto") from error
    _check_nodes(proto)
    _check_strings(proto)
    for tensor in constants_of(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise InvalidInput(
                f"the weights {tensor.name!r} lie in a file of their own; give the path of the model, or save it as "
                "one: torch.onnx.export(…, external_data=False), onnx.save_model(…, save_as_external_data=False)"
            )
    bodies = [proto.graph.node, *(function.node for function in proto.functions)]
    transforms = transforms_of(node for body in bodies for node in _nested(body))
    structure = _structure(proto, len(model))
    types = {value.name: value.type.tensor_type for value in proto.graph.input}
    scalars = frozenset(name for name, kind in types.items() if kind.HasField("shape") and not kind.shape.dim)
    return Graph(scalars, structure, transforms)


def _structure(proto: Any, nbytes: int) -> bytes:
    """The digest of a graph of `nbytes` without the values of its weights, which it loses.

    Integers of 32 bits or more stay: they may be sizes. How much may be computed ahead depends on the graph's size.
    """
    for tensor in constants_of(proto):
        if tensor.data_type in _WEIGHTS:
            for field in ("raw_data", "float_data", "double_data"):
                tensor.ClearField(field)
    return hashlib.sha256(b"%d " % nbytes + proto.SerializeToString(deterministic=True)).digest()


def _check_nodes(proto: Any) -> None:
    """InvalidInput where the nodes are too many, once each call of a local function is
    replaced by what the function does.
    """
    if len(proto.graph.node) > MAX_NODES:  # of so many, not even a look at each
        raise _too_many(len(proto.graph.node))
    nodes: dict[_Name, int] = {}  # of a local function, all that it calls included
    for name, function in _in_order(proto.functions):
        _check_defaults(function)
        nodes[name] = _count(function.node, nodes)
    if (count := _count(proto.graph.node, nodes)) > MAX_NODES:
        raise _too_many(count)


def _check_strings(proto: Any) -> None:
    """InvalidInput where `StringConcat` may make strings of any length."""
    bodies = [proto.graph.node, *(function.node for function in proto.functions)]
    if not any(node.op_type == _JOIN for body in bodies for node in _nested(body)):
        return
    joined: dict[_Name, int] = {}  # of a local function, as `_joined` has it
    for name, function in _in_order(proto.functions):
        joined[name] = _joined(function.node, joined, ChainMap())
    if (count := _joined(proto.graph.node, joined, ChainMap())) > MAX_JOINED:
        raise InvalidInput(f"a string of the graph is joined from {count} strings; expected at most {MAX_JOINED}")


def _joined(nodes: Iterable[Any], functions: Mapping[_Name, int], outer: ChainMap[str, int]) -> int:
    """From how many strings the longest one is joined that these nodes make.

    `outer`: the same for what has a name around them.
    """
    counts = outer.new_child()
    for node in nodes:
        given = [counts.get(name, 1) for name in node.input if name]
        graphs = _subgraphs(node)
        if node.op_type in _REPEATING or _called(node) in functions:
            _check_repeated(node, graphs, functions)
        inside = [_joined(graph.node, functions, counts) for graph in graphs]
        made = sum(given) if node.op_type == _JOIN else max(given, default=1) * functions.get(_called(node), 1)
        counts.update(dict.fromkeys(node.output, min(max(made, *inside, 1), MAX_JOINED**2)))
    return max(counts.maps[0].values(), default=1)


def _check_repeated(node: Any, graphs: Iterable[Any], functions: Mapping[_Name, int]) -> None:
    for graph in graphs:
        if any(inner.op_type == _JOIN or functions.get(_called(inner), 1) > 1 for inner in _nested(graph.node)):
            raise InvalidInput(
                f"{_JOIN} within {node.op_type}: its strings could grow in each round, which dense_memory does not "
                "limit; join them outside"
            )


def _check_defaults(function: Any) -> None:
    for default in function.attribute_proto:
        if any(field.message_type is not None for field, _ in default.ListFields()):
            raise InvalidInput(
                f"local function {function.name!r}: attribute {default.name!r} has a tensor or a graph as its "
                "default; expected a number or a text"
            )


def _in_order(functions: Iterable[Any]) -> Iterator[tuple[_Name, Any]]:
    """Local functions, each after those that it calls."""
    named = {(_domain(function), function.name, function.overload): function for function in functions}
    calls = {name: {_called(node) for node in _nested(function.node)} for name, function in named.items()}
    try:
        return ((name, named[name]) for name in [*TopologicalSorter(calls).static_order()] if name in named)
    except CycleError as error:
        circle = " → ".join(name for _, name, _ in error.args[1])
        raise InvalidInput(f"the graph's local functions call each other in a circle: {circle}") from None


def _count(nodes: Iterable[Any], functions: Mapping[_Name, int]) -> int:
    """A function may use the graphs that it is called with wherever it has a node."""
    return sum(
        functions.get(_called(node), 1) * (1 + sum(_count(graph.node, functions) for graph in _subgraphs(node)))
        for node in nodes
    )


def _too_many(count: int) -> InvalidInput:
    shown = f"{count:,}" if count < 10**12 else "more than 10^12"
    return InvalidInput(
        f"the graph has {shown} nodes, with each call of a local function replaced by the nodes of that function; "
        f"expected at most {MAX_NODES:,}"
    )


def _called(node: Any) -> _Name:
    return _domain(node), node.op_type, node.overload


def _domain(named: Any) -> str:
    return "" if named.domain == "ai.onnx" else str(named.domain)


def _nested(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nested(graph.node)


def _subgraphs(node: Any) -> list[Any]:
    return [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs) if graph.node]
