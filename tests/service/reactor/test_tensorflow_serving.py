"""TensorFlow Serving's protocols: reactors answer them with the same bytes as Python, and limits hold for them too."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service import http2_client as h2
from tests.service.conftest import eventually, settings_for
from tests.service.reactor import test_predictions as over_each_wire
from tests.service.reactor.prediction_scenes import (
    Drawn,
    GrpcAnswer,
    HttpAnswer,
    OverGrpc,
    OverHttp,
    Wire,
    ask,
    drawn,
    idle,
    linear,
    one,
    predicted,
    seen,
    serving,
    thread_held,
    waiting,
    warm,
)
from tests.service.reactor.test_traffic import DIM, ROWS, Served, row_of, write
from tierstore.engine.store import Store
from tierstore.service.dataplane.datatypes import DATATYPES
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.rpc.tensor_proto import TensorProto
from tierstore.service.server import ServerThread

PREDICT = "/tensorflow.serving.PredictionService/Predict"
COUNT = int(os.environ.get("PREDICTIONS", 1200))
PredictRequest, PredictResponse = (
    message_class(f"tensorflow.serving.Predict{kind}") for kind in ("Request", "Response")
)
both = over_each_wire.both


def listed(array: Any) -> list[Any]:
    """A tensor as JSON has it."""
    if isinstance(array, list):
        return [text.decode("utf-8", "surrogateescape") for text in array]
    made: list[Any] = array.tolist()
    return made


def http(document: Any, *headers: str, path: str = "/v1/models/ctr:predict") -> bytes:
    text = (
        document
        if isinstance(document, bytes)
        else json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")
    )
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(text)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + text


def tensor_proto(array: Any, *, content: bool) -> Any:
    """A tensor as clients make it: `tensor_content`, or values one by one."""
    if isinstance(array, list):
        made = TensorProto(dtype=7, tensor_shape={"dim": [{"size": len(array)}]})
        made.string_val.extend(array)
        return made
    name = {"i": "INT", "u": "UINT", "f": "FP"}[array.dtype.kind] + str(8 * array.dtype.itemsize)
    made = TensorProto(dtype=DATATYPES[name].tf_number, tensor_shape={"dim": [{"size": size} for size in array.shape]})
    if content:
        made.tensor_content = array.tobytes()
    else:
        getattr(made, DATATYPES[name].tf_field).extend(array.reshape(-1).tolist())
    return made


def predict_message(
    inputs: dict[str, Any], outputs: list[str], model: str = "ctr", *, content: bool = True, **spec: Any
) -> Any:
    made = PredictRequest(model_spec={"name": model, **spec}, output_filter=outputs)
    for name, array in inputs.items():
        made.inputs[name].CopyFrom(tensor_proto(array, content=content))
    return made


class Answer:
    """The next answer of a connection."""

    def __init__(self, made: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = made.recv(1 << 16)
            assert more, data
            data += more
        self.head, _, self.body = data.partition(b"\r\n\r\n")
        self.status = int(self.head.split()[1])
        length = int(re.search(rb"(?i)content-length: (\d+)", self.head)[1])  # type: ignore[index]
        while len(self.body) < length:
            self.body += made.recv(1 << 20)
        self.document = json.loads(self.body)


class RestAnswer(HttpAnswer):
    def __init__(self, made: socket.socket) -> None:
        self.whole: Any = Answer(made)
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
        self._socket.sendall(http(document, *lines, path=f"/v1/models/{asked.model}:predict"))

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
            asked = predict_message(asked.inputs, asked.outputs, asked.model, content=content).SerializeToString()
        self.client.send(h2.call(self.stream, PREDICT, asked, *headers))

    def answer(self) -> Any:
        return PredictAnswer(*self.client.answer(self.stream))


@pytest.fixture(params=[OverRest, OverPredict])
def wire(request: pytest.FixtureRequest) -> Wire:
    made: Wire = request.param
    return made


# --- predictions


def test_reactors_and_python_predict_alike(both: tuple[Served, Served], wire: Wire) -> None:
    here, other = both
    rng = np.random.default_rng(17)
    here.server.service.plans._may_learn = 1e9
    before, python, right = here.by_reactors, other.by_reactors, 0
    with wire(here) as mine, wire(other) as theirs:
        for number in range(COUNT):
            asked = drawn(rng)
            headers = [("x-request-id", f"r{number}")] if number % 3 == 0 else []
            mine.send(asked, *headers)
            theirs.send(asked, *headers)
            got, wanted = mine.answer(), theirs.answer()
            assert got.said == wanted.said, asked
            right += got.code == wire.ok
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > COUNT // 3
    idle(here)


def test_a_prediction_is_counted_as_pythons_are(both: tuple[Served, Served], wire: Wire) -> None:
    over_each_wire.compare_counts(both, wire)


def test_a_prediction_that_would_wait_too_long_is_refused_by_the_reactor(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, linear(), lookup_queue=1) as served:
        warm(served, wire, one(3))
        runs = predicted(served)
        with wire(served) as waits, wire(served) as asker:
            with thread_held(served):
                waits.send(one(2))
                waiting(served, 1)
                before = served.by_reactors
                refused = asker.ask(one(2))
                assert refused.code == wire.overloaded
                assert served.by_reactors > before
            assert waits.answer().code == wire.ok
        assert predicted(served) == runs + 1


def not_a_number() -> bytes:
    """The root of each row's sum, which is no number below 0."""
    nodes = [om.node("ReduceSum", "one axis", "sum", keepdims=1), om.node("Sqrt", "sum", "score")]
    inputs: om.Ports = {"one": (om.FLOAT, ["batch", 4])}
    return om.build(nodes, inputs, {"score": (om.FLOAT, ["batch", 1])}, {"axis": np.array([1])})


