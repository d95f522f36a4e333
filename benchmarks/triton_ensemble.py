"""An ensemble in Triton, ids to rows to scores: `python -m benchmarks.triton_ensemble [--tiny] [--json FILE]`.

Three ensembles in one server share a dense part, a small network in ONNX Runtime. They differ in the model that gives the rows:
tierstore's model for the Python backend with the store in its process, the same asking a service over loopback, and
`numpy.take` in the Python backend, whose keys are the rows' numbers and which has nothing to find. `tritonclient` asks them in turn;
scores of each are compared with the network's own on the rows first. A look-up's share is that of the time of requests, by
Triton's own statistics.

The server comes from `make client-venvs`. Without it there is nothing to measure, and the report says why.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tritonclient.http as triton
from onnx import TensorProto, helper

import tierstore
from benchmarks.machine import describe
from benchmarks.report import headline, markdown, write
from benchmarks.triton_models import write_dense, write_ensemble
from benchmarks.triton_peer import Packages, Unavailable, serving, write_take
from benchmarks.wire_table import FEATURE, MODEL
from benchmarks.wire_triton import VENV
from tierstore.service.server import ServerThread
from tierstore.triton.repository import config_text, ports_of, write_folder

DIM, HIDDEN = 32, 64
OURS, REMOTE, TAKE = "tierstore in process", "tierstore over loopback", "numpy.take"
FOLDERS = {OURS: "rows", REMOTE: "remote", TAKE: "take"}


def network(rng: np.random.Generator) -> bytes:
    """A network of two layers over the rows of one feature, as ONNX."""
    rows = helper.make_tensor_value_info(FEATURE, TensorProto.FLOAT, ["n", DIM])
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["n", 1])
    weights = {"a": (DIM, HIDDEN), "b": (HIDDEN, 1)}
    tensors = [
        helper.make_tensor(name, TensorProto.FLOAT, shape, rng.normal(0, 0.2, shape).astype(np.float32).ravel())
        for name, shape in weights.items()
    ]
    nodes = [
        helper.make_node("MatMul", [FEATURE, "a"], ["first"]),
        helper.make_node("Relu", ["first"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "b"], ["last"]),
        helper.make_node("Sigmoid", ["last"], ["score"]),
    ]
    graph = helper.make_graph(nodes, "network", [rows], [score], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def prepare(folder: Path, table: np.ndarray, graph: bytes) -> None:
    """Two data directories with the rows, as one process has each open, and the snapshot that they are of."""
    with tierstore.SnapshotWriter(folder / "snapshot", model=MODEL, version=1) as snapshot:
        snapshot.table("item", dim=DIM).write(np.arange(len(table)), table)
        snapshot.feature(FEATURE, table="item")
    for name in ("data", "served"):
        with tierstore.open(folder / name) as store:
            store.load_snapshot(folder / "snapshot")
    (folder / "network.onnx").write_bytes(graph)


def write_models(folder: Path, table: np.ndarray, url: str) -> Path:
    """The repository."""
    models = folder / "models"
    with tierstore.Client(url) as client:
        ports = ports_of(client.model(MODEL).metadata(), scores=False, batches=False)
    for name, source in (("rows", {"data": str(folder / "data")}), ("remote", {"url": url})):
        config = config_text(ports, {"model": MODEL, **source}, max_batch_size=0, instances=1, joins=False)
        write_folder(models / name, config)
    write_take(models, table, "take")
    write_dense(models / "dense", folder / "network.onnx", [FEATURE], DIM)
    for name in FOLDERS.values():
        write_ensemble(models / f"{name}_scored", name, "dense", [FEATURE])
    return models


class Ensemble:
    """One of the ensembles, asked with the same sizes of requests in turn."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, f"{name}_scored"
        self._rows = name

    def scores(self, keys: np.ndarray) -> np.ndarray:
        given = triton.InferInput(FEATURE, keys.shape, "INT64")
        given.set_data_from_numpy(keys)
        answer: np.ndarray = self._client.infer(self._name, [given]).as_numpy("score")
        return answer

    def turn(self, batches: list[np.ndarray]) -> list[float]:
        """Microseconds of each request."""
        taken = []
        for keys in batches:
            began = time.perf_counter()
            self.scores(keys)
            taken.append((time.perf_counter() - began) * 1e6)
        return taken

    def spent_us(self, model: str | None = None) -> float:
        """Microseconds that Triton has spent on requests to the ensemble, or to the model that gives the rows."""
        (stats,) = self._client.get_inference_statistics(model or self._name)["model_stats"]
        return int(stats["inference_stats"]["success"]["ns"]) / 1e3

    def rows_us(self) -> float:
        return self.spent_us(self._rows)


def measure(
    client: Any, table: np.ndarray, graph: bytes, sizes: list[int], rounds: int, calls: int
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    ensembles = {name: Ensemble(client, folder) for name, folder in FOLDERS.items()}
    made = []
    for size in sizes:
        batches = [rng.integers(0, len(table), size) for _ in range(calls)]
        (expected,) = session.run(["score"], {FEATURE: table[batches[0]]})
        for one in ensembles.values():
            np.testing.assert_allclose(one.scores(batches[0]), expected, rtol=1e-5, atol=1e-7)
            one.turn(batches)
        p50: dict[str, list[float]] = {name: [] for name in ensembles}
        share: dict[str, list[float]] = {name: [] for name in ensembles}
        for _ in range(rounds):
            for name, one in ensembles.items():
                spent, rows = one.spent_us(), one.rows_us()
                p50[name].append(statistics.median(one.turn(batches)))
                share[name].append((one.rows_us() - rows) / (one.spent_us() - spent))
        for name in ensembles:
            ratios = [ours / theirs for ours, theirs in zip(p50[name], p50[TAKE], strict=True)]
            row = {
                "keys": size, "rows by": name, "p50_us": statistics.median(p50[name]),
                "over numpy.take": statistics.median(ratios), "look-up's share": statistics.median(share[name]),
            }  # fmt: skip
            made.append(row)
            print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, default=VENV, help="the virtual environment of Triton")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--full", action="store_true", help="more rounds")
    parser.add_argument("--json", type=Path, help="write the report there")
    options = parser.parse_args()
    rows, sizes = (2000, [64]) if options.tiny else (1_000_000, [64, 1024, 4096])
    rounds, calls = (2, 5) if options.tiny else (21 if options.full else 9, 50)
    rng = np.random.default_rng(2)
    table, graph = rng.normal(size=(rows, DIM)).astype(np.float32), network(rng)
    document: dict[str, Any] = {"benchmark": "triton_ensemble", "machine": describe(), "rows": rows}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            packages = Packages.at(options.triton)
            prepare(folder, table, graph)
            settings = {"port": 0, "grpc_port": "off"}
            with tierstore.open(folder / "served", **settings) as store, ServerThread(store) as server:
                models = write_models(folder, table, server.url)
                with serving(packages, models, folder) as peer:
                    client = triton.InferenceServerClient(f"127.0.0.1:{peer.http}", network_timeout=120)
                    document["results"] = measure(client, table, graph, sizes, rounds, calls)
                    client.close()
        document["headlines"] = [
            headline(f"an ensemble's p50, {row['keys']:,} keys, {OURS}", TAKE, row["over numpy.take"], at_most=1.2)
            for row in document["results"] if row["rows by"] == OURS
        ]  # fmt: skip
    except Unavailable as error:
        document["skipped"] = [str(error)]
    print(markdown(document))
    if options.json:
        write(options.json, document)


if __name__ == "__main__":
    main()
