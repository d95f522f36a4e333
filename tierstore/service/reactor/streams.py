"""HTTP/2 streams that reactors give to Python: each carries one request, whole or in pieces, and its answer.

The event loop receives the events of a stream in order: either the whole request, or its opening, its data and its
end; and once, if it happens, its loss. Any thread may answer. An answer is copied into a block that then belongs to
the reactor, which counts its bytes until they are sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.config import Settings
from tierstore.kernels.codec import address_of
from tierstore.kernels.records import TEXT
from tierstore.reactor import layout as kernel
from tierstore.reactor import loop as reactor_loop
from tierstore.service.addresses import peer_of
from tierstore.service.reactor.cold_reads import free
from tierstore.service.reactor.hpack import Fields, encode, encode_head
from tierstore.service.reactor.tls_rows import TlsRows
from tierstore.wire.http2 import calls as http2_calls
from tierstore.wire.http2 import head as http2_head
from tierstore.wire.http2 import layout as http2_layout

Sent = Callable[[], None]
Buffer = bytes | memoryview
_WORDS = struct.Struct(f"<{http2_head.HEAD_WORDS}q")
_HEAD_BITS = 20  # of the size of a request's block: the bytes of its head
_EAGAIN = 11
_FULL_MS = 1000  # how long a pipe to a reactor may be full
_DESCRIPTION_ROOM = 1 << 20  # of a message, in addition to its tensors


def most_message(settings: Settings) -> int:
    """The most bytes of a gRPC message, and of a body over HTTP/2 until Python knows its sender."""
    return min(settings.max_request + _DESCRIPTION_ROOM, settings.max_inflight)


class StreamReceiver(Protocol):
    """Receives events of streams from reactors."""

    def request(self, stream: Stream, body: bytes) -> None:
        """A whole request. If `stream.too_large`, `body` is empty."""

    def opened(self, stream: Stream) -> None:
        """The headers of a streaming method's request have come."""

    def data(self, stream: Stream, data: bytes) -> None:
        """More data have come; `stream.consumed` lets the client send as much again."""

    def ended(self, stream: Stream) -> None:
        """The client has sent everything."""

    def lost(self, stream: Stream) -> None:
        """The client has reset the stream, or its connection has ended. Nothing more comes, and nothing is sent."""


class Stream:
    """One stream: a request, and its answer. Call `respond`, or `send_headers`, `send_data` and `end`; or `reset`.
    Any thread.
    """

    def __init__(self, streams: Streams, fd: int, serial: int, number: int, head: bytes, reason: int) -> None:
        self._streams, self._fd, self._serial, self.number = streams, fd, serial, number
        # when its headers came, on the monotonic clock; its grpc-timeout, 0 without one; whether it is a gRPC call
        self.arrived_ns, self.timeout_ms, is_grpc = _WORDS.unpack_from(head)
        self.is_grpc = bool(is_grpc)
        first, authority, *lines, _ = head[_WORDS.size :].split(b"\n")
        method, _, path = first.partition(b" ")
        self.method, self.path, self.authority = method, path, authority
        # regular fields, with names in small letters
        self.headers: list[tuple[bytes, bytes]] = []
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers.append((name, value))
        self.reason = reason  # why the reactor has not answered: an index of `kernel.REASONS`
        self.error: BaseException | None = None  # the error to answer with: why what was begun has failed
        self.too_large = False  # the body was larger than `most_message`, and is not there
        self.peer_names: tuple[str, ...] = ()  # of the client's certificate
        self._lock = threading.Lock()
        # guarded by _lock
        self._waiting: deque[Sent] = deque()  # for sent blocks to leave, in order
        self._lost = False
        self._ended = False  # whether the whole answer was given

    def is_lost(self) -> bool:
        """Whether the client has reset the stream, or is gone."""
        return self._lost

    @property
    def client(self) -> tuple[str, int] | None:
        """The client's address and port, until it is answered; None if it has none."""
        with self.connection() as connection:
            return None if connection is None else peer_of(connection)

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket | None]:
        """The stream's connection, for questions to the socket; None if it has ended."""
        try:
            made = socket.socket(fileno=os.dup(self._fd))
        except OSError:
            yield None
            return
        with made:
            yield made if self._streams.has(self._fd, self._serial) else None

    def respond(
        self,
        status: int,
        headers: Fields,
        chunks: Sequence[Buffer] = (),
        trailers: Fields | None = None,
        sent: Sent | None = None,
    ) -> None:
        """Answer as a whole. `sent` is called once the answer was sent, or never will be."""
        self._send(encode_head(status, headers), chunks, b"" if trailers is None else encode(trailers), True, sent)

    def send_headers(self, status: int, headers: Fields) -> None:
        self._send(encode_head(status, headers), (), b"", False, None)

    def send_data(self, data: Buffer, sent: Sent | None = None) -> None:
        self._send(b"", (data,), b"", False, sent)

    def end(self, trailers: Fields = ()) -> None:
        self._send(b"", (), encode(trailers), True, None)

    def reset(self, code: int = http2_layout.CANCEL) -> None:
        """Take back the unsent part of the answer."""
        with self._lock:
            if self._lost or self._ended:
                return
            self._ended = True
            waiting = self._pop_waiting()
        self._streams.forget(self)
        self._streams.notify(self, kernel.STREAM_RESET, code, 0)
        for sent in waiting:
            sent()

    def consumed(self, size: int) -> None:
        """Let the client send `size` more bytes."""
        if not self._lost and not self._ended:
            self._streams.notify(self, kernel.STREAM_CONSUMED, size, 0)

    def _send(self, head: bytes, chunks: Iterable[Buffer], trailers: bytes, ends: bool, sent: Sent | None) -> None:
        with self._lock:
            gone = self._lost or self._ended
            if not gone:
                self._ended = ends
                if sent is not None:
                    self._waiting.append(sent)
                is_done = ends and not self._waiting
                flags = (http2_layout.ENDS if ends else 0) | (http2_layout.REPORTS if sent is not None else 0)
                self._streams.send(self, head, chunks, trailers, flags)
        if gone:
            if sent is not None:
                sent()
        elif is_done:
            self._streams.forget(self)

    def _pop_waiting(self) -> list[Sent]:
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _has_left(self, count: int) -> None:
        with self._lock:
            left = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            is_done = self._ended and not self._waiting
        if is_done:
            self._streams.forget(self)
        for sent in left:
            sent()

    def _lose(self) -> bool:
        """Note that the stream is lost. Returns whether its answer was not given yet."""
        with self._lock:
            open_, self._lost = not self._ended and not self._lost, True
            waiting = self._pop_waiting()
        for sent in waiting:
            sent()
        return open_


