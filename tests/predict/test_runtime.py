"""What may be a dense part, and what is refused with which words."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tierstore.config import load_settings
from tierstore.errors import ConfigError, InvalidInput, MissingExtra
from tierstore.predict import runtime
from tierstore.predict.runtime import Runtime


def identity(name: str, kind: int, shape: list) -> bytes:
    return om.build([om.node("Identity", name, "out")], {name: (kind, shape)}, {"out": (kind, shape)})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (b"stands for an ONNX model", "not an ONNX model"),
        (b"", "refuses the model"),
        (om.linear({"user_id": np.ones(4)})[:80], "not an ONNX model|refuses the model"),
        (om.build([om.helper.make_node("NoSuchOp", ["x"], ["y"])], {"x": (om.FLOAT, [1])}, {"y": (om.FLOAT, [1])}), "NoSuchOp"),
        (identity("user_id", om.FLOAT, ["n", 5]), r"'user_id'.*reads table 'user' of dim 4; expected \[n, 4\].*declares \[n, 5\]"),
        (identity("clicked", om.FLOAT, ["n", 16]), r"'clicked'.*pooled by mean.*expected \[batch, 8\].*declares \[n, 16\]"),
        (identity("clicked", om.FLOAT, ["n", 3, 8]), r"pooled by mean.*declares \[n, 3, 8\]"),
        (identity("item_id", om.FLOAT, ["n", 3, 4]), r"expected .*\[batch, k, 8\].*declares \[n, 3, 4\]"),
        (identity("item_id", om.FLOAT, ["n"]), r"declares \[n\]"),
        (identity("user_id", om.DOUBLE, ["n", 4]), "FP32 or FP16; the dense part declares FP64"),
        (identity("user_id", om.INT64, ["n"]), "declares INT64"),
        (identity("user_id.offsets", om.INT64, ["n"]), "rename the dense part's input"),
        (om.build([om.node("Identity", "x", "user_id")], {"x": (om.FLOAT, [1])}, {"user_id": (om.FLOAT, [1])}), "rename the dense part's output"),
        (om.build([om.node("Identity", "x", "item_id.found")], {"x": (om.FLOAT, [1])}, {"item_id.found": (om.FLOAT, [1])}), "rename"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(load, model, reason):
    with pytest.raises(InvalidInput, match=reason):
        load(model)


def test_weights_in_a_file_of_their_own_are_refused_wherever_they_hide(load):
    outside = om.helper.make_tensor("w", om.FLOAT, [1], [1.0])
    outside.ClearField("float_data")
    outside.data_location = om.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../secret")
    inner = om.helper.make_graph(
        [om.helper.make_node("Constant", [], ["c"], value=outside)],
        "inner",
        [],
        [om.helper.make_tensor_value_info("c", om.FLOAT, [1])],
    )
    plain = om.helper.make_graph(
        [om.node("Identity", "x", "c2")], "plain", [], [om.helper.make_tensor_value_info("c2", om.FLOAT, [1])]
    )
    branch = om.helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=plain)
    model = om.build([branch], {"yes": (om.BOOL, []), "x": (om.FLOAT, [1])}, {"y": (om.FLOAT, [1])})
    with pytest.raises(InvalidInput, match="lie in a file of their own"):
        load(model)


def test_a_classifier_that_gives_maps_alone_is_told_what_to_do(load):
    zipmap = om.helper.make_node("ZipMap", ["p"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    maps = om.helper.make_value_info(
        "maps",
        om.helper.make_sequence_type_proto(
            om.helper.make_map_type_proto(om.INT64, om.helper.make_tensor_type_proto(om.FLOAT, []))
        ),
    )
    model = om.build([zipmap], {"p": (om.FLOAT, ["n", 2])}, {"maps": maps})
    with pytest.raises(InvalidInput, match="zipmap=False"):
        load(model)


def test_outputs_of_a_type_that_no_protocol_has_are_refused_with_a_cast(load):
    graph = om.build(
        [om.helper.make_node("Cast", ["x"], ["y"], to=om.TensorProto.BFLOAT16)],
        {"x": (om.FLOAT, ["n", 2])},
        {"y": (om.TensorProto.BFLOAT16, ["n", 2])},
    )
    with pytest.raises(InvalidInput, match=r"'y' is tensor\(bfloat16\); end the graph with a Cast to float32$"):
        load(graph)


def test_inputs_that_are_no_tensors_are_refused(load):
    sequence = om.helper.make_value_info(
        "s", om.helper.make_sequence_type_proto(om.helper.make_tensor_type_proto(om.FLOAT, [1]))
    )
    model = om.build([om.node("SequenceLength", "s", "n")], {"s": sequence}, {"n": (om.INT64, [])})
    with pytest.raises(InvalidInput, match=r"input 's' is seq\(tensor\(float\)\)"):
        load(model)


def test_settings_reach_onnx_runtime(load):
    named = {
        "intra_op_num_threads": 3,
        "inter_op_num_threads": 2,
        "graph_optimization_level": "ORT_ENABLE_BASIC",
        "enable_cpu_mem_arena": False,
        "session.intra_op_thread_affinities": "1;1",
        "session.disable_prepacking": True,
    }
    session = load(om.linear({"user_id": np.ones(4)}), dense_options=named)
    options = session._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert session.limits._shrinks, "its arena gives memory back after each run"
    for key, value in (
        ("intra_op.allow_spinning", "0"),
        ("intra_op_thread_affinities", "1;1"),
        ("disable_prepacking", "1"),
    ):
        assert options.get_session_config_entry(f"session.{key}") == value


def test_an_affinity_for_another_number_of_threads_is_told_at_start():
    with pytest.raises(ConfigError, match="names 2 threads; of intra_op_num_threads=1 ONNX Runtime makes 0"):
        Runtime(load_settings(None, dense_options={"session.intra_op_thread_affinities": "1;2"}))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            {"intra_op_threads": "2"},
            r"'intra_op_threads' is unknown: expected intra_op_num_threads, .* session\.intra_op",
        ),
        ({"intra_op_num_threads": "0"}, "intra_op_num_threads='0': expected a number of at least 1"),
        ({"inter_op_num_threads": "two"}, "inter_op_num_threads='two': expected a number"),
        ({"graph_optimization_level": "all"}, "expected ORT_DISABLE_ALL, .*ORT_ENABLE_ALL"),
        ({"enable_cpu_mem_arena": "no"}, "expected 0 or 1"),
    ],
)
def test_an_option_that_onnx_runtime_does_not_have_is_named_at_start(option, said):
    with pytest.raises(ConfigError, match=said):
        Runtime(load_settings(None, dense_options=option))


def test_an_option_that_would_cut_the_callers_own_numbers_is_refused():
    """ONNX Runtime flushes denormal numbers in the thread that makes a process' first session, NumPy's there too."""
    with pytest.raises(ConfigError, match=r"session\.set_denormal_as_zero is not taken: .* set tiny weights"):
        Runtime(load_settings(None, dense_options={"session.set_denormal_as_zero": True}))


def test_options_come_from_the_environment_as_json(monkeypatch):
    monkeypatch.setenv("TIERSTORE_DENSE_OPTIONS", '{"intra_op_num_threads": 2, "enable_cpu_mem_arena": false}')
    assert load_settings(None).dense_options == {"intra_op_num_threads": "2", "enable_cpu_mem_arena": "0"}


def test_onnx_runtime_reports_to_nobody(tmp_path):
    """It keeps the number by which it reports in a file among the temporary ones, made when it is imported."""
    model = tmp_path / "model.onnx"
    model.write_bytes(om.linear({"hour": np.ones(4)}))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    load = "Runtime(load_settings(None)).load(open(sys.argv[1], 'rb').read(), {}, {}, DenseCounts())"
    source = f"""
import sys
from tierstore.config import load_settings
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import DenseCounts
{load}
"""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment["TMPDIR"] = str(temporary)
    subprocess.run([sys.executable, "-c", source, str(model)], check=True, env=environment, timeout=120)
    assert list(temporary.iterdir()) == []


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setattr(runtime, "missing_extra", lambda: "install tierstore[dense] (no such module)")
    here = Runtime(load_settings(None))
    assert "tierstore[dense]" in str(here.missing)
    with pytest.raises(MissingExtra, match=r"tierstore\[dense\]"):
        here.load(b"", {}, {}, None)
