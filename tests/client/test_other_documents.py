"""Something else answers where a tierstore is expected: each verb says so, whatever the document."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.client.conftest import Make
from tierstore.errors import TierstoreError

DOCUMENTS = [
    b"{}", b"[]", b"null", b"5", b'"ok"', b'{"status": "ok"}', b'{"models": 5}', b'{"models": [{}]}', b'{"models": [7]}',
    b'{"job": null}', b'{"state": "done"}', b'{"state": "done", "job": "j"}', b'{"state": "done", "job": "j", "report": {}}',
    b'{"versions": []}', b'{"versions": ["one"]}', b'{"versions": [null]}', b'{"inputs": 5}', b'{"outputs": [{}], "inputs": [3]}',
    b'{"parameters": [1]}', b'{"active_version": "x", "seq": null, "applied": 1, "withdrawn": []}', b"<html>ok</html>",
]  # fmt: skip


@pytest.fixture
def other() -> Iterator[Any]:
    """A server that answers 200 to everything, with its `body`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(server.body)))
            self.end_headers()
            self.wfile.write(server.body)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        body = b""
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def verbs(delta: Path) -> dict[str, Callable[[Any], Any]]:
    """Verbs by what they need of the answer."""
    return {
        "models": lambda c: c.models(), "status": lambda c: c.status(), "status of one": lambda c: c.status("m"),
        "lookup": lambda c: c.lookup("m", "f", [1]), "predict": lambda c: c.predict("m", {"f": [1]}),
        "load": lambda c: c.load_snapshot("/s", model="m"), "start": lambda c: c.start_load("/s", model="m"),
        "export": lambda c: c.export("m", "/e"), "backup": lambda c: c.backup("m", "/b"), "jobs": lambda c: c.jobs(),
        "delta": lambda c: c.apply_delta(delta), "rollback": lambda c: c.rollback("m"),
        "promote": lambda c: c.promote("m"), "withdraw": lambda c: c.withdraw("m"), "parked": lambda c: c.parked(),
        "log level": lambda c: c.log_level("info"),
    }  # fmt: skip


def test_an_answer_of_another_document_is_an_error_that_says_so(make: Make, other: Any, tmp_path: Path) -> None:
    where = tmp_path / "1.arrow"
    with tierstore.DeltaWriter(where, model="m", seq=1) as writer:
        writer.upsert("t", [1], [[1.0]])
    client = make(f"http://127.0.0.1:{other.server_address[1]}", retries=0)
    told: list[tuple[str, str]] = []
    for other.body in DOCUMENTS:
        for name, verb in verbs(where).items():
            with contextlib.suppress(TierstoreError):  # and nothing else
                try:
                    verb(client)
                except TierstoreError as error:
                    told.append((name, str(error)))
                    raise
    expected = ("is it a tierstore", "not one of the Open Inference Protocol")
    assert [each for each in told if not any(words in each[1] for words in expected)] == []
    assert len(told) > 0.8 * len(DOCUMENTS) * len(verbs(where)), "hardly any of them is what a verb expects"
