"""Look-ups by plan, over a view of real tables and overlays, beside NumPy: scanned, bound, run and written by kernels.

Each plan is learned from one request and used for another one of its structure, with other sizes. The words are made by the code
that makes them for the service, from requests as a client writes them: as JSON and as a message, which are answered alike.
"""

from __future__ import annotations

import ctypes
import json
import math
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.compiled.answers import bind, write_head, write_message
from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.data.table_view import TableView
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.served import PublishedWords
from tierstore.kernels import codec
from tierstore.kernels.codec import address_of
from tierstore.lookup import answer_values, binding, by_plan, plans
from tierstore.lookup.by_plan import ANSWERED, COLD, DOUBTFUL
from tierstore.lookup.plans import MESSAGE, TENSORS
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.planner import make_plan
from tierstore.service.protocols.oip.json_request import parse_request
from tierstore.service.protocols.oip.json_response import ResponseLayout
from tierstore.service.reactor.plan_sources import HttpPlanSource, PlanSource
from tierstore.service.reactor.variants import VersionPlan, is_runnable, variant_words
from tierstore.service.rpc import oip_messages
from tierstore.service.rpc.plan_source import MessagePlanSource
from tierstore.service.rpc.protobuf import message_class
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, FeatureSpec, KeyType, StorageDtype, TableSpec, Tier
from tierstore.wire import request_record
from tierstore.wire.json import scan as json_scan
from tierstore.wire.protobuf import scan as protobuf_scan

run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(by_plan.run.address)
MOST_BYTES = 1 << 24  # of an answer
ID = "4f"  # of all requests
COMBINERS = ["sum", "mean", "sqrtn"]
HELD = 400  # keys 0 … of each table are in memory, those up to ABSENT are known to be absent, others are cold
ABSENT = 500


class Disk:
    """Without a sealed base."""

    def read_by(self, *_: object) -> None:
        return None


class Table:
    """What `PublishedWords` takes of a table, and what it answers: `rows` by key, `default` elsewhere."""

    def __init__(self, name: str, dim: int, dtype: StorageDtype, key: KeyType, seed: int, overlaid: int) -> None:
        rng = np.random.default_rng(seed)
        self.spec = TableSpec(name=name, dim=dim, dtype=dtype, key=key)
        self.default = rng.standard_normal(dim).astype(np.float32)
        self.host = HostTable(self.spec, 1 << 20, default_vector=self.default)
        self.store, self.table_id, self.epochs_id = Disk(), 0, None
        self.device = self.offer = self.own = None
        self.rows: dict[int, np.ndarray] = {}  # as they are stored; None where a key was deleted
        self.known = set(range(ABSENT))
        stored = codec.encode(rng.standard_normal((HELD, dim)).astype(np.float32), dtype)
        held = np.arange(HELD, dtype=np.int64)
        assert self.host.insert(held, stored, 0) == HELD
        assert self.host.insert_absent(np.arange(HELD, ABSENT, dtype=np.int64), 0) == ABSENT - HELD
        self.rows.update(zip(held.tolist(), stored, strict=True))
        self.overlays: list[OverlayTable] = []
        for _ in range(overlaid):
            keys = np.sort(rng.choice(ABSENT + 100, 60, replace=False)).astype(np.int64)
            changed = codec.encode(rng.standard_normal((60, dim)).astype(np.float32), dtype)
            deleted = rng.random(60) < 0.3
            self.overlays.insert(0, OverlayTable(self.spec, keys, changed, deleted))  # the newest is the first
            for key, row, gone in zip(keys.tolist(), changed, deleted.tolist(), strict=True):
                self.known.add(key)
                self.rows.pop(key, None)
                if not gone:
                    self.rows[key] = row

    def vectors(self, keys: np.ndarray, out: Any) -> tuple[np.ndarray, np.ndarray]:
        """(vectors, found) of keys that are all known."""
        vectors = np.tile(self.default.astype(out), (len(keys), 1))
        found = np.array([int(key) in self.rows for key in keys], bool)
        if found.any():
            rows = np.stack([self.rows[int(key)] for key in keys[found]])
            decoded = np.empty((len(rows), self.spec.dim), out)
            codec.decode(rows, self.spec.dtype, decoded)
            vectors[found] = decoded
        return vectors, found


