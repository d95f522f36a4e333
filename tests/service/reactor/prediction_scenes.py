"""Predictions for the tests of reactors: models, requests over each wire, and services that have their thread held."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import numpy as np

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service import http2_client as h2
from tests.service.callers import PREDICT, PredictResponse, predict_request
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.test_calls import request
from tests.service.reactor.test_traffic import Answer, Served, in_json, message
from tierstore.engine.store import Store
from tierstore.service.rpc.messages import CODES
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.server import ServerThread

INFER = "/inference.GRPCInferenceService/ModelInfer"
_Response = message_class("inference.ModelInferResponse")
_NAMES = {str(number): name for name, number in CODES.items()}
ROWS, DIM = 500, 4


def mixed() -> bytes:
    """Two features a row of the batch, one pooled, one of several rows, an input of its own and a number: a sum, and a copy as int64."""
    nodes = [
        om.node("ReduceSum", "one axis", "a", keepdims=1),
        om.node("ReduceSum", "bag axis", "b", keepdims=1),
        om.node("ReduceSum", "many axes", "c", keepdims=0),
        om.node("Unsqueeze", "c axis", "d"),
        om.node("Sum", "a b d hour", "sum"),
        om.node("Mul", "sum scale", "score"),
        om.node("Cast", "hour", "whole", to=om.INT64),
    ]
    inputs: om.Ports = {
        "one": (om.FLOAT, ["batch", DIM]),
        "bag": (om.FLOAT, ["batch", DIM]),
        "many": (om.FLOAT, ["batch", 2, DIM]),
        "hour": (om.FLOAT, ["batch", 1]),
        "scale": (om.FLOAT, []),
    }
    outputs: om.Ports = {"score": (om.FLOAT, ["batch", 1]), "whole": (om.INT64, ["batch", 1])}
    return om.build(nodes, inputs, outputs, {"axis": np.array([1]), "axes": np.array([1, 2])})


def linear(weight: float = 1.0) -> bytes:
    return om.linear({"one": [weight] * DIM})


def flat() -> bytes:
    """Several rows side by side, as half floats, and no other size than 3 of them."""
    nodes = [om.node("ReduceSum", "many axis", "score", keepdims=1)]
    inputs: om.Ports = {"many": (om.HALF, ["n", 3 * DIM])}
    return om.build(nodes, inputs, {"score": (om.HALF, ["n", 1])}, {"axis": np.array([1])})


def write(root: Path, dense: bytes, model: str = "ctr", version: int = 1, shift: float = 0.0) -> Path:
    where, keys = root / f"{model}-{version}", np.arange(ROWS)
    rows = np.outer(keys, [1, -0.5, 0.25, 2]).astype(np.float32) + np.float32(shift)
    with tierstore.SnapshotWriter(where, model=model, version=version) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(keys, rows)
        writer.feature("one", table="item")
        writer.feature("bag", table="item", combiner="mean")
        writer.feature("many", table="item", padding_key=0)
        writer.warmup("item", keys)
        writer.table("word", dim=DIM, key="string").write([f"w{i}" for i in range(50)], rows[:50])
        writer.feature("word", table="word")
        writer.warmup("word", [f"w{i}" for i in range(50)])
        writer.dense(dense)
    return where


@contextmanager
def serving(root: Path, dense: bytes, **settings: Any) -> Iterator[Served]:
    with in_process(), Store(settings_for(root, **{"lookup_threads": 1, **settings})) as store:
        store.load_snapshot(write(root, dense))
        with ServerThread(store) as server:
            yield Served(store, server)


@contextmanager
def two_services(root: Path, **settings: Any) -> Iterator[tuple[Served, Served]]:
    """One store by two services: of the second the reactors learn nothing, and all predictions are Python's."""
    words = om.linear({"word": [1.0, 2.0, 3.0, 4.0]})
    with in_process(), Store(settings_for(root, max_response="64KiB", **settings)) as store:
        for model, dense in {"ctr": mixed(), "flat": flat(), "word": words}.items():
            store.load_snapshot(write(root, dense, model))
        with ServerThread(store) as one, ServerThread(store) as other:
            other.service.plans = None
            yield Served(store, one), Served(store, other)


# --- requests, over each wire


@dataclass
class Drawn:
    """A request, in any protocol. No outputs: those of the graph."""

    inputs: dict[str, Any]
    outputs: list[str]
    model: str = "ctr"
    id: str | None = None
    timeout_us: int | None = None


