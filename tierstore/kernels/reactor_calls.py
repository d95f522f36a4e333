"""Calls of gRPC that a reactor answers. See `reactor.py`."""

from __future__ import annotations

import numba as nb

from tierstore.kernels.reactor_words import OTHER


@nb.njit
def answer_call(me, fd, text, message, message_bytes, began):  # type: ignore[no-untyped-def]
    return OTHER
