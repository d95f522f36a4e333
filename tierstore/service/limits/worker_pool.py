"""Worker threads with a bounded queue, and budgets of bytes in flight.

`WorkerPool.run` and `start` are called on one event loop only; the calls run on the pool's threads. Any thread may use
`ByteBudget`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.errors import Closed, Overloaded
from tierstore.kernels import epochs as atomics
from tierstore.reactor import layout as kernel
from tierstore.service.limits.call_queue import CallQueue
from tierstore.service.limits.shedding import Caller, Waits
from tierstore.threads import Thread

logger = logging.getLogger(__name__)

T = TypeVar("T")


Done: TypeAlias = Callable[[Any, BaseException | None], None]  # called with the result, or else the error
# whether nobody waits any more, the callback, when it was queued, the caller, the function and its arguments
_Item = tuple[Callable[[], bool] | None, Done, int, Caller | None, Callable[..., Any], tuple[Any, ...]]


class WorkerPool:
    """`threads` threads that run calls for one event loop; at most `queue_limit` calls wait.

    Leaner than `loop.run_in_executor` (one future instead of two, no condition variable), because every look-up pays
    for the handoff to a thread. Calls run in order; with `waits`, only those that somebody still waits for, and that
    have not waited too long. With `with_jobs` compiled threads give it jobs as well, see `serve_jobs`.
    """

    def __init__(
        self, name: str, *, threads: int, queue_limit: int, waits: Waits | None = None, with_jobs: bool = False
    ) -> None:
        # constant after construction
        self.name = name
        self.threads = threads
        self.queue_limit = queue_limit
        self.waits = waits
        # only written on the event loop
        self.rejected = 0  # also by reactors
        self._closed = False
        # of `serve_jobs`
        self._words = kernel.SHARED.new()
        self._serve_job: Callable[[int], None] = lambda number: None
        self._lock = threading.Lock()
        # guarded by _lock
        self._pending = 0
        # synchronized by itself
        self.jobs = CallQueue(2 * (threads + queue_limit)) if with_jobs else None
        self._queue: Any = self.jobs or queue.SimpleQueue()  # of _Item, and of None, which ends a thread
        self._workers = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for worker in self._workers:
            worker.start()

    @property
    def busy(self) -> int:
        """Threads at work, as far as the loop knows."""
        return min(self._all_pending, self.threads)

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return max(0, self._all_pending - self.threads)

    def under_way(self) -> bool:
        """Whether a call is queued, running, or on its way back to the loop. False once the pool is closed."""
        return self._all_pending > 0 and not self._closed  # a loop that has ended counts no call as back

    @property
    def _all_pending(self) -> int:
        return self._pending + int(self._words["queued"])

    def serve_jobs(self, words: npt.NDArray[Any], serve: Callable[[int], None]) -> None:
        """From now on a thread calls `serve` with each job number that is written to `jobs.outbox`; `jobs_done`
        follows.

        `words` is the memory of the reactors, which count their jobs there, and read how long one would wait. Event
        loop only.
        """
        self._words, self._serve_job = words, serve
        self._publish()

    def jobs_done(self, count: int) -> None:
        """Note that so many jobs are over. Any thread."""
        atomics.add(kernel.SHARED.place(self._words, "queued"), -count)
        self._publish()

    def run(self, function: Callable[..., T], *args: Any, caller: Caller | None = None) -> asyncio.Future[T]:
        """Run `function(*args)` on a worker; await the result.

        Raises Overloaded at once when the queue is full, or too long for it. The future raises DeadlineExceeded, Gone
        or Overloaded if the call is not run, see `Waits.check`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
                loop.call_soon_threadsafe(self._finish, future, result, error)

        self._put(future.cancelled, done, caller, function, args)
        return future

    def start(self, done: Done, function: Callable[..., T], *args: Any, caller: Caller | None = None) -> None:
        """`run`, but the worker calls `done` with the result: nothing goes back to the loop."""

        def counted(result: Any, error: BaseException | None) -> None:
            self._count(-1)
            done(result, error)

        self._put(None, counted, caller, function, args)

    def _put(
        self,
        cancelled: Callable[[], bool] | None,
        done: Done,
        caller: Caller | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        if self._closed:
            raise Closed("the service is shutting down")
        if self._is_full():
            self.rejected += 1
            if self.waits is not None:
                self.waits.shed.count("queue_full")
            raise Overloaded(
                f"{self.queue_limit} calls wait for the {self.name} threads already; try again in a second"
            )
        if self.waits is not None:
            self.waits.admit(self._expected_s(), None if caller is None else caller.remaining_s())
        self._count(1)
        try:
            self._queue.put((cancelled, done, time.perf_counter_ns(), caller, function, args))
        except Overloaded:
            self._count(-1)
            raise

    def _is_full(self) -> bool:
        return self._all_pending >= self.threads + self.queue_limit

    def _expected_s(self) -> float:
        return 0.0 if self.waits is None else self.waits.expected_s(self._all_pending, self.threads)

    def _count(self, calls: int) -> None:
        with self._lock:
            self._pending += calls
            self._words["other_queued"] = self._pending
        self._publish()

    def _publish(self) -> None:
        """Publish to reactors how long a call takes its thread."""
        if self.waits is not None:
            self._words["call_ns"] = int(self.waits.call_s * 1e9)

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the threads finish the queue, then end them."""
        if not self._closed:
            self._closed = True
            for _ in self._workers:
                self._queue.put(None)
        for worker in self._workers:
            worker.join(timeout_s)
        if self.jobs is not None and not any(worker.is_alive() for worker in self._workers):
            self.jobs.close()
            self.jobs = None

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, int):
                try:
                    self._serve_job(item)
                except Exception:
                    logger.exception("job %d on %s is not done", item, self.name)
                continue
            cancelled, done, queued_ns, caller, function, args = item
            result, error = None, None
            try:
                if cancelled is None or not cancelled():
                    if self.waits is not None:
                        self.waits.check(queued_ns, caller)
                    result = function(*args) if self.waits is None else self.waits.timed(function, *args)
            except BaseException as caught:  # noqa: BLE001 - handed to whoever awaits the future
                error = caught
            try:
                done(result, error)
            except Exception:
                logger.exception("the result of a call on %s was not told", self.name)
            # an idle thread must not keep a request's buffers alive
            del item, cancelled, done, caller, function, args, result, error

    def _finish(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._count(-1)
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class ByteBudget:
    """Bytes that requests in progress may hold together.

    Compiled threads may use the same budget: then each side reads the other's count, see `share`.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._theirs, self._ours = np.zeros((), np.int64), np.zeros((), np.int64)
        self._lock = threading.Lock()
        # guarded by _lock
        self._used = 0
        self.rejected = 0

    def share(self, *, theirs: npt.NDArray[np.int64], ours: npt.NDArray[np.int64]) -> None:
        """From now on `theirs`, a number that compiled threads write, counts too; `ours` is our count for them to
        read.
        """
        self._theirs, self._ours = theirs, ours

    @property
    def used_bytes(self) -> int:
        return self._used + int(self._theirs)

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes`. Raises Overloaded, with nothing reserved, if that would exceed the limit."""
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                self.rejected += 1
                raise Overloaded(
                    f"{self.name} in progress hold {self.used_bytes} of {self.limit_bytes} bytes; try again in a second"
                )
            self._used += nbytes
            self._ours[...] = self._used

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` that are allocated already, without checking the limit."""
        with self._lock:
            self._used += nbytes
            self._ours[...] = self._used

    def release(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._used -= nbytes
            self._ours[...] = self._used


class Reservation:
    """One request's reservation from a budget. One thread at a time; `release` releases all of it."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def reserve(self, nbytes: int) -> None:
        self._budget.reserve(nbytes)
        self._held += nbytes

    def release(self) -> None:
        if self._held:
            self._budget.release(self._held)
            self._held = 0
