#!/usr/bin/env bash
# float16 weights of a MatMul take the memory of float32 ones on ONNX Runtime's CPU provider: twice their file.
#
# Guess: a graph that was converted to float16 needs half the memory.
# What happens: for MatMul there is no float16 kernel on x86. ONNX Runtime puts a Cast behind the weights, computes it ahead,
# and keeps the float32 copy, packed for its kernel. 16 Mi weights take 64 MiB either way. As external data of a
# Gather, which has a float16 kernel, they cost next to nothing.
# Why it matters: memory is planned by file sizes, and half precision is chosen to save it. Heads multiply it: each session
# has copies of its own.
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
    weights = np.random.default_rng(1).random((16 << 10, 1 << 10), np.float32).astype(dtype)
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
    size = os.path.getsize(f"{kind}-{dtype}.onnx.data") >> 20
    print(f"{kind} of {dtype}: a file of {size} MiB takes about {round((resident() - before) / 32) * 32} MiB")
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
MatMul of float32: a file of 64 MiB takes about 64 MiB
MatMul of float16: a file of 32 MiB takes about 64 MiB
Gather of float32: a file of 64 MiB takes about 0 MiB
Gather of float16: a file of 32 MiB takes about 0 MiB
WANT
