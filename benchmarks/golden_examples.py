"""Seconds of a load with golden examples beside one without: a table of a million rows, a graph, and heads of the same.

    python -m benchmarks.golden_examples [--rows 1000000] [--heads 64] [--json FILE]

Loads alternate, each into a directory of its own, so that all see the same machine; the median counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of

DIM, ASKED = 32, 64
ROUNDS = 3


def graph() -> bytes:
    """score [batch, 1]: a layer of 64 over the rows of an item."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(DIM, 64)).astype(np.float32), "top": rng.normal(size=(64, 1)).astype(np.float32)}
    nodes = [
        helper.make_node("MatMul", ["item_id", "w"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "top"], ["score"]),
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("item_id", DIM), ("score", 1))
    ]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_graph(nodes, "bench", ports[:1], ports[1:], held)
    model: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()
    return model


def scores(rows: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    hidden, top = rng.normal(size=(DIM, 64)).astype(np.float32), rng.normal(size=(64, 1)).astype(np.float32)
    found: np.ndarray = np.maximum(rows @ hidden, 0) @ top
    return found


def write(where: Path, rows: int, examples: int, heads: int) -> Path:
    """A snapshot with so many examples in all, dealt to its heads in turn."""
    rng, dense = np.random.default_rng(1), graph()
    names = [f"h{number:03}" for number in range(heads)] or [""]
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        keys, vectors = np.arange(rows), rng.normal(size=(rows, DIM)).astype(np.float32)
        writer.table("item", dim=DIM).write(keys, vectors)
        writer.feature("item_id", table="item")
        for name in names:
            writer.dense(dense, head=name)
        for number in range(examples):
            asked = rng.integers(0, rows, ASKED)
            head = names[number % len(names)] or None
            writer.golden({"item_id": asked}, {"score": scores(vectors[asked])}, head=head, atol=1e-3)
    return where


def seconds(snapshot: Path, data: Path) -> float:
    with tierstore.open(data, host_budget="256MiB") as store:
        began = time.perf_counter()
        store.load_snapshot(snapshot)
        took = time.perf_counter() - began
    shutil.rmtree(data)
    return took


def main() -> int:
    args: argparse.Namespace = parser_of(__file__, __doc__, rows=1_000_000, heads=64).parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    cases = [(heads, examples) for heads in (0, args.heads) for examples in (0, 64, 1000)]
    results = []
    try:
        made = {case: write(root / f"{case[0]}-{case[1]}", args.rows, case[1], case[0]) for case in cases}
        took: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case in cases:
                took[case].append(seconds(made[case], root / "data"))
        for (heads, examples), found in took.items():
            median, without = statistics.median(found), statistics.median(took[heads, 0])
            results.append({"heads": heads, "examples": examples, "load_s": median, "more_s": median - without})
    finally:
        shutil.rmtree(root, ignore_errors=True)
    document = {"benchmark": "golden_examples", "machine": describe(), "rows": args.rows, "results": results}
    print(report.markdown(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
