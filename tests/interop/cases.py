"""What every client is asked, and the answers, computed with NumPy away from the service.

Values are small whole numbers and bags are of such sizes that pooled vectors have no rounding: answers are equal, not
near.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.interop.exchange import Case
from tests.predict import onnx_models as om
from tests.service import scenes
from tests.service.fake_store import DEFAULT, ITEMS, USERS, VERSION

MODEL, RANKER = "ctr", "ranker"
SHIFT = 1024.0  # of the canary's values
HALF = np.float16
HELD: dict[str, dict[Any, float]] = {"item": ITEMS, "user": USERS, "big": {1 << 63: 9.0, 5: 5.0}}


def rows(table: str, keys: np.ndarray) -> np.ndarray:
    absent = DEFAULT if table == "item" else 0.0
    every = scenes.rows(table, [HELD[table].get(key, absent) for key in keys.ravel().tolist()])
    return every.reshape(*keys.shape, every.shape[1])


def found(table: str, keys: np.ndarray) -> np.ndarray:
    return np.array([key in HELD[table] for key in keys.ravel().tolist()]).reshape(keys.shape)


def pooled(keys: np.ndarray, offsets: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Bags of items, as `clicked` pools them: the mean, divided by the sum of weights."""
    scale = np.ones(len(keys), np.float32) if weights is None else weights
    bags = []
    for begin, end in zip(offsets, [*offsets[1:], len(keys)], strict=True):
        total = scale[begin:end].sum()
        weighted = (rows("item", keys[begin:end]) * scale[begin:end, None]).sum(0)
        bags.append(weighted / total if total else weighted)
    return np.array(bags, np.float32)


def ranker() -> bytes:
    """The dense part: scores of users, items, clicks and hours; and their signs, as words."""
    nodes = [
        om.node("Concat", "user item_id clicked hour", "all", axis=1),
        om.node("MatMul", "all weights", "sum"),
        om.node("Tanh", "sum", "score"),
        om.node("Greater", "sum zero", "positive"),
        om.node("Where", "positive yes no", "verdict"),
    ]
    inputs: om.Ports = {
        "user": (om.FLOAT, ["batch", 8]),
        "item_id": (om.FLOAT, ["batch", 4]),
        "clicked": (om.FLOAT, ["batch", 4]),
        "hour": (om.FLOAT, ["batch", 2]),
    }
    outputs: om.Ports = {"score": (om.FLOAT, ["batch", 1]), "verdict": (om.STRING, ["batch", 1])}
    weights = (np.arange(18, dtype=np.float32) - 8).reshape(18, 1) / 64
    constants = {"weights": weights, "zero": np.float32(0)}
    return om.build(nodes, inputs, outputs, constants | {"yes": np.array("up", object), "no": np.array("down", object)})


Expected = dict[str, np.ndarray] | str  # outputs, or a part of an error's message

KEYS = np.array([3, 63, 100, -(1 << 63), (1 << 63) - 1, 2, -1], np.int64)
SQUARE = np.array([[1, 2, 3, 4], [5, 6, 7, 100]], np.int64)
OFFSETS = np.array([0, 2, 2, 3], np.int64)
WEIGHTS = np.array([1, 3, 2, 0.5, 0.5, 1, 6], np.float32)  # sums of 4, 2, 8
NAMES = np.array(["u1", "λ", "nobody", "", "u1"], object)


def look_ups() -> list[tuple[Case, Expected]]:
    """Requests of the model without a dense part."""

    def case(name: str, inputs: dict[str, np.ndarray], expected: Expected, **more: object) -> tuple[Case, Expected]:
        return Case(name, MODEL, inputs, **more), expected  # type: ignore[arg-type]

    bags = {"clicked": KEYS, "clicked.offsets": OFFSETS}
    bigs = np.array([1 << 63, 5, 6], np.uint64)
    return [
        case("rows of integer keys", {"item_id": KEYS}, {"item_id": rows("item", KEYS)}),
        case("rows of a batch", {"item_id": SQUARE}, {"item_id": rows("item", SQUARE)}),
        case("rows of string keys", {"user": NAMES}, {"user": rows("user", NAMES)}),
        case("rows of unsigned keys", {"big": bigs}, {"big": rows("big", bigs)}),
        case("bags of a batch", {"clicked": SQUARE}, {"clicked": rows("item", SQUARE).mean(1)}),
        case("bags by offsets", bags, {"clicked": pooled(KEYS, OFFSETS)}),
        case(
            "bags with weights",
            {**bags, "clicked.weights": WEIGHTS},
            {"clicked": pooled(KEYS, OFFSETS, WEIGHTS)},
        ),
        case(
            "several features",
            {"user": NAMES, "item_id": KEYS[:5]},
            {"user": rows("user", NAMES), "item_id": rows("item", KEYS[:5])},
        ),
        case(
            "rows told from defaults",
            {"item_id": KEYS},
            {"item_id": rows("item", KEYS), "item_id.found": found("item", KEYS)},
            outputs={"item_id": None, "item_id.found": None},
        ),
        case(
            "rows as float16",
            {"item_id": KEYS},
            {"item_id": rows("item", KEYS).astype(HALF)},
            outputs={"item_id": "FP16"},
        ),
        case("a version that is named", {"item_id": KEYS}, {"item_id": rows("item", KEYS)}, version=VERSION),
        case("an unknown feature", {"nope": KEYS}, "nope"),
        case("an unknown version", {"item_id": KEYS}, "7", version=7),
        case(
            "a label",
            {"item_id": KEYS[:2]},
            {"item_id": scenes.rows("item", [3 + SHIFT, 63 + SHIFT])},
            version="canary",
        ),
        case("an unknown label", {"item_id": KEYS}, "spring", version="spring"),
    ]


def predictions() -> list[tuple[Case, Expected]]:
    """Requests of the model with a dense part. What it answers, ONNX Runtime says here."""
    import onnxruntime

    batch = len(NAMES)
    keys, offsets = KEYS, np.array([0, 2, 2, 3, 4], np.int64)
    hours = np.linspace(-2, 2, 2 * batch, dtype=np.float32).reshape(batch, 2)
    inputs = {"clicked": keys, "hour": hours, "clicked.offsets": offsets, "user": NAMES, "item_id": KEYS[:batch]}
    fed = {
        "user": rows("user", NAMES),
        "item_id": rows("item", KEYS[:batch]),
        "clicked": pooled(keys, offsets),
        "hour": hours,
    }
    score, verdict = onnxruntime.InferenceSession(ranker(), providers=["CPUExecutionProvider"]).run(None, fed)
    scored: Expected = {"score": score, "verdict": verdict}
    reversed_inputs = dict(reversed(inputs.items()))
    return [
        (Case("predictions", RANKER, inputs), scored),
        (Case("predictions, inputs in another order", RANKER, reversed_inputs), scored),
        (Case("one output of several", RANKER, inputs, {"score": None}), {"score": score}),
        (
            Case("predictions with rows", RANKER, inputs, {"score": None, "item_id": None, "item_id.found": None}),
            {"score": score, "item_id": fed["item_id"], "item_id.found": found("item", KEYS[:batch])},
        ),
        (
            Case("rows without the dense part's inputs", RANKER, {"user": NAMES}, {"user": None}),
            {"user": rows("user", NAMES)},
        ),
        (Case("a prediction that lacks an input", RANKER, {"user": NAMES}, answers=["score"]), "hour"),
    ]
