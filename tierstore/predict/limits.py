"""Limits of a dense part: the seconds of one run, and the bytes of its tensors.

A graph comes from outside, so it may hold a loop without an end, or make a tensor of any size. ONNX Runtime looks at
the flag `terminate` of a run before each node and in each round of a loop; a thread sets it. An arena of a session's
own bounds its tensors. What cannot be ended is one node at work, which the bound of bytes keeps short.

Any thread may use them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tierstore.errors import Closed, RunLimit, TooLarge
from tierstore.threads import Thread


class LimitedRun:
    """One run; `with` it around the run itself. `options` are for ONNX Runtime; `ended` says why it was ended."""

    __slots__ = ("_runs", "began_s", "ended", "options")

    def __init__(self, runs: RunLimits, options: Any) -> None:
        self._runs, self.options = runs, options
        self.began_s = time.monotonic()
        self.ended: str | None = None

    def __enter__(self) -> Any:
        """The options. Closed after `RunLimits.close`."""
        self._runs.begin(self)
        return self.options

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """RunLimit where the run was ended."""
        self._runs.finish(self)
        if self.ended is not None and isinstance(error, Exception):
            raise RunLimit(self.ended) from error

    def end(self, why: str) -> None:
        self.ended = why
        self.options.terminate = True


class RunLimits:
    """The runs of all sessions of a store. Its thread starts with the first run."""

    def __init__(self, timeout_s: float, options: Callable[[], Any]) -> None:
        self._timeout_s, self._options = timeout_s, options
        self._changed = threading.Condition()
        # guarded by _changed
        self._running: dict[LimitedRun, None] = {}  # in the order of their beginning
        self._thread: threading.Thread | None = None
        self._ends = 0  # how often all that runs was ended
        self._waits = False  # the thread waits for a run, whichever comes; else it looks again at the oldest one's end
        self._closed = False

    def run(self, *, shrink: bool = False) -> LimitedRun:
        """A run, which is ended when its time is over.

        With `shrink` the session's arena gives the memory back that it does not need any more.
        """
        run = LimitedRun(self, self._options())
        if shrink:
            run.options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return run

    def begin(self, run: LimitedRun) -> None:
        """A run begins."""
        with self._changed:
            if self._closed:
                raise Closed("the store was closed")
            self._running[run] = None
            if self._thread is None:
                thread = Thread(target=self._watch, name="tierstore-dense-limits", daemon=True)
                thread.start()  # before it counts as there
                self._thread = thread
            elif self._waits:
                self._waits = False
                self._changed.notify()

    def finish(self, run: LimitedRun) -> None:
        """A run is over."""
        with self._changed:
            self._running.pop(run, None)

    def going_on(self, may_go_on: Callable[[], None]) -> Callable[[], None]:
        """`may_go_on` for what is no run: it raises Closed as well once all that runs is ended."""
        ends = self._ends

        def check() -> None:
            may_go_on()
            if self._closed:
                raise Closed("the store was closed")
            if self._ends != ends:
                raise Closed("the service stops: the dense part was not made ready")

        return check

    def end_all(self, why: str = "the run was ended because the service stops") -> None:
        """End what runs now."""
        with self._changed:
            self._ends += 1
            for run in self._running:
                run.end(why)

    def close(self) -> None:
        """End what runs, and begin nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.end_all("the run was ended because the store was closed")

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                run = next((run for run in self._running if run.ended is None), None)
                if run is None:
                    self._waits = True
                    self._changed.wait()
                    continue
                remaining_s = run.began_s + self._timeout_s - time.monotonic()
                if remaining_s > 0:
                    self._changed.wait(remaining_s)
                else:
                    run.end(f"a run of the dense part took longer than the {self._timeout_s:g} s of dense_timeout_s")


class SessionLimits:
    """How long a run of one session may take, and how much memory. Any thread.

    `memory_bytes` is what its tensors may use. An arena keeps the regions that it has, so a large tensor may find no
    room though little is in use: after `ran_out` the next run gives back what is free. With `shrinks` each run does.
    """

    def __init__(self, runs: RunLimits, memory_bytes: int, *, shrinks: bool) -> None:
        self.memory_bytes = memory_bytes
        self._runs, self._shrinks, self._shrinks_next = runs, shrinks, False

    def run(self) -> LimitedRun:
        shrink, self._shrinks_next = self._shrinks or self._shrinks_next, False
        return self._runs.run(shrink=shrink)

    def ran_out(self) -> None:
        self._shrinks_next = True

    def check(self, what: str, shape: Sequence[int], itemsize: int) -> None:
        """TooLarge for a tensor of that shape that cannot be."""
        if (nbytes := math.prod(shape) * itemsize) > self.memory_bytes:
            raise TooLarge(f"{what} of shape {list(shape)} takes {nbytes} bytes, dense_memory is {self.memory_bytes}")
