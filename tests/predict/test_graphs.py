"""What a graph is refused for before ONNX Runtime sees it."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.errors import InvalidInput
from tierstore.predict import graphs
from tierstore.predict.graphs import MAX_NODES, inspect

from . import onnx_models as om

PORTS: om.Ports = {"user_id": (om.FLOAT, ["batch", 4])}
SCORE: om.Ports = {"score": (om.FLOAT, ["batch", 4])}


def branching(depth: int) -> bytes:
    """score = user_id, by way of so many `If` within each other."""
    out = [om.helper.make_tensor_value_info("o", om.FLOAT, None)]
    inner = om.helper.make_graph([om.node("Identity", "user_id", "o")], "inner", [], out)
    for _ in range(depth):
        branch = om.helper.make_node("If", ["always"], ["o"], then_branch=inner, else_branch=inner)
        inner = om.helper.make_graph([branch], "inner", [], out)
    top = om.helper.make_node("If", ["always"], ["score"], then_branch=inner, else_branch=inner)
    return om.build([top], PORTS, SCORE, {"always": np.array(True)})


def test_local_functions_that_call_others_are_counted_with_all_that_those_do(load):
    assert load(om.laughing(4)).signature.inputs[0].name == "user_id"
    with pytest.raises(InvalidInput, match=r"has more than 10\^12 nodes, .* expected at most 100,000"):
        load(om.laughing(64))
    with pytest.raises(InvalidInput, match=r"has 131,072 nodes"):
        load(om.laughing(17))


def test_a_call_by_the_other_name_of_the_standard_domain_is_counted_as_well():
    def rename(proto):
        for function in proto.functions:
            function.domain = ""
            for node in function.node:
                node.domain = "ai.onnx" if node.domain else ""
        proto.graph.node[0].domain = "ai.onnx"

    with pytest.raises(InvalidInput, match="nodes"):
        inspect(om.changed(om.laughing(40), rename))


def test_nodes_of_graphs_within_graphs_are_counted(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_NODES", 1000)
    inspect(branching(7))
    with pytest.raises(InvalidInput, match=r"has 1,023 nodes, .* expected at most 1,000"):
        inspect(branching(8))


def test_a_graph_that_functions_are_called_with_counts_wherever_they_may_use_it():
    def give(proto):
        body = om.helper.make_graph([om.node("Identity", "user_id", "o")] * 100, "body", [], [])
        proto.graph.node[0].attribute.append(om.helper.make_attribute("body", body))

    inspect(om.laughing(10))
    with pytest.raises(InvalidInput, match=r"has 103,424 nodes"):
        inspect(om.changed(om.laughing(10), give))


def test_a_graph_of_too_many_nodes_is_refused():
    chain = [om.node("Neg", f"t{n}", f"t{n + 1}") for n in range(MAX_NODES)]
    nodes = [om.node("Neg", "user_id", "t0"), *chain]
    with pytest.raises(InvalidInput, match=r"has 100,001 nodes"):
        inspect(om.build(nodes, PORTS, SCORE))


def test_functions_that_call_each_other_in_a_circle_are_refused():
    def close(proto):
        proto.functions[0].node[0].CopyFrom(om.node("level2", "a", "b", domain="local"))

    with pytest.raises(InvalidInput, match="in a circle: level"):
        inspect(om.changed(om.laughing(2), close))


@pytest.mark.parametrize("default", [om.numpy_helper.from_array(np.ones(2)), om.helper.make_graph([], "g", [], [])])
def test_a_function_may_have_no_tensor_and_no_graph_as_a_default(default):
    def add(proto):
        proto.functions[0].attribute_proto.append(om.helper.make_attribute("given", default))

    with pytest.raises(InvalidInput, match=r"'level0': attribute 'given' has a tensor or a graph as its default"):
        inspect(om.changed(om.laughing(2), add))
    inspect(
        om.changed(om.laughing(2), lambda p: p.functions[0].attribute_proto.append(om.helper.make_attribute("n", 1)))
    )
