"""Kernels compiled ahead of their first use, in several processes side by side.

    python -m tierstore.kernels.ahead SHARE SHARES    # one such process

Otherwise each is compiled where its module is imported, one after the other. Each process decorates all kernels, so that
it knows what calls what, and compiles its share into the one cache; no kernel is of two shares, so nobody writes what
another one writes. What a crash leaves is compiled at the next start.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import NullCache

from tierstore import kernels
from tierstore.errors import StorageError

log = logging.getLogger(__name__)

_LIMIT_S = 1800.0  # of all of it, on a machine that is very busy
MOST = 8  # processes, of about 270 MB each


def prepare(say: Callable[[str], None] = log.info) -> None:
    """`compile_all`, with as many processes as there are processors; what fails is left to whoever imports a kernel."""
    try:
        compile_all(min(MOST, len(os.sched_getaffinity(0))), say)
    except (StorageError, OSError, subprocess.TimeoutExpired) as error:
        log.warning("kernels are compiled one after the other: %s", error)


def compile_all(processes: int, say: Callable[[str], None] = lambda _: None) -> float:
    """Have all kernels compiled and kept for this machine and version. Returns the seconds that it took, 0 if they were.

    `say` is told, in a line each, what is being done and what was. Raises StorageError where a process fails.
    """
    if kernels.is_complete():
        return 0.0
    begun_s = time.monotonic()
    say(f"compiling kernels with {processes} processes: once for each version and machine, for 10 to 60 s")
    command = [sys.executable, "-m", "tierstore.kernels.ahead"]
    running: list[subprocess.Popen[bytes]] = []
    ours, theirs = os.pipe()  # each ends when this does: a signal may end this process between any two lines
    try:
        for i in range(processes):
            share = [*command, str(i), str(processes)]
            running.append(subprocess.Popen(share, stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        for process in running:
            _, error = process.communicate(timeout=_LIMIT_S)
            if process.returncode:
                raise StorageError(f"kernels cannot be compiled: {error.decode(errors='replace').strip()[-500:]}")
    finally:
        for process in running:
            process.kill()
            process.wait()
        os.close(ours)
        os.close(theirs)
    kernels.set_complete()
    seconds = time.monotonic() - begun_s
    say(f"kernels are compiled ({seconds:.1f} s), and kept in {kernels.directory()}")
    return seconds


def compile_share(share: int, shares: int) -> None:
    """Compile one share of the kernels into the cache. For a process of its own: no kernel is compiled by import here."""
    found: list[tuple[Any, Callable[[], object]]] = []
    decorate, decorate_c = numba.njit, numba.cfunc

    def collect(*arguments: Any, **options: Any) -> Any:
        if not arguments or (callable(arguments[0]) and not hasattr(arguments[0], "return_type")):
            return decorate(*arguments, **options)
        signatures = arguments[0] if isinstance(arguments[0], (list, tuple)) else [arguments[0]]

        def later(function: Callable[..., Any]) -> Any:
            dispatcher = decorate(**options)(function)
            found.append((dispatcher, lambda: [dispatcher.compile(signature) for signature in signatures]))
            return dispatcher

        return later

    def collect_c(*arguments: Any, **options: Any) -> Any:
        """Of what is called by address: nobody asks for that here."""

        def later(function: Callable[..., Any]) -> Any:
            dispatcher = decorate()(function)
            found.append((dispatcher, lambda: decorate_c(*arguments, **options)(function)))
            return dispatcher

        return later

    numba.njit, numba.cfunc = collect, collect_c
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    # identities differ from process to process, the order and the sizes do not: all come to the same shares
    mine = _share([_needs(dispatcher, {}) for dispatcher, _ in found], share, shares)
    for i, (dispatcher, _) in enumerate(found):
        if i not in mine:
            dispatcher._cache = NullCache()  # compiled where one of ours calls it, and kept by its own process
    for i in sorted(mine):
        _, build = found[i]
        build()


def _share(needs: list[dict[int, int]], share: int, shares: int) -> set[int]:
    """Which kernels one of `shares` processes takes; `needs` are the functions that each needs, and their sizes.

    The largest first, each to whom has least with it: what two kernels call is compiled once where both are of one share.
    """
    held: list[dict[int, int]] = [{} for _ in range(shares)]
    mine = set()
    for i in sorted(range(len(needs)), key=lambda i: -sum(needs[i].values())):
        least = min(range(shares), key=lambda k: sum((held[k] | needs[i]).values()))
        held[least] |= needs[i]
        if least == share:
            mine.add(i)
    return mine


def _needs(dispatcher: Any, needs: dict[int, int]) -> dict[int, int]:
    """The functions that are compiled with a kernel, itself included, by identity, with the size of their bytecode."""
    function = dispatcher.py_func
    if id(function) not in needs:
        needs[id(function)] = len(function.__code__.co_code)
        for name in function.__code__.co_names:
            if hasattr(called := function.__globals__.get(name), "py_func"):
                _needs(called, needs)
    return needs


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compile_share(int(sys.argv[1]), int(sys.argv[2]))
