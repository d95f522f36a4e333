"""A model with known rows, its dense part, and what both answer: from formulas, without the code under test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

import tierstore

ROWS, DIM = 500, 4
Array = npt.NDArray[np.generic]


def vectors(keys: npt.ArrayLike, shift: float = 0.0) -> npt.NDArray[np.float32]:
    """The rows of these keys: zeros for those that the table does not hold."""
    numbers = np.asarray(keys, np.int64)[..., None]
    rows = np.sin(numbers * 3 + np.arange(DIM)) + shift
    return np.where((numbers >= 0) & (numbers < ROWS), rows, 0).astype(np.float32)


def mean_bags(keys: npt.ArrayLike, ends: list[int], shift: float = 0.0) -> npt.NDArray[np.float32]:
    """Means of bags that end there; zeros for an empty one."""
    rows, begins = vectors(keys, shift).astype(np.float64), [0, *ends[:-1]]
    return np.array(
        [rows[a:b].mean(0) if b > a else np.zeros(DIM) for a, b in zip(begins, ends, strict=True)], np.float32
    )


WEIGHTS = np.cos(np.arange(2 * DIM)).astype(np.float32)


def scores(rows: Array, bags: Array) -> npt.NDArray[np.float64]:
    """What the dense part gives, [n, 1]: a logistic regression over both."""
    both = np.concatenate([rows, bags], 1).astype(np.float64)
    return 1 / (1 + np.exp(-(both @ WEIGHTS.astype(np.float64))))[:, None]


def dense_part() -> bytes:
    """The same as ONNX: inputs `item_id` and `clicked`, output `score`."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", DIM]) for name in ("item_id", "clicked")]
    out = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["n", 1])
    nodes = [
        helper.make_node("Concat", ["item_id", "clicked"], ["both"], axis=1),
        helper.make_node("MatMul", ["both", "w"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    weights = helper.make_tensor("w", TensorProto.FLOAT, [2 * DIM, 1], WEIGHTS.tolist())
    graph = helper.make_graph(nodes, "g", ports, [out], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content: bytes = model.SerializeToString()
    onnx.checker.check_model(model)
    return content


def write_version(where: Path, version: int = 1, *, shift: float = 0.0, words: bool = False) -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as snapshot:
        snapshot.table("item", dim=DIM).write(np.arange(ROWS), vectors(np.arange(ROWS), shift))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
        if words:
            snapshot.table("word", dim=DIM, key="string").write(["a", "bb", "\u00e9"], vectors([1, 2, 3]))
            snapshot.feature("word", table="word")
        else:
            snapshot.dense(dense_part())
    return where


def write_delta(where: Path, seq: int, keys: list[int], value: float) -> Path:
    with tierstore.DeltaWriter(where, model="ctr", seq=seq) as delta:
        delta.upsert("item", keys, np.full((len(keys), DIM), value, np.float32))
    return where
