"""Load balancing: the node that an attempt goes to. Knows no socket and no clock: times are seconds, passed in.

The node with the fewest attempts under way, in turn among equals. A node that fails is skipped for a pause, which
doubles with each failure in a row; when it is over one attempt tries the node, and the others follow once that is
answered. A node that lacks what a path names (a version, say) is skipped for that path alone, and for a short time.

Any thread may use a `Balancer`; a `NodeRoute` belongs to one request.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

from tierstore.forks import renew_in_child

PAUSE_S = (0.5, 30.0)  # the first, and the longest
LACK_S = 5.0
_LACKING_LIMIT = 1024


@dataclass(slots=True)
class _State:
    """What is known of one node. Guarded by the balancer's lock."""

    running: int = 0
    failures: int = 0  # in a row
    skip_until: float = 0.0
    answered_at: float = 0.0
    trying: bool = False  # an attempt tries whether it works again


class Balancer:
    """The nodes of one client, by number."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._lock = threading.Lock()
        # guarded by _lock
        self._states = [_State() for _ in range(count)]
        self._lacking: dict[tuple[int, str], float] = {}  # (node, path) → skipped until
        self._turn = 0
        renew_in_child(self)

    def renew(self) -> None:
        """Nothing is under way in a child."""
        self._lock = threading.Lock()
        for state in self._states:
            state.running, state.trying = 0, False

    def choose(self, path: str, now: float, avoid: Collection[int] = ()) -> int:
        """The node for an attempt; one of `avoid` only where there is no other."""
        if self.count == 1:
            return 0
        with self._lock:
            self._turn += 1
            order = [(self._turn + number) % self.count for number in range(self.count)]
            node = min(order, key=lambda number: self._rank(number, path, now, avoid))
            state = self._states[node]
            if state.failures and state.skip_until <= now:
                # this attempt tries it; the others wait for its end
                state.skip_until, state.trying = now + _pause_s(state.failures), True
            return node

    def _rank(self, node: int, path: str, now: float, avoid: Collection[int]) -> tuple[bool, bool, float, int]:
        """The least is the best. Holds the lock."""
        state = self._states[node]
        lacks = self._lacking.get((node, path), 0.0) > now
        return node in avoid, lacks, max(0.0, state.skip_until - now), state.running

    def started(self, node: int) -> None:
        with self._lock:
            self._states[node].running += 1

    def ended(self, node: int) -> None:
        with self._lock:
            self._states[node].running -= 1

    def answered(self, node: int, path: str, now: float) -> None:
        """The node answered, and was not too busy to."""
        if self.count == 1:
            return
        with self._lock:
            state = self._states[node]
            state.failures, state.skip_until, state.answered_at, state.trying = 0, 0.0, now, False
            if self._lacking:
                self._lacking.pop((node, path), None)

    def failed(self, node: int, now: float, at_least_s: float = 0.0) -> None:
        """The node cannot be reached, or is too busy: skip it, but for no longer than the longest pause.

        Of attempts that fail at once only the first counts.
        """
        if self.count == 1:
            return
        with self._lock:
            state = self._states[node]
            if state.skip_until <= now or state.trying:
                state.failures, state.trying = state.failures + 1, False
                state.skip_until = now + _pause_s(state.failures)
            state.skip_until = max(state.skip_until, now + min(at_least_s, PAUSE_S[1]))

    def silent(self, node: int, since: float, now: float) -> None:
        """An attempt that began at `since` got no answer in time; the node has failed if nobody else got one either."""
        if self._states[node].answered_at < since:
            self.failed(node, now)

    def lacks(self, node: int, path: str, now: float) -> None:
        """The node does not have what `path` names."""
        with self._lock:
            if len(self._lacking) >= _LACKING_LIMIT:
                self._lacking.clear()
            self._lacking[node, path] = now + LACK_S

    def has_others(self, path: str, now: float, tried: Collection[int]) -> bool:
        """Whether a node beyond `tried` may answer `path` now."""
        if self.count == 1:
            return False
        with self._lock:
            return any(
                self._rank(number, path, now, tried)[:3] == (False, False, 0.0)
                for number in range(self.count)
                if number not in tried
            )

    def pauses(self, now: float) -> list[float]:
        """The seconds for which each node is still skipped; 0: it is used."""
        with self._lock:
            return [max(0.0, state.skip_until - now) for state in self._states]


class NodeRoute:
    """The nodes of one request: its calls go to one node, so that they see one version; to another where that fails."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self._node: int | None = None

    def next(self, path: str, now: float, avoid: Collection[int]) -> int:
        """The node for the next attempt of a call; one of `avoid` only where there is no other."""
        if self._node is None or self._node in avoid:
            self._node = self.balancer.choose(path, now, avoid)
        return self._node


def _pause_s(failures: int) -> float:
    return float(min(PAUSE_S[1], PAUSE_S[0] * 2.0 ** min(failures - 1, 16)))
