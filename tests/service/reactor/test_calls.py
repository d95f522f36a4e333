"""Look-ups over gRPC as a reactor answers them, without a connection: beside what Python answers, and why one is for Python."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.counts import few_or_many
from tests.guard_pages import Guarded
from tests.service.conftest import GRPC, settings_for
from tests.service.reactor.test_traffic import COLLIDING, row_of, write
from tests.wire.test_protobuf_scan import spoil
from tierstore.engine.store import Store
from tierstore.kernels.codec import address_of
from tierstore.reactor import calls as reactor_calls
from tierstore.reactor import layout as kernel
from tierstore.service.dataplane.planner import make_plan
from tierstore.service.reactor import cold_reads
from tierstore.service.rpc.oip_messages import parse_request, split_message
from tierstore.service.rpc.plan_source import MessagePlanSource
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.server import ServerThread
from tierstore.wire.http1 import head as http1_head

grpc = pytest.importorskip("grpc", reason="no client of gRPC is installed")

Request, Response = message_class("inference.ModelInferRequest"), message_class("inference.ModelInferResponse")
HOST = b"localhost:8001"


run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(reactor_calls.run.address)


class Calls:
    """A reactor of a service, which is given calls by hand; and the service's own server."""

    def __init__(self, store: Store, server: ServerThread) -> None:
        self.store, self.service = store, server.service
        self._record = server.service.reactors._record(0, -1, -1, -1)
        self.me = kernel.REACTOR.view(address_of(self._record))
        self.found, self.call = http1_head.HEAD.view(self.me.found), kernel.ANSWERED_CALL.view(self.me.call)
        self.items, self.words = np.empty(0, np.int64), list[bytes]()  # in memory
        self._channel = grpc.insecure_channel(server.grpc_target)
        self.infer = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self._memory, self._text = Guarded(1 << 21), Guarded(4096)

    def close(self) -> None:
        self._channel.close()

    def by_python(self, request: Any) -> Any:
        return Response.FromString(self.infer(request.SerializeToString()))

    def learn(self, request: Any) -> None:
        """As Python does where it has planned a request."""
        message = request.SerializeToString()
        parts = split_message(message)
        parsed = parse_request(parts.meta, raw=bool(parts.raw))
        view = self.store.model(parsed.model).publisher.served.choose(parsed.model, parsed.version, None)
        plan = make_plan(view, parsed.request)
        self.service.plans.learn(parsed.model, view, parsed.version, plan, MessagePlanSource(message, parsed))

    def give(self, message: bytes, host: bytes = HOST, authorization: bytes = b"", unusual: int = 0, timeout_ms: int = 0,
             since_ns: int = 0) -> int:  # fmt: skip
        """What becomes of a message with these headers."""
        found, text = self.found, self._text.place(host + authorization)
        ctypes.memset(self.me.found, 0, http1_head.HEAD.bytes)
        found.host_bytes, found.authorization_at, found.authorization_bytes = len(host), len(host), len(authorization)
        found.body_bytes, found.timeout_ms, found.unusual = len(message), timeout_ms, unusual
        self.call.since_ns = since_ns
        at = self._memory.place(message)
        came = int(run(address_of(self._record), 0, text, at, len(message), time.monotonic_ns()))
        if came == kernel.MADE_A_JOB:
            self._drop_job(self.call.job)
        return came

    def _drop_job(self, number: int) -> None:
        """Take a job back that nobody was given."""
        readers = self.service.reactors.cold_readers
        job, free_jobs = readers.jobs[number], readers.free_jobs[0]
        cold_reads.free(int(job["block"]))
        self.service.reactors.words["inflight"] -= job["held_bytes"]
        job["announced"] = 0
        free_jobs["numbers"][free_jobs["count"]] = number
        free_jobs["count"] += 1

    def why(self, request: Any, **head: Any) -> str:
        came = self.give(request.SerializeToString(), **head)
        assert came >= 0
        return kernel.REASONS[came]

    def answer(self, request: Any, **head: Any) -> Any:
        assert self.give(request.SerializeToString(), **head) == kernel.ANSWERED
        return self.last_answer()

    def last_answer(self) -> Any:
        return Response.FromString(ctypes.string_at(self.call.answer_at, self.call.answer_bytes))

    def in_memory(self, name: str, values: Any) -> Any:
        """Those of some keys that memory holds."""
        self.learn(request({name: values[:1]}, [name]))
        messages = [request({name: values[i : i + 1]}, [name]).SerializeToString() for i in range(len(values))]
        there = [i for i, message in enumerate(messages) if self.give(message) == kernel.ANSWERED]
        assert 2 * len(there) > len(values)
        return [values[i] for i in there]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    root = tmp_path_factory.mktemp("calls")
    settings = settings_for(
        root, host_budget="16MiB", max_request="2MiB", max_response="32MiB", grpc_port=GRPC, threads=1
    )
    with Store(settings) as store:
        store.load_snapshot(write(root, 1))
        store.model("ctr").lookup("word", [f"w{i}" for i in range(200)])
        with ServerThread(store) as server:
            calls = Calls(store, server)
            asked = httpx.get(f"{server.url}/v2/models/ctr", headers={"Host": HOST.decode()})
            assert asked.status_code == 200  # nobody needs a token under this name, reactors learn
            calls.items = np.array(calls.in_memory("item_id", np.arange(1000)))
            calls.words = calls.in_memory("word", [b"w%d" % i for i in range(200)])
            yield calls
            calls.close()


