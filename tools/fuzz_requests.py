"""Look-ups and predictions over HTTP that are spoiled in every way, for `fuzz_reactor`: an exchange is a function of a seed and a number.

The models that they ask of are those of `fuzz_reactor.write_models`.
"""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

ROWS = 20_000  # of the large table, more than its memory takes
WORDS = [b"", "ü✓".encode(), b"w1\xff", b"w" * 300, b"\xed\xa0\x80", b"w\x00"]  # some are no UTF-8
EDGES = [0, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)]
ODD = [
    1.5,
    1e3,
    -0.0,
    1e300,
    1e-320,
    0.30000000000000004,
    1 << 63,
    1 << 64,
    (-1 << 63) - 1,
    9007199254740993,
    True,
    None,
    "1",
    [1],
    {},
]


# --- requests


@dataclass
class Request:
    """A request in parts, each to be spoiled by itself; `close_up` makes bytes of them."""

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
        return b"".join(self.drawn(rng))

    def drawn(self, rng: random.Random) -> list[bytes]:
        return [self._part(rng, *part) for part in self.parts]

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
        if kind == "numbers":
            return struct.pack(f"<{count}f", *(rng.choice([0.0, 1.0, -2.5, 1e-3, 7e30]) for _ in range(count)))
        if kind == "words":
            texts = [rng.choice(WORDS) if rng.random() < 0.02 else b"w%d" % rng.randrange(60) for _ in range(count)]
            return b"".join(struct.pack("<I", len(text)) + text for text in texts)
        span = rng.choice([10, 250, 600, 2100, ROWS + 50])
        values = [rng.randrange(span) if rng.random() < 0.97 else rng.choice(EDGES) for _ in range(count)]
        return struct.pack(f"<{count}q", *values)


