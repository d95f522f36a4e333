"""The same bytes to the reactors and straight to the full HTTP server: the answers are to be the same.

`python -m tools.fuzz_reactor --count 100000 --seed 1`, from the root of the repository.

One server over a real store has two ports. One is its own, behind which the reactors are; what comes in through the
other is adopted by the full server as if a reactor had handed it over, and never goes back. An exchange is a few
requests, whole or spoiled, cut into packets; it is a function of the seed and its number. Behind each comes a question
that names it (`_Behind`), so it shows whether the connection still stands, and where the next request was taken to begin.

What may differ, and why, is in `same`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import logging
import random
import re
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import uvloop

import tierstore
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.kernels import reactor as kernel
from tierstore.service.server import ServerThread

ROWS = 20_000  # of the large table, more than its memory takes
QUIET_S = 0.4  # without a byte: nothing more is coming
PATIENCE_S = 20.0  # where the other side has more
AT_ONCE = 24  # exchanges
DIMS = {"item": 16, "half": 5, "big": 4, "one": 8}
EDGES = [0, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)]


# --- what is served


def write_models(root: Path) -> Iterator[Path]:
    """Snapshots: `ctr` has every kind of feature that is looked up by number, `one` has one, `words` has strings."""
    random_rows = np.random.default_rng(11)

    def rows(n: int, table: str) -> np.ndarray:
        return random_rows.standard_normal((n, DIMS[table])).astype(np.float32)

    keys = np.arange(ROWS, dtype=np.int64)
    with tierstore.SnapshotWriter(root / "ctr", model="ctr", version=3) as writer:
        writer.table("item", dim=DIMS["item"], default=[0.25] * DIMS["item"]).write(keys, rows(ROWS, "item"))
        writer.table("half", dim=DIMS["half"], dtype="float16", default="mean").write(keys[:500], rows(500, "half"))
        few = np.array([5, 1 << 63, (1 << 64) - 1, *range(100, 200)], np.uint64)
        writer.table("big", dim=DIMS["big"], key="uint64").write(few, rows(len(few), "big"))
        writer.feature("item_id", table="item")
        writer.feature("half", table="half")
        writer.feature("big", table="big")
        writer.feature("clicked", table="item", combiner="mean")
        writer.feature("padded", table="half", combiner="sum", padding_key=0)
        writer.feature("plain_padded", table="half", padding_key=7)
        writer.warmup("item", keys[:300])
    yield root / "ctr"
    with tierstore.SnapshotWriter(root / "one", model="one", version=1) as writer:
        writer.table("one", dim=DIMS["one"]).write(keys[:1000], rows(1000, "one"))
        writer.feature("item_id", table="one")
    yield root / "one"
    with tierstore.SnapshotWriter(root / "words", model="words", version=1) as writer:
        writer.table("one", dim=DIMS["one"], key="string").write([f"w{i}" for i in range(50)], rows(50, "one"))
        writer.feature("word", table="one")
    yield root / "words"


def change_some(store: Store, root: Path) -> None:
    """A delta that is folded, and one that stays laid over the tables."""
    for seq in (1, 2):
        path = root / f"delta-{seq}"
        with tierstore.DeltaWriter(path, model="ctr", seq=seq, event_time=datetime.now(UTC)) as writer:
            keys = np.arange(seq * 1000, seq * 1000 + 40, dtype=np.int64)
            writer.upsert("item", keys, np.full((40, DIMS["item"]), float(seq), np.float32))
            writer.delete("item", keys - 500)
            writer.upsert("half", keys[:9] - seq * 1000, np.full((9, DIMS["half"]), 1 / 3, np.float32))
        store.apply_delta(path)
        until = time.monotonic() + 60
        while seq == 1 and store.model("ctr").publisher.served.active.overlays and time.monotonic() < until:
            time.sleep(0.01)


class Server:
    """The service with both its ports."""

    def __init__(self, root: Path) -> None:
        self._left = contextlib.ExitStack()
        settings = load_settings(
            None, data=root / "data", port=0, drain_s=0.0, host_budget="1MiB", lookup_threads=2, disk_threads=2,
            max_request="512KiB", max_response="8MiB", max_queue_s=3600, fold_grace_s=1.0, grpc_port="off",
        )  # fmt: skip
        self.store = self._left.enter_context(Store(settings))
        for snapshot in write_models(root):
            self.store.load_snapshot(snapshot)
        change_some(self.store, root)
        self.thread = self._left.enter_context(ServerThread(self.store))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self.ports = self.thread.port, self._listener.getsockname()[1]
        self._in_loop(lambda loop: loop.add_reader(self._listener, self._accept))

    def _in_loop(self, call: Callable[[Any], None]) -> None:
        loop = self.thread._http._loop
        assert loop is not None
        loop.call_soon_threadsafe(call, loop)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                made, _ = self._listener.accept()
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                http = self.thread._http
                http._reactors.count_other(1)
                http._server.adopt(http._door, made, b"", refused=False, back=None)

    @property
    def by_reactors(self) -> int:
        """Look-ups that were answered without Python."""
        return int(self.thread._http._reactors._lines[:, kernel.ANSWERS].sum())

    @property
    def promoted(self) -> int:
        keys = self.store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
        return int(keys["disk"])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._in_loop(lambda loop: loop.remove_reader(self._listener))
        self._left.close()
        self._listener.close()


# --- requests


@dataclass
class Request:
    """In parts, each to be spoiled by itself; `close_up` makes bytes of them."""

    path: str
    headers: list[tuple[bytes, bytes]]
    text: bytes
    tail: bytes
    line: bytes | None = None
    ends: bytes = b"\r\n"
    colon: bytes = b": "
    length: int | None = None  # what Content-Length says, where that is not the truth
    body: bytes | None = None

    def close_up(self) -> bytes:
        body = self.text + self.tail if self.body is None else self.body
        headers = [
            (name, b"%d" % (len(body) if self.length is None else self.length) if value == b"LENGTH" else value)
            for name, value in self.headers
        ]
        line = self.line or b"POST " + self.path.encode() + b" HTTP/1.1"
        head = [line, *(name + self.colon + value for name, value in headers)]
        return self.ends.join(head) + 2 * self.ends + body


class Tail:
    """What follows the JSON of a look-up: parts whose values are drawn anew each time."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []  # kind, count, of how many keys

    def draw(self, rng: random.Random) -> bytes:
        return b"".join(self._part(rng, *part) for part in self.parts)

    @staticmethod
    def _part(rng: random.Random, kind: str, count: int, keys: int) -> bytes:
        if kind == "offsets":
            starts = sorted(rng.randint(0, keys) for _ in range(count))
            if count and rng.random() < 0.95:
                starts[0] = 0
            if count > 1 and rng.random() < 0.05:
                starts[rng.randrange(count)] = rng.choice([keys + 1, -1, 1 << 62, 0])
            return struct.pack(f"<{count}q", *starts)
        if kind == "weights":
            weights = [rng.choice([1.0, 0.0, -1.5, 0.1, 3e38, 1e-42]) for _ in range(count)]
            if count and rng.random() < 0.05:
                weights[rng.randrange(count)] = rng.choice([float("nan"), float("inf"), -float("inf")])
            return struct.pack(f"<{count}f", *weights)
        span = rng.choice([10, 250, 600, 2100, ROWS + 50])
        values = [rng.randrange(span) if rng.random() < 0.97 else rng.choice(EDGES) for _ in range(count)]
        return struct.pack(f"<{count}q", *values)


