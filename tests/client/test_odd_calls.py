"""Odd calls: what a store refuses in process a service refuses over the wire, by the same class and about the same thing.

Every group is a table of calls. Each is made on a store in process, and by a client of a service over that store; calls
that change something are made on two stores in turn. A test fails with the list of all calls that differ.
"""

from __future__ import annotations

import io
import re
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import tierstore
from tests.client.conftest import Blocking
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import settings_for
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

DIM = 4
HOURS = [[0.0], [1.0]]
OPTION = "option|argument"  # of Python's own TypeError for an option that there is not
INPUTS = {"item_id": [1, 2], "clicked": [1, 2], "hour": HOURS}
NAN, INF = float("nan"), float("inf")
HALF = "\ud800"  # half of a character, which no UTF-8 has


class Call(NamedTuple):
    """`make` is given a store or a client. `about`: what the message of a refusal says on both sides."""

    name: str
    about: str
    make: Callable[[Any], Any]


def graph(output: str) -> bytes:
    nodes = [
        om.node("MatMul", "item_id w", "p"),
        om.node("ReduceSum", "clicked axis", "c", keepdims=1),
        om.node("Sum", "p c hour", output),
    ]
    inputs: om.Ports = {name: (om.FLOAT, ["n", DIM]) for name in ("item_id", "clicked")} | {
        "hour": (om.FLOAT, ["n", 1])
    }
    constants = {"w": np.ones((DIM, 1), np.float32), "axis": np.array([1])}
    return om.build(nodes, inputs, {output: (om.FLOAT, ["n", 1])}, constants)