class View:
    """What plans and words take of a view; it is its own `holder`."""

    version, seq = 1, 7
    session = unserved = None
    dense_elsewhere = False
    colliding: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, overlaid: int) -> None:
        self.open_version = self
        kinds = [("item", 16, StorageDtype.FLOAT32, KeyType.INT64), ("half", 5, StorageDtype.FLOAT16, KeyType.INT64),
                 ("big", 33, StorageDtype.FLOAT32, KeyType.UINT64), ("small", 7, StorageDtype.INT8, KeyType.INT64),
                 ("tiny", 21, StorageDtype.INT4, KeyType.INT64)]  # fmt: skip
        self.tables = {kind[0]: Table(*kind, seed, overlaid) for seed, kind in enumerate(kinds)}
        self.features = {
            name: FeatureSpec(name, table, None if combiner is None else Combiner(combiner), padding)
            for name, table, combiner, padding in [
                ("item", "item", None, None), ("half", "half", None, 3), ("big", "big", None, None),
                ("clicked", "item", "mean", None), ("padded", "half", "sum", 0), ("scaled", "small", "sqrtn", None),
                ("tiny", "tiny", None, None), ("tinies", "tiny", "mean", None),
            ]
        }  # fmt: skip
        self.padding = {"half": 3, "padded": 0}

    def table_of(self, feature: str) -> TableSpec:
        return self.tables[self.features[feature].table].spec

    def table(self, name: str) -> TableView:
        return TableView(self.tables[name], self.tables[name].overlays, self.seq)


