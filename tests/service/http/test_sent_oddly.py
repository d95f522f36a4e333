"""What no client should send, and some do: each is told it with a 4xx, and the log has no traceback of it."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tierstore.service.server import ServerThread

DEEP = 1000  # the parsers of JSON go as deep, what shows a value does not
LISTS, OBJECTS = "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP
BODIES = [
    ("/v2/models/one/infer", '{"inputs":%s}'),
    ("/v2/models/one/infer", '{"id":%s,"inputs":[]}'),
    ("/v2/models/one/infer", '{"parameters":{"binary_data_output":%s},"inputs":[]}'),
    ("/v2/models/one/infer", '{"inputs":[{"name":"item_id","datatype":"INT64","shape":%s,"data":[1]}]}'),
    ("/v2/models/one/infer", '{"inputs":[{"name":"item_id","datatype":"INT64","shape":[1],"data":%s}]}'),
    ("/v1/models/one:predict", '{"signature_name":%s,"inputs":[1]}'),
    ("/v1/models/one:predict", '{"instances":%s}'),
    ("/v1/models/one:predict", '{"inputs":%s}'),
    ("/v1/models/one:predict", '{"inputs":%s,"x":NaN}'),
    ("/admin/models/one/snapshots", '{"source":%s}'),
    ("/admin/models/one/canary", "%s"),
    ("/v2/repository/models/one/load", '{"parameters":%s}'),
    ("/v2/systemsharedmemory/region/a/register", '{"key":"a","byte_size":%s}'),
]


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING)
    yield
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.exc_info or record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("nested", [LISTS, OBJECTS], ids=["lists", "objects"])
@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path}-{body[:20]}" for path, body in BODIES])
def test_what_is_nested_very_deep_is_bad_input(http: httpx.Client, path: str, body: str, nested: str) -> None:
    answer = http.post(path, content=body % nested, headers={"content-type": "application/json"})
    # parameters of a load that are not known are passed over, whatever they hold
    assert 400 <= answer.status_code < 500 or (answer.status_code == 200 and path.endswith("/load")), answer.text
    assert len(answer.text) < 1500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/models/one/snapshots", r'{"source":"\ud800"}'),
        ("/admin/models/one/snapshots", r'{"source":"file:///\ud800"}'),
        ("/admin/models/one/snapshots", r'{"source":"a","\ud800":1}'),
        ("/admin/models/one/activate", r'{"version":"\ud800"}'),
        ("/v1/models/one:predict", r'{"inputs":["\ud800"],"x":NaN}'),
        ("/v1/models/one:predict", r'{"inputs":{"\ud800":[1]},"x":NaN}'),
        ("/v2/models/one/infer", r'{"id":"\ud800"}'),
    ],
)
def test_half_a_character_is_bad_input(http: httpx.Client, path: str, body: str) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.text.encode()


@pytest.mark.parametrize(
    "framing",
    ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked, gzip", "Transfer-Encoding: chunked\r\nContent-Length: 5"],
)
def test_a_body_that_nobody_can_find_the_end_of_is_refused_beside_a_wish_for_another_protocol(
    http: httpx.Client, server: ServerThread, framing: str
) -> None:
    for wish in ("", "Connection: Upgrade\r\nUpgrade: websocket\r\n"):
        head = f"POST /v2/repository/models/one/unload HTTP/1.1\r\nHost: localhost\r\n{wish}{framing}\r\n\r\n"
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
            client.makefile("rb") as answer,
        ):
            client.sendall(head.encode())
            said = answer.read()
        assert said.startswith(b"HTTP/1.1 400"), said[:300]
        assert said.count(b"HTTP/1.1 ") == 1, said[:600]
    assert http.get("/v2/models/one/ready").status_code == 200, "nothing was done"


def test_a_client_that_sends_requests_ahead_and_goes_away_is_no_defect(
    http: httpx.Client, server: ServerThread
) -> None:
    """One is being answered when the connection is lost, and is not the one that came last."""
    where = urlsplit(server.url)
    keys = list(range(20_000))
    body = json.dumps(
        {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [len(keys)], "data": keys}]}
    ).encode()
    large = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    half = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{"
    ahead = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + large + half
    for i in range(40):
        with socket.create_connection((where.hostname, where.port), timeout=60) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(ahead)
            time.sleep(0.001 * (i % 6))
            client.recv(100)
    assert http.get("/v2/health/live").status_code == 200
