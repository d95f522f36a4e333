"""Bounds of the service: worker threads with a bounded queue, and a budget of bytes in flight.

`WorkerPool.run` is called on one event loop only; what it is given runs on the pool's threads. `ByteBudget`
may be used from any thread. Nothing here survives a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.errors import Closed, Overloaded
from tierstore.service.bounds.shed import Caller, Waits

T = TypeVar("T")

# loop, future, when it was queued, who waits, what is to be run
_Item = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", int, Caller | None, Callable[..., Any], tuple[Any, ...]]


class WorkerPool:
    """`threads` threads that take calls from one event loop, and no more than `queue_limit` that wait.

    Leaner than `loop.run_in_executor` (one future instead of two, no condition variable): the hand-over is paid
    for by every look-up. With `waits`, a call that is of no use any more when a thread takes it is not run.

    Calls are taken in order, until the oldest has used up half of the time that its caller gives it: then the newest
    come first. When more is asked than can be answered, calls taken in order would each be begun just before their
    deadlines, and end after them: work for nobody.
    """

    def __init__(self, name: str, *, threads: int, queue_limit: int, waits: Waits | None = None) -> None:
        # constant after construction
        self.name = name
        self.threads = threads
        self.queue_limit = queue_limit
        self._waits = waits
        # written on the event loop alone
        self.rejected = 0
        self._pending = 0
        self._closed = False
        # synchronized by itself
        self._items: deque[_Item] = deque()
        self._queue: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each item, False to end a thread
        self._workers = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for worker in self._workers:
            worker.start()

    @property
    def busy(self) -> int:
        """Threads at work, as far as the loop knows."""
        return min(self._pending, self.threads)

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return max(0, self._pending - self.threads)

    def under_way(self) -> bool:
        """Whether a call is in the queue, at work, or on its way back to the loop; none is once the pool was closed."""
        return self._pending > 0 and not self._closed  # a loop that has ended counts no call as back

    def run(self, function: Callable[..., T], *args: Any, caller: Caller | None = None) -> asyncio.Future[T]:
        """Run `function(*args)` on a worker; await the result. Raises Overloaded at once when the queue is full.

        What is awaited raises DeadlineExceeded, Gone or Overloaded where `caller` or the wait was over before.
        """
        if self._closed:
            raise Closed("the service is shutting down")
        if self._pending >= self.threads + self.queue_limit:
            self.rejected += 1
            if self._waits is not None:
                self._waits.shed.count("queue_full")
            raise Overloaded(
                f"{self.queue_limit} calls wait for the {self.name} threads already; try again in a second"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending += 1
        self._items.append((loop, future, time.perf_counter_ns(), caller, function, args))
        self._queue.put(True)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the threads finish what is queued, then end them."""
        if not self._closed:
            self._closed = True
            for _ in self._workers:
                self._queue.put(False)
        for worker in self._workers:
            worker.join(timeout_s)

    def _next(self) -> _Item:
        """The call to take; there is one for each True that was taken from the queue."""
        items = self._items
        caller = items[0][3]  # another thread may take it first, and this one the next
        if caller is not None and caller.deadline_ns is not None:
            now_ns = time.perf_counter_ns()
            left_ns = caller.deadline_ns - now_ns
            if 0 < left_ns < now_ns - caller.arrived_ns:
                return items.pop()
        return items.popleft()

    def _work(self) -> None:
        while self._queue.get():
            item = self._next()
            loop, future, queued_ns, caller, function, args = item
            result, error = None, None
            try:
                if not future.cancelled():
                    if self._waits is not None:
                        self._waits.take(queued_ns, caller)
                    result = function(*args)
            except BaseException as caught:  # noqa: BLE001 - handed to whoever awaits the future
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish, future, result, error)
            del (
                item,
                future,
                caller,
                function,
                args,
                result,
                error,
            )  # an idle thread must not keep a request's buffers alive

    def _finish(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._pending -= 1
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class ByteBudget:
    """Bytes that requests in progress may hold together.

    Compiled threads may hold bytes of the same budget: then each side reads the other's count, see `share`.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._theirs, self._ours = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._lock = threading.Lock()
        # guarded by _lock
        self._used = 0
        self.rejected = 0

    def share(self, words: npt.NDArray[np.int64], *, theirs: int, ours: int) -> None:
        """From now on `words[theirs]`, written by compiled threads, counts too, and `words[ours]` tells them of the rest."""
        self._theirs, self._ours = words[theirs : theirs + 1], words[ours : ours + 1]

    @property
    def used_bytes(self) -> int:
        return self._used + int(self._theirs[0])

    def take(self, nbytes: int) -> None:
        """Reserve `nbytes`. Raises Overloaded when they would go beyond the limit; then nothing is reserved."""
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                self.rejected += 1
                raise Overloaded(
                    f"requests in progress hold {self.used_bytes} of {self.limit_bytes} bytes ({self.name}); try again in a second"
                )
            self._used += nbytes
            self._ours[0] = self._used

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` that are there already, whatever the limit says."""
        with self._lock:
            self._used += nbytes
            self._ours[0] = self._used

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._used -= nbytes
            self._ours[0] = self._used


class Holding:
    """What one request holds of a budget. Used by one thread at a time; `release` gives everything back."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, nbytes: int) -> None:
        self._budget.take(nbytes)
        self._held += nbytes

    def release(self) -> None:
        if self._held:
            self._budget.give(self._held)
            self._held = 0
