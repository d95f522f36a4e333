#!/usr/bin/env bash
# With FileSystemSaver of TensorFlow Recommenders Addons, all checkpoints that tf.train.Checkpoint puts into a folder share one set of rows.
#
# Guess: a restored checkpoint has the rows that the table had when it was saved, as with the default saver, and no others.
# What happens: with `FileSystemSaver` and `tf.train.Checkpoint`, the checkpoint's own files hold no rows. They lie beside it, in
# `TFRADynamicEmbedding/`, under names without the checkpoint's number, and the next save writes over them. Restoring the first of two
# checkpoints gives the rows of the second. Nor is the table emptied first: what it had and the files have not stays in it.
# Why it matters: going back to yesterday's checkpoint takes its dense weights and today's embeddings, and no error is raised; keys that were
# removed, or that came since, are served again. Who imports the files while training goes on reads what is being overwritten. Use
# `de.train.DECheckpoint`, which has a folder for each checkpoint (or give each one a folder of its own), and restore into a new process: neither
# empties the table. `FileSystemSaver(save_path=…)` does not help: it is as fixed.
# Source: https://github.com/tensorflow/recommenders-addons/blob/master/docs/api_docs/tfra/dynamic_embedding/FileSystemSaver.md
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check \
    tensorflow-recommenders-addons==0.8.1 tensorflow-cpu==2.16.2 tf_keras==2.16.0 'numpy<2' setuptools==80.9.0

cat > "$work/run.py" <<'PY'
import glob
import os

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de


def keys(*ids):
    return tf.constant(ids, tf.int64)


def content(table):
    ids, rows = (tensor.numpy() for tensor in table.export())
    return dict(sorted(zip(ids.tolist(), rows[:, 0].tolist())))


for name, saver, kind in (
    ("default", None, tf.train.Checkpoint),
    ("FileSystemSaver", de.FileSystemSaver(), tf.train.Checkpoint),
    ("DECheckpoint", de.FileSystemSaver(), de.train.DECheckpoint),
):
    creator = de.CuckooHashTableCreator(saver=saver)
    item = de.get_variable(f"item_{name}", tf.int64, tf.float32, dim=2, initializer=0.0, kv_creator=creator)
    checkpoint = kind(item=item)
    item.upsert(keys(1, 2), tf.ones([2, 2]))
    monday = checkpoint.save(f"{name}/ck")
    item.remove(keys(2))
    item.upsert(keys(1, 3), tf.fill([2, 2], 7.0))
    checkpoint.save(f"{name}/ck")
    item.upsert(keys(9), tf.fill([1, 2], 9.0))
    checkpoint.restore(monday)
    print(f"{name}: saved as ck-1 {{1: 1.0, 2: 1.0}}; after restore of {os.path.basename(monday)}", content(item))
    print("    files of rows:", len(glob.glob(f"{name}/TFRA*/*-values")))
PY

echo "tensorflow-recommenders-addons 0.8.1, tensorflow 2.16.2"
(cd "$work" && venv/bin/python run.py 2>/dev/null) | grep -v _SingleDeviceSaver | tee "$work/seen"
diff "$work/seen" - <<'WANT'
default: saved as ck-1 {1: 1.0, 2: 1.0}; after restore of ck-1 {1: 1.0, 2: 1.0}
    files of rows: 0
FileSystemSaver: saved as ck-1 {1: 1.0, 2: 1.0}; after restore of ck-1 {1: 7.0, 3: 7.0, 9: 9.0}
    files of rows: 1
DECheckpoint: saved as ck-1 {1: 1.0, 2: 1.0}; after restore of ck-1 {1: 1.0, 2: 1.0, 3: 7.0, 9: 9.0}
    files of rows: 2
WANT
