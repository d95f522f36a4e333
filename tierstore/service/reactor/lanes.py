"""Scheduling of the requests that reactors hand off: short turns, with a share for requests of no single model.

A thousand connections may hand off a request each at the same time. If all were served in one turn of the event loop,
a health check, which needs several turns, would wait for a second. So a turn ends after a few milliseconds, and in
each turn health checks come first, then other requests outside `/v2/models/` and `/v1/models/` (metrics,
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

Message = tuple[int, int, int, int]  # kind and descriptor, serial, address of bytes, their number

HEALTH_S = 0.008  # in one turn
URGENT_S = 0.002
OTHERS_S = 0.004
_HEAD_BYTES = 32
_STREAM_HEAD_BYTES = 56  # an HTTP/2 block has room for so many, whatever its head
_HEALTH = re.compile(
    rb"GET /v2/health/(?:live|ready)[ ?\n]"
    rb"|POST /(?:grpc\.health\.v1\.Health/Check|inference\.GRPCInferenceService/Server(?:Live|Ready))\n"
)
_URGENT = re.compile(rb"[A-Z]+ /(?!v[12]/models/|upstream/|inference\.|tensorflow\.)")


class Lanes:
    """Messages that wait for their turn; `serve` is called once with each, in order."""

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
        """Serve the messages that were put, as far as possible in one turn, and the others in further turns."""
        if self._next is None:
            self._turn()

    def drain(self) -> Iterator[Message]:
        """The messages that will not be served any more."""
        if self._next is not None:
            self._next.cancel()
        for lane in self._all:
            yield from lane
            lane.clear()

    def _turn(self) -> None:
        self._next = None
        try:
            self._serve_some()
        finally:  # whatever happens to one, the others have their turn
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
    """The beginning of a whole request; empty for any other message."""
    what, _, at, size = message
    if what & 255 == kernel.STREAM_REQUEST:
        return ctypes.string_at(at + 8 * http2_head.HEAD_WORDS, _STREAM_HEAD_BYTES)
    return ctypes.string_at(at, min(size, _HEAD_BYTES)) if what & 255 == kernel.REQUEST else b""
