"""A server of the S3 protocol on loopback (moto's), which fails on demand.

`faults` are asked in turn about each request for an object; each may answer in the server's place, or let it go on.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "models"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

Respond = Callable[[str, list[tuple[str, str]]], Any]
Fault = Callable[[dict[str, Any], Respond], Iterable[bytes] | None]


class _Handler(WSGIRequestHandler):
    """Keeps connections open, as storages do. werkzeug's own closes each, 10 ms after its answer."""

    protocol_version = "HTTP/1.1"
    open: ClassVar[set[socket.socket]] = set()

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.open.add(self.connection)

    def finish(self) -> None:
        self.open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def run_wsgi(self) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        environ = self.make_environ()
        _read_body(environ)
        head: list[tuple[str, list[tuple[str, str]]]] = []

        def respond(status: str, headers: list[tuple[str, str]], _: object = None) -> Any:
            head[:] = [(status, headers)]

        content = self.server.app(environ, respond)
        (status, headers), names = head[0], {name.lower() for name, _ in head[0][1]}
        if "content-length" not in names:
            content = [b"".join(content)]
            headers = [*headers, ("Content-Length", str(len(content[0])))]
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for part in content:
                self.wfile.write(part)

    def log(self, *_: Any) -> None:
        pass


class ObjectServer:
    """`with ObjectServer() as server:` serves an empty bucket, `models`."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.listing_faults: list[Fault] = []  # the same for lists of objects
        self.write_faults: list[Fault] = []  # the same for what is written
        self.outages: list[Fault] = []  # the same for everything, and before the others
        self.written: list[str] = []  # paths, in order
        self.requested: list[str] = []  # the path of each request for an object
        self.ranges: list[str] = []  # and its Range header
        self._app = DomainDispatcherApplication(create_backend_app)
        self._port = 0

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}

    def start(self) -> None:
        """Answer, where it answered before."""
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=_Handler)
        self._port = self._server.server_port
        self.url = f"http://127.0.0.1:{self._port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections. What was stored is kept."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in list(_Handler.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ObjectServer:
        self.start()
        self.client = boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
        )
        # moto keeps its objects for the process: there may be those of another server
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST"), timeout=30).close()
        self.client.create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def put(self, folder: Path, name: str) -> str:
        """Upload a directory; the manifest last. Returns its URL."""
        files = [file for file in folder.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.name in ("snapshot.json", "built.json")):
            self.client.upload_file(str(file), BUCKET, f"{name}/{file.relative_to(folder).as_posix()}")
        return f"s3://{BUCKET}/{name}"

    def put_bytes(self, name: str, content: bytes) -> str:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)
        return f"s3://{BUCKET}/{name}"

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)

    def names(self, below: str) -> list[str]:
        """Objects below a name, and uploads that were begun and neither completed nor aborted."""
        objects = self.client.list_objects_v2(Bucket=BUCKET, Prefix=below).get("Contents", [])
        uploads = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=below).get("Uploads", [])
        return [entry["Key"].removeprefix(f"{below}/") for entry in [*objects, *uploads]]

    def _answer(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        faults: list[Fault] = []
        if self.outages:
            faults = self.outages
        elif "list-type" in environ.get("QUERY_STRING", ""):
            faults = self.listing_faults
        elif environ["REQUEST_METHOD"] == "GET":
            self.requested.append(environ["PATH_INFO"])
            self.ranges.append(environ.get("HTTP_RANGE", ""))
            faults = self.faults
        elif environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self.written.append(environ["PATH_INFO"])
            faults = self.write_faults
        for fault in list(faults):
            answer = fault(environ, respond)
            if answer is not None:
                return answer
        result: Iterable[bytes] = self._app(environ, respond)
        return result


def unavailable(times: int, *, of: str = "") -> Fault:
    """503 for the first requests for objects whose path contains `of`."""
    remaining = [times]

    def fault(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        if of not in environ["PATH_INFO"] or not remaining[0]:
            return None
        remaining[0] -= 1
        respond("503 Slow Down", [("Content-Length", "0")])
        return []

    return fault


def out_of_service(seconds: float) -> Fault:
    """503 to everything, from the first request on."""
    until_s: list[float] = []

    def fault(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        until_s.append(time.monotonic() + seconds)
        if time.monotonic() > until_s[0]:
            return None
        respond("503 Service Unavailable", [("Content-Length", "0")])
        return []

    return fault


def cut_off(every: int, *, after: int = 1000) -> Fault:
    """The connection of every so-manieth request dies after some bytes."""
    seen = [0]

    def fault(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        seen[0] += 1
        first, _, last = environ.get("HTTP_RANGE", "").removeprefix("bytes=").partition("-")
        if seen[0] % every or not last or int(last) - int(first) < after:
            return None
        size = int(last) - int(first) + 1
        respond(
            "206 Partial Content",
            [("Content-Length", str(size)), ("Content-Range", f"bytes {first}-{last}/{1 << 40}"), ("ETag", '"x"')],
        )
        return _dying(environ, after)

    return fault


def _dying(environ: dict[str, Any], after: int) -> Iterator[bytes]:
    yield b"\0" * after
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # else the client would wait for the remaining bytes


def refused(times: int, status: str = "503 Slow Down") -> Fault:
    """The first writes are read and not done."""
    remaining = [times]

    def fault(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        if not remaining[0]:
            return None
        remaining[0] -= 1
        respond(status, [("Content-Length", "0")])
        return []

    return fault


def _read_body(environ: dict[str, Any]) -> None:
    """What the client sends, before it is answered; else it would be read as the next request."""
    if environ.get("wsgi.input_terminated"):  # it comes in chunks
        body = environ["wsgi.input"].read()
    else:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)


def dying(every: int) -> Fault:
    """The connection of every so-manieth write dies before it is done."""
    seen = [0]

    def fault(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        seen[0] += 1
        if seen[0] % every:
            return None
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        respond("500 Died", [("Content-Length", "0")])
        return []

    return fault


def slow(pause_s: float) -> Fault:
    def fault(environ: dict[str, Any], respond: Respond) -> None:
        time.sleep(pause_s)

    return fault


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server, and meanwhile the environment by which clients in this process find it."""
    with ObjectServer() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running
