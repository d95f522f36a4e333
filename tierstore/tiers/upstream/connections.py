"""HTTP connections to one node, each kept and for one user at a time, with requests whose answers are awaited later.

Any thread. A connection on which something failed is closed and never used again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.addresses import host_port
from tierstore.errors import Corruption, NotFound, Overloaded, RemoteUnavailable, StorageError
from tierstore.http1 import Incoming, MalformedAnswer, request_head
from tierstore.tiers.connection_pools import ConnectionPools
from tierstore.tiers.upstream.options import NodeAddress
from tierstore.tiers.upstream.wire import MOST_LOG_BYTES, PREFIX, LoggedDelta, decode_entries
from tierstore.types import NAME

DOCUMENT_BYTES = 64 << 20  # the most of an answer in JSON
_HEAD_BYTES = 64 << 10
_LEAST_S = 0.001
_KEPT_BYTES = 1 << 20  # the largest answer buffer of an idle connection
_NOTHING = np.empty(0, np.uint8)
_SHOWN = 500  # characters of a node's error

Seq = Annotated[int, Field(ge=0, lt=1 << 63)]
ModelName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class Document(BaseModel):
    """A JSON answer. Fields that a later release adds are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


D = TypeVar("D", bound=Document)


class Broken(OSError):
    """The connection ended; `unanswered`: before any byte of an answer came, so that the request may be sent again."""

    def __init__(self, why: str, *, unanswered: bool) -> None:
        super().__init__(why)
        self.unanswered = unanswered


class NodeReply(NamedTuple):
    status: int
    body: memoryview  # where a kernel has read it, in the connection's buffer

    @property
    def problem(self) -> str:
        """The text of an error."""
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            document = json.loads(bytes(self.body))
            return str(document.get("error") or document.get("detail"))[:_SHOWN]
        return bytes(self.body[:200]).decode(errors="replace")


class _Answer:
    """The `Receiver` of one answer."""

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        # not written to beforehand, so that unused parts take no memory
        self.status, self.body, self._filled = status, np.empty(nbytes, np.uint8).data, 0

    def buffer(self) -> memoryview:
        return self.body[self._filled :]

    def received(self, n: int) -> None:
        self._filled += n


class NodeConnection:
    """One connection to a node."""

    def __init__(self, address: NodeAddress, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self.used = False  # it has answered before: if it fails now, the node may just have closed it
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
        """Note that a kernel has read a whole answer; `closes`: the answer says that it is the last."""
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

    def receive(self, until_s: float, most: int) -> NodeReply:
        """The answer to the last request, with a body of at most `most` bytes.

        TimeoutError; Broken; ValueError for an answer that is not from our service.
        """
        answer = _Answer()
        self._incoming.expect(answer, most)
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
    """One node, as a front sees it. `pools` has all of them."""

    def __init__(
        self, address: NodeAddress, pools: ConnectionPools[NodeAddress, NodeConnection], token: str | None,
        tls: ssl.SSLContext | None
    ) -> None:  # fmt: skip
        # constant after construction
        self.address, self.pools, self._tls = address, pools, tls
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        self._headers = f"Host: {host_port(address.host, address.port)}\r\n{authorization}"

    def __str__(self) -> str:
        return str(self.address)

    def acquire(self) -> NodeConnection:
        """A connection for this thread. OSError if none can be opened."""
        kept = self.pools.kept(self.address)
        return kept or NodeConnection(self.address, self.pools.options.connect_timeout_s, self._tls)

    def release(self, connection: NodeConnection) -> None:
        if connection.open:
            self.pools.keep(self.address, connection)
        else:
            connection.close()

    def head(self, method: str, target: str, length: int) -> bytes:
        """The head of a request."""
        return request_head(method, target, self._headers, length)

    def request(
        self, method: str, target: str, body: bytes = b"", *, timeout_s: float, most: int = DOCUMENT_BYTES
    ) -> NodeReply:
        """Send a request and wait for its answer, a body of at most `most` bytes. RemoteUnavailable if the node does not answer."""
        until_s = time.monotonic() + timeout_s
        whole = self.head(method, target, len(body)) + body
        try:
            while True:
                connection = self.acquire()
                try:
                    connection.send(whole, until_s)
                    reply = connection.receive(until_s, most)
                except Broken as error:
                    connection.close()
                    if not (connection.used and error.unanswered):
                        raise
                    self.pools.forget(self.address)
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

    def get(self, target: str, *, timeout_s: float, most: int = DOCUMENT_BYTES) -> memoryview:
        """The body of the answer for `target`. NotFound, Overloaded, RemoteUnavailable, with the node's words."""
        return self._body("GET", target, timeout_s, most)

    def _body(self, method: str, target: str, timeout_s: float, most: int) -> memoryview:
        reply = self.request(method, target, timeout_s=timeout_s, most=most)
        if reply.status == 200:
            return reply.body
        kind = {404: NotFound, 429: Overloaded, 503: Overloaded}.get(reply.status, RemoteUnavailable)
        raise kind(f"{self.address} answers {reply.status}: {reply.problem}")

    def document(self, form: type[D], target: str, *, timeout_s: float, method: str = "GET") -> D:
        """The document at `target`. Errors as `get`; RemoteUnavailable for another form."""
        return self.parse(form, self._body(method, target, timeout_s, DOCUMENT_BYTES), target)

    def parse(self, form: type[D], body: memoryview, target: str) -> D:
        """Parse a document that was received."""
        try:
            return form.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise RemoteUnavailable(
                f"{self.address}: expected {target.partition('?')[0]} as this release writes it, got something else: "
                f"{place[:_SHOWN]}: {first['msg'][:_SHOWN]}"
            ) from error

    def deltas(self, model: str, after: int, count: int, *, timeout_s: float, largest: int) -> list[LoggedDelta]:
        """At most `count` deltas from `after + 1` on; none if the log begins later. A delta may have `largest` bytes.

        Errors as `get`; Corruption.
        """
        query = urlencode({"after": after, "count": count})
        target = f"{PREFIX}/models/{model}/deltas?{query}"
        body = self.get(target, timeout_s=timeout_s, most=MOST_LOG_BYTES + largest)
        try:
            return decode_entries(body, after, count)
        except Corruption as error:
            raise Corruption(f"{self}: model {model!r}: {error}") from error
