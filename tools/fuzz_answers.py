"""What nodes, schema registries and servers of a cluster answer, as targets of `tools/fuzz.py`.

An input is a line that says what was asked, and then the answer as it comes over the wire. Servers of their own send
it over real sockets; replies of a cluster to other things than look-ups go straight to redis-py's parser.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from tierstore.engine.placements.cluster.shared_model import SharedModel, model_names
from tierstore.engine.placements.upstream.choice import ModelsDocument, ReportedModel, VersionState, choose
from tierstore.engine.placements.upstream.model import UpstreamModel, _load_of
from tierstore.engine.placements.upstream.placement import _fill
from tierstore.engine.versions.rows import Place
from tierstore.errors import TierstoreError
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.registry import Registry
from tierstore.kafka.row_formats import decoder, text_decoder
from tierstore.kafka.rows import RowReader
from tierstore.tiers.machines import Machines, Options
from tierstore.tiers.remote import calls, cluster, lookup
from tierstore.tiers.remote.layout import slot_of
from tierstore.tiers.remote.tier import RemoteTable
from tierstore.tiers.remote.write import Writer
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import UpstreamNode
from tierstore.tiers.upstream.layout import ABSENT, FOREIGN, THERE
from tierstore.tiers.upstream.options import NodeAddress
from tierstore.tiers.upstream.peer import Peer
from tierstore.tiers.upstream.table import Nodes, Ownership, OwnerSource, UpstreamTable
from tools.fuzz_target import Failure, Target, spoil_bytes, spoil_json, spoil_numbers
from tools.raw_server import RawRedis, RawServer, http_answer, is_whole_http

KEYS, ROW_BYTES, TIMEOUT_S = np.arange(6), 16, 2.0
OPTIONS = Options(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S, suspect_s=0.0)
QUICK = Options(timeout_s=0.2, connect_timeout_s=0.2, suspect_s=0.0)  # answers are whole at once, or never
_HEAD_END = b"\r\n\r\n"
_HEADS = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked",
    b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1",
    b"HTTP/1.1 100 C\r\n\r\n" * 50 + b"HTTP/1.1 200 OK",
    b"HTTP/1.1 503 No\r\nContent-Length: 3",
    b"HTTP/1.1 204 No",
    b"HTTP/1.0 200 OK",
]


def asked(question: str, answer: bytes) -> bytes:
    """An input."""
    return question.encode() + b"\n" + answer


class _Answers(Target):
    """Asks a question, and has it answered. `questions` by name; what they return is an outcome."""

    questions: dict[str, Callable[[], object]]

    def run(self, data: bytes) -> str:
        name, _, answer = data.partition(b"\n")
        question = self.questions.get(name.decode(errors="replace"))
        if question is None:
            return "no question"
        self.set_answer(answer)
        try:
            return f"{name.decode()}: taken: {question()}"
        except TierstoreError as error:
            return f"{name.decode()}: {type(error).__name__}: {error}"

    def set_answer(self, answer: bytes) -> None:
        raise NotImplementedError

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        name, _, answer = data.partition(b"\n")
        if rng.random() < 0.05:
            name = rng.choice(list(self.questions)).encode()
        return name + b"\n" + self.spoil_answer(answer, rng)

    def spoil_answer(self, answer: bytes, rng: random.Random) -> bytes:
        return spoil_http(answer, rng)


def spoil_http(answer: bytes, rng: random.Random) -> bytes:
    """The head of an answer other, or its body, with a length that is right."""
    head, _, body = answer.partition(_HEAD_END)
    match rng.randrange(10):
        case 0:
            return spoil_bytes(answer, rng)
        case 1:
            return rng.choice(_HEADS) + _HEAD_END + body
        case 2:
            return spoil_bytes(head, rng) + _HEAD_END + body
    spoil = spoil_json if body[:1] in (b"{", b"[") else rng.choice([spoil_numbers, spoil_bytes])
    return http_answer(spoil(body, rng))


class NodeAnswers(_Answers):
    """What peers and nodes upstream answer."""

    name = "nodes"

    def __init__(self) -> None:
        self._answer = b""
        self._server = RawServer(lambda _: self._answer, is_whole_http)
        machines: Machines[Any, Any] = Machines(OPTIONS, "the fuzzer")
        self._node = node = UpstreamNode(NodeAddress("127.0.0.1", self._server.port), machines, None, None)
        peer, self._machines = Peer(node), machines
        state = ReportedModel(1, (0, 9), {1: VersionState("a", 9)}, np.ones(1, np.bool_))
        watch: Any = SimpleNamespace(node=node, problem=None, state=lambda _: state, wake=lambda: None)
        self._watches = [watch]
        source = OwnerSource(lambda: Ownership(np.ones((1, 1), np.bool_), "a"), lambda _: None, lambda: 9)
        self._table = UpstreamTable(Nodes([node], machines), "ctr", 1, "item", ROW_BYTES, source)
        self.questions = {
            "logs": lambda: len(peer.logs().models),
            "digest": lambda: peer.digest("ctr", 1, 2) is None,
            "deltas": lambda: self._deltas(peer),
            "image": lambda: peer.image("ctr").backup is None,
            "read": lambda: (
                len(peer.read("ctr", "files/0-1", 0, 4096)) <= 4096 or self._wrong("more than was asked for")
            ),
            "models": self._models,
            "version": self._version,
            "files": lambda: len(self._upstream().files(1, _load_of("a"))),
            "rows": self._rows,
            "explain": self._explain,
        }

    def __enter__(self) -> Target:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._machines.close()
        self._server.__exit__()

    def seeds(self) -> list[bytes]:
        log = {"active": 1, "start": 0, "last": 3, "damage": None, "rollbacks": [[1, 2]]}
        file = {"path": "1/version.json", "bytes": 3, "xxh3": "0" * 16, "changed_ns": 5}
        backup = {"format": 1, "model": "ctr", "version": 1, "seq": 3, "files": [file]}
        of_model = {
            "active": 1, "log": [0, 3], "versions": {"1": {"line": "a" * 16, "seq": 3}},
            "partitions": {"count": 8, "own": [[0, 2], [4, 7]]},
        }  # fmt: skip
        record = {
            "tables": {"item": {"rows": 3, "id": 0, "times": False}}, "loaded_at_s": 1.0,
            "manifest": {"tables": [{"name": "item", "rows": 4}]},
        }  # fmt: skip
        key = {"tier": "disk", "why": None, "stored": "00" * ROW_BYTES}
        documents: dict[str, list[Any]] = {
            "logs": [{"node": "n", "copying": False, "models": {"ctr": log}}],
            "digest": [{"digest": "0" * 16}, {"digest": None}],
            "image": [{"number": 1, "backup": backup}, {"number": 1, "done": 1, "total": 2}],
            "models": [{"models": {"ctr": of_model, "other": {**of_model, "partitions": None}}}],
            "version": [{"record": record, "files": ["dense.onnx"], "colliding": False}],
            "files": [{"record": record, "files": [], "colliding": False}],
            "explain": [{"keys": [key] * 3 + [{**key, "stored": None}] * 3}],
        }  # fmt: skip
        deltas = [wire.LoggedDelta(seq, xxhash.xxh3_64_hexdigest(data), data) for seq, data in ((2, b"abc"), (3, b""))]
        rows = [
            wire.encode_rows(5, np.array(states, np.uint8), np.ones((states.count(THERE), ROW_BYTES), np.uint8))
            for states in ([THERE, THERE, ABSENT, THERE, THERE, ABSENT], [THERE, FOREIGN, ABSENT] * 2)
        ]
        seeds = [
            asked(name, http_answer(json.dumps(of).encode())) for name, all_of in documents.items() for of in all_of
        ]
        seeds += [
            asked("deltas", http_answer(b"".join(bytes(part) for part in wire.encode_entries(deltas)))),
            *(asked("rows", http_answer(b"".join(bytes(part) for part in one))) for one in rows),
            asked("read", http_answer(b"x" * 4096)),
            asked("logs", http_answer(b'{"error": "no"}', 503)),
        ]
        return seeds

    def set_answer(self, answer: bytes) -> None:
        self._answer = answer
        self._machines.forget(self._node.address)

    @staticmethod
    def _wrong(why: str) -> object:
        raise Failure(why)

    def _deltas(self, peer: Peer) -> object:
        found = peer.deltas("ctr", 1, 4, 1 << 20)
        if [one.seq for one in found] != list(range(2, 2 + len(found))) or len(found) > 4:
            raise Failure(f"deltas {[one.seq for one in found]} of 2 to 5")
        return len(found)

    def _models(self) -> object:
        document = self._node.document(ModelsDocument, "/upstream/models", timeout_s=TIMEOUT_S)
        states = [ReportedModel.of(model) for model in document.models.values()]
        for state in states:
            choose([state, None], 1, {})
        return len(states)

    def _upstream(self) -> UpstreamModel:
        model = UpstreamModel("ctr", self._watches, lambda: 1, 1 << 20)
        model.pointer()
        return model

    def _version(self) -> object:
        return len(self._upstream().versions())

    def _rows(self) -> object:
        rows, state = np.full((len(KEYS), ROW_BYTES), 7, np.uint8), np.zeros(len(KEYS), np.uint8)
        marks = self._table.fetch(KEYS, rows, state, deadline_s=time.monotonic() + TIMEOUT_S, upto=9)
        return f"{(state == 0).sum()} pending, {marks.highest < 0}"

    def _explain(self) -> object:
        places = [Place() for _ in KEYS]
        _fill(self._node, "/explain", b"", places, ROW_BYTES, TIMEOUT_S)
        return sorted({str(place.error)[:40] for place in places})


class RegistryAnswers(_Answers):
    """What a schema registry answers, and a message that is read by it."""

    name = "registry"

    def __init__(self) -> None:
        self._answers: list[bytes] = [b""]
        self._server = RawServer(self._next, is_whole_http)
        self.questions = {kind: lambda kind=kind: self._read(kind) for kind in ("avro", "protobuf")}

    def __enter__(self) -> Target:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def _next(self, _: bytes) -> bytes:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def set_answer(self, answer: bytes) -> None:
        """The content of the message after a length, and then the answers, each after one."""
        parts = []
        while len(answer) >= 4 and len(parts) < 50:
            size = int.from_bytes(answer[:4], "big")
            parts.append(answer[4 : 4 + size])
            answer = answer[4 + size :]
        self._content, self._answers = (parts or [b""])[0], parts[1:] or [b""]

    def spoil_answer(self, answer: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return spoil_bytes(answer, rng)
        self.set_answer(answer)
        parts = [self._content, *self._answers]
        at = rng.randrange(len(parts))
        parts[at] = self._spoil_schema(parts[at], rng) if at else spoil_bytes(parts[at], rng)
        return _joined(parts)

    @staticmethod
    def _spoil_schema(answer: bytes, rng: random.Random) -> bytes:
        """An answer other, or within a sound one the schema."""
        body = answer.partition(_HEAD_END)[2]
        try:
            document = json.loads(body)
            schema = document["schema"].encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return spoil_http(answer, rng)
        if rng.random() < 0.4:
            return spoil_http(answer, rng)
        document["schema"] = (spoil_json if schema[:1] in b"{[" else spoil_bytes)(schema, rng).decode(errors="replace")
        return http_answer(json.dumps(document).encode())

    def seeds(self) -> list[bytes]:
        import base64

        from google.protobuf import descriptor_pb2

        file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="shop", syntax="proto3")
        file.dependency.append("google/protobuf/timestamp.proto")
        kind = file.message_type.add(name="Row")
        kind.field.add(name="key", number=1, type=3, label=1)
        kind.field.add(name="vector", number=2, type=2, label=3)
        kind.field.add(name="event_time", number=3, type=11, label=1, type_name=".google.protobuf.Timestamp")
        proto = {"schemaType": "PROTOBUF", "schema": base64.b64encode(file.SerializeToString()).decode()}
        row = b"\x00\x08\x07\x12\x08" + struct.pack("<2f", 1.5, -2)
        vector = {
            "type": "record",
            "name": "shop.V",
            "fields": [{"name": "numbers", "type": {"type": "array", "items": "float"}}],
        }
        fields = [
            {"name": "key", "type": ["null", "long"]},
            {"name": "vector", "type": {"type": "array", "items": "float"}},
        ]
        plain = {"type": "record", "name": "R", "fields": fields}
        refers = {"type": "record", "name": "R", "fields": [*fields, {"name": "more", "type": ["null", "shop.V"]}]}
        content = b"\x02\x0e\x04" + struct.pack("<2f", 1.5, -2) + b"\x00"
        reference = [{"name": "shop.V", "subject": "v", "version": 1}]
        return [
            asked("avro", _joined([content, http_answer(json.dumps({"schema": json.dumps(plain)}).encode())])),
            asked("avro", _joined([content + b"\0", *(http_answer(json.dumps(of).encode()) for of in (
                {"schema": json.dumps(refers), "references": reference}, {"schema": json.dumps(vector)},
            ))])),
            asked("protobuf", _joined([row, http_answer(json.dumps(proto).encode())])),
            asked("protobuf", _joined([b"\x02\x00" + row[1:], *(http_answer(json.dumps(of).encode()) for of in (
                {**proto, "references": [{"name": "other.proto", "subject": "o", "version": 1}]},
                {"schema": base64.b64encode(descriptor_pb2.FileDescriptorProto(name="o").SerializeToString()).decode()},
            ))])),
        ]  # fmt: skip

    def _read(self, kind: str) -> object:
        registry = Registry(f"http://127.0.0.1:{self._server.port}")
        names = ("key", "vector", "event_time")
        reader = RowReader(decoder(kind, names, registry=registry, schema=None), text_decoder, {})
        value = b"\0\0\0\0\5" + self._content
        row = reader.read("item", KafkaMessage(0, 1, value, [], 1, b"7"))
        return f"{type(row.key).__name__}, {None if row.vector is None else len(row.vector) > 0}"


def _joined(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class RedisAnswers(_Answers):
    """What servers of a cluster answer to look-ups, to writes, and to questions about slots and models."""

    name = "redis"

    def __init__(self) -> None:
        self._server = RawRedis(closes=True)
        self._stack = ExitStack()

    def __enter__(self) -> Target:
        stack = self._stack
        stack.enter_context(self._server)
        for module, name in ((lookup, "_PAUSE_S"), (calls, "_PAUSE_S"), (cluster, "_REFRESH_EVERY_S")):
            stack.enter_context(mock.patch.object(module, name, 0.0))
        self._cluster = cluster.connect(f"redis://127.0.0.1:{self._server.port}", QUICK)
        stack.callback(self._cluster.close)
        self._topology = self._cluster.topology
        self._cluster._client = mock.Mock(execute_command=self._parse)
        shared = SharedModel(self._cluster, "ctr")
        self.questions = {
            "slots": self._slots,
            "rows": self._rows,
            "call": lambda: calls.call(self._cluster, slot_of(b"0"), [calls.command(b"HLEN", b"x")], timeout_s=0.02),
            "states": self._states,
            "pointer": lambda: shared.pointer().current is None,
            "versions": lambda: len(shared.versions()),
            "files": lambda: len(shared.files(1, 0.0)),
            "log": lambda: len(shared.read(1, 4)),
            "reports": lambda: len(shared.beat("n", None)),
            "append": lambda: shared.append(2, "0" * 16, b"", None),
            "lease": lambda: shared.lease() is None,
            "names": lambda: len(model_names(self._cluster)),
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def seeds(self) -> list[bytes]:
        digest, port = xxhash.xxh3_64_hexdigest(b"abc").encode(), b":%d" % self._server.port
        marks, row = _bulk(b"5", b"5"), b"x" * ROW_BYTES
        rows = marks + b"*6\r\n" + b"$%d\r\n%s\r\n" % (ROW_BYTES, row) * 3 + b"$-1\r\n" * 3 + marks
        return [
            asked("slots", b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n" + port + b"\r\n$2\r\nid\r\n"),
            asked("rows", rows),
            asked("rows", b"-MOVED 5 127.0.0.1" + port + b"\r\n" + b"-ASK 5 127.0.0.1" + port + b"\r\n" + b"-LOADING x\r\n"),
            asked("call", b":5\r\n"),
            asked("call", b"-MOVED 5 127.0.0.1" + port + b"\r\n"),
            asked("states", _bulk(b"5", b"5", b"1", b"0", b"5 " + digest)),
            asked("pointer", _bulk(
                b"seq", b"3", b"generation", b"4", b"current", b"1", b"share", b"0.5", b"mark:1", b"2", b"server", b"id",
                b"digest", b"3 " + digest,
            )),
            asked("versions", _bulk(b"1", b'{"state": "ready", "record": {"loaded_at_s": 5.0}}', b"2", b'{"state": "loading"}')),
            asked("files", _bulk(b"dense.onnx", b"abc")),
            asked("log", b"*1\r\n*2\r\n$3\r\n2-0\r\n" + _bulk(b"digest", digest, b"data", b"abc", b"ms", b"5", b"after", b"")),
            asked("reports", _bulk(b"n", b'{"seq": 3}')),
            asked("append", _bulk(b"appended", b"2", digest)),
            asked("append", _bulk(b"at", b"2", digest)),
            asked("lease", b"$7\r\nowner 3\r\n"),
            asked("names", _bulk(b"ctr", b"other")),
        ]  # fmt: skip

    def set_answer(self, answer: bytes) -> None:
        self._server.answer, self._server.slots = answer, None
        for address in self._cluster.masters():
            self._cluster.machines.forget(address)
        self._cluster._topology = self._topology  # not what the answer before has said of it

    def spoil_answer(self, answer: bytes, rng: random.Random) -> bytes:
        """Bytes other, or one of the numbers of sizes."""
        lines = answer.split(b"\r\n")
        at = rng.randrange(len(lines))
        if rng.random() < 0.5 or lines[at][:1] not in (b":", b"$", b"*"):
            return spoil_bytes(answer, rng)
        number = rng.choice(
            [-1, -2, 0, 1, 16384, 65536, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63), "x", "", "1e3"]
        )
        lines[at] = lines[at][:1] + str(number).encode()
        return b"\r\n".join(lines)

    def _parse(self, *_: object) -> object:
        """What redis-py makes of the answer."""
        from redis.connection import Connection

        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(TIMEOUT_S)
            theirs.sendall(self._server.answer[: 1 << 16])
            theirs.shutdown(socket.SHUT_WR)
            connection: Any = Connection(protocol=2)
            connection._sock = ours
            connection._parser.on_connect(connection)
            return connection.read_response()

    def _slots(self) -> object:
        self._server.slots = self._server.answer
        made = cluster.connect(f"redis://127.0.0.1:{self._server.port}", QUICK)
        made.close()
        if not all(0 <= slot < 16384 for slot in made.topology):
            raise Failure("a slot that there is not")
        return len(made.topology) > 0

    def _rows(self) -> object:
        table = RemoteTable(self._cluster, "ctr", 1, "item", [b"0"], ROW_BYTES)
        rows, state = np.zeros((len(KEYS), ROW_BYTES), np.uint8), np.zeros(len(KEYS), np.uint8)
        marks = table.fetch(KEYS, rows, state, deadline_s=time.monotonic() + 0.3)
        return f"{(state == 0).sum()} pending, {marks.highest < 0}"

    def _states(self) -> object:
        with Writer(self._cluster, "ctr", 1, {"item": ROW_BYTES}, [b"0"], timeout_s=0.02) as writer:
            return writer.states()[0] is None


def _bulk(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
