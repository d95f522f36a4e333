"""Look-ups of gRPC clients in other languages, many at once on one connection to the port of HTTP, are answered by the reactors."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="needs tritonclient, of the extra dev")

from tritonclient.grpc import service_pb2 as messages

import tierstore
from tests.engine.quick_build import in_process
from tests.interop import proxies
from tests.service.conftest import eventually, settings_for
from tests.service.http2_client import Client
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

HERE = Path(__file__).parent
CLIENTS = HERE.parents[1] / ".clients"
JARS = f"{CLIENTS}/grpc-java/*"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAMING = "/inference.GRPCInferenceService/ModelStreamInfer"
KEYS, UNKNOWN = 5000, -1.0
SHAPE_OF_ROW = np.array([1, -2, 0.5, 1024], np.float32)
DEADLINE_S = 120


def grpc_go() -> list[str]:
    if not (CLIENTS / "bin/grpc-go-calls").exists():
        pytest.skip("no .clients/bin/grpc-go-calls: make client-venvs, which needs Go")
    return [str(CLIENTS / "bin/grpc-go-calls")]


def grpc_js() -> list[str]:
    if not (CLIENTS / "node/.installed").exists() or shutil.which("node") is None:
        pytest.skip("no .clients/node: make client-venvs, which needs Node and npm")
    return ["node", str(HERE / "grpc_calls.mjs"), str(CLIENTS / "node")]


def grpc_java(how: str = "unary", connections: int = 1) -> list[str]:
    if not (CLIENTS / "grpc-java/.installed").exists() or shutil.which("javac") is None:
        pytest.skip("no .clients/grpc-java: make client-venvs, which needs Java 17 and Maven")
    return ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}:{java_classes().name}", "Calls", how, str(connections)]


@cache
def java_classes() -> tempfile.TemporaryDirectory[str]:
    """What `Calls.java` is compiled to, which each run would do anew."""
    where = tempfile.TemporaryDirectory(prefix="tierstore-calls-")
    source = str(HERE / "grpc_java/Calls.java")
    subprocess.run(["javac", "-J-XX:TieredStopAtLevel=1", "-cp", JARS, "-d", where.name, source], check=True)
    return where


def slow(program: str) -> Any:
    return pytest.param(program, marks=pytest.mark.thorough)


PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "grpc-go": grpc_go,
    "grpc-js": grpc_js,
    "grpc-java": grpc_java,
    "grpc-java, many connections": partial(grpc_java, connections=20),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("calls")
    keys = np.arange(KEYS)
    with tierstore.SnapshotWriter(root / "snapshot", model="ctr", version=1) as writer:
        item = writer.table("item", dim=4, default=(UNKNOWN * SHAPE_OF_ROW).tolist())
        item.write(keys, keys[:, None].astype(np.float32) * SHAPE_OF_ROW)
        writer.feature("item_id", table="item")
    with in_process(), Store(settings_for(root)) as store:
        store.load_snapshot(root / "snapshot")
        store.model("ctr").lookup("item_id", keys)
        with ServerThread(store) as server:

            def begins() -> bool:
                with Client(server.port) as client:
                    return client.next() is not None

            eventually(begins, "reactors have begun")
            yield server


def request_of(keys: np.ndarray, id_: str, model: str = "ctr") -> bytes:
    message = messages.ModelInferRequest(model_name=model, id=id_)
    message.inputs.add(name="item_id", datatype="INT64", shape=[len(keys)])
    for name in ("item_id", "item_id.found"):
        message.outputs.add(name=name)
    message.raw_input_contents.append(keys.astype(np.int64).tobytes())
    data: bytes = message.SerializeToString()
    return data


def call(program: list[str], port: int, requests: list[bytes], method: str = METHOD) -> list[str]:
    """The answers of calls that a program makes at once: base64, or what went wrong."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    ran = subprocess.run(
        [*program, f"127.0.0.1:{port}", method],
        input="".join(f"{base64.b64encode(request).decode()}\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def counted(server: ServerThread) -> Counter[str]:
    """How many requests the reactors have answered, and how many they have handed on, by the reason."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    sums: Counter[str] = Counter()
    for name, labels, value in re.findall(
        r"^tierstore_reactor_(answers|handed_on)_total(\S*) (\S+)$", text, flags=re.MULTILINE
    ):
        reason = re.search(r'reason="(\w+)"', labels)
        sums[reason[1] if reason else name] += float(value)
    return sums


def check(program: list[str], port: int, asked: list[tuple[np.ndarray, str]]) -> None:
    """All calls at once get what they ask for."""
    answers = call(program, port, [request_of(*one) for one in asked])
    assert len(answers) == len(asked)
    for (keys, id_), answer in zip(asked, answers, strict=True):
        assert not answer.startswith("error"), answer
        check_answer(keys, id_, messages.ModelInferResponse.FromString(base64.b64decode(answer)))


def check_answer(keys: np.ndarray, id_: str, message: Any) -> None:
    found = keys >= 0
    values = np.where(found, keys, UNKNOWN).astype(np.float32)[:, None] * SHAPE_OF_ROW
    assert (message.model_name, message.id) == ("ctr", id_)
    assert [list(output.shape) for output in message.outputs] == [[len(keys), 4], [len(keys)]]
    assert list(message.raw_output_contents) == [values.tobytes(), found.tobytes()]


def drawn(count: int) -> list[tuple[np.ndarray, str]]:
    """Keys of so many look-ups, of any size, every other one with an id."""
    draw = np.random.default_rng(5)
    sizes = [1, 3, *(2 ** draw.uniform(0, 11, count - 2)).astype(int).tolist()]
    ids = [str(uuid.UUID(bytes=draw.bytes(16))) if number % 2 else "" for number in range(len(sizes))]
    return [(draw.integers(-KEYS // 4, KEYS, size), id_) for size, id_ in zip(sizes, ids, strict=True)]


@pytest.mark.parametrize("program", [name if "many" not in name else slow(name) for name in PROGRAMS])
def test_calls_of_any_size_and_id_are_answered_without_python(server: ServerThread, program: str) -> None:
    command, asked = PROGRAMS[program](), drawn(252)
    check(command, server.port, asked)
    check(command, server.port, [(np.arange(begin, begin + 500), "") for begin in range(0, KEYS, 500)])
    before = counted(server)
    check(command, server.port, [(np.abs(keys), id_) for keys, id_ in asked])
    counts = counted(server) - before
    assert counts["answers"] > len(asked) // 2, dict(counts)
    assert counts["answers"] + counts["rows_on_disk"] == len(asked), dict(counts)  # over gRPC Python has those


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_of_no_model_is_refused_by_its_status(server: ServerThread, program: str) -> None:
    (answer,) = call(PROGRAMS[program](), server.port, [request_of(np.array([1]), "", model="nobody")])
    assert answer.startswith("error")
    assert "nobody" in answer


def test_streams_of_grpc_java_are_answered_in_their_order_and_errors_end_none(server: ServerThread) -> None:
    asked, connections = drawn(40), 3
    requests = [request_of(*one) for one in asked]
    requests.insert(20, request_of(np.array([1]), "wrong", model="nobody"))
    answers = call(grpc_java("stream", connections), server.port, requests, STREAMING)
    assert len(answers) == connections * len(requests)
    read = [messages.ModelStreamInferResponse.FromString(base64.b64decode(answer)) for answer in answers]
    for begin in range(0, len(read), len(requests)):
        of_one = read[begin : begin + len(requests)]
        assert "nobody" in of_one.pop(20).error_message
        for (keys, id_), answer in zip(asked, of_one, strict=True):
            check_answer(keys, id_, answer.infer_response)


@pytest.mark.parametrize("way", proxies.OF_GRPC)
@pytest.mark.parametrize("program", ["grpc-go", slow("grpc-js"), slow("grpc-java, many connections")])
def test_calls_through_a_proxy_are_answered_without_python(
    server: ServerThread, tmp_path: Path, program: str, way: str
) -> None:
    command = PROGRAMS[program]()
    with proxies.started(proxies.OF_GRPC[way], server.port, tmp_path) as url:
        port, asked = int(url.rpartition(":")[2]), drawn(100)
        check(command, port, asked)
        check(command, port, [(np.arange(begin, begin + 500), "") for begin in range(0, KEYS, 500)])
        before = counted(server)
        check(command, port, [(np.abs(keys), id_) for keys, id_ in asked])
        counts = counted(server) - before
        (refused,) = call(command, port, [request_of(np.array([1]), "", model="nobody")])
    assert counts["answers"] > len(asked) // 2, dict(counts)
    assert counts["answers"] + counts["rows_on_disk"] == len(asked), dict(counts)
    assert refused.startswith("error")
    assert "nobody" in refused


@pytest.mark.parametrize("way", proxies.OF_GRPC)
def test_streams_pass_a_proxy(server: ServerThread, tmp_path: Path, way: str) -> None:
    asked = drawn(20)
    with proxies.started(proxies.OF_GRPC[way], server.port, tmp_path) as url:
        port = int(url.rpartition(":")[2])
        answers = call(grpc_java("stream"), port, [request_of(*one) for one in asked], STREAMING)
    for (keys, id_), answer in zip(asked, answers, strict=True):
        read = messages.ModelStreamInferResponse.FromString(base64.b64decode(answer))
        check_answer(keys, id_, read.infer_response)


@pytest.mark.parametrize("program", ["grpc-go", "grpc-js", "grpc-java, many connections"])
def test_small_answers_pass_haproxy_as_http2(server: ServerThread, tmp_path: Path, program: str) -> None:
    """haproxy 2.6 ends a connection to a server whose trailers come while its buffer, 16 KiB, is full."""
    command, asked = PROGRAMS[program](), [(keys[:400], id_) for keys, id_ in drawn(100)]
    with proxies.started(proxies.Proxy("haproxy", proxies.HAPROXY_HTTP2), server.port, tmp_path) as url:
        check(command, int(url.rpartition(":")[2]), asked)