class Template:
    """A look-up that comes again and again, with other keys."""

    def __init__(self, rng: random.Random) -> None:
        self.tail = Tail()
        self.model = "one" if rng.random() < 0.15 else "ctr"
        features = ["item_id"]
        if self.model == "ctr":
            all_of_them = ["item_id", "half", "big", "clicked", "padded", "plain_padded"]
            features = rng.sample(all_of_them, rng.choice([1, 1, 1, 2, 3]))
        inputs: list[dict[str, Any]] = []
        outputs: list[dict[str, Any]] = []
        binary = rng.random() < 0.9
        for feature in features:
            self._add(rng, feature, inputs, outputs)
        for output in outputs:
            if binary:
                output.setdefault("parameters", {})["binary_data"] = True
        document: dict[str, Any] = {"inputs": inputs}
        if rng.random() < 0.85:
            rng.shuffle(outputs)
            document["outputs"] = outputs
        else:
            document["parameters"] = {"binary_data_output": rng.random() < 0.9}
        if rng.random() < 0.1:
            document.setdefault("parameters", {})["combiner"] = rng.choice(["sum", "mean", "sqrtn", "max"])
        version = rng.choice(["", "", "", "/versions/3", "/versions/1"])
        self.path = f"/v2/models/{self.model}{version}/infer"
        self.text = json.dumps(document).encode()

    def _add(
        self, rng: random.Random, feature: str, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]
    ) -> None:
        ragged = feature in ("clicked", "padded")
        if rng.random() < 0.35:
            shape = [rng.randint(0, 6), rng.randint(0, 6)]
        else:
            shape = [rng.choice([0, 1, 2, 4, 17, 64, 300])]
        n = int(np.prod(shape))
        datatype = rng.choice(["INT64", "INT64", "INT64", "UINT64"])

        def given(name: str, of: str, size: list[int], kind: str, width: int) -> None:
            count = int(np.prod(size))
            inputs.append(
                {"name": name, "datatype": of, "shape": size, "parameters": {"binary_data_size": count * width}}
            )
            self.tail.parts.append((kind, count, n))

        given(feature, datatype, shape, "keys", 8)
        if ragged and len(shape) == 1 and rng.random() < 0.6:
            given(f"{feature}.offsets", "INT64", [rng.choice([0, 1, 3, 9])], "offsets", 8)
        if ragged and rng.random() < 0.4:
            given(f"{feature}.weights", "FP32", shape, "weights", 4)
        rows: dict[str, Any] = {"name": feature}
        if rng.random() < 0.4:
            rows["parameters"] = {"dtype": rng.choice(["FP16", "FP16", "FP32", "FP64"])}
        if ragged and rng.random() < 0.4:
            rows.setdefault("parameters", {})["combiner"] = rng.choice(["sum", "mean", "sqrtn"])
        wanted = rng.choice(["rows", "rows", "both", "both", "found"])
        if wanted != "found":
            outputs.append(rows)
        if wanted != "rows":
            outputs.append({"name": f"{feature}.found"})

    def request(self, rng: random.Random) -> Request:
        headers = [
            (b"Host", b"localhost"),
            (b"Content-Length", b"LENGTH"),
            (b"Inference-Header-Content-Length", b"%d" % len(self.text)),
        ]
        return Request(self.path, headers, self.text, self.tail.draw(rng))


