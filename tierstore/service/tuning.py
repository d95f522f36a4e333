"""What a serving process sets for itself: glibc's allocator, what the garbage collector looks at, turns of threads.

`tune_allocator` is called once, before threads start. By its defaults, glibc maps blocks from 128 KiB on afresh and gives them back at
free (the threshold adapts, but not for every size and arena), so each large answer touches new pages: several times
the cost of copying it. These settings keep what was freed, at the price of up to about 128 MiB that stays resident.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import struct
import threading

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most glibc allows
    (_M_TRIM_THRESHOLD, 128 << 20),
    (_M_TOP_PAD, 16 << 20),
)


def tune_allocator() -> bool:
    """Apply the settings. False where the C library is not glibc, or refused one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("the C library has no mallopt; large answers may cost more")
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(parameter, value) == 1 for parameter, value in _SETTINGS)


def freeze_heap() -> None:
    """Have the garbage collector pass over all that is there now: the modules, and what lives as long as the process.

    A full collection stops every thread, for a tenth of a second with the hundreds of thousands of objects that the
    libraries bring; of what requests leave behind, which is all that it looks at from now on, for a few milliseconds.
    """
    gc.collect()
    gc.freeze()


_SLICE_NS = 100_000  # the least that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")  # struct sched_attr


def take_short_turns() -> None:
    """Have the calling thread take short turns on a processor, and for that come soon when it wakes up.

    Linux' scheduler gives a turn first to whom it is due to end first, so a thread that asks for little at a time need
    not wait for the whole turns, milliseconds each, of those that work in the background (EEVDF; a turn's length is a
    thread's own from Linux 6.12 on). Needs no privileges; where it cannot be set nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
