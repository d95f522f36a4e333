"""What has not said yet what it wants, and makes room where there is no place left."""

from __future__ import annotations

import socket
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

from tierstore.service.addresses import peer_of

SILENT_S = 1.0  # from here on it makes room
T = TypeVar("T", bound=Hashable)


class Silent(Generic[T]):
    """Handshakes that have begun, by the address of the client.

    First goes one of the address that has most of them, so that one client's cost that
    client's own; of those the oldest.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[T, float]] = {}  # since when; the oldest first

    def add(self, host: str, what: T) -> None:
        """It has begun now, unless it is there already."""
        self._of.setdefault(host, {}).setdefault(what, time.monotonic())

    def discard(self, host: str, what: T) -> bool:
        """Whether it was there: it has not made room."""
        of_host = self._of.get(host)
        if of_host is None or of_host.pop(what, None) is None:
            return False
        if not of_host:
            del self._of[host]
        return True

    def pop(self) -> T | None:
        """Remove and return what is to make room. None: nothing is here, or all of it is too new."""
        if not self._of:
            return None
        host = max(self._of, key=lambda host: len(self._of[host]))
        what, since_s = next(iter(self._of[host].items()))
        if time.monotonic() - since_s < SILENT_S:
            return None
        self.discard(host, what)
        return what


def host_of(sock: socket.socket | None) -> str:
    """The address of the other end; "" where it has none, or has gone."""
    peer = None if sock is None else peer_of(sock)
    return "" if peer is None else peer[0]
