"""Events of the engine, reported as they happen: subclass Observer, override what you need,
add it to `store.observers`.

Called on the thread that made the event (of the time: on one of low priority), outside the model's locks where that is
possible; keep it short, do not raise.
"""

from __future__ import annotations


class Observer:
    """Every method does nothing by default."""

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        """A delta is now seen by every request that starts. `freshness_s`: seconds since its event time."""

    def time_passed(self, now_s: float) -> None:
        """About twice a second, for what is to be looked at now and then; `now_s` is the
        time, in seconds since 1970.
        """

    def version_switched(self, model: str, old: int | None, new: int | None) -> None:
        """The active version changed; None stands for no active version."""
