"""A bounded pool of threads that read misses from disk, shared by all disk tiers of a process.

RocksDB's batched get keeps one read at a time under way on each thread, so several threads are needed to keep a drive busy. A caller splits its keys
into chunks and works through them itself, and idle threads of the pool join in. So no caller waits for a thread: if the pool is busy or closed it
does all chunks alone, and many callers cannot deadlock. Callers on background threads (`background.py`) have helpers of their own, which are
background threads too.

Any thread may call anything here, but work that runs in the pool must not use the pool. Nothing needs to survive a crash.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from tierstore.threads import Pool
from tierstore.tiers.background import become_background, is_background, yield_if_background

CHUNK_KEYS = 128  # keys a task: 0.4 ms if cached, against 20 µs for handing it over; and enough tasks if not cached


class ReaderPool:
    """At most `threads` helpers, in addition to the callers; and `background` (default: as many) for background threads."""

    def __init__(self, threads: int, *, background: int | None = None, chunk_keys: int = CHUNK_KEYS) -> None:
        lowly = threads if background is None else background
        if threads < 0 or lowly < 0 or chunk_keys < 1:
            raise ValueError(f"expected threads >= 0 and chunk_keys >= 1, got {threads}, {lowly} and {chunk_keys}")
        self.threads = threads
        self.chunk_keys = chunk_keys
        self._helpers = _Helpers(threads, "tierstore-read", None)
        self._lowly = _Helpers(lowly, "tierstore-read-bg", become_background)

    def run(self, count: int, work: Callable[[int, int], None], chunk: int | None = None) -> None:
        """Call `work(start, stop)` for consecutive chunks of range(count), on this thread and idle helpers.

        A chunk has `chunk_keys` keys, or `chunk` if the work itself keeps many reads under way. Returns when all are done. Raises the first error of
        `work`, after the chunks under way have ended; other chunks are skipped.
        """
        chunk = chunk or self.chunk_keys
        if count <= chunk:
            if count:
                work(0, count)
            return
        starts = deque(range(0, count, chunk))
        mates = self._lowly if is_background() else self._helpers
        helpers = mates.start(len(starts) - 1, lambda: self._work_off(starts, chunk, count, work))
        try:
            self._work_off(starts, chunk, count, work)
        finally:
            starts.clear()
            running = [helper for helper in helpers if not helper.cancel()]
            failed = [error for helper in running if (error := helper.exception()) is not None]
        if failed:
            raise failed[0]

    def _work_off(self, starts: deque[int], chunk: int, count: int, work: Callable[[int, int], None]) -> None:
        try:
            while True:
                try:
                    start = starts.popleft()
                except IndexError:
                    return
                work(start, min(start + chunk, count))
                yield_if_background()
        except BaseException:
            starts.clear()
            raise

    def close(self) -> None:
        """End the threads after their chunks. Tiers then read on their callers' threads."""
        self._helpers.close()
        self._lowly.close()


class _Helpers:
    def __init__(self, threads: int, name: str, begin: Callable[[], None] | None) -> None:
        self._threads = threads
        self._executor = Pool(threads, name, begin) if threads else None

    def start(self, wanted: int, work: Callable[[], None]) -> list[Future[None]]:
        """Let up to so many helpers call `work`, once each."""
        started: list[Future[None]] = []
        if self._executor is not None:
            # a closed executor raises RuntimeError: the caller then works alone
            with contextlib.suppress(RuntimeError):
                started.extend(self._executor.submit(work) for _ in range(min(wanted, self._threads)))
        return started

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
