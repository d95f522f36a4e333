"""OpenSSL by its own functions: names and ends of certificates, against Python's module; what comes and leaves on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority, Pair
from tests.service.conftest import settings_for
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.service import openssl
from tierstore.service.http.listener import handshake
from tierstore.service.openssl import Context, TlsSession
from tierstore.service.server import ServerThread


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("openssl"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> Context:
    own = authority.issue("service")
    return Context(own.cert, own.key, authority.ca)


def _trusting(authority: Authority, pair: Pair) -> ssl.SSLContext:
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    trusting.load_cert_chain(*pair)
    return trusting


def _ends() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


def _met(context: Context, authority: Authority, pair: Pair) -> tuple[tuple[str, ...], float | None]:
    """What a session says of a client's certificate."""
    ours, theirs = _ends()
    client = threading.Thread(
        target=lambda: _trusting(authority, pair).wrap_socket(theirs, server_hostname="127.0.0.1").close()
    )
    client.start()

    async def met() -> Any:
        session = await handshake(ours, context)
        try:
            return session.certificate()
        finally:
            session.close()

    try:
        return asyncio.run(met())  # type: ignore[no-any-return]
    finally:
        ours.close()
        client.join()


def test_names_of_a_certificate_are_in_order(authority: Authority, context: Context) -> None:
    mixed = authority.issue("mixed", "DNS:d,email:e@f,URI:u,IP:10.0.0.1,DNS:d2")
    names, end_s = _met(context, authority, mixed)
    assert names == ("u", "d", "d2")
    assert end_s == pytest.approx(time.time() + 2 * 86400, abs=3600)
    assert _met(context, authority, authority.issue("broken", "URI:a\x7fb,DNS:c"))[0] == ("c",), (
        "what cannot be printed is no name"
    )
    assert _met(context, authority, authority.issue("addressed", "IP:10.0.0.1"))[0] == ()
    assert _met(context, authority, authority.issue("common", ""))[0] == ("common",)


def test_what_is_no_tls_is_an_error_and_not_the_end_of_the_service(context: Context) -> None:
    ours, theirs = _ends()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionError, match="TLS"):
        asyncio.run(handshake(ours, context))
    ours.close()
    theirs.close()


def test_a_session_that_was_given_on_is_not_freed_twice(context: Context) -> None:
    ours, theirs = _ends()
    first = context.session(ours.fileno())
    second = TlsSession(first.detach())
    first.close()
    second.close()
    ours.close()
    theirs.close()


def test_a_client_that_keeps_a_session_busy_with_handshakes_is_cut_off(authority: Authority, context: Context) -> None:
    """A client asks for new keys at any time, and OpenSSL reads on until there is data."""
    program = shutil.which("openssl")
    assert program is not None
    pair = authority.issue("busy", "DNS:busy")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [program, "s_client", "-connect", f"127.0.0.1:{listener.getsockname()[1]}", "-tls1_3", "-quiet"]
        command[-1:] = ["-cert", str(pair.cert), "-key", str(pair.key)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as client:
            ours, _ = listener.accept()
            ours.setblocking(False)

            async def serve() -> bytes | None:
                session = await handshake(ours, context)
                assert client.stdin is not None
                try:
                    async with asyncio.timeout(60):
                        while True:
                            with contextlib.suppress(BrokenPipeError):
                                client.stdin.write(b"k\n")  # an update of its keys
                                client.stdin.flush()
                            came = session.read()
                            if came is not None:
                                return came
                            await asyncio.sleep(0.001)
                finally:
                    session.close(abort=True)

            assert asyncio.run(serve()) == b""
            ours.close()
            client.kill()


def test_each_thread_reads_into_memory_of_its_own() -> None:
    """OpenSSL runs without the interpreter's lock: two event loops may read at the same time."""
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(lambda: ctypes.addressof(openssl._buffer())).result()
        assert ctypes.addressof(openssl._buffer()) != theirs


def test_the_library_is_found_by_name_where_the_module_has_none_and_said_to_be_missing_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = openssl.library.__wrapped__  # which keeps nothing
    monkeypatch.setattr("_ssl.__file__", "/nowhere/_ssl.so")
    assert find().SSL_read
    monkeypatch.setattr(openssl, "_NAMES", ("libnone.so.3",))
    with pytest.raises(ConfigError, match=r"libnone\.so\.3.*libssl3"):
        find()


def test_a_service_without_tls_ends_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> None:
        raise ConfigError("no OpenSSL here")

    monkeypatch.setattr(openssl, "library", missing)
    settings = settings_for(tmp_path)
    with Store(settings) as store:
        server = ServerThread(store, settings).start()
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            server.close()
        assert server._error is None
