"""Silent connections of reactors, which make room for new ones when the limit is reached.

Their clients have sent no request for a while, or no complete head. The first to go is of the address that has most of
them, so that a client's many connections cost that client its own; of those, the one that has been silent longest.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.reactor import layout as kernel
from tierstore.service.limits.silent import SILENT_S, host_of

_LOOKED_AT = 256  # connections whose addresses are read at a time: drawn at random if there are more
_FOUND = 16  # found at a time
_PAUSE_S = 0.05  # between two searches


class SilentConnections:
    """Connections among `conns` that make room for new ones, within `limits`; `words` is the reactors' shared
    memory.
    """

    def __init__(self, conns: npt.NDArray[Any], limits: npt.NDArray[Any], words: npt.NDArray[Any]) -> None:
        self._conns, self._limits, self._words = conns, limits, words
        self._found: list[tuple[int, int, int]] = []  # descriptor, serial and deadline; the first to go is the last one
        self._next_look_s = 0.0
        self._random = np.random.default_rng()

    def pop(self) -> tuple[int, int, int] | None:
        """Reactor, descriptor and serial of a connection that should make room; the reactor checks whether it is
        still silent.
        """
        if not self._found and time.monotonic() >= self._next_look_s:
            self._look()
            self._next_look_s = time.monotonic() + _PAUSE_S
        while self._found:
            fd, serial, deadline = self._found.pop()
            row = self._conns[fd]
            if row["serial"] == serial and row["deadline_ns"] == deadline:
                return int(row["owner"]), fd, serial
        return None

    def _look(self) -> None:
        rows = self._conns[: int(self._words["highest"]) + 1]
        state, deadline = rows["state"], rows["deadline_ns"]
        is_http2 = state == kernel.HTTP2
        begins = ~is_http2 & (rows["in_bytes"] > 0)  # an incomplete head
        since = deadline - np.where(begins, self._limits["arrival_ns"], self._limits["idle_ns"])
        since[rows["flags"] & kernel.LINGERS != 0] = 0  # it has its last answer
        is_silent = (is_http2 & (deadline != 0)) | ((state == kernel.READING) & (rows["needed"] == 0))
        is_silent &= rows["flags"] & kernel.TURNED_OFF == 0  # it has no place to give
        fds = np.flatnonzero(is_silent & (since < time.monotonic_ns() - int(SILENT_S * 1e9)))
        if len(fds) > _LOOKED_AT:
            fds = self._random.choice(fds, _LOOKED_AT, replace=False)
        hosts = {fd: _host_of(fd) for fd in fds.tolist()}
        counts = Counter(hosts.values())
        first = sorted(hosts, key=lambda fd: (-counts[hosts[fd]], since[fd]))[:_FOUND]
        self._found = [(fd, int(rows["serial"][fd]), int(deadline[fd])) for fd in reversed(first)]


def _host_of(fd: int) -> str:
    """The other end of a descriptor, which a reactor may close at any moment."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return ""
    try:
        return host_of(sock)
    finally:
        sock.detach()
