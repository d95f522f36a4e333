"""A server that answers with the bytes that it was given, whatever they are. It listens on this machine alone.

`answer` says what is sent for a request, and is called by the server's thread; a connection is closed after one answer
unless `keeps`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

_LONGEST_S = 30.0  # that a client may take with a request


class RawServer:
    """A context manager. One connection after the other, each until an answer ends it; those that it keeps, at once."""

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        whole: Callable[[bytes], bool],
        keeps: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`whole`: whether these bytes are a whole request; `keeps`: whether the connection goes on after its answer."""
        self._answer, self._whole, self._keeps = answer, whole, keeps
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="raw-server", daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if self._keeps is not None:
                threading.Thread(target=self._serve, args=[connection], name="raw-connection", daemon=True).start()
            else:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        request = b""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_LONGEST_S)
            while got := connection.recv(1 << 16):
                request += got
                if self._whole(request):
                    connection.sendall(self._answer(request))
                    if self._keeps is None or not self._keeps(request):
                        return
                    request = b""


def is_whole_http(request: bytes) -> bool:
    """Whether a request of HTTP/1.1 has come with its body."""
    head, end, body = request.partition(b"\r\n\r\n")
    _, named, length = head.lower().partition(b"content-length:")
    return bool(end) and len(body) >= (int(length.split(b"\r\n")[0]) if named else 0)


def http_answer(body: bytes, status: int = 200) -> bytes:
    """An answer of HTTP/1.1."""
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def words_of(request: bytes) -> list[list[bytes]] | None:
    """The commands of a request to Redis; None where it is not whole."""
    commands, at = [], 0
    while at < len(request):
        words: list[bytes] = []
        end = request.find(b"\r\n", at)
        if end < 0:
            return None
        count, at = int(request[at + 1 : end]), end + 2
        for _ in range(count):
            end = request.find(b"\r\n", at)
            if end < 0:
                return None
            size = int(request[at + 1 : end])
            if len(request) < end + 4 + size:
                return None
            words.append(request[end + 2 : end + 2 + size])
            at = end + 4 + size
        commands.append(words)
    return commands


_KEYS_AT = {
    "HGETALL": 1,
    "HMGET": 1,
    "HSET": 1,
    "XRANGE": 1,
    "GET": 1,
    "SMEMBERS": 1,
    "EVAL": 0,
}  # of commands: the first


_OF_CONNECTIONS = (b"CLIENT", b"READONLY", b"AUTH", b"HELLO")


def _verb(request: bytes) -> bytes:
    commands = words_of(request)
    return commands[0][0].upper() if commands and commands[0] else b""


class RawRedis:
    """A server that says that it is a cluster of one, and answers all that is asked of it with `answer`. A context manager.

    `slots`: what it says of slots, where that is other.
    """

    def __init__(self, *, closes: bool = False) -> None:
        """`closes`: after each answer of that kind."""
        self.answer = b""
        self.slots: bytes | None = None
        self.server = RawServer(
            self._answer,
            lambda request: words_of(request) is not None,
            lambda request: not closes or _verb(request) in _OF_CONNECTIONS,
        )
        self.port = self.server.port

    def __enter__(self) -> RawRedis:
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    def _answer(self, request: bytes) -> bytes:
        commands = words_of(request) or []
        match _verb(request):
            case verb if verb in _OF_CONNECTIONS:
                return b"+OK\r\n" * len(commands)
            case b"COMMAND":
                of = [
                    b"*6\r\n$%d\r\n%s\r\n:-2\r\n*1\r\n+readonly\r\n:%d\r\n:%d\r\n:%d\r\n"
                    % (len(name), name.encode(), at, at, at)
                    for name, at in _KEYS_AT.items()
                ]
                return b"*%d\r\n" % len(of) + b"".join(of)
            case b"CLUSTER":
                one = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % self.port
                return one if self.slots is None else self.slots
        return self.answer
