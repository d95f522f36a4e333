"""The queue of a pool's threads, to which compiled threads add too: a pipe, so that every addition wakes one thread.

A message is 8 bytes: the number of a job, or a mark that stands for a call of Python, which is in a list. Any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections import deque
from typing import Any

from tierstore.errors import Overloaded

_NUMBER = struct.Struct("<q")
_CALL = -1
_CALL_BYTES = _NUMBER.pack(_CALL)
_MOST_BYTES = 1 << 20


class CallQueue:
    """`outbox` is the descriptor to which job numbers are written, 8 bytes each; a write never waits."""

    def __init__(self, size: int) -> None:
        """`size`: the most calls and jobs together."""
        self._inbox, self.outbox = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.outbox, False)
        with contextlib.suppress(OSError):  # a user may have used up all pipe memory
            fcntl.fcntl(self.outbox, fcntl.F_SETPIPE_SZ, min(max(2 * _NUMBER.size * size, 1 << 16), _MOST_BYTES))
        self._glance = -1  # the same pipe once more, for readers that do not wait; unusable without /proc
        with contextlib.suppress(OSError):
            self._glance = os.open(f"/proc/self/fd/{self._inbox}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._calls: deque[Any] = deque()  # each is there before its mark

    def put(self, call: Any) -> None:
        """Queue a call. Overloaded if the pipe is full."""
        self._calls.append(call)
        try:
            os.write(self.outbox, _CALL_BYTES)
        except BlockingIOError:
            self._calls.remove(call)
            raise Overloaded("too many calls wait for a thread already; try again in a second") from None

    def get(self) -> Any:
        """Wait for the next call, or the number of the next job."""
        number: int = _NUMBER.unpack(os.read(self._inbox, _NUMBER.size))[0]
        return self._calls.popleft() if number == _CALL else number

    def jobs(self, most: int) -> list[int]:
        """Take the numbers of waiting jobs. Calls between them go to the end of the queue."""
        if self._glance < 0:
            return []
        try:
            data = os.read(self._glance, _NUMBER.size * most)
        except BlockingIOError:
            return []
        numbers = [number for (number,) in _NUMBER.iter_unpack(data)]
        jobs = [number for number in numbers if number != _CALL]
        self.give_back([_CALL] * (len(numbers) - len(jobs)))
        return jobs

    def give_back(self, numbers: list[int]) -> None:
        """Queue taken numbers again."""
        if numbers:
            os.write(self.outbox, b"".join(map(_NUMBER.pack, numbers)))

    def close(self) -> None:
        """Close the queue, once no thread uses it any more."""
        for fd in (self._inbox, self._glance, self.outbox):
            if fd >= 0:
                os.close(fd)
