#!/usr/bin/env bash
# A file of string keys that TensorFlow Recommenders Addons saves has no text of more than 22 bytes.
#
# Guess: `save_to_file_system` of a table with string keys writes the strings, with their lengths or an end.
# What happens: it writes the 24 bytes that each string object takes in memory. A text of up to 22 bytes lies within these; of a longer one
# the file has its length and the address at which it lay. The rows are right, and nobody can say any more whose they are. A checkpoint by the
# default saver keeps the whole text.
# Why it matters: `table.save_to_file_system`, and with it FileSystemSaver, is how large tables of TFRA are saved and taken to a server. URLs, UUIDs of 36
# characters and composed keys are longer than 22 bytes; the save says nothing. Export such a table (`export()`) and write the keys yourself.
# Source: https://github.com/tensorflow/recommenders-addons/blob/master/tensorflow_recommenders_addons/dynamic_embedding/core/kernels/cuckoo_hashtable_op.cc,
# https://github.com/tensorflow/tensorflow/blob/master/third_party/xla/third_party/tsl/tsl/platform/ctstring_internal.h
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow-recommenders-addons==0.8.1 tensorflow-cpu==2.16.2 tf_keras==2.16.0 'numpy<2' setuptools==80.9.0

cat > "$work/run.py" <<'PY'
import os

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

table = de.get_variable("page", tf.string, tf.float32, dim=2, initializer=0.0)
for length in (5, 22, 23, 36):
    text = ("k%02d" % length + "abcdefghijklmnopqrstuvwxyz0123456789")[:length]
    table.clear()
    table.upsert(tf.constant([text]), tf.ones([1, 2]))
    table.tables[0].save_to_file_system("saved", file_name=f"page{length}")
    with open(f"saved/page{length}-keys", "rb") as file:
        data = file.read()
    print(f"a key of {length} bytes: {len(data)} bytes in the file, the text is {'' if text.encode() in data else 'not '}among them")
    if length > 22:
        print("    the first number in it, without its lowest two bits:", int.from_bytes(data[:8], "little") >> 2)

checkpoint = tf.train.Checkpoint(table=table)
path = checkpoint.save("checkpoint/ck")
name = next(name for name, _ in tf.train.list_variables(path) if name.endswith("table-keys"))
print("checkpoint:", tf.train.load_checkpoint(path).get_tensor(name))
PY

echo "tensorflow-recommenders-addons 0.8.1, tensorflow 2.16.2"
(cd "$work" && venv/bin/python run.py 2>/dev/null) | grep -v _SingleDeviceSaver | tee "$work/seen"
diff "$work/seen" - <<'WANT'
a key of 5 bytes: 24 bytes in the file, the text is among them
a key of 22 bytes: 24 bytes in the file, the text is among them
a key of 23 bytes: 24 bytes in the file, the text is not among them
    the first number in it, without its lowest two bits: 23
a key of 36 bytes: 24 bytes in the file, the text is not among them
    the first number in it, without its lowest two bits: 36
checkpoint: [b'k36abcdefghijklmnopqrstuvwxyz0123456']
WANT
