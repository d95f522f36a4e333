#!/usr/bin/env bash
# Between numbers and text ONNX Runtime's Cast keeps eight digits one way, and takes the leading digits the other way.
#
# Guess: a double that is a whole number becomes all of its digits, as in NumPy, and text that is no number is an error.
# What happens: doubles become text with eight significant digits, so that 123456789.0 and 123456791.0 are both
# "1.2345679e+08". To INT64, "17_old", "17.9" and "17 18" are 17 and "0x11" is 0, without an error.
# Why it matters: ids come as doubles out of data frames with missing values, and graphs make text of them for a
# LabelEncoder or a hash. Neighbours of nine digits and more then share a row, and no id of a vocabulary in plain decimals
# is found. Text that is taken for a number gives another item's row instead of that of an unknown one.
# Casting to INT64 first keeps all digits up to 2**53.
# Source: https://github.com/microsoft/onnxruntime/pull/1210, https://onnx.ai/onnx/operators/onnx__Cast.html
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def cast(values, source, target):
    port = [helper.make_tensor_value_info(n, kind, [None]) for n, kind in (("x", source), ("y", target))]
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=target)], "g", port[:1], port[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": values})[0].tolist()


print("DOUBLE to STRING", cast(np.array([12345678.0, 123456789.0, 123456791.0]), TensorProto.DOUBLE, TensorProto.STRING))
print("INT64 to STRING", cast(np.array([123456789, 123456791]), TensorProto.INT64, TensorProto.STRING))
texts = np.array(["17", "17_old", "17.9", "17 18", "0x11"], object)
print("STRING to INT64", cast(texts, TensorProto.STRING, TensorProto.INT64))
PY

echo "onnxruntime 1.32.0"
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
diff "$work/seen" - <<'WANT'
DOUBLE to STRING ['12345678', '1.2345679e+08', '1.2345679e+08']
INT64 to STRING ['123456789', '123456791']
STRING to INT64 [17, 17, 17, 17, 0]
WANT
