#!/usr/bin/env bash
# ONNX Runtime applies no LOGISTIC or SOFTMAX to trees and linear models with one target.
#
# Guess: `post_transform="LOGISTIC"` in a TreeEnsembleRegressor, a TreeEnsemble or a LinearRegressor makes
# probabilities, however many targets there are.
# What happens: with two targets it does. With one, the usual number, margins come out; only PROBIT has an effect.
# Why it matters: a graph that was written to the specification, and that the checker takes, serves margins as click
# rates. The order within a list is kept, so rankings look right; what is summed, thresholded or bid with is wrong.
# A Sigmoid node behind the trees does what the attribute says.
# Source: https://github.com/microsoft/onnxruntime/issues/26596, https://github.com/microsoft/onnxruntime/pull/26896
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

MARGIN = 0.5


def answer(kind, targets):
    if kind == "TreeEnsembleRegressor":
        leaves = {"target_treeids": [0] * targets, "target_nodeids": [0] * targets, "target_ids": list(range(targets))}
        tree = {"nodes_treeids": [0], "nodes_nodeids": [0], "nodes_featureids": [0], "nodes_values": [0.0]}
        tree |= {"nodes_modes": ["LEAF"], "nodes_truenodeids": [0], "nodes_falsenodeids": [0]}
        what = {"n_targets": targets, "target_weights": [MARGIN] * targets} | leaves | tree
    else:
        what = {"targets": targets, "coefficients": [0.0] * targets, "intercepts": [MARGIN] * targets}
    node = helper.make_node(kind, ["x"], ["y"], domain="ai.onnx.ml", post_transform="LOGISTIC", **what)
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, w]) for n, w in (("x", 1), ("y", targets))]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.zeros((1, 1), np.float32)})[0][0]


for kind in ("TreeEnsembleRegressor", "LinearRegressor"):
    for targets in (1, 2):
        print(kind, targets, "target(s):", " ".join(f"{y:.4f}" for y in answer(kind, targets)))
PY

echo "onnxruntime 1.32.0: a margin of 0.5, whose logistic function is 0.6225"
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
diff "$work/seen" - <<'WANT'
TreeEnsembleRegressor 1 target(s): 0.5000
TreeEnsembleRegressor 2 target(s): 0.6225 0.6225
LinearRegressor 1 target(s): 0.5000
LinearRegressor 2 target(s): 0.6225 0.6225
WANT
