"""A service of the Open Inference Protocol in a thread, which fails in scripted ways. Test code.

It knows one model, `m`: features `f` (rows [key, key + 1]), `bag` (sums of bags of such rows) and `user`, and a dense part
of two inputs more (`hour` FP32 [-1], `scale` FP32 [1]) whose output `score` is worked out from all of them. It answers on
real connections; what it does is written in `script`, one `Act` a request to `/infer`, then plainly.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

INPUTS = [
    ("f", "INT64", [-1]),
    ("bag", "INT64", [-1]),
    ("user", "INT64", [-1]),
    ("hour", "FP32", [-1]),
    ("scale", "FP32", [1]),
]
_DTYPES = {"INT64": np.int64, "FP32": np.float32, "BYTES": None, "INT32": np.int32, "FP64": np.float64}
_NAMES = {"float32": "FP32", "float16": "FP16", "bool": "BOOL", "int64": "INT64"}


@dataclass
class Act:
    """What to do with one request: `status` other than 200 refuses, `how` is one of the ways to fail."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    how: str = ""  # "reset", "hang", "cut", "chunked", "until_close", "wait"
    version: int | None = None
    raw: bytes = b""  # the whole answer as it is sent; the connection ends with it


@dataclass
class Seen:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    document: dict[str, Any]
    tensors: dict[str, np.ndarray]


def rows(keys: np.ndarray) -> np.ndarray:
    return np.stack([keys, keys + 1], axis=1).astype(np.float32)


def sums(keys: np.ndarray, offsets: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    ends = [*offsets[1:], len(keys)]
    weights = np.ones(len(keys), np.float32) if weights is None else weights
    made = [(rows(keys[a:b]) * weights[a:b, None]).sum(axis=0) for a, b in zip(offsets, ends, strict=True)]
    return np.array(made, np.float32).reshape(len(offsets), 2)


def answers(tensors: dict[str, np.ndarray], wanted: list[str]) -> dict[str, np.ndarray]:
    """What the model answers: the score, or what is wanted."""
    made: dict[str, np.ndarray] = {}
    for name in ("f", "user"):
        if name in tensors:
            made[name], made[f"{name}.found"] = rows(tensors[name]), tensors[name] >= 0
    if "bag" in tensors:
        offsets = tensors.get("bag.offsets", np.arange(len(tensors["bag"])))
        made["bag"] = sums(tensors["bag"], offsets, tensors.get("bag.weights"))
        made["bag.found"] = tensors["bag"] >= 0
    terms = [made[name][:, 0] for name in ("f", "bag", "user") if name in made]
    terms += [tensors["hour"]] if "hour" in tensors else []
    if "hour" in tensors or {"score", "total"} & set(wanted):
        n = max(len(term) for term in terms)
        made["score"] = sum((np.broadcast_to(term, n) for term in terms), np.zeros(n, np.float32)).astype(np.float32)
        made["score"] = made["score"] * (tensors["scale"][0] if "scale" in tensors else np.float32(1))
        made["total"] = made["score"].sum(keepdims=True)  # has no batch dimension
    names = wanted or (["score"] if "hour" in tensors else [name for name in ("f", "bag", "user") if name in tensors])
    return {name: made[name] for name in names}


class FakeService:
    """`with FakeService() as service`: `url`, and what it was asked in `seen`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.script: list[Act] = []
        self.documents: Callable[[str, str, bytes], tuple[int, Any]] | None = None
        self.version = 1
        self.ready = True
        self.extensions: list[str] = []
        self.seen: list[Seen] = []
        self.paths: list[str] = []
        self.released = threading.Event()  # what hangs goes on
        self.connections = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def setup(self) -> None:
                super().setup()
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with service._lock:
                    service.connections += 1

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                service._handle(self)

            do_POST = do_DELETE = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # connections are cut on purpose

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:  # the handshake is each connection's own business, so it does not stop the others
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> FakeService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- one request

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        with self._lock:
            self.paths.append(f"{handler.command} {handler.path}")
        if handler.path.endswith("/infer"):
            self._infer(handler, body)
        elif handler.path == "/v2/models/m" or (
            handler.path.startswith("/v2/models/m/versions/") and handler.path.count("/") == 5
        ):
            entries = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in INPUTS]
            self._send(handler, 200, {"name": "m", "versions": [str(self.version)], "inputs": entries, "outputs": []})
        elif handler.path.endswith("/ready"):
            self._send(handler, 200 if self.ready else 400, None)
        elif self.documents is not None:
            self._send(handler, *self.documents(handler.command, handler.path, body))
        else:
            self._send(handler, 404, {"error": "no such path"})

    def _infer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        length = int(handler.headers.get("inference-header-content-length", len(body)))
        document = json.loads(body[:length])
        tensors, at = {}, length
        for entry in document["inputs"]:
            nbytes = entry["parameters"]["binary_data_size"]
            raw = body[at : at + nbytes]
            at += nbytes
            dtype = _DTYPES[entry["datatype"]]
            tensors[entry["name"]] = (
                np.frombuffer(raw, np.uint8) if dtype is None else np.frombuffer(raw, dtype).reshape(entry["shape"])
            )
        with self._lock:
            self.seen.append(Seen(handler.path, {k.lower(): v for k, v in handler.headers.items()}, document, tensors))
            act = self.script.pop(0) if self.script else Act()
        if act.how in ("hang", "wait"):
            self.released.wait(30)
            if act.how == "hang":
                handler.close_connection = True
                return
        if act.how == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            handler.connection.close()
            return
        if act.raw:
            handler.wfile.write(act.raw)
            handler.wfile.flush()
            handler.close_connection = True
            return
        if act.status != 200:
            self._send(handler, act.status, {"error": f"refused with {act.status}"}, act.headers)
            return
        version = act.version or self.version
        pinned = handler.path.split("/")[-2] if "/versions/" in handler.path else ""
        if pinned.isdigit() and int(pinned) != version:
            self._send(handler, 400, {"error": f"version {pinned} is not served"}, {"Retry-After": "1"})
            return
        try:
            made = answers(tensors, [output["name"] for output in document.get("outputs", [])])
        except KeyError as error:
            self._send(handler, 400, {"error": f"unknown output {error}"})
            return
        described = [
            {"name": name, "datatype": _NAMES[a.dtype.name], "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}}
            for name, a in made.items()
        ]  # fmt: skip
        text = json.dumps({"model_name": "m", "model_version": str(version), "outputs": described}).encode()
        data = text + b"".join(np.ascontiguousarray(a).tobytes() for a in made.values())
        self._answer(handler, data, len(text), act.how)

    def _answer(self, handler: BaseHTTPRequestHandler, data: bytes, json_bytes: int, how: str) -> None:
        handler.send_response(200)
        handler.send_header("Inference-Header-Content-Length", str(json_bytes))
        if how == "chunked":
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for first in range(0, len(data), 100):
                part = data[first : first + 100]
                handler.wfile.write(b"%x;note=1\r\n%b\r\n" % (len(part), part))
                handler.wfile.flush()
            handler.wfile.write(b"0\r\nTrailer: x\r\n\r\n")
        elif how == "until_close":
            handler.send_header("Connection", "close")
            handler.end_headers()
            handler.wfile.write(data)
        else:
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2] if how == "cut" else data)
            handler.close_connection = how == "cut"
        handler.wfile.flush()

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, document: Any, headers: dict[str, str] | None = None
    ) -> None:
        data = b"" if document is None else json.dumps(document).encode()
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
        handler.wfile.flush()
