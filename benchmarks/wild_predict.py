"""Predictions over HTTP and gRPC beside the work they are made of: `python -m benchmarks.wild_predict [--tiny | --quick | --full] [--json FILE]`.

Requests of 1 to 199 items at random, each with an id of its own. The first part is the state that production is in (`benchmarks/production.py`):
one hidden layer of 128 over 8 features of dim 16, all of a table that memory has a tenth of, an hour of deltas folded, and a delta beside
each turn; by two traces, and beside a service that gets the same requests, has all rows in memory and never changes. With
`--quick` it is the only one.

The others are four models whose rows are all in memory: one hidden layer of 128, trees and a factorisation machine over 8 features of
dim 16, and a deep network (512, 256, 128) over 16.

    alone       in this process: `lookup_many` into arrays, and a session with the service's options run on them
    in process  in this process: `Model.predict`
    http        the service in a process of its own, one connection; and eight, with a request on each
    grpc        the same requests to the same service as calls, from a client of frames (`wire_frames.py`)

They take turns, each with requests drawn anew, some keys much more often than others. CPU is processor time a
prediction, of the service's process or of this one, as the median over the rounds; `over alone` is the median of each
round's ratio, and of gRPC `over http` too. p50 and p99 are over all rounds, of one caller. Every answer's size is checked, and one in 20 score by
score with what `alone` says.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import networks, production, report
from benchmarks.changing import small_vectors
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.predict_service import Served
from benchmarks.ready import wait_for_reactors
from benchmarks.wild_traffic import Clients, Request, Spent, counters, rest_of, tensor
from benchmarks.wire_frames import Frames
from tierstore.service.rpc.protobuf import message_class

ITEMS = 199  # at most
PRODUCTION, NETWORK = "production", "hidden_layer"  # the first part, and its network
AT_MOST = {"http, 1 connection": 2.5, "in process": 1.4}  # times `alone`
OVER_HTTP = 1.5  # gRPC, at most
TOLERANCE = 1e-4
WARM_UP = 8  # predictions before a turn
Inputs = Mapping[str, np.ndarray]
_Request, _Response = (message_class(f"inference.ModelInfer{kind}") for kind in ("Request", "Response"))


def write(root: Path, rows: int) -> None:
    """A data directory with a model for each network, all of them loaded.

    A quarter more rows than are asked for: a cache as large as its table keeps nearly all of it, and a few in a thousand
    keys would be read from files.
    """
    rng = np.random.default_rng(3)
    keys = np.arange(rows * 5 // 4, dtype=np.int64)
    snapshots = []
    for name, (features, network) in networks.NETWORKS.items():
        snapshots.append(root / f"snapshot-{name}")
        with tierstore.SnapshotWriter(snapshots[-1], model=name, version=1) as snapshot:
            for feature in features:
                snapshot.table(feature, dim=networks.DIM).write(
                    keys, rng.standard_normal((len(keys), networks.DIM), np.float32)
                )
                snapshot.warmup(feature, keys[:rows])
                snapshot.feature(feature, table=feature)
            snapshot.dense(network(features))
    with tierstore.open(root / "data", host_budget="1GiB", load_workers=1) as store:
        for path in snapshots:
            store.load_snapshot(path)


class Alone:
    """Look-ups and ONNX Runtime, and nothing else."""

    def __init__(self, store: Any, name: str) -> None:
        import onnxruntime

        from tierstore.config import load_settings
        from tierstore.predict.runtime import Runtime

        features, network = networks.NETWORKS[name]
        self.features = features
        self._model = store.model(name)
        self._session = Runtime(load_settings(None))._session(onnxruntime, network(features))  # the service's options

    def __call__(self, inputs: Inputs) -> np.ndarray:
        score: np.ndarray = self._session.run(["score"], self._model.lookup_many(inputs))[0]
        return score


def draw(rng: np.random.Generator, features: Sequence[str], rows: int, count: int) -> list[Inputs]:
    sizes = rng.integers(1, ITEMS + 1, count).tolist()
    return [{name: rng.zipf(1.2, n).astype(np.int64) % rows for name in features} for n in sizes]


def request(kind: type[Request], name: str, inputs: Inputs, alone: Callable[[Inputs], np.ndarray]) -> Request:
    given = [tensor(feature, "INT64", len(keys), keys.nbytes) for feature, keys in inputs.items()]
    rest = rest_of(given, [{"name": "score", "parameters": {"binary_data": True}}])
    items = len(next(iter(inputs.values())))
    data = b"".join(keys.tobytes() for keys in inputs.values())
    made = kind(rest, data, items * len(inputs), items * 4, lambda: [alone(inputs)], name)
    return replace(made, tolerance=TOLERANCE)


class Call(Request):
    """A request as a call of gRPC."""

    def bytes(self, id: str | None) -> bytes:
        described = json.loads(b"{" + self.rest)
        made, at = _Request(model_name=self.model, id=id or ""), 0
        for given in described["inputs"]:
            made.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
            size = given["parameters"]["binary_data_size"]
            made.raw_input_contents.append(self.tensors[at : at + size])
            at += size
        for wanted in described["outputs"]:
            made.outputs.add(name=wanted["name"])
        message: bytes = made.SerializeToString()
        return message


class CallLink(Frames):
    """A connection of calls, as a `Link`."""

    def answer(self) -> memoryview:
        return memoryview(b"".join(_Response.FromString(self.message()).raw_output_contents))


def here(call: Callable[[Inputs], Any], asked: Sequence[Inputs]) -> Spent:
    """Predictions in this process."""
    waits_s, used = [], time.process_time()
    for inputs in asked:
        began = time.perf_counter()
        call(inputs)
        waits_s.append(time.perf_counter() - began)
    return Spent(time.process_time() - used, len(asked), 0, tuple(waits_s))


def measure(store: Any, served: Served, name: str, rows: int, rounds: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)
    alone, model = Alone(store, name), store.model(name)
    for inputs in draw(rng, alone.features, rows, 5):
        np.testing.assert_allclose(model.predict(inputs), alone(inputs), rtol=TOLERANCE)
    clients: dict[str, Clients] = {}
    for n in (1, 8):
        at_once = f"{n} connection{'s' * (n > 1)}"
        clients[f"http, {at_once}"] = Clients(served.pid, served.port, n)
        clients[f"grpc, {at_once}"] = Clients(served.pid, served.port, n, link=CallLink)  # type: ignore[arg-type]
    ways: dict[str, Callable[[list[Inputs]], Spent]] = {
        "alone": lambda asked: here(alone, asked),
        "in process": lambda asked: here(model.predict, asked),
    }
    for way, one in clients.items():
        kind = Call if way.startswith("grpc") else Request
        ways[way] = lambda asked, one=one, kind=kind: one.turn([request(kind, name, inputs, alone) for inputs in asked])  # type: ignore[misc]
    spent: dict[str, list[Spent]] = {way: [] for way in ways}
    answers = dict.fromkeys(ways, 0.0)
    for number in range(-1, rounds):  # one to warm up
        for way, turn in ways.items():
            asked = draw(rng, alone.features, rows, count + WARM_UP)
            turn(asked[:WARM_UP])  # what ran before has left nothing of it in the processor's caches
            before = counters(served.port)["answers"]
            taken = turn(asked[WARM_UP:])
            if number >= 0:
                spent[way].append(taken)
                answers[way] += counters(served.port)["answers"] - before
    for one in clients.values():
        one.close()
    made = []
    for way, of in spent.items():
        ratios = [one.us_a_request / floor.us_a_request for one, floor in zip(of, spent["alone"], strict=True)]
        row: dict[str, Any] = {"part": name, "way": way, "cpu_us": statistics.median(one.us_a_request for one in of)}
        row["over_alone"] = statistics.median(ratios)
        if way.startswith("grpc"):
            beside = zip(of, spent[way.replace("grpc", "http")], strict=True)
            row["over_http"] = statistics.median(one.us_a_request / other.us_a_request for one, other in beside)
        waits_us = [wait_s * 1e6 for one in of for wait_s in one.waits_s]
        if waits_us:
            row["p50_us"], row["p99_us"] = (float(at) for at in np.percentile(waits_us, (50, 99)))
        if way in clients:
            row["by_reactors"] = answers[way] / sum(one.requests for one in of)
        made.append(row)
    return made


def production_part(root: Path, rows: int, rounds: int, count: int, *, compiled: bool) -> list[dict[str, Any]]:
    import onnxruntime

    features, network = networks.NETWORKS[NETWORK]
    rng, session = np.random.default_rng(5), onnxruntime.InferenceSession(network(features))

    def write_more(writer: tierstore.SnapshotWriter) -> None:
        for feature in features:
            writer.feature(feature, table=production.TABLE)
        writer.dense(network(features))

    def draw(keys: Callable[[int], np.ndarray], vectors: Callable[[np.ndarray], np.ndarray]) -> list[Request]:
        def scores(inputs: Inputs) -> np.ndarray:
            found: np.ndarray = session.run(["score"], {name: vectors(mine) for name, mine in inputs.items()})[0]
            return found

        sizes = rng.integers(1, ITEMS + 1, count).tolist()
        return [request(Request, NETWORK, {name: keys(n) for name in features}, scores) for n in sizes]

    vectors = functools.partial(small_vectors, dim=networks.DIM)
    # `wild_lookup`, tiny, has the other one
    traces = production.TRACES if compiled else production.TRACES[1:]
    return production.measure(root, rows, NETWORK, write_more, vectors, draw, rounds, compiled=compiled, traces=traces)


def resident_parts(
    root: Path, rows: int, rounds: int, count: int, names: Sequence[str], *, compiled: bool
) -> list[dict[str, Any]]:
    """Each of these models, with all its rows in memory."""
    write(root, rows)
    shutil.copytree(root / "data", root / "copy", ignore=shutil.ignore_patterns("LOCK"))
    results: list[dict[str, Any]] = []
    with (
        Served(root / "data", host_budget="1GiB") as served,
        tierstore.open(root / "copy", host_budget="1GiB", warm_rate=10**9) as store,
    ):
        if compiled:
            wait_for_reactors(served.port)
        while store.warm_share() < 1:
            time.sleep(0.05)
        for name in names:
            results += measure(store, served, name, rows, rounds, count)
    return results


def main() -> None:
    parser = parser_of(__file__, __doc__, "tiny", "quick", "full", rounds=int)
    parser.add_argument("--only", nargs="+", choices=[PRODUCTION, *networks.NETWORKS], help="some of the parts")
    options = parser.parse_args()
    rows, rounds, count = (500, 1, 24) if options.tiny else (50_000, 21, 600) if options.full else (50_000, 9, 300)
    large = 20_000 if options.tiny else 300_000 if options.quick else 1_000_000
    if options.quick:
        rounds, count = 5, 150
    rounds = options.rounds or rounds
    chosen = options.only or ([PRODUCTION] if options.quick else [PRODUCTION, *networks.NETWORKS])
    document: dict[str, Any] = {"benchmark": "wild_predict", "machine": describe(), "rows": rows, "rounds": rounds,
                                "rows_in_production": large}  # fmt: skip
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        document["skipped"] = [f"needs {', '.join(missing)}: pip install 'tierstore[dense]'"]
    else:
        results: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="wild-predict-") as folder:
            root = Path(folder)
            if PRODUCTION in chosen:
                results += production_part(root, large, rounds, count, compiled=not options.tiny)
            if names := [name for name in chosen if name != PRODUCTION]:
                results += resident_parts(root, rows, rounds, count, names, compiled=not options.tiny)
        document["headlines"] = [
            report.headline(
                f"prediction, 1 to {ITEMS} items, {row['part'].replace('_', ' ')}, {row['way']}, CPU",
                "look-ups and ONNX Runtime alone", row["over_alone"], at_most=AT_MOST[row["way"]],
            )
            for row in results if row.get("way") in AT_MOST
        ] + [
            report.headline(
                f"prediction, 1 to {ITEMS} items, {row['part'].replace('_', ' ')}, {row['way']}, CPU",
                "the same over HTTP", row["over_http"], at_most=OVER_HTTP,
            )
            for row in results if "over_http" in row
        ]  # fmt: skip
        document["results"] = results
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
