"""The sandbox for graphs: one of a structure not yet known is made into a session in a process of its own first.

ONNX Runtime works on a graph before it runs, and nothing ends that work: local functions are replaced by what they do,
constants are computed. So a few bytes can take a processor for good, or all memory. A process can be killed. It is a
new interpreter, neither forked nor spawned (`sandbox_process.py`), and lives for one graph.

`GraphSandbox`: any thread. Nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

from tierstore.errors import InvalidInput, Overloaded, StorageError
from tierstore.kernels import child_environment
from tierstore.machine import end_first
from tierstore.predict.making import CREATE_S, SessionSettings
from tierstore.predict.provider import CPU_PROVIDER
from tierstore.predict.sandbox_process import DONE

AT_ONCE = 2  # graphs; each may take the processor and the memory of one
_MOST_PASSED = 4096  # structures
_TICK_S = 0.02  # memory can grow by a few ten MB meanwhile
_GRACE_S = 10  # after which a process ends itself
_OWN_BYTES = 256 << 20  # of a process, whatever the graph
_RATIO = (
    8  # of what is held to the size of the graph: read, parsed, its weights, those laid out anew, and computed ones
)
_STDERR_TAIL = 500
_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)  # by others


class GraphSandbox:
    """Tries all graphs of a store, each in a process of its own.

    `memory_bytes` is what a graph may take beside its weights.
    """

    def __init__(self, settings: SessionSettings, memory_bytes: int) -> None:
        # A GPU's provider works on what this one has worked on; in a process of its own it would take seconds to start
        self._settings = replace(settings, providers=[CPU_PROVIDER], memory_bytes=memory_bytes)
        self._memory_bytes = memory_bytes
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # structures that passed; guarded by _lock

    def add(self, structure: bytes) -> None:
        """Graphs of this structure need no sandbox from now on."""
        with self._lock:
            self._passed[structure] = None
            self._passed.move_to_end(structure)
            if len(self._passed) > _MOST_PASSED:
                self._passed.popitem(last=False)

    def check(self, model: bytes, structure: bytes, may_go_on: Callable[[], None], *, waits: bool) -> None:
        """Try a graph, unless one of its structure has passed.

        InvalidInput for one that is not ready in time, takes too much memory or crashes. `may_go_on` is
        called all the time, and what it raises ends that process. Overloaded where others are being tried and
        this one does not wait for them.
        """
        with self._lock:
            if structure in self._passed:
                return
        while not self._slots.acquire(timeout=_TICK_S if waits else 0):
            may_go_on()
            if not waits:
                raise Overloaded(f"{AT_ONCE} dense parts of new structures are being tried; try again later")
        try:
            try_graph(model, self._settings, self._memory_bytes + _OWN_BYTES + _RATIO * len(model), may_go_on)
        finally:
            self._slots.release()
        self.add(structure)


def try_graph(model: bytes, settings: SessionSettings, limit_bytes: int, may_go_on: Callable[[], None]) -> None:
    """Make a session in a process of its own, which has ended on return. Raises as `GraphSandbox.check`."""
    with contextlib.ExitStack() as stack:
        graph, said = (stack.enter_context(_memory_file(name)) for name in ("graph", "said"))
        graph.write(model)
        graph.seek(0)
        process = _start(graph.fileno(), said.fileno())
        end_first(process.pid)  # a graph can be tried again
        stack.enter_context(process)  # waits for its end
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"settings": asdict(settings), "seconds": int(CREATE_S) + _GRACE_S}
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        until_s = time.monotonic() + CREATE_S
        answered = select.poll()
        answered.register(process.stdout, select.POLLIN)
        while not answered.poll(_TICK_S * 1000):
            may_go_on()
            if time.monotonic() > until_s:
                raise InvalidInput(f"the graph cannot be made ready to run within {CREATE_S:g} s")
            if _resident_bytes(process.pid) > limit_bytes:
                raise InvalidInput(
                    f"to make the graph ready to run takes more than {limit_bytes >> 20} MiB of memory (dense_memory, "
                    f"and {_RATIO} times its size)"
                )
        if process.stdout.read() != DONE:
            said.seek(0)
            raise _failed(process.wait(), said.read().decode(errors="replace").strip())


def _memory_file(name: str) -> BinaryIO:
    try:
        return os.fdopen(os.memfd_create(name), "w+b")
    except OSError as error:  # too many files are open, say
        raise StorageError(f"cannot make a file in memory for a graph: {error.strerror or error}") from error


def _start(graph: int, said: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tierstore.predict.sandbox_process", str(graph)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            pass_fds=(graph,),
            bufsize=0,
            env=child_environment() | {"OPENBLAS_NUM_THREADS": "1"},  # NumPy's, which has nothing to do there
        )
    except OSError as error:
        raise StorageError(f"cannot start a process ({sys.executable}): {error.strerror or error}") from error


def _failed(status: int, said: str) -> Exception:
    tail = f"; it said: {said[-_STDERR_TAIL:]}" if said else ""
    if -status in _KILLS:
        return Overloaded(f"the process in which the graph was tried was killed (was memory short?){tail}")
    if status < 0:
        return InvalidInput(f"ONNX Runtime crashes on the graph ({signal.Signals(-status).name}){tail}")
    return StorageError(f"the process in which the graph was tried ended with status {status}{tail}")


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):  # it may be gone
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * resource.getpagesize()
    return 0
