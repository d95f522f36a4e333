"""TLS on both ports: real certificates and handshakes, callers by their certificates, files that change while it runs."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.certificates import Authority, Pair
from tests.extras import has_grpc
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.scenes import KEYS, items, write_snapshot
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.client import AsyncClient, Client
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, Forbidden, Unauthorized, Unreachable
from tierstore.service.server import ServerThread, check_settings

needs_grpc = pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
TRAINER = "spiffe://example/trainer"


class Scene(NamedTuple):
    """A service where every client needs a certificate, and two of them have roles."""

    server: ServerThread
    authority: Authority
    files: dict[str, Pair]  # clients, by the common name
    secret: str  # a reader's

    def target(self, port: str) -> str:
        """Where a gRPC client goes: both ports speak it."""
        return f"127.0.0.1:{self.server.port if port == 'HTTP' else self.server.grpc_port}"

    def client(self, name: str, **options: Any) -> Client:
        pair = self.files[name]
        return Client(self.server.url, ca=self.authority.ca, cert=pair.cert, key=pair.key, retries=0, **options)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def scene(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("tls")
    own = authority.issue("service", "IP:127.0.0.1,DNS:localhost")
    files = {
        "trainer": authority.issue("trainer", f"URI:{TRAINER},DNS:trainer.example"),
        "ranker": authority.issue("ranker", ""),
        "other": authority.issue("other", "DNS:other.example"),
        "posing": authority.issue(TRAINER, "IP:127.0.0.1", into="posing"),
    }
    settings = settings_for(
        root, grpc_port=GRPC, tls_cert=own.cert, tls_key=own.key, tls_client_ca=authority.ca, allow_client_shm=True
    )
    held = TokenFile(settings.data / "tokens.json")
    held.admit(TRAINER, Role.ADMIN)
    held.admit("ranker", Role.READER, ["ctr"])
    _, secret = held.create(Role.READER)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store, settings) as server:
            yield Scene(server, authority, files, secret)


def test_both_clients_look_up_with_a_certificate(scene: Scene) -> None:
    assert scene.server.url.startswith("https://")
    with scene.client("trainer") as client:
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
        assert "ctr" in client.status()["models"]  # for a role of all models
    pair = scene.files["ranker"]

    async def waited() -> Any:
        client = AsyncClient(scene.server.url, ca=scene.authority.ca, cert=pair.cert, key=pair.key)
        try:
            return await client.lookup("ctr", "item_id", KEYS)
        finally:
            await client.close()

    np.testing.assert_array_equal(asyncio.run(waited()), items(KEYS))


def test_large_answers_pass_and_the_connection_is_used_again(scene: Scene) -> None:
    keys = np.resize(KEYS, 30_000)
    with scene.client("trainer", max_connections=1) as client:
        for _ in range(3):
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", keys), items(keys))


def test_a_certificate_has_the_role_of_its_entry_and_no_other(scene: Scene) -> None:
    with scene.client("ranker") as client:
        client.lookup("ctr", "item_id", KEYS)
        with pytest.raises(Forbidden, match="certificate ranker has the role reader"):
            client.activate("ctr", 1)
        with pytest.raises(Forbidden, match="certificate ranker is for ctr alone"):
            client.lookup("third", "item_id", KEYS)
    with (
        scene.client("other") as client,
        pytest.raises(Unauthorized, match=r"'other\.example' has no role here"),
    ):
        client.lookup("ctr", "item_id", KEYS)
    with scene.client("posing") as client, pytest.raises(Unauthorized, match="takes a token"):
        client.lookup("ctr", "item_id", KEYS)
    with scene.client("other", token=scene.secret) as client:  # a token counts more than a certificate
        client.lookup("ctr", "item_id", KEYS)
        with pytest.raises(Forbidden, match="has the role reader"):
            client.activate("ctr", 1)


def test_without_a_certificate_or_with_one_of_another_authority_nobody_gets_in(scene: Scene, tmp_path: Path) -> None:
    with Client(scene.server.url, ca=scene.authority.ca, retries=0) as client, pytest.raises(Unreachable):
        client.lookup("ctr", "item_id", KEYS)
    foreign = Authority(tmp_path, "foreign").issue("trainer", f"URI:{TRAINER}")
    with (
        Client(scene.server.url, ca=scene.authority.ca, cert=foreign.cert, key=foreign.key, retries=0) as client,
        pytest.raises(Unreachable),
    ):
        client.lookup("ctr", "item_id", KEYS)
    with Client(scene.server.url, retries=0) as client, pytest.raises(Unreachable, match="certificate"):
        client.ready()


# --- who answers


@pytest.mark.parametrize("name", ["trainer", "ranker", "other"])
def test_look_ups_are_answered_by_reactors_for_whoever_may(scene: Scene, name: str) -> None:
    secret = scene.secret if name == "other" else None  # its certificate has no role
    reactors = scene.server.service.reactors
    with scene.client(name, token=secret, max_connections=1) as client:

        def is_answered_there() -> bool:
            before = reactors.answers
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
            return reactors.answers > before

        eventually(is_answered_there, "a reactor's answer")
        assert client.ready()  # by Python, and the connection goes back
        eventually(is_answered_there, "a reactor's answer")
    with scene.client("other") as client, pytest.raises(Unauthorized, match="has no role"):
        client.lookup("ctr", "item_id", KEYS)


@needs_grpc
@pytest.mark.parametrize("port", ["gRPC", "HTTP"])
def test_look_ups_over_grpc_are_answered_by_reactors(scene: Scene, port: str) -> None:
    import tritonclient.grpc as triton

    pair, reactors = scene.files["trainer"], scene.server.service.reactors
    files = {"root_certificates": str(scene.authority.ca), "private_key": str(pair.key)}
    with triton.InferenceServerClient(
        scene.target(port), ssl=True, certificate_chain=str(pair.cert), **files
    ) as client:

        def is_answered_there(asked: np.ndarray) -> bool:
            before = reactors.answers
            keys = triton.InferInput("item_id", [len(asked)], "INT64")
            keys.set_data_from_numpy(asked)
            np.testing.assert_array_equal(client.infer("ctr", [keys]).as_numpy("item_id"), items(asked))
            return reactors.answers > before

        for asked in (KEYS, np.resize(KEYS, 10_000)):  # which the socket does not take at once
            eventually(lambda asked=asked: is_answered_there(asked), "a reactor's answer")


def _asked_at_once(scene: Scene, version: ssl.TLSVersion, request: bytes) -> bytes:
    """The beginning of the answer to a request that comes in one piece with the end of the client's handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = _client_context(scene, "trainer", version).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", scene.server.port), 30) as sock:

        def step(do: Any) -> Any:
            while True:
                try:
                    return do()
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    incoming.write(sock.recv(1 << 16))

        step(tls.do_handshake)
        tls.write(request)
        return bytes(step(lambda: tls.read(15)))


