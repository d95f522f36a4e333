"""Scores by the embedded store against what they are made of: `python -m benchmarks.dense_predict [--tiny] [--json FILE]`.

Contenders, in alternation on the same rows, which are all in memory:

    predict     Model.predict: rows looked up where the graph reads them, scores written where they are answered
    copied      look-up into arrays of its own, then the same session fed by value (what a caller would write)
    lookup      the look-up alone
    graph       ONNX Runtime alone, bound once to its arrays

And what two threads at once get from one session, by the threads that ONNX Runtime has for a run: predictions a
second, and processor time of each (on a busy machine the one that has more threads gets more of it, so the first
figure alone misleads).

And what a dense part costs until it can run: the first of its structure, with and without a trial in a process of its own, and
the next ones, which have other weights.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import parser_of

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
except ImportError:
    onnxruntime = None

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from tierstore.config import load_settings
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import DenseCounts, DenseSession

DIM, HIDDEN = 32, 128
FEATURES = ("user_id", "item_id", "seller_id", "city_id")


def model(seed: int = 1, hidden: int = HIDDEN) -> bytes:
    """A perceptron of one hidden layer over the rows of all features."""
    draw = np.random.default_rng(seed)
    width = DIM * len(FEATURES)
    constants = {
        "w1": (draw.standard_normal((width, hidden)) / np.sqrt(width)).astype(np.float32),
        "w2": (draw.standard_normal((hidden, 1)) / np.sqrt(hidden)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Concat", list(FEATURES), ["rows"], axis=1),
        helper.make_node("MatMul", ["rows", "w1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["score"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", DIM]) for name in FEATURES]
    outputs = [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch", 1])]
    graph = helper.make_graph(
        nodes, "mlp", inputs, outputs, [numpy_helper.from_array(value, name) for name, value in constants.items()]
    )
    made: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()
    return made


def write(root: Path, rows: int) -> Path:
    draw = np.random.default_rng(2)
    with tierstore.SnapshotWriter(root / "snapshot", model="ctr", version=1) as snapshot:
        table = snapshot.table("row", dim=DIM)
        table.write(np.arange(rows), draw.standard_normal((rows, DIM), np.float32))
        for name in FEATURES:
            snapshot.feature(name, table="row")
        snapshot.dense(model())
        snapshot.warmup("row", np.arange(rows))
    return root / "snapshot"


def alternate(contenders: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Median microseconds of a call, each round in another order; the first call of a turn warms the caches again."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            call = contenders[name]
            call()
            for _ in range(calls):
                began = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: float(np.median(of)) for name, of in times.items()}


def batches(store: Any, sizes: list[int], rows: int, rounds: int) -> list[dict[str, float]]:
    ctr = store.model("ctr")
    plain = onnxruntime.InferenceSession(model(), _options(1), providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(3)
    results = []
    for size in sizes:
        keys = {name: draw.integers(0, rows, size) for name in FEATURES}
        fixed = ctr.lookup_many(keys)
        bound, out = plain.io_binding(), np.empty((size, 1), np.float32)
        for name, array in fixed.items():
            bound.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        bound.bind_output("score", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        contenders: dict[str, Callable[[], Any]] = {
            "predict": lambda keys=keys: ctr.predict(keys),
            "copied": lambda keys=keys: plain.run(["score"], ctr.lookup_many(keys)),
            "lookup": lambda keys=keys: ctr.lookup_many(keys),
            "graph": lambda bound=bound: plain.run_with_iobinding(bound),
        }
        np.testing.assert_allclose(contenders["predict"](), contenders["copied"]()[0], rtol=1e-5)
        calls = max(2, 1500 // (size + 40))
        results.append({"batch": size, **alternate(contenders, rounds, calls)})
    return results


def until_ready(hidden: int, rounds: int) -> dict[str, float]:
    """Median milliseconds until a dense part can run."""
    times: dict[str, list[float]] = {"accepted": [], "first": [], "next": []}
    first, following = model(1, hidden), model(2, hidden)
    for _ in range(rounds):
        for name in times:
            if name != "next":
                runtime = Runtime(load_settings(None))
            began = time.perf_counter()
            runtime.load(following if name == "next" else first, {}, {}, DenseCounts(), accepted=name == "accepted")
            times[name].append((time.perf_counter() - began) * 1e3)
    return {"bytes": len(first)} | {name: float(np.median(of)) for name, of in times.items()}


def _options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def threads_of_a_run(store: Any, size: int, rows: int, seconds: float, root: Path) -> dict[str, float]:
    """Predictions a second of two threads and processor microseconds of each, by `intra_op_num_threads`, in alternation."""
    stores = {1: store}
    rates: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with tierstore.open(
        root / "second", host_budget="1GiB", dense_options={"intra_op_num_threads": "2"}, load_workers=1
    ) as second:
        second.load_snapshot(root / "snapshot")
        stores[2] = second
        for _ in range(4):
            for number, each in stores.items():
                rates[number].append(_rate(each.model("ctr"), size, rows, seconds))
    return {
        f"intra_{number}_{what}": float(np.median([each[place] for each in of]))
        for number, of in rates.items()
        for place, what in enumerate(("per_s", "cpu_us"))
    }


def _rate(ctr: Any, size: int, rows: int, seconds: float) -> tuple[float, float]:
    done = [0, 0]
    cpu_s = time.process_time()
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        keys = {name: draw.integers(0, rows, size) for name in FEATURES}
        while time.perf_counter() < until:
            ctr.predict(keys)
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / seconds, (time.process_time() - cpu_s) / sum(done) * 1e6


def main() -> None:
    given = parser_of(__file__, __doc__, "tiny").parse_args()
    if onnxruntime is None:
        skipped = "needs tierstore[dense]"
        print(skipped)
        report.write(given.json, {"benchmark": "dense_predict", "machine": describe(), "skipped": [skipped]})
        return
    rows = 2_000 if given.tiny else 200_000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, rows)
        with tierstore.open(root / "data", host_budget="1GiB", load_workers=1) as store:
            store.load_snapshot(root / "snapshot")
            with store.model("ctr").view() as view:
                assert isinstance(view.predictor, DenseSession)
            sizes = [64] if given.tiny else [1, 64, 512, 4096]
            results = batches(store, sizes, rows, 2 if given.tiny else 40)
            rates = threads_of_a_run(store, 512, rows, 0.05 if given.tiny else 1.0, root)
    ready = [until_ready(hidden, 1 if given.tiny else 7) for hidden in ([8] if given.tiny else [128, 12_800, 128_000])]
    print(f"{'batch':>6} {'predict':>9} {'copied':>9} {'lookup':>9} {'graph':>9}   own share   (microseconds)")
    for result in results:
        result["own_share"] = 1 - (result["lookup"] + result["graph"]) / result["predict"]
        figures = " ".join(f"{result[name]:>9.0f}" for name in ("predict", "copied", "lookup", "graph"))
        print(f"{result['batch']:>6} {figures}   {result['own_share']:.0%}")
    print("predictions of 512, two threads: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    print("until a dense part can run, ms:")
    for part in ready:
        print(
            f"  {part['bytes'] >> 10} KiB: accepted before {part['accepted']:.1f}, the first of its structure {part['first']:.1f}, "
            f"the next {part['next']:.1f}"
        )
    document = {
        "benchmark": "dense_predict",
        "machine": describe(),
        "results": results,
        "runs_per_s": rates,
        "ready": ready,
    }
    report.write(given.json, document)


if __name__ == "__main__":
    main()
