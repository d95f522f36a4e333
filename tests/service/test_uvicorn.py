"""The parts of uvicorn that are not its public interface, and that `http/connection.py` and `http/server.py` rely on.

Where a release changes one of them, this test names it. Then adapt those two modules, and raise the bound on uvicorn's
version in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
    "_start_asgi_task",
    "_unset_keepalive_if_required",
    "_unsupported_upgrade_warning",
)
OF_A_CONNECTION = (
    "app",
    "cycle",
    "flow",
    "loop",
    "pipeline",
    "scheme",
    "scope",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
OF_A_REQUEST = ("disconnected", "keep_alive", "message_event", "response_complete")
OF_A_SERVER = ("capture_signals", "config", "serve", "server_state", "should_exit", "started")


def missing(owner: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


def explained(what: str) -> str:
    return f"uvicorn {uvicorn.__version__}: {what} without what tierstore/service/http/ relies on"


async def silent(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.Event().wait()


def config() -> uvicorn.Config:
    return uvicorn.Config(silent, ws="none", lifespan="off", log_config=None)


async def connection_with_a_request() -> HttpToolsProtocol:
    """A connection on which one request has come that is not answered, and a second behind it."""
    settings = config()
    settings.load()
    here, there = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, protocol = await loop.connect_accepted_socket(
        lambda: HttpToolsProtocol(config=settings, server_state=ServerState(), app_state={}), there
    )
    here.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 2)
    async with asyncio.timeout(30):
        while not protocol.pipeline:
            await asyncio.sleep(0.001)
    here.close()
    return protocol


def test_the_methods_that_are_overridden_or_called_are_there() -> None:
    assert missing(HttpToolsProtocol, METHODS) == [], explained("HttpToolsProtocol")
    parameters = inspect.signature(HttpToolsProtocol.__init__).parameters
    assert {"config", "server_state", "app_state"} <= set(parameters), explained("HttpToolsProtocol.__init__")


def test_the_attributes_of_a_connection_and_its_request_are_there() -> None:
    async def check() -> None:
        protocol = await connection_with_a_request()
        try:
            assert missing(protocol, OF_A_CONNECTION) == [], explained("a connection")
            assert missing(protocol.flow, ("read_paused",)) == [], explained("the flow control of a connection")
            assert missing(protocol.cycle, OF_A_REQUEST) == [], explained("a request")
            first, *_ = protocol.pipeline[-1]
            assert missing(first, OF_A_REQUEST) == [], explained("a request that was sent ahead")
        finally:
            protocol.transport.abort()
            for task in protocol.tasks:
                task.cancel()

    asyncio.run(check())


def test_the_attributes_of_a_server_are_there() -> None:
    server = uvicorn.Server(config())
    assert missing(server, OF_A_SERVER) == [], explained("Server")
    assert missing(server.server_state, ("default_headers", "tasks")) == [], explained("Server.server_state")
    assert missing(server.config, ("get_loop_factory",)) == [], explained("Config")


def test_uvicorns_version_is_bounded() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    (bound,) = (re.search(r"<(\d+)\.(\d+)", each) for each in dependencies if each.startswith("uvicorn"))
    assert bound is not None, "pyproject.toml: uvicorn has no upper bound, though its private parts are relied on"
    installed = tuple(map(int, uvicorn.__version__.split(".")[:2]))
    assert installed < (int(bound[1]), int(bound[2])), "the bound is beyond the release that is tested here"


@pytest.mark.parametrize("name", ["pipeline_of_old"])
def test_a_missing_part_is_named(name: str) -> None:
    assert missing(HttpToolsProtocol, (name,)) == [name]
