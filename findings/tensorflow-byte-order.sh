#!/usr/bin/env bash
# tf.make_tensor_proto sends big-endian arrays as they lie, and their reader takes them for little-endian.
#
# Guess: an array of NumPy is its numbers: `tf.make_tensor_proto` of ids [1, 2] of dtype ">i8" is the request for ids 1 and 2, as `tf.constant` of it is.
# What happens: its bytes are copied. The message says DT_INT64, for which TensorFlow means little-endian: ids 72057594037927936 and 144115188075855872.
# `tf.make_ndarray` of the same message says so too; an array of one id is refused. OpenVINO's client for the same protocol, ovmsclient, copies likewise over gRPC. tritonclient
# refuses such an array.
# Why it matters: `np.frombuffer(keys, ">i8")` is how ids are read that Java wrote (Kafka's LongSerializer, HBase, DataOutputStream). Requests of two ids and more are answered, with
# default rows, or those of other ids. `.astype(np.int64)` first. A fix was merged in June 2026; 2.21.0 does not have it.
# Source: https://github.com/tensorflow/tensorflow/issues/55789, https://github.com/tensorflow/tensorflow/pull/121394
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0 'tritonclient[http]==2.73.0'
python3 -m venv "$work/ovms"
"$work/ovms/bin/pip" install --quiet --disable-pip-version-check ovmsclient==2023.1 setuptools==80.9.0

cat > "$work/run.py" <<'PY'
import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import numpy as np
import tensorflow as tf
import tritonclient.http as triton

keys = b"\0\0\0\0\0\0\0\1" b"\0\0\0\0\0\0\0\2"  # two keys of Kafka, by Java's LongSerializer
ids = np.frombuffer(keys, ">i8")
print("NumPy:", ids.tolist(), "tf.constant:", tf.constant(ids).numpy().tolist())
message = tf.make_tensor_proto(ids)
print("make_tensor_proto:", message.tensor_content == keys, "make_ndarray of it:", tf.make_ndarray(message).tolist())
print("of astype(int64):", tf.make_ndarray(tf.make_tensor_proto(ids.astype(np.int64))).tolist())
try:
    triton.InferInput("id", [2], "INT64").set_data_from_numpy(ids)
except triton.InferenceServerException as error:
    print("tritonclient:", str(error)[:39])
try:
    tf.make_tensor_proto(ids[:1])
except TypeError as error:
    print("make_tensor_proto of one id:", error)
PY
cat > "$work/ovms.py" <<'PY'
import numpy as np
from ovmsclient.tfs_compat.grpc.tensors import make_ndarray, make_tensor_proto

print("ovmsclient:", make_ndarray(make_tensor_proto(np.array([1, 2], ">i8"))).tolist())
PY

echo "tensorflow 2.21.0, tritonclient 2.73.0, ovmsclient 2023.1"
(cd "$work" && venv/bin/python run.py 2>/dev/null && ovms/bin/python ovms.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
NumPy: [1, 2] tf.constant: [1, 2]
make_tensor_proto: True make_ndarray of it: [72057594037927936, 144115188075855872]
of astype(int64): [1, 2]
tritonclient: got unexpected datatype None from numpy
make_tensor_proto of one id: Element type not supported in TensorProto: int64.
ovmsclient: [72057594037927936, 144115188075855872]
WANT
