"""The table that look-ups over the wire are measured on: its names, its keys, and the vectors that are known from them."""

from __future__ import annotations

import numpy as np

DIM = 32
ROW_BYTES = 4 * DIM
_STEP = -7046029254386353131
_INVERSE = (pow(_STEP, -1, 1 << 64) + (1 << 63)) % (1 << 64) - (1 << 63)
MODEL, FEATURE = "wire", "item_id"


def keys_of(rows: np.ndarray) -> np.ndarray:
    """Keys of these rows: distinct, spread over all 64 bits."""
    with np.errstate(over="ignore"):
        return rows.astype(np.int64) * np.int64(_STEP)


def rows_of(keys: np.ndarray) -> np.ndarray:
    """The rows of these keys."""
    with np.errstate(over="ignore"):
        return keys * np.int64(_INVERSE)


def vectors_of(keys: np.ndarray) -> np.ndarray:
    """float32[n, DIM], known from the key, so that answers can be checked."""
    return (keys & 0xFFFF).astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32)
