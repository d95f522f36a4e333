"""Threads of the gRPC server: pools of a fixed number, with a bounded queue.

grpcio submits each call to a pool from its one serving thread, and needs nothing of a pool but that it is a
`ThreadPoolExecutor`. `full` is for that thread: nothing else is submitted between it and the submission. Any thread may read
the stats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tierstore.service.rpc.waiting import Waiting
from tierstore.tiers.background import start_threads

T = TypeVar("T")

_call = threading.local()


def submitted_ns() -> int:
    """When the call that this thread runs was submitted (`time.perf_counter_ns`)."""
    moment: int = _call.submitted_ns
    return moment


class CallPool(ThreadPoolExecutor):
    """`threads` threads, and at most `queue_limit` calls that wait for one, as long as the caller checks `full`."""

    def __init__(self, name: str, *, threads: int, queue_limit: int) -> None:
        super().__init__(threads, thread_name_prefix=f"tierstore-grpc-{name}")
        # constant after construction
        self.name = name
        self.threads = threads
        self.queue_limit = queue_limit
        self.receiving: Waiting[Any] = Waiting(lambda call: call.end_late())  # calls whose message has not come
        self._counting = threading.Lock()
        # guarded by _counting
        self.pending = 0  # calls that are queued or running
        self.rejected = 0
        start_threads(self, threads)  # a call for which none can be started would end grpcio's serving thread

    @property
    def full(self) -> bool:
        """Whether no further call may be submitted."""
        return self.pending + len(self.receiving) >= self.threads + self.queue_limit

    @property
    def busy(self) -> int:
        """Threads at work."""
        return min(self.pending, self.threads)

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return max(0, self.pending - self.threads)

    def reject(self) -> None:
        """Count a call that was refused as the pool was full."""
        with self._counting:
            self.rejected += 1

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._counting:
            self.pending += 1
        try:
            return super().submit(self._run, time.perf_counter_ns(), fn, args, kwargs)
        except BaseException:
            self._done()
            raise

    def _run(self, moment_ns: int, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        _call.submitted_ns = moment_ns
        try:
            return fn(*args, **kwargs)
        finally:
            self._done()

    def _done(self) -> None:
        with self._counting:
            self.pending -= 1
