"""Work that gives way to requests: on threads of low priority, what tells such threads from others, and a short rest.

A switch warms a version while another one serves; at the same priority it would take every other turn of a core from the
look-ups. Niceness is a thread's own on Linux, and one without privileges cannot take it back: hence a thread that ends.

Any thread may call anything here; what is called must not hold a lock that requests wait for. Nothing survives a crash.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10  # a tenth of the turns beside a thread that has none, and all there are beside an idle core

_REST_S = 50e-6  # in which a thread that waits wakes up; without it, who lets a lock go is the first to take it again

_here = threading.local()


def give_way() -> None:
    """Lower the priority of the calling thread, for good. A thread started by it inherits that."""
    _here.gives_way = True
    with contextlib.suppress(OSError):  # it would only be slower for others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def gives_way() -> bool:
    """Whether the calling thread has called `give_way`."""
    return getattr(_here, "gives_way", False)


def hand_over() -> None:
    """Let a thread go on that waits: for the interpreter lock, which it would get after the switch interval (5 ms), for the
    processor, or for a lock that the caller has just let go.
    """
    time.sleep(_REST_S)


def rest() -> None:
    """`hand_over`, if the calling thread gives way; nothing where no requests are to be given way to."""
    if gives_way():
        hand_over()


def in_background(work: Callable[[], T]) -> T:
    """Do `work` on a thread that gives way, and wait for it. What it returns or raises is the caller's."""
    with ThreadPoolExecutor(1, "tierstore-background", initializer=give_way) as thread:
        return thread.submit(work).result()
