"""Kernels compiled before their first use, by several processes at once.

    python -m tierstore.kernels.ahead SHARE SHARES UPTO    # one such process

Each process compiles its share of the kernels into the cache: first the kernels that every look-up needs, last those of the reactors, which only a
service needs, HTTP/1.1 before HTTP/2. A store may open when the first level is complete (`prepare`); a load waits for the kernels that it needs. A
kernel that is called too early is compiled by its caller. After a crash the next start compiles the missing kernels.
"""

from __future__ import annotations

import importlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import ismodule
from typing import IO, Any, cast

from llvmlite.binding import Linkage
from numba.core import codegen
from numba.core.caching import NullCache

from tierstore import kernels
from tierstore.errors import StorageError
from tierstore.machine import processors
from tierstore.threads import Thread

log = logging.getLogger(__name__)

_LIMIT_S = 1800.0  # for all kernels, on a very busy machine
MOST = 8  # processes, of about 270 MB each
_NICE = 10  # of processes beside an open store
_NICEST = 19  # once a load may run beside them: as low as its helpers

# How numba's names of functions begin that are only optimized once they are inlined. They go through bytes one by one; loops over rows were slower so.
_INLINED_FIRST = "_ZN9tierstore7reactor", "_ZN9tierstore4wire5http"

Say = Callable[[str], None]
Report = Callable[[int, int], None]  # (kernels compiled, kernels in all)


class Compilation:
    """A running compilation of kernels by child processes, which end with this process. Any thread may wait for it."""

    def __init__(
        self, processes: int, say: Say, upto: int = kernels.LAST, nice: int = 0, after: Compilation | None = None
    ) -> None:
        """Compile the kernels up to level `upto`, after another compilation if one is given.

        `nice`: of the processes, once the first level is complete; if it is not 0 they give way to loads later.
        """
        self.error: str | None = None  # what failed, once `done`
        self.first, self.soon, self.http, self.done = (threading.Event() for _ in range(4))
        if kernels.is_complete(kernels.HTTP):
            self.http.set()
        self.seconds = 0.0  # once `done`
        self.upto, self.nice, self._gives_way = upto, nice, nice > 0
        self.compiled, self.total = 0, 0  # kernels
        self.timings: dict[str, float] = {}  # kernel → processor time, with functions that it was first to call
        self._processes, self._say, self._after = processes, say, after
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_first = not kernels.is_complete(kernels.SOON)
        kernels.awaited = self._is_first
        Thread(target=self._run, name="tierstore-compile", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._after is not None:
                self._after.done.wait()
            self._compile()
        except (StorageError, OSError) as error:
            self.error = str(error)
        kernels.awaited = False
        for event in (self.first, self.soon, self.http, self.done):
            event.set()

    def _compile(self) -> None:
        start_s = self._start_s = time.monotonic()
        what = "kernels" if self._is_first else "kernels of the service's loops"
        self._say(f"compiling {what} with {self._processes} processes: once for each version and machine")
        ours, theirs = os.pipe()  # the pipe closes with this process: a signal may end it between any two lines
        running = self._running
        try:
            running.extend(start_share(i, self._processes, ours, self.upto) for i in range(self._processes))
            self._follow()
        finally:
            for process in running:
                process.kill()
                process.communicate()
            os.close(ours)
            os.close(theirs)
        kernels.set_complete(self.upto)
        self.seconds = time.monotonic() - start_s
        self._say(f"{what} are compiled ({self.seconds:.1f} s), and kept in {kernels.directory()}")

    def _follow(self) -> None:
        """Read the output of the processes until all have ended."""
        levels = [0] * (kernels.LAST + 1)  # how many processes have compiled each level
        with selectors.DefaultSelector() as selector:
            for process in self._running:
                selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, process)
            while selector.get_map():
                ready = selector.select(_LIMIT_S)
                if not ready:
                    raise StorageError(f"kernels cannot be compiled: a process said nothing for {_LIMIT_S:.0f} s")
                for key, _ in ready:
                    word, *number = key.data.stdout.readline().split() or [b""]
                    if word == b"total":
                        self.total += int(number[0])
                    elif word == b"compiled":
                        self.compiled += 1
                        self.timings[number[0].decode()] = float(number[1])
                    elif word == b"level":
                        level = int(number[0])
                        levels[level] += 1
                        if levels[level] == len(self._running):
                            self._reach(level)
                    else:
                        selector.unregister(key.fileobj)
                        _check(key.data)

    def _reach(self, level: int) -> None:
        """Note that all processes have compiled the kernels of `level`."""
        if level == kernels.FIRST:
            if self._is_first:
                self._say(f"kernels of look-ups are compiled ({time.monotonic() - self._start_s:.1f} s); others follow")
            self.first.set()
            self._give_way(self.nice)
        elif level == kernels.SOON:
            # what was complete already is read by imports, which may be under way: two readers wait for each other's locks
            if not kernels.is_complete(kernels.SOON):
                kernels.set_complete(kernels.SOON)
                kernels.load(kernels.SOON)
            kernels.awaited = False
            self.soon.set()
            self._give_way(_NICEST if self._gives_way else 0)
        elif level == kernels.HTTP:
            kernels.set_complete(kernels.HTTP)
            self.http.set()

    def _give_way(self, nice: int) -> None:
        for process in self._running:
            with suppress(OSError):  # it has ended, or this user may not raise a priority
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)


