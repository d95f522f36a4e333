"""The layout of requests for rows and of their answers (described in `wire.py`), for kernels and Python."""

from __future__ import annotations

import numba as nb

THERE, ABSENT, FOREIGN = 1, 2, 3  # states in an answer; FOREIGN: of a partition that the node does not own
LINE_BYTES = 16  # the first field of a request; words follow
UPTO, FLOOR = 2, 3
REQUEST_HEAD_BYTES = 32
ANSWER_HEAD_BYTES = 16
ROWS_STEP = 64  # rows begin at a multiple of so many bytes from the answer's first


@nb.njit(inline="always")
def rows_begin(n):
    """Where the rows begin in an answer for `n` codes."""
    return (ANSWER_HEAD_BYTES + n + ROWS_STEP - 1) & ~(ROWS_STEP - 1)
