"""Work that gives way to requests: on threads of low priority, what tells such threads from others, and rests.

A switch warms a version while another one serves; at the same priority it would take every other turn of a core from the
look-ups. Niceness is a thread's own on Linux, and one without privileges cannot take it back: hence a thread that ends.

Any thread may call anything here; what is called must not hold a lock that requests wait for. Nothing survives a crash.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")

NICENESS = 10  # a tenth of the turns beside a thread that has none, and all there are beside an idle core

_REST_S = 50e-6  # in which a thread that waits wakes up; without it, who lets a lock go is the first to take it again
_PATIENCE_S = 4e-3  # for requests to be answered, in one rest
_RESTS_A_WORK = 3.0  # of rest at most for one of processor time: what must be done takes four times as long at worst
_RESTS_A_TIME = 0.25  # and for one of time that has passed since the last rest, be it of work, of waiting or of leisure
_MOST_S = 20e-3  # of rest that is saved up
_LOOK_S = 100e-6  # between two looks whether they are answered
_NAP_S = 0.02  # of a rest, between two looks how long it is to be


class _Here(threading.local):
    gives_way = False
    hurries = False
    rested_until = 0.0
    worked_s = 0.0  # until then, in processor time
    saved_s = 0.0


_here = _Here()


class Requests(Protocol):
    """Who knows of requests."""

    def under_way(self) -> bool:
        """Whether one is being answered, at a glance: without waiting, and not to be relied on."""


_watched: tuple[weakref.ref[Requests], ...] = ()  # replaced whole; asked in this order, up to the first that says yes
_watching = threading.Lock()


def watch(requests: Requests, *, first: bool = False) -> None:
    """From now on, `hand_over` lets these go first, as long as the object lives. `first`: it knows of nearly all that there are."""
    global _watched
    with _watching:
        new, alive = weakref.ref(requests), [known for known in _watched if known() is not None]
        _watched = (new, *alive) if first else (*alive, new)


@contextlib.contextmanager
def hurrying(hurries: bool) -> Iterator[None]:
    """Whether the calling thread waits for no requests in the block: what it does must keep up with something else."""
    before, _here.hurries = _here.hurries, hurries
    try:
        yield
    finally:
        _here.hurries = before


def _are_under_way() -> bool:
    return any((requests := known()) is not None and requests.under_way() for known in _watched)


def give_way() -> None:
    """Lower the priority of the calling thread, for good. A thread started by it inherits that."""
    _here.gives_way = True
    with contextlib.suppress(OSError):  # it would only be slower for others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def gives_way() -> bool:
    """Whether the calling thread has called `give_way`."""
    return _here.gives_way


def hand_over() -> None:
    """Let threads go on that wait: for the interpreter lock, which they would get after the switch interval (5 ms), for the
    processor, or for a lock that the caller has just let go; and requests that are under way be answered.

    A request takes the interpreter lock many times, and would wait each time. To be called after half a millisecond of
    work, or less.
    """
    began = time.monotonic()
    earned_s = _RESTS_A_WORK * (time.thread_time() - _here.worked_s) + _RESTS_A_TIME * (began - _here.rested_until)
    saved_s = min(_MOST_S, _here.saved_s + earned_s)
    until = began + min(_PATIENCE_S, saved_s)
    time.sleep(_REST_S)
    while (now := time.monotonic()) < until and not _here.hurries and _are_under_way():
        time.sleep(_LOOK_S)
    _here.rested_until, _here.worked_s = now, time.thread_time()
    _here.saved_s = max(0.0, saved_s - (now - began))


def rest() -> None:
    """`hand_over`, if the calling thread gives way; nothing where no requests are to be given way to."""
    if gives_way():
        hand_over()


def in_background(work: Callable[[], T]) -> T:
    """Do `work` on a thread that gives way, and wait for it. What it returns or raises is the caller's."""
    with ThreadPoolExecutor(1, "tierstore-background", initializer=give_way) as thread:
        return thread.submit(work).result()


class Pace:
    """Has the thread that calls `rest` be at work for a share of the time, by resting after work. Of one thread.

    `share` is asked anew all the while; at 0 work stands still, but for no longer than `most_s`. `clock` tells what
    counts as work: all time that passes, or `time.thread_time`.
    """

    def __init__(
        self, share: Callable[[], float], *, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share, self._most_s, self._clock = share, most_s, clock
        self.begin()

    def begin(self) -> None:
        """What came before was no work."""
        self._began = self._clock()

    def rest(self) -> None:
        """Work since `begin`, or since the last rest, has earned one."""
        worked_s, rests = self._clock() - self._began, time.monotonic()
        while (share := self._share()) < 1 and (rested_s := time.monotonic() - rests) < self._most_s:
            left_s = worked_s / share - worked_s - rested_s if share > 0 else _NAP_S
            if left_s <= 0:
                break
            time.sleep(min(left_s, _NAP_S))
        self.begin()