def test_scores_that_are_no_numbers_are_written_by_python_and_counted_once(tmp_path: Path) -> None:
    with serving(tmp_path, not_a_number()) as served:
        warm(served, OverRest, one(3))
        before = seen(served)
        asked = Drawn({"one": np.array([7, 1 << 40])}, ["score"])
        with tierstore.DeltaWriter(tmp_path / "negative", model="ctr", seq=1) as writer:
            writer.upsert("item", np.array([7]), np.full((1, 4), -1, np.float32))
        served.store.apply_delta((tmp_path / "negative").read_bytes())
        answer = ask(served, OverRest, asked)
        assert answer.whole.body == b'{"outputs": [[NaN], [1.0]]}'
        after = seen(served)
        assert after["ok"] - before["ok"] == after["predicted"] - before["predicted"] == 1
        idle(served)


# --- look-ups


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """One store by two services: of the second the reactors learn nothing, and all answers are Python's."""
    root = tmp_path_factory.mktemp("two")
    with in_process(), Store(settings_for(root, host_budget="16MiB", max_response="16MiB")) as store:
        store.load_snapshot(write(root, 1, plain=True))
        with tierstore.SnapshotWriter(root / "solo", model="solo", version=1) as writer:
            writer.table("item", dim=DIM, default=[0.25] * DIM).write(np.arange(1000), row_of(np.arange(1000)))
            writer.feature("only", table="item", combiner="sum")
            writer.warmup("item", np.arange(1000))
        store.load_snapshot(root / "solo")
        store.model("ctr").lookup("item_id", np.arange(ROWS))
        with ServerThread(store) as first, ServerThread(store) as second:
            second.service.plans = None
            first.service.plans._may_learn = 1e9
            yield Served(store, first), Served(store, second)


def key(rng: random.Random) -> int:
    return rng.choice([rng.randrange(ROWS), rng.randrange(50), ROWS + 5, -1])


def in_rows(rng: random.Random) -> dict[str, Any]:
    """A request in the row form; some are wrong."""
    names = rng.sample(["item_id", "clicked", "word"], rng.randint(1, 3))
    kinds = {name: rng.choice(["scalar", "even", "bags"]) for name in names}
    widths = {name: rng.randint(0, 3) for name in names}

    def value(name: str) -> Any:
        one = (lambda: f"w{rng.randrange(220)}") if name == "word" else (lambda: key(rng))
        if kinds[name] == "scalar":
            return one()
        size = widths[name] if kinds[name] == "even" else rng.randint(0, 4)
        return [one() for _ in range(size)]

    return {"instances": [{name: value(name) for name in names} for _ in range(rng.randint(1, 9))]}


