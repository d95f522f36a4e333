#!/usr/bin/env bash
# In a checkpoint of a partitioned table, the row of an id is not the row of that number.
#
# Guess: `load_checkpoint(…).get_tensor("item")[id]` is the row that `embedding_lookup(item, id)` gave in training.
# What happens: a variable with a partitioner is one tensor in the checkpoint, its partitions one behind the other. `tf.compat.v1.nn.embedding_lookup` and
# `embedding_lookup_sparse` deal ids out by modulo unless they are told otherwise (`partition_strategy="mod"`): with three partitions id 1 is
# the first row of the second one. The tensor has the shape of the table, so nothing is noticed. Of a variable that is not partitioned, or with
# `"div"`, as `safe_embedding_lookup_sparse` and the feature columns have it, and of a `ShardedVariable` of TensorFlow 2, rows are in the order of ids.
# Why it matters: tables of models with parameter servers (TF1 graphs that still train, DeepRec) are partitioned because they are large. The checkpoint does not say which lookup
# was used. An export that numbers the rows of the tensor serves, for nearly all ids, another id's row after "mod". The order is then: id % n, then id // n.
# Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/nn/embedding_lookup,
# https://github.com/tensorflow/tensorflow/pull/15164
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0

cat > "$work/run.py" <<'PY'
import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

v1 = tf.compat.v1
IDS = np.arange(7)


def trained(partitions, **options):
    """Rows of the checkpoint of a table that was trained until the row of each id is that id."""
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable(
            "item", [7, 1], initializer=v1.zeros_initializer(), partitioner=v1.fixed_size_partitioner(partitions)
        )
        rows = v1.nn.embedding_lookup(table, tf.constant(IDS), **options)
        loss = tf.reduce_sum(rows * tf.constant(-IDS[:, None], tf.float32))
        step = v1.train.GradientDescentOptimizer(1.0).minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(step)
        looked_up = session.run(rows)[:, 0].tolist()
        path = v1.train.Saver().save(session, "saved/rows")
    return looked_up, tf.train.load_checkpoint(path).get_tensor("item")[:, 0].tolist()


for partitions, options in ((1, {}), (3, {}), (3, {"partition_strategy": "div"})):
    looked_up, rows = trained(partitions, **options)
    print(f"{partitions} partitions {options or ''}: ids 0 to 6 give {looked_up}, rows 0 to 6 are {rows}")
sharded = ShardedVariable([tf.Variable([[float(id)] for id in part]) for part in np.array_split(IDS, 3)])
path = tf.train.Checkpoint(item=sharded).save("saved2/rows")
rows = tf.train.load_checkpoint(path).get_tensor("item/.ATTRIBUTES/VARIABLE_VALUE")[:, 0].tolist()
print(f"ShardedVariable: ids 0 to 6 give {tf.nn.embedding_lookup(sharded, IDS)[:, 0].numpy().tolist()}, rows 0 to 6 are {rows}")
PY

echo "tensorflow 2.21.0"
(cd "$work" && venv/bin/python run.py 2>/dev/null) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
1 partitions : ids 0 to 6 give [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows 0 to 6 are [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
3 partitions : ids 0 to 6 give [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows 0 to 6 are [0.0, 3.0, 6.0, 1.0, 4.0, 2.0, 5.0]
3 partitions {'partition_strategy': 'div'}: ids 0 to 6 give [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows 0 to 6 are [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
ShardedVariable: ids 0 to 6 give [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows 0 to 6 are [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
WANT
