"""Threads that may be started late, without memory for one: `start` succeeds or raises, and never waits for good.

`threading.Thread.start` waits until the new thread says that it runs. One that dies before that, because its first
allocation fails, never says so, and whoever started it waits with all locks that it holds; in the standard library's
`ThreadPoolExecutor.submit` that is a lock of every executor of the process. So nothing else starts a thread, and
pools have all of theirs from the beginning.

Any thread may call anything here.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

log = logging.getLogger(__name__)

START_S = 5.0  # within which a thread runs, on a machine that is not out of memory
NEVER_S = math.inf  # from now: not before it is woken
_AFTER_FAILURE_S = 30.0

T = TypeVar("T")
A = TypeVar("A")


class _NotStarted(RuntimeError):
    pass


class _Started(threading.Event):
    """What `threading.Thread.start` waits for."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_S if timeout is None else timeout):
            raise _NotStarted(
                f"can't start new thread: it did not begin within {START_S:.0f} s; there may be no memory left"
            )
        return True


class Thread(threading.Thread):
    """A `threading.Thread` of which `start` raises RuntimeError where it does not begin; then it never does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._started = _Started()
        self._lock = threading.Lock()
        # guarded by _lock
        self._runs = self._abandoned = False

    def start(self) -> None:
        try:
            super().start()
        except _NotStarted:
            with self._lock:
                self._abandoned = not self._runs
            if self._abandoned:
                raise

    def run(self) -> None:
        with self._lock:
            self._runs = not self._abandoned
        if self._runs:
            super().run()


class Timer(Thread):
    """As `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        self._cancelled = threading.Event()
        super().__init__(target=lambda: self._cancelled.wait(interval) or function())

    def cancel(self) -> None:
        self._cancelled.set()


class OwnThreadCall(Generic[T]):
    """A function that runs on a thread of its own, from now on. RuntimeError where that cannot be started."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work, self._done = work, Future[T]()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _finish(self._done, self._work)

    def wait(self) -> None:
        """Return when it has ended, however."""
        self._thread.join()

    def result(self) -> T:
        """What it returned, once it has ended; raises what it raised."""
        self.wait()
        if not self._done.done():
            raise MemoryError("a thread ended without a result")
        return self._done.result()


class Pool:
    """`count` threads that do calls in their order. `begin` is called on each first.

    RuntimeError where one cannot be started; then none stays.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._begin = begin
        self._closing = threading.Lock()
        # guarded by _closing
        self._closed = False
        self._threads: list[Thread] = []
        try:
            for number in range(count):
                thread = Thread(target=self._run, name=f"{name}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a call done. RuntimeError once the pool is shut down."""
        done: Future[T] = Future()
        with self._closing:
            if self._closed:
                raise RuntimeError("the pool is shut down")
            self._calls.put((done, lambda: work(*arguments)))
        return done

    def map(self, work: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """What `work` returns of each, in their order, once all are done; raises what the first of them raised."""
        calls = [self.submit(work, item) for item in items]
        try:
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """End the threads when they have done what was submitted, or what they are at. May be repeated."""
        with self._closing:
            self._closed = True
            while cancel_futures and not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def _run(self) -> None:
        if self._begin is not None:
            self._begin()
        while (call := self._calls.get()) is not None:
            done, work = call
            if done.set_running_or_notify_cancel():
                _finish(done, work)
            del call, done, work  # an idle thread keeps nothing alive


class Scheduler:
    """`count` threads that run jobs which come up again and again, whichever is due.

    A job is on one thread at a time, and on none while it is not due. One that takes long holds back only what finds
    all threads busy. RuntimeError where a thread cannot be started.
    """

    def __init__(self, count: int, name: str) -> None:
        self._lock = threading.Lock()
        self._due, self._left = threading.Condition(self._lock), threading.Condition(self._lock)
        # guarded by _lock
        # an entry counts where its job is still due at that time
        self._queue: list[tuple[float, int, ScheduledJob]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._pool = Pool(count, name)
        for _ in range(count):
            self._pool.submit(self._work)

    def add(self, run: Callable[[], float], after_s: float) -> ScheduledJob:
        """Have `run` called after so many seconds, and then again and again: after as many seconds as it returns,
        or when the job is woken.
        """
        job = ScheduledJob(self, run)
        self.schedule(job, after_s)
        return job

    def schedule(self, job: ScheduledJob, after_s: float) -> None:
        """Have a job run after so many seconds, or earlier if it is due then."""
        with self._lock:
            self._schedule(job, time.monotonic() + after_s)

    def _schedule(self, job: ScheduledJob, at_s: float) -> None:
        if at_s >= job.due_s or job.ended:
            return
        job.due_s = at_s
        if not job.running:  # else it is put back when it returns
            heapq.heappush(self._queue, (at_s, next(self._numbers), job))
            self._due.notify()

    def end(self, job: ScheduledJob) -> None:
        with self._lock:
            job.ended, job.due_s = True, NEVER_S
            while job.running:
                self._left.wait()

    def close(self) -> None:
        """End the threads, once they have returned from what they run."""
        with self._lock:
            self._closed = True
            self._due.notify_all()
        self._pool.shutdown()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                after_s = job.run()
            except Exception:
                log.exception("a job of the background failed, and is tried again")
                after_s = _AFTER_FAILURE_S
            with self._lock:
                due_s, job.due_s, job.running = job.due_s, NEVER_S, False
                self._schedule(job, min(due_s, time.monotonic() + after_s))
                self._left.notify_all()

    def _next(self) -> ScheduledJob | None:
        """The job that is due, once there is one; None once all is closed."""
        with self._lock:
            while not self._closed:
                wait_s: float | None = None
                if self._queue:
                    due_s, _, job = self._queue[0]
                    wait_s = due_s - time.monotonic()
                    if wait_s <= 0 or due_s != job.due_s:
                        heapq.heappop(self._queue)
                        if due_s == job.due_s and not job.running:
                            job.due_s, job.running = NEVER_S, True
                            return job
                        continue
                self._due.wait(wait_s)
            return None


class ScheduledJob:
    """Made by `Scheduler.add`."""

    def __init__(self, scheduler: Scheduler, run: Callable[[], float]) -> None:
        self._scheduler, self.run = scheduler, run
        # guarded by the scheduler's lock
        self.due_s = NEVER_S
        self.running = self.ended = False

    def wake(self) -> None:
        """Run it now, or once more where it runs."""
        self._scheduler.schedule(self, 0.0)

    def end(self) -> None:
        """It runs no more once this returns: it is waited for. Not to be called by the job itself."""
        self._scheduler.end(self)


def _finish(done: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        done.set_exception(error)
    else:
        done.set_result(result)
