"""The first of several connections that is made, as of `connecting.py`, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from tierstore.client.connecting import STAGGER_S, Found, resolver, without_resolver
from tierstore.client.settings import Address


async def addresses_of(address: Address, loop: asyncio.AbstractEventLoop) -> Found:
    """The addresses of a service, as of `getaddrinfo`. OSError.

    Not `loop.getaddrinfo`, for whose thread a loop waits as it ends, after the deadline has passed.
    """
    found = without_resolver(address)
    if found is not None:
        return found
    resolution, resolved = resolver.start(address.host, address.port), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolved.set)

    resolution.when_done(wake)
    await resolved.wait()
    return resolution.found()


async def first_connected(loop: asyncio.AbstractEventLoop, addresses: Sequence[tuple[Any, ...]]) -> socket.socket:
    """The first connection that is made, to any of the addresses (as of `getaddrinfo`). OSError."""
    trying: set[asyncio.Task[socket.socket]] = set()
    error: BaseException | None = OSError("its name has no address")
    remaining = list(addresses)[::-1]
    try:
        while remaining or trying:
            if remaining:
                trying.add(loop.create_task(_connected(loop, remaining.pop())))
            wait_s = STAGGER_S if remaining else None
            done, trying = await asyncio.wait(trying, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            made = [task.result() for task in done if task.exception() is None]
            for other in made[1:]:
                other.close()
            if made:
                return made[0]
            error = next((task.exception() for task in done), error)
        assert error is not None
        raise error
    finally:
        for task in trying:
            task.add_done_callback(_close_connected)
            task.cancel()


async def _connected(loop: asyncio.AbstractEventLoop, address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_connected(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
