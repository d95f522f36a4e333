"""Compiled calls for tests of the framing of requests."""

from __future__ import annotations

from typing import Any

from tierstore.kernels import compiled, httpframe
from tierstore.kernels.httphead import head_at
from tierstore.kernels.reactor_words import connection_at


@compiled("int64(int64, int64, int64)")
def frame(at: Any, n: Any, found: Any) -> Any:
    return httpframe.frame_at(at, n, head_at(found))


@compiled("UniTuple(int64, 2)(int64, int64, int64, int64)")
def decode(conns: Any, at: Any, size: Any, most: Any) -> Any:
    return httpframe.decode(connection_at(conns, 0), at, size, most)
