"""Answers to requests that a reactor has handed to Python; each goes back to its connection through the reactor's
pipe.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.reactor import layout as kernel
from tierstore.service.addresses import is_on_host, peer_of
from tierstore.service.reactor.streams import Streams
from tierstore.service.reactor.tls_rows import TlsRows

_CLOSES = 1 << 31  # a flag beside a serial
Sending = tuple[npt.NDArray[np.int64], list[npt.NDArray[np.uint8]], Callable[[], None]]


def split_head(data: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], int]:
    """(the first line, the headers, where its body begins) of a request that a reactor has framed."""
    end = data.index(b"\r\n\r\n")
    first, *lines = data[:end].split(b"\r\n")
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip(b" \t")))
    return first, headers, end + 4


class Pipes(Protocol):
    """The part of the reactors that a reply needs: connections, pipes, and the place of answers in Python's memory."""

    conns: npt.NDArray[Any]
    tls: TlsRows
    sending: dict[tuple[int, int], Sending]
    streams: Streams

    def notify(self, reactor: int, kind: int, fd: int, serial: int, address: int, count: int) -> None: ...
    def reply(self, number: int, what: int, serial: int, data: npt.NDArray[np.uint8]) -> None: ...


class Reply:
    """The connection that waits for the answer to a request. Call one of `send`, `send_copy` and `drop`, once. Any
    thread.
    """

    __slots__ = ("_fd", "_reactor", "_reactors", "_serial", "error", "reason")

    def __init__(self, reactors: Pipes, reactor: int, fd: int, serial: int) -> None:
        """`serial`: with the reason behind it, as in a REQUEST."""
        self._reactors, self._reactor, self._fd, self._serial = reactors, reactor, fd, serial & kernel.SERIALS
        self.reason = serial >> 32  # why the reactor has not answered: an index of `kernel.REASONS`
        self.error: BaseException | None = None  # the error to answer with: why what was begun has failed

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return bool(self._reactors.conns["lost"][self._fd])

    @property
    def client(self) -> tuple[str, int] | None:
        """The client's address and port, until it is answered."""
        try:
            with socket.socket(fileno=os.dup(self._fd)) as connection:
                return peer_of(connection)
        except OSError:
            return None

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names of the client's certificate."""
        return self._reactors.tls.names_of(self._fd, self._serial)

    @property
    def began_ns(self) -> int:
        """When the first bytes of the request came, on the monotonic clock; 0 if all came at once."""
        return int(self._reactors.conns["began_ns"][self._fd])

    @property
    def closes(self) -> bool:
        """Whether the request asked for its connection to end with the answer; valid until it is answered."""
        return bool(self._reactors.conns["flags"][self._fd] & kernel.CLOSES)

    @property
    def is_refused(self) -> bool:
        """Whether its connection is beyond the limit."""
        return bool(self._reactors.conns["flags"][self._fd] & kernel.TURNED_OFF)

    @property
    def has_body(self) -> bool:
        """Whether the body is there: not if it is too large, or there was no room for it."""
        return not self._reactors.conns["to_drop"][self._fd]

    @property
    def on_host(self) -> bool:
        """Whether the client is surely on this machine; valid until it is answered."""
        try:
            with socket.socket(fileno=os.dup(self._fd)) as connection:
                return is_on_host(connection)
        except OSError:
            return False

    @property
    def is_last(self) -> bool:
        """Whether nothing has come behind the request; valid until it is answered."""
        row = self._reactors.conns[self._fd]
        return bool(row["in_bytes"] <= row["needed"])

    def send(self, pieces: list[bytes | memoryview], sent: Callable[[], None], *, closes: bool = False) -> None:
        """Answer with `pieces`, none empty. `sent` is called once they were sent, or the client has gone."""
        reactors = self._reactors
        arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
        places = np.array([(address_of(array), len(array)) for array in arrays], np.int64)
        reactors.sending[self._fd, self._serial] = (places, arrays, sent)
        size = len(arrays) | sum(map(len, arrays)) << 16
        flags = self._serial | (_CLOSES if closes else 0)
        reactors.notify(self._reactor, kernel.ANSWER, self._fd, flags, address_of(places), size)

    def send_copy(self, data: bytes, *, closes: bool = False) -> None:
        """Answer with a copy of `data`, which the reactor counts and frees.

        For few bytes: no message says when they were sent.
        """
        flags = self._serial | (_CLOSES if closes else 0)
        self._reactors.reply(self._reactor, kernel.BLOCK | self._fd << 8, flags, np.frombuffer(data, np.uint8))

    def drop(self) -> None:
        """Close the connection without an answer."""
        self._reactors.notify(self._reactor, kernel.DROP, self._fd, self._serial, 0, 0)
