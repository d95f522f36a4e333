"""The application without compiled threads: as any ASGI server drives it, and under uvicorn."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

import tierstore
from tests.service.conftest import eventually, settings_for
from tests.service.raw_clients import request
from tests.service.scenes import KEYS, delta, items, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.service import application
from tierstore.service.application import ServiceApplication
from tierstore.service.context import Service
from tierstore.service.server import ServerThread, grpc_port_by_default

DOCUMENTED = "tierstore.service:app --http h11 --timeout-graceful-shutdown 5 --limit-concurrency 1000"
LOOK_UP = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [len(KEYS)], "data": KEYS.tolist()}]}


def loaded(path: Path, **more: Any) -> Any:
    settings = settings_for(path, **more)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(path))
    return settings


async def living(app: ServiceApplication, use: Any) -> Any:
    """What `use` returns while the application lives."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    inbox.put_nowait({"type": "lifespan.startup"})
    life = asyncio.create_task(app({"type": "lifespan"}, inbox.get, outbox.put))
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        return await use()
    finally:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await life
        assert outbox.get_nowait()["type"] == "lifespan.shutdown.complete"


def test_the_application_answers_without_a_socket(tmp_path: Path) -> None:
    app = ServiceApplication(loaded(tmp_path))

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.get("/healthz"),
                await client.post("/v2/models/ctr/infer", json=LOOK_UP, headers={"x-request-id": "a"}),
                await client.post("/v2/models/ctr/infer", content=b"no JSON"),
                await client.post("/admin/models/ctr/deltas", content=delta(1, {1: 5.0})),
                await client.get("/metrics"),
                await client.get("/", headers={"host": "elsewhere.example"}),
            ]

    answers = asyncio.run(living(app, ask))
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200, 200, 403]
    rows = answers[1].json()["outputs"][0]["data"]
    np.testing.assert_allclose(np.array(rows, np.float32).reshape(len(KEYS), -1), items(KEYS))
    assert answers[1].headers["x-request-id"] == "a"


@pytest.mark.parametrize("end", ["the client leaves", "the request is cancelled"])
def test_a_delta_that_breaks_off_holds_no_bytes(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, made = ServiceApplication(loaded(tmp_path)), []

    def make(*of: Any) -> Service:
        made.append(Service(*of))
        return made[0]

    monkeypatch.setattr(application, "Service", make)
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/admin/models/ctr/deltas", "scheme": "http",
        "raw_path": b"/admin/models/ctr/deltas", "query_string": b"", "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip

    async def ask() -> list[int]:
        (service,), came, held = made, asyncio.Event(), list[int]()
        parts = [{"type": "http.request", "body": bytes(1000), "more_body": True}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            held.append(service.delta_bytes.used_bytes)
            came.set()
            if end == "the client leaves":
                return {"type": "http.disconnect"}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            pass

        call = asyncio.create_task(app(scope, receive, send))
        await came.wait()
        if end == "the request is cancelled":
            call.cancel()
        await asyncio.wait([call])
        return [*held, service.delta_bytes.used_bytes]

    assert asyncio.run(living(app, ask)) == [1000, 0]
    if end == "the client leaves":
        lines = map(json.loads, (tmp_path / "data/audit/deltas.jsonl").open())
        (line,) = [line for line in lines if line["what"] == "delta"]
        assert (line["outcome"], line["error"]) == ("failed", "the body ended early")


def test_a_store_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    app, sent = ServiceApplication(settings_for(tmp_path, admin_listen="127.0.0.1:0")), []

    async def start() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app({"type": "lifespan"}, receive, send)

    with pytest.raises(ConfigError, match="admin_listen"):
        asyncio.run(start())
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]


def test_uvicorn_serves_the_application_by_its_name(tmp_path: Path) -> None:
    settings = loaded(tmp_path)
    command = [sys.executable, "-m", "uvicorn", *DOCUMENTED.split(), "--port", "0"]
    environment = os.environ | {"TIERSTORE_DATA": str(settings.data)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stderr is not None
            url = next(word for line in process.stderr for word in line.split() if word.startswith("http://"))
            with tierstore.Client(url) as client:
                np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=60) as sock:
                sock.sendall(request("http://evil.example/v2"))
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 403"), "the name in the target counts"
                process.terminate()
                process.wait(60)
        finally:
            process.kill()
    with Store(settings) as store:  # it was closed
        assert store.models() == ["ctr"]


def test_the_command_for_uvicorn_is_the_documented_one() -> None:
    page = Path(__file__).parents[2] / "docs/overload.md"
    assert f"uvicorn {DOCUMENTED}" in page.read_text(encoding="utf-8")


def test_with_uvicorn_as_the_server_no_reactor_runs(tmp_path: Path) -> None:
    settings = loaded(tmp_path, server="uvicorn")
    with Store(settings) as store, ServerThread(store, settings) as server, tierstore.Client(server.url) as client:
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
        assert client.apply_delta(delta(1, {1: 5.0}), model="ctr").applied
        assert not server._http._reactors.running
    with pytest.raises(ConfigError, match="gRPC is served by reactors alone"):
        grpc_port_by_default(settings.model_copy(update={"grpc_port": 8001}))


def test_with_uvicorn_too_the_name_in_the_target_is_the_one_that_counts(tmp_path: Path) -> None:
    settings = loaded(tmp_path, server="uvicorn")
    with Store(settings) as store, ServerThread(store, settings) as server:
        for target, host, status in (
            ("http://localhost/v2", "localhost", 200),
            ("http://localhost/v2/models/c%74r?x=1", "evil.example", 200),
            ("http://localhost/livez", "localhost", 200),
            ("http://evil.example/v2", "localhost", 403),
            ("http://localhost", "localhost", 200),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.putrequest("GET", target, skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            assert (answer.status, target) == (status, target), answer.read()
            connection.close()


def test_uvicorn_is_used_as_it_comes() -> None:
    """No class of ours is one of uvicorn's, and no private name of it is read."""
    assert [of.__subclasses__() for of in (uvicorn.Server, uvicorn.Config, H11Protocol)] == [[], [], []]
    for module in ("asgi", "bounded"):
        text = (Path(tierstore.__file__).parent / f"service/http/{module}.py").read_text(encoding="utf-8")
        assert not re.search(r"_(server|config|protocol)\._", text)


def test_a_stop_answers_what_uvicorn_has(tmp_path: Path) -> None:
    settings = loaded(tmp_path, server="uvicorn")
    with Store(settings) as store, ServerThread(store, settings) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.get("/v2/health/ready").status_code == 200
            server.stop(drain_s=60)
            eventually(lambda: client.get("/v2/health/ready").status_code == 400, "it reports that it is not ready")
            assert client.get("/v2/health/live").headers["connection"] == "close"
        server.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/v2/health/live")
