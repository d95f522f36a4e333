"""The TLS handshake of connections, after which they belong to a reactor. Event loop only."""

from __future__ import annotations

import asyncio
import socket

from tierstore.service.openssl import WANTS_READ, Context, Session
from tierstore.service.tls import has_ended

HANDSHAKE_S = 10.0  # for a client to begin TLS


async def handshake(sock: socket.socket, context: Context) -> Session:
    """The session of a connection after its handshake. OSError if that fails, or takes too long."""
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    session = context.session(fd)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            while (wanted := session.accept()) is not None:
                await _ready(loop, fd, wanted)
        session.names, end_s = session.certificate()
        if has_ended(end_s):
            raise ConnectionError("the client's certificate has expired")
    except BaseException:
        session.close(abort=True)
        raise
    return session


async def _ready(loop: asyncio.AbstractEventLoop, fd: int, wanted: int) -> None:
    add, remove = (
        (loop.add_reader, loop.remove_reader) if wanted == WANTS_READ else (loop.add_writer, loop.remove_writer)
    )
    ready = loop.create_future()
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)
