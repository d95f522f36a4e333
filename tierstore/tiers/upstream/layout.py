"""The layout of requests for rows, and of their answers, which `wire.py` describes, for kernels and Python."""

from __future__ import annotations

import numba as nb

THERE, ABSENT, FOREIGN = 1, 2, 3  # states in an answer: FOREIGN is of a partition that the node does not own
LINE_BYTES = 16  # of a request, its first; then come words
UPTO, FLOOR = 2, 3
REQUEST_HEAD_BYTES = 32
ANSWER_HEAD_BYTES = 16
ROWS_STEP = 64  # of bytes: rows begin at a multiple of it, from the answer's first


@nb.njit(inline="always")
def rows_begin(n):  # type: ignore[no-untyped-def]
    """Where the rows begin in an answer for `n` codes."""
    return (ANSWER_HEAD_BYTES + n + ROWS_STEP - 1) & ~(ROWS_STEP - 1)