def _check(process: subprocess.Popen[bytes]) -> None:
    """Raise StorageError if a process whose output has ended has failed."""
    _, error = process.communicate()
    if process.returncode:
        why = error.decode(errors="replace").strip()[-500:] or f"a process ended with {process.returncode}"
        raise StorageError(f"kernels cannot be compiled: {why}")


_lock = threading.Lock()
_running: Compilation | None = None  # guarded by _lock


def start(say: Say = log.info, upto: int = kernels.LAST) -> Compilation | None:
    """Start compiling kernels, with as many processes as processors. None if all are compiled already.

    upto: LAST for a service; a store in this process needs nothing after SOON.
    """
    global _running
    with _lock:
        if kernels.is_complete(upto):
            return None
        if _running is None or _running.upto < upto:
            _running = Compilation(min(MOST, processors()), say, upto, _NICE, _running)
        return _running


def prepare(say: Say = log.info, until: int = kernels.FIRST, report: Report = lambda *_: None) -> None:
    """Wait until the kernels are compiled that every look-up needs; with `until` SOON, all kernels of a store.

    After a failure each kernel is compiled at its first call. This thread calls `report` while it waits; an exception from it ends the wait.
    """
    compilation = start(say, kernels.SOON)
    if compilation is None:
        return
    if until != kernels.FIRST:
        compilation.nice = 0  # nothing else runs until then
    _wait(compilation, compilation.first if until == kernels.FIRST else compilation.soon, report)
    if compilation.error is not None:
        log.warning("each kernel is compiled at its first call: %s", compilation.error)


def _wait(compilation: Compilation, event: threading.Event, report: Report) -> None:
    """Wait for an event in short steps, as only the main thread handles signals and another thread's signal does not end its wait."""
    while not event.wait(0.1):
        report(compilation.compiled, compilation.total)


def compile_all(
    processes: int, say: Say = lambda _: None, report: Report = lambda *_: None, timings: dict[str, float] | None = None
) -> float:
    """Compile all kernels for this machine and version. Returns the seconds taken, 0 if they were compiled already.

    `say` gets a line before and after; `report` is called meanwhile. `timings` gets the seconds of processor time of each newly compiled kernel.
    Raises StorageError where a process fails.
    """
    if kernels.is_complete():
        return 0.0
    compilation = Compilation(processes, say)
    _wait(compilation, compilation.done, report)
    if compilation.error is not None:
        raise StorageError(compilation.error)
    if timings is not None:
        timings |= compilation.timings
    return compilation.seconds


def start_share(share: int, shares: int, stdin: int, upto: int = kernels.LAST) -> subprocess.Popen[bytes]:
    """Start a process that runs `compile_share`, and ends when `stdin` does."""
    command = [sys.executable, "-P", "-m", "tierstore.kernels.ahead", str(share), str(shares), str(upto)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, 0, stdin=stdin, stdout=pipe, stderr=pipe, env=kernels.child_environment())


def compile_share(share: int, shares: int, upto: int = kernels.LAST) -> None:
    """Compile one share of the kernels into the cache. For a process that calls no kernel.

    Reports on standard output: the number of kernels, each compiled kernel, and each completed level.
    """
    kernels.must_keep = True
    for module in kernels.modules():
        importlib.import_module(module)
    entries = [entry for entry in kernels.entries if entry.when <= upto]
    _make_cheaper([entry.dispatcher for entry in kernels.entries])
    # identities differ between processes, but order and sizes do not: all processes compute the same shares
    needs = [_needs(entry.dispatcher, {}) for entry in entries]
    mine = _share(needs, [entry.when for entry in entries], share, shares)
    for i, entry in enumerate(entries):
        if i not in mine:
            entry.dispatcher._cache = NullCache()  # compiled where one of ours calls it, and kept by its own process
    os.write(1, b"total %d\n" % len(mine))
    for when in range(upto + 1):
        for i in mine:
            if entries[i].when == when:
                function, began_s = entries[i].dispatcher.py_func, time.process_time()
                entries[i].build()
                name = f"{function.__module__.removeprefix('tierstore.')}.{function.__name__}"
                os.write(1, b"compiled %s %.2f\n" % (name.encode(), time.process_time() - began_s))
        os.write(1, b"level %d\n" % when)


