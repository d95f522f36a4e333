"""Verdicts on a new version: whether it does as well as the one beside it, by the share of requests that failed.

One rule for a canary of `watch_snapshots`, and for a rollout to several nodes. Values; any thread, one trial at a time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["good", "doubtful", "bad"]

LEAST_FAILED = 2  # one may be chance, where few were asked


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one version, and how many of them failed by its fault (`errors.FAULTS`)."""

    total: int = 0
    failed: int = 0

    def since(self, before: Requests) -> Requests:
        """The counts that came later. A count that went down is that of a service that started again."""
        return Requests(max(0, self.total - before.total), max(0, self.failed - before.failed))

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.total + other.total, self.failed + other.failed)

    def __str__(self) -> str:
        return f"{self.failed} of {self.total}"


def judge(new: Requests, old: Requests) -> Verdict:
    """`good` where failures are no more than chance explains: three standard deviations above the old version's share.

    The old version's share counts as if one more of its requests had failed, so that few requests prove nothing.
    """
    expected = new.total * (old.failed + 1) / (old.total + 1)
    expected = min(expected, float(new.total)) if old.total else 0.0
    if new.failed <= expected + 3 * math.sqrt(expected):
        return "good"
    return "bad" if new.failed >= LEAST_FAILED else "doubtful"


@dataclass(slots=True)
class CanaryTrial:
    """One canary's, from when it was made or the service started."""

    canary_before: Requests
    active_before: Requests
    good_since_s: float = field(default_factory=time.monotonic)
    doubts: int = 0  # failed requests when the minutes began

    def look(self, canary: Requests, active: Requests, minutes: float) -> tuple[Verdict, str]:
        """The verdict on counts of now, in words as well: `good` once it has been good for so many minutes."""
        canary, active = canary.since(self.canary_before), active.since(self.active_before)
        words = f"{canary} requests failed, of the active version {active}"
        verdict = judge(canary, active)
        if verdict == "doubtful" and canary.failed > self.doubts:
            self.doubts, self.good_since_s = canary.failed, time.monotonic()
        tried = canary.total > 0 or active.total == 0
        over = time.monotonic() - self.good_since_s >= 60 * minutes
        if verdict != "bad" and not (tried and over):
            return "doubtful", words
        return ("bad" if verdict == "bad" else "good"), words
