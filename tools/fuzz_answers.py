"""What nodes, schema registries and servers of a cluster answer, as targets of `tools/fuzz.py`.

An input is a line that says what was asked, and then the answer as it comes over the wire. Servers of their own send
it over real sockets; replies of a cluster to other things than look-ups go straight to redis-py's parser.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tierstore.engine.placements.cluster.shared_model import SharedModel, model_names
from tierstore.engine.placements.upstream.choice import ModelsDocument, ReportedModel, VersionState, choose
from tierstore.engine.placements.upstream.model import UpstreamModel, _load_of
from tierstore.engine.placements.upstream.placement import _fill
from tierstore.engine.versions.rows import Place
from tierstore.errors import TierstoreError
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.registry import Registry
from tierstore.kafka.row_formats import decoder, text_decoder
from tierstore.kafka.row_messages import RowReader
from tierstore.tiers.cluster import commands, lookup, topology
from tierstore.tiers.cluster.redis_keys import slot_of
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.connection_pools import ConnectionPools, Options
from tierstore.tiers.upstream.connections import UpstreamNode
from tierstore.tiers.upstream.options import NodeAddress
from tierstore.tiers.upstream.peer import Peer
from tierstore.tiers.upstream.table import Nodes, Ownership, OwnerSource, UpstreamTable
from tools.fuzz_mutator import parts_of
from tools.raw_server import RawRedis, RawServer, is_whole_http

KEYS, ROW_BYTES, TIMEOUT_S = np.arange(6), 16, 2.0
OPTIONS = Options(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S, suspect_s=0.0)
QUICK = Options(timeout_s=0.2, connect_timeout_s=0.2, suspect_s=0.0)  # answers are whole at once, or never
Run = Callable[[bytes], str]  # an input → what came of it


class Failure(Exception):
    """An input had an outcome that it must not have."""


def _answered(questions: dict[str, Callable[[], object]], set_answer: Callable[[bytes], None]) -> Run:
    """Asks a question by its name, and has it answered. What the question returns is the outcome."""

    def run(data: bytes) -> str:
        line, _, answer = data.partition(b"\n")
        name = line.decode(errors="replace")
        if name not in questions:
            return "no question"
        set_answer(answer)
        try:
            return f"{name}: taken: {questions[name]()}"
        except TierstoreError as error:
            return f"{name}: {type(error).__name__}: {error}"

    return run


@contextmanager
def _nodes() -> Iterator[Run]:
    """What peers and nodes upstream answer."""
    answers, pools = [b""], ConnectionPools[Any, Any](OPTIONS, "the fuzzer")
    with RawServer(lambda _: answers[0], is_whole_http) as server, closing(pools):
        node = UpstreamNode(NodeAddress("127.0.0.1", server.port), pools, None, None)
        peer, reported = Peer(node), ReportedModel(1, (0, 9), {1: VersionState("a", 9)}, np.ones(1, np.bool_))
        watch: Any = SimpleNamespace(node=node, problem=None, state=lambda _: reported, wake=lambda: None)
        source = OwnerSource(lambda: Ownership(np.ones((1, 1), np.bool_), "a"), lambda _: None, lambda: 9)
        table = UpstreamTable(Nodes([node], pools), "ctr", 1, "item", ROW_BYTES, source)

        def deltas() -> int:
            found = peer.deltas("ctr", 1, 4, 1 << 20)
            if [one.seq for one in found] != list(range(2, 2 + len(found))) or len(found) > 4:
                raise Failure(f"deltas {[one.seq for one in found]} of 2 to 5")
            return len(found)

        def read() -> None:
            if len(peer.read("ctr", "files/0-1", 0, 4096)) > 4096:
                raise Failure("more than was asked for")

        def models() -> int:
            document = node.document(ModelsDocument, "/upstream/models", timeout_s=TIMEOUT_S)
            states = [ReportedModel.of(model) for model in document.models.values()]
            for state in states:
                choose([state, None], 1, {})
            return len(states)

        def upstream() -> UpstreamModel:
            model = UpstreamModel("ctr", [watch], lambda: 1, 1 << 20)
            model.pointer()
            return model

        def rows() -> str:
            found, state = np.full((len(KEYS), ROW_BYTES), 7, np.uint8), np.zeros(len(KEYS), np.uint8)
            marks = table.fetch(KEYS, found, state, deadline_s=time.monotonic() + TIMEOUT_S, upto=9)
            return f"{(state == 0).sum()} pending, {marks.highest < 0}"

        def explain() -> object:
            places = [Place() for _ in KEYS]
            _fill(node, "/explain", b"", places, ROW_BYTES, TIMEOUT_S)
            return sorted({str(place.error)[:40] for place in places})

        def set_answer(answer: bytes) -> None:
            answers[0] = answer
            pools.forget(node.address)

        yield _answered(
            {
                "logs": lambda: len(peer.logs().models),
                "digest": lambda: peer.digest("ctr", 1, 2) is None,
                "deltas": deltas,
                "image": lambda: peer.image("ctr").backup is None,
                "read": read,
                "models": models,
                "version": lambda: len(upstream().versions()),
                "files": lambda: len(upstream().files(1, _load_of("a"))),
                "rows": rows,
                "explain": explain,
            },
            set_answer,
        )


@contextmanager
def _registry() -> Iterator[Run]:
    """What a schema registry answers, and a message that is read by it: all of them behind their lengths, the message first."""
    parts = [b""]

    def next_answer(_: bytes) -> bytes:
        return parts.pop(1) if len(parts) > 2 else parts[-1] if len(parts) > 1 else b""

    def set_answer(answer: bytes) -> None:
        parts[:] = parts_of(answer) or [b""]

    with RawServer(next_answer, is_whole_http) as server:

        def read(kind: str) -> str:
            registry, content = Registry(f"http://127.0.0.1:{server.port}"), parts[0]
            made = decoder(kind, ("key", "vector", "event_time"), registry=registry, schema=None)
            message = KafkaMessage(0, 1, b"\0\0\0\0\5" + content, [], 1, b"7")
            row = RowReader(made, text_decoder, {}).read("item", message)
            return f"{type(row.key).__name__}, {None if row.vector is None else len(row.vector) > 0}"

        yield _answered({kind: partial(read, kind) for kind in ("avro", "protobuf")}, set_answer)


@contextmanager
def _redis() -> Iterator[Run]:
    """What servers of a cluster answer to look-ups, to writes, and to questions about slots and models. PORT is the server's own."""
    with ExitStack() as stack:
        server = stack.enter_context(RawRedis(closes=True))
        for module, name in ((lookup, "_PAUSE_S"), (commands, "_PAUSE_S"), (topology, "_REFRESH_EVERY_S")):
            stack.enter_context(mock.patch.object(module, name, 0.0))
        connected = topology.connect(f"redis://127.0.0.1:{server.port}", QUICK)
        stack.callback(connected.close)
        slots_before = connected.topology

        def parse(*_: object) -> object:
            """What redis-py makes of the answer."""
            from redis.connection import Connection

            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.settimeout(TIMEOUT_S)
                theirs.sendall(server.answer[: 1 << 16])
                theirs.shutdown(socket.SHUT_WR)
                connection: Any = Connection(protocol=2)
                connection._sock = ours
                connection._parser.on_connect(connection)
                return connection.read_response()

        def slots() -> bool:
            server.slots = server.answer
            made = topology.connect(f"redis://127.0.0.1:{server.port}", QUICK)
            made.close()
            if not all(0 <= slot < 16384 for slot in made.topology):
                raise Failure("a slot that there is not")
            return len(made.topology) > 0

        def rows() -> str:
            table = ClusterTable(connected, "ctr", 1, "item", [b"0"], ROW_BYTES)
            found, state = np.zeros((len(KEYS), ROW_BYTES), np.uint8), np.zeros(len(KEYS), np.uint8)
            marks = table.fetch(KEYS, found, state, deadline_s=time.monotonic() + 0.3)
            return f"{(state == 0).sum()} pending, {marks.highest < 0}"

        def states() -> bool:
            with Writer(connected, "ctr", 1, {"item": ROW_BYTES}, [b"0"], timeout_s=0.02) as writer:
                return writer.states()[0] is None

        def set_answer(answer: bytes) -> None:
            server.answer, server.slots = answer.replace(b"PORT", b"%d" % server.port), None
            for address in connected.masters():
                connected.pools.forget(address)
            connected._topology = slots_before  # not what the answer before has said of it

        connected._client = mock.Mock(execute_command=parse)
        shared = SharedModel(connected, "ctr")
        yield _answered(
            {
                "slots": slots,
                "rows": rows,
                "call": lambda: commands.call(
                    connected, slot_of(b"0"), [commands.command(b"HLEN", b"x")], timeout_s=0.02
                ),
                "states": states,
                "pointer": lambda: shared.pointer().current is None,
                "versions": lambda: len(shared.versions()),
                "files": lambda: len(shared.files(1, 0.0)),
                "log": lambda: len(shared.read(1, 4)),
                "reports": lambda: len(shared.beat("n", None)),
                "append": lambda: shared.append(2, "0" * 16, b"", None),
                "lease": lambda: shared.lease() is None,
                "names": lambda: len(model_names(connected)),
            },
            set_answer,
        )


TARGETS: dict[str, Callable[[], AbstractContextManager[Run]]] = {
    "nodes": _nodes,
    "registry": _registry,
    "redis": _redis,
}