def plain(rng: random.Random) -> Request:
    """A request that no plan is for."""
    headers = [(b"Host", b"localhost"), (b"Content-Length", b"LENGTH")]
    keys = [rng.randrange(300) for _ in range(3)]
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [3], "data": keys}
    documents: list[tuple[str, Any]] = [
        ("/v2/models/one/infer", {"inputs": [tensor]}),
        ("/v2/models/one/infer", {"inputs": [tensor], "id": "a"}),
        ("/v1/models/one:predict", {"instances": keys}),
        ("/v1/models/one:predict", {"inputs": keys}),
        ("/v1/models/one/versions/1:predict", {"instances": [{"item_id": key} for key in keys]}),
        ("/v2/models/none/infer", {"inputs": [tensor]}),
        ("/v2/models/words/infer", {"inputs": [tensor | {"name": "word", "datatype": "BYTES", "data": ["w1", "?", ""]}]}),
    ]  # fmt: skip
    path, document = rng.choice(documents)
    request = Request(path, headers, json.dumps(document).encode(), b"")
    if rng.random() < 0.2:
        request.line, request.text = (
            f"GET {rng.choice(['/v2', '/v2/health/live', '/v2/models/one'])} HTTP/1.1".encode(),
            b"",
        )
    elif rng.random() < 0.1:  # nothing but keys
        request = Request(
            "/v2/models/one/infer", [*headers, (b"Inference-Header-Content-Length", b"0")], b"", bytes(16)
        )
    return request


# --- what goes wrong


def _other_case(rng: random.Random, request: Request) -> None:
    change: Callable[[bytes], bytes] = rng.choice([bytes.upper, bytes.lower, bytes.swapcase])
    request.headers = [(change(name), value) for name, value in request.headers]


def _known_header(rng: random.Random, request: Request) -> None:
    name = rng.choice(
        [b"Accept", b"User-Agent", b"traceparent", b"Cookie", b"X-Forwarded-For", b"content-type", b"via"]
    )
    _insert(rng, request, name, rng.choice([b"*/*", b"a b  c", b"", b"{}|~", b"x" * 300]))


