"""Whether a canary does as well as the active version: by the share of requests that failed since its trial began.

Values; any thread.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

from tierstore.errors import FAULTS
from tierstore.service.stats import InferenceStats

Verdict = Literal["good", "doubtful", "bad"]

LEAST_FAILED = 2  # one may be chance, where few were asked


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one version that named it or were given to it, and how many of them failed by its fault."""

    total: int = 0
    failed: int = 0

    @classmethod
    def of(cls, stats: InferenceStats, model: str, version: int | None) -> Requests:
        """What `stats` has counted."""
        for name, number, counts in stats.by_version():
            if (name, number) == (model, version):
                outcomes = counts.outcomes.copy()
                failed = sum(n for outcome, n in outcomes.items() if outcome in FAULTS)
                return cls(sum(outcomes.values()), failed)
        return cls()

    def since(self, before: Requests) -> Requests:
        return Requests(max(0, self.total - before.total), max(0, self.failed - before.failed))


def judge(canary: Requests, active: Requests) -> Verdict:
    """`good` where failures are no more than chance explains: three standard deviations above the active version's share.

    The active version's share counts as if one more of its requests had failed, so that few requests prove nothing.
    """
    expected = canary.total * (active.failed + 1) / (active.total + 1)
    expected = min(expected, float(canary.total)) if active.total else 0.0
    if canary.failed <= expected + 3 * math.sqrt(expected):
        return "good"
    return "bad" if canary.failed >= LEAST_FAILED else "doubtful"


@dataclass(slots=True)
class Trial:
    """One canary's, from when it was made or the service started."""

    canary_before: Requests
    active_before: Requests
    good_since_s: float = field(default_factory=time.monotonic)
    doubts: int = 0  # failed requests when the minutes began

    def look(self, canary: Requests, active: Requests, minutes: float) -> tuple[Verdict, str]:
        """The verdict on counts of now, in words as well: `good` once it has been good for so many minutes."""
        canary, active = canary.since(self.canary_before), active.since(self.active_before)
        words = f"{canary.failed} of {canary.total} requests failed, of the active version {active.failed} of {active.total}"
        verdict = judge(canary, active)
        if verdict == "doubtful" and canary.failed > self.doubts:
            self.doubts, self.good_since_s = canary.failed, time.monotonic()
        tried = canary.total > 0 or active.total == 0
        over = time.monotonic() - self.good_since_s >= 60 * minutes
        if verdict != "bad" and not (tried and over):
            return "doubtful", words
        return ("bad" if verdict == "bad" else "good"), words