def drawn(rng: np.random.Generator) -> Drawn:
    """A request for one of the models; some of them are wrong."""
    n, kind = int(rng.integers(0, 12)), rng.integers(0, 10)
    keys = lambda *shape: rng.integers(-2, ROWS + 3, shape)  # noqa: E731
    ident = f"i{rng.integers(99)}" if rng.integers(2) else None
    if kind == 0:
        inputs: dict[str, Any] = {"many": keys(n, 3 if rng.integers(5) else 2)}
        return Drawn(inputs, ["score"], "flat", ident)
    if kind == 1:
        words = [b"w%d" % key if key % 7 else b"\xff" * (key % 2) for key in rng.integers(0, 60, n)]
        return Drawn({"word": words}, ["score"], "word", ident)
    inputs = {"one": keys(n), "many": keys(n, 2), "hour": rng.normal(size=(n, 1)).astype(np.float32)}
    inputs["scale"] = rng.normal(size=1).astype(np.float32)
    if rng.integers(2):
        inputs["bag"] = keys(n, int(rng.integers(0, 4)))
    else:
        flat_keys = int(rng.integers(0, 30))
        starts = np.sort(rng.integers(0, flat_keys + 1, n))
        starts[:1] = 0
        inputs |= {"bag": keys(flat_keys if n else 0), "bag.offsets": starts.astype(np.int64)}
        if rng.integers(2):
            inputs["bag.weights"] = rng.random(len(inputs["bag"])).astype(np.float32)
    wrong = rng.integers(0, 20)
    if wrong == 0:
        inputs["one"] = keys(n + 1)  # sizes that disagree
    elif wrong == 1:
        inputs.pop(str(rng.choice(list(inputs))))
    elif wrong == 2:
        inputs["many"] = keys(n, 3)
    elif wrong == 3:
        inputs["scale"] = rng.normal(size=2).astype(np.float32)
    elif wrong == 4:
        inputs["one"] = keys(3000)  # more rows than an answer may need
    elif wrong == 5:
        inputs["clicked"] = keys(n)
    names = list(inputs)
    if rng.integers(2):
        names.reverse()
    outputs = [["score"], ["score", "whole"], ["whole", "score"], ["score", "one"], []][
        rng.choice(5, p=[0.4, 0.3, 0.2, 0.05, 0.05])
    ]
    return Drawn({name: inputs[name] for name in names}, outputs, id=ident)


def one(n: int, **more: Any) -> Drawn:
    return Drawn({"one": np.arange(n) % ROWS}, ["score"], **more)


class HttpAnswer:
    def __init__(self, made: Any) -> None:
        self.whole = Answer(made)
        self.code, self.text = self.whole.status, self.whole.document.get("error", "")
        found = re.search(rb"(?i)x-request-id: (\S+)", self.whole.head)
        self.request_id = None if found is None else found[1].decode()
        self.said = self.code, self.whole.document, self.whole.body

    @property
    def scores(self) -> list[float]:
        assert self.code == 200, self.text
        scores: list[float] = self.whole.outputs["score"].reshape(-1).tolist()
        return scores

    @property
    def version(self) -> str:
        return str(self.whole.document["model_version"])


class OverHttp:
    """A connection; what is sent on it is answered in its order."""

    kind = "oip_http"
    ok, overloaded, late, failed, too_large, beyond_rate = 200, 503, 504, 503, 413, 429
    timeout = "X-Request-Timeout-Ms", "100"
    held_a_row = DIM * 4  # bytes that count while it waits

    def __init__(self, served: Served) -> None:
        self._socket = served.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, asked: Drawn, *headers: tuple[str, str]) -> None:
        more: dict[str, Any] = {} if asked.id is None else {"id": asked.id}
        parameters: dict[str, Any] = {} if asked.outputs else {"binary_data_output": True}
        parameters |= {} if asked.timeout_us is None else {"timeout": asked.timeout_us}
        more |= {"parameters": parameters} if parameters else {}
        lines = [f"{name}: {value}" for name, value in headers]
        path = f"/v2/models/{asked.model}/infer"
        self._socket.sendall(message(asked.inputs, asked.outputs, *lines, path=path, **more))

    def answer(self) -> HttpAnswer:
        return HttpAnswer(self._socket)

    def ask(self, asked: Drawn, *headers: tuple[str, str]) -> Any:
        self.send(asked, *headers)
        return self.answer()

    @staticmethod
    def knows_lost(served: Served) -> bool:
        return bool(served.server.service.reactors.conns["lost"].any())


