"""Rows of four bits by NumPy alone, step by step as `schema/layout.md` has them: what every path is compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def encode(vectors: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """uint8[n, 4 + ⌈dim / 2⌉] of [n, dim]."""
    numbers = np.asarray(vectors, np.float32)
    if not len(numbers):
        return np.empty((0, 4 + (numbers.shape[1] + 1) // 2), np.uint8)
    smallest, largest = numbers.min(axis=1, keepdims=True), numbers.max(axis=1, keepdims=True)
    offset = (smallest + np.float32(0)).astype(np.float16)  # -0 + 0 is 0
    scale = ((largest - offset.astype(np.float32)) / np.float32(15)).astype(np.float16)
    scale[scale == 0] = 1
    steps = (numbers - offset.astype(np.float32)) * (np.float32(1) / scale.astype(np.float32))
    codes = np.rint(np.clip(steps, 0, 15)).astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return np.concatenate([scale.view(np.uint8), offset.view(np.uint8), codes[:, ::2] | codes[:, 1::2] << 4], axis=1)


def decode(rows: npt.NDArray[np.uint8], dim: int) -> Floats:
    """float32[n, dim]. Sums are exact in float64, so that they are rounded once."""
    scale, offset = (np.ascontiguousarray(rows[:, at : at + 2]).view(np.float16).astype(np.float64) for at in (0, 2))
    codes = np.stack([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=2).reshape(len(rows), 2 * rows.shape[1] - 8)[:, :dim]
    decoded: Floats = (offset + scale * codes).astype(np.float32)
    return decoded


def rounded(vectors: npt.ArrayLike) -> Floats:
    """What is read of vectors [n, dim] that were stored so."""
    numbers = np.asarray(vectors, np.float32)
    return decode(encode(numbers), numbers.shape[1])
