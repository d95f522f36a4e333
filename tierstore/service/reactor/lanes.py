"""The order in which Python serves what reactors hand off: short turns, with a share for all that is not of one model.

A thousand connections may hand off a request each at the same time. Served all in one turn of the event loop, they would
keep a health check waiting for a second: it needs several turns. So a turn ends after a few milliseconds, and in each the
requests outside `/v2/models/` and `/v1/models/` (health, metrics, administration) come first. Event loop only.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from tierstore.kernels import reactor_words as kernel

Message = tuple[int, int, int, int]  # kind and descriptor, serial, address of bytes, how many

URGENT_S = 0.002  # of one turn
OTHERS_S = 0.004
CONNECTION_S = 0.0005  # what a connection costs in later turns
_HEAD_BYTES = 32
_URGENT = re.compile(rb"[A-Z]+ /(?!v[12]/models/)")


class Lanes:
    """Messages that wait for their turn; `serve` gets each once, in their order."""

    def __init__(self, serve: Callable[[Message], None]) -> None:
        self._serve = serve
        self._urgent: deque[Message] = deque()
        self._others: deque[Message] = deque()
        self._next: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def put(self, message: Message) -> None:
        (self._urgent if _is_urgent(message) else self._others).append(message)

    def start(self) -> None:
        """Serve what was put, as far as it goes in one turn, and the remainder in further ones."""
        if self._next is None:
            self._turn()

    def drain(self) -> Iterator[Message]:
        """What nobody will serve any more."""
        if self._next is not None:
            self._next.cancel()
        yield from chain(self._urgent, self._others)
        self._urgent.clear()
        self._others.clear()

    def _turn(self) -> None:
        self._next = None
        try:
            self._serve_some()
        finally:  # whatever becomes of one, the others have their turn
            if self:
                self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _serve_some(self) -> None:
        for lane, seconds in ((self._urgent, URGENT_S), (self._others, OTHERS_S)):
            until = time.perf_counter() + seconds
            while lane:
                message = lane.popleft()
                self._serve(message)
                if message[0] & 255 == kernel.CONNECTION:
                    until -= CONNECTION_S
                if time.perf_counter() >= until:
                    break


def _is_urgent(message: Message) -> bool:
    what, _, at, size = message
    return bool(
        what & 255 == kernel.CONNECTION and size and _URGENT.match(ctypes.string_at(at, min(size, _HEAD_BYTES)))
    )
