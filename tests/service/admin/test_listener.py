"""A listener of their own for admin requests: what the other ports refuse then, who may use it, and how it ends."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.extras import has_grpc
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.scenes import KEYS, delta, items, write_snapshot
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.client import AsyncClient, Client
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, Forbidden, Overloaded, Unauthorized, Unreachable
from tierstore.service.addresses import parse_listen
from tierstore.service.server import ADMIN_CONNECTIONS, ServerThread, check_settings

REFUSED = [
    ("GET", "/admin/models"),
    ("GET", "/ADMIN/models"),
    ("POST", "/admin/models/ctr/deltas"),
    ("POST", "/admin/models/ctr/activate"),
    ("GET", "/admin/jobs/x"),
    ("POST", "/v2/repository/models/ctr/load"),
    ("POST", "/v2/repository/models/ctr/unload"),
    ("GET", "/nowhere"),
]
SERVED = [("GET", "/v2/health/live"), ("GET", "/v2"), ("GET", "/v2/models/ctr"), ("GET", "/metrics"), ("GET", "/")]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServerThread]:
    settings = settings_for(tmp_path, grpc_port=GRPC, admin_listen=f"unix:{tmp_path}/admin.sock", max_connections=2)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store, settings) as server:
            yield server


def path_of(server: ServerThread) -> Path:
    return Path(server.admin_url.removeprefix("unix:"))


def test_admin_requests_are_served_there_alone(served: ServerThread) -> None:
    through = httpx.HTTPTransport(uds=str(path_of(served)))
    with (
        httpx.Client(base_url=served.url, timeout=60) as main,
        httpx.Client(base_url="http://localhost", transport=through, timeout=60) as admin,
    ):
        for method, path in SERVED:
            assert main.request(method, path).status_code == 200, path
            assert admin.request(method, path).status_code == 200, path
        for method, path in REFUSED:
            answer = main.request(method, path, json={})
            assert (answer.status_code, "admin_listen" in answer.text) == (403, True), (method, path)
            assert "admin_listen" not in admin.request(method, path, json={}).text, (method, path)


def test_every_admin_path_that_the_service_names_is_refused_elsewhere(served: ServerThread) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as main:
        paths = main.get("/openapi.json").json()["paths"]
        named = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert sum(path.startswith("/admin/") for _, path in named) > 12
        for method, path in named:
            filled = path.replace("{model}", "elsewhere").replace("{version}", "1").replace("{", "").replace("}", "")
            answer = main.request(method, filled, json={})
            assert ("admin_listen" in answer.text) == path.startswith("/admin/"), (method, path)


def test_both_clients_work_through_the_socket(served: ServerThread) -> None:
    with Client(served.admin_url) as client, Client(served.url) as main:
        assert client.status()["models"]["ctr"]["active_version"] is not None
        for one in (client, main):
            np.testing.assert_array_equal(one.lookup("ctr", "item_id", KEYS), items(KEYS))
        with pytest.raises(Forbidden, match="admin_listen alone"):
            main.status()

    async def waited() -> Any:
        client = AsyncClient(served.admin_url)
        try:
            return await client.lookup("ctr", "item_id", KEYS), await client.models()
        finally:
            await client.close()

    rows, models = asyncio.run(waited())
    np.testing.assert_array_equal(rows, items(KEYS))
    assert models == ["ctr"]


@pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
def test_grpc_refuses_what_is_for_admins(served: ServerThread) -> None:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(served.grpc_target) as client:
        assert client.is_model_ready("ctr")
        for call in (client.load_model, client.unload_model):
            with pytest.raises(triton.InferenceServerException, match="admin_listen alone"):
                call("ctr")


def test_it_has_connections_of_its_own(served: ServerThread) -> None:
    """Those of the main port are used up: an operator still gets in. And the other way round."""
    address = ("127.0.0.1", served.port)
    busy = [socket.create_connection(address, 30) for _ in range(2)]
    idle = []
    try:
        with Client(served.admin_url, retries=0) as client:
            assert client.ready()
            with Client(served.url, retries=0) as main, pytest.raises(Overloaded):
                main.lookup("ctr", "item_id", KEYS)
        limit: Any = served.service.admin_connections
        eventually(lambda: limit.open == 0, "the client's connection to be counted off")
        for _ in range(ADMIN_CONNECTIONS):
            sock = socket.socket(socket.AF_UNIX)
            idle.append(sock)
            sock.connect(str(path_of(served)))
        eventually(lambda: limit.open == ADMIN_CONNECTIONS, "all to be counted")
        with Client(served.url) as main:
            text = main.metrics() if hasattr(main, "metrics") else httpx.get(f"{served.url}/metrics").text
        assert "tierstore_admin_connections 64.0" in text
        busy.pop().close()
        with Client(served.url) as main:
            main.lookup("ctr", "item_id", KEYS)
    finally:
        for sock in (*busy, *idle):
            sock.close()


def test_the_socket_is_for_its_user_alone_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
        left_behind.listen()
    settings = settings_for(tmp_path, admin_listen=f"unix:{path}", grpc_port="off")
    with Store(settings) as store:
        with ServerThread(store, settings) as server:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with Client(server.admin_url) as client:
                assert client.ready()
            with pytest.raises(ConfigError, match=r"cannot listen on unix:.*admin.sock"):
                ServerThread(store, settings)
            with Client(server.admin_url) as client:
                assert client.ready()
        assert not path.exists()
        with (
            Client(f"unix:{path}", retries=0) as client,
            pytest.raises(Unreachable, match="no service answers at unix:"),
        ):
            client.ready()


def test_a_file_that_is_no_socket_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    settings = settings_for(tmp_path, admin_listen=f"unix:{path}", grpc_port="off")
    with Store(settings) as store, pytest.raises(ConfigError, match=r"cannot listen on unix:.*precious"):
        ServerThread(store, settings)
    assert path.read_text() == "data"


def test_over_tcp_and_with_tokens_it_needs_them_too(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, admin_listen="127.0.0.1:0", grpc_port="off")
    held = TokenFile(settings.data / "tokens.json")
    (_, admin), (_, writer) = held.create(Role.ADMIN), held.create(Role.WRITER)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store, settings) as server:
            assert server.admin_url.startswith("http://127.0.0.1:")
            assert server.admin_url != server.url
            with Client(server.admin_url) as nobody, pytest.raises(Unauthorized):
                nobody.status()
            with Client(server.admin_url, token=admin) as client:
                assert client.models() == ["ctr"]
            with Client(server.url, token=admin) as client, pytest.raises(Forbidden, match="admin_listen alone"):
                client.status()
            with Client(server.admin_url, token=writer) as client:
                assert client.apply_delta(delta(1, {1: 5.0}), model="ctr").applied
                with pytest.raises(Forbidden, match="has the role writer"):
                    client.activate("ctr", 1)


def test_addresses_of_the_listener_are_checked(tmp_path: Path) -> None:
    assert parse_listen("unix:/run/tierstore.sock") == Path("/run/tierstore.sock")
    assert parse_listen("127.0.0.1:9000") == ("127.0.0.1", 9000)
    assert parse_listen("[::1]:9000") == ("::1", 9000)
    for text in ("unix:", "9000", "localhost", "localhost:x", ":9000", "localhost:70000", ""):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_listen(text)
    with pytest.raises(ConfigError, match=r"'0.0.0.0' is not a loopback address"):
        check_settings(settings_for(tmp_path, admin_listen="0.0.0.0:9000"))


def test_bytes_that_are_no_request_end_their_connection(served: ServerThread) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path_of(served)))
        sock.sendall(os.urandom(64) + b"\r\n\r\n")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 400
