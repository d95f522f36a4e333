"""The CPU hash table of TensorFlow Recommenders Addons, driven over stdin and stdout, a line of JSON each way.

Runs in its own virtual environment (TensorFlow wants older packages than tierstore) and so imports nothing of this
project: `python benchmarks/tfra_table.py THREADS`. Commands: `fill` {keys, vectors: .npy files}, `batches` {keys: .npy,
batch}, `answer` {number, to: .npy}, `run` {first, calls}. One process, one caller.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PIECE = 1 << 16


def _quiet() -> Any:
    """Keep stdout for answers: TensorFlow prints there. Returns the stream to answer on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="")
    return answers


def _anonymous_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


class Table:
    def __init__(self, threads: int) -> None:
        import numpy as np
        import tensorflow as tf
        import tensorflow_recommenders_addons as tfra
        from tensorflow_recommenders_addons import dynamic_embedding

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.np, self.tf, self.tables = np, tf, dynamic_embedding
        self.hello = {"tensorflow": tf.__version__, "tfra": tfra.__version__}

    def fill(self, keys: str, vectors: str) -> dict[str, Any]:
        np, tf = self.np, self.tf
        codes, rows = np.load(keys, mmap_mode="r"), np.load(vectors, mmap_mode="r")
        before = _anonymous_bytes()
        self.table = self.tables.CuckooHashTable(
            key_dtype=tf.int64, value_dtype=tf.float32, default_value=tf.zeros([rows.shape[1]]), init_size=len(codes), name="bench"
        )  # fmt: skip
        for begin in range(0, len(codes), PIECE):
            part = slice(begin, begin + PIECE)
            self.table.insert(tf.constant(codes[part]), tf.constant(rows[part]))
        return {"rows": int(self.table.size()), "memory": _anonymous_bytes() - before}

    def batches(self, keys: str, batch: int) -> dict[str, Any]:
        self.keys = self.np.load(keys).reshape(-1, batch)
        return {"batches": len(self.keys)}

    def lookup(self, number: int) -> Any:
        return self.table.lookup(self.tf.constant(self.keys[number % len(self.keys)])).numpy()

    def answer(self, number: int, to: str) -> dict[str, Any]:
        self.np.save(to, self.lookup(number))
        return {}

    def run(self, first: int, calls: int) -> dict[str, Any]:
        took = []
        cpu = time.process_time()
        began = last = time.perf_counter()
        for number in range(first, first + calls):
            self.lookup(number)
            now = time.perf_counter()
            took.append(now - last)
            last = now
        return {"whole": last - began, "calls": took, "cpu": time.process_time() - cpu}


def main() -> None:
    answers = _quiet()
    try:
        table = Table(int(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever keeps it from starting is told
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps(table.hello), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(table, command.pop("do"))(**command)), file=answers)


if __name__ == "__main__":
    main()
