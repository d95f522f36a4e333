#!/usr/bin/env bash
# A new lookup table over a vocabulary file that was replaced has the words of the old file.
#
# Guess: `StaticHashTable(TextFileInitializer(path, …))`, and Keras' `StringLookup(vocabulary=path)`, read the file when they are made.
# What happens: the table is a resource of the process that is named after the path. While the process lives, another object over the same path
# gets the first one's content, also when the first object is gone, and reads nothing. Its size() and, in Keras, get_vocabulary() are those of
# the old file too. A copy under another name is read, and so is the same file by a new process.
# Why it matters: a trainer or a feature service that runs for days and makes its layers anew from `vocabulary.txt` of each day goes on giving yesterday's row
# numbers, beside an embedding whose rows are in the order of today's file: other rows, and no error. Put the day into the name of the file,
# or make the table with `experimental_is_anonymous=True`.
# Source: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/python/ops/lookup_ops.py (TextFileInitializer._shared_name),
# https://github.com/tensorflow/tensorflow/issues/56974
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0 keras==3.15.1

cat > "$work/run.py" <<'PY'
import gc
import os
import sys

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import keras
import tensorflow as tf

WORDS = tf.constant(["shoes", "hats", "socks"])


def write(path, *words):
    with open(path, "w") as file:
        file.write("\n".join(words) + "\n")


def table(path):
    index = tf.lookup.TextFileIndex
    file = tf.lookup.TextFileInitializer(path, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    made = tf.lookup.StaticHashTable(file, -1)
    return made.lookup(WORDS).numpy().tolist(), int(made.size())


def layer(path):
    made = keras.layers.StringLookup(vocabulary=path)
    return made(WORDS).numpy().tolist(), [str(word) for word in made.get_vocabulary()]


if len(sys.argv) > 1:
    print("another process:", table("table.txt"))
else:
    for make, path in ((table, "table.txt"), (layer, "layer.txt")):
        write(path, "shoes", "hats")
        print(f"{make.__name__}, yesterday's file:", *make(path))
        gc.collect()
        for name in (path, f"new-{path}"):
            write(name, "socks", "hats", "shoes")
            print(f"{make.__name__}, {'another' if name != path else 'the same'} path, today's words:", *make(name))
    index = tf.lookup.TextFileIndex
    file = tf.lookup.TextFileInitializer("table.txt", tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    made = tf.lookup.StaticHashTable(file, -1, experimental_is_anonymous=True)
    print("anonymous table, the same path, today's words:", made.lookup(WORDS).numpy().tolist())
PY

echo "tensorflow 2.21.0, keras 3.15.1"
(cd "$work" && venv/bin/python run.py 2>/dev/null && venv/bin/python run.py again 2>/dev/null) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
table, yesterday's file: [0, 1, -1] 2
table, the same path, today's words: [0, 1, -1] 2
table, another path, today's words: [2, 1, 0] 3
layer, yesterday's file: [1, 2, 0] ['[UNK]', 'shoes', 'hats']
layer, the same path, today's words: [1, 2, 0] ['[UNK]', 'shoes', 'hats']
layer, another path, today's words: [3, 2, 1] ['[UNK]', 'socks', 'hats', 'shoes']
anonymous table, the same path, today's words: [2, 1, 0]
another process: ([2, 1, 0], 3)
WANT
