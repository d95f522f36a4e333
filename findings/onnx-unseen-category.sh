#!/usr/bin/env bash
# In an ONNX graph an unseen category gets the last row of its table.
#
# Guess: a text that LabelEncoder does not know gives an id that Gather refuses, or a row for unknown ones.
# What happens: LabelEncoder's default for integers is -1 by the specification, and Gather counts negative indices from
# the end. Together they answer the last category's row, without an error.
# Why it matters: every new user and item is scored as whoever comes last in the vocabulary. An index that is too large
# is an error, so a test with one does not find it.
# Source: https://onnx.ai/onnx/operators/onnx_aionnxml_LabelEncoder.html, https://onnx.ai/onnx/operators/onnx__Gather.html
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
from onnx import TensorProto, helper, numpy_helper

names = np.array(["ann", "bob", "eve"], object)
table = numpy_helper.from_array(np.array([[0.1], [0.2], [0.3]], np.float32), "table")
encode = helper.make_node(
    "LabelEncoder", ["name"], ["id"], domain="ai.onnx.ml", keys_strings=list(names), values_int64s=[0, 1, 2]
)
look_up = helper.make_node("Gather", ["table", "id"], ["row"])
ports = [helper.make_tensor_value_info("name", TensorProto.STRING, [None])]
outs = [helper.make_tensor_value_info("row", TensorProto.FLOAT, [None, 1])]
opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 4)]
model = helper.make_model(helper.make_graph([encode, look_up], "g", ports, outs, [table]), opset_imports=opsets, ir_version=10)
onnx.checker.check_model(model, full_check=True)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
for name in ("ann", "eve", "nobody"):
    print(name, session.run(None, {"name": np.array([name], object)})[0].ravel().tolist())
PY

echo "onnxruntime 1.32.0"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
ann [0.10000000149011612]
eve [0.30000001192092896]
nobody [0.30000001192092896]
WANT
