"""The worker processes of a service: started, restarted when they die, told what is new, and ended.

`start`, `refresh` and `stop` may be called from any thread but the event loop's. A thread a worker watches over it:
when the process is dead and reaped, whatever it held of the store is given back, and another one is started. Fresh
interpreters (`sys.executable -m tierstore.service.process.worker`) that inherit the listening socket: a connection that waits
to be accepted is never lost with a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from tierstore.engine.lending import Borrower, Lender
from tierstore.errors import TierstoreError
from tierstore.service.context import Service
from tierstore.service.process.link import answer_calls
from tierstore.service.process.metrics import families

logger = logging.getLogger(__name__)

START_S = 120.0  # for all workers to come up
FIRST_TRIES = 3  # of a worker that has never come up
STEADY_S = 10.0  # a worker that lived so long is restarted at once
MAX_BACKOFF_S = 10.0
STUCK_S = 60.0  # a worker that does not give a replaced view back for so long is killed
HUGE_PAGES_AT_ONCE = 64  # a second: 128 MiB, and at most a tenth of a core
REPORT_S = 0.5  # for an answer to `refresh`
OTHER_CALLS = 2  # sockets for calls beside one a look-up thread


class _Worker:
    """One of the processes, and the ones that come after it. Its own thread but for what says otherwise."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number, self._fleet = number, fleet
        # for as long as the fleet lives: whoever publishes writes to it without asking whether the process does
        self.wake = os.eventfd(0, os.EFD_CLOEXEC)
        self.up = threading.Event()  # once
        self.ready = False  # the process that there is now
        self.tries = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.borrower: Borrower | None = None
        self.gauges: dict[str, int] = {}  # the event loop's
        self.reported = 0  # guarded by the fleet's condition
        self._control: socket.socket | None = None
        self._sending = threading.Lock()
        self.thread = threading.Thread(target=self._supervise, name=f"tierstore-worker-{number}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self.process
        return None if process is None else process.pid

    @property
    def restarts(self) -> int:
        return max(0, self.tries - 1)

    def tell(self, message: dict[str, Any]) -> None:
        """A line to the process, if there is one. Any thread."""
        with self._sending, contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        """Any thread; its own one then starts another process."""
        process = self.process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def _supervise(self) -> None:
        stopping = self._fleet.stopping
        backoff_s = 0.0
        while not stopping.is_set():
            began_s = time.monotonic()
            self.tries += 1
            try:
                code = self._live()
            except Exception:
                logger.exception("worker %d could not be started", self.number)
                code = None
            if stopping.is_set():
                return
            lived_s = time.monotonic() - began_s
            backoff_s = 0.0 if lived_s >= STEADY_S else min(MAX_BACKOFF_S, max(0.25, backoff_s * 2))
            logger.error("worker %d ended (%s); another one is started in %.2f s", self.number, code, backoff_s)
            if not self.up.is_set() and self.tries >= FIRST_TRIES:
                self._fleet.failed.set()
                return
            stopping.wait(backoff_s)

    def _live(self) -> int:
        """One process, from its start until it is reaped and all that it held is given back. Returns its exit code."""
        fleet = self._fleet
        settings = fleet.service.settings
        pairs = [socket.socketpair() for _ in range(1 + settings.lookup_threads + OTHER_CALLS)]
        theirs = [pair[1] for pair in pairs]
        control, calls = pairs[0][0], [pair[0] for pair in pairs[1:]]
        borrower = self.borrower = fleet.lender.begin()
        threads: list[threading.Thread] = []
        process = None
        try:
            try:
                environment = dict(os.environ)
                environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
                shared = [fleet.listener.fileno(), fleet.lender.changes.fd, self.wake]
                process = self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tierstore.service.process.worker", str(theirs[0].fileno())],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[*shared, *(sock.fileno() for sock in theirs)],
                )
                hello = {
                    "settings": settings.model_dump(mode="json"),
                    "listener": shared[0],
                    "changes": shared[1],
                    "wake": shared[2],
                    "calls": [sock.fileno() for sock in theirs[1:]],
                    "grpc": fleet.grpc,
                }
            finally:
                for sock in theirs:
                    sock.close()
            for sock in calls:
                threads.append(
                    threading.Thread(
                        target=answer_calls, args=(sock, fleet.lender, borrower, fleet.connect), daemon=True
                    )
                )
                threads[-1].start()
            with self._sending:
                self._control = control
            self.tell(hello)
            if fleet.stopping.is_set():
                self.tell({"stop": True})
            with contextlib.suppress(OSError), control.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line), borrower)
        finally:
            with self._sending:
                self._control = None
            if process is not None:
                # whoever closed its end reads nothing of ours any more, unless it is about to: make sure of it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                process.kill()
                process.wait()
            self.process, self.ready = None, False
            control.close()
            for sock in calls[len(threads) :]:
                sock.close()
            for thread in threads:  # their sockets have no other end, so they finish what they are at
                thread.join()
            fleet.lender.end(borrower)
            self.gauges = {}
        assert process is not None
        return process.returncode

    def _hear(self, message: dict[str, Any], borrower: Borrower) -> None:
        if "back" in message:
            self._fleet.lender.give_back(borrower, message["back"])
        elif "report" in message:
            self._fleet.absorb(self, message)
        elif "up" in message:
            self.ready = True
            self.up.set()


