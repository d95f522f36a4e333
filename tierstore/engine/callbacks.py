"""Callbacks that are told how far a switch is. They run in the midst of it: on the thread that has its lock, or on one that
this thread waits for.

So from within one, nothing that needs a switch to be over can be done: on the one thread it would change what the switch is
at work on, on the other it would wait for ever. It is refused, for every model: switches of two models that wait for one
another's callbacks would not end either. Look-ups, deltas, labels and the canary's share wait for no switch.

Any thread may call anything; each is known by what it is at itself. Nothing survives a crash.
"""

from __future__ import annotations

import threading
from types import TracebackType

from tierstore.errors import Conflict
from tierstore.types import Progress, ProgressFn


class _Here(threading.local):
    inside = False


_here = _Here()


def guarded(progress: ProgressFn) -> ProgressFn:
    """`progress`, for who calls it in the midst of a switch."""

    def tell(step: Progress) -> None:
        before, _here.inside = _here.inside, True
        try:
            progress(step)
        finally:
            _here.inside = before

    return tell


def refuse_inside() -> None:
    """Conflict if the calling thread is in a guarded callback."""
    if _here.inside:
        raise Conflict(
            "a progress callback cannot change the model it reports on, nor load, switch, drop, verify or close anything "
            "else: it would wait for itself; do so when the call that it was given to has returned"
        )


class SwitchLock:
    """A lock that its thread may take again, but not from within a guarded callback: Conflict."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, *, blocking: bool = True) -> bool:
        refuse_inside()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
