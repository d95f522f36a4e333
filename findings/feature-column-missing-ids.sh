#!/usr/bin/env bash
# TensorFlow's hashed feature columns leave out the id -1 and the empty text; Keras' Hashing, which replaces them, does not.
#
# Guess: the migration guide names Hashing as the layer for categorical_column_with_hash_bucket, and both are to_hash_bucket_fast of
# the id's text, so moving to a layer with as many bins keeps each id's row.
# What happens: the hash is the same, but before it a dense input becomes a sparse one without -1 and without "" (the column's documentation says so, the layer's is silent), so these
# have no row: their embedding is zeros, and a mean does not count them. The layer gives both a row as any other.
# Why it matters: -1 and "" are what histories are padded with. Who serves such a table by the hash alone adds the row of a
# stranger for each place of padding, and divides a mean by too many.
# Source: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/python/feature_column/feature_column_v2.py,
# https://www.tensorflow.org/guide/migrate/migrating_feature_columns
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check keras==3.15.1 tensorflow-cpu==2.21.0

cat > "$work/run.py" <<'PY'
import numpy as np
import tensorflow as tf
from keras.layers import Hashing

columns = tf.feature_column


def places(values):
    """By the feature column: where each example's indicator is not 0."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = tf.constant(values)
        column = columns.categorical_column_with_hash_bucket("f", 1000, dtype=values.dtype)
        dense = tf.compat.v1.feature_column.input_layer({"f": values}, [columns.indicator_column(column)])
        return [np.flatnonzero(row).tolist() for row in session.run(dense)]


for values in ([[17], [0], [-1]], [["17"], ["0"], [""]]):
    layer = np.asarray(Hashing(1000)(tf.constant(values))).ravel().tolist()
    print([value for (value,) in values], "column:", places(values), "layer:", layer)

with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    column = columns.categorical_column_with_hash_bucket("f", 1000, dtype=tf.int32)
    ones = columns.embedding_column(column, 1, combiner="mean", initializer=tf.compat.v1.ones_initializer())
    dense = tf.compat.v1.feature_column.input_layer({"f": tf.constant([[17, -1], [-1, -1]])}, [ones])
    session.run(tf.compat.v1.global_variables_initializer())
    print("mean of rows of 1.0, for [17, -1] and [-1, -1]:", session.run(dense)[:, 0].tolist())
PY

echo "keras 3.15.1, tensorflow 2.21.0"
(cd "$work" && KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python run.py 2> log) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
[17, 0, -1] column: [[838], [735], []] layer: [838, 735, 430]
['17', '0', ''] column: [[838], [735], []] layer: [838, 735, 263]
mean of rows of 1.0, for [17, -1] and [-1, -1]: [1.0, 0.0]
WANT
