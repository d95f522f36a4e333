"""HTTP to one node: connections that are kept, each for one user at a time, and requests whose
answers are waited for later.

Any thread. A connection on which something failed is closed and never used again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.addresses import host_port
from tierstore.errors import NotFound, Overloaded, RemoteUnavailable, StorageError
from tierstore.http1 import Incoming, MalformedAnswer, request_head
from tierstore.tiers.machines import Machines
from tierstore.tiers.upstream.options import NodeAddress

_HEAD_BYTES = 64 << 10
_LEAST_S = 0.001
_KEPT_BYTES = 1 << 20  # of the memory for answers of a connection that is idle
_NOTHING = np.empty(0, np.uint8)


class Broken(OSError):
    """The connection ended; `unanswered`: before anything of an answer came, so that a request may be sent again."""

    def __init__(self, why: str, *, unanswered: bool) -> None:
        super().__init__(why)
        self.unanswered = unanswered


class NodeReply(NamedTuple):
    status: int
    body: bytearray | memoryview  # the latter in the connection's buffer

    @property
    def problem(self) -> str:
        """What an error says."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            document = json.loads(bytes(self.body))
            return str(document.get("error") or document.get("detail"))
        return bytes(self.body[:200]).decode(errors="replace")


class _Answer:
    """The `Receiver` of one answer."""

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        self.status, self.body, self._filled = status, bytearray(nbytes), 0

    def buffer(self) -> memoryview:
        return memoryview(self.body)[self._filled :]

    def received(self, n: int) -> None:
        self._filled += n


class NodeConnection:
    """One connection."""

    def __init__(self, address: NodeAddress, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self.used = False  # it has answered before: where it fails now, the node may just have closed it
        sock = socket.create_connection(address[:2], timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls:
                assert tls is not None
                sock = tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
        self._socket, self._incoming = sock, Incoming()
        self.open = True
        self.tls = address.tls
        self.fd = sock.fileno()
        self._buffer: npt.NDArray[np.uint8] = _NOTHING

    def buffer(self, answer_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory for an answer with a body of at most so many bytes, for kernels."""
        if len(self._buffer) < _HEAD_BYTES + answer_bytes:
            self._buffer = np.empty(_HEAD_BYTES + answer_bytes, np.uint8)
        return self._buffer

    def answered(self, *, closes: bool) -> None:
        """A whole answer was read, by a kernel; `closes`: it says that it is the last."""
        self.used, self.open = True, not closes
        if len(self._buffer) > _KEPT_BYTES:
            self._buffer = _NOTHING

    def send(self, request: bytes, until_s: float) -> None:
        self._socket.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        try:
            self._socket.sendall(request)
        except TimeoutError:
            raise
        except OSError as error:
            raise Broken(str(error), unanswered=True) from error

    def receive(self, until_s: float) -> NodeReply:
        """The answer to what was sent last. TimeoutError; Broken; ValueError for what is no answer of our service."""
        answer = _Answer()
        self._incoming.expect(answer)
        try:
            while True:
                self._socket.settimeout(max(_LEAST_S, until_s - time.monotonic()))
                got = self._socket.recv_into(self._incoming.buffer())
                if not got:
                    raise Broken("the connection was closed", unanswered=not self._incoming.started)
                if self._incoming.received(got):
                    break
        except (TimeoutError, Broken):
            raise
        except OSError as error:
            raise Broken(str(error), unanswered=not self._incoming.started) from error
        except MalformedAnswer as error:
            raise ValueError(str(error)) from error
        self.used, self.open = True, self._incoming.reusable
        return NodeReply(answer.status, answer.body)

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self._socket.close()


class UpstreamNode:
    """One node, as a front sees it. `machines` has all of them."""

    def __init__(
        self, address: NodeAddress, machines: Machines[NodeAddress, NodeConnection], token: str | None,
        tls: ssl.SSLContext | None
    ) -> None:  # fmt: skip
        # constant after construction
        self.address, self.machines, self._tls = address, machines, tls
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        self._headers = f"Host: {host_port(address.host, address.port)}\r\n{authorization}"

    def __str__(self) -> str:
        return str(self.address)

    def acquire(self) -> NodeConnection:
        """A connection for this thread. OSError where there is none."""
        kept = self.machines.kept(self.address)
        return kept or NodeConnection(self.address, self.machines.options.connect_timeout_s, self._tls)

    def release(self, connection: NodeConnection) -> None:
        if connection.open:
            self.machines.keep(self.address, connection)
        else:
            connection.close()

    def head(self, method: str, target: str, length: int) -> bytes:
        """The head of a request."""
        return request_head(method, target, self._headers, length)

    def request(self, method: str, target: str, body: bytes = b"", *, timeout_s: float) -> NodeReply:
        """Send a request and wait for its answer. RemoteUnavailable where it does not answer."""
        until_s = time.monotonic() + timeout_s
        whole = self.head(method, target, len(body)) + body
        try:
            while True:
                connection = self.acquire()
                try:
                    connection.send(whole, until_s)
                    reply = connection.receive(until_s)
                except Broken as error:
                    connection.close()
                    if not (connection.used and error.unanswered):
                        raise
                    self.machines.forget(self.address)
                    continue
                except BaseException:
                    connection.close()
                    raise
                self.release(connection)
                return reply
        except (OSError, ValueError) as error:
            if isinstance(error, StorageError):
                raise
            raise RemoteUnavailable(f"{self.address} does not answer: {error or type(error).__name__}") from error

    def get(self, target: str, *, timeout_s: float) -> bytearray:
        """The body of what is at `target`. NotFound, Overloaded, RemoteUnavailable, with what the node says."""
        return self._body("GET", target, timeout_s)

    def _body(self, method: str, target: str, timeout_s: float) -> bytearray:
        reply = self.request(method, target, timeout_s=timeout_s)
        if reply.status == 200:
            assert isinstance(reply.body, bytearray)
            return reply.body
        kind = {404: NotFound, 429: Overloaded, 503: Overloaded}.get(reply.status, RemoteUnavailable)
        raise kind(f"{self.address} answers {reply.status}: {reply.problem}")

    def get_json(self, target: str, *, timeout_s: float) -> dict[str, Any]:
        """The object at `target`. Errors as `get`."""
        return self._object("GET", target, timeout_s)

    def post_json(self, target: str, *, timeout_s: float) -> dict[str, Any]:
        """What a POST of nothing is answered with, an object. Errors as `get`."""
        return self._object("POST", target, timeout_s)

    def _object(self, method: str, target: str, timeout_s: float) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self._body(method, target, timeout_s))
        except ValueError as error:
            raise RemoteUnavailable(f"{self.address}: {target.partition('?')[0]} is no JSON: {error}") from error
        return document