class OverJson(OverHttp):
    """The same with all tensors in the JSON, both ways."""

    def send(self, asked: Drawn, *headers: tuple[str, str]) -> None:
        more: dict[str, Any] = {} if asked.id is None else {"id": asked.id}
        more |= {} if asked.timeout_us is None else {"parameters": {"timeout": asked.timeout_us}}
        lines = [f"{name}: {value}" for name, value in headers]
        path = f"/v2/models/{asked.model}/infer"
        self._socket.sendall(in_json(asked.inputs, asked.outputs, *lines, path=path, **more))


class GrpcAnswer:
    def __init__(self, fields: dict[str, str], body: bytes) -> None:
        self.code, self.text = _NAMES[fields["grpc-status"]], unquote(fields.get("grpc-message", ""))
        self.request_id, message = fields.get("x-request-id"), body[5:]
        self.response = _Response.FromString(message)
        assert not body or body[:5] == b"\0" + (len(body) - 5).to_bytes(4, "big")
        self.said = self.code, self.text, self.request_id, self.response, len(message)

    @property
    def scores(self) -> list[float]:
        assert self.code == "OK", self.text
        scores: list[float] = np.frombuffer(self.response.raw_output_contents[0], np.float32).tolist()
        return scores

    @property
    def version(self) -> str:
        return str(self.response.model_version)


class OverGrpc(OverHttp):
    """A connection, and a stream of it for each call."""

    kind = "oip_grpc"
    ok, overloaded, late, failed, too_large, beyond_rate = (  # type: ignore[assignment]
        "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED",
    )  # fmt: skip
    timeout = "grpc-timeout", "100m"
    held_a_row = DIM * 4 + 8

    def __init__(self, served: Served) -> None:
        self.client, self.stream = h2.Client(served.server.port), -1
        self._socket = self.client.socket

    def send(self, asked: Drawn | bytes, *headers: tuple[str, str]) -> None:
        """`asked`: a request, or the bytes of its message."""
        self.stream += 2
        data = asked if isinstance(asked, bytes) else over_grpc(asked).SerializeToString()
        self.client.send(h2.call(self.stream, INFER, data, *headers))

    def answer(self) -> GrpcAnswer:  # type: ignore[override]
        return GrpcAnswer(*self.client.answer(self.stream))

    def reset(self) -> None:
        self.client.send(h2.reset(self.stream))
        assert self.client.is_alive()

    @staticmethod
    def knows_lost(served: Served) -> bool:
        jobs = served.server.service.reactors.cold_readers.jobs
        return bool((jobs["lost"] * jobs["announced"]).any())


def listed(array: Any) -> list[Any]:
    """A tensor as JSON has it."""
    if isinstance(array, list):
        return [text.decode("utf-8", "surrogateescape") for text in array]
    made: list[Any] = array.tolist()
    return made


def in_tfs_json(document: Any, *headers: str, path: str = "/v1/models/ctr:predict") -> bytes:
    text = (
        document
        if isinstance(document, bytes)
        else json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")
    )
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(text)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + text