class Asked:
    """A request of binary tensors, made step by step."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.outputs: list[dict[str, Any]] = []
        self.tail = b""

    def document(self) -> bytes:
        return json.dumps({"inputs": self.inputs, "outputs": self.outputs, "id": ID}).encode()

    def message(self) -> bytes:
        made, at = message_class("inference.ModelInferRequest")(model_name="m", id=ID), 0
        for given in self.inputs:
            made.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
            size = given["parameters"]["binary_data_size"]
            made.raw_input_contents.append(self.tail[at : at + size])
            at += size
        for wanted in self.outputs:
            output = made.outputs.add(name=wanted["name"])
            for name, value in wanted["parameters"].items():
                if name != "binary_data":
                    output.parameters[name].string_param = value
        written: bytes = made.SerializeToString()
        return written

    def bytes_of(self, form: int) -> bytes:
        """The request as a client sends it."""
        return self.document() + self.tail if form == TENSORS else self.message()

    def give(self, name: str, array: np.ndarray, datatype: str) -> None:
        size = {"binary_data_size": array.nbytes}
        self.inputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size})
        self.tail += array.tobytes()

    def resized(self, rng: np.random.Generator) -> Asked:
        """A request of the same structure, of other sizes."""
        other, sizes = Asked(), {}
        other.outputs = self.outputs
        for given in self.inputs:
            of, _, part = given["name"].partition(".")
            shape = rng.integers(0, 9, len(given["shape"])).tolist()
            sizes.setdefault(of, shape)
            shape = sizes[of] if part == "weights" else shape
            width = 4 if given["datatype"] == "FP32" else 8
            size = {"binary_data_size": math.prod(shape) * width}
            other.inputs.append({**given, "shape": shape, "parameters": size})
            other.tail += bytes(size["binary_data_size"])
        return other

    def want(self, name: str, **parameters: Any) -> None:
        self.outputs.append({"name": name, "parameters": {"binary_data": True, **parameters}})


def planned(view: View, asked: Asked, form: int) -> tuple[Plan, PlanSource]:
    """A request planned as the service does it, and what reactors learn from it."""
    if form == TENSORS:
        request = parse_request(memoryview(asked.document()), len(asked.tail))
        assert isinstance(request.request, Request)
        plan = make_plan(view, request.request)  # type: ignore[arg-type]
        return plan, HttpPlanSource(
            "m", None, memoryview(asked.document()), request, ResponseLayout(request, "m", plan)
        )
    message = asked.message()
    parts = oip_messages.split_message(message)
    parsed = oip_messages.parse_request(parts.meta, raw=bool(parts.raw))
    return make_plan(view, parsed.request), MessagePlanSource(message, parsed)  # type: ignore[arg-type]


class Variant:
    """How requests of a structure are answered, learned from one of them."""

    def __init__(self, view: View, asked: Asked, form: int) -> None:
        self.plan, plan_source = planned(view, asked, form)
        assert is_runnable(self.plan)
        assert plan_source.is_plain()
        pieces = plan_source.pieces(self.plan)
        assert pieces is not None
        counts = [0] * (1 + len(self.plan.calls))
        self.words, self._kept = variant_words(VersionPlan(1, view, self.plan, plan_source), pieces, counts)


class Ran:
    """What came of a request: the outcome, the outputs by name, the tier of each key.

    The plan is that of `learned`, a request of the same structure.
    """

    def __init__(self, view: View, asked: Asked, learned: Asked, form: int) -> None:
        served = type("Served", (), {"active": view, "canary": None, "share": 0.0, "labels": {}})()
        words = PublishedWords(served, lambda _: 1, Epochs())
        taught = Variant(view, learned, form)
        variant = address_of(taught.words)
        # nothing is aligned, and what lies around an answer is not touched
        came = np.frombuffer(b"?" + asked.bytes_of(form), np.uint8).copy()
        begins = address_of(came) + 1
        record, structure = (
            np.zeros(request_record.RECORD_BYTES, np.uint8),
            np.zeros(request_record.MOST_STRUCTURE_BYTES, np.uint8),
        )
        described = len(asked.document() if form == TENSORS else asked.message())
        if form == TENSORS:
            assert json_scan.scan(begins, described, address_of(record), 0, address_of(structure))
        else:
            assert protobuf_scan.scan(begins, described, address_of(record), address_of(structure))
        tail = begins if form == MESSAGE else begins + described
        active = int(words._words["active"])
        bound, values = np.zeros(binding.RUN_BYTES, np.uint8), np.zeros(answer_values.VALUES.bytes, np.uint8)
        codes = np.zeros(by_plan.MOST_KEYS, np.int64)
        places = address_of(record), tail, address_of(codes)
        self.bound = bind(variant, active, *places, MOST_BYTES, address_of(bound), address_of(values))
        self.states = np.empty(0, np.uint8)
        self.outputs: dict[str, np.ndarray] = {}
        if self.bound != binding.BOUND:
            self.came = DOUBTFUL
            return
        head = plans.RUN.view(address_of(bound))
        size, keys = head.answer_bytes, head.keys
        room = 1 << 14
        answer = np.full(room + 61 + size + 128, 0xA5, np.uint8)
        states = np.full(keys + 64, 0xA5, np.uint8)
        scratch = np.full(head.scratch + 64, 0xFF, np.uint8)
        end = address_of(answer) + room + 61
        self.came = run(address_of(bound), active, tail, end, address_of(states), address_of(scratch))
        assert (answer[: room + 61] == 0xA5).all()
        assert (states[keys:] == 0xA5).all()
        self.states = states[:keys]
        if form == MESSAGE:
            begin = write_message(variant, address_of(record), address_of(values), end)
        else:
            date = np.frombuffer(b"." * 29, np.uint8)
            begin = write_head(variant, address_of(record), address_of(values), size, address_of(date), end)
        written = answer[begin - address_of(answer) : room + 61 + size].tobytes()
        assert (answer[: begin - address_of(answer)] == 0xA5).all()
        assert (answer[room + 61 + size :] == 0xA5).all()
        (self._read_message if form == MESSAGE else self._read_http)(written)

    def _add(self, name: str, datatype: str, shape: Any, data: bytes) -> None:
        dtype = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_}[datatype]
        self.outputs[name] = np.frombuffer(data, dtype).reshape(shape)

    def _read_http(self, answer: bytes) -> None:
        lines, _, body = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(b": ") for line in lines.split(b"\r\n")[1:])
        assert int(headers[b"content-length"]) == len(body)
        at = int(headers[b"inference-header-content-length"])
        document = json.loads(body[:at])
        assert (document["model_name"], document["model_version"], document["id"]) == ("m", "1", ID)
        for output in document["outputs"]:
            nbytes = output["parameters"]["binary_data_size"]
            self._add(output["name"], output["datatype"], output["shape"], body[at : at + nbytes])
            at += nbytes
        assert at == len(body)

    def _read_message(self, answer: bytes) -> None:
        message = message_class("inference.ModelInferResponse").FromString(answer)
        assert (message.model_name, message.model_version, message.id) == ("m", "1", ID)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
            self._add(output.name, output.datatype, list(output.shape), data)


def answered(view: View, asked: Asked, learned: Asked | None = None) -> Ran:
    """What came of a request, in any protocol. The plan is that of `learned`, a request of the same structure, or its own."""
    one, other = (Ran(view, asked, learned or asked, form) for form in (TENSORS, MESSAGE))
    assert one.came == other.came
    assert one.states.tobytes() == other.states.tobytes()
    if one.came == ANSWERED:
        assert {name: (values.shape, values.tobytes()) for name, values in one.outputs.items()} == {
            name: (values.shape, values.tobytes()) for name, values in other.outputs.items()
        }
    return one


def pooled(
    vectors: np.ndarray, starts: list[int], weights: np.ndarray | None, counts: np.ndarray, combiner: str
) -> np.ndarray:
    """Bags in float32, each product rounded before it is added."""
    out = np.zeros((len(starts), vectors.shape[1]), np.float32)
    for bag, (begin, end) in enumerate(pairwise([*starts, len(vectors)])):
        total = np.float32(0)
        for i in range(begin, end):
            if not counts[i]:
                continue
            weight = np.float32(1) if weights is None else weights[i]
            out[bag] += weight * vectors[i]
            total += weight * weight if combiner == "sqrtn" else weight
        if combiner != "sum":
            divisor = np.sqrt(total) if combiner == "sqrtn" else total
            out[bag] = 0 if total == 0 else out[bag] / divisor
    return out


@pytest.fixture(scope="module", params=[0, 1, 3], ids=["bare", "an overlay", "overlays"])
def view(request: pytest.FixtureRequest) -> View:
    return View(overlaid=request.param)


def ask(rng: np.random.Generator, view: View, names: list[str], asked: Asked) -> dict[str, np.ndarray]:
    """Ask for features at random; the answer that is expected."""
    expected: dict[str, np.ndarray] = {}
    for name in names:
        feature = view.features[name]
        table, bags = view.tables[feature.table], feature.combiner is not None
        shape = (
            (int(rng.integers(0, 9)), int(rng.integers(0, 9)))
            if rng.random() < 0.4
            else (int(rng.choice([0, 1, 17, 70])),)
        )
        keys = rng.choice(np.array(sorted(table.known), np.int64), shape)
        datatype = "UINT64" if table.spec.key is KeyType.UINT64 else "INT64"
        asked.give(name, keys, datatype)
        flat, starts, weights = keys.reshape(-1), None, None
        if bags and len(shape) == 1 and rng.random() < 0.6:
            starts = sorted([0, *rng.integers(0, len(flat) + 1, 4).tolist()])
            asked.give(f"{name}.offsets", np.array(starts, np.int64), "INT64")
        if bags and rng.random() < 0.5:
            weights = rng.choice([0.0, 1.0, -0.5, 2.25, 0.1], flat.shape).astype(np.float32)
            asked.give(f"{name}.weights", weights.reshape(shape), "FP32")
        half = rng.random() < 0.4
        out = np.float16 if half else np.float32
        ragged = bags and (starts is not None or weights is not None or len(shape) == 2)
        vectors, found = table.vectors(flat, np.float32 if ragged else out)
        padding = view.padding.get(name)
        counts = np.ones(len(flat), bool) if padding is None else flat != padding
        vectors[~counts], found[~counts] = 0, False
        combiner = str(rng.choice(COMBINERS))
        if ragged:
            lead = shape[:1] if starts is None else (len(starts),)
            starts = (
                starts
                if starts is not None
                else [bag * (shape[1] if len(shape) == 2 else 1) for bag in range(shape[0])]
            )
            vectors = pooled(vectors, starts, weights, counts, combiner).astype(out)
        else:
            lead = shape
        for which in rng.permutation(["rows", "found"])[: rng.integers(1, 3)].tolist():
            if which == "rows":
                expected[name] = vectors.reshape(*lead, table.spec.dim)
                asked.want(name, dtype="FP16" if half else "FP32", **({"combiner": combiner} if bags else {}))
            else:
                expected[f"{name}.found"] = found.reshape(shape)
                asked.want(f"{name}.found")
        if not expected.keys() & {name, f"{name}.found"}:
            expected[name] = vectors.reshape(*lead, table.spec.dim)
            asked.want(name, dtype="FP16" if half else "FP32", **({"combiner": combiner} if bags else {}))
    return expected


@pytest.mark.parametrize("seed", range(40))
def test_rows_and_bags_are_those_of_numpy(view: View, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        names = rng.permutation(list(view.features))[: rng.integers(1, 5)].tolist()
        asked = Asked()
        expected = ask(rng, view, names, asked)
        ran = answered(view, asked, asked.resized(rng))
        assert ran.came == ANSWERED
        assert ran.outputs.keys() == expected.keys()
        for name, values in expected.items():
            assert ran.outputs[name].dtype == values.dtype
            assert ran.outputs[name].tobytes() == values.tobytes(), (name, asked.inputs, asked.outputs)
        assert not (ran.states == Tier.PENDING).any()


@pytest.mark.parametrize("name", ["item", "half", "clicked", "padded", "scaled", "big", "tiny", "tinies"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "found alone"])
def test_one_key_that_memory_lacks_makes_it_cold(view: View, name: str, *, rows: bool) -> None:
    table = view.tables[view.features[name].table]
    missing = next(key for key in range(10_000) if key not in table.known)
    for keys in ([1, missing, 2], [missing], [0, 3, missing, missing]):
        asked = Asked()
        asked.give("item", np.arange(4, dtype=np.int64), "INT64")
        asked.want("item")
        if name != "item":
            array = np.array([keys], np.int64) if rows else np.array(keys, np.int64)
            asked.give(name, array, "UINT64" if name == "big" else "INT64")
            asked.want(name if rows else f"{name}.found")
        else:
            asked = Asked()
            asked.give("item", np.array(keys, np.int64), "INT64")
            asked.want("item" if rows else "item.found")
        ran = answered(view, asked)
        assert ran.came == COLD
        if (
            name not in ("clicked", "scaled", "padded", "tinies") or not rows
        ):  # else they are looked up again with their bags
            of_it = ran.states[-len(keys) :]
            assert (of_it == Tier.PENDING).tolist() == [key == missing for key in keys]


@pytest.mark.parametrize("starts", [[1, 2], [0, 5, 3], [0, 6], [-1, 0], [0, 1 << 62], [0, -1], [1 << 63 - 1]])
@pytest.mark.parametrize("name", ["clicked", "padded"])
def test_starts_that_are_none_are_for_the_full_check(view: View, name: str, starts: list[int]) -> None:
    asked = Asked()
    asked.give(name, np.arange(5, dtype=np.int64), "INT64")
    asked.give(f"{name}.offsets", np.array(starts, np.int64), "INT64")
    asked.want(name)
    assert answered(view, asked).came == DOUBTFUL


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_bags_hold_no_keys(view: View, n: int) -> None:
    asked = Asked()
    asked.give("clicked", np.arange(n, dtype=np.int64), "INT64")
    asked.give("clicked.offsets", np.empty(0, np.int64), "INT64")
    asked.want("clicked")
    assert answered(view, asked).came == (DOUBTFUL if n else ANSWERED)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("place", [0, 4])
def test_weights_that_are_no_numbers_are_for_the_full_check(view: View, weight: float, place: int) -> None:
    weights = np.full(5, 3.0e38, np.float32)  # their sum is beyond float32, which is fine
    for value, came in ((1.0, ANSWERED), (weight, DOUBTFUL)):
        weights[place] = value
        asked = Asked()
        asked.give("scaled", np.arange(5, dtype=np.int64), "INT64")
        asked.give("scaled.weights", weights, "FP32")
        asked.want("scaled")
        assert answered(view, asked).came == came


@pytest.mark.parametrize(("name", "datatype"), [("item", "UINT64"), ("clicked", "UINT64"), ("big", "INT64")])
def test_keys_in_the_other_integer_type_are_for_the_full_check_where_they_do_not_fit(
    view: View, name: str, datatype: str
) -> None:
    for keys, came in (([1, 2, 3], ANSWERED), ([1, -2, 3], DOUBTFUL), ([-(1 << 63)], DOUBTFUL)):
        for wanted in (name, f"{name}.found"):
            asked = Asked()
            asked.give(name, np.array(keys, np.int64), datatype)
            asked.want(wanted)
            assert answered(view, asked).came == came
