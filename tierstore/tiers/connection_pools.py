"""Pools of connections to the nodes or servers that rows are read from, for any protocol: limits, idle connections, suspects, bytes waited for.

Any thread may call anything. A connection has one user at a time; a connection on which something failed is closed and never used again.
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

    `timeout_s` bounds a whole look-up, unless the caller has a deadline of its own. `other_after_s`: a machine that has not answered by then is given
    up, and its keys are requested from another machine that has them; 0: replicas of a cluster are never used. `connections`: the most that are kept
    to each machine. `outstanding_bytes`: the most that look-ups under way may wait for.
    """

    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    other_after_s: float = 0.25
    connections: int = 16
    outstanding_bytes: int = 256 << 20
    suspect_s: float = 0.5  # a machine that failed is left alone so long, if another one can answer


class Connection(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Connection)


class ConnectionPools(Generic[K, C]):
    """A pool of connections to each server of one cluster, or to each node of one front, by their addresses `K`. `what` names them in messages."""

    def __init__(self, options: Options, what: str) -> None:
        # constant after construction
        self.options, self._what = options, what
        # guarded by _lock
        self._lock = threading.Lock()
        self._idle: dict[tuple[K, bool], list[C]] = defaultdict(list)
        self._opened: Counter[K] = Counter()
        self._suspects: dict[K, float] = {}  # machine → until when it is suspect
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
        """Count bytes that a look-up waits for. False, and not counted, if there are too many already."""
        with self._lock:
            if self._outstanding and self._outstanding + size > self.options.outstanding_bytes:
                return False
            self._outstanding += size
            return True

    def release(self, size: int) -> None:
        with self._lock:
            self._outstanding -= size

    # --- machines that failed

    def suspect(self, machine: K) -> None:
        """Leave a machine that does not answer alone for a moment, and close its idle connections."""
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

    # --- connections: each machine has two roles

    def kept(self, machine: K, *, replica: bool = False) -> C | None:
        """An idle connection, for this user alone; None if a new one must be opened, which is counted."""
        with self._lock:
            self.check_open()
            if idle := self._idle[machine, replica]:
                return idle.pop()
            self._opened[machine] += 1
            return None

    def keep(self, machine: K, connection: C, *, replica: bool = False) -> None:
        """Keep a connection for the next user, or close it. Only if every answer was read."""
        with self._lock:
            idle = self._idle[machine, replica]
            if not self._closed and len(idle) < self.options.connections:
                idle.append(connection)
                return
        connection.close()

    def opened(self, machine: K) -> int:
        """How many connections were opened to this machine."""
        return self._opened[machine]

    def forget(self, machine: K) -> None:
        """Close the idle connections to this machine."""
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
        """Close all. Connections in use end when they are given back; look-ups under way end with Closed."""
        with self._lock:
            self._closed = True
            idle = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for one in idle:
            one.close()
