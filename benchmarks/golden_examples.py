"""Loads with golden examples beside loads without: `python -m benchmarks.golden_examples [--tiny] [--json FILE]`.

A table of a million rows of 32 float16, and a layer of 64 over the rows of an item, once as the model's own dense part
and once as 64 heads, as many as a model may have. Each example has 64 keys, scores and rows. Loads take turns, each
into a directory of its own, so that all see the same machine; medians of seconds, and of processor seconds of the
process and its helpers.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tierstore
from benchmarks import report
from benchmarks.footprint import load
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.types import MOST_HEADS

DIM, WIDTH, ASKED = 32, 64, 64
Rows = npt.NDArray[np.float32]
Case = tuple[int, int]  # heads (0: the model's own dense part), examples


def weights() -> tuple[Rows, Rows]:
    rng = np.random.default_rng(0)
    hidden, top = rng.standard_normal((DIM, WIDTH), np.float32), rng.standard_normal((WIDTH, 1), np.float32)
    return hidden, top


def graph() -> bytes:
    """score [batch, 1] of the rows of an item."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("MatMul", ["item_id", "hidden"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["active"]),
        helper.make_node("MatMul", ["active", "top"], ["score"]),
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("item_id", DIM), ("score", 1))
    ]
    held = [numpy_helper.from_array(of, name) for name, of in zip(("hidden", "top"), weights(), strict=True)]
    made = helper.make_graph(nodes, "ranker", ports[:1], ports[1:], held)
    opset = helper.make_opsetid("", 17)
    model: bytes = helper.make_model(made, opset_imports=[opset], ir_version=9).SerializeToString()
    return model


def write(where: Path, rows: int, case: Case) -> Path:
    """A snapshot whose examples are dealt to its heads in turn."""
    heads, examples = case
    rng, dense, (hidden, top) = np.random.default_rng(1), graph(), weights()
    names = [f"h{number:02}" for number in range(heads)] or [""]
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        keys, vectors = np.arange(rows), rng.standard_normal((rows, DIM), np.float32).astype(np.float16)
        writer.table("item", dim=DIM, dtype="float16").write(keys, vectors)
        writer.feature("item_id", table="item")
        for name in names:
            writer.dense(dense, head=name)
        for number in range(examples):
            asked = rng.integers(0, rows, ASKED)
            seen = vectors[asked].astype(np.float32)
            expected = {"score": np.maximum(seen @ hidden, 0) @ top, "item_id": seen}
            writer.golden({"item_id": asked}, expected, head=names[number % len(names)] or None, atol=1e-3)
    return where


def seconds(snapshot: Path, data: Path, examples: int) -> tuple[float, float]:
    """(seconds, processor seconds) of a load."""
    with tierstore.open(data, host_budget="256MiB") as store:
        before, began = sum(os.times()[:4]), time.perf_counter()
        store.load_snapshot(snapshot)
        took = time.perf_counter() - began, sum(os.times()[:4]) - before
        held = (store.status()["models"]["ctr"]["versions"][0].get("golden") or {"held": 0})["held"]
        assert held == examples, f"{held} of {examples} examples held"
    shutil.rmtree(data)
    return took


def main() -> int:
    args = parser_of(__file__, __doc__, "tiny", rows=1_000_000, rounds=3).parse_args()
    rows, rounds, heads, counts = args.rows, args.rounds, MOST_HEADS, (0, 64, 1000)
    if args.tiny:
        rows, rounds, heads, counts = 20_000, 1, 2, (0, 4, 8)
    document: dict[str, Any] = {"benchmark": "golden_examples", "machine": describe(), "load_before": load()}
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=os.environ.get("TIERSTORE_BENCH_DIR")))
    cases = [(of, examples) for of in (0, heads) for examples in counts]
    try:
        made = {case: write(root / f"{case[0]}-{case[1]}", rows, case) for case in cases}
        seconds(made[cases[0]], root / "data", 0)  # the first load of a process starts its helpers
        taken: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                taken[case].append(seconds(made[case], root / "data", case[1]))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    medians = {case: [statistics.median(of) for of in zip(*taken[case], strict=True)] for case in cases}
    document["results"] = [
        {
            "heads": case[0] or None,
            "examples": case[1],
            "load_s": medians[case][0],
            "cpu_s": medians[case][1],
            "more_s": medians[case][0] - medians[case[0], 0][0],
            "more_cpu_s": medians[case][1] - medians[case[0], 0][1],
        }
        for case in cases
    ]
    document |= {"rows": rows, "rounds": rounds, "load_after": load()}
    print(report.markdown(document))
    report.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
