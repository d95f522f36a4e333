"""Process settings of a service: the allocator, the garbage collector, the file limit, time slices of threads, the
exit.

`tune_allocator` is called once, before threads start. By default glibc maps blocks of 128 KiB and more anew each time,
and gives them back to the system when they are freed (the threshold adapts, but not for every size and arena). So each
large response touches new pages, which costs several times as much as copying it. These settings keep freed blocks; up
to about 128 MiB stay resident.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import struct
import sys
import threading

from tierstore import open_files
from tierstore.threads import Timer

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most that glibc allows
    (_M_TRIM_THRESHOLD, 128 << 20),
    (_M_TOP_PAD, 16 << 20),
)


def tune_allocator() -> bool:
    """Apply the settings. False if the C library is not glibc, or refused one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("the C library has no mallopt; large answers may cost more")
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(parameter, value) == 1 for parameter, value in _SETTINGS)


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection: the modules, and what lives as long as the process.

    A full collection stops every thread. With the hundreds of thousands of objects of the libraries it takes a tenth
    of a second; with only those that requests leave behind, a few milliseconds.
    """
    gc.collect()
    gc.freeze()


_MOST_FILES = 1 << 16


def raise_file_limit() -> None:
    """Let this process open as many files as it may, within reason: each connection is a file."""
    open_files.raise_to(_MOST_FILES)


def allowed_connections(max_connections: int) -> int:
    """The setting, or half of the files that this process may open if that is less."""
    most = open_files.may_open()
    return max_connections if most is None else max(1, min(max_connections, most // 2))


_SLICE_NS = 100_000  # the least that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")  # struct sched_attr


def request_short_slices() -> None:
    """Request short time slices for the calling thread, so that it runs soon after it wakes up.

    Linux' scheduler (EEVDF) first runs the thread whose slice is due to end first. So a thread with short slices does
    not wait for the whole slices, milliseconds each, of background threads. A thread may set its own slice from Linux
    6.12 on, without privileges; otherwise nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


CLOSE_S = 30.0  # for the steps after the requests: pools, the store
LAST_S = 2.0  # for its own timer to fire
EXIT_CODE = 70


class ExitBound:
    """A bound on the stop: if it takes longer, the process exits at once. A context manager; the block is the stop too.

    Acknowledged changes are on disk by then, and the next start finds them as after a crash.
    """

    def __init__(self) -> None:
        self._timers: list[Timer] = []
        self._alarmed = False

    def signalled(self, seconds: float) -> None:
        """Note that a signal requests a stop that may take so long.

        For its handler: takes no lock, and the kernel keeps the time. `start` should follow at once, unless something
        holds up the thread that would call it.
        """
        self._alarmed = True
        signal.setitimer(signal.ITIMER_REAL, seconds + CLOSE_S + LAST_S)

    def start(self, seconds: float) -> None:
        """Begin the stop, which may take so long, and `CLOSE_S`. Any thread."""
        timer = Timer(seconds + CLOSE_S, lambda: _exit_at_once(seconds + CLOSE_S))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def __enter__(self) -> ExitBound:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._alarmed:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _exit_at_once(seconds: float) -> None:
    logger.critical(
        "the stop has not ended in %.0f s: the process exits, as in a crash; nothing acknowledged is lost", seconds
    )
    os._exit(EXIT_CODE)


def say(url: str, grpc_target: str | None) -> None:
    """Print the addresses of the service."""
    also = "" if grpc_target is None else f"gRPC at {grpc_target}\n"
    sys.stdout.write(f"tierstore serves at {url}\n{also}")
    sys.stdout.flush()
