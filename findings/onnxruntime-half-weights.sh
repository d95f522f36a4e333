#!/usr/bin/env bash
# float16 weights of a MatMul take twice the memory of float32 ones on ONNX Runtime's CPU provider, three times their file.
#
# Guess: a graph that was converted to float16 needs half the memory.
# What happens: on x86 there is no float16 kernel for MatMul. ONNX Runtime puts a Cast behind the weights and computes it
# ahead: a float32 copy, and then the copy that it packs for its kernel. From a file with external data, where float32
# weights are only packed, 64 MiB of float16 cost 128 MiB; as external data of a Gather they cost next to nothing.
# Why it matters: memory is planned by file sizes, and half precision is chosen to save it. Scores are float32's in any
# case. Heads multiply it: each session has copies of its own.
# Source: https://onnxruntime.ai/docs/performance/model-optimizations/float16.html
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0 psutil==7.2.2
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import os
import sys

import numpy as np
import onnx
import onnxruntime
import psutil
from onnx import TensorProto, helper, numpy_helper


def graph(path, dtype, kind):
    elements = (64 << 20) // np.dtype(dtype).itemsize
    weights = np.random.default_rng(1).random((elements // 1024, 1024), np.float32).astype(dtype)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = helper.make_tensor_value_info("x", element if kind == "MatMul" else TensorProto.INT64, [None] * (1 + (kind == "MatMul")))
    y = helper.make_tensor_value_info("y", element, [None, 1024])
    inputs = ["x", "w"] if kind == "MatMul" else ["w", "x"]
    body = helper.make_graph([helper.make_node(kind, inputs, ["y"])], "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location=os.path.basename(path) + ".data")


def resident():
    return psutil.Process().memory_info().rss >> 20


kind, dtype = sys.argv[1:] if len(sys.argv) > 1 else (None, None)
if kind:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    before = resident()
    session = onnxruntime.InferenceSession(f"{kind}-{dtype}.onnx", options, providers=["CPUExecutionProvider"])
    print(f"{kind} of {dtype}: 64 MiB of weights take about {round((resident() - before) / 64) * 64} MiB")
else:
    import subprocess

    for kind in ("MatMul", "Gather"):
        for dtype in ("float32", "float16"):
            graph(f"{kind}-{dtype}.onnx", dtype, kind)
            subprocess.run([sys.executable, __file__, kind, dtype], check=True)
PY

echo "onnxruntime 1.32.0: resident memory of a session"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
MatMul of float32: 64 MiB of weights take about 64 MiB
MatMul of float16: 64 MiB of weights take about 128 MiB
Gather of float32: 64 MiB of weights take about 0 MiB
Gather of float16: 64 MiB of weights take about 0 MiB
WANT
