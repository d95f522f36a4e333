"""TLS between the event loop's transport and a protocol, with a client whose bytes are made here."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tierstore.service.http.tls_transport import TlsTransport


class Raw(asyncio.Transport):
    """The event loop's transport; once `fails` is set, it breaks at the next write, as after a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.fails, self._closing = bytearray(), False, False

    def write(self, data: Any) -> None:
        if self.fails:
            self._closing = True
        else:
            self.sent += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True


class Refusing(asyncio.Protocol):
    """Answers whatever comes, and closes if that is not under way."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.got = transport, b""

    def data_received(self, data: bytes) -> None:
        self.got += data
        self.transport.write(b"no")
        if not self.transport.is_closing():
            self.transport.close()

    def eof_received(self) -> None:
        self.ended = True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True], ids=["a client that reads", "a client that is gone"])
def test_a_client_that_ends_its_side_behind_a_request_is_served_and_let_go(tmp_path: Path, fails: bool) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    raw, protocol = Raw(), Refusing()
    transport = TlsTransport(context, protocol)
    transport.connection_made(raw)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    client = trusting.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")

    def exchange(step: Any) -> None:
        while True:
            try:
                step()
                return
            except ssl.SSLWantReadError:
                transport.data_received(to_server.read())
                to_client.write(bytes(raw.sent))
                raw.sent.clear()

    exchange(client.do_handshake)
    transport.data_received(to_server.read())
    client.write(b"request")
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    raw.sent.clear()
    raw.fails = fails
    transport.data_received(to_server.read())
    assert protocol.got == b"request"
    assert transport.is_closing()
    assert bool(raw.sent) is not fails
