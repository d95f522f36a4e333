"""HTTP/2 that the event loop feeds: a session over a transport that keeps what is written, with the package h2 as its client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import h2.connection
import h2.events
from h2.settings import SettingCodes

from tierstore.config import Settings
from tierstore.service.http.frames import PREFACE, FrameSession, Http2
from tierstore.service.limits.worker_pool import ByteBudget
from tierstore.service.reactor.streams import Stream

STREAMING = "/a.B/stream"
HEAD = [(b"content-type", b"application/grpc")]


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        self._socket = socket.socket()
        self.written, self.reading, self.closed = b"", True, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Echo:
    """Answers with what came, on another thread where the path says so."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.kept: list[Stream] = []

    def request(self, stream: Stream, body: bytes) -> None:
        def respond() -> None:
            stream.respond(200, HEAD, (body,), [(b"grpc-status", b"0")], lambda: self.events.append("sent"))

        if stream.path == b"/never":
            self.events.append("request")
            self.kept.append(stream)
        elif stream.path == b"/thread":
            thread = threading.Thread(target=respond)
            thread.start()
            thread.join()
        else:
            respond()

    def opened(self, stream: Stream) -> None:
        stream.send_headers(200, HEAD)

    def data(self, stream: Stream, data: bytes) -> None:
        stream.send_data(data)
        stream.consumed(len(data))

    def ended(self, stream: Stream) -> None:
        stream.end([(b"grpc-status", b"0")])

    def lost(self, stream: Stream) -> None:
        assert stream.is_lost()
        self.events.append("lost")


class Scene:
    def __init__(self, **initial: int) -> None:
        self.receiver, self.transport = Echo(), Transport()
        self.inflight = ByteBudget("inflight", 1 << 26)
        settings = Settings(max_request=1 << 22)
        shared = Http2(self.receiver, (STREAMING.encode(),), settings, self.inflight)
        self.session = FrameSession(shared, self.transport, (), admin=False)
        self.peer = h2.connection.H2Connection()
        self.peer.initiate_connection()
        if initial:
            self.peer.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: initial["window"]})
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self._started = False

    def send(self, stream: int, path: str, body: bytes) -> None:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"), *_TYPE]
        self.peer.send_headers(stream, fields)
        while len(body) > 16384:
            self.peer.send_data(stream, body[:16384])
            body = body[16384:]
        self.peer.send_data(stream, body, end_stream=True)

    async def talk(self) -> None:
        """Move bytes both ways until neither has any."""
        for _ in range(1000):
            out = self.peer.data_to_send()
            if not self._started:
                self._started, out = True, out[len(PREFACE) :]
            if out and self.transport.reading:
                self.session.feed(out)
            await asyncio.sleep(0)
            data, self.transport.written = self.transport.written, b""
            for event in self.peer.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                    self.peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)
            if not out and not data:
                return
        raise AssertionError("the two go on for ever")


_TYPE = [("content-type", "application/grpc")]


def run(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())


def test_requests_are_answered_from_the_loop_and_from_threads() -> None:
    async def check() -> None:
        scene = Scene()
        for k, path in enumerate(("/here", "/thread", STREAMING)):
            scene.send(2 * k + 1, path, b"x" * (3000 + k))
        await scene.talk()
        assert scene.bodies == {1: b"x" * 3000, 3: b"x" * 3001, 5: b"x" * 3002}
        assert scene.ended == {1, 3, 5}
        assert scene.receiver.events == ["sent", "sent"]
        scene.session.close()
        assert scene.receiver.events == ["sent", "sent"]
        assert scene.inflight.used_bytes == 0

    run(check)


def test_what_a_client_does_not_read_waits_and_nothing_more_is_read_of_it() -> None:
    async def check() -> None:
        scene = Scene()
        await scene.talk()
        scene.session.pause_writing()
        assert not scene.transport.reading
        scene.session.resume_writing()
        assert scene.transport.reading
        scene.session.close()

    run(check)


def test_answers_wait_for_windows_and_count_meanwhile() -> None:
    async def check() -> None:
        scene = Scene(window=0)
        await scene.talk()
        scene.send(1, "/here", b"y" * 40000)
        await scene.talk()
        assert 1 not in scene.bodies
        assert scene.inflight.used_bytes >= 40000
        scene.peer.increment_flow_control_window(65535, 1)
        await scene.talk()
        assert scene.bodies[1] == b"y" * 40000
        assert scene.inflight.used_bytes == 0
        scene.session.close()

    run(check)


def test_streams_of_a_connection_that_ends_are_lost() -> None:
    async def check() -> None:
        scene = Scene()
        scene.send(1, "/never", b"z")
        await scene.talk()
        scene.session.close()
        assert scene.receiver.events == ["request", "lost"]

    run(check)


def test_a_connection_that_goes_away_ends_when_its_streams_are_answered() -> None:
    async def check() -> None:
        scene = Scene()
        scene.send(1, "/never", b"z")
        await scene.talk()
        scene.session.go_away()
        await scene.talk()
        assert not scene.transport.closed
        scene.receiver.kept[0].respond(200, HEAD, (b"late",))
        assert scene.transport.closed
        scene.session.close()

    run(check)
