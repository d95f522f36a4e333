"""Background work: threads of low priority, and pauses in which requests go first.

A switch warms a version while another one serves. At the same priority the warm-up would get every second turn of a processor that look-ups need.
Niceness belongs to a thread on Linux, and a thread without privileges cannot raise its priority again. So background work runs on a thread of its
own, which ends with the work.

Length of pauses: background work earns time to pause by working and by the clock, and saves at most `_MOST_SAVED_S` of it. A pause lasts while
requests are being answered, but no longer than the saved time and `_LONGEST_PAUSE_S`. So work that has hardly paused may wait for a burst of requests
to end, and under constant requests the work takes about four times as long as alone.

Any thread may call anything here. The caller must not hold a lock that requests wait for.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from tierstore.threads import OwnThreadCall

T = TypeVar("T")

NICENESS = 10  # a tenth of the turns beside a thread of normal priority; all turns of an idle processor

_SHORTEST_PAUSE_S = (
    50e-6  # a waiting thread wakes up within it; otherwise the thread that releases a lock gets it again at once
)
_LONGEST_PAUSE_S = 4e-3  # a pause does not wait for requests that take longer
_EARNED_BY_WORK = 3.0  # seconds of pause earned by a second of processor time
_EARNED_BY_TIME = 0.25  # seconds of pause earned by a second since the last pause, whether it was worked or waited
_MOST_SAVED_S = 20e-3
_POLL_S = 100e-6  # between two checks whether requests are still being answered
_SHARE_POLL_S = 0.02  # between two readings of the share in `Pace.sleep`


class _ThreadState(threading.local):
    """What this module remembers of each thread."""

    is_background = False
    never_yields = False
    paused_until = 0.0  # when the last pause ended
    cpu_s = 0.0  # the thread's processor time at that moment
    saved_s = 0.0  # of pause, earned and not used


_thread = _ThreadState()


class RequestCounter(Protocol):
    """Something that counts requests."""

    def under_way(self) -> bool:
        """Whether a request is being answered. A guess that costs nothing: it never waits, and may be out of date."""


_sources: tuple[
    weakref.ref[RequestCounter], ...
] = ()  # replaced as a whole; asked in order, up to the first that says yes
_sources_lock = threading.Lock()


def register_requests(requests: RequestCounter, *, first: bool = False) -> None:
    """Let `yield_to_requests` wait for these requests, for as long as the object lives.

    `first`: ask it before the others, because it counts nearly all requests.
    """
    global _sources
    with _sources_lock:
        new, alive = weakref.ref(requests), [source for source in _sources if source() is not None]
        _sources = (new, *alive) if first else (*alive, new)


@contextlib.contextmanager
def without_yielding(hurry: bool) -> Iterator[None]:
    """With `hurry`, the calling thread does not wait for requests in the block, because its work is urgent."""
    before, _thread.never_yields = _thread.never_yields, hurry
    try:
        yield
    finally:
        _thread.never_yields = before


def _are_under_way() -> bool:
    return any((requests := source()) is not None and requests.under_way() for source in _sources)


def become_background() -> None:
    """Lower the priority of the calling thread, for good. Threads that it starts inherit the priority."""
    _thread.is_background = True
    with contextlib.suppress(OSError):  # if it is refused, only requests get slower
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def is_background() -> bool:
    """Whether the calling thread has called `become_background`."""
    return _thread.is_background


def yield_to_requests() -> None:
    """Pause: let waiting threads run, and requests that are under way be answered.

    Without it, a thread that waits for the interpreter lock gets it only after the switch interval (5 ms), and a request takes that lock many times.
    Call it after at most half a millisecond of work.
    """
    start = time.monotonic()
    earned_s = _EARNED_BY_WORK * (time.thread_time() - _thread.cpu_s) + _EARNED_BY_TIME * (start - _thread.paused_until)
    saved_s = min(_MOST_SAVED_S, _thread.saved_s + earned_s)
    deadline = start + min(_LONGEST_PAUSE_S, saved_s)
    time.sleep(_SHORTEST_PAUSE_S)
    while (now := time.monotonic()) < deadline and not _thread.never_yields and _are_under_way():
        time.sleep(_POLL_S)
    _thread.paused_until, _thread.cpu_s = now, time.thread_time()
    _thread.saved_s = max(0.0, saved_s - (now - start))


def yield_if_background() -> None:
    """`yield_to_requests` on a background thread; nothing on any other."""
    if is_background():
        yield_to_requests()


def in_background(work: Callable[[], T]) -> T:
    """Run `work` on a background thread, in the caller's context. Returns its result, or raises its error.

    If no thread can be started, the caller does the work itself.
    """
    context = contextvars.copy_context()

    def lowly() -> T:
        become_background()
        return context.run(work)

    try:
        call = OwnThreadCall("tierstore-background", lowly)
    except RuntimeError:  # no thread can be started
        return work()
    try:
        return call.result()
    finally:
        call.wait()  # also after Ctrl-C


class Pace:
    """Keeps one thread at work for a share of the time: `sleep` makes it pause in proportion to the work before.

    `share` (0 to 1) is read again during the pause. At 0 the pause lasts until it rises, but at most `most_s`. `clock` defines what counts as work:
    by default all time that passes; `time.thread_time` for processor time.
    """

    def __init__(
        self, share: Callable[[], float], *, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share, self._most_s, self._clock = share, most_s, clock
        self.begin()

    def begin(self) -> None:
        """Start counting work from here."""
        self._start = self._clock()

    def sleep(self) -> None:
        """Pause for the work done since `begin` or since the last pause."""
        worked_s, start = self._clock() - self._start, time.monotonic()
        while (share := self._share()) < 1 and (paused_s := time.monotonic() - start) < self._most_s:
            remaining_s = worked_s / share - worked_s - paused_s if share > 0 else _SHARE_POLL_S
            if remaining_s <= 0:
                break
            time.sleep(min(remaining_s, _SHARE_POLL_S))
        self.begin()