def write_snapshot(root: Path, model: str, version: int = 1, *, dense: bool = False) -> Path:
    where = root / f"{model}-{version}"
    with tierstore.SnapshotWriter(where, model=model, version=version, delta_seq=5) as snapshot:
        rows = np.arange(50, dtype=np.float32)[:, None] + np.full((50, DIM), version, np.float32)
        snapshot.table("item", dim=DIM).write(np.arange(50), rows)
        snapshot.table("big", dim=2, key="uint64").write(np.array([0, 2**63], np.uint64), np.ones((2, 2), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
        snapshot.feature("big_id", table="big")
        if dense:
            snapshot.table("word", dim=3, key="string").write(["", "a"], np.ones((2, 3), np.float32))
            snapshot.feature("query", table="word")
            snapshot.dense(graph("score"))
            snapshot.dense(graph("rate"), head="cvr")
    return where


def delta(seq: int, *, model: str = "ctr", table: str = "item", keys: Any = (1,), dim: int = DIM) -> bytes:
    stream = io.BytesIO()
    with tierstore.DeltaWriter(stream, model=model, seq=seq, event_time=datetime(2026, 1, 1, tzinfo=UTC)) as writer:
        writer.upsert(table, np.array(keys), np.full((len(keys), dim), seq, np.float32))
    return stream.getvalue()


def filled(root: Path) -> Store:
    """A store with `ctr`, versions 1 and 2 of which 1 is active, and `plain` and `asleep` without a dense part."""
    store = Store(settings_for(root, export_root=root))
    store.load_snapshot(write_snapshot(root, "ctr", dense=True))
    store.load_snapshot(write_snapshot(root, "ctr", 2, dense=True), activate=False)
    store.load_snapshot(write_snapshot(root, "plain"))
    store.load_snapshot(write_snapshot(root, "asleep"), activate=False)
    return store


# --- the tables

KEYS: dict[str, Any] = {
    "none": None, "int": 7, "float": 7.5, "str": "seven", "bytes": b"ab", "bytearray": bytearray(b"ab"), "bool": True,
    "set": {1}, "dict": {1: 2}, "range": range(3), "empty": [], "deque": deque([1]), "array": array("q", [1]),
    "floats": [1.5], "bools": [True], "nones": [None], "one is none": [1, None], "strings": ["a"], "binary": [b"a"],
    "mixed": [1, "a"], "both strings": ["a", b"a"], "no UTF-8": [b"\xff"], "half": [HALF], "nested": [[1, 2]],
    "ragged": [[1], [2, 3]], "arrays": [np.array([1])], "scalars": [np.int64(3), np.uint8(4)], "complex": [1j],
    "dates": [datetime(2026, 1, 1)], "2**64": [2**64], "2**63": [2**63], "-1": [-1], "-2**63 - 1": [-(2**63) - 1],
    "both ends": [2**63, -1], "float array": np.array([1.0]), "bool array": np.array([True]), "2-D": np.array([[1, 2]]),
    "0-D": np.array(1), "int8": np.array([1], np.int8), "uint64": np.array([2**63], np.uint64),
    "big-endian": np.array([1, 2], ">i8"), "U": np.array(["a"]), "S": np.array([b"a"]), "object": np.array([1], object),
    "object string": np.array(["a"], object), "object none": np.array([None], object), "object 2-D": np.array([[1]], object),
    "datetime64": np.array(["2026-01-01"], "M8[s]"), "record": np.array([(1, 2)], "i4,i4"), "void": np.array([b"a"], "V1"),
    "empty floats": np.array([]), "empty 2-D": np.empty((0, 2)), "strided": np.arange(9)[::3], "memory": memoryview(array("q", [1])),
    "arrow": pa.array([1, 2]), "arrow null": pa.array([1, None]), "arrow floats": pa.array([1.5]), "arrow bools": pa.array([True]),
    "arrow strings": pa.array(["a"]), "arrow null string": pa.array(["a", None]), "arrow no UTF-8": pa.array([b"\xff"]),
    "arrow dictionary": pa.array(["a"]).dictionary_encode(), "arrow codes": pa.array([1]).dictionary_encode(),
    "arrow chunks": pa.chunked_array([[1], [2]]), "arrow lists": pa.array([[1]]), "arrow empty": pa.array([], pa.float32()),
    "arrow scalar": pa.scalar(1), "arrow table": pa.table({"a": [1]}), "object()": object(), "ellipsis": ...,
}  # fmt: skip
VERSIONS: dict[str, Any] = {
    "1": 1, "2": 2, "9": 9, "0": 0, "-1": -1, "2**63": 2**63, "2**64": 2**64, "10**5000": 10**5000, "'1'": "1", "'2'": "2",
    "'9'": "9", "'-1'": "-1", "'01'": "01", "'1.0'": "1.0", "' 1'": " 1", "'+1'": "+1", "'1_0'": "1_0", "arabic": "\u0661",
    "empty": "", "True": True, "False": False, "1.0": 1.0, "1.5": 1.5, "nan": NAN, "inf": INF, "int64": np.int64(1),
    "list": [1], "tuple": (1,), "dict": {}, "bytes": b"1", "stable": "stable", "canary": "canary", "STABLE": "STABLE",
    "slash": "a/b", "line": "a\nb", "half": HALF, "long": "x" * 300, "object": object(), "query": "1?x", "dots": "..",
}  # fmt: skip
NAMES: dict[str, Any] = {
    "nobody": "nobody", "empty": "", "none": None, "int": 1, "bytes": b"ctr", "space": "c tr", "slash": "c/tr", "dots": "..",
    "half": HALF, "NUL": "\0", "long": "x" * 300, "CTR": "CTR", "dot behind": "ctr.", "head": "ctr.x", "two dots": "ctr.a.b",
    "dot before": ".ctr", "no model's head": "nobody.x", "\u00e4": "\u00e4", "list": ["ctr"], "query": "ctr?x", "percent": "%63tr",
    "float": 1.5, "True": True, "tuple": ("ctr",), "hash": "a#b",
}  # fmt: skip
OFFSETS: dict[str, Any] = {
    "none": None, "empty": [], "0": [0], "1": [1], "0, 3": [0, 3], "0, 2": [0, 2], "falls": [0, 1, 0], "-1": [-1], "0, -1": [0, -1],
    "float": [0.0], "bool": [False], "2-D": [[0]], "str": ["0"], "int": 0, "uint64": np.array([0, 2**63], np.uint64), "range": range(2),
    "int32": np.array([0, 1], np.int32), "2**63": [0, 2**63], "2**70": [0, 2**70], "nan": [NAN], "object": np.array([0, 1], object),
    "nones": [None], "arrow": pa.array([0, 1]), "set": {0}, "dict": {0: 1}, "ragged": [[0], [1, 2]], "with an end": [0, 1, 2],
}  # fmt: skip
WEIGHTS: dict[str, Any] = {
    "empty": [], "one": [1.0], "three": [1.0, 2.0, 3.0], "nan": [NAN, 1.0], "inf": [INF, 1.0], "1e39": [1e39, 1.0], "ints": [1, 2],
    "strings": ["a", "b"], "2-D": [[1.0, 2.0]], "scalar": 1.0, "nones": [None, 1.0], "negative": [-1.0, 1.0], "zeros": [0.0, 0.0],
    "complex": [1j, 2], "10**400": [10**400, 1], "ragged": [[1], [1, 2]], "arrow": pa.array([1.0, None]),
}  # fmt: skip


def keys_of_look_ups() -> Iterator[Call]:
    yield Call("an iterator", "sequence", lambda s: s.model("ctr").lookup("item_id", iter([1])))
    yield Call("a generator", "sequence", lambda s: s.model("ctr").lookup_bags("clicked", (key for key in [1]), [0]))
    for name, keys in KEYS.items():
        for feature in ("item_id", "query", "big_id", "clicked"):
            yield Call(
                f"lookup {feature}: {name}",
                "key|input|keys",
                lambda s, f=feature, k=keys: s.model("ctr").lookup(f, k, return_found=True),
            )
        yield Call(
            "lookup_many", "key|input", lambda s, k=keys: s.model("ctr").lookup_many({"item_id": [1], "query": k})
        )
        yield Call("lookup_bags", "key|input", lambda s, k=keys: s.model("ctr").lookup_bags("clicked", k, [0]))
        for feature in ("item_id", "query"):
            yield Call(
                f"explain {feature}: {name}",
                "key",
                lambda s, f=feature, k=keys: [one["found"] for one in s.explain("ctr", f, k)["keys"]],
            )
        for feature in INPUTS:
            yield Call(
                f"predict {feature}: {name}",
                f"{feature}|key",
                lambda s, f=feature, k=keys: s.model("ctr").predict({**INPUTS, f: k}),
            )


def versions() -> Iterator[Call]:
    for version in VERSIONS.values():
        for model in ("ctr", "asleep"):
            yield Call(
                f"lookup {model}",
                "version|label",
                lambda s, m=model, v=version: s.model(m).lookup("item_id", [1], version=v),
            )
        yield Call("no keys", "version|label", lambda s, v=version: s.model("ctr").lookup("item_id", [], version=v))
        yield Call(
            "bags", "version|label", lambda s, v=version: s.model("ctr").lookup_bags("clicked", [1], [0], version=v)
        )
        yield Call(
            "many", "version|label", lambda s, v=version: s.model("ctr").lookup_many({"item_id": [1]}, version=v)
        )
        yield Call("nothing", "version|label", lambda s, v=version: s.model("ctr").lookup_many({}, version=v))
        yield Call("predict", "version|label", lambda s, v=version: s.model("ctr").predict(INPUTS, version=v))
        yield Call(
            "explain", "version|label", lambda s, v=version: s.explain("ctr", "item_id", [1], version=v)["version"]
        )
        yield Call("digests", "version|label", lambda s, v=version: s.digests("ctr", buckets=2, version=v)["version"])


def names() -> Iterator[Call]:
    for name in NAMES.values():
        for verb, arguments in (
            ("lookup", ("item_id", [1])), ("lookup", ("item_id", [])), ("lookup_bags", ("clicked", [1], [0])),
            ("lookup_many", ({},)), ("predict", (INPUTS,)), ("cache", ("item",)),
        ):  # fmt: skip
            yield Call(f"model {verb}", "model|head", lambda s, n=name, v=verb, a=arguments: getattr(s.model(n), v)(*a))
        for verb, arguments in (
            ("explain", ("item_id", [1])), ("activate", (2,)), ("rollback", ()), ("canary", (2,)), ("promote", ()), ("withdraw", ()),
            ("label", ("x", 1)), ("unlabel", ("x",)), ("deactivate", ()), ("drop", (2,)), ("digests", ()), ("export", ("there",)),
        ):  # fmt: skip
            yield Call(f"model {verb}", "model", lambda s, n=name, v=verb, a=arguments: getattr(s, v)(n, *a))
        if name is not None:
            yield Call("status", "model", lambda s, n=name: s.status(n))
            yield Call("apply_delta", "model", lambda s, n=name: s.apply_delta(delta(99), model=n))
        yield Call("feature", "feature", lambda s, n=name: s.model("ctr").lookup(n, [1]))
        yield Call("feature without keys", "feature", lambda s, n=name: s.model("ctr").lookup(n, []))
        yield Call("feature of bags", "feature", lambda s, n=name: s.model("ctr").lookup_bags(n, [1], [0]))
        yield Call("feature explained", "feature", lambda s, n=name: s.explain("ctr", n, [1]))
        if not isinstance(name, list):
            yield Call(
                "one feature of two", "feature", lambda s, n=name: s.model("ctr").lookup_many({"item_id": [1], n: [1]})
            )
            yield Call("input", "input|JSON", lambda s, n=name: s.model("ctr").predict({**INPUTS, n: [1]}))
        yield Call("table", "table", lambda s, n=name: s.model("ctr").cache(n))
        yield Call("output", "output|JSON", lambda s, n=name: s.model("ctr").predict(INPUTS, outputs=[n]))
        if name:
            yield Call("head", "head", lambda s, n=name: s.model("ctr").predict(INPUTS, head=n))
        yield Call("unlabel", "label", lambda s, n=name: s.unlabel("ctr", n))
    for name in ("item_id.found", "item_id.offsets", "item_id.weights", "hour", "score"):
        yield Call(name, "feature", lambda s, n=name: s.model("ctr").lookup(n, [1]))
        yield Call(name, "feature", lambda s, n=name: s.model("ctr").lookup_many({"item_id": [1], n: [0]}))


def bags() -> Iterator[Call]:
    for offsets in OFFSETS.values():
        for keys in ([1, 2], []):
            yield Call(
                "offsets", "offset|bag|start", lambda s, k=keys, o=offsets: s.model("ctr").lookup_bags("clicked", k, o)
            )
            yield Call(
                "offsets",
                "offset|bag|start",
                lambda s, k=keys, o=offsets: s.model("ctr").lookup_many({"clicked": (k, o)}),
            )
        yield Call(
            "item_id",
            "combiner|offset|bag|start",
            lambda s, o=offsets: s.model("ctr").lookup_bags("item_id", [1, 2], o),
        )
        yield Call(
            "predict",
            "offset|bag|start|agree",
            lambda s, o=offsets: s.model("ctr").predict({**INPUTS, "clicked": ([1, 2], o)}),
        )
    for weights in (None, *WEIGHTS.values()):
        for keys in ([1, 2], []):
            yield Call(
                "weights",
                "weights",
                lambda s, k=keys, w=weights: s.model("ctr").lookup_bags("clicked", k, [0], weights=w),
            )
        yield Call("many", "weights", lambda s, w=weights: s.model("ctr").lookup_many({"clicked": ([1, 2], [0], w)}))
        yield Call(
            "no offsets",
            "weights|offsets",
            lambda s, w=weights: s.model("ctr").lookup_many({"clicked": ([1, 2], None, w)}),
        )
        one = {"item_id": [1], "hour": [[0.0]]}
        yield Call(
            "predict", "weights", lambda s, w=weights, i=one: s.model("ctr").predict({**i, "clicked": ([1, 2], [0], w)})
        )
    for combiner in ("max", "SUM", None, 1, "", ["sum"], "sum", tierstore.types.Combiner.SUM, True, HALF, "x" * 500):
        for feature in ("clicked", "item_id"):
            yield Call(
                f"combiner {combiner!r:.20}",
                "combiner|JSON",
                lambda s, f=feature, c=combiner: s.model("ctr").lookup_bags(f, [1, 2], [0], combiner=c),
            )
    for dtype in (
        "float64",
        "FP32",
        np.float32,
        np.dtype("float32"),
        None,
        1,
        "float16",
        "",
        [],
        np.str_("float16"),
        HALF,
    ):
        yield Call(f"dtype {dtype!r:.20}", "dtype", lambda s, d=dtype: s.model("ctr").lookup("item_id", [1], dtype=d))
        yield Call("bags", "dtype", lambda s, d=dtype: s.model("ctr").lookup_bags("clicked", [1], [0], dtype=d))
        yield Call("many", "dtype", lambda s, d=dtype: s.model("ctr").lookup_many({"item_id": [1]}, dtype=d))
    yield Call("option", OPTION, lambda s: s.model("ctr").lookup("item_id", [1], nope=1))
    yield Call("option", OPTION, lambda s: s.model("ctr").predict(INPUTS, nope=1))


def many() -> Iterator[Call]:
    odd: list[Any] = [
        {}, None, [("item_id", [1])], "item_id", {"item_id"}, {None: [1]}, {1: [1]}, {"item_id": None}, {"clicked": ([1], [0])},
        {"item_id": ([1], [0])}, {"clicked": ([1],)}, {"clicked": ()}, {"clicked": ([1], [0], None, None)}, {"clicked": ([1], None)},
        {"item_id": (1, 2)}, {"query": ("a", "b")}, {"query": (b"a", b"b")}, {"item_id": [1], "nobody": [1]}, {"item_id": [1], "query": [1]},
        {"item_id": [], "query": ["a"]}, pa.table({"item_id": [1]}), {"clicked": [[1], [0]]}, 5, {"clicked": [1], "clicked.offsets": [0]},
    ]  # fmt: skip
    for keys in odd:
        yield Call(f"{keys!r:.30}", "", lambda s, k=keys: s.model("ctr").lookup_many(k))
        yield Call(f"{keys!r:.30}", "", lambda s, k=keys: s.model("plain").lookup_many(k, return_found=True))
        yield Call(f"{keys!r:.30}", "", lambda s, k=keys: s.model("ctr").predict(k))
    yield Call("asleep", "asleep", lambda s: s.model("asleep").lookup_many({}))


def predictions() -> Iterator[Call]:
    odd: dict[str, Any] = {
        "hour is missing": {"item_id": [1], "clicked": [1]}, "sizes": {**INPUTS, "item_id": [1, 2, 3]}, "1-D": {**INPUTS, "hour": [0.0, 1.0]},
        "3-D": {**INPUTS, "hour": [[[0.0]], [[1.0]]]}, "wide": {**INPUTS, "hour": [[0.0, 1.0], [1.0, 2.0]]}, "ints": {**INPUTS, "hour": [[0], [1]]},
        "strings": {**INPUTS, "hour": [["a"], ["b"]]}, "none": {**INPUTS, "hour": [[None], [1.0]]}, "bools": {**INPUTS, "hour": [[True], [False]]},
        "1e39": {**INPUTS, "hour": [[1e39], [0.0]]}, "nan": {**INPUTS, "hour": [[NAN], [0.0]]}, "objects": {**INPUTS, "hour": np.array(HOURS, object)},
        "complex": {**INPUTS, "hour": [[1j], [0]]}, "ragged": {**INPUTS, "hour": [[0.0], [1.0, 2.0]]}, "scalar": {**INPUTS, "hour": 1.0},
        "empty": {**INPUTS, "hour": []}, "one user": {**INPUTS, "item_id": [1]}, "2-D keys": {**INPUTS, "item_id": [[1], [2]]},
        "3-D keys": {**INPUTS, "item_id": [[[1]], [[2]]]}, "2-D bags": {**INPUTS, "clicked": [[1, 2], [3, 4]]},
        "bags": {**INPUTS, "clicked": ([1, 2, 3], [0, 1])}, "too few bags": {**INPUTS, "clicked": ([1, 2, 3], [0])},
        "bags without a combiner": {**INPUTS, "item_id": ([1, 2], [0, 1])}, "unknown": {**INPUTS, "more": [1]}, "none at all": {**INPUTS, "clicked": None},
        "strings as keys": {**INPUTS, "item_id": ["a", "b"]}, "floats as keys": {**INPUTS, "item_id": [1.0, 2.0]}, "2**70": {**INPUTS, "item_id": [2**70, 1]},
        "weights": {**INPUTS, "clicked": ([1, 2], [0, 1], [1.0, 1.0])}, "weights alone": {**INPUTS, "clicked": ([1, 2], None, [1.0, 1.0])},
        "tuples": {**INPUTS, "item_id": (1, 2)}, "a tuple of arrays": {**INPUTS, "hour": ([[0.0], [1.0]], [0])},
        "nothing": {"item_id": [], "clicked": [], "hour": np.empty((0, 1), np.float32)},
    }  # fmt: skip
    for name, inputs in odd.items():
        for options in ({}, {"head": "cvr"}, {"outputs": ["score"]}):
            yield Call(name, "", lambda s, i=inputs, o=options: s.model("ctr").predict(i, **o))
    outputs: list[Any] = [
        None, [], ["score"], ["score", "score"], "score", ("score",), {"score"}, ["nobody"], [None], [1], 1, ["hour"], ["rate"], [""], [["score"]], [HALF],
    ]  # fmt: skip
    for wanted in outputs:
        yield Call(
            f"outputs {wanted!r:.20}", "output|JSON", lambda s, o=wanted: s.model("ctr").predict(INPUTS, outputs=o)
        )


def numbers() -> Iterator[Call]:
    odd: list[Any] = [0, -1, 1.5, "5", True, None, NAN, 2**63, 2**64, np.int64(7), [1], 7]
    for number in odd:
        yield Call(
            f"limit {number!r:.20}", "limit", lambda s, n=number: len(s.model("ctr").cache("item", n)["hottest"]) >= 0
        )
        yield Call(
            "buckets", "buckets", lambda s, n=number: len(s.digests("ctr", buckets=n)["tables"]["item"]["digests"])
        )
        yield Call("seq", "seq", lambda s, n=number: s.digests("ctr", seq=n, buckets=1)["tables"])
        yield Call(
            "expired_at_s", "expired_at_s", lambda s, n=number: s.digests("ctr", expired_at_s=n, buckets=1)["tables"]
        )
    for listed in (
        {"nobody": [0]},
        {"item": [0]},
        {"item": ["a"]},
        {"item": None},
        {"item": "0"},
        {"item": [-1]},
        {"item": [7]},
    ):
        yield Call(
            f"listed {listed}", "listed|table", lambda s, n=listed: s.digests("ctr", listed=n, buckets=2)["tables"]
        )
    for keys in ([], list(range(101)), list(range(100)), [1, 1]):
        yield Call(
            f"{len(keys)} keys",
            "keys",
            lambda s, k=keys: [one["key"] for one in s.explain("ctr", "item_id", k)["keys"]],
        )


def changes() -> Iterator[Call]:
    """Calls of which each leaves a store as it was, or changes both stores alike."""
    for version in VERSIONS.values():
        if version in (1, 2) and not isinstance(version, (bool, float)):
            continue
        for verb in ("activate", "canary", "drop"):
            yield Call(verb, "version", lambda s, v=version, verb=verb: getattr(s, verb)("ctr", v))
        yield Call("label", "version|serves", lambda s, v=version: s.label("ctr", "x", v))
        yield Call(
            "expected_active",
            "expected_active|active",
            lambda s, v=version: s.activate("ctr", 2, expected_active=v) if v else None,
        )
        yield Call(
            "rollback",
            "expected_active|active|served before",
            lambda s, v=version: s.rollback("ctr", expected_active=v),
        )
        yield Call("to_seq", "seq", lambda s, v=version: s.rollback("ctr", to_seq=v) if v is not None else None)
        yield Call("export", "version|label|exported", lambda s, v=version: exported(s, version=v))
        yield Call("as_version", "version|exported", lambda s, v=version: exported(s, as_version=v))
        yield Call("partitions", "partitions|exported", lambda s, v=version: exported(s, partitions=v))
    for keep in (0, -1, 1.5, "1", True, 10**6):
        yield Call("backup", "keep", lambda s, k=keep: s.backup("plain", s.place("backups"), keep=k))
    for share in (-0.1, 1.1, NAN, INF, "0.5", "5%", None, True, [0.5]):
        yield Call(f"share {share!r}", "share", lambda s, v=share: s.canary("ctr", 2, v))
    for name in NAMES.values():
        if name != "nobody" and name != "CTR":
            yield Call(f"label {name!r:.20}", "label|name", lambda s, n=name: s.label("ctr", n, 1))
    for name in ("stable", "canary", "1"):
        yield Call(f"label {name}", "label", lambda s, n=name: s.label("ctr", n, 1))
    yield Call("unlabel stable", "label", lambda s: s.unlabel("ctr", "stable"))
    yield Call("label what is not served", "label", lambda s: s.label("ctr", "x", 2))
    for verb in ("promote", "withdraw", "rollback"):
        yield Call(verb, "canary|served before", lambda s, v=verb: getattr(s, v)("ctr"))
    yield Call("drop", "active", lambda s: s.drop("ctr", 1))
    yield Call("canary", "active", lambda s: s.canary("ctr", 1))
    yield Call("activate", "", lambda s: s.activate("ctr", 1))
    deltas: dict[str, Any] = {
        "empty": b"", "junk": b"junk", "none": None, "int": 5, "list": [1], "no such file": "/nowhere", "NUL": "a\0b", "directory": Path("/tmp"),
        "cut": delta(6)[:-30], "gap": delta(9), "old": delta(1), "other model": delta(6, model="nobody"), "dim": delta(6, dim=3),
        "table": delta(6, table="nobody"), "strings": delta(6, keys=["a"]), "bytearray": bytearray(b"junk"), "array": np.zeros(3, np.uint8),
    }  # fmt: skip
    for name, source in deltas.items():
        yield Call(f"delta {name}", "", lambda s, d=source: s.apply_delta(d))
        yield Call(f"delta {name}", "", lambda s, d=source: s.apply_delta(d, model="plain"))
    yield Call("delta", "", lambda s: s.apply_delta(delta(6)))
    yield Call("delta again", "", lambda s: s.apply_delta(delta(6), model="ctr"))
    yield Call("delta with other rows", "content", lambda s: s.apply_delta(delta(6, keys=[2])))
    for source in (None, 5, "", "/nowhere", "a\0b", "foo://x", b"x"):
        yield Call(f"load {source!r}", "", lambda s, p=source: s.load_snapshot(p))
        yield Call(f"load of a model {source!r}", "", lambda s, p=source: s.load_snapshot(p, model="ctr"))
    yield Call("load again", "version 1", lambda s: s.load_snapshot(s.root / "plain-1"))
    yield Call("load of another model", "ctr", lambda s: s.load_snapshot(s.root / "plain-1", model="ctr"))
    for where in (None, 5, "", "a\0b"):
        yield Call(f"export to {where!r}", "path", lambda s, w=where: s.export("plain", w))
        yield Call(f"backup to {where!r}", "path", lambda s, w=where: s.backup("plain", w))


# --- the comparison


class Owner:
    """A store, or a client of one, beside the directory `root` in which its snapshots are."""

    def __init__(self, verbs: Any, root: Path) -> None:
        self._verbs, self.root = verbs, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verbs, name)

    def place(self, name: str) -> Any:
        """A directory to write to, as the store or the service takes it."""
        return self.root / name if isinstance(self._verbs, Store) else name


def exported(owner: Owner, **options: Any) -> Any:
    """What an export to where nothing is says, but for where that is."""
    shutil.rmtree(owner.root / "exports", ignore_errors=True)
    report = owner.export("ctr", owner.place("exports"), **options)
    return report.model, report.version, report.seq, report.rows


def plain(value: Any) -> Any:
    """An answer as something that can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def outcome(owner: Owner, call: Call) -> tuple[str, Any]:
    """("answer", the answer), or (class of the error, its message)."""
    try:
        return "answer", plain(call.make(owner))
    except Exception as error:  # noqa: BLE001 - of whatever class
        return type(error).__name__, str(error)


def alike(call: Call, left: tuple[str, Any], right: tuple[str, Any]) -> bool:
    """Whether both outcomes are the same answer, or errors of one of our classes about the same thing."""
    if "answer" in (left[0], right[0]):
        return left == right
    ours = hasattr(tierstore.errors, left[0]) or call.about == OPTION
    return left[0] == right[0] and ours and all(re.search(call.about, message) for _, message in (left, right))


def differences(calls: Callable[[], Iterator[Call]], left: Owner, right: Owner) -> list[str]:
    """A line for each call that does not do the same on both."""
    found = []
    for number, call in enumerate(calls()):
        ours, theirs = outcome(left, call), outcome(right, call)
        if not alike(call, ours, theirs):
            found.append(f"{number} {call.name}: {ours[0]} {ours[1]!s:.150} | {theirs[0]} {theirs[1]!s:.150}")
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    root = tmp_path_factory.mktemp("asked")
    with in_process(), filled(root) as store:
        yield Owner(store, root)


@pytest.fixture(scope="module", params=["blocking", "asyncio", "uvicorn"])
def client(request: pytest.FixtureRequest, store: Owner) -> Iterator[Owner]:
    """A client of a service over `store`: of compiled threads, or of uvicorn."""
    settings = settings_for(store.root, **({"server": "uvicorn"} if request.param == "uvicorn" else {}))
    kind: Any = Blocking if request.param == "asyncio" else tierstore.Client
    with ServerThread(store._verbs, settings) as server:
        client = kind(server.url, retries=0)
        yield Owner(client, store.root)
        client.close()


@pytest.mark.parametrize("calls", [keys_of_look_ups, versions, names, bags, many, predictions, numbers])
def test_a_service_answers_odd_calls_as_the_store_does(store: Owner, client: Owner, calls: Any) -> None:
    assert differences(calls, store, client) == []


def test_a_service_refuses_odd_changes_as_the_store_does(tmp_path: Path) -> None:
    roots = tmp_path / "here", tmp_path / "served"
    with in_process(), filled(roots[0]) as here, filled(roots[1]) as served:
        settings = settings_for(roots[1], export_root=roots[1])
        with ServerThread(served, settings) as server, tierstore.Client(server.url, retries=0) as client:
            assert differences(changes, Owner(here, roots[0]), Owner(client, roots[1])) == []
        for store in (here, served):
            ctr = store.model("ctr")
            assert (ctr.active_version, ctr.versions, ctr.log.last, ctr.served.all_labels()) == (
                1,
                [1, 2],
                6,
                {"stable": 1},
            )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timeout_s", ["x", None, 0, NAN, INF, True, [1]]),
        ("retries", [-1, "3", 1.5]),
        ("split_keys", [0, "a", 1.5]),
        ("split_items", [-1, "a"]),
        ("parallel", [0, "x"]),
        ("max_connections", [0, None]),
        ("backoff_s", [-1, "x", NAN, None]),
        ("hedge_after_s", [-1, "x"]),
        ("token", [5, b"x"]),
    ],
)
def test_an_argument_of_a_client_that_means_nothing_is_refused_by_its_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(tierstore.errors.InvalidInput, match=name):
            tierstore.Client("http://127.0.0.1:1", **{name: value})


@pytest.mark.parametrize("url", [None, 5, [None], b"http://x", Path("/tmp/x.sock"), [5]])
def test_what_is_no_text_is_no_url(url: Any) -> None:
    with pytest.raises(tierstore.errors.InvalidInput, match="url"):
        tierstore.Client(url)


def test_options_of_a_call_that_mean_nothing_are_refused_by_their_name(client: Owner) -> None:
    ctr = client.model("ctr")
    for timeout_s in ("x", 0, -1, NAN, INF, [1]):
        with pytest.raises(tierstore.errors.InvalidInput, match="timeout_s"):
            ctr.lookup("item_id", [1], timeout_s=timeout_s)
    for request_id in ("", 5, "\u00e9", b"x"):
        with pytest.raises(tierstore.errors.InvalidInput, match="request_id"):
            ctr.lookup("item_id", [1], request_id=request_id)
    for split_items in (0, -1, "x", 1.5):
        with pytest.raises(tierstore.errors.InvalidInput, match="split_items"):
            ctr.predict(INPUTS, split_items=split_items)
    for job in (None, 5, "", "nobody", "..", HALF):
        for verb in (client.job, client.cancel):
            with pytest.raises(tierstore.errors.NotFound, match="no job"):
                verb(job)
    for name in (None, 5, ""):
        for verb in (client.parked_message, client.skip_parked):
            with pytest.raises(tierstore.errors.NotFound, match="no parked message"):
                verb(name)
    assert client.sample("ctr", keys={"item": np.array([1, 2])})["tables"]["item"]["found"] == 2
    with pytest.raises(tierstore.errors.NotFound, match="no version 0"):
        ctr.metadata(version=0)