def request(inputs: dict[str, np.ndarray | list[bytes]], outputs: list[str], **fields: Any) -> Any:
    made = Request(**{"model_name": "ctr", **fields})
    for name, array in inputs.items():
        if isinstance(array, list):
            made.inputs.add(name=name, datatype="BYTES", shape=[len(array)])
            made.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in array))
        else:
            datatype = {"int64": "INT64", "uint64": "UINT64", "float32": "FP32"}[array.dtype.name]
            made.inputs.add(name=name, datatype=datatype, shape=array.shape)
            made.raw_input_contents.append(array.tobytes())
    for name in outputs:
        made.outputs.add(name=name)
    return made


def made(calls: Calls, structure: random.Random, rng: random.Random) -> Any:
    """A request of some structure and any size, as clients send it."""
    n = rng.choice([0, 1, 2, 63, 64, 127, 128, 1000, 3000])
    inputs: dict[str, Any] = {"item_id": np.array(rng.choices(calls.items, k=n), np.int64)}
    outputs = structure.sample(["item_id", "item_id.found"], structure.randint(1, 2))
    if structure.random() < 0.5:
        bags, deep = rng.randint(0, 200), rng.randint(1, 4)
        inputs["clicked"] = np.array(rng.choices(calls.items, k=bags * deep), np.int64).reshape(bags, deep)
        outputs.append("clicked")
        if structure.random() < 0.5:
            inputs["clicked.weights"] = np.full((bags, deep), 0.5, np.float32)
    if structure.random() < 0.5:
        inputs["word"] = rng.choices(calls.words, k=rng.randint(0, 40))
        outputs.append("word")
    version = structure.choice(["", "", "1", "stable"])
    names, wanted = structure.sample(list(inputs), len(inputs)), structure.sample(outputs, len(outputs))
    ids = ["", "7", "größe ✓", "x" * 256]
    one = request({name: inputs[name] for name in names}, wanted, id=rng.choice(ids), model_version=version)
    if structure.random() < 0.3:
        one.outputs[0].parameters["dtype"].string_param = "BOOL" if wanted[0] == "item_id.found" else "FP32"
    if structure.random() < 0.3:
        one.parameters["combiner"].string_param = structure.choice(["sum", "mean"])
    if rng.random() < 0.3:
        one.parameters["timeout"].int64_param = 60_000_000
    return one


@pytest.mark.counted
def test_what_a_reactor_answers_is_what_python_answers(calls: Calls) -> None:
    rng, structures = random.Random(5), few_or_many(5, 25)
    for i in range(6 * structures):
        one = made(calls, random.Random(i % structures), rng)
        if i < structures:
            calls.learn(one)
        assert calls.answer(one) == calls.by_python(one)


@pytest.mark.counted
def test_whatever_a_reactor_answers_is_what_python_answers(calls: Calls) -> None:
    rng, answered = random.Random(9), 0
    small = [made(calls, random.Random(i), random.Random(i)) for i in range(25)]
    for one in small:
        calls.learn(one)
    for _ in range(few_or_many(1000, 4000)):
        message = spoil(rng, rng.choice(small).SerializeToString())
        if calls.give(message) == kernel.ANSWERED:
            assert calls.last_answer() == Response.FromString(calls.infer(message))
            answered += 1
    assert answered > few_or_many(20, 100)


def test_rows_have_the_values_of_their_keys_whatever_the_size(calls: Calls) -> None:
    calls.learn(request({"item_id": np.arange(3)}, ["item_id", "item_id.found"]))
    rng = np.random.default_rng(1)
    for n in (0, 1, 7, 8, 127, 128, 2047, 2048, 16_384):
        keys = rng.choice(calls.items, n)
        answer = calls.answer(request({"item_id": keys}, ["item_id", "item_id.found"], id="4f"))
        assert (answer.model_name, answer.model_version, answer.id) == ("ctr", "1", "4f")
        assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
            ("item_id", "FP32", [n, 4]), ("item_id.found", "BOOL", [n]),
        ]  # fmt: skip
        rows, found = answer.raw_output_contents
        assert rows == row_of(keys).tobytes()
        assert found == bytes([1]) * n


