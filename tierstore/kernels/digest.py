"""An order-independent digest of a table's rows, to check that the stored rows are the rows that were built.

Each (key, row) is hashed to 64 bits and the hashes are summed modulo 2**64, so parts of a table may be digested in any order, by any process, and
added. The digest detects lost, doubled, swapped and damaged rows; it does not stop someone who makes two tables look alike.

Free functions of arrays; any thread; the interpreter lock is released.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import compiled
from tierstore.types import Keys, Rows

# the odd multipliers and the final mix are those of MurmurHash3's 64-bit finalizer (Appleby, public domain)
_C1 = np.uint64(0xFF51AFD7ED558CCD)
_C2 = np.uint64(0xC4CEB9FE1A85EC53)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_U64S = types.Array(types.uint64, 1, "C", readonly=True)
_WORDS = types.Array(types.uint64, 2, "C", readonly=True)


def digest_rows(keys: Keys, rows: Rows) -> int:
    """The digest of `keys` (int64 [n]) and `rows` (uint8 [n, row_bytes]), in [0, 2**64). Digests of parts add up modulo 2**64."""
    return int(_digest(np.ascontiguousarray(keys).view(np.uint64), _words(rows), np.uint64(rows.shape[1])))


def row_digests(keys: Keys, rows: Rows) -> npt.NDArray[np.uint64]:
    """The digest of each key with its row, uint64 [n]; `digest_rows` is their sum."""
    out = np.empty(len(keys), np.uint64)
    _digests(np.ascontiguousarray(keys).view(np.uint64), _words(rows), np.uint64(rows.shape[1]), out)
    return out


def _words(rows: Rows) -> npt.NDArray[np.uint64]:
    """Rows as words; the last word of each row is filled with zeros."""
    row_bytes = rows.shape[1]
    rows = np.ascontiguousarray(rows)
    if row_bytes % 8:
        padded = np.zeros((len(rows), row_bytes + 8 - row_bytes % 8), np.uint8)
        padded[:, :row_bytes] = rows
        rows = padded
    return rows.reshape(-1).view(np.uint64).reshape(len(rows), rows.shape[1] // 8)


@compiled("uint64(uint64)", inner=True)
def _mix(x: np.uint64) -> np.uint64:
    x ^= x >> np.uint64(33)
    x *= _C1
    x ^= x >> np.uint64(33)
    x *= _C2
    return x ^ (x >> np.uint64(33))


@compiled(types.uint64(types.uint64, _WORDS, types.int64, types.uint64), inner=True)
def _row_digest(key: Any, words: Any, row: Any, row_bytes: Any) -> Any:
    h = _mix(key + _GOLDEN) ^ row_bytes
    for j in range(words.shape[1]):
        h = (h ^ words[row, j]) * _C1
        h ^= h >> np.uint64(29)
    return _mix(h)


@compiled(types.uint64(_U64S, _WORDS, types.uint64))
def _digest(keys: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64], row_bytes: np.uint64) -> np.uint64:
    total = np.uint64(0)
    for i in range(keys.shape[0]):
        total += _row_digest(keys[i], words, i, row_bytes)
    return total


@compiled(types.void(_U64S, _WORDS, types.uint64, types.uint64[::1]))
def _digests(
    keys: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64], row_bytes: np.uint64, out: npt.NDArray[np.uint64]
) -> None:
    for i in range(keys.shape[0]):
        out[i] = _row_digest(keys[i], words, i, row_bytes)
