"""Helper processes of a bulk load: started, fed one task each, watched, and ended whatever happens.

They are fresh interpreters (`sys.executable -m tierstore.ingest.worker`), neither forked nor spawned
from the caller, so any program may embed the store whatever threads and locks it has, and a shard that
crashes a reader crashes a helper. The caller's own share is to wait on pipes: the interpreter lock is
free meanwhile.

A `Helpers` belongs to the thread that made it. Helpers end when their stdin does, so a killed parent
leaves none behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tierstore.errors import Corruption, DiskFull, SnapshotError, StorageError, TierstoreError
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.tasks import RESULTS, Task
from tierstore.tiers.background import hand_over

NICENESS = 19
_THREADS_OF_LIBRARIES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TICK_S = 0.1
_END_S = 10.0
_STDERR_TAIL = 2000


class Helpers:
    """`count` helper processes for one snapshot; a context manager that ends them. `scratch` takes their stderr.

    With `aside` they keep to half of the processors, so that what serves finds one free. `share` says how much of the
    time they may be at work, and is asked all the while.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        count: int,
        scratch: Path,
        *,
        aside: bool = False,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.peak_bytes = 0  # the most memory that one of them has held
        self._share, self._told = share, 1.0
        self._selector = selectors.DefaultSelector()
        self._helpers: list[_Helper] = []
        hello = {"root": str(snapshot.root), "manifest": snapshot.manifest.to_document()}
        try:
            for number in range(count):
                hand_over()  # to start a process takes a millisecond with the interpreter lock held
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
        """Have all tasks done, in any order; their results in the order of `tasks`.

        Calls `tick(rows)` with the rows done since the last call, at least every 0.1 s, and `note(task, result)` with
        each that is done; what they raise ends the run. Raises SnapshotError or StorageError; the helpers are of no use
        then.
        """
        waiting = deque(enumerate(tasks))
        results: dict[int, Any] = {}
        total = len(waiting)
        for helper in self._helpers:
            helper.take(waiting)
        while len(results) < total:
            rows = 0
            self._tell_share()
            for key, _ in self._selector.select(_TICK_S):
                helper = key.data
                for answer in helper.receive():
                    if "rows" in answer:
                        rows += answer["rows"]
                    elif "done" in answer:
                        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
                        number, kind = helper.finished()
                        results[number] = RESULTS[kind](**answer["done"])
                        if note is not None:
                            note(tasks[number], results[number])
                        helper.take(waiting)
                    else:
                        raise _error(answer)
            tick(rows)
        return [results[number] for number in range(total)]

    def _tell_share(self) -> None:
        share = self._share()
        if share != self._told:
            self._told = share
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class _Helper:
    def __init__(self, stderr: Path, aside: bool) -> None:
        self._stderr = stderr
        self._task: tuple[int, str] | None = None
        self._partial = b""
        self.process = start(stderr)
        if aside:
            _keep_aside(self.process.pid)
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

    def take(self, waiting: deque[tuple[int, Task]]) -> None:
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
        """The answers that have come; raises StorageError if the helper has died."""
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
    environment = dict(os.environ) | dict.fromkeys(_THREADS_OF_LIBRARIES, "1")  # there is one helper a processor
    # a helper must find what this process has found, wherever it was found, and nothing in its working directory
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
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
    _step_back(process.pid)
    return process


def _step_back(pid: int) -> None:
    """Let a helper run on what look-ups leave of the processors, from its first import on."""
    with contextlib.suppress(OSError):  # a system that does not allow it loses smoothness, not the load
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        # not SCHED_IDLE: where other programs keep all processors busy, a load would come to a halt
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def _keep_aside(pid: int) -> None:
    """Have a helper keep to half of the processors.

    Where all are busy, who wakes up waits for the end of a time slice, however low the priority of what it waits for.
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
