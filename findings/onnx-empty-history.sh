#!/usr/bin/env bash
# The mean of no rows is 0 in ONNX Runtime, and NaN in ONNX's own reference and in NumPy; the maximum is -inf, not an error.
#
# Guess: pooling an empty history in the graph gives what it gave in training, or an error.
# What happens: ONNX leaves the mean over nothing undefined. The reference evaluator computes NaN, as NumPy and PyTorch do,
# and ONNX Runtime 0. A maximum over nothing is an error in NumPy and PyTorch; in ONNX it is -inf by the specification, from
# where a dense layer makes NaN.
# Why it matters: new users have no history. A trainer that fills NaN with a learned row, or a test that compares with the
# reference, sees another model than the one that serves.
# Source: https://onnx.ai/onnx/operators/onnx__ReduceMean.html, https://onnx.ai/onnx/operators/onnx__ReduceMax.html
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import warnings

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")
history = np.zeros((1, 0, 2), np.float32)  # one user, no clicks, rows of two numbers
for kind in ("ReduceMean", "ReduceMax"):
    axes = numpy_helper.from_array(np.array([1]), "axes")
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None, 2])]
    outs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])]
    graph = helper.make_graph([helper.make_node(kind, ["x", "axes"], ["y"], keepdims=0)], "g", ports, outs, [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    reference = ReferenceEvaluator(model).run(None, {"x": history})[0]
    print(kind, "runtime", session.run(None, {"x": history})[0].tolist(), "reference", reference.tolist())
try:
    print("numpy mean", history.mean(axis=1).tolist(), "numpy max", history.max(axis=1).tolist())
except ValueError:
    print("numpy mean", history.mean(axis=1).tolist(), "numpy max: an error")
PY

echo "onnx 1.23.2, onnxruntime 1.32.0"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
ReduceMean runtime [[0.0, 0.0]] reference [[nan, nan]]
ReduceMax runtime [[-inf, -inf]] reference [[-inf, -inf]]
numpy mean [[nan, nan]] numpy max: an error
WANT