@pytest.mark.parametrize(
    "head", [b"GET /v2 HTTP/1.1\r\n", b"POST /v2/models/ctr/infer HTTP/1.1\r\nContent-Length: 0\r\n"]
)
def test_a_request_in_one_piece_with_the_end_of_the_handshake_is_answered(scene: Scene, head: bytes) -> None:
    answer = _asked_at_once(scene, ssl.TLSVersion.TLSv1_3, head + b"Host: localhost\r\n\r\n")
    assert answer == (b"HTTP/1.1 200 OK" if head.startswith(b"GET") else b"HTTP/1.1 400 Ba")


def test_requests_that_come_byte_by_byte_and_many_at_once_are_answered_in_their_order(scene: Scene) -> None:
    context = _client_context(scene, "trainer", ssl.TLSVersion.TLSv1_3)
    request = b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    with (
        socket.create_connection(("127.0.0.1", scene.server.port), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        for i in range(len(request)):
            sock.sendall(request[i : i + 1])
        sock.sendall(20 * request)
        answers = b""
        while answers.count(b"HTTP/1.1 400 ") < 21:
            data = sock.recv(1 << 16)
            assert data
            answers += data


def test_the_end_of_the_service_is_said_in_tls(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("ending")
    settings = settings_for(tmp_path, tls_cert=own.cert, tls_key=own.key)
    context = ssl.create_default_context(cafile=str(authority.ca))
    with Store(settings) as store, ServerThread(store, settings) as server:
        address = ("127.0.0.1", server.port)
        with context.wrap_socket(
            socket.create_connection(address, 30), server_hostname="127.0.0.1", suppress_ragged_eofs=False
        ) as sock:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            eventually(lambda: server.service.reactors.idle is False, "the connection to be a reactor's")
            server.close()
            assert sock.recv(1) == b""  # raises where the connection has ended without a word


VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def _session(scene: Scene, port: int, context: ssl.SSLContext, before: ssl.SSLSession | None = None) -> Any:
    """(what is answered to a request, or to the preface of HTTP/2; the session; whether it is the one `before`)."""
    request = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    if port != scene.server.port:
        request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with (
        socket.create_connection(("127.0.0.1", port), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=before) as sock,
    ):
        sock.sendall(request)
        try:
            return sock.recv(4096), sock.session, sock.session_reused
        except ConnectionResetError:
            return b"", sock.session, sock.session_reused


def _client_context(scene: Scene, name: str, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(scene.authority.ca))
    context.load_cert_chain(*scene.files[name])
    context.maximum_version = version
    return context


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("where", ["port", "grpc_port"])
def test_a_session_that_is_resumed_does_not_outlive_its_certificate(
    scene: Scene, version: ssl.TLSVersion, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL looks at a certificate in whole handshakes alone."""
    context, port = _client_context(scene, "trainer", version), getattr(scene.server, where)
    _, session, _ = _session(scene, port, context)
    answer, session, resumed = _session(scene, port, context, session)
    assert (answer.startswith(b"HTTP/1.1 200 OK" if where == "port" else bytes(2)), resumed) == (True, True)
    later = time.time() + 3 * 86400  # certificates of the tests are good for two days
    monkeypatch.setattr("tierstore.service.tls.time", SimpleNamespace(time=lambda: later))
    answer, _, resumed = _session(scene, port, context, session)
    assert (answer, resumed) == (b"", True)
    eventually(lambda: scene.server.service.connection_limit.open == 0, "the connections to be counted off")


def test_what_is_no_tls_ends_its_connection_alone_and_writes_no_traceback(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", scene.server.port)
    with caplog.at_level(logging.WARNING):
        for data in (b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01" + bytes(64), b""):
            with socket.create_connection(address, 30) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
        with scene.client("trainer") as client:
            assert client.ready()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    eventually(lambda: scene.server.service.connection_limit.open <= 1, "the connections to be counted off")


def test_a_handshake_that_never_ends_holds_nobody_up(scene: Scene) -> None:
    address = ("127.0.0.1", scene.server.port)
    silent = [socket.create_connection(address, 30) for _ in range(50)]
    try:
        began = time.monotonic()
        with scene.client("trainer") as client:
            assert client.ready()
        assert time.monotonic() - began < 8, "less than the time that a handshake has"
    finally:
        for sock in silent:
            sock.close()


def test_a_stop_does_not_wait_for_idle_clients(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("stopping")
    settings = settings_for(tmp_path, grpc_port=GRPC, tls_cert=own.cert, tls_key=own.key)
    context = ssl.create_default_context(cafile=str(authority.ca))
    with Store(settings) as store, ServerThread(store, settings) as server:
        idle = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
        idle.request("GET", "/v2/health/live")
        assert idle.getresponse().read() == b'{"live":true}'
        unfinished = socket.create_connection(("127.0.0.1", server.port), 30)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 9, "less than the time that a handshake has"
        assert idle.sock.recv(1) == b""
        idle.close()
        unfinished.close()


def test_half_a_request_and_then_the_end_is_no_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context(cafile=str(scene.authority.ca))
    context.load_cert_chain(*scene.files["trainer"])
    connection = http.client.HTTPSConnection("127.0.0.1", scene.server.port, context=context, timeout=60)
    with caplog.at_level(logging.WARNING):
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b'{"live":true}'
        connection.sock.unwrap()
        connection.close()
    assert caplog.records == []


@needs_grpc
@pytest.mark.parametrize("port", ["gRPC", "HTTP"])
def test_the_same_over_grpc(scene: Scene, port: str) -> None:
    import grpc
    import tritonclient.grpc as triton

    def called(name: str, secret: str | None = None) -> Any:
        pair = scene.files[name]
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        keys = triton.InferInput("item_id", [len(KEYS)], "INT64")
        keys.set_data_from_numpy(np.asarray(KEYS, np.int64))
        options = {"root_certificates": str(scene.authority.ca), "private_key": str(pair.key)}
        with triton.InferenceServerClient(
            scene.target(port), ssl=True, certificate_chain=str(pair.cert), **options
        ) as client:
            assert client.is_server_live()
            client.get_server_metadata(headers=headers)
            rows = client.infer("ctr", [keys], headers=headers).as_numpy("item_id")
            try:
                client.load_model("ctr", headers=headers)
            except triton.InferenceServerException as error:
                return rows, error.status()
            return rows, None

    for name, secret, status in (
        ("trainer", None, None),
        ("ranker", None, "StatusCode.PERMISSION_DENIED"),
        ("other", scene.secret, "StatusCode.PERMISSION_DENIED"),
    ):
        rows, refused = called(name, secret)
        np.testing.assert_array_equal(rows, items(KEYS))
        assert refused == status, name
    for name, words in (("other", "has no role here"), ("posing", "takes a token")):
        with pytest.raises(Exception, match=words):
            called(name)
    trusted = grpc.ssl_channel_credentials(scene.authority.ca.read_bytes())
    with grpc.secure_channel(scene.target(port), trusted) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30)


@needs_grpc
@pytest.mark.parametrize("port", ["gRPC", "HTTP"])
def test_streams_over_grpc_know_their_callers_too(scene: Scene, port: str) -> None:
    import grpc

    def outcome(path: str, name: str) -> Any:
        pair = scene.files[name]
        trusted = grpc.ssl_channel_credentials(
            scene.authority.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes()
        )
        with grpc.secure_channel(scene.target(port), trusted) as channel:
            try:
                return list(channel.stream_stream(path)(iter([b""]), timeout=60))
            except grpc.RpcError as error:
                return error.code()

    infer, reflection = (
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    )
    for path in (infer, reflection):
        assert outcome(path, "other") is grpc.StatusCode.UNAUTHENTICATED, path
        assert isinstance(outcome(path, "trainer"), list), path


def test_tritonclient_over_https(scene: Scene) -> None:
    import tritonclient.http as triton

    pair = scene.files["ranker"]
    options = {"ca_certs": str(scene.authority.ca), "certfile": str(pair.cert), "keyfile": str(pair.key)}
    keys = triton.InferInput("item_id", [len(KEYS)], "INT64")
    keys.set_data_from_numpy(np.asarray(KEYS, np.int64))
    address = scene.server.url.removeprefix("https://")
    with triton.InferenceServerClient(address, ssl=True, ssl_options=options) as client:
        np.testing.assert_array_equal(client.infer("ctr", [keys]).as_numpy("item_id"), items(KEYS))


@needs_grpc
def test_memory_that_a_caller_shares_is_for_that_caller(scene: Scene) -> None:
    """Over HTTP and gRPC: another reader finds no such region, in the request that worked before either."""
    import tritonclient.grpc as triton_grpc
    import tritonclient.http as triton
    from tritonclient.utils import shared_memory as shm

    handle = shm.create_shared_memory_region("mine", "/tests-mine", 4096)
    shm.set_shared_memory_region(handle, [np.asarray(KEYS, np.int64)])
    pairs = {name: scene.files[name] for name in ("trainer", "ranker")}
    clients: dict[str, Any] = {}
    for name, pair in pairs.items():
        options = {"ca_certs": str(scene.authority.ca), "certfile": str(pair.cert), "keyfile": str(pair.key)}
        address = scene.server.url.removeprefix("https://")
        clients[name] = triton.InferenceServerClient(address, ssl=True, ssl_options=options)
        files = {"private_key": str(pair.key), "certificate_chain": str(pair.cert)}
        clients[f"{name} over gRPC"] = triton_grpc.InferenceServerClient(
            scene.server.grpc_target, ssl=True, root_certificates=str(scene.authority.ca), **files
        )
    stranger = {"authorization": f"Bearer {scene.secret}"}

    def rows(name: str, headers: dict[str, str] | None = None) -> Any:
        module = triton_grpc if "gRPC" in name else triton
        keys = module.InferInput("item_id", [len(KEYS)], "INT64")
        keys.set_shared_memory("mine", 8 * len(KEYS))
        return clients[name].infer("ctr", [keys], headers=headers).as_numpy("item_id")

    try:
        clients["ranker"].register_system_shared_memory("mine", "/tests-mine", 4096)
        for name in clients:  # the trainer is an admin
            for _ in range(2):
                np.testing.assert_array_equal(rows(name), items(KEYS))
            with pytest.raises(Exception, match="no shared memory region"):
                rows(name, stranger)
            clients[name].unregister_system_shared_memory(headers=stranger)
            status = clients[name].get_system_shared_memory_status(headers=stranger)
            assert not (status.regions if "gRPC" in name else status)
        clients["ranker over gRPC"].unregister_system_shared_memory("mine")
        with pytest.raises(Exception, match="no shared memory region"):
            rows("ranker")
    finally:
        for client in clients.values():
            client.close()
        shm.destroy_shared_memory_region(handle)


# --- certificates that change


@pytest.fixture
def renewed(authority: Authority, tmp_path: Path) -> Iterator[tuple[ServerThread, Pair, Authority]]:
    """A service with TLS, without certificates of clients; and its files."""
    first = authority.issue("first", into="renewed")
    own = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")
    _replace(own, first)
    settings = settings_for(tmp_path, grpc_port=GRPC, tls_cert=own.cert, tls_key=own.key)
    with Store(settings) as store, ServerThread(store, settings) as server:
        yield server, own, authority


def _replace(own: Pair, new: Pair) -> None:
    for file, source in zip(own, new, strict=True):
        shutil.copy(source, f"{file}.new")
        os.replace(f"{file}.new", file)


def _shown(port: int, authority: Authority) -> str:
    """The common name of the certificate that a port shows to a new connection."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    with (
        socket.create_connection(("127.0.0.1", port), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        (((_, name),),) = sock.getpeercert()["subject"]
        return str(name)


def test_new_connections_get_a_new_certificate_and_old_ones_go_on(
    renewed: tuple[ServerThread, Pair, Authority],
) -> None:
    server, own, authority = renewed
    ports = [port for port in (server.port, server.grpc_port) if port is not None]
    context = ssl.create_default_context(cafile=str(authority.ca))
    old = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
    old.request("GET", "/v2/health/live")
    assert old.getresponse().read() == b'{"live":true}'
    assert [_shown(port, authority) for port in ports] == ["first"] * len(ports)
    _replace(own, authority.issue("second"))
    for port in ports:
        eventually(lambda port=port: _shown(port, authority) == "second", "the new certificate")
    old.request("GET", "/v2/health/live")
    assert old.getresponse().status == 200
    old.close()


def test_a_broken_new_certificate_changes_nothing_and_is_a_problem_in_the_status(
    renewed: tuple[ServerThread, Pair, Authority], caplog: pytest.LogCaptureFixture
) -> None:
    server, own, authority = renewed
    with Client(server.url, ca=authority.ca) as client:
        assert client.status()["service"]["problems"] == []
        other = authority.issue("third")
        pair = own.cert.read_bytes()
        own.cert.unlink()
        os.mkfifo(own.cert)  # which nobody writes to
        eventually(lambda: client.status()["service"]["problems"], "the problem")
        assert "expected a regular file, found a named pipe" in client.status()["service"]["problems"][0]
        own.cert.unlink()
        own.cert.write_bytes(pair)
        eventually(lambda: not client.status()["service"]["problems"], "the first pair")
        caplog.clear()
        shutil.copy(other.cert, own.cert)  # and not its key
        eventually(lambda: client.status()["service"]["problems"], "the problem")
        (problem,) = client.status()["service"]["problems"]
        assert str(own.cert) in problem
        assert sum("certificates are not read again" in record.getMessage() for record in caplog.records) == 1
        assert _shown(server.port, authority) == "first"
        shutil.copy(other.key, own.key)
        eventually(lambda: _shown(server.port, authority) == "third", "the whole pair")
        assert client.status()["service"]["problems"] == []


# --- settings


def test_settings_that_do_not_go_together_are_refused(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.issue("own"), authority.issue("another")
    locked = tmp_path / "locked.key"
    locks = ["pkey", "-in", str(own.key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(["openssl", *locks], check=True)
    for options, match in (
        ({"tls_cert": own.cert}, "tls_cert and tls_key together"),
        ({"tls_client_ca": authority.ca}, "tls_client_ca needs tls_cert"),
        ({"tls_cert": own.cert, "tls_key": tmp_path / "none"}, "tls_key: cannot read .*none: No such file"),
        ({"tls_cert": own.cert, "tls_key": other.key}, "expected a certificate and its key"),
        ({"tls_cert": own.cert, "tls_key": locked}, "the key is encrypted"),
        ({"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": own.key}, "tls_client_ca .*certificates in PEM"),
    ):
        with pytest.raises(ConfigError, match=match):
            check_settings(settings_for(tmp_path, **options))


def test_tokens_beyond_loopback_without_tls_are_warned_of(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = authority.issue("own")
    settings = settings_for(tmp_path, host="0.0.0.0")
    TokenFile(settings.data / "tokens.json").create(Role.ADMIN)
    check_settings(settings_for(tmp_path, host="0.0.0.0", tls_cert=own.cert, tls_key=own.key))
    assert caplog.records == []
    check_settings(settings)
    assert "tokens cross the network in clear" in caplog.text
    assert len(caplog.records) == 1