def _new_header(rng: random.Random, request: Request) -> None:
    name = rng.choice(
        [b"X-Other", b"Foo", b"a", b"x_y", b"!#$%&'*+.^`|~", b"If-Match", b"Range", b"", b"a b", b"Trailer"]
    )
    _insert(rng, request, name, rng.choice([b"1", b"", b"a\tb", b"\xe4", b"a\x00b", b" a ", b"\x7f", b"a\rb", b"a\nb"]))


def _odd_value(rng: random.Random, request: Request) -> None:
    i = rng.randrange(len(request.headers))
    name, value = request.headers[i]
    odd = [b"", b" " + value, value + b" ", b"\t" + value, value + b"\t", b"+" + value, b"-1", b"0x10", value + b"," + value,
           b"0" * 8 + value, b"00" + value, b"999999999999999999999", b"1_0", b"\xb2", b"5 5", b"1.0", b"\x00"]  # fmt: skip
    request.headers[i] = name, rng.choice(odd)


def _insert(rng: random.Random, request: Request, name: bytes, value: bytes) -> None:
    request.headers.insert(rng.randint(0, len(request.headers)), (name, value))


def _twice(rng: random.Random, request: Request) -> None:
    name, value = rng.choice(request.headers)
    _insert(rng, request, name, rng.choice([value, value, b"1", b"0"]))


def _missing(rng: random.Random, request: Request) -> None:
    del request.headers[rng.randrange(len(request.headers))]


def _host(rng: random.Random, request: Request) -> None:
    values = [
        b"localhost:1",
        b"127.0.0.1",
        b"evil.example",
        b"[::1]",
        b"[::1]:80",
        b"",
        b"LOCALHOST",
        b"localhost:",
        b"a:b:c",
    ]
    request.headers = [(n, rng.choice(values) if n == b"Host" else v) for n, v in request.headers]


def _line(rng: random.Random, request: Request) -> None:
    path = request.path.encode()
    request.line = rng.choice([
        b"POST %b HTTP/1.0", b"POST %b HTTP/1.2", b"POST %b HTTP/2.0", b"POST %b", b"post %b HTTP/1.1", b"PUT %b HTTP/1.1",
        b"POST  %b HTTP/1.1", b"POST %b  HTTP/1.1", b"POST\t%b HTTP/1.1", b"POST %b?a=b HTTP/1.1", b"POST %b# HTTP/1.1",
        b"POST http://localhost%b HTTP/1.1", b"POST %b HTTP/1.1 ", b"POST /%b HTTP/1.1", b"POST %b/ HTTP/1.1", b"POST %b%%2e HTTP/1.1",
        b"\r\nPOST %b HTTP/1.1", b"\n\r\nPOST %b HTTP/1.1", b" POST %b HTTP/1.1", b"POST /.%b HTTP/1.1", b"POST * HTTP/1.1#%b",
        b"GET %b HTTP/1.1", b"DELETE %b HTTP/1.1", b"POST /v2/models/../..%b HTTP/1.1", b"POST \xe4%b HTTP/1.1", b"POST %b HTTP/1.1\r",
    ]) % path  # fmt: skip


def _line_ends(rng: random.Random, request: Request) -> None:
    request.ends = rng.choice([b"\n", b"\r", b"\r\r\n", b"\r\n ", b" \r\n", b"\n\r"])


def _colon(rng: random.Random, request: Request) -> None:
    request.colon = rng.choice([b":", b":   ", b":\t", b" : ", b" ", b":: ", b":" + b" " * 900])


def _connection(rng: random.Random, request: Request) -> None:
    values = [b"close", b"Close", b"keep-alive", b"Keep-Alive", b"KEEP-ALIVE", b"keep-alive, close", b"foo", b"upgrade", b"",
              b"keep-alive, foo", b"close, foo", b"keep-alivE", b"te", b"kEEP-ALIVE "]  # fmt: skip
    _insert(rng, request, b"Connection", rng.choice(values))


def _upgrade(rng: random.Random, request: Request) -> None:
    _insert(rng, request, b"Upgrade", rng.choice([b"h2c", b"websocket", b""]))
    if rng.random() < 0.7:
        _insert(rng, request, b"Connection", rng.choice([b"Upgrade", b"Upgrade, HTTP2-Settings"]))


