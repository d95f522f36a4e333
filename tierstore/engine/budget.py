"""Memory shared by everything that is open: host tier bytes dealt to versions, and bytes of unfolded deltas.

Both are bounds: what they hand out never adds up to more. Any thread may call; each has its own lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tierstore.errors import Overloaded, TooLarge

MIN_FRACTION = 1 / 16


def deal(total: int, needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split `total` by weight, giving nobody more than it needs; what one leaves goes to the others."""
    shares = [0] * len(needs)
    open_ = list(range(len(needs)))
    left = total
    while open_:
        weight = sum(weights[i] for i in open_) or 1.0
        full = [i for i in open_ if needs[i] <= left * weights[i] / weight]
        if not full:
            for i in open_:
                shares[i] = int(left * weights[i] / weight)
            break
        for i in full:
            shares[i] = needs[i]
            left -= needs[i]
        open_ = [i for i in open_ if i not in full]
    return shares


class Holder(Protocol):
    """What holds host tier memory: a version that serves or is about to."""

    @property
    def host_need_bytes(self) -> int: ...
    @property
    def host_reserved_bytes(self) -> int: ...  # rounded up, so that doubling never takes more than this again
    @property
    def host_fraction(self) -> float: ...
    def attach_host(self, budget_bytes: int, fraction: float, like: Holder | None) -> None: ...
    def resize_host(self, fraction: float) -> None: ...


class HostBudget:
    """Deals `total` bytes to the versions that are open.

    A version that replaces another, or comes beside it as a canary, begins at half of its final share while the other is
    halved in place, keeping its hottest rows, so neither goes beyond the budget; `settle` lets it grow once the other
    is gone.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._holders: list[Holder] = []
        self._awaited = 0

    @property
    def used(self) -> int:
        return sum(holder.host_reserved_bytes for holder in self._holders)

    @contextmanager
    def awaiting(self, need_bytes: int) -> Iterator[None]:
        """In the block versions that need so much in all come, in any order: each gets its share as if all were there."""
        self._awaited = need_bytes
        try:
            yield
        finally:
            self._awaited = 0

    def admit(self, holder: Holder, replacing: Holder | None, *others_leaving: Holder) -> None:
        """Make room for `holder` and attach its host tables. `others_leaving` go with the one that it replaces."""
        with self._lock:
            need = holder.host_need_bytes
            leaving = [h for h in (replacing, *others_leaving) if h in self._holders]
            others = [h for h in self._holders if h not in leaving]
            if replacing is None:
                fraction = 1.0
                self._awaited = max(0, self._awaited - need)
                needs = need + self._awaited + sum(h.host_need_bytes for h in others)
                final = min(need, int(self.total * need / max(1, needs)))
            else:
                fraction = 0.5
                final = min(need, self.total - sum(h.host_reserved_bytes for h in others))
            while self.total - self.used < math.ceil(final * fraction):
                victim = self._victim(leaving)
                if victim is None:
                    final = int((self.total - self.used) / fraction)
                    break
                victim.resize_host(victim.host_fraction / 2)
            holder.attach_host(max(0, final), fraction, replacing)
            self._holders.append(holder)

    def _victim(self, leaving: Sequence[Holder | None]) -> Holder | None:
        for candidates in (leaving, self._holders):
            shrinkable = [h for h in candidates if h is not None and h.host_fraction > MIN_FRACTION]
            if shrinkable:
                return max(shrinkable, key=lambda h: h.host_reserved_bytes)
        return None

    def release(self, holder: Holder) -> None:
        """Take back what `holder` had; its host tables are closed already."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)

    def settle(self) -> None:
        """Let versions that were halved grow back where there is room."""
        with self._lock:
            for holder in self._holders:
                while holder.host_fraction < 1 and self.total - self.used >= holder.host_reserved_bytes:
                    holder.resize_host(holder.host_fraction * 2)


class OverlayBudget:
    """Bytes of deltas that are visible but not folded, all models together."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def take(self, nbytes: int) -> None:
        """Reserve, or raise Overloaded; TooLarge for what could never fit."""
        if nbytes > self.total:
            raise TooLarge(
                f"a delta of {nbytes:,} bytes in memory is beyond overlay_budget, {self.total:,}; split it or raise the setting"
            )
        with self._lock:
            if self._used + nbytes > self.total:
                raise Overloaded(
                    f"deltas come faster than they are folded: {self._used:,} of {self.total:,} overlay bytes are in use; send it again"
                )
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._used -= nbytes
