"""A bounded pool of threads that read misses from disk, shared by every disk tier of a process.

RocksDB's batched get works at queue depth one a thread, so a drive is kept busy by several threads
at once. A caller splits its keys into chunks; it works through them itself, and idle threads of the
pool join in. So a caller never waits for a thread that never comes: with the pool busy or closed it
does all chunks alone, and many callers cannot deadlock. Callers that give way (`background.py`) have
helpers of their own, that give way too.

Any thread may call anything here, except that work given to the pool must not use the pool. Nothing
survives a crash, nothing needs to.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tierstore.tiers.background import give_way, gives_way

CHUNK_KEYS = 128  # keys a task: 0.4 ms warm, beside which a hand-over (20 µs) is small, and enough tasks when cold


class ReaderPool:
    """`threads` helpers at most, beside the callers themselves; and `background` (default: as many) for callers that give way."""

    def __init__(self, threads: int, *, background: int | None = None, chunk_keys: int = CHUNK_KEYS) -> None:
        lowly = threads if background is None else background
        if threads < 0 or lowly < 0 or chunk_keys < 1:
            raise ValueError(f"expected threads >= 0 and chunk_keys >= 1, got {threads}, {lowly} and {chunk_keys}")
        self.threads = threads
        self.chunk_keys = chunk_keys
        self._helpers = _Helpers(threads, "tierstore-read", None)
        self._lowly = _Helpers(lowly, "tierstore-read-bg", give_way)

    def run(self, count: int, work: Callable[[int, int], None], chunk: int | None = None) -> None:
        """Call `work(start, stop)` for consecutive chunks of range(count), on this thread and idle helpers.

        A chunk is of `chunk_keys`, or of `chunk` where the work itself keeps many reads on their way.

        Returns when all are done. The first error that `work` raises is raised here, after the
        chunks that were under way have ended; chunks not begun by then are skipped.
        """
        chunk = chunk or self.chunk_keys
        if count <= chunk:
            if count:
                work(0, count)
            return
        starts = deque(range(0, count, chunk))
        mates = self._lowly if gives_way() else self._helpers
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
        except BaseException:
            starts.clear()
            raise

    def close(self) -> None:
        """End the threads after what they are doing. Tiers that still read do so on their callers' threads."""
        self._helpers.close()
        self._lowly.close()


class _Helpers:
    def __init__(self, threads: int, name: str, begin: Callable[[], None] | None) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, name, initializer=begin) if threads else None

    def start(self, wanted: int, work: Callable[[], None]) -> list[Future[None]]:
        """Have up to so many do `work`, once each."""
        started: list[Future[None]] = []
        if self._executor is not None:
            # a closed executor refuses with RuntimeError: the caller then works alone
            with contextlib.suppress(RuntimeError):
                for _ in range(min(wanted, self._threads)):
                    # of our own: where no thread can be started, `submit` has queued what it raises for
                    started.append(Future())
                    self._executor.submit(_do, started[-1], work)
        return started

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _do(promise: Future[None], work: Callable[[], None]) -> None:
    if not promise.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - who waits raises it
        promise.set_exception(error)
    else:
        promise.set_result(None)
