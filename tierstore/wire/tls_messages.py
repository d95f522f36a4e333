"""Messages of a TLS handshake that a client sends, counted: who sends too many is cut off.

OpenSSL reads on where a record has no data of the application, as long as there are any: with updates of its keys, which are allowed at
any time, a client could keep one call busy for good. A good client sends a few in the life of a connection.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.raw import call_at, load_i64

MOST = 200  # of one connection, its handshake included
GET_DATA, SET_DATA, SET_SHUTDOWN = range(3)  # places in a table of functions' addresses
_HANDSHAKE, _RECEIVED_SHUTDOWN = 22, 2


@compiled_c(
    types.void(types.int32, types.int32, types.int32, types.int64, types.int64, types.int64, types.int64), when=LAST
)
def bound(is_ours: Any, version: Any, kind: Any, data: Any, size: Any, session: Any, table: Any) -> Any:
    """OpenSSL's callback for messages: beyond MOST the session has ended, as if the client had said so. `table` has what it calls."""
    if is_ours == 0 and kind == _HANDSHAKE:
        count = call_at(load_i64(table, GET_DATA), session, 0, 0, 0, 0, 0) + 1
        call_at(load_i64(table, SET_DATA), session, 0, count, 0, 0, 0)
        if count > MOST:
            call_at(load_i64(table, SET_SHUTDOWN), session, _RECEIVED_SHUTDOWN, 0, 0, 0, 0)
