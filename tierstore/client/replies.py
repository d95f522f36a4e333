"""Receivers of answers: documents, refusals as errors, and tensors straight into the arrays that the caller gets.

A reply belongs to one attempt, and so to one thread at a time. It may be abandoned half received: an answer counts only
once `finish` was called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from tierstore.client import wire
from tierstore.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    TierstoreError,
    TooLarge,
    Unauthorized,
    Unreachable,
    WrongPartition,
    shown,
)
from tierstore.http1 import body_memory, decimal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Destination = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any] | None]
else:
    from tierstore.lazy import np

T = TypeVar("T")


class DocumentReply:
    """An answer whose body is a document."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = memoryview(b"")
        self.order = 0  # of arrival among the replies of one request, from 1
        self._unfilled = self.body

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        self.status, self.headers = status, headers
        self.body = self._unfilled = body_memory(nbytes)

    def buffer(self) -> memoryview:
        return self._unfilled

    def received(self, n: int) -> None:
        self._unfilled = self._unfilled[n:]

    def finish(self) -> None:
        """Complete the answer once all of it is received and no other attempt writes. Raises the error of a refusal."""
        if not 200 <= self.status < 300:
            raise error_of(self.status, self.headers, bytes(self.body))

    def json(self) -> Any:
        """The document, None if it is empty."""
        if not self.body:
            return None
        try:
            return orjson.loads(self.body)
        except ValueError as error:
            raise TierstoreError("expected JSON from the service, got something else: is it a tierstore?") from error

    def object(self) -> dict[str, Any]:
        """The document, which is a JSON object. TierstoreError for any other one."""
        return checked(self.json(), dict, "a JSON object")


def checked(value: Any, kind: type[T], what: str) -> T:
    """A part of a service's answer, if it is of that kind. TierstoreError else: something else answers there."""
    if isinstance(value, kind):
        return value
    raise TierstoreError(
        f"expected {what} from the service, got {shown(value)}: is it a tierstore, and of a release that knows this?"
    )


def part_of(document: Any, name: str, kind: type[T]) -> T:
    """A field of a document in a service's answer. TierstoreError where there is none of that kind."""
    return checked(checked(document, dict, "a JSON object").get(name), kind, f"{kind.__name__} as {name!r}")


class Tensors(DocumentReply):
    """An answer to an inference request.

    destination: gives the array that an output is written to, or None for an output that is not needed. Without it
        every output is an array of its own, in `outputs`.
    direct: write there as bytes arrive; else only in `finish`, since another attempt may be writing there.
    """

    def __init__(self, destination: Destination | None = None, *, direct: bool = True) -> None:
        super().__init__()
        self._destination, self._direct = destination, direct
        self._segments: list[memoryview] = []  # still to be received, the last one first
        self._raw: dict[str, memoryview] = {}  # bytes of BYTES outputs
        self._described: list[wire.Described] | None = None
        self._in_json = False
        self._tail_bytes = 0
        self.version: int | None = None
        self.outputs: dict[str, npt.NDArray[Any]] = {}

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        super().start(status, headers, 0)
        length = headers.get(wire.HEADER_LENGTH)
        self._in_json = 200 <= status < 300
        json_bytes = nbytes if length is None or not self._in_json else decimal(length)
        if json_bytes is None or json_bytes > nbytes:
            raise wire.not_of_the_protocol(f"{wire.HEADER_LENGTH} is {length!r}, the body has {nbytes} bytes")
        self.body = body_memory(json_bytes)
        self._tail_bytes = nbytes - json_bytes
        self._segments = [self.body]
        if not json_bytes and self._in_json:
            raise wire.not_of_the_protocol("it has no JSON")

    def buffer(self) -> memoryview:
        return self._segments[-1]

    def received(self, n: int) -> None:
        remainder = self._segments[-1] = self._segments[-1][n:]
        if len(remainder):
            return
        self._segments.pop()
        if self._in_json and self._described is None:
            self._lay_out()

    def _lay_out(self) -> None:
        self.version, self._described = wire.described(self.body)
        total = sum(output.nbytes or 0 for output in self._described)
        if total != self._tail_bytes:
            raise wire.not_of_the_protocol(f"{self._tail_bytes} bytes follow the JSON, which describes {total}")
        for output in self._described:
            if output.nbytes is None:
                continue
            if output.datatype == "BYTES":
                self._raw[output.name] = raw = body_memory(output.nbytes)
                self._segments.append(raw)
                continue
            array = None
            if self._destination is not None and self._direct:
                array = self._destination(output.name, output.shape, output.dtype)
            if array is None:
                array = wire.empty(output)
            self.outputs[output.name] = array
            self._segments.append(array.reshape(-1).view(np.uint8).data)
        self._segments = [segment for segment in reversed(self._segments) if len(segment)]

    def finish(self) -> None:
        super().finish()
        for output in self._described or []:
            if output.nbytes is None:
                self._store(output, wire.from_json(output))
            elif output.datatype == "BYTES":
                self._store(output, wire.from_length_prefixed(bytes(self._raw[output.name]), output.shape))
            elif not self._direct:
                self._store(output, self.outputs[output.name])

    def _store(self, output: wire.Described, array: npt.NDArray[Any]) -> None:
        self.outputs[output.name] = array
        if self._destination is not None:
            destination = self._destination(output.name, output.shape, output.dtype)
            if destination is not None:
                destination[...] = array


_KINDS = {kind.http_status: kind for kind in (Forbidden, NotFound, TooLarge, WrongPartition, DeadlineExceeded)}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> TierstoreError:
    """The error of `tierstore.errors` that a refusal stands for. `headers` by lower-case name."""
    document = _document(body)
    message = str(
        document.get("detail") or document.get("error") or document.get("title") or f"the service answered {status}"
    )
    if status in (429, 503) and "retry-after" in headers:
        return Overloaded(message, retry_after_s=_seconds(headers["retry-after"]))
    if (kind := _KINDS.get(status)) is not None:
        return kind(message)
    match status:
        case 401:
            return Unauthorized(f"{message} (token= of the client; TIERSTORE_TOKEN on the command line)")
        case 409 if isinstance(document.get("expected_seq"), int):
            return SequenceGap(message, expected_seq=document["expected_seq"])
        case 409:
            return Conflict(message)
        case 429:
            return Overloaded(message)
        case 503:
            return NotReady(message)
        case 400 if "retry-after" in headers:  # the protocol's status for it too
            return NotReady(message)
        case 502:  # only a proxy says that
            return Unreachable(message)
        case _ if 400 <= status < 500:
            return InvalidInput(message)
        case _:
            return TierstoreError(f"the service failed ({status}): {message}")


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        return {"error": text} if text else {}
    return document if isinstance(document, dict) else {"error": str(document)}


def _seconds(value: str) -> float:
    seconds = decimal(value)
    return 1.0 if seconds is None else float(seconds)  # None: a date, which our service does not send, or nonsense