class Fleet:
    """`settings.workers` processes over the store of `service`. `listener` is bound; the workers listen on it.

    `connect` takes the service's end of a new connection; `loop` is the service's event loop. `grpc` is the address that the
    workers listen on for gRPC, and that of the owner's own server; None where gRPC is not served.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        connect: Callable[[socket.socket], None],
        loop: asyncio.AbstractEventLoop,
        grpc: dict[str, str] | None = None,
    ) -> None:
        # constant after construction
        self.service, self.listener, self.connect, self.grpc = service, listener, connect, grpc
        self._loop = loop
        self.lender = Lender(service.store)
        self.stopping = threading.Event()
        self.failed = threading.Event()
        self._telling = threading.Lock()
        self._closed = False  # guarded by _telling
        self._asked = 0  # guarded by _reports
        self._reports = threading.Condition()
        self.workers = [_Worker(number, self) for number in range(service.settings.workers)]
        self._minding = threading.Thread(target=self._mind, name="tierstore-fleet", daemon=True)

    def start(self) -> None:
        """Return when every worker answers, or `stop` was called. TierstoreError if they do not come up: `stop` it then."""
        self.service.store.told.append(self._published)
        for worker in self.workers:
            worker.thread.start()
        self._minding.start()
        until = time.monotonic() + START_S
        while not all(worker.up.wait(0.02) for worker in self.workers):
            if self.stopping.is_set():
                return
            if self.failed.is_set() or time.monotonic() > until:
                raise TierstoreError("the worker processes do not come up; the log has the reason")

    def _published(self) -> None:
        """Something new is there to take. Called under a lock, by whoever publishes."""
        with self._telling:
            if not self._closed:
                self.lender.changes.bump()
                for worker in self.workers:
                    os.eventfd_write(worker.wake, 1)

    def absorb(self, worker: _Worker, report: dict[str, Any]) -> None:
        """Add what a worker has counted to the figures of the service."""
        for name, tables in report["lookups"].items():
            with contextlib.suppress(TierstoreError):  # a model that is gone
                model = self.lender.model(name)
                for table, counts in tables.items():
                    model.counts_of(table).add(np.array(counts, np.int64))
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads the figures any more
            self._loop.call_soon_threadsafe(self._absorb, worker, report)

    def _absorb(self, worker: _Worker, report: dict[str, Any]) -> None:
        self.service.request_times.absorb(report["requests"])
        self.service.infer_stats.absorb(report["infer"])
        self.service.shed.absorb(report["shed"])
        worker.gauges = report["gauges"]
        if report["report"] is not None:
            with self._reports:
                worker.reported = max(worker.reported, report["report"])
                self._reports.notify_all()

    def refresh(self) -> None:
        """Have every worker's counts up to now, but for one that does not answer soon."""
        if self.stopping.is_set():
            return
        with self._reports:
            self._asked += 1
            asked = self._asked
        waiting = [worker for worker in self.workers if worker.ready]
        for worker in waiting:
            worker.tell({"report": asked})
        with self._reports:
            self._reports.wait_for(lambda: all(worker.reported >= asked for worker in waiting), timeout=REPORT_S)

    def families(self) -> Iterator[Metric]:
        """The workers' own metrics."""
        return families(self.workers)

    def status(self) -> list[dict[str, Any]]:
        """A document a worker process."""
        return [{"pid": w.pid, "ready": w.ready, "restarts": w.restarts, **w.gauges} for w in self.workers]

    def _mind(self) -> None:
        """Have the cache in huge pages as it fills. Kill a worker that holds what was replaced long ago: it is stopped or stuck, and holds up folding."""
        since: dict[int, float] = {}
        while not self.stopping.wait(1.0):
            with contextlib.suppress(TierstoreError):
                self.lender.collapse(HUGE_PAGES_AT_ONCE)
            now, seen = time.monotonic(), {}
            for worker in self.workers:
                borrower = worker.borrower
                for view in self.lender.lagging(borrower) if borrower is not None else ():
                    seen[view] = since.get(view, now)
                    if now - seen[view] > STUCK_S:
                        logger.error(
                            "worker %d still reads what was replaced %.0f s ago; it is killed", worker.number, STUCK_S
                        )
                        worker.kill()
            since = seen

    def stop(self, timeout_s: float) -> None:
        """Have the workers finish what they have begun and end; whoever has not after `timeout_s` is killed."""
        self.stopping.set()
        for worker in self.workers:
            worker.tell({"stop": True})
        until = time.monotonic() + timeout_s
        for worker in self.workers:
            if worker.thread.ident is not None:
                worker.thread.join(max(0.0, until - time.monotonic()))
                while worker.thread.is_alive():
                    worker.kill()
                    worker.thread.join(0.1)
        if self._published in self.service.store.told:
            self.service.store.told.remove(self._published)
        if self._minding.ident is not None:
            self._minding.join()

    def close(self) -> None:
        """After `stop`, when nothing is published any more."""
        with self._telling:
            self._closed = True
            self.lender.close()
            for worker in self.workers:
                os.close(worker.wake)
