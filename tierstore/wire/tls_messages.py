"""A limit on the TLS handshake messages of a client: a client that sends too many is cut off.

OpenSSL keeps reading while records come without application data. Key updates are such records and are allowed at any time, so a client could keep
one call busy for good. A normal client sends a few of them in the life of a connection.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.raw import call_at, load_i64

MOST = 200  # for one connection, its handshake included
GET_DATA, SET_DATA, SET_SHUTDOWN = range(3)  # places in a table of addresses of functions
_HANDSHAKE, _RECEIVED_SHUTDOWN = 22, 2


@compiled_c(
    types.void(types.int32, types.int32, types.int32, types.int64, types.int64, types.int64, types.int64), when=LAST
)
def bound(is_ours: Any, version: Any, kind: Any, data: Any, size: Any, session: Any, table: Any) -> Any:
    """OpenSSL's message callback: after MOST messages the session ends, as if the client had ended it. `table` has the functions that it calls."""
    if is_ours == 0 and kind == _HANDSHAKE:
        count = call_at(load_i64(table, GET_DATA), session, 0, 0, 0, 0, 0) + 1
        call_at(load_i64(table, SET_DATA), session, 0, count, 0, 0, 0)
        if count > MOST:
            call_at(load_i64(table, SET_SHUTDOWN), session, _RECEIVED_SHUTDOWN, 0, 0, 0, 0)
