"""Compiled calls for tests of the framing of requests."""

from __future__ import annotations

from typing import Any

from tierstore.kernels import compiled
from tierstore.reactor.layout import connection_at
from tierstore.wire.http1 import frame as http1_frame
from tierstore.wire.http1.head import head_at


@compiled("int64(int64, int64, int64)")
def frame(at: Any, n: Any, found: Any) -> Any:
    return http1_frame.frame_at(at, n, head_at(found))


@compiled("UniTuple(int64, 2)(int64, int64, int64, int64)")
def decode(conns: Any, at: Any, size: Any, most: Any) -> Any:
    return http1_frame.decode(connection_at(conns, 0), at, size, most)
