"""What a client may hold, at every listener: seconds, files and bytes are bounded, whatever serves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.certificates import Authority
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.raw_clients import request
from tierstore.service import root
from tierstore.service import server as server_module
from tierstore.service.http import connection_limit
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.messages import Response
from tierstore.service.limits import silent, slow_clients
from tierstore.service.reactor import silent as reactors_silent
from tierstore.service.server import ServerThread

LISTENERS = (
    "reactors", "a first start", "uvicorn",
    "admin_listen over TCP", "admin_listen with TLS", "admin_listen on a socket", "gRPC",
)  # fmt: skip
LIMIT, REFUSED, UNDECIDED = 8, 4, 32  # connections that are served, refused in words, and accepted before that is known
MANY = 80
LARGE = 16 << 20  # an answer, more than the system takes for a client that does not read
SHORT_S, MOST_S = 0.5, 10.0  # the bounds here; with what a busy machine adds, and far below those of uvicorn itself
METHOD = "/inference.GRPCInferenceService/ModelInfer"


def frame(kind: int, flags: int, stream: int, payload: bytes, size: int | None = None) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1), which says that it has `size` bytes."""
    size = len(payload) if size is None else size
    return size.to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(path: str) -> bytes:
    """The head of a call of gRPC, in literals."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    return b"".join(b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in fields.items())


def field(number: int, data: bytes) -> bytes:
    """A field of protobuf with a length, which is small."""
    return bytes([number << 3 | 2, len(data)]) + data


def look_up() -> bytes:
    """A ModelInferRequest for eight keys, with the length that gRPC puts before it."""
    tensor = field(1, b"item_id") + field(2, b"INT64") + field(3, bytes([8]))
    message = field(1, b"ctr") + field(5, tensor) + field(7, bytes(8 * 8))
    return struct.pack(">BI", 0, len(message)) + message


def preface(window: int = 1 << 16) -> bytes:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, window))


HTTP = {
    "silent": b"",
    "half a head": b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "half a body": b"POST /admin/models/ctr/snapshots HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n{",
    "unread": request("/openapi.json"),
}
OVER_GRPC = {
    "silent": preface(),
    "half a head": preface() + frame(1, 0, 1, call(METHOD)[:9], size=len(call(METHOD)) + 8000),
    "half a body": preface() + frame(1, 4, 1, call(METHOD)) + frame(0, 0, 1, b"\0\0\0\x20\0", size=8000),
    "unread": preface(window=0) + frame(1, 4, 1, call(METHOD)) + frame(0, 1, 1, look_up()),
}


class Served:
    """A server, the listener of it that the test is about, and clients of that."""

    def __init__(self, server: ServerThread, listener: str, ca: Path) -> None:
        self.server, self.listener, self._ca = server, listener, ca
        self.with_tls = "TLS" in listener
        self.messages = OVER_GRPC if listener == "gRPC" else HTTP
        self.asked, self.gate = threading.Event(), threading.Event()  # of the large answer: it waits for the gate
        self.gate.set()

    @property
    def limit(self) -> ConnectionLimit:
        service: Any = self.server.service
        return service.admin_connections if "admin" in self.listener else service.connection_limit  # type: ignore[no-any-return]

    def connect(self, *, handshake: bool = True, room: int = 4096) -> socket.socket:
        """A connection, whose client has room for little."""
        made = socket.socket(socket.AF_UNIX if "socket" in self.listener else socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        made.settimeout(60)
        made.connect(self._address())
        if not (self.with_tls and handshake):
            return made
        context = ssl.create_default_context(cafile=str(self._ca))
        return context.wrap_socket(made, server_hostname="127.0.0.1", suppress_ragged_eofs=True)

    def _address(self) -> Any:
        if "admin" not in self.listener:
            return "127.0.0.1", self.server.grpc_port if self.listener == "gRPC" else self.server.port
        _, _, rest = self.server.admin_url.partition(":")
        return rest if "socket" in self.listener else ("127.0.0.1", int(rest.rpartition(":")[2]))

    def is_answered(self) -> bool:
        """Whether a new client is: not if it is refused, or closed at once."""
        with contextlib.suppress(OSError), self.connect() as one:
            if self.listener == "gRPC":
                one.sendall(preface() + frame(1, 4, 1, call(METHOD)) + frame(0, 1, 1, look_up()))
                seen = b""
                while b"grpc-status" not in seen and (part := one.recv(1 << 16)):
                    seen += part
                return b"grpc-status" in seen
            one.sendall(request("/v2/health/live"))
            return one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        return False

    def is_quiet(self) -> bool:
        """Whether no connection is open, and no byte held."""
        return (self.limit.open, self.limit.refused, self.server.service.inflight.used_bytes) == (0, 0, 0)


@contextlib.contextmanager
def serving(
    listener: str, folder: Path, *, stall_s: float = SHORT_S, ending_s: float = SHORT_S, **bounds: float
) -> Iterator[Served]:
    """A server with such a listener, where a client may read nothing for `stall_s`, and has `ending_s` at the end;
    `bounds` are settings.
    """
    folder.mkdir(exist_ok=True)
    authority = Authority(folder)
    settings: dict[str, Any] = {"max_connections": LIMIT, "grpc_port": GRPC if listener == "gRPC" else "off", **bounds}
    if "TLS" in listener:
        pair = authority.issue("service")
        settings |= {"tls_cert": pair.cert, "tls_key": pair.key}
    if "admin" in listener:
        settings["admin_listen"] = f"unix:{folder}/admin.sock" if "socket" in listener else "127.0.0.1:0"
    if listener == "uvicorn":
        settings["server"] = "uvicorn"

    async def large() -> Response:
        served.asked.set()
        while not served.gate.is_set():
            await asyncio.sleep(0.01)
        return Response(200, [bytes(LARGE)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "ADMIN_CONNECTIONS", LIMIT)
        patch.setattr(connection_limit, "FEW_REFUSED", REFUSED)
        times = {"HANDSHAKE_S": SHORT_S, "TURN_OFF_S": SHORT_S, "ENDING_S": ending_s, "STALL_S": stall_s}
        for name, seconds in times.items():
            patch.setattr(slow_clients, name, seconds)
        patch.setattr(slow_clients, "SLOWEST_RATE", 1 << 40)  # an answer has no more time than that
        if "first start" in listener:
            never = SimpleNamespace(http=threading.Event(), done=threading.Event(), error=None)
            patch.setattr(server_module.ahead, "start", lambda *_: never)
        call_admin = root.Root._call_admin
        patch.setattr(
            root.Root,
            "_call_admin",
            lambda self, scope, receive: (
                large() if scope["path"] == "/openapi.json" else call_admin(self, scope, receive)
            ),
        )
        with ServerThread(FakeStore(settings_for(folder, **settings))) as server:  # type: ignore[arg-type]
            served = Served(server, listener, authority.ca)
            if served.messages is HTTP:  # the first request for the admin interface makes it
                with served.connect() as one:
                    one.sendall(request("/admin/nowhere", headers={"Connection": "close"}))
                    assert one.recv(1 << 16).startswith(b"HTTP/1.1 404")
            yield served


@pytest.fixture(scope="module", params=LISTENERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("listener")
    with serving(request.param, folder, idle_timeout_s=SHORT_S, arrival_timeout_s=SHORT_S) as served:
        yield served


def drip(one: socket.socket) -> None:
    """Send a byte every now and then, until the connection ends; fails where that takes too long."""
    until = time.monotonic() + MOST_S
    one.settimeout(0.05)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while time.monotonic() < until:
            one.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not one.recv(1 << 16):
                    return
        pytest.fail("it is still open")


def ends(one: socket.socket) -> bytes:
    """What comes until the connection ends; fails where that takes too long."""
    until, seen = time.monotonic() + MOST_S, []
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := one.recv(1 << 20):
            seen.append(part)
            assert time.monotonic() < until, "it is still open"
    assert time.monotonic() < until
    return b"".join(seen)


@pytest.mark.parametrize("sent", ["silent", "half a head", "half a body"])
def test_a_client_that_owes_the_rest_is_ended_however_slowly_it_sends(served: Served, sent: str) -> None:
    eventually(served.is_quiet, "the clients of other tests have gone")
    with contextlib.ExitStack() as stack:
        still, slow = (stack.enter_context(served.connect()) for _ in range(2))
        raw = stack.enter_context(served.connect(handshake=False))
        began_s = time.monotonic()
        for one in (still, slow):
            one.sendall(served.messages[sent])
        if sent != "silent":
            drip(slow)
        said = ends(still)
        ends(slow)
        ends(raw)
        assert time.monotonic() - began_s < MOST_S
        if sent == "half a body" and served.messages is HTTP:
            assert said.startswith(b"HTTP/1.1 408")
        eventually(served.is_quiet, "nothing is held")


def test_a_client_that_does_not_read_is_ended_and_its_bytes_count_until_then(served: Served) -> None:
    eventually(served.is_quiet, "the clients of other tests have gone")
    least = 1 if served.listener == "gRPC" else LARGE // 2
    with served.connect() as one:
        one.sendall(served.messages["unread"])
        eventually(lambda: served.server.service.inflight.used_bytes >= least, "the answer that nobody reads counts")
        began_s = time.monotonic()
        eventually(served.is_quiet, "it is ended")
        assert time.monotonic() - began_s < MOST_S


@pytest.fixture
def patient(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """One that waits longer for its clients to read."""
    limits: Any = served.server.service.reactors._limits  # type: ignore[union-attr]
    before_ns = int(limits["stall_ns"])
    limits["stall_ns"] = int(60e9)
    monkeypatch.setattr(slow_clients, "STALL_S", 60.0)
    yield served
    limits["stall_ns"] = before_ns


def test_a_client_that_reads_late_gets_all_of_its_answer(patient: Served) -> None:
    over_grpc, budget = patient.listener == "gRPC", patient.server.service.inflight
    with patient.connect() as one:
        one.sendall(patient.messages["unread"] * (1 if over_grpc else 2))
        eventually(lambda: budget.used_bytes, "an answer that waits for its client")
        if over_grpc:
            one.sendall(frame(8, 0, 1, struct.pack(">I", 1 << 20)))  # WINDOW_UPDATE
        size, last = 0, b""
        while size < 2 * LARGE and b"grpc-status" not in last and (part := one.recv(1 << 20)):
            size, last = size + len(part), (last + part)[-1000:]
        assert b"grpc-status" in last if over_grpc else size >= 2 * LARGE
        eventually(lambda: not budget.used_bytes, "nothing is held")


def test_a_client_that_has_an_answer_to_read_keeps_its_place(patient: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (silent, reactors_silent):
        monkeypatch.setattr(module, "SILENT_S", SHORT_S / 2)
    eventually(patient.is_quiet, "the clients of other tests have gone")
    least = 1 if patient.listener == "gRPC" else LARGE // 2
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(patient.connect()).sendall(patient.messages["unread"])
        eventually(lambda: patient.server.service.inflight.used_bytes >= LIMIT * least, "all have their answers")
        until = time.monotonic() + SHORT_S
        while time.monotonic() < until:
            assert not patient.is_answered()
            time.sleep(0.05)  # paces the asking


def test_many_clients_take_few_files_and_others_are_answered_meanwhile(served: Served) -> None:
    eventually(served.is_quiet, "the clients of other tests have gone")
    files = "/proc/self/fd"
    before, most = len(os.listdir(files)), 0
    with contextlib.ExitStack() as stack:
        for opened in range(1, MANY + 1):
            stack.enter_context(served.connect(handshake=False))
            most = max(most, len(os.listdir(files)) - before - opened)
        assert most <= LIMIT + REFUSED + UNDECIDED + served.server.service.settings.threads
        assert served.limit.open <= LIMIT + 1
        eventually(served.is_answered, "a client is answered beside them")
    eventually(served.is_quiet, "all have gone")
    assert len(os.listdir(files)) <= before + 2


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_stop_waits_for_no_client(listener: str, tmp_path: Path) -> None:
    long_s = 3600.0
    with contextlib.ExitStack() as stack:
        bounds = {"stall_s": long_s, "idle_timeout_s": long_s, "arrival_timeout_s": long_s}
        served = stack.enter_context(serving(listener, tmp_path, **bounds))
        stack.enter_context(served.connect(handshake=False))
        for message in served.messages.values():
            stack.enter_context(served.connect()).sendall(message)
        eventually(lambda: served.limit.open == 5, "all have come")
        eventually(lambda: served.server.service.inflight.used_bytes, "the answer that nobody reads")
        began_s = time.monotonic()
        served.server.close()
        assert time.monotonic() - began_s < MOST_S
        assert served.server.service.inflight.used_bytes == 0


@pytest.mark.parametrize("listener", ["reactors", "uvicorn"])
def test_a_request_in_progress_at_a_stop_is_answered_in_whole(listener: str, tmp_path: Path) -> None:
    ending_s = 1.0
    with (
        serving(listener, tmp_path, stall_s=60.0, ending_s=ending_s) as served,
        served.connect(room=1 << 20) as one,
    ):
        served.gate.clear()
        one.sendall(served.messages["unread"])
        assert served.asked.wait(60)
        closing = threading.Thread(target=served.server.close)
        closing.start()
        time.sleep(1.2 * ending_s)  # longer than a client has who owes something
        served.gate.set()
        assert len(ends(one)) > LARGE
        closing.join(60)