def in_columns(rng: random.Random) -> dict[str, Any]:
    """A request in the column form; some are wrong."""
    columns: dict[str, Any] = {}
    for name in rng.sample(["item_id", "clicked", "word"], rng.randint(1, 3)):
        shape = rng.choice([[rng.randint(0, 9)], [rng.randint(0, 4), rng.randint(0, 3)]])
        count = int(np.prod(shape))
        flat = [f"w{rng.randrange(220)}" if name == "word" else key(rng) for _ in range(count)]
        columns[name] = flat if len(shape) == 1 else [flat[k * shape[1] : (k + 1) * shape[1]] for k in range(shape[0])]
        if name == "clicked" and len(shape) == 1 and rng.random() < 0.6:
            starts = sorted(rng.randint(0, count) for _ in range(rng.randint(1, 4)))
            columns["clicked.offsets"] = [0, *starts]
            if rng.random() < 0.5:
                columns["clicked.weights"] = [rng.choice([1, 0.5, -2.25, 1e-3]) for _ in range(count)]
    if rng.random() < 0.1:
        columns[rng.choice(list(columns))] = rng.choice([[1.5], [None], 3, [True], ["x"], [[1], [2, 3]], []])
    return {"inputs": columns}


def asked_of(rng: random.Random) -> tuple[bytes, str]:
    """(a request, its path)."""
    if rng.random() < 0.25:
        values: Any = [[key(rng) for _ in range(rng.randint(0, 3))] for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.4:
            values = [key(rng) for _ in range(rng.randint(1, 5))]
        return json.dumps({rng.choice(["instances", "inputs"]): values}).encode(), "/v1/models/solo:predict"
    document = in_rows(rng) if rng.random() < 0.6 else in_columns(rng)
    if rng.random() < 0.3:
        document["output_filter"] = rng.sample(
            ["item_id", "item_id.found", "clicked", "clicked.found", "word.found"], rng.randint(0, 3)
        )
    if rng.random() < 0.3:
        document["signature_name"] = rng.choice(["lookup", "serving_default", "", None, "lookup_float16", "other"])
    members = list(document.items())
    rng.shuffle(members)
    path = rng.choice(
        ["/v1/models/ctr" + of + ":predict" for of in ("", "/versions/1", "/versions/0", "/labels/stable")]
    )
    return json.dumps(dict(members)).encode(), path


def headed(answer: Answer) -> list[bytes]:
    return sorted(line for line in answer.head.lower().split(b"\r\n") if not line.startswith(b"date:"))


def test_reactors_and_python_answer_json_alike(two: tuple[Served, Served]) -> None:
    here, other = two
    rng, right = random.Random(5), 0
    before, python = here.by_reactors, other.by_reactors
    with here.connect() as mine, other.connect() as theirs:
        for _ in range(2 * COUNT):
            text, path = asked_of(rng)
            sent = http(text, path=path)
            mine.sendall(sent)
            theirs.sendall(sent)
            got, wanted = Answer(mine), Answer(theirs)
            assert (got.status, got.body) == (wanted.status, wanted.body), sent
            assert headed(got) == headed(wanted)
            right += got.status == 200
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > right // 2
    eventually(lambda: here.server.service.inflight.used_bytes == 0, "nothing is held")


def test_a_request_of_no_version_as_openvino_names_it_is_learned(two: tuple[Served, Served]) -> None:
    """The client of OpenVINO's server says version 0 where it means none."""
    here, _ = two
    sent = http({"instances": [{"item_id": 1}]}, path="/v1/models/ctr/versions/0:predict")

    def answered_by_a_reactor() -> bool:
        before = here.by_reactors
        with here.connect() as client:
            client.sendall(sent)
            assert Answer(client).status == 200
        return here.by_reactors > before

    eventually(answered_by_a_reactor, "a reactor answers")


def test_reactors_and_python_answer_messages_alike(two: tuple[Served, Served]) -> None:
    here, other = two
    rng, right = random.Random(6), 0
    before, python = here.by_reactors, other.by_reactors
    with OverPredict(here) as mine, OverPredict(other) as theirs:
        for _ in range(COUNT):
            inputs: dict[str, Any] = {}
            for name in rng.choice([["item_id", "clicked", "word"], ["clicked"], ["word", "item_id"]]):
                count = rng.randint(0, 9)
                if name == "word":
                    inputs[name] = [b"w%d" % rng.randrange(220) for _ in range(count)]
                    continue
                dtype = rng.choice([np.int64, np.int64, np.int32])
                keys = np.array([abs(key(rng)) for _ in range(count)], dtype)
                inputs[name] = keys.reshape(-1, 1) if rng.random() < 0.3 else keys
                if name == "clicked" and inputs[name].ndim == 1 and rng.random() < 0.5:
                    inputs["clicked.offsets"] = np.array([0, *sorted(rng.randint(0, count) for _ in range(2))])
                    if rng.random() < 0.5:
                        inputs["clicked.weights"] = np.linspace(-1, 1, count).astype(np.float32)
            outputs = rng.choice([[], [], ["clicked.found", "clicked"], ["item_id"]])
            specs = [{}, {"version": {"value": 1}}, {"version_label": "stable"}, {"signature_name": "lookup_float16"}]
            spec = rng.choices(specs, [6, 1, 1, 1])[0]
            made = predict_message(inputs, outputs, content=rng.random() < 0.5, **spec)
            message = made.SerializeToString(deterministic=rng.random() < 0.5)
            mine.send(message)
            theirs.send(message)
            got, wanted = mine.answer(), theirs.answer()
            assert got.said == wanted.said, made
            right += got.code == "OK"
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > right // 4  # there are many structures
    idle(here)


def test_any_number_of_keys_takes_one_plan(two: tuple[Served, Served]) -> None:
    here, other = two
    plans: list[int] = []
    with here.connect() as mine, other.connect() as theirs:
        for n in (3, 3, 1, 2, 64, 1000, 9000):  # of the last readers write the JSON
            keys = [number % ROWS for number in range(7, 7 + 3 * n, 3)]
            sent = http({"instances": [{"item_id": each, "clicked": [each, 1]} for each in keys]})
            before = here.by_reactors
            mine.sendall(sent)
            theirs.sendall(sent)
            got, wanted = Answer(mine), Answer(theirs)
            assert got.body == wanted.body
            plans.append(len(here.server.service.plans))
            assert here.by_reactors > before or len(plans) == 1
            rows = np.array([row["item_id"] for row in got.document["predictions"]], np.float32)
            np.testing.assert_array_equal(rows, row_of(np.array(keys)))
    assert len(set(plans)) == 1


def test_rows_that_memory_lacks_go_into_answers_too(tmp_path: Path) -> None:
    with in_process(), Store(settings_for(tmp_path, host_budget="64KiB")) as store:
        store.load_snapshot(write(tmp_path, 1, plain=True))
        with ServerThread(store) as server:
            served = Served(store, server)
            with served.connect() as made, OverPredict(served) as calls:
                rng, before = np.random.default_rng(3), served.by_reactors
                for n in (3, 3, 60, 700, 3500):  # more would not fit the window of the client
                    keys = rng.integers(0, ROWS + 100, n)
                    made.sendall(http({"inputs": {"item_id": keys.tolist()}}))
                    np.testing.assert_array_equal(np.array(Answer(made).document["outputs"], np.float32), row_of(keys))
                    for content in (True, False):
                        calls.send(predict_message({"item_id": keys}, [], content=content).SerializeToString())
                        found = calls.answer().response.outputs["item_id"]
                        assert [dim.size for dim in found.tensor_shape.dim] == [n, DIM]
                        np.testing.assert_array_equal(
                            np.frombuffer(found.tensor_content, np.float32).reshape(n, DIM), row_of(keys)
                        )
                assert served.by_reactors - before >= 12
            idle(served)


def test_the_order_of_inputs_takes_no_further_plan(two: tuple[Served, Served]) -> None:
    here, _ = two
    inputs = {"item_id": np.arange(3), "clicked": np.arange(3), "word": [b"w1", b"w2", b"w3"]}
    with OverPredict(here) as calls, here.connect() as made:
        plans = []
        for names in (
            ["item_id", "clicked", "word"],
            ["item_id", "clicked", "word"],
            ["word", "item_id", "clicked"],
            ["clicked", "word", "item_id"],
        ):
            shuffled = {name: inputs[name] for name in names}
            calls.send(predict_message(shuffled, ["item_id"]).SerializeToString())
            assert calls.answer().code == "OK"
            made.sendall(
                http(
                    {"inputs": {name: listed(array) for name, array in shuffled.items()}, "output_filter": ["item_id"]}
                )
            )
            assert Answer(made).status == 200
            plans.append(len(here.server.service.plans))
        assert len(set(plans)) == 1
