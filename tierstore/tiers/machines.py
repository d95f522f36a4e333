"""Other machines that rows are read from, whatever the wire: limits, connections that are kept, who is
left alone, bytes waited for.

Any thread may call anything. A connection is one user's at a time; one on which something failed is
closed and never used again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tierstore.errors import Closed


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of one node's use of other machines.

    `timeout_s` bounds a look-up, everything in it included, unless the caller has a deadline of its own.
    `other_after_s`: a machine that has not answered by then is left, and its keys are asked from another one that has
    them; 0: replicas of a cluster are not asked at all. `connections`: the most to each machine that are kept.
    `outstanding_bytes`: the most that look-ups under way may be waiting for.
    """

    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    other_after_s: float = 0.25
    connections: int = 16
    outstanding_bytes: int = 256 << 20
    suspect_s: float = 0.5  # a machine that failed is left alone so long, where another one can answer


class Connection(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Connection)


class Machines(Generic[K, C]):
    """The machines of one cluster, or of one front, by their addresses `K`. `what` they are is for messages."""

    def __init__(self, options: Options, what: str) -> None:
        # constant after construction
        self.options, self._what = options, what
        # guarded by _lock
        self._lock = threading.Lock()
        self._idle: dict[tuple[K, bool], list[C]] = defaultdict(list)
        self._opened: Counter[K] = Counter()
        self._suspects: dict[K, float] = {}  # until when
        self._outstanding = 0
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """The seconds that a look-up may take without a deadline of its own."""
        return self.options.timeout_s

    def check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._what} was closed")

    # --- bytes

    def reserve(self, size: int) -> bool:
        """Count bytes that a look-up waits for. False, and not counted, where there are too many already."""
        with self._lock:
            if self._outstanding and self._outstanding + size > self.options.outstanding_bytes:
                return False
            self._outstanding += size
            return True

    def release(self, size: int) -> None:
        with self._lock:
            self._outstanding -= size

    # --- who has failed

    def suspect(self, machine: K) -> None:
        """It does not answer: it is left alone for a moment, and its idle connections are closed."""
        with self._lock:
            self._suspects[machine] = time.monotonic() + self.options.suspect_s
        self.forget(machine)

    def is_suspect(self, machine: K) -> bool:
        with self._lock:
            until_s = self._suspects.get(machine)
            if until_s is not None and until_s < time.monotonic():
                del self._suspects[machine]
                until_s = None
            return until_s is not None

    # --- connections, of each machine in two roles

    def kept(self, machine: K, *, replica: bool = False) -> C | None:
        """A connection that is idle, for this user alone; None where one is to be opened, which is counted."""
        with self._lock:
            self.check_open()
            if idle := self._idle[machine, replica]:
                return idle.pop()
            self._opened[machine] += 1
            return None

    def keep(self, machine: K, connection: C, *, replica: bool = False) -> None:
        """Have a connection for the next user, or close it. Only where every answer was read."""
        with self._lock:
            idle = self._idle[machine, replica]
            if not self._closed and len(idle) < self.options.connections:
                idle.append(connection)
                return
        connection.close()

    def opened(self, machine: K) -> int:
        """How many connections were opened to it."""
        return self._opened[machine]

    def forget(self, machine: K) -> None:
        """Close the idle connections to it."""
        with self._lock:
            stale = [one for replica in (False, True) for one in self._idle.pop((machine, replica), ())]
        for one in stale:
            one.close()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "outstanding_bytes": self._outstanding,
                "suspects": sorted(map(str, self._suspects)),
                "connections_opened": self._opened.total(),
            }

    def close(self) -> None:
        """Connections in use end when they are given back; look-ups under way end with Closed."""
        with self._lock:
            self._closed = True
            idle = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for one in idle:
            one.close()
