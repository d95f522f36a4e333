#!/usr/bin/env bash
# ONNX Runtime's probabilities below about 1e-6 are wrong by percents, in the wrong order, or 0.
#
# Guess: a probability is a float32 with its seven digits, also when it is small.
# What happens: trees with LOGISTIC compute that of a negative margin as 1 - p(-margin), so that steps of 6e-8 remain,
# and 0 below a margin of about -17. The Sigmoid operator, which PyTorch and Keras export, is a rational function of
# about that absolute precision: 7% off at -14, and at -17 more than at -16. 1 / (1 + Exp(-x)) is right to the last digit.
# Why it matters: models of rare events (conversions, fraud) that were trained on all negatives live there. Their scores
# become a few steps with many ties and some pairs exchanged, and probability times price is off by percents, or 0.
# Source: https://github.com/microsoft/onnxruntime/issues/26281
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
export ORT_DISABLE_TELEMETRY=1

cat > "$work/run.py" <<'PY'
import math

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def run(nodes, x, width=(), constants=()):
    ports = [helper.make_tensor_value_info(name, FLOAT, [None, *width[i : i + 1]]) for i, name in enumerate("xy")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


def trees(margin):
    node = helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml", post_transform="LOGISTIC",
        classlabels_int64s=[0, 1], class_treeids=[0, 0], class_nodeids=[1, 2], class_ids=[0, 0],
        class_weights=[margin, 1.0], nodes_treeids=[0] * 3, nodes_nodeids=[0, 1, 2], nodes_featureids=[0] * 3,
        nodes_values=[0.0] * 3, nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
    )  # fmt: skip
    return float(run([node], np.zeros((1, 1), np.float32), (1, 2))[0, 1])


def sigmoid(margin):
    return float(run([helper.make_node("Sigmoid", ["x"], ["y"])], np.array([margin], np.float32))[0])


def by_exp(margin):
    one = numpy_helper.from_array(np.float32(1), "one")
    steps = (("Neg", ["x"], "n"), ("Exp", ["n"], "e"), ("Add", ["e", "one"], "s"), ("Div", ["one", "s"], "y"))
    nodes = [helper.make_node(kind, inputs, [out]) for kind, inputs, out in steps]
    return float(run(nodes, np.array([margin], np.float32), (), [one])[0])


def off(p, margin):
    return p * (1 + math.exp(-margin)) - 1


for m in (-10.0, -14.0, -15.0, -16.0, -17.0, -18.0):
    print(f"{m} true {1 / (1 + math.exp(-m)):.2e} trees {trees(m):.2e} Sigmoid {sigmoid(m):.2e} Exp {by_exp(m):.2e}")
print("Exp right to 1e-6:", all(abs(off(by_exp(m), m)) < 1e-6 for m in (-10.0, -14.0, -15.0, -16.0, -17.0, -18.0)))
print("trees off by more than 5%:", [m for m in (-14.0, -15.0, -16.0, -17.0) if abs(off(trees(m), m)) > 0.05])
print("Sigmoid off by more than 5%:", [m for m in (-14.0, -15.0, -16.0, -17.0) if abs(off(sigmoid(m), m)) > 0.05])
print("Sigmoid at -17 above that at -16:", sigmoid(-17.0) > sigmoid(-16.0))
print("at -18:", trees(-18.0), sigmoid(-18.0))
PY

echo "onnxruntime 1.32.0: the probability of a margin"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
grep -v true "$work/seen" > "$work/compared"
diff "$work/compared" - <<'WANT'
Exp right to 1e-6: True
trees off by more than 5%: [-15.0, -16.0, -17.0]
Sigmoid off by more than 5%: [-14.0, -15.0, -16.0, -17.0]
Sigmoid at -17 above that at -16: True
at -18: 0.0 0.0
WANT
