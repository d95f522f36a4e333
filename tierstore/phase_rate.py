"""The rate of a phase of a long work, and when it will be over. For the thread that reports its progress."""

from __future__ import annotations

from tierstore.types import Progress

_ENOUGH = 0.1  # of a phase, or so many seconds of it, after which what is left can be told
_ENOUGH_S = 30.0


class PhaseRate:
    """The rate of one phase, which `began` at that time.

    What is left is told by the rate since something was done first: helpers that start and files that are opened say
    nothing about the rest.
    """

    def __init__(self, began: Progress, now_s: float) -> None:
        self._began_s, self._began_at = now_s, began.done
        self._moved: tuple[float, int] | None = None  # when something was done first, and how much it was then
        self._now = began

    def note(self, progress: Progress, now_s: float) -> None:
        """Note the newest progress of the phase."""
        self._now = progress
        if self._moved is None and progress.done > self._began_at:
            self._moved = now_s, progress.done

    def per_second(self, now_s: float) -> float:
        """How much was done a second, from the beginning of the phase on."""
        took_s = now_s - self._began_s
        return (self._now.done - self._began_at) / took_s if took_s > 0 else 0.0

    def left_s(self, now_s: float) -> float | None:
        """The seconds until the phase is over; None while nobody can tell."""
        done, total = self._now.done, self._now.total
        if self._moved is None or total < max(done, 1):
            return None
        moved_s, moved_at = self._moved
        rate = (done - moved_at) / (now_s - moved_s) if now_s > moved_s else 0.0
        is_enough = done - self._began_at >= _ENOUGH * (total - self._began_at) or now_s - self._began_s >= _ENOUGH_S
        return (total - done) / rate if rate > 0 and is_enough else None
