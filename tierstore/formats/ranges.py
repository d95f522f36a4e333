"""Reading an object in ranges: several are requested ahead of the reader, and those that it may come back to are kept.

`Ranges` and its readers belong to one thread; threads of their own fetch.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tierstore.threads import Pool

BLOCK_BYTES = 4 << 20  # of one request
_AHEAD = 4  # blocks that are requested before they are read
_KEPT = 12  # blocks in memory, beside the last one: of columns that are read in turns
_BUFFER_BYTES = 256 << 10

Fetch = Callable[[int, int, threading.Event], bytes]  # bytes [begin, end), whole, unless the event is set
Seen = Callable[[int, bytes], None]  # where a block begins, and its bytes; called once for each, by any thread


class Ranges:
    """The blocks of one object of `size` bytes. `seen` gets each block that came, once, in any order."""

    def __init__(self, fetch: Fetch, size: int, seen: Seen = lambda begin, data: None) -> None:
        self.size = size
        self._fetch, self._seen = fetch, seen
        self._count = -(-size // BLOCK_BYTES)
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()  # the one that was used last is the last
        self._came: set[int] = set()  # numbers of those that `seen` has, or is being given
        self._lock = threading.Lock()  # of `_came`
        self._threads = Pool(_AHEAD, "tierstore-ranges")
        self._ended = threading.Event()

    def reader(self, *, closes: bool) -> io.BufferedReader:
        """A reader that may seek; its errors are OSError. With `closes` its end is the end of all."""
        return io.BufferedReader(_Reader(self, closes), _BUFFER_BYTES)

    def block(self, number: int) -> bytes:
        """A block; where the reader goes on from the one before, the next ones are requested as well."""
        goes_on = number in self._blocks or number - 1 in self._blocks
        last = min(number + (_AHEAD if goes_on else 0), self._count - 1)
        for wanted in range(number, last + 1):
            if wanted not in self._blocks:
                self._blocks[wanted] = self._threads.submit(self._get, wanted)
            self._blocks.move_to_end(wanted)  # so that the oldest are those that were read
        if self._count - 1 in self._blocks:  # formats that begin with their end come back to it
            self._blocks.move_to_end(self._count - 1)
        while len(self._blocks) > _KEPT + 1:
            self._blocks.popitem(last=False)[1].cancel()
        try:
            return self._blocks[number].result()
        except BaseException:
            self._blocks.pop(number, None)
            raise

    def see_all(self) -> None:
        """Have `seen` get the blocks that were not read as well. Nothing is read after that."""
        for block in self._blocks.values():
            block.result()
        self._threads.map(self._see, sorted(set(range(self._count)) - self._came))
        self._threads.shutdown()  # one that was given up may be on its way to `seen`

    def close(self) -> None:
        self._ended.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()

    def _see(self, number: int) -> None:
        self._get(number)

    def _get(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        data = self._fetch(begin, min(begin + BLOCK_BYTES, self.size), self._ended)
        with self._lock:
            is_first = number not in self._came
            self._came.add(number)
        if is_first:
            self._seen(begin, data)
        return data


class _Reader(io.RawIOBase):
    """A place in the bytes of `Ranges`."""

    def __init__(self, ranges: Ranges, closes: bool) -> None:
        self._ranges, self._closes, self._at = ranges, closes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._ranges.size}[whence]
        if base + offset < 0:
            raise OSError(22, "expected a place in the object")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        if self._at >= self._ranges.size:
            return 0
        number, skipped = divmod(self._at, BLOCK_BYTES)
        view = memoryview(buffer).cast("B")
        piece = memoryview(self._ranges.block(number))[skipped : skipped + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed and self._closes:
            self._ranges.close()
        super().close()
