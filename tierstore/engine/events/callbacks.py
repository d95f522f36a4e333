"""Progress callbacks of a switch.

They run during the switch: on the thread that holds its lock, or on one that this thread waits for. So a callback must
not call anything that needs the switch to be over: on the first thread that would change what the switch works on, on
the second it would wait for ever. Such a call is refused, for every model: two switches that wait for each other's
callbacks would not end either. Look-ups, deltas, labels and the canary's share wait for no switch, so they are
allowed.

Any thread may call anything; whether a thread is inside a callback is noted for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import Conflict
from tierstore.types import Progress, ProgressFn


class _Here(threading.local):
    inside = False


_here = _Here()


def guarded(progress: ProgressFn) -> ProgressFn:
    """`progress`, to be called while a switch is under way."""

    def report(step: Progress) -> None:
        before, _here.inside = _here.inside, True
        try:
            progress(step)
        finally:
            _here.inside = before

    return report


def refuse_inside() -> None:
    """Conflict if the calling thread is in a guarded callback."""
    if _here.inside:
        raise Conflict(
            "a progress callback cannot change the model it reports on, nor load, switch, drop, verify or close "
            "anything else: it would wait for itself; do so when the call that it was given to has returned"
        )


class SwitchLock:
    """A lock that its thread may take again, but not from within a guarded callback: Conflict."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock for the block, unless another thread does: then False, without waiting."""
        refuse_inside()
        held = self._lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def __enter__(self) -> None:
        refuse_inside()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