def _share(needs: list[dict[int, int]], when: list[int], share: int, shares: int) -> list[int]:
    """The kernels that one of `shares` processes compiles, in order. `needs`: the functions that each kernel needs, with their sizes.

    Kernels that are needed first come first, then the largest. A function that two kernels of a share call is compiled once, so a kernel goes to a
    small share that has most of its functions.
    """
    held: list[dict[int, int]] = [{} for _ in range(shares)]
    mine = []

    def cost(k: int, i: int) -> int:
        before, after = sum(held[k].values()), sum((held[k] | needs[i]).values())
        return after + (after - before)

    for i in sorted(range(len(needs)), key=lambda i: (when[i], -sum(needs[i].values()))):
        least = min(range(shares), key=lambda k: cost(k, i))
        held[least] |= needs[i]
        if least == share:
            mine.append(i)
    return mine


def _needs(dispatcher: Any, needs: dict[int, int]) -> dict[int, int]:
    """Add the functions that are compiled with a kernel, itself included: identity → bytes of bytecode."""
    for called in _called(dispatcher, {}).values():
        needs[id(called.py_func)] = len(called.py_func.__code__.co_code)
    return needs


def _called(dispatcher: Any, found: dict[int, Any]) -> dict[int, Any]:
    """A kernel, and the functions that are compiled with it, by identity."""
    function = dispatcher.py_func
    if id(function) not in found:
        found[id(function)] = dispatcher
        names = function.__code__.co_names
        for named in map(function.__globals__.get, names):
            for called in (getattr(named, name, None) for name in names) if ismodule(named) else (named,):
                if hasattr(called, "py_func"):
                    _called(called, found)
    return found


def _make_cheaper(entries: list[Any]) -> None:
    """Have numba compile only what is kept. For a process that calls no kernel.

    numba makes machine code for each function that a kernel calls, with wrappers for Python and C, but keeps only the code that is inlined in the
    kernel. Functions on rows are optimized before inlining too, those of `_INLINED_FIRST` are not.
    """
    found: dict[int, Any] = {}
    for dispatcher in entries:
        _called(dispatcher, found)
    kept = {id(dispatcher.py_func) for dispatcher in entries}
    for function, dispatcher in found.items():
        dispatcher.targetoptions["no_cfunc_wrapper"] = True
        dispatcher.targetoptions["no_cpython_wrapper"] = function not in kept

    library = codegen.JITCodeLibrary
    optimize, finish = library._optimize_final_module, library._finalize_final_module
    set_env = codegen.JITCPUCodegen.set_env

    def optimize_unless_inlined_first(self: Any) -> None:
        defined = (function for function in self._final_module.functions if not function.is_declaration)
        own = [function.name for function in defined if function.linkage == Linkage.external]
        if not own or not all(name.startswith(_INLINED_FIRST) for name in own):
            optimize(self)

    def is_kept(self: Any) -> bool:
        if (
            getattr(self, "_compiled_object", None) is not None
        ):  # read from the cache, where an earlier compilation left it
            return True
        names = (function.name for function in self._final_module.functions if not function.is_declaration)
        return any(name.startswith(("_ZN7cpython", "cfunc.")) for name in names)  # the wrappers

    def finish_kept(self: Any) -> None:
        if is_kept(self):
            finish(self)
        else:
            self._finalize_dynamic_globals()
            self._finalized = True

    def set_env_of_kept(self: Any, name: str, env: Any) -> None:
        # it has no address: a cached kernel, kept by a process of another kind, from which nothing is compiled here
        if self._engine.is_symbol_defined(name) and self._engine.get_global_value_address(name):
            set_env(self, name, env)

    library._optimize_final_module = optimize_unless_inlined_first
    library._finalize_final_module, codegen.JITCPUCodegen.set_env = finish_kept, set_env_of_kept


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with_parent, daemon=True).start()
    compile_share(*map(int, sys.argv[1:]))
