"""HTTP/2 on connections that Python serves: those with TLS, and all until reactors run. The same machine as theirs, fed by the event loop.

A connection that begins with HTTP/2's preface gets a `FrameSession`. Its streams are those of `reactor/streams.py`, and go to the same
receiver. Event loop only, but that any thread may answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tierstore.config import Settings
from tierstore.kernels import h2session, h2words
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.service.limits import slow_clients
from tierstore.service.limits.worker_pool import ByteBudget
from tierstore.service.reactor.streams import Buffer, Stream, StreamReceiver, most_message, paths_table

PREFACE = h2words.PREFACE.tobytes()
_BUFFER_BYTES = 1 << 17
_CHECK_S = 1.0
_LEAST_HELD = 1 << 14  # bytes that count


class Http2:
    """What sessions share: who receives their streams, which paths stream, and the bounds."""

    def __init__(
        self,
        receiver: StreamReceiver,
        streaming: Sequence[bytes],
        settings: Settings,
        inflight: ByteBudget,
    ) -> None:
        self.receiver, self.inflight = receiver, inflight
        self.most_body, self.arrival_s = most_message(settings), settings.arrival_timeout_s
        self.table, *self._paths = paths_table(streaming)
        # of the event loop: what was written leaves before another session writes
        self.out = np.zeros(_BUFFER_BYTES, np.uint8)
        self.work = np.zeros(h2words.WORK_BYTES, np.uint8)
        self.reported = np.zeros((h2words.MOST_STREAMS, 2), np.int64)
        self.busy: FrameSession | None = None  # whose frames are in `out`


class FrameSession:
    """One connection, from behind its preface on."""

    def __init__(self, shared: Http2, transport: asyncio.Transport, names: tuple[str, ...], *, admin: bool) -> None:
        self._shared, self._transport, self._names = shared, transport, names
        self._admin = admin
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._session: int = h2session.begin(shared.most_body, address_of(shared.table))
        if not self._session:
            raise MemoryError("no memory for a connection")
        self._words = h2words.SESSION.view(self._session)
        self._held = b""  # the beginning of a frame
        self._held_since = 0.0
        self._arrived_by: float | None = None  # until when requests may arrive, once it ends
        self._counted = 0  # bytes, of `inflight`
        self._open: dict[int, Stream] = {}
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._paused = False
        self.closed = False
        self._checks = self._loop.call_later(_CHECK_S, self._check)
        with self._working():
            pass  # SETTINGS

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self._words.open

    def feed(self, data: bytes) -> None:
        if not self.closed:
            with self._working():
                self._feed(self._held + data)

    def _feed(self, data: bytes) -> None:
        used, now = 0, time.monotonic_ns()
        memory = np.frombuffer(data, np.uint8)
        at, work = address_of(memory), address_of(self._shared.work)
        while used < len(data):
            moved, event = h2session.advance(self._session, at + used, len(data) - used, work, now)
            used += moved
            if event == h2words.FAILED:
                self._flush()
                self._transport.close()
                self.close()
            elif event:
                self._on_event(event)
            if self.closed:
                return
            if not moved:
                if self._words.out_room - self._words.out_bytes >= h2words.CONTROL_ROOM:
                    break
                self._flush()
        self._held = data[used:]
        in_block = bool(self._words.block_stream)
        if not self._held and not in_block:
            self._held_since = 0.0
        elif not self._held_since or (used and not in_block):  # what is held came with frames that were whole
            self._held_since = self._loop.time()

    def _on_event(self, event: int) -> None:
        words, receiver = self._words, self._shared.receiver
        row = h2words.STREAM.view(words.event_row) if words.event_row else None
        at, size = words.event_at, words.event_bytes
        if event == h2words.SENDABLE or row is None:
            self._push()
            return
        number, ended = row.id, row.state & h2words.ENDED
        if event == h2words.RESET:
            h2session.close_stream(self._session, number, -1)
            self._lose(number)
            return
        body = ctypes.string_at(at, size) if size else b""
        if event in (h2words.REQUEST, h2words.OPENED):
            head = ctypes.string_at(row.at, row.head_bytes)
            too_large = bool(row.state & h2words.TOO_LARGE)
            stream = Stream(self, self._fd, 0, number, head, kernel.SIZE if too_large else kernel.OTHER)
            stream.too_large, stream.peer_names = too_large, self._names
            stream.admin = self._admin
            self._open[number] = stream
            row.state |= h2words.AWAY
            h2session.forget_request(self._session, number)
            if event == h2words.REQUEST:
                receiver.request(stream, body)
                return
            receiver.opened(stream)
        found = self._open.get(number)
        if found is None or found.is_lost():
            return
        if body:
            receiver.data(found, body)
        if ended:
            receiver.ended(found)

    # --- what leaves

    def _bind(self) -> None:
        out = self._shared.out
        h2session.bind_frames(self._session, address_of(out), len(out))

    def _flush(self) -> None:
        """Write what is in the buffer, and what still waits, as long as the transport takes it."""
        self._push()
        while (size := self._words.out_bytes) and not self._transport.is_closing():
            self._transport.write(self._shared.out[:size].tobytes())
            self._bind()
            self._push()
        held = self._words.held + len(self._held)
        held = held if held > _LEAST_HELD else 0
        if held != self._counted:
            more, self._counted = held - self._counted, held
            if more > 0:
                self._shared.inflight.hold(more)
            else:
                self._shared.inflight.release(-more)
        if self._words.flags & h2words.GOING and self.idle and not self.closed:
            self._transport.close()

    def _push(self) -> None:
        if self._paused or not self._words.waiting:
            return
        reported = self._shared.reported
        for k in range(h2session.push_all(self._session, reported)):
            stream = self._open.get(int(reported[k, 0]))
            if stream is not None:
                self._loop.call_soon(stream._has_left, int(reported[k, 1]))  # not now: it may be sending

    def pause_writing(self) -> None:
        """The client does not read: nothing more is read of it either, as each frame may have an answer."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if not self.closed:
            self._transport.resume_reading()
            self._do(self._push)

    # --- the end

    def go_away(self) -> None:
        """Begin no more streams; the connection is closed when those that are open are answered. They have a short time to arrive."""
        if not self.closed:
            if self._arrived_by is None:
                self._arrived_by = self._loop.time() + slow_clients.ENDING_S
            self._do(lambda: h2session.say_goodbye(self._session))

    def close(self) -> None:
        """The connection has ended."""
        if self.closed:
            return
        self.closed = True
        self._checks.cancel()
        for number in list(self._open):
            self._lose(number)
        self._shared.inflight.release(self._counted)
        h2session.free(self._session)

    def _lose(self, number: int) -> None:
        stream = self._open.pop(number, None)
        if stream is not None and stream._lose():
            self._shared.receiver.lost(stream)

    def _check(self) -> None:
        """End what is late."""
        now, stall_ns, arrival_ns = (
            time.monotonic_ns(),
            int(slow_clients.STALL_S * 1e9),
            int(self._shared.arrival_s * 1e9),
        )
        if self._held_since and self._loop.time() - self._held_since > self._shared.arrival_s:
            self._transport.abort()
            return
        self._checks = self._loop.call_later(_CHECK_S, self._check)
        with self._working():
            self._end_late(now, stall_ns, arrival_ns)

    def _end_late(self, now: int, stall_ns: int, arrival_ns: int) -> None:
        ending = self._arrived_by is not None and self._loop.time() > self._arrived_by
        for k in range(self._words.streams_room):
            row = h2words.STREAM.view(self._words.streams + h2words.STREAM_BYTES * k)
            if not row.id:
                continue
            arrives = not row.state & (h2words.ENDED | h2words.AWAY)
            if row.first_out:
                # progress moves the deadline
                block = h2words.BLOCK.view(row.first_out)
                size, done = block.size, block.data_done
                if not row.deadline_ns or row.seen != done:
                    row.seen = done
                    row.deadline_ns = now + stall_ns + size * 1_000_000_000 // slow_clients.SLOWEST_RATE
                late = now > row.deadline_ns
            else:
                row.deadline_ns = 0
                late = arrives and (now - row.began_ns > arrival_ns or ending)
            if late:
                number = row.id
                why = h2words.REFUSED_STREAM if arrives and ending else h2words.ENHANCE_YOUR_CALM
                h2session.close_stream(self._session, number, why)
                self._lose(number)

    # --- for its streams; any thread

    def has(self, fd: int, serial: int) -> bool:
        return not self.closed

    def forget(self, stream: Stream) -> None:
        self._open.pop(stream.number, None)

    def notify(self, stream: Stream, kind: int, value: int, more: int) -> None:
        if kind == kernel.STREAM_RESET:
            self._do(lambda: h2session.close_stream(self._session, stream.number, value))
        elif value:
            self._do(lambda: h2session.consume(self._session, stream.number, value))

    def send(self, stream: Stream, head: bytes, chunks: Iterable[Buffer], trailers: bytes, flags: int) -> None:
        arrays = [np.frombuffer(piece, np.uint8) for piece in (head, *chunks, trailers) if len(piece)]
        places = np.array([(address_of(array), len(array)) for array in arrays], np.int64).reshape(-1, 2)
        data = int(places[:, 1].sum()) - len(head) - len(trailers)

        def respond() -> None:
            h2session.respond(self._session, stream.number, places, len(head), data, len(trailers), flags)
            assert len(arrays) == len(places)  # kept until here
            self._push()

        self._do(respond)

    def _do(self, change: Callable[[], None]) -> None:
        """Change something of the session, on the event loop, as soon as no other is at work."""

        def done() -> None:
            if not self.closed:
                with self._working():
                    change()

        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(done)
        elif self._shared.busy is None:
            done()
        elif self._shared.busy is self:
            change()
        else:
            self._loop.call_soon(done)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Have the buffer; what was written in the block leaves at its end."""
        self._shared.busy = self
        try:
            self._bind()
            yield
            if not self.closed:
                self._flush()
        finally:
            self._shared.busy = None
