"""Requests over HTTP as the world sends them: no two of one size, each with an id of its own, some on new connections.

A `Request` is what a client would send, but for its id, which each sending gives it anew. `Clients` send them on a
number of connections, all at once and then read all, and check each answer: its status and the size of its tensors always,
every value of one in `CHECKED`. One thread; only the servers' processor time is worth comparing.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import NormalDist
from typing import Any

import numpy as np

import tierstore
from benchmarks.wire_lookup import connect, cpu_s
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, vectors_of

MANY = 26  # features of the service that `wire_servers wild` runs, beside FEATURE
NAMED = "item_name"  # its feature with string keys
CHECKED = 20  # of so many answers one is compared value by value
_NORMAL = NormalDist()
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.I)
_JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length: (\d+)", re.I)


@dataclass(frozen=True)
class Request:
    """`rest` is the JSON without its brace and its id, `tensors` what follows it; `expected` makes the answer's tensors."""

    rest: bytes
    tensors: bytes
    keys: int
    answer_bytes: int
    expected: Callable[[], Sequence[np.ndarray]]
    model: str = MODEL
    tolerance: float = 0.0  # relative, of each value

    def bytes(self, id: str | None) -> bytes:
        text = b"{" + (b'"id":"%b",' % id.encode() if id is not None else b"") + self.rest
        return (
            b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
            b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%b%b"
            % (self.model.encode(), len(text), len(text) + len(self.tensors), text, self.tensors)
        )


@dataclass(frozen=True)
class Asked:
    """One feature of a request: its keys and, for bags, where each begins."""

    name: str
    keys: np.ndarray
    offsets: np.ndarray | None = None
    vectors: Callable[[np.ndarray], np.ndarray] = vectors_of  # of keys

    @property
    def rows(self) -> int:
        """Rows of the answer."""
        return len(self.keys if self.offsets is None else self.offsets)

    def expected(self) -> np.ndarray:
        """What plain NumPy says. Sums of up to 255 rows are whole numbers that float32 has exactly."""
        rows = self.vectors(self.keys)
        if self.offsets is None:
            return rows
        sums = np.concatenate([np.zeros((1, DIM)), np.cumsum(rows, axis=0, dtype=np.float64)])
        ends = np.append(self.offsets[1:], len(self.keys))
        return (sums[ends] - sums[self.offsets]).astype(np.float32)


def request(asked: Sequence[Asked]) -> Request:
    """A look-up of these features, all in the binary form."""
    inputs, tensors = [], []
    for one in asked:
        arrays = {one.name: one.keys} | ({} if one.offsets is None else {f"{one.name}.offsets": one.offsets})
        for name, array in arrays.items():
            inputs.append(tensor(name, "INT64", len(array), array.nbytes))
            tensors.append(array.tobytes())
    outputs = [{"name": one.name, "parameters": {"binary_data": True}} for one in asked]
    return Request(
        rest_of(inputs, outputs),
        b"".join(tensors),
        sum(len(one.keys) for one in asked),
        sum(one.rows for one in asked) * ROW_BYTES,
        lambda: [one.expected() for one in asked],
    )


def tensor(name: str, datatype: str, length: int, nbytes: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [length], "parameters": {"binary_data_size": nbytes}}


