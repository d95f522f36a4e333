"""What receives an answer: a document, or tensors straight into the arrays that the caller gets.

A receiver belongs to one attempt, which belongs to one thread at a time. It may be given up in the middle; only
`finish` of the attempt that counts makes its answer the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.client import wire
from tierstore.client.refusals import error_of
from tierstore.errors import TierstoreError

Place = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any] | None]


class Reply:
    """An answer as a document."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.order = 0  # among the replies of one request: which came when
        self._into = memoryview(self.body)

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        self.status, self.headers = status, headers
        self.body = bytearray(nbytes)
        self._into = memoryview(self.body)

    def buffer(self) -> memoryview:
        return self._into

    def received(self, n: int) -> None:
        self._into = self._into[n:]

    def finish(self) -> None:
        """Once all is there and nothing else writes: put it where it belongs. Raises what a refusal stands for."""
        if not 200 <= self.status < 300:
            raise error_of(self.status, self.headers, bytes(self.body))

    def json(self) -> Any:
        """The document, None if it is empty."""
        if not self.body:
            return None
        try:
            return orjson.loads(self.body)
        except ValueError as error:
            raise TierstoreError("the service answered with something that is not JSON: is it a tierstore?") from error


class Tensors(Reply):
    """An answer to an inference request.

    place: where an output is to be written, or None if it belongs nowhere; without it every output is an array of its
        own, in `outputs`.
    direct: write there as bytes come; otherwise only in `finish`, since another attempt may be writing there.
    """

    def __init__(self, place: Place | None = None, *, direct: bool = True) -> None:
        super().__init__()
        self._place, self._direct = place, direct
        self._segments: list[memoryview] = []  # to be received, the last one first
        self._raw: dict[str, bytearray] = {}  # of BYTES outputs
        self._described: list[wire.Described] | None = None
        self._in_json = False
        self._tail_bytes = 0
        self.version: int | None = None
        self.outputs: dict[str, npt.NDArray[Any]] = {}

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None:
        super().start(status, headers, 0)
        length = headers.get(wire.HEADER_LENGTH)
        self._in_json = 200 <= status < 300
        json_bytes = nbytes if length is None or not self._in_json else int(length) if length.isdigit() else -1
        if not 0 <= json_bytes <= nbytes:
            raise wire.not_of_the_protocol(f"{wire.HEADER_LENGTH} is {length!r}, the body has {nbytes} bytes")
        self.body = bytearray(json_bytes)
        self._tail_bytes = nbytes - json_bytes
        self._segments = [memoryview(self.body)]
        if not json_bytes and self._in_json:
            raise wire.not_of_the_protocol("it has no JSON")

    def buffer(self) -> memoryview:
        return self._segments[-1]

    def received(self, n: int) -> None:
        rest = self._segments[-1] = self._segments[-1][n:]
        if len(rest):
            return
        self._segments.pop()
        if self._in_json and self._described is None:
            self._lay_out()

    def _lay_out(self) -> None:
        self.version, self._described = wire.described(self.body)
        total = 0
        for output in self._described:
            if output.nbytes is None:
                continue
            total += output.nbytes
            if output.dtype is wire.OBJECT:
                raw = self._raw[output.name] = bytearray(output.nbytes)
                self._segments.append(memoryview(raw))
                continue
            array = None
            if self._place is not None and self._direct:
                array = self._place(output.name, output.shape, output.dtype)
            if array is None:
                array = np.empty(output.shape, output.dtype)
            self.outputs[output.name] = array
            self._segments.append(array.reshape(-1).view(np.uint8).data)
        if total != self._tail_bytes:
            raise wire.not_of_the_protocol(f"{self._tail_bytes} bytes follow the JSON, which tells of {total}")
        self._segments = [segment for segment in reversed(self._segments) if len(segment)]

    def finish(self) -> None:
        super().finish()
        for output in self._described or []:
            if output.nbytes is None:
                self._late(output, wire.from_json(output))
            elif output.dtype is wire.OBJECT:
                self._late(output, wire.from_length_prefixed(bytes(self._raw[output.name]), output.shape))
            elif not self._direct:
                self._late(output, self.outputs[output.name])

    def _late(self, output: wire.Described, array: npt.NDArray[Any]) -> None:
        self.outputs[output.name] = array
        if self._place is not None:
            place = self._place(output.name, output.shape, output.dtype)
            if place is not None:
                place[...] = array
