"""Checks of arguments to a cache of rows: shapes and dtypes of arrays. Pure functions."""

from __future__ import annotations

import numpy as np

from tierstore.kernels.codec import out_code
from tierstore.types import Keys, Rows, States, TableSpec, Vectors


def check_answer(spec: TableSpec, keys: Keys, out: Vectors, state: States) -> None:
    """Raise ValueError unless `out` [n, dim] and `state` uint8[n] fit the answer for `keys` int64[n]."""
    out_code(out)
    n = len(keys)
    if out.shape != (n, spec.dim) or state.shape != (n,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"expected contiguous out[{n}, {spec.dim}] and state[{n}], got {out.shape} and {state.shape}")


def check_rows(spec: TableSpec, keys: Keys, rows: Rows) -> Rows:
    """`rows`, made contiguous, if they are the stored rows of `keys`: uint8[n, row_bytes]. ValueError otherwise."""
    if rows.shape != (len(keys), spec.row_bytes) or rows.dtype != np.uint8:
        raise ValueError(f"expected rows uint8[{len(keys)}, {spec.row_bytes}], got {rows.dtype}{list(rows.shape)}")
    return np.ascontiguousarray(rows)
