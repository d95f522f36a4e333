"""TensorFlow Serving's protocols beside our own binary one: `python -m benchmarks.wire_tfserving [--tiny | --full] [--json FILE]`.

One connection of a client that costs little asks in turn, a round each: for the rows of 64 keys (dim 32), and for the scores of 100
items by 8 features (a hidden layer of 128 over rows of dim 16). All rows are in memory, keys are spread over all 64 bits.

    binary      the Open Inference Protocol over HTTP, tensors binary both ways; the others are measured against it
    JSON        the same protocol with tensors in its JSON both ways
    rows        TensorFlow Serving's REST, `instances`: an object an item
    columns     TensorFlow Serving's REST, `inputs`: a list an input
    call        the Open Inference Protocol over gRPC, from a client of frames (`wire_frames.py`)
    content     TensorFlow Serving's `Predict` over gRPC, tensors as `tensor_content`, as TensorFlow's own client sends them
    values      the same with `int64_val`, as most other clients send them

CPU is the processor time of the service's process a request, the median over the rounds; `over binary` the median of each round's
ratio. Every way's first answer is compared with the binary one's.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import networks, report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import Served
from benchmarks.ready import wait_for_reactors
from benchmarks.wild_traffic import counters
from benchmarks.wire_frames import Frames
from benchmarks.wire_lookup import connect, read_http
from benchmarks.wire_table import DIM, keys_of, vectors_of
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.rpc.tensor_proto import TensorProto

KEYS, ITEMS = 64, 100
AT_MOST = {"rows": 4.0, "columns": 4.0, "content": 1.5, "values": 1.5}  # times the binary request
VARIANTS = 16
PREDICT = "/tensorflow.serving.PredictionService/Predict"
_INT64 = 9  # of TensorFlow's DataType
Columns = dict[str, np.ndarray]
_Infer, _Inferred = (message_class(f"inference.ModelInfer{kind}") for kind in ("Request", "Response"))
_Predict, _Predicted = (message_class(f"tensorflow.serving.Predict{kind}") for kind in ("Request", "Response"))


def write(root: Path, rows: int) -> None:
    """A data directory with a model of one table, `rows`, and one that predicts, `scores`. A quarter more rows than are asked for:
    a cache as large as its table keeps nearly all of it.
    """
    keys, rng = keys_of(np.arange(rows * 5 // 4)), np.random.default_rng(1)
    with tierstore.SnapshotWriter(root / "rows", model="rows", version=1) as writer:
        writer.table("item", dim=DIM).write(keys, vectors_of(keys))
        writer.warmup("item", keys[:rows])
        writer.feature("item_id", table="item")
    with tierstore.SnapshotWriter(root / "scores", model="scores", version=1) as writer:
        writer.table("item", dim=networks.DIM).write(keys, rng.standard_normal((len(keys), networks.DIM), np.float32))
        writer.warmup("item", keys[:rows])
        for feature in networks.FEATURES:
            writer.feature(feature, table="item")
        writer.dense(networks.hidden_layer(networks.FEATURES))
    with tierstore.open(root / "data", host_budget="1GiB", load_workers=1) as store:
        for name in ("rows", "scores"):
            store.load_snapshot(root / name)


def http(path: str, text: bytes, tail: bytes = b"") -> bytes:
    length = b"Inference-Header-Content-Length: %d\r\n" % len(text) if tail else b""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n"
    return head % (path.encode(), len(text) + len(tail), length) + text + tail


def infer(model: str, columns: Columns, *, binary: bool) -> bytes:
    inputs: list[dict[str, Any]] = [
        {"name": name, "datatype": "INT64", "shape": [len(keys)]} for name, keys in columns.items()
    ]
    for described, keys in zip(inputs, columns.values(), strict=True):
        described |= {"parameters": {"binary_data_size": keys.nbytes}} if binary else {"data": keys.tolist()}
    document = {"inputs": inputs, "parameters": {"binary_data_output": binary}}
    tail = b"".join(keys.tobytes() for keys in columns.values()) if binary else b""
    return http(f"/v2/models/{model}/infer", json.dumps(document).encode(), tail)


def rest(model: str, columns: Columns, *, by_row: bool) -> bytes:
    lists = {name: keys.tolist() for name, keys in columns.items()}
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    document = {"instances": rows} if by_row else {"inputs": lists}
    return http(f"/v1/models/{model}:predict", json.dumps(document).encode())


def call(model: str, columns: Columns) -> bytes:
    made = _Infer(model_name=model)
    for name, keys in columns.items():
        made.inputs.add(name=name, datatype="INT64", shape=[len(keys)])
        made.raw_input_contents.append(keys.tobytes())
    message: bytes = made.SerializeToString()
    return message


def predict(model: str, columns: Columns, *, content: bool) -> bytes:
    made = _Predict(model_spec={"name": model})
    for name, keys in columns.items():
        tensor = TensorProto(dtype=_INT64, tensor_shape={"dim": [{"size": len(keys)}]})
        if content:
            tensor.tensor_content = keys.tobytes()
        else:
            tensor.int64_val.extend(keys.tolist())
        made.inputs[name].CopyFrom(tensor)
    message: bytes = made.SerializeToString()
    return message


class Http:
    """One connection; answers as (elements, as float32)."""

    def __init__(self, served: Served) -> None:
        self._connection = connect(served.port)

    def ask(self, message: bytes) -> bytes:
        self._connection.sendall(message)
        return read_http(self._connection)[1]

    def close(self) -> None:
        self._connection.close()


class Grpc:
    """The same of calls of a method."""

    def __init__(self, served: Served, method: str | None = None) -> None:
        self._frames = Frames(served.port) if method is None else Frames(served.port, method)

    def ask(self, message: bytes) -> bytes:
        self._frames.send(message)
        return self._frames.message()

    def close(self) -> None:
        self._frames.close()


def elements(way: str, answer: bytes) -> np.ndarray:
    """The elements of the one output."""
    if way == "binary":
        (described,) = json.JSONDecoder().raw_decode(answer.decode("latin-1"))[0]["outputs"]
        return np.frombuffer(answer[-described["parameters"]["binary_data_size"] :], np.float32)
    if way == "call":
        return np.frombuffer(_Inferred.FromString(answer).raw_output_contents[0], np.float32)
    if way in ("content", "values"):
        (tensor,) = _Predicted.FromString(answer).outputs.values()
        return np.frombuffer(tensor.tensor_content, np.float32)
    document = json.loads(answer)
    found = document["outputs"][0]["data"] if way == "JSON" else document.get("predictions", document.get("outputs"))
    return np.asarray(found, np.float32).reshape(-1)


Way = tuple[Callable[[Served], Any], Callable[[str, Columns], bytes]]
WAYS: dict[str, Way] = {
    "binary": (Http, functools.partial(infer, binary=True)),
    "JSON": (Http, functools.partial(infer, binary=False)),
    "rows": (Http, functools.partial(rest, by_row=True)),
    "columns": (Http, functools.partial(rest, by_row=False)),
    "call": (Grpc, call),
    "content": (functools.partial(Grpc, method=PREDICT), functools.partial(predict, content=True)),
    "values": (functools.partial(Grpc, method=PREDICT), functools.partial(predict, content=False)),
}


def measure(served: Served, rows: int, rounds: int, count: int) -> list[dict[str, Any]]:
    rng, results = np.random.default_rng(2), []
    for model, names, size in (("rows", ("item_id",), KEYS), ("scores", networks.FEATURES, ITEMS)):
        asked = [{name: keys_of(rng.integers(0, rows, size)) for name in names} for _ in range(VARIANTS)]
        links = {way: make(served) for way, (make, _) in WAYS.items()}
        messages = {way: [write(model, columns) for columns in asked] for way, (_, write) in WAYS.items()}
        for sent in zip(*messages.values(), strict=True):
            found = [elements(way, links[way].ask(one)) for way, one in zip(WAYS, sent, strict=True)]
            for one in found[1:]:
                np.testing.assert_allclose(one, found[0], rtol=1e-5)
        spent: dict[str, list[float]] = {way: [] for way in WAYS}
        answers = dict.fromkeys(WAYS, 0.0)
        for number in range(-1, rounds):  # one to warm up
            for way, link in links.items():
                before, used_s = counters(served.port)["answers"], served.cpu_s()
                used_s = served.cpu_s()
                for i in range(count):
                    link.ask(messages[way][i % VARIANTS])
                used_s = served.cpu_s() - used_s
                if number >= 0:
                    spent[way].append(used_s / count * 1e6)
                    answers[way] += counters(served.port)["answers"] - before
        for link in links.values():
            link.close()
        asks = "scores of 100 x 8" if model == "scores" else "rows of 64 keys"
        for way, of in spent.items():
            over = [one / floor for one, floor in zip(of, spent["binary"], strict=True)]
            results.append(
                {"part": asks, "way": way, "cpu_us": statistics.median(of), "over_binary": statistics.median(over),
                 "by_reactors": answers[way] / rounds / count}
            )  # fmt: skip
    return results


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny", "full", rounds=int).parse_args()
    rows, rounds, count = (2_000, 1, 20) if options.tiny else (200_000, 15, 400) if options.full else (200_000, 7, 200)
    rounds = options.rounds or rounds
    with tempfile.TemporaryDirectory(prefix="wire-tfserving-") as folder:
        write(Path(folder), rows)
        with Served(Path(folder) / "data", host_budget="1GiB") as served:
            if not options.tiny:
                wait_for_reactors(served.port)
            results = measure(served, rows, rounds, count)
    headlines = [
        report.headline(
            f"TensorFlow Serving's {row['way']}, {row['part']}, CPU", "our binary request", row["over_binary"], at_most=AT_MOST[row["way"]]
        )
        for row in results if row["way"] in AT_MOST
    ]  # fmt: skip
    document = {"benchmark": "wire_tfserving", "machine": describe(), "rows": rows, "rounds": rounds,
                "headlines": headlines, "results": results}  # fmt: skip
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
