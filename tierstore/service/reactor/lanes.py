"""The order in which Python serves what reactors hand off: short turns, with a share for all that is not of one model.

A thousand connections may hand off a request each at the same time. Served all in one turn of the event loop, they
would keep a health check waiting for a second: it needs several turns. So a turn ends after a few milliseconds, and in
each come first the checks of health, then other requests outside `/v2/models/` and `/v1/models/` (metrics,
administration), then the remainder. Each of the three has its share of every turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import time
from collections import deque
from collections.abc import Callable, Iterator

from tierstore.reactor import layout as kernel
from tierstore.wire.http2 import head as http2_head

Message = tuple[int, int, int, int]  # kind and descriptor, serial, address of bytes, how many

HEALTH_S = 0.008  # of one turn
URGENT_S = 0.002
OTHERS_S = 0.004
_HEAD_BYTES = 32
_STREAM_HEAD_BYTES = 56  # a block of HTTP/2 has room for as many, whatever its head
_HEALTH = re.compile(
    rb"GET /v2/health/(?:live|ready)[ ?\n]"
    rb"|POST /(?:grpc\.health\.v1\.Health/Check|inference\.GRPCInferenceService/Server(?:Live|Ready))\n"
)
_URGENT = re.compile(rb"[A-Z]+ /(?!v[12]/models/|upstream/|inference\.|tensorflow\.)")


class Lanes:
    """Messages that wait for their turn; `serve` gets each once, in their order."""

    def __init__(self, serve: Callable[[Message], None]) -> None:
        self._serve = serve
        self._health: deque[Message] = deque()
        self._urgent: deque[Message] = deque()
        self._others: deque[Message] = deque()
        self._all = self._health, self._urgent, self._others
        self._next: asyncio.Handle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def put(self, message: Message) -> None:
        head = _head_of(message)
        lane = self._health if _HEALTH.match(head) else self._urgent if _URGENT.match(head) else self._others
        lane.append(message)

    def start(self) -> None:
        """Serve what was put, as far as it goes in one turn, and the remainder in further ones."""
        if self._next is None:
            self._turn()

    def drain(self) -> Iterator[Message]:
        """What nobody will serve any more."""
        if self._next is not None:
            self._next.cancel()
        for lane in self._all:
            yield from lane
            lane.clear()

    def _turn(self) -> None:
        self._next = None
        try:
            self._serve_some()
        finally:  # whatever becomes of one, the others have their turn
            if self:
                self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _serve_some(self) -> None:
        for lane, seconds in zip(self._all, (HEALTH_S, URGENT_S, OTHERS_S), strict=True):
            until = time.perf_counter() + seconds
            while lane:
                message = lane.popleft()
                self._serve(message)
                if time.perf_counter() >= until:
                    break


def _head_of(message: Message) -> bytes:
    """How a whole request begins; nothing for any other message."""
    what, _, at, size = message
    if what & 255 == kernel.STREAM_REQUEST:
        return ctypes.string_at(at + 8 * http2_head.HEAD_WORDS, _STREAM_HEAD_BYTES)
    return ctypes.string_at(at, min(size, _HEAD_BYTES)) if what & 255 == kernel.REQUEST else b""
