"""Trains a dynamic embedding of TFRA while the program of docs/migrate-tfra.md, which comes on stdin, writes it. Run in an environment with TFRA.

It leaves `now.npz`, the table as it is in the end, and says how many rows the last minute has changed and looked up.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding

DIM = 8


class Trainer:
    """A table that grows by the keys that it is trained with."""

    def __init__(self) -> None:
        start = tf.keras.initializers.RandomNormal(stddev=0.1, seed=1)
        self.item = dynamic_embedding.get_variable("item", tf.int64, tf.float32, dim=DIM, initializer=start)
        self._shadow = dynamic_embedding.shadow_ops.ShadowVariable(self.item, name="item_shadow")
        self._optimizer = dynamic_embedding.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))

    def train(self, item: Any, keys: np.ndarray) -> np.ndarray:
        assert item is self.item
        with tf.GradientTape() as tape:
            rows = dynamic_embedding.shadow_ops.embedding_lookup(self._shadow, tf.constant(keys, tf.int64))
            loss = tf.reduce_sum(tf.square(rows - 1.0))
        self._optimizer.apply_gradients(zip(tape.gradient(loss, [self._shadow]), [self._shadow], strict=True))
        return keys

    def rows(self) -> dict[int, bytes]:
        keys, rows = (tensor.numpy() for tensor in self.item.export())
        return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def main() -> None:
    trainer, rng = Trainer(), np.random.default_rng(1)
    for keys in (np.array([-3, 1 << 62, 7, 7]), rng.integers(0, 1000, 300)):
        trainer.train(trainer.item, keys)
    minutes = [[rng.integers(0, 2000, 64) for _ in range(3)] for _ in range(2)]
    program = compile(sys.stdin.read(), "docs/migrate-tfra.md", "exec")
    exec(program, {"item": trainer.item, "train": trainer.train, "minutes": minutes})
    before, last = trainer.rows(), rng.integers(0, 2000, 64)
    trainer.train(trainer.item, last)
    after = trainer.rows()
    changed = {key for key, row in after.items() if before.get(key) != row}
    print("changed what was looked up:", changed == set(last.tolist()), "numpy", np.__version__)
    np.savez(
        "now.npz",
        keys=np.array(list(before)),
        rows=np.array([np.frombuffer(row, np.float32) for row in before.values()]),
    )


main()