def test_an_answer_has_room_before_it(calls: Calls) -> None:
    one = request({"item_id": calls.items[:3]}, ["item_id"], id="x" * 256)
    calls.learn(one)
    calls.answer(one)
    assert calls.call.answer_at - calls.me.answer >= 512


def test_what_is_not_answered_says_why(calls: Calls) -> None:
    keys = calls.items[:5]
    one = request({"item_id": keys}, ["item_id.found", "item_id"])
    one.parameters["combiner"].string_param = "sqrtn"  # of a structure that no other test has
    assert calls.why(one) == "no_plan"
    calls.learn(one)
    assert calls.answer(one) == calls.by_python(one)
    assert calls.why(one, host=b"elsewhere.example") == "access"
    assert calls.why(one, unusual=http1_head.CODED) == "header"
    assert calls.why(one, timeout_ms=5, since_ns=time.monotonic_ns() - 6_000_000) == "busy"
    assert calls.answer(one, timeout_ms=60_000, since_ns=time.monotonic_ns() - 6_000_000)
    assert kernel.REASONS[calls.give(one.SerializeToString()[:-1])] == "form"
    for change in (
        lambda one: one.inputs[0].shape.__setitem__(0, 6),
        lambda one: one.raw_input_contents.__setitem__(0, bytes(41)),
    ):
        wrong = Request.FromString(one.SerializeToString())
        change(wrong)
        assert calls.why(wrong) == "values"
    for change in (lambda one: setattr(one, "model_name", "other"), lambda one: setattr(one, "model_version", "2")):
        wrong = Request.FromString(one.SerializeToString())
        change(wrong)
        assert calls.why(wrong) == "no_plan"
    one.inputs[0].shape[0], one.raw_input_contents[0] = 20_000, np.arange(20_000).tobytes()
    assert calls.give(one.SerializeToString()) == kernel.MADE_A_JOB, "what takes long is for readers"


def test_strings_that_share_their_hash_are_for_python(calls: Calls) -> None:
    calls.learn(request({"word": [b"w1"]}, ["word"]))
    assert (
        calls.answer(request({"word": [b"w1", b"w2"]}, ["word"])).raw_output_contents[0]
        == row_of(np.array([1, 2])).tobytes()
    )
    assert calls.why(request({"word": [b"w1", COLLIDING[0].encode()]}, ["word"])) == "values"
    assert calls.why(request({"word": [b"\xff"]}, ["word"])) == "values"


def test_keys_that_the_drive_has_yet_to_read_are_for_readers(calls: Calls, tmp_path: Path) -> None:
    calls.learn(request({"word": [b"w1"]}, ["word"]))
    one = request({"word": ["grün7".encode()]}, ["word"])
    base = calls.store.model("ctr").served.active.open_version.disk.path / "base"
    descriptors = [
        int(entry.name) for entry in Path("/proc/self/fd").iterdir() if Path(os.path.realpath(entry)).parent == base
    ]
    assert descriptors
    # A drive that has read nothing yet, on every machine: a quick one has the page by the time that a read asks for it.
    (tmp_path / "nothing").touch()
    nothing, kept = os.open(tmp_path / "nothing", os.O_RDONLY), [os.dup(descriptor) for descriptor in descriptors]
    try:
        for descriptor in descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
        came = calls.give(one.SerializeToString())
    finally:
        for descriptor, original in zip(descriptors, kept, strict=True):
            os.dup2(original, descriptor, inheritable=False)
            os.close(original)
        os.close(nothing)
    assert came == kernel.MADE_A_JOB
    for path in base.iterdir():
        path.read_bytes()
    assert calls.answer(one).raw_output_contents


def test_answers_are_counted_as_grpcs(calls: Calls) -> None:
    one = request({"item_id": calls.items[:3]}, ["item_id"])
    calls.learn(one)

    def counted() -> int:
        calls.service.refresh()
        histogram = calls.service.request_times.histograms.get(("oip_grpc", "ok"))
        return 0 if histogram is None else sum(histogram.counts)

    before, answers = counted(), calls.service.reactors.answers
    for _ in range(3):
        calls.answer(one)
    assert counted() == before + 3
    assert calls.service.reactors.answers == answers + 3