class StreamPipes(Protocol):
    """The part of the reactors that streams need."""

    conns: npt.NDArray[Any]
    tls: TlsRows
    words: npt.NDArray[Any]

    def error_of(self, fd: int, serial: int, stream: int = 0) -> BaseException | None:
        """The error to answer a request with that came back from a thread that predicts; see `Predictions`."""

    def send_stream(self, reactor_number: int, write: Callable[[int], int]) -> None:
        """Have `write` write to a reactor's pipe, unless that is closed; it returns 0, or minus an error number."""


class Streams:
    """Python's streams. Any thread may call `of_job`, `send`, `notify` and `forget`."""

    def __init__(self, pipes: StreamPipes) -> None:
        self._pipes = pipes
        self._open: dict[tuple[int, int, int], Stream] = {}
        self._receiver: StreamReceiver | None = None

    def start(self, receiver: StreamReceiver, streaming: Sequence[bytes]) -> None:
        """From now on `receiver` gets streams; gRPC streams of the paths `streaming` in pieces as they arrive."""
        self._receiver = receiver
        paths = [np.frombuffer(path, np.uint8) for path in streaming]
        texts = np.array([(address_of(path), len(path)) for path in paths], TEXT.dtype)
        self._paths = (
            http2_layout.PATHS.make(count=len(paths), first=address_of(texts)),
            texts,
            paths,
        )  # kept: reactors read them
        self._pipes.words["streaming_paths"] = address_of(self._paths[0])

    def __len__(self) -> int:
        return len(self._open)

    def serve(self, kind: int, place: int, serial: int, address: int, more: int) -> None:
        """Handle a message of a reactor; `place`: the descriptor, and the stream's number above it."""
        fd, number, flags = place & 0xFFFFFF, place >> (kernel.STREAM_SHIFT - 8), serial >> 32
        serial &= kernel.SERIALS
        receiver = self._receiver
        assert receiver is not None
        if kind in (kernel.STREAM_REQUEST, kernel.STREAM_OPENED):
            head_bytes, size = more & (1 << _HEAD_BITS) - 1, more >> _HEAD_BITS
            head = ctypes.string_at(address, head_bytes)
            body = ctypes.string_at(address + head_bytes, size - head_bytes)
            free(address)
            stream = self._open[fd, serial, number] = Stream(self, fd, serial, number, head, flags)
            stream.too_large = flags == kernel.SIZE and not body
            stream.peer_names = self._pipes.tls.names_of(fd, serial)
            if kind == kernel.STREAM_REQUEST:
                stream.error = self._pipes.error_of(fd, serial, number)
                receiver.request(stream, body)
            else:
                receiver.opened(stream)
            return
        if kind == kernel.STREAM_LOST:
            self._lose([self._open.get((fd, serial, number))] if number else self._of(fd, serial))
            return
        found = self._open.get((fd, serial, number))
        if kind == kernel.STREAM_SENT:
            if found is not None:
                found._has_left(address)
            return
        data = ctypes.string_at(address, more) if more else b""
        free(address or None)
        if found is None or found.is_lost():
            return
        if data:
            self.notify(found, kernel.STREAM_CONSUMED, 0, 1)
            receiver.data(found, data)
        if flags:
            receiver.ended(found)

    def of_job(self, words: Mapping[str, int], request: bytes) -> tuple[Stream, bytes]:
        """The stream that waits for a job, which is still the reactor's, and its body. Any thread."""
        head_bytes, reason = words["tail"] - http2_calls.PREFIX - words["request"], kernel.PREDICTION
        stream = Stream(self, words["fd"], words["serial"], words["stream"], request[:head_bytes], reason)
        return stream, request[head_bytes:]

    def fail(self, words: Mapping[str, int], request: bytes, error: BaseException) -> None:
        """Answer a job's stream with an error, in place of the job's thread."""
        assert self._receiver is not None
        stream, body = self.of_job(words, request)
        stream.peer_names, stream.error = self._pipes.tls.names_of(words["fd"], words["serial"]), error
        self._receiver.request(stream, body)

    def lose_unreported(self) -> None:
        """Lose streams whose connections have ended without a message: the pipe was full."""
        self._lose([stream for stream in self._open.values() if not self.has(stream._fd, stream._serial)])

    def close(self) -> None:
        """Close all, after the reactors have ended."""
        self._lose(list(self._open.values()), tell=False)

    def has(self, fd: int, serial: int) -> bool:
        """Whether the connection of a descriptor and a serial is open."""
        row = self._pipes.conns[fd]
        return bool(row["serial"] == serial and row["state"] == kernel.HTTP2)

    def _of(self, fd: int, serial: int) -> list[Stream | None]:
        return [stream for key, stream in self._open.items() if key[:2] == (fd, serial)]

    def _lose(self, streams: Iterable[Stream | None], tell: bool = True) -> None:
        for stream in streams:
            if stream is not None:
                self.forget(stream)
                if stream._lose() and tell and self._receiver is not None:
                    self._receiver.lost(stream)

    # --- any thread

    def forget(self, stream: Stream) -> None:
        self._open.pop((stream._fd, stream._serial, stream.number), None)

    def notify(self, stream: Stream, kind: int, value: int, more: int) -> None:
        """Write a message for a stream to its reactor."""
        what = self._what(stream, kind)
        self._write(stream, lambda pipe: reactor_loop.write_message(pipe, what, stream._serial, value, more))

    def send(self, stream: Stream, head: bytes, chunks: Iterable[Buffer], trailers: bytes, flags: int) -> None:
        """Give a stream's reactor a block with a copy of head, chunks and trailers."""
        arrays = [np.frombuffer(piece, np.uint8) for piece in (head, *chunks, trailers) if len(piece)]
        places = np.array([(address_of(array), len(array)) for array in arrays], np.int64).reshape(-1, 2)
        inflight = kernel.SHARED.place(self._pipes.words, "inflight")
        what, data = self._what(stream, kernel.STREAM_BLOCK), int(places[:, 1].sum()) - len(head) - len(trailers)
        self._write(
            stream,
            lambda pipe: reactor_loop.write_block(
                pipe, what, stream._serial, places, flags, len(head), data, len(trailers), inflight
            ),
        )

    def _what(self, stream: Stream, kind: int) -> int:
        return kind | stream._fd << 8 | stream.number << kernel.STREAM_SHIFT

    def _write(self, stream: Stream, write: Callable[[int], int]) -> None:
        owner = int(self._pipes.conns["owner"][stream._fd])

        def patiently(pipe: int) -> int:
            failed = write(pipe)
            if failed == -_EAGAIN:  # the reactor reads as fast as it can
                waiting = select.poll()
                waiting.register(pipe, select.POLLOUT)
                waiting.poll(_FULL_MS)
                failed = write(pipe)
            return failed

        self._pipes.send_stream(owner, patiently)