def _chunked(rng: random.Random, request: Request) -> None:
    body = request.text + request.tail
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
    request.body = chunks + rng.choice(
        [b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\na: b\r\n\r\n", b"0;x\r\n\r\n", b"-1\r\n\r\n"]
    )
    coding = rng.choice([b"chunked", b"chunked", b"Chunked", b"gzip, chunked", b"identity", b"xchunked"])
    headers = [(name, value) for name, value in request.headers if name != b"Content-Length" or rng.random() < 0.3]
    request.headers = [*headers, (b"Transfer-Encoding", coding)]


def _expect(rng: random.Random, request: Request) -> None:
    _insert(rng, request, b"Expect", rng.choice([b"100-continue", b"100-Continue", b"else"]))


def _coded(rng: random.Random, request: Request) -> None:
    body = request.text + request.tail
    request.body = rng.choice([gzip.compress(body, mtime=0), body])
    _insert(rng, request, b"Content-Encoding", rng.choice([b"gzip", b"identity", b"br", b"deflate", b""]))


def _accepted(rng: random.Random, request: Request) -> None:
    values = [
        b"gzip",
        b"deflate",
        b"gzip, deflate, br",
        b"GZIP",
        b"  gzip",
        b"br",
        b"",
        b"identity",
        b"gzip;q=1",
        b"gzip;q=1.0",
    ]
    _insert(rng, request, b"Accept-Encoding", rng.choice(values))


def _id(rng: random.Random, request: Request) -> None:
    _insert(rng, request, b"X-Request-Id", rng.choice([b"a", b"", b"7" * 200]))


def _timeout(rng: random.Random, request: Request) -> None:
    name = rng.choice([b"X-Request-Timeout-Ms", b"x-envoy-expected-rq-timeout-ms"])
    values = [
        b"0",
        b"60000",
        b"abc",
        b"-1",
        b"1e3",
        b"999999999",
        b"999999999999",
        b"9999999999999",
        b"000060000",
        b"",
        b"1 1",
    ]
    _insert(rng, request, name, rng.choice(values))


def _origin(rng: random.Random, request: Request) -> None:
    _insert(rng, request, b"Origin", rng.choice([b"http://localhost", b"http://evil.example", b"null"]))


def _long_header(rng: random.Random, request: Request) -> None:
    size = rng.choice([3000, 7900, 8100, 9000, 30_000, 60_000, 700_000])  # between: as it happens to be read
    _insert(rng, request, rng.choice([b"Cookie", b"Foo", b"Host"]), b"x" * size)


def _many_headers(rng: random.Random, request: Request) -> None:
    for _ in range(rng.choice([20, 200, 2000])):
        request.headers.append((b"Accept", b"*/*"))


def _length(rng: random.Random, request: Request) -> None:
    whole = len(request.text + request.tail)
    request.length = max(
        0, rng.choice([whole - 1, whole + 1, whole - 8, whole + 8, 0, whole // 2, whole + 1000, 1 << 17, 600_000])
    )


def _json_length(rng: random.Random, request: Request) -> None:
    n = len(request.text)
    values = [
        b"%d" % value for value in (n - 1, n + 1, n + len(request.tail), n + len(request.tail) + 1, 0, 1, 10**9, 10**19)
    ]
    value = rng.choice([*values, b"+%d" % n, b"%05d" % n, b"%d " % n, b"", b"x", b"\xb2"])
    request.headers = [(k, value if k.startswith(b"Inference") else v) for k, v in request.headers]


def _json_text(rng: random.Random, request: Request) -> None:
    """Another text of the same meaning or none, and the length that goes with it."""
    text = request.text
    if not text:
        return
    i = rng.randrange(len(text))
    request.text = rng.choice([
        text[:i] + text[i + 1 :], text[:i] + bytes([rng.randrange(256)]) + text[i + 1 :], text[:i] + b"," + text[i:], text + b" ",
        text[:-1] + b', "id": "x"}', text[:-1] + b', "parameters": {"binary_data_output": true}}', text[:-1] + b', "parameters": {"timeout": 9000000}}',
        text[:-1] + b', "other": 1}', text.replace(b"item", b"itom"), text.replace(b"INT64", b"INT32"), text.replace(b"INT64", b"UINT64"),
        text.replace(b'"shape": [', b'"shape": [1, '), text.replace(b"FP16", b"BF16"), text.replace(b"true", b"false"),
        text.replace(b'"binary_data_size": ', b'"binary_data_size": 1'), text.replace(b"mean", b"max"), text.replace(b".found", b".lost"),
        text.replace(b'"name"', b'"data": [1], "name"', 1), text.replace(b'"inputs"', b'"input"'), text.replace(b": ", b":"),
    ])  # fmt: skip
    request.headers = [(k, b"%d" % len(request.text) if k.startswith(b"Inference") else v) for k, v in request.headers]


def _tail(rng: random.Random, request: Request) -> None:
    tail = request.tail
    cut = rng.randint(0, len(tail))
    noise = rng.randbytes(len(tail))
    request.tail = rng.choice([tail[:cut], tail + b"\0", tail + bytes(8), tail[cut:], b"", noise, b"\xff" * len(tail)])


def _bytes(rng: random.Random, request: Request) -> None:
    """Anything anywhere."""
    data = bytearray(request.close_up())
    for _ in range(rng.choice([1, 1, 2, 5])):
        i = rng.randrange(len(data)) if rng.random() < 0.3 else rng.randrange(min(len(data), 160))
        kind = rng.random()
        if kind < 0.5:
            data[i] = rng.choice([rng.randrange(256), data[i] ^ 32, 13, 10, 32])
        elif kind < 0.75:
            del data[i]
        else:
            data.insert(i, rng.choice([rng.randrange(256), 13, 10, 32]))
    request.line, request.headers, request.ends, request.body = bytes(data), [], b"", b""


SPOIL: dict[Callable[[random.Random, Request], None], int] = {
    _other_case: 2, _known_header: 3, _new_header: 3, _odd_value: 4, _twice: 2, _missing: 3, _host: 2, _line: 4, _line_ends: 1,
    _colon: 2, _connection: 3, _upgrade: 1, _chunked: 2, _expect: 1, _coded: 1, _accepted: 2, _id: 1, _timeout: 2, _origin: 1,
    _long_header: 2, _many_headers: 1, _length: 3, _json_length: 3, _json_text: 8, _tail: 5, _bytes: 6,
}  # fmt: skip


@dataclass
class Exchange:
    """`messages` are what the requests are meant to be; `packets` what is sent, with pauses of `pause_s` between them."""

    number: int
    messages: list[bytes]
    spoiled: list[str]
    packets: list[bytes] = field(default_factory=list)
    pause_s: float = 0.0


def make_exchange(seed: int, number: int, templates: list[Template]) -> Exchange:
    rng = random.Random(f"{seed}-{number}")
    exchange = Exchange(number, [], [])
    for _ in range(1 if rng.random() < 0.7 else rng.randint(2, 8)):
        request = plain(rng) if rng.random() < 0.1 else rng.choice(templates).request(rng)
        if rng.random() < 0.6:
            for _ in range(1 if rng.random() < 0.8 else rng.randint(2, 3)):
                spoil = rng.choices(list(SPOIL), list(SPOIL.values()))[0]
                if request.headers:
                    spoil(rng, request)
                    exchange.spoiled.append(spoil.__name__)
        exchange.messages.append(request.close_up())
    behind = f"GET /v2/models/behind-{number}/ready HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    data = b"".join(exchange.messages)
    together = rng.random() < 0.5
    if together:
        data += behind
    cuts: list[int] = []
    if rng.random() < 0.45:
        spans = [rng.choice([len(data), min(len(data), 300)]) for _ in range(rng.choice([1, 1, 2, 3, 6]))]
        cuts = [rng.randrange(span) for span in spans]
        exchange.pause_s = rng.choice([0.0, 0.001, 0.004])
    elif rng.random() < 0.02:
        cuts = list(range(min(len(data), 250)))
    places = [0, *sorted(set(cuts) - {0}), len(data)]
    exchange.packets = [data[a:b] for a, b in pairwise(places)]
    if not together:
        exchange.packets.append(behind)
    exchange.messages.append(behind)
    return exchange


# --- the client


_WISH = re.compile(rb"(?i)\r\nupgrade:")


class _Ends:
    def __init__(self) -> None:
        self.complete = False

    def on_message_complete(self) -> None:
        self.complete = True


def split_requests(data: bytes) -> list[bytes]:
    """`data` cut behind every request that the full server's parser finds in it; what is no request stays in one."""

    ends = _Ends()
    parser, cuts, fed = httptools.HttpRequestParser(ends), [0], _WISH.sub(b"\r\nx-grade:", data)
    for i in range(len(data)):
        ends.complete = False
        try:
            parser.feed_data(fed[i : i + 1])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            break
        if ends.complete:
            cuts.append(i + 1)
    return [data[a:b] for a, b in pairwise([*cuts, len(data)]) if b > a]


Answer = tuple[int, tuple[tuple[str, str], ...], bytes]  # status, headers without the date, body


@dataclass
class Seen:
    """What one side answered, and what became of the connection."""

    answers: list[Answer] = field(default_factory=list)
    end: str = ""  # open: the question behind was answered; closed; waiting: for more bytes

    def __str__(self) -> str:
        return " ".join(f"{status}:{body[:60]!r}" for status, _, body in self.answers) + f" {self.end}"


def _is_overtaken(few: Seen, all_of_them: Seen) -> bool:
    """Whether `few` are `all_of_them`, or those but for some that what ended the connection has overtaken."""
    if few == all_of_them:
        return True
    if few.end != "closed" or all_of_them.end != "closed":
        return False
    last = [answer for answer in few.answers if _ends(answer)]
    return last == [answer for answer in all_of_them.answers if _ends(answer)] and _begins_alike(few, all_of_them)


def _begins_alike(few: Seen, all_of_them: Seen) -> bool:
    answers = [answer for answer in few.answers if not _ends(answer)]
    return answers == all_of_them.answers[: len(answers)]


def _ends(answer: Answer) -> bool:
    """Whether it is what the full server says to bytes that are no request."""
    return answer[0] == 400 and ("connection", "close") in answer[1]


class Side:
    """Connections to one port, one at a time, kept as long as they stand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ask(self, exchange: Exchange, seen: Seen, other: Seen | None, least: int = 0) -> None:
        """Send an exchange, and note in `seen` what comes.

        Nothing more comes if nothing has for QUIET_S, there are `least` answers, and the `other` side has no more either.
        """
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setblocking(False)
            await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made, data = self._socket, b""
        sending = asyncio.ensure_future(self._send(made, exchange.packets, exchange.pause_s))
        receiving: asyncio.Future[bytes] | None = None
        until = time.monotonic() + PATIENCE_S
        behind = b"behind-%d'" % exchange.number
        try:
            while True:
                # never cancelled while it may have taken bytes from the socket
                receiving = receiving or asyncio.ensure_future(loop.sock_recv(made, 1 << 18))
                await asyncio.wait((receiving,), timeout=QUIET_S)
                if not receiving.done():
                    ahead = other is not None and (other.end == "open" or len(other.answers) != len(seen.answers))
                    if not sending.done() or ((ahead or len(seen.answers) < least) and time.monotonic() < until):
                        continue
                    seen.end = "waiting"
                    break
                more = b"" if receiving.exception() else receiving.result()
                receiving = None
                data += more
                data = _take(seen, data, ended=not more)
                if not more:
                    seen.end = "closed"
                    break
                if seen.answers and behind in seen.answers[-1][2] and not data:
                    seen.end = "open"
                    break
        finally:
            sending.cancel()
            if receiving is not None:
                receiving.cancel()
            await asyncio.wait((sending, *(() if receiving is None else (receiving,))))
        if data:
            seen.answers.append((0, (), data))

    @staticmethod
    async def _send(made: socket.socket, packets: list[bytes], pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            for i, packet in enumerate(packets):
                if i:
                    await asyncio.sleep(pause_s)
                await loop.sock_sendall(made, packet)


def _take(seen: Seen, data: bytes, *, ended: bool) -> bytes:
    """Move whole answers from `data` to `seen`, and return what is left."""
    while True:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found or not (match := re.match(rb"HTTP/1.1 (\d{3}) ", head)):
            return data
        status = int(match[1])
        if status == 100:  # whether it is asked for depends on whether the body has come by then
            data = rest
            continue
        lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
        headers = {name.decode().lower(): value.decode("latin-1") for name, _, value in lines}
        headers.pop("date", None)
        length = headers.get("content-length")
        if length is None and not ended:
            return data
        size = len(rest) if length is None else int(length)
        if len(rest) < size:
            return data
        seen.answers.append((status, tuple(sorted(headers.items())), rest[:size]))
        data = rest[size:]


class Fuzzer:
    """Counts what was the same, and keeps what was not."""

    def __init__(self, ports: tuple[int, int], seed: int) -> None:
        self._ports, self._seed = ports, seed
        rng = random.Random(f"templates {seed}")
        self.templates = [Template(rng) for _ in range(150)]
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []

    def run(self, numbers: Iterator[int]) -> None:
        """Make the exchanges of `numbers`."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(numbers))

    async def _run(self, numbers: Iterator[int]) -> None:
        await asyncio.gather(*(self._work(numbers) for _ in range(AT_ONCE)))

    async def _work(self, numbers: Iterator[int]) -> None:
        sides = [Side(port) for port in self._ports]
        try:
            for number in numbers:
                await self._compare(make_exchange(self._seed, number, self.templates), sides)
        finally:
            for side in sides:
                side.drop()

    async def _compare(self, exchange: Exchange, sides: list[Side]) -> None:
        ours, full = Seen(), Seen()
        await asyncio.gather(sides[0].ask(exchange, ours, full), sides[1].ask(exchange, full, ours))
        self.counts["exchanges"] += 1
        self.counts["requests"] += len(exchange.messages) - 1
        how = "the same" if ours == full else await self._look_again(exchange, ours, full)
        if ours != full or ours.end != "open":
            for side in sides:
                side.drop()
        self.counts[how] += 1
        self.counts[ours.end] += 1
        for status, *_ in ours.answers:
            self.counts[f"status {status}"] += 1

    async def _look_again(self, exchange: Exchange, ours: Seen, full: Seen) -> str:
        """Two differed: what the full server says to the same requests one by one.

        It reads ahead, and an answer that ends the connection overtakes those that are at work, so some may be missing
        before it. A wish for another protocol it passes over only where a packet begins with that head; else it closes.
        A head whose body has not come it may refuse at once.
        """
        data = b"".join(exchange.messages)
        one_by_one, alone, parts = Seen(), Side(self._ports[1]), split_requests(data)
        try:
            for i, part in enumerate(parts):
                await alone.ask(Exchange(exchange.number, [part], [], [part]), one_by_one, None, least=i + 1)
                if one_by_one.end == "closed":
                    break
        finally:
            alone.drop()
        if _WISH.search(data) and full.end == "closed":
            same = _begins_alike(ours, one_by_one)
        elif full.end == ours.end == "waiting":  # a head may be refused before its body has come; reactors wait for it
            same = full.answers[:-1] == ours.answers and full == one_by_one and full.answers[-1][0] >= 400
        else:
            same = _is_overtaken(ours, one_by_one) and _is_overtaken(full, one_by_one)
        if same:
            return "the same one by one"
        return self._differ(exchange, ours, full, one_by_one)

    def _differ(self, exchange: Exchange, ours: Seen, full: Seen, one_by_one: Seen) -> str:
        shown = [packet if len(packet) < 700 else packet[:700] + b"..." for packet in exchange.packets]
        self.different.append(
            f"seed {self._seed} exchange {exchange.number} {exchange.spoiled}\n  sent {shown}\n  reactor {ours}\n  full    {full}\n  alone   {one_by_one}"
        )
        return "different"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one exchange, by its number")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after that")
    options = parser.parse_args()
    logging.disable()  # most of what is sent is an error to somebody
    until = time.monotonic() + options.seconds

    def numbers() -> Iterator[int]:
        for number in range(options.count) if options.only is None else (options.only,):
            if time.monotonic() > until:
                return
            yield number

    with tempfile.TemporaryDirectory() as root, Server(Path(root)) as server:
        fuzzer = Fuzzer(server.ports, options.seed)
        began = time.monotonic()
        fuzzer.run(numbers())
        for line in fuzzer.different:
            print(line)
        print(f"{time.monotonic() - began:.0f} s; {server.by_reactors} look-ups answered without Python")
        print(", ".join(f"{name}: {count}" for name, count in sorted(fuzzer.counts.items())))


if __name__ == "__main__":
    main()
