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
    """A context manager. One connection after the other, each until its client or an answer ends it."""

    def __init__(
        self, answer: Callable[[bytes], bytes], whole: Callable[[bytes], bool], *, keeps: bool = False
    ) -> None:
        """`whole`: whether these bytes are a whole request."""
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
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_LONGEST_S)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        request = b""
        while got := connection.recv(1 << 16):
            request += got
            if self._whole(request):
                connection.sendall(self._answer(request))
                if not self._keeps:
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
