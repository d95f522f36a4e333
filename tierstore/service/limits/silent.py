"""Silent handshakes and connections, which make room for new ones when no place is left."""

from __future__ import annotations

import socket
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

from tierstore.service.addresses import peer_of

SILENT_S = 1.0  # after so long it makes room
T = TypeVar("T", bound=Hashable)


class Silent(Generic[T]):
    """Handshakes that have begun, by the address of the client.

    The first to go is one of the address that has most of them, so that a client's many handshakes cost that client
    its own; of those the oldest.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[T, float]] = {}  # since when; oldest first

    def add(self, host: str, what: T) -> None:
        """Note that `what` has begun now, unless it is there already."""
        self._of.setdefault(host, {}).setdefault(what, time.monotonic())

    def discard(self, host: str, what: T) -> bool:
        """Remove `what`. Returns whether it was there: it has not made room."""
        of_host = self._of.get(host)
        if of_host is None or of_host.pop(what, None) is None:
            return False
        if not of_host:
            del self._of[host]
        return True

    def pop(self) -> T | None:
        """Remove and return the one that must make room. None: there is none, or all are too new."""
        if not self._of:
            return None
        host = max(self._of, key=lambda host: len(self._of[host]))
        what, since_s = next(iter(self._of[host].items()))
        if time.monotonic() - since_s < SILENT_S:
            return None
        self.discard(host, what)
        return what


def host_of(sock: socket.socket | None) -> str:
    """The address of the other end; "" if it has none, or has gone."""
    peer = None if sock is None else peer_of(sock)
    return "" if peer is None else peer[0]
