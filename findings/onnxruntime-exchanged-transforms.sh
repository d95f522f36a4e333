#!/usr/bin/env bash
# In a TreeEnsemble, ONNX Runtime takes LOGISTIC for SOFTMAX and SOFTMAX for LOGISTIC.
#
# Guess: `TreeEnsemble` (since ai.onnx.ml 5) means by `post_transform` what the older operators for trees mean; ONNX
# numbers it: NONE 0, SOFTMAX 1, LOGISTIC 2, SOFTMAX_ZERO 3, PROBIT 4.
# What happens: ONNX Runtime has the same names in the order NONE, LOGISTIC, SOFTMAX, and takes the number as it is. With
# several targets 1 gives a logistic function of each, and 2 a softmax over all. (With one target neither does anything.)
# The reference evaluator of ONNX does not help: it applies none. TreeEnsembleRegressor, which has names, is right.
# Why it matters: several objectives over one forest (click, purchase, dwell) with LOGISTIC get probabilities that sum to
# one; classes with SOFTMAX get some that do not. All lie between 0 and 1, and the order within a row is right, so nothing
# looks wrong. The checker takes the graph. Sigmoid and Softmax nodes behind the trees do what they say.
# Source: https://onnx.ai/onnx/operators/onnx_aionnxml_TreeEnsemble.html (the numbers),
# https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/ml/ml_common.h (POST_EVAL_TRANSFORM)
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
from onnx.reference import ReferenceEvaluator

MARGINS = np.array([0.5, -0.25, 0.0], np.float32)
NUMBERS = {"NONE": 0, "SOFTMAX": 1, "LOGISTIC": 2}
SPECIFIED = {
    "NONE": MARGINS,
    "SOFTMAX": np.exp(MARGINS) / np.exp(MARGINS).sum(),
    "LOGISTIC": 1 / (1 + np.exp(-MARGINS)),
}


def tensor(values, dtype):
    return numpy_helper.from_array(np.array(values, dtype))


def latest(transform):
    trees = [0, 1, 2]  # one for each target, with two equal leaves
    return helper.make_node(
        "TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", post_transform=NUMBERS[transform], n_targets=3,
        tree_roots=trees, nodes_featureids=[0] * 3, nodes_modes=tensor([0] * 3, np.uint8),
        nodes_splits=tensor([0] * 3, np.float32), nodes_truenodeids=[0, 2, 4], nodes_falsenodeids=[1, 3, 5],
        nodes_trueleafs=[1] * 3, nodes_falseleafs=[1] * 3, leaf_targetids=[0, 0, 1, 1, 2, 2],
        leaf_weights=tensor(MARGINS.repeat(2), np.float32),
    )


def regressor(transform):
    return helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", post_transform=transform, n_targets=3,
        nodes_treeids=[0], nodes_nodeids=[0], nodes_featureids=[0], nodes_values=[0.0], nodes_modes=["LEAF"],
        nodes_truenodeids=[0], nodes_falsenodeids=[0], target_treeids=[0] * 3, target_nodeids=[0] * 3,
        target_ids=[0, 1, 2], target_weights=MARGINS.tolist(),
    )


def model(node, version):
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, w]) for n, w in (("x", 1), ("y", 3))]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", version)]
    made = helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:]), opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def shown(what, numbers):
    print(f"  {what:38}", " ".join(f"{number:.4f}" for number in np.ravel(numbers)))


x = {"x": np.zeros((1, 1), np.float32)}
for transform in NUMBERS:
    print(transform)
    shown("specified", SPECIFIED[transform])
    for kind, node, version in (("TreeEnsembleRegressor", regressor, 3), ("TreeEnsemble", latest, 5)):
        made = model(node(transform), version)
        session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        shown(f"{kind} by ONNX Runtime", session.run(None, x)[0])
    shown("TreeEnsemble by ONNX's reference", ReferenceEvaluator(made).run(None, x)[0])
PY

echo "onnx 1.23.2, onnxruntime 1.32.0: margins of 0.5, -0.25 and 0"
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
diff "$work/seen" - <<'WANT'
NONE
  specified                              0.5000 -0.2500 0.0000
  TreeEnsembleRegressor by ONNX Runtime  0.5000 -0.2500 0.0000
  TreeEnsemble by ONNX Runtime           0.5000 -0.2500 0.0000
  TreeEnsemble by ONNX's reference       0.5000 -0.2500 0.0000
SOFTMAX
  specified                              0.4810 0.2272 0.2918
  TreeEnsembleRegressor by ONNX Runtime  0.4810 0.2272 0.2918
  TreeEnsemble by ONNX Runtime           0.6225 0.4378 0.5000
  TreeEnsemble by ONNX's reference       0.5000 -0.2500 0.0000
LOGISTIC
  specified                              0.6225 0.4378 0.5000
  TreeEnsembleRegressor by ONNX Runtime  0.6225 0.4378 0.5000
  TreeEnsemble by ONNX Runtime           0.4810 0.2272 0.2918
  TreeEnsemble by ONNX's reference       0.5000 -0.2500 0.0000
WANT
