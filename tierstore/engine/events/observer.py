"""Observers of engine events: subclass Observer, override what you need, and add it to `store.observers`.

Called on the thread that made the event (for time: on one of low priority), outside the model's locks if possible.
Keep it short, do not raise.
"""

from __future__ import annotations


class Observer:
    """Base class; every method does nothing."""

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        """A delta is now seen by every request that starts. `freshness_s`: seconds since its event time."""

    def time_passed(self, now_s: float) -> None:
        """Called about twice a second, for periodic checks. `now_s`: the time, in seconds since 1970."""

    def version_switched(self, model: str, old: int | None, new: int | None) -> None:
        """The active version changed; None stands for no active version."""