def rest_of(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> bytes:
    return json.dumps({"inputs": inputs, "outputs": outputs}, separators=(",", ":")).encode()[1:]


def single(keys: np.ndarray) -> Request:
    """Keys of the one feature that most benchmarks ask for."""
    return request([Asked(FEATURE, keys)])


def named(keys: np.ndarray, rows: np.ndarray) -> Request:
    """String keys of the rows of these numbers."""
    strings = [name_of(row).encode() for row in rows.tolist()]
    tensors = b"".join(len(text).to_bytes(4, "little") + text for text in strings)
    given = tensor(NAMED, "BYTES", len(strings), len(tensors))
    rest = rest_of([given], [{"name": NAMED, "parameters": {"binary_data": True}}])
    return Request(rest, tensors, len(keys), len(keys) * ROW_BYTES, lambda: [vectors_of(keys)])


def name_of(row: int) -> str:
    return f"item:{row:07}"


def feature(number: int) -> str:
    return f"f{number:02}"


def pools(number: int) -> bool:
    """Whether a feature of `wild` has bags: the tags of each item, or the one bag of what the user has clicked."""
    return number % 4 in (0, 3)


def write_features(writer: tierstore.SnapshotWriter) -> None:
    """The features of `ranking`, all of the table `item`."""
    for number in range(MANY):
        writer.feature(feature(number), table="item", combiner="sum" if pools(number) else None)


def ranking(
    draw: Callable[[int], np.ndarray],
    features: int,
    items: int,
    clicks: int,
    tags: np.ndarray,
    vectors: Callable[[np.ndarray], np.ndarray] = vectors_of,
) -> Request:
    """A request to rank `items`, with the first `features` of the model. `draw` gives so many keys, `vectors` their rows.

    By the feature's number: tags of each item (bags of the lengths `tags`, some of them empty), a key of the user, a
    key of each item, clicks of the user (one bag).
    """
    asked = []
    for number in range(features):
        name = feature(number)
        match number % 4:
            case 0:
                asked.append(Asked(name, draw(int(tags.sum())), np.append(0, np.cumsum(tags)[:-1]).astype(np.int64)))
            case 1:
                asked.append(Asked(name, draw(1)))
            case 2:
                asked.append(Asked(name, draw(items)))
            case _:
                asked.append(Asked(name, draw(clicks), np.zeros(1, np.int64)))
    return request([replace(one, vectors=vectors) for one in asked])


def heavy_tailed(rng: np.random.Generator, median: float, most: int, size: int) -> np.ndarray:
    """Sizes from 1 to `most`, lognormal: half of them below `median`, one in a hundred above ten times that.

    One from each of `size` ranges as likely, in random order, so that no turn of a benchmark has more of the long ones.
    """
    shares = rng.permutation((np.arange(size) + rng.uniform(1e-9, 1, size)) / size)
    drawn = [math.exp(math.log(median) + _NORMAL.inv_cdf(share)) for share in shares.tolist()]
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


class Link:
    """One connection, and what is read from it."""

    def __init__(self, port: int) -> None:
        self._socket = connect(port)
        self._space = bytearray(1 << 20)

    def send(self, message: bytes) -> None:
        self._socket.sendall(message)

    def answer(self) -> memoryview:
        """The tensors of the next answer. They are overwritten by the one after it."""
        got, end = 0, -1
        while end < 0:
            got += self._receive(got)
            end = self._space.find(b"\r\n\r\n", 0, got)
        head = bytes(self._space[:end])
        length = _LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200") or length is None:
            raise RuntimeError(f"{head!r}: {bytes(self._space[end + 4 : got])[:300]!r}")
        whole = end + 4 + int(length[1])
        if whole > len(self._space):
            self._space = self._space + bytes(
                whole - len(self._space)
            )  # whoever holds the answer before keeps its space
        while got < whole:
            got += self._receive(got)
        text = _JSON_LENGTH.search(head)
        return memoryview(self._space)[end + 4 + (int(text[1]) if text else whole) : whole]

    def _receive(self, at: int) -> int:
        if at == len(self._space):
            raise RuntimeError(f"a head of more than {at} bytes")
        with memoryview(self._space) as space:
            count = self._socket.recv_into(space[at:])
        if not count:
            raise ConnectionError("the server closed the connection")
        return count

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Spent:
    """Processor time of the server over these requests, and how long a client waited for each."""

    cpu_s: float
    requests: int
    keys: int
    waits_s: tuple[float, ...] = ()

    @property
    def us_a_request(self) -> float:
        return self.cpu_s / self.requests * 1e6

    @property
    def us_a_key(self) -> float:
        return self.cpu_s / self.keys * 1e6


class Clients:
    """Connections to one server. `new_share` of the requests come on a new connection, which takes the place of another.

    Values are compared where `stamp` gave the same even number before a request and after its answer.
    """

    def __init__(
        self,
        pid: int,
        port: int,
        connections: int,
        *,
        ids: bool = True,
        new_share: float = 0.0,
        link: Callable[[int], Link] = Link,
        stamp: Callable[[], int] = int,
    ) -> None:
        self._pid, self._port, self._ids, self._new_share, self._link = pid, port, ids, new_share, link
        self._stamp = stamp
        self._rng = np.random.default_rng(connections)
        self._links = [link(port) for _ in range(connections)]
        self._numbers = count(1)

    def turn(self, requests: Sequence[Request]) -> Spent:
        """Send all of them, in waves of one on each connection."""
        waits_s = []
        before = cpu_s(self._pid)
        for first in range(0, len(requests), len(self._links)):
            wave = requests[first : first + len(self._links)]
            stamp = self._stamp()
            for at, one in enumerate(wave):
                if self._new_share and self._rng.random() < self._new_share:
                    self._links[at].close()
                    self._links[at] = self._link(self._port)
                message = one.bytes(self._id())
                began = time.perf_counter()
                self._links[at].send(message)
            for number, (link, one) in enumerate(zip(self._links, wave, strict=False), first):
                tensors = link.answer()
                waits_s.append(time.perf_counter() - began)
                is_settled = stamp % 2 == 0 and self._stamp() == stamp
                self._check(tensors, one, values=number % CHECKED == 0 and is_settled)
        used = cpu_s(self._pid) - before
        alone = len(self._links) == 1  # else an answer was read after those of other connections
        return Spent(used, len(requests), sum(one.keys for one in requests), tuple(waits_s) if alone else ())

    def _id(self) -> str | None:
        """Some clients count, others draw a UUID."""
        if not self._ids:
            return None
        number = next(self._numbers)
        return str(number) if number % 2 else str(uuid.uuid4())

    @staticmethod
    def _check(tensors: memoryview, one: Request, *, values: bool) -> None:
        if len(tensors) != one.answer_bytes:
            raise RuntimeError(f"expected {one.answer_bytes} bytes of tensors, got {len(tensors)}")
        if values:
            expected = np.concatenate([array.ravel() for array in one.expected()])
            np.testing.assert_allclose(np.frombuffer(tensors, np.float32), expected, rtol=one.tolerance)

    def close(self) -> None:
        for link in self._links:
            link.close()


def counters(port: int) -> dict[str, float]:
    """What the service has counted of its reactors: `answers`, and what they handed on, by reason where it says that."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode()
    return of_reactors(text)


def of_reactors(text: str) -> dict[str, float]:
    """The same, of the text of its metrics."""
    found: dict[str, float] = {"answers": 0.0}
    for name, labels, value in re.findall(r"^tierstore_reactor_(answers|handed_on)_total\{([^}]*)\} (\S+)", text, re.M):
        reason = re.search(r'reason="([^"]*)"', labels)
        kind = name if reason is None else f"{name}.{reason[1]}"
        found[kind] = found.get(kind, 0.0) + float(value)
    return found
