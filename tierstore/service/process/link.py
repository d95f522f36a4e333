"""The wire between the owner of a store and its worker processes: pairs of connected sockets, nothing with a name.

    control   one a worker: lines of JSON in both directions, see `fleet.py` and `worker.py`
    calls     several a worker: one call at a time on each, request and reply

    request   uint32 call, uint32 table id, uint64 serial, uint64 bytes; then those bytes
    reply     uint32 status, uint32 descriptors, uint64 bytes; then those bytes, then the descriptors

`Link` is the worker's end, for any thread; `answer_calls` the owner's, run by a thread for each socket. Numbers are in
the machine's own order: both ends are one release on one machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tierstore import errors
from tierstore.engine.lending import Borrower, Lender
from tierstore.errors import Corruption, StorageError, TierstoreError
from tierstore.types import Keys, Rows, States

logger = logging.getLogger(__name__)

SYNC, FETCH, CONNECT = 1, 2, 3
_OK, _FAILED = 0, 1
_REQUEST = struct.Struct("=IIQQ")
_REPLY = struct.Struct("=IIQ")
_FDS_AT_ONCE = 128  # the kernel takes 253
FETCH_KEYS = 1 << 16  # a call: bounds what the owner holds for it
_EXIT_LOST = 70


def receive(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. EOFError if the other side has gone."""
    at = 0
    while at < len(into):
        got = sock.recv_into(into[at:])
        if not got:
            raise EOFError("the other process has gone")
        at += got


def _receive(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    receive(sock, memoryview(data))
    return data


def _send_fds(sock: socket.socket, fds: list[int]) -> None:
    for begin in range(0, len(fds), _FDS_AT_ONCE):
        socket.send_fds(sock, [b"f"], fds[begin : begin + _FDS_AT_ONCE])


def _receive_fds(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < count:
            data, some, _, _ = socket.recv_fds(sock, 1, _FDS_AT_ONCE)
            fds += some
            if not data:
                raise EOFError("the other process has gone")
            if not some:
                raise StorageError("descriptors were lost on the way; too many files are open in this process")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


class Link:
    """The worker's end. A call takes one of the sockets for its length; with all of them taken it waits."""

    def __init__(self, control: socket.socket, calls: list[socket.socket]) -> None:
        self._control = control
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for sock in calls:
            self._calls.put(sock)

    def tell(self, message: dict[str, Any]) -> None:
        """A line to the owner."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):  # an owner that has gone needs none; this process ends
            self._control.sendall(data)

    def sync(self, known: dict[str, list[int]]) -> tuple[dict[str, Any], list[int]]:
        with self._call(SYNC, json.dumps(known).encode()) as (sock, size, count):
            document = json.loads(_receive(sock, size))
            return document, _receive_fds(sock, count)

    def fetch(self, serial: int, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        for begin in range(0, len(keys), FETCH_KEYS):
            part = slice(begin, min(len(keys), begin + FETCH_KEYS))
            with self._call(FETCH, np.ascontiguousarray(keys[part]).data.cast("B"), table_id, serial) as (
                sock,
                size,
                _,
            ):
                if size != rows[part].nbytes + state[part].nbytes:
                    raise StorageError(f"the owner answered {size} bytes for {len(keys[part])} rows")
                receive(sock, state[part].data)
                receive(sock, rows[part].reshape(-1).data)

    def connect(self) -> socket.socket:
        """A new connection to the owner's HTTP service."""
        with self._call(CONNECT, b"") as (sock, _, count):
            (fd,) = _receive_fds(sock, count)
            return socket.socket(fileno=fd)

    def give_back(self, view_id: int) -> None:
        self.tell({"back": view_id})

    def give_up(self, error: BaseException) -> None:
        logger.error("what the owner has published cannot be taken over; this process ends", exc_info=error)
        os._exit(_EXIT_LOST)

    @contextlib.contextmanager
    def _call(
        self, call: int, body: bytes | memoryview, table_id: int = 0, serial: int = 0
    ) -> Iterator[tuple[socket.socket, int, int]]:
        sock = self._calls.get()
        try:
            sock.sendall(_REQUEST.pack(call, table_id, serial, len(body)))
            sock.sendall(body)
            status, count, size = _REPLY.unpack(_receive(sock, _REPLY.size))
            if status != _OK:
                raise _error_of(json.loads(_receive(sock, size)))
            yield sock, size, count
        except (OSError, EOFError) as error:
            if isinstance(error, TierstoreError):
                raise
            raise StorageError(f"the owner of the store does not answer: {error}") from error
        finally:
            self._calls.put(sock)


def _error_of(document: dict[str, Any]) -> TierstoreError:
    kind = getattr(errors, document["kind"], None)
    if kind in (StorageError, Corruption):
        return kind(document["message"], keys=document["keys"])  # type: ignore[no-any-return]
    if isinstance(kind, type) and issubclass(kind, TierstoreError):
        with contextlib.suppress(TypeError):
            return kind(document["message"])
    return StorageError(f"the owner of the store failed: {document['message']}")


def answer_calls(
    sock: socket.socket, lender: Lender, borrower: Borrower, connect: Callable[[socket.socket], None]
) -> None:
    """Answer a worker's calls on one socket until it has gone. `connect` takes the service's end of a connection."""
    with sock, contextlib.suppress(OSError, EOFError):
        while True:
            call, table_id, serial, size = _REQUEST.unpack(_receive(sock, _REQUEST.size))
            body = _receive(sock, size)
            try:
                parts, fds, own = _answer(call, table_id, serial, body, lender, borrower, connect)
            except Exception as error:
                if not isinstance(error, TierstoreError):
                    logger.exception("a worker's call failed")
                document = {"kind": type(error).__name__, "message": str(error)}
                document["keys"] = [int(key) for key in getattr(error, "keys", ())]  # type: ignore[assignment]
                text = json.dumps(document).encode()
                sock.sendall(_REPLY.pack(_FAILED, 0, len(text)) + text)
                continue
            try:
                sock.sendall(_REPLY.pack(_OK, len(fds), sum(map(len, parts))))
                for part in parts:
                    sock.sendall(part)
                _send_fds(sock, fds)
            finally:
                for fd in own:
                    os.close(fd)


def _answer(
    call: int,
    table_id: int,
    serial: int,
    body: bytearray,
    lender: Lender,
    borrower: Borrower,
    connect: Callable[[socket.socket], None],
) -> tuple[list[bytes | memoryview], list[int], list[int]]:
    """(what to send, descriptors to send, those of them to close then)."""
    if call == FETCH:
        rows, found = lender.fetch(borrower, serial, table_id, np.frombuffer(body, np.int64))
        return [found.data, rows.reshape(-1).data], [], []
    if call == SYNC:
        document, fds = lender.sync(borrower, json.loads(body))
        return [json.dumps(document).encode()], fds, []
    ours, theirs = socket.socketpair()
    connect(ours)
    fd = theirs.detach()
    return [], [fd], [fd]
