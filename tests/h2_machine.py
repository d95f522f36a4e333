"""The compiled machine of HTTP/2 without a socket: fed bytes, it keeps what comes of them, and answers when it is told to."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.compiled import h2_session
from tierstore.kernels.codec import address_of
from tierstore.kernels.records import TEXT
from tierstore.service.reactor.hpack import encode, encode_head
from tierstore.wire.http2 import head as http2_head
from tierstore.wire.http2 import layout as http2_layout

SECOND = 1_000_000_000
UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAMING = b"/inference.GRPCInferenceService/ModelStreamInfer"


class Machine:
    """A session that is fed bytes, keeps what comes of it, and answers when it is told to."""

    def __init__(self, most_body: int = 1 << 20, room: int = 1 << 17) -> None:
        self._path = np.frombuffer(STREAMING, np.uint8)
        self._text = TEXT.make(at=address_of(self._path), bytes=len(self._path))
        self._table = http2_layout.PATHS.make(count=1, first=address_of(self._text))
        self._out, self._work = np.zeros(room, np.uint8), np.zeros(http2_layout.WORK_BYTES, np.uint8)
        self.session = h2_session.begin(most_body, address_of(self._table))
        self._held, self._told = b"", np.zeros((http2_layout.MOST_STREAMS, 2), np.int64)
        self.now = SECOND
        self.sent = b""
        self.failed = False
        self.events: list[tuple[str, int, bytes]] = []
        self.requests: dict[int, tuple[bytes, bytes]] = {}  # head, body
        self._lend()

    def close(self) -> None:
        h2_session.free(self.session)

    @property
    def state(self) -> Any:
        """The session's record."""
        return http2_layout.SESSION.view(self.session)

    def _lend(self) -> None:
        h2_session.bind_frames(self.session, address_of(self._out), len(self._out))
        self._collect()

    def _collect(self) -> None:
        while n := self.state.out_bytes:
            self.sent += self._out[:n].tobytes()
            h2_session.bind_frames(self.session, address_of(self._out), len(self._out))
            h2_session.push_all(self.session, self._told)

    def feed(self, data: bytes) -> None:
        self._held += data
        memory = np.frombuffer(self._held + b"\xaa", np.uint8).copy()
        at, size = address_of(memory), len(self._held)
        while not self.failed:
            used, event = h2_session.advance(self.session, at, size, address_of(self._work), self.now)
            if not used:
                break
            at, size = at + used, size - used
            self._take(event)
            self._collect()
        self._held = self._held[len(self._held) - size :]

    def _take(self, event: int) -> None:
        state = self.state
        row = http2_layout.STREAM.view(state.event_row) if state.event_row else None
        at, size = state.event_at, state.event_bytes
        stream = 0 if row is None else row.id
        if event == http2_layout.REQUEST:
            head = ctypes.string_at(row.at, row.head_bytes)[8 * http2_head.HEAD_WORDS :]
            self.requests[stream] = head, ctypes.string_at(at, size)
            self.events.append(("request", stream, b""))
        elif event == http2_layout.OPENED:
            head = ctypes.string_at(row.at, row.head_bytes)[8 * http2_head.HEAD_WORDS :]
            self.events.append(("opened", stream, head))
            if row.state & http2_layout.ENDED:
                self.events.append(("ended", stream, b""))
        elif event == http2_layout.CAME:
            if size:
                self.events.append(("data", stream, ctypes.string_at(at, size)))
                h2_session.consume(self.session, stream, size)
            if row.state & http2_layout.ENDED:
                self.events.append(("ended", stream, b""))
        elif event == http2_layout.RESET:
            self.events.append(("reset", stream, b""))
            h2_session.close_stream(self.session, stream, -1)
        elif event == http2_layout.SENDABLE:
            h2_session.push_all(self.session, self._told)
        elif event == http2_layout.FAILED:
            self.failed = True

    def row(self, stream: int) -> Any:
        """The record of an open stream, or None."""
        state = self.state
        for k in range(state.streams_room):
            row = http2_layout.STREAM.view(state.streams + http2_layout.STREAM_BYTES * k)
            if row.id == stream:
                return row
        return None

    def answer(
        self, stream: int, status: int, headers: Any, data: bytes, trailers: Any = None, *, ends: bool = True
    ) -> bool:
        """Let an answer or, without `ends`, the beginning of one leave; a status of 0: what goes on."""
        head = encode_head(status, headers) if status else b""
        tail = b"" if trailers is None else encode(trailers)
        memory = np.frombuffer(head + data + tail + b"\0", np.uint8)
        places = np.array([(address_of(memory), len(memory) - 1)], np.int64)
        flags = http2_layout.ENDS if ends else 0
        made = h2_session.respond(self.session, stream, places, len(head), len(data), len(tail), flags)
        h2_session.push_all(self.session, self._told)
        self._collect()
        return bool(made)

    def answer_call(self, stream: int, message: bytes) -> bool:
        memory = np.frombuffer(message + b"\0", np.uint8)
        made = h2_session.respond_to_call(self.session, stream, address_of(memory), len(message))
        h2_session.push_all(self.session, self._told)
        self._collect()
        return bool(made)

    def take_sent(self) -> bytes:
        data, self.sent = self.sent, b""
        return data


def sessions(data: bytes, times: int) -> list[int]:
    """So many sessions of HTTP/2 that each were sent this."""
    begun = []
    out, work = np.zeros(1 << 17, np.uint8), np.zeros(http2_layout.WORK_BYTES, np.uint8)
    sent, told = np.frombuffer(data, np.uint8).copy(), np.zeros((http2_layout.MOST_STREAMS, 2), np.int64)
    for _ in range(times):
        session, at, used = h2_session.begin(1 << 30, 0), 0, 1
        while used:
            h2_session.bind_frames(session, address_of(out), len(out))
            h2_session.push_all(session, told)
            used, _ = h2_session.advance(session, address_of(sent) + at, len(data) - at, address_of(work), 1)
            at += used
        assert at == len(data)
        begun.append(session)
    return begun
