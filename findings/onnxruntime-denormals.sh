#!/usr/bin/env bash
# ONNX Runtime's `session.set_denormal_as_zero` is an option of the process' first session, not of a session.
#
# Guess: a session with the option flushes denormal numbers to zero in its runs, on whichever thread calls, and no other
# session and no other code is affected.
# What happens: the first session that a process makes decides, with or without the option, for the thread that made it,
# and threads started from there inherit it. NumPy in that program then flushes too, and so do sessions without the
# option. If the first session was made without it, a later one with the option flushes nothing on the thread that calls
# (only on further threads of its own pool, so that with several threads one answer can have both).
# Why it matters: a server makes its sessions on a loading thread and runs them on others. The option is set against
# graphs that are slow with denormal weights; it can be without effect there, and cut small values of rows elsewhere in
# the process. Clearing tiny weights in the graph does what the option promises.
# Source: https://github.com/microsoft/onnxruntime/issues/17011, https://github.com/microsoft/onnxruntime/pull/5391
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

X = np.full(200_000, 1.2e-38, np.float32)  # a normal number; half of it is a denormal one


def session(option):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if option:
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    port = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    half = numpy_helper.from_array(np.float32(0.5), "half")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "half"], ["y"])], "g", port[:1], port[1:], [half])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def zeros(y):
    return {0: "none", len(y): "all"}.get(int((y == 0).sum()), "some")


if sys.argv[1] == "option_first":
    with_option, without = session(True), session(False)
else:
    without, with_option = session(False), session(True)
run = lambda s: zeros(s.run(None, {"x": X})[0])
print(sys.argv[1], f"with={run(with_option)} without={run(without)} numpy={zeros(X * np.float32(0.5))}")
PY

echo "onnxruntime 1.32.0: which products that are denormal come out as zero"
for order in option_first option_second; do "$work/venv/bin/python" "$work/run.py" $order; done | tee "$work/seen"
diff "$work/seen" - <<'WANT'
option_first with=all without=all numpy=all
option_second with=none without=none numpy=none
WANT
