#!/usr/bin/env bash
# Keras' Hashing gives nearly every id another row once it has a mask, and hashes numbers as decimal text.
#
# Guess: mask_value sets one value aside and leaves the rows of the others alone; a number has one row, whatever its type.
# What happens: with a mask the layer hashes into one row fewer and adds 1, so nearly all rows move (its documentation
# says that there is one row fewer). Numbers are hashed as decimal
# text, which makes 17, "17" and 17.9 one key, as floats are cut first; an odd id above 2**24 that passed through float32
# is another id.
# Why it matters: who adds a mask to a trained model, or serves a table without the mask that it was trained with, reads a
# wrong row for nearly every id, and none is out of range. Whoever hashes the eight bytes of an id, as most hashes of
# integers do, never meets the layer's rows.
# Source: https://github.com/keras-team/keras/blob/master/keras/src/layers/preprocessing/hashing.py
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check keras==3.15.1 tensorflow-cpu==2.21.0

cat > "$work/run.py" <<'PY'
import numpy as np
import tensorflow as tf
from keras.layers import Hashing


def rows(keys, **options):
    return np.asarray(Hashing(1000, **options)(keys)).tolist()


print("17, as text, as 17.9:", rows(np.array([17])), rows(tf.constant(["17"])), rows(np.array([17.9], np.float32)))
print("16777217, as float32:", rows(np.array([16777217])), rows(np.array([16777217], np.float32)))
ids = np.arange(10_000)
same = np.equal(rows(ids), rows(ids, mask_value=-1)).sum()
print("of 10000 ids with the same row once -1 is masked:", same)
print("the mask itself:", rows(np.array([-1]), mask_value=-1))
PY

echo "keras 3.15.1, tensorflow 2.21.0"
(cd "$work" && KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python run.py 2> log) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
17, as text, as 17.9: [838] [838] [838]
16777217, as float32: [145] [638]
of 10000 ids with the same row once -1 is masked: 7
the mask itself: [0]
WANT
