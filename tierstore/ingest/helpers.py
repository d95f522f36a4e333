"""Helper processes of a bulk load: start them, give each one task at a time, watch them, and end them whatever happens.

A load of a few MB has none, nor has a part of a build: their caller does the tasks, one after the other.

They are new interpreters (`sys.executable -m tierstore.ingest.worker`), neither forked nor spawned from the caller. So any
program may embed the store, whatever threads and locks it has, and a shard that crashes its reader crashes only a helper.
The caller itself waits on pipes, during which the interpreter lock is free.

A `Helpers` belongs to the thread that made it. Helpers end when their stdin ends, so a killed parent leaves none running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tierstore.errors import Corruption, DiskFull, SnapshotError, StorageError, TierstoreError
from tierstore.formats.objects import ObjectPath
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.tasks import RESULTS, Task
from tierstore.ingest.worker import describe, run_task
from tierstore.kernels import child_environment
from tierstore.machine import end_first
from tierstore.tiers.background import yield_to_requests

log = logging.getLogger(__name__)

NICENESS = 19
_THREADS_OF_LIBRARIES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TICK_S = 0.1
_END_S = 10.0
_STDERR_TAIL = 2000


class Helpers:
    """`count` helper processes for one snapshot; a context manager that ends them. `scratch` takes their stderr.

    With `aside` they use half of the processors, so that one is free for requests. `share` says for which share of the
    time they may work; it is called again and again. `waits` is called with what a helper waits for.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        count: int,
        scratch: Path,
        *,
        aside: bool = False,
        share: Callable[[], float] = lambda: 1.0,
        waits: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.peak_bytes = 0  # the most memory that one of them has held
        self._share, self._sent_share, self._waits = share, 1.0, waits
        self._selector = selectors.DefaultSelector()
        self._helpers: list[_Helper] = []
        self._snapshot, root = snapshot, snapshot.root
        hello = {
            "root": root.document() if isinstance(root, ObjectPath) else str(root),
            "manifest": snapshot.manifest.to_document(),
        }
        try:
            for number in range(count):
                yield_to_requests()  # to start a process takes a millisecond with the interpreter lock held
                helper = _Helper(scratch / f"helper-{number}.stderr", aside)
                self._helpers.append(helper)
                self._selector.register(helper.stdout, selectors.EVENT_READ, helper)
                helper.send(hello)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return [helper.process.pid for helper in self._helpers]

    def run(
        self, tasks: Sequence[Task], tick: Callable[[int], None], note: Callable[[Any, Any], None] | None = None
    ) -> list[Any]:
        """Do all tasks, in any order. Returns their results in the order of `tasks`.

        Calls `tick(rows)` with the rows done since the last call, at least every 0.1 s, and `note(task, result)` with
        each that is done; what they raise ends the run. Raises SnapshotError or StorageError; do not use
        the helpers then.
        """
        if not self._helpers:
            return [self._do(task, tick, note) for task in tasks]
        waiting = deque(enumerate(tasks))
        results: dict[int, Any] = {}
        total = len(waiting)
        for helper in self._helpers:
            helper.start_next(waiting)
        while len(results) < total:
            rows = 0
            self._send_share()
            for key, _ in self._selector.select(_TICK_S):
                helper = key.data
                for answer in helper.receive():
                    if "rows" in answer:
                        rows += answer["rows"]
                    elif "waits" in answer:
                        log.warning("%s", answer["waits"])
                        self._waits(answer["waits"])
                    elif "done" in answer:
                        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
                        number, kind = helper.finished()
                        results[number] = RESULTS[kind](**answer["done"])
                        if note is not None:
                            note(tasks[number], results[number])
                        helper.start_next(waiting)
                    else:
                        raise _error(answer)
            tick(rows)
        return [results[number] for number in range(total)]

    def _do(self, task: Task, tick: Callable[[int], None], note: Callable[[Any, Any], None] | None) -> Any:
        """Do a task on this thread."""
        done: list[int] = []
        tick(0)
        yield_to_requests()
        try:
            result = run_task(self._snapshot, task, done.append)
        except Exception as error:
            raise _error(describe(error)) from error
        if note is not None:
            note(task, result)
        tick(sum(done))
        return result

    def _send_share(self) -> None:
        share = self._share()
        if share != self._sent_share:
            self._sent_share = share
            for helper in self._helpers:
                helper.send({"share": share})

    def end(self) -> None:
        """Kill and reap whatever still runs. May be repeated."""
        for helper in self._helpers:
            helper.end()
        self._helpers.clear()
        self._selector.close()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Helper:
    def __init__(self, stderr: Path, aside: bool) -> None:
        self._stderr = stderr
        self._task: tuple[int, str] | None = None
        self._partial = b""
        self.process = start(stderr)
        if aside:
            _use_half_of_processors(self.process.pid)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self.stdout = self.process.stdout

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def start_next(self, waiting: deque[tuple[int, Task]]) -> None:
        """Start on the next of the waiting tasks, if there is one."""
        if waiting:
            number, task = waiting.popleft()
            self._task = number, type(task).__name__
            self.send({"task": type(task).__name__, **asdict(task)})

    def finished(self) -> tuple[int, str]:
        assert self._task is not None
        task, self._task = self._task, None
        return task

    def receive(self) -> list[dict[str, Any]]:
        """The answers received so far. Raises StorageError if the helper has died."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            raise self._died()
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _died(self) -> TierstoreError:
        status = self.process.wait()
        try:
            said = self._stderr.read_bytes()[-_STDERR_TAIL:].decode(errors="replace").strip()
        except OSError:
            said = ""
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            how += " (was memory short? lower load_memory or load_workers)" if -status == signal.SIGKILL else ""
        else:
            how = f"ended with status {status}"
        return StorageError(f"a load helper {how}; nothing was loaded" + (f". It said: {said}" if said else ""))

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a drive or a mount holds cannot be ended
            self.process.wait(_END_S)
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def start(stderr: Path) -> subprocess.Popen[bytes]:
    """A helper process that waits for its first line. Raises StorageError."""
    environment = child_environment() | dict.fromkeys(_THREADS_OF_LIBRARIES, "1")  # there is one helper a processor
    try:
        with open(stderr, "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tierstore.ingest.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
    except OSError as error:
        raise StorageError(f"cannot start a load helper ({sys.executable}): {error.strerror or error}") from error
    _lower_priority(process.pid)
    end_first(process.pid)  # a load can be begun again
    return process


def _lower_priority(pid: int) -> None:
    """Give a helper the lowest priority, from its first import on: look-ups come first."""
    with contextlib.suppress(OSError):  # where that is refused, look-ups are slower during the load
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with contextlib.suppress(OSError):
        # not SCHED_IDLE: where other programs keep all processors busy, a load would come to a halt
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def _use_half_of_processors(pid: int) -> None:
    """Let a helper use only half of the processors.

    If all were busy, a thread that wakes up would wait for the end of a time slice, even against a lowest priority.
    """
    with contextlib.suppress(OSError):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(pid, processors[len(processors) // 2 :])


def _error(answer: dict[str, Any]) -> TierstoreError:
    if answer["error"] == "snapshot":
        return SnapshotError(answer["reason"], file=answer["file"], row=answer["row"])
    if answer["error"] == "corruption":
        return Corruption(answer["message"])
    if answer["error"] == "full":
        return DiskFull(answer["message"])
    if answer["error"] == "storage":
        return StorageError(answer["message"])
    return StorageError(f"a load helper failed, which is a defect of tierstore: {answer['message']}")
