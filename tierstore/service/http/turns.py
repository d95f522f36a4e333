"""The order in which requests begin on connections that Python serves: some in each turn of
the event loop, health first.

A client may send requests ahead of their answers, and do so on many connections. Begun as soon as they can be, all
would run in the same turn, and a health check needs several turns. So one that finds the turn full begins in a later
one, behind those of other connections.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable

IN_A_TURN = 16  # requests: some milliseconds


class Turns:
    """Begins requests, each once, in their order."""

    def __init__(self) -> None:
        self._room = IN_A_TURN
        self._health: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._next: asyncio.Handle | None = None

    def put(self, begin: Callable[[], None], *, health: bool = False) -> None:
        """Call `begin` now, if there is room, or else in a later turn."""
        if self._room > 0:
            self._room -= 1
            begin()
        else:
            (self._health if health else self._others).append(begin)
        if self._room <= 0:
            self._start()

    def _start(self) -> None:
        if self._next is None:  # without a context: requests of many clients begin in it
            self._next = asyncio.get_running_loop().call_soon(self._turn, context=contextvars.Context())

    def _turn(self) -> None:
        self._next, self._room = None, IN_A_TURN
        for lane in (self._health, self._others):  # each has its share, however much is in the other
            for _ in range(min(len(lane), IN_A_TURN)):
                self._start()  # whatever becomes of one, the others have their turn
                self._room -= 1
                lane.popleft()()
