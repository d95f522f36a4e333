"""What a graph is refused for before ONNX Runtime sees it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tierstore.errors import InvalidInput
from tierstore.predict import graphs
from tierstore.predict.graphs import MAX_NODES, inspect

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


def with_body(repeats: str, inner: str, **attributes) -> bytes:
    """score = user_id, beside a string that goes through a node with a body of one node."""
    value = om.helper.make_tensor_value_info
    ports = [value("round", om.INT64, []), value("go", om.BOOL, []), value("was", om.STRING, None)]
    outs = [value("goes_on", om.BOOL, []), value("is", om.STRING, None)]
    given = "was was" if inner == "StringConcat" else "was"
    body = om.helper.make_graph(
        [om.node("Identity", "go", "goes_on"), om.node(inner, given, "is")], "body", ports, outs
    )
    if repeats == "Scan":
        body = om.helper.make_graph([om.node(inner, given, "is")], "body", ports[2:], outs[1:])
        attributes = {"num_scan_inputs": 1}
        repeat = om.helper.make_node("Scan", ["text"], ["texts"], body=body, **attributes)
    else:
        repeat = om.helper.make_node("Loop", ["times", "", "text"], ["texts"], body=body)
    constants = {"times": np.int64(3), "text": np.array(["a"], object)}
    return om.build([repeat, om.node("Identity", "user_id", "score")], PORTS, SCORE, constants)


@pytest.mark.parametrize("repeats", ["Loop", "Scan"])
def test_strings_may_not_grow_from_round_to_round(repeats):
    inspect(with_body(repeats, "Identity"))
    with pytest.raises(InvalidInput, match=f"StringConcat within {repeats}: its strings could grow in each round"):
        inspect(with_body(repeats, "StringConcat"))


def test_a_string_is_joined_from_some_strings_only(load):
    assert load(om.concatenating(8)).signature.inputs[0].name == "user_id"
    with pytest.raises(InvalidInput, match="is joined from 512 strings; expected at most 256"):
        load(om.concatenating(9))
    many = [om.node("StringConcat", f"t{number} t0", f"t{number + 1}") for number in range(255)]
    constants = {"t0": np.array(["a"], object)}
    inspect(om.build([*many, om.node("Identity", "user_id", "score")], PORTS, SCORE, constants))
    many.append(om.node("StringConcat", "t255 t0", "t256"))
    with pytest.raises(InvalidInput, match="from 257 strings"):
        inspect(om.build([*many, om.node("Identity", "user_id", "score")], PORTS, SCORE, constants))


def test_strings_that_functions_and_branches_join_are_counted():
    def doubling(proto):
        proto.functions[0].node[0].CopyFrom(om.node("StringConcat", "a a", "b"))

    inspect(om.changed(om.laughing(3), doubling))  # 2^(2^3)
    with pytest.raises(InvalidInput, match="strings; expected at most 256"):
        inspect(om.changed(om.laughing(4), doubling))

    def branch(inner: str) -> bytes:
        made = om.helper.make_tensor_value_info("o", om.STRING, None)
        nodes = [om.node("StringConcat", f"{inner} {inner}", "o")]
        graph = om.helper.make_graph(nodes, "branch", [], [made])
        chosen = om.helper.make_node("If", ["always"], ["chosen"], then_branch=graph, else_branch=graph)
        ends = [om.node("StringConcat", "chosen chosen", "end"), om.node("Identity", "user_id", "score")]
        constants = {"t0": np.array(["a"], object), "always": np.array(True)}
        chain = [om.node("StringConcat", f"t{number} t{number}", f"t{number + 1}") for number in range(7)]
        return om.build([*chain, chosen, *ends], PORTS, SCORE, constants)

    inspect(branch("t6"))
    with pytest.raises(InvalidInput, match="from 512 strings"):
        inspect(branch("t7"))