def as_arrays(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Lists of strings as arrays."""
    return {name: np.array(array, object) if isinstance(array, list) else array for name, array in inputs.items()}


class RestAnswer(HttpAnswer):
    def __init__(self, made: Any) -> None:
        self.whole = Answer(made)
        self.code, self.text = self.whole.status, self.whole.document.get("error", "")
        found = re.search(rb"(?i)x-request-id: (\S+)", self.whole.head)
        self.request_id = None if found is None else found[1].decode()
        self.said = self.code, self.whole.body

    @property
    def scores(self) -> list[float]:
        assert self.code == 200, self.text
        document = self.whole.document
        found = document.get("outputs", document.get("predictions"))
        scores: list[float] = (
            np.array(found["score"] if isinstance(found, dict) else found, np.float32).reshape(-1).tolist()
        )
        return scores


class OverRest(OverHttp):
    """TensorFlow Serving's REST, in columns."""

    kind = "tfs_http"

    def send(self, asked: Drawn, *headers: tuple[str, str]) -> None:
        document: dict[str, Any] = {"inputs": {name: listed(array) for name, array in asked.inputs.items()}}
        if asked.outputs:
            document["output_filter"] = asked.outputs
        lines = [f"{name}: {value}" for name, value in headers]
        self._socket.sendall(in_tfs_json(document, *lines, path=f"/v1/models/{asked.model}:predict"))

    def answer(self) -> HttpAnswer:
        return RestAnswer(self._socket)


class PredictAnswer(GrpcAnswer):
    def __init__(self, fields: dict[str, str], body: bytes) -> None:
        super().__init__(fields, b"")
        self.response = PredictResponse.FromString(body[5:])
        self.said = self.code, self.text, self.request_id, body  # type: ignore[assignment]

    @property
    def scores(self) -> list[float]:
        assert self.code == "OK", self.text
        scores: list[float] = np.frombuffer(self.response.outputs["score"].tensor_content, np.float32).tolist()
        return scores


class OverPredict(OverGrpc):
    """TensorFlow Serving's gRPC, its tensors in one of two forms in turn."""

    kind = "tfs_grpc"

    def send(self, asked: Drawn | bytes, *headers: tuple[str, str]) -> None:
        self.stream += 2
        if not isinstance(asked, bytes):
            content = self.stream & 2 != 0
            asked = predict_request(
                as_arrays(asked.inputs), asked.outputs, asked.model, content=content
            ).SerializeToString()
        self.client.send(h2.call(self.stream, PREDICT, asked, *headers))

    def answer(self) -> Any:
        return PredictAnswer(*self.client.answer(self.stream))


def over_grpc(asked: Drawn) -> Any:
    """Its message."""
    made = request(
        asked.inputs, asked.outputs, model_name=asked.model, **({} if asked.id is None else {"id": asked.id})
    )
    if asked.timeout_us is not None:
        made.parameters["timeout"].int64_param = asked.timeout_us
    return made


Wire = type[OverHttp]


def ask(served: Served, wire: Wire, asked: Drawn, *headers: tuple[str, str]) -> Any:
    with wire(served) as asker:
        return asker.ask(asked, *headers)


def warm(served: Served, wire: Wire, asked: Drawn) -> None:
    """Ask until reactors begin such predictions."""

    def begun() -> bool:
        before = served.by_reactors
        ask(served, wire, asked)
        return served.by_reactors > before

    eventually(begun, "a reactor begins it")


# --- services that are looked into


def seen(served: Served) -> dict[str, int]:
    """What the service has counted, of the requests through `served` and of keys."""
    service = served.server.service
    service.refresh()
    stats = service.inference_stats
    view = served.store.model("ctr").publisher.current
    assert view is not None
    counts = {id(table.counts): table.counts for table in view.open_version.tables.values()}
    return {
        "ok": stats.of("ctr", 1).success,
        "predicted": stats.predicts()["ctr"].count,
        "runs": dense_runs(served),
        "queued": sum(service.shed._waits["lookup"].counts),
        "keys": sum(of.total for of in counts.values()),
    }


def dense_runs(served: Served) -> int:
    return int(served.store.model("ctr").publisher.current.session._counts.as_dict()["runs"])


def predicted(served: Served) -> int:
    counts: int = served.server.service.inference_stats.predicts()["ctr"].count
    return counts


def idle(served: Served) -> None:
    service = served.server.service
    eventually(lambda: service.inflight.used_bytes == 0, "nothing is held")
    eventually(lambda: service.reactors.cold_readers.idle, "no job is left")


@contextmanager
def thread_held(served: Served) -> Iterator[threading.Event]:
    """The look-up thread is at work until the event is set, or the end."""
    pool, gate, begun = served.server.service.lookup_pool, threading.Event(), Future[Any]()

    def begin() -> None:
        pool.waits.call_s = 0.0  # what was held before is no measure of what waits
        begun.set_result(pool.run(gate.wait, 60))

    served.server._http._loop.call_soon_threadsafe(begin)  # type: ignore[union-attr]
    begun.result(60)
    eventually(lambda: pool.busy == 1, "it is at work")
    try:
        yield gate
    finally:
        gate.set()


def waiting(served: Served, count: int) -> None:
    pool = served.server.service.lookup_pool
    eventually(lambda: pool.waiting == count, f"{count} wait")


LOOP = {"one": np.array([9999])}


def looping() -> bytes:
    """Of rows that sum to more than a million it does not end."""
    return om.changed(om.looping(always=False), rename)


def rename(model: Any) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == "user_id":
                    names[i] = "one"
    model.graph.input[0].name = "one"
    for constant in model.graph.initializer:
        if constant.name == "most":
            constant.CopyFrom(om.numpy_helper.from_array(np.float32(1e6), "most"))


def add_large(store: Store, root: Path) -> None:
    """A row above all others."""
    with tierstore.DeltaWriter(root / "large", model="ctr", seq=1) as writer:
        writer.upsert("item", LOOP["one"], np.full((1, DIM), 1e6, np.float32))
    store.apply_delta((root / "large").read_bytes())