class Template:
    """A look-up or a prediction of one structure that comes again and again, with other sizes, keys and ids."""

    def __init__(self, rng: random.Random) -> None:
        self.model = rng.choice(["one", "words", *["ctr"] * 8, *["scored"] * 3])
        self._features = {"one": ["item_id"], "words": ["word"]}.get(self.model, [])
        if self.model == "ctr":
            all_of_them = [
                "item_id",
                "half",
                "big",
                "clicked",
                "padded",
                "plain_padded",
                "rest",
                "unsigned",
                "seeded",
                "hashed_word",
            ]
            self._features = rng.sample(all_of_them, rng.choice([1, 1, 1, 2, 3]))
        self._seed = rng.randrange(1 << 30)  # of what its requests have in common
        self._sizes = rng.random() < 0.7  # whether they are of sizes at random
        version = rng.choice(
            ["", "", "", "/versions/3", "/versions/1", "/versions/stable", "/versions/mine", "/versions/none"]
        )
        if self.model == "scored":
            version = version.replace("3", "1")
        self.path = f"/v2/models/{self.model}{version}/infer"

    def _make(self, sizes: random.Random) -> tuple[dict[str, Any], Tail]:
        rng, tail = random.Random(self._seed), Tail()
        inputs: list[dict[str, Any]] = []
        outputs: list[dict[str, Any]] = []
        binary = rng.random() < 0.65
        for feature in self._features:
            self._add(rng, sizes, feature, inputs, outputs, tail)
        if self.model == "scored":
            self._add_scored(rng, sizes, inputs, outputs, tail)
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
        return document, tail

    def _add(
        self,
        rng: random.Random,
        sizes: random.Random,
        feature: str,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]],
        tail: Tail,
    ) -> None:
        ragged = feature in ("clicked", "padded", "seeded")
        if rng.random() < 0.35:
            shape = [sizes.randint(0, 6), sizes.randint(0, 6)]
        else:
            shape = [sizes.choice([0, 1, 2, 4, 17, 64, 300])]
            if sizes.random() < 0.01:
                shape = [sizes.choice([9000, 20_000])]
        n = int(np.prod(shape))
        datatype = rng.choice(["INT64", "INT64", "INT64", "UINT64"])

        def add_input(name: str, of: str, size: list[int], kind: str, width: int) -> None:
            count = int(np.prod(size))
            inputs.append(
                {"name": name, "datatype": of, "shape": size, "parameters": {"binary_data_size": count * width}}
            )
            tail.parts.append((kind, count, n))

        if feature in ("word", "hashed_word"):
            add_input(feature, "BYTES", shape, "words", 0)
        else:
            add_input(feature, datatype, shape, "keys", 8)
        if ragged and len(shape) == 1 and rng.random() < 0.6:
            add_input(f"{feature}.offsets", "INT64", [sizes.choice([0, 1, 3, 9])], "offsets", 8)
        if ragged and rng.random() < 0.4:
            other = [*shape[:-1], shape[-1] + 1] if sizes.random() < 0.02 else shape
            add_input(f"{feature}.weights", "FP32", other, "weights", 4)
        rows: dict[str, Any] = {"name": feature}
        if rng.random() < 0.4:
            rows["parameters"] = {"dtype": rng.choice(["FP16", "FP16", "FP32", "FP64"])}
        if ragged and rng.random() < 0.4:
            rows.setdefault("parameters", {})["combiner"] = rng.choice(["sum", "mean", "sqrtn"])
        wanted = rng.choice(["rows", "rows", "both", "both", "found", "nothing"])
        if wanted in ("rows", "both"):
            outputs.append(rows)
        if wanted in ("both", "found"):
            outputs.append({"name": f"{feature}.found"})

    @staticmethod
    def _add_scored(
        rng: random.Random,
        sizes: random.Random,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]],
        tail: Tail,
    ) -> None:
        """A prediction: features and inputs of the dense part's own, of one number of items, now and then of two."""
        n = sizes.choice([0, 1, 2, 4, 17, 64, 300])
        keys = sizes.randint(0, 3 * n)
        other = n + 1 if sizes.random() < 0.03 else n
        tensors = {"user": ("INT64", [other], "keys"), "many": ("INT64", [n, 2], "keys")}
        tensors |= {"hour": ("FP32", [n, 1], "numbers"), "scale": ("FP32", [1], "numbers")}
        if rng.random() < 0.5:
            tensors["bag"] = "INT64", [n, sizes.randint(0, 4)], "keys"
        else:
            tensors |= {"bag": ("INT64", [keys], "keys"), "bag.offsets": ("INT64", [n], "offsets")}
            if rng.random() < 0.5:
                tensors["bag.weights"] = "FP32", [keys], "weights"
        if rng.random() < 0.08:
            del tensors[rng.choice(list(tensors))]
        for name, (datatype, shape, kind) in rng.sample(list(tensors.items()), len(tensors)):
            count = int(np.prod(shape))
            width = 4 if datatype == "FP32" else 8
            inputs.append(
                {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": count * width}}
            )
            tail.parts.append((kind, count, keys))
        wanted = rng.choice([["score"], ["score"], ["score", "whole"], ["whole"], ["score", "user"], []])
        outputs.extend({"name": name} for name in wanted)

    def request(self, rng: random.Random) -> Request:
        document, tail = self._make(rng if self._sizes else random.Random(self._seed))
        parts = tail.drawn(rng)
        for tensor, part in zip(document["inputs"], parts, strict=True):
            if tensor["datatype"] == "BYTES":
                tensor["parameters"]["binary_data_size"] = len(part)
        in_json = rng.random() < 0.4
        if in_json:
            for i, tensor in enumerate(document["inputs"]):
                if rng.random() < 0.98 and _put_into_json(rng, tensor, parts[i]):
                    parts[i] = b""
        if rng.random() < 0.3:
            document["id"] = rng.choice(
                ["", "a", f"{rng.randrange(1 << 40)}", 'a "b" \\ c', "grün", "\n", "\x01", "x" * 300]
            )
        if rng.random() < 0.1:
            document.setdefault("parameters", {})["timeout"] = rng.choice([0, 9_000_000, 60_000_000])
        if rng.random() < 0.2:
            document = dict(rng.sample(list(document.items()), len(document)))
        text = json.dumps(document, separators=rng.choice([None, None, (",", ":")])).encode()
        headers = [
            (b"Host", b"localhost"),
            (b"Content-Length", b"LENGTH"),
            (b"Inference-Header-Content-Length", b"%d" % len(text)),
        ]
        if in_json and rng.random() < 0.9:
            del headers[-1]
        return Request(self.path, headers, text, b"".join(parts))


def _put_into_json(rng: random.Random, tensor: dict[str, Any], part: bytes) -> bool:
    """Move a tensor's elements into the JSON, flat or nested. False where they cannot go there."""
    elements: list[Any] = []
    if tensor["datatype"] == "BYTES":
        while part:
            size = int.from_bytes(part[:4], "little")
            try:
                elements.append(part[4 : 4 + size].decode())
            except UnicodeDecodeError:
                return False
            part = part[4 + size :]
    else:
        dtype = {"INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32}[tensor["datatype"]]
        elements = np.frombuffer(part, dtype).tolist()
    if elements and rng.random() < 0.03:
        elements[rng.randrange(len(elements))] = rng.choice(ODD)
    shape = tensor["shape"]
    if len(shape) == 2 and rng.random() < 0.5:
        width = shape[1] if rng.random() < 0.98 else shape[1] + 1
        elements = [elements[i * width : (i + 1) * width] for i in range(shape[0])]
    del tensor["parameters"]
    tensor["data"] = elements
    if rng.random() < 0.2:
        for name in rng.sample(list(tensor), len(tensor)):
            tensor[name] = tensor.pop(name)
    return True


def plain(rng: random.Random) -> Request:
    """A request that no plan is for."""
    headers = [(b"Host", b"localhost"), (b"Content-Length", b"LENGTH")]
    keys = [rng.randrange(300) for _ in range(3)]
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [3], "data": keys}
    scored = [
        tensor | {"name": "user"},
        tensor | {"name": "bag"},
        tensor | {"name": "many", "shape": [3, 2], "data": 2 * keys},
    ]
    scored += [
        {"name": name, "datatype": "FP32", "shape": shape, "data": [0.5] * shape[0]}
        for name, shape in (("hour", [3, 1]), ("scale", [1]))
    ]
    documents: list[tuple[str, Any]] = [
        ("/v2/models/one/infer", {"inputs": [tensor]}),
        ("/v2/models/one/infer", {"inputs": [tensor], "id": "a"}),
        ("/v1/models/one:predict", {"instances": keys}),
        ("/v1/models/one:predict", {"inputs": keys}),
        ("/v1/models/one/versions/1:predict", {"instances": [{"item_id": key} for key in keys]}),
        ("/v2/models/none/infer", {"inputs": [tensor]}),
        ("/v2/models/scored/infer", {"inputs": scored}),
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


def _listed_header(rng: random.Random, request: Request) -> None:
    name = rng.choice(
        [
            b"Accept",
            b"User-Agent",
            b"traceparent",
            b"Cookie",
            b"X-Forwarded-For",
            b"content-type",
            b"via",
            b"x-correlation-id",
            b"sec-fetch-mode",
            b"TE",
        ]
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
        b"*",
        b"gzip, identity;q=0",
        b"identity;q=0.0, deflate",
        b"*;q=0, gzip",
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
        text[:-1] + b', "other": 1}', text[:-1] + b', "other": null, "more": -1}', text[:-1] + b', "id": null}', text[:-1] + b', "id": 1e5}',
        text.replace(b"300", b"3e2"), text.replace(b"4", b"04"), text.replace(b"8", b"9223372036854775808"), text.replace(b"1", b"NaN"), b"[" * 5000 + text,
        text.replace(b'"outputs"', b'"outputs": [], "outputs"'), text.replace(b'"name"', b'"n\\u0061me"'), text.replace(b"{", b"{\n\t ", 3), text.replace(b"item", b"itom"), text.replace(b"INT64", b"INT32"), text.replace(b"INT64", b"UINT64"),
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
    _other_case: 2, _listed_header: 3, _new_header: 3, _odd_value: 4, _twice: 2, _missing: 3, _host: 2, _line: 4, _line_ends: 1,
    _colon: 2, _connection: 3, _upgrade: 1, _chunked: 2, _expect: 1, _coded: 1, _accepted: 2, _id: 1, _timeout: 2, _origin: 1,
    _long_header: 2, _many_headers: 1, _length: 3, _json_length: 3, _json_text: 8, _tail: 5, _bytes: 6,
}  # fmt: skip


@dataclass
class Exchange:
    """`messages` are what the requests are meant to be; `packets` what is sent, with pauses of `pause_s` between them.

    `half_closes`: behind them, and a pause, the client ends its side; `is_cut`: it does so before all of them.
    """

    number: int
    messages: list[bytes]
    spoiled: list[str]
    packets: list[bytes] = field(default_factory=list)
    pause_s: float = 0.0
    half_closes: bool = False
    is_cut: bool = False


def make_exchange(seed: int, number: int, templates: list[Template], half_closes: float = 0.0) -> Exchange:
    """`half_closes`: the share of exchanges in which the client ends its side."""
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
    of_end = random.Random(f"end {seed}-{number}")
    if of_end.random() < half_closes:
        _end_side(of_end, exchange)
    return exchange


def _end_side(rng: random.Random, exchange: Exchange) -> None:
    """Have the client end its side, now and then in the middle of what it sends."""
    exchange.half_closes, exchange.is_cut = True, rng.random() < 0.3
    exchange.spoiled.append("cut short" if exchange.is_cut else "half-closed")
    exchange.pause_s = rng.choice([exchange.pause_s, 0.0, 0.002, 0.02])
    if exchange.is_cut:
        left, packets = rng.randrange(sum(map(len, exchange.packets))), exchange.packets
        exchange.packets = []
        for packet in packets:
            exchange.packets.append(packet[:left])
            left -= len(exchange.packets[-1])
        exchange.packets = [packet for packet in exchange.packets if packet]
        exchange.messages = [b"".join(exchange.packets), b""]
