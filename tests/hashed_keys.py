"""A model with hashed features, of every kind of key, and the rows that their keys have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import tierstore

ROWS = 50
IDS = np.array([0, 17, -1, 1 << 62, -(1 << 63), 17], np.int64)
UNSIGNED = IDS.view(np.uint64)
WORDS = ["a", "", "ü", "shoe", "a" * 300, "a"]


def xxh3(content: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(content, seed)


def signed(bits: int) -> int:
    """64 bits as a signed number."""
    return bits - (bits >> 63 << 64)


# written from docs/formats.md: by feature its hash, its keys and their rows
FEATURES: dict[str, tuple[dict[str, Any], Any, list[int]]] = {
    "by_seed": (
        {"mod": ROWS, "seed": 9},
        IDS,
        [xxh3(int(key).to_bytes(8, "little", signed=True), 9) % ROWS for key in IDS],
    ),
    "by_rest": ({"mod": ROWS}, IDS, [int(key) % ROWS for key in IDS]),
    "unsigned": ({"mod": ROWS, "key": "uint64"}, UNSIGNED, [int(key) % ROWS for key in UNSIGNED]),
    "word": ({"mod": ROWS, "key": "string"}, WORDS, [xxh3(word.encode()) % ROWS for word in WORDS]),
    "seeded_word": (
        {"mod": ROWS, "seed": 3, "key": "string"},
        WORDS,
        [xxh3(xxh3(word.encode()).to_bytes(8, "little"), 3) % ROWS for word in WORDS],
    ),
    # rows as Keras 3.15.1, TensorFlow 2.21.0 and scikit-learn 1.9.1 gave them
    "keras_word": (
        {"function": "tensorflow", "mod": ROWS, "mask": "shoe", "key": "string"},
        WORDS,
        [20, 35, 39, 0, 28, 20],
    ),
    "keras_id": ({"function": "tensorflow", "mod": ROWS, "salt": [133, 137]}, IDS, [19, 7, 24, 7, 38, 7]),
    "keras_unsigned": ({"function": "tensorflow", "mod": ROWS, "key": "uint64"}, UNSIGNED, [35, 38, 33, 3, 46, 38]),
    "sklearn_word": (
        {"function": "sklearn", "mod": ROWS // 2, "prefix": "word=", "key": "string"},
        WORDS,
        [17, 7, 24, 11, 43, 17],
    ),
    "spark_id": (
        {"function": "spark_xxhash64", "mod": ROWS},
        IDS,
        [signed(xxhash.xxh64_intdigest(int(key).to_bytes(8, "little", signed=True), 42)) % ROWS for key in IDS],
    ),
}
PADDING = FEATURES["by_seed"][2][1]  # the row of 17


def vectors(rows: Any, shift: float = 0.0) -> np.ndarray:
    """What the table has for row numbers, float32 [n, 4]; `shift` tells later values apart."""
    return np.repeat(np.asarray(rows, np.float32)[:, None] + shift, 4, axis=1)


def write_hashed(where: Path, version: int = 1, *, delta_seq: int = 0) -> Path:
    """A snapshot of the model `ctr`: one table `item` whose row r is `vectors([r])`, these features, bags, and `row` without a hash."""
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        writer.table("item", dim=4).write(np.arange(ROWS), vectors(np.arange(ROWS)))
        for name, (how, _, _) in FEATURES.items():
            writer.feature(name, table="item", hash=how)
        writer.feature("bag", table="item", combiner="sum", hash=FEATURES["by_seed"][0], padding_key=PADDING)
        writer.feature("row", table="item")
    return where
