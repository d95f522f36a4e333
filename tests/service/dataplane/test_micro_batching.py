"""Micro-batches: joined requests answer what they answer alone, from one view, and fail alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.quick_build import in_process
from tests.engine.scenes import stamped
from tests.engine.scenes import write_snapshot as write_stamped
from tests.predict import onnx_models as om
from tests.service.conftest import settings_for
from tests.service.fake_store import USERS
from tests.service.raw_clients import Answer, connections, request
from tests.service.scenes import write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import InferenceError
from tierstore.predict.session import DenseSession
from tierstore.service.http.oip import InferMessage
from tierstore.service.limits import shedding as shed
from tierstore.service.server import ServerThread

WEIGHTS = {"item_id": [1.0, 0.5, 0.25, 0.125], "clicked": [1.0, 1.0, 1.0, 1.0], "hour": [1.0, -1.0]}
AGES_US = 3_600_000_000  # a delay that no test waits for: a batch is handed over when it is full


def apart() -> bytes:
    """A graph whose two inputs need not have as many rows: one user scored against some items."""
    nodes = [om.node("ReduceSum", "user axis", "u", keepdims=0), om.node("MatMul", "item_id w", "i")]
    nodes.append(om.node("Add", "i u", "score"))
    inputs: om.Ports = {"user": (om.FLOAT, ["one", 8]), "item_id": (om.FLOAT, ["n", 4])}
    constants = {"axis": np.array([0, 1]), "w": np.ones((4, 1), np.float32)}
    return om.build(nodes, inputs, {"score": (om.FLOAT, ["n", 1])}, constants)


def words() -> bytes:
    """A graph with strings, and rows of a feature without a combiner, several a row of the batch."""
    nodes = [om.node("ReduceSum", "item_id axes", "total", keepdims=0), om.node("Identity", "word", "echo")]
    inputs: om.Ports = {"item_id": (om.FLOAT, ["n", "k", 4]), "word": (om.STRING, ["n"])}
    return om.build(nodes, inputs, {"total": (om.FLOAT, ["n"]), "echo": (om.STRING, ["n"])}, {"axes": np.array([1, 2])})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("batches")
    with in_process(), Store(settings_for(root, lookup_threads=1)) as store:
        store.load_snapshot(write_snapshot(root, dense=om.linear(WEIGHTS, 0.5)))
        store.load_snapshot(write_snapshot(root, model="apart", dense=apart()))
        store.load_snapshot(write_snapshot(root, model="words", dense=words()))
        yield store


@contextlib.contextmanager
def serving(store: Store, **options: Any) -> Iterator[ServerThread]:
    settings = store.settings.model_copy(update={"batch_delay_us": AGES_US} | options)
    with ServerThread(store, settings) as server:
        yield server


@pytest.fixture(scope="module")
def plain(store: Store) -> Iterator[ServerThread]:
    """A service that joins nothing: what every request answers alone."""
    with serving(store, batch_max_items=0) as server:
        yield server


def tensor(name: str, values: Any, datatype: str = "INT64") -> dict[str, Any]:
    data = np.asarray(values)
    return {"name": name, "datatype": datatype, "shape": list(data.shape), "data": data.reshape(-1).tolist()}


def ask(keys: list[int], clicked: list[list[int]] | None = None, **more: Any) -> dict[str, Any]:
    """A request for the model `ctr`: an item, clicks and an hour a row. Python answers it: reactors do not skip a list that nobody reads."""
    clicked = [[key, key] for key in keys] if clicked is None else clicked
    hours = np.arange(2 * len(keys), dtype=np.float64).reshape(-1, 2) / 4 + keys[0]
    inputs = [tensor("item_id", keys), tensor("clicked", clicked), tensor("hour", hours, "FP32")]
    return {"inputs": inputs, "unread": [], **more}


def ragged(keys: list[int], clicked: list[int], offsets: list[int]) -> dict[str, Any]:
    weights = np.arange(1, len(clicked) + 1, dtype=np.float64)
    more = [tensor("clicked.offsets", offsets), tensor("clicked.weights", weights, "FP32")]
    document = ask(keys)
    document["inputs"][1] = tensor("clicked", clicked)
    document["inputs"] += more
    return document


def send(server: ServerThread, documents: list[dict[str, Any]], model: str = "ctr") -> list[Answer]:
    """The answers to all of them, sent one after the other before the first is answered."""

    async def run() -> list[Answer]:
        async with asyncio.timeout(60), connections(server.port) as connect:
            asking = []
            for document in documents:
                connection = await connect()
                asking.append(asyncio.ensure_future(connection.ask(request(f"/v2/models/{model}/infer", document))))
            return list(await asyncio.gather(*asking))

    return asyncio.run(run())


def each(server: ServerThread, documents: list[dict[str, Any]], model: str = "ctr") -> list[Answer]:
    return [send(server, [document], model)[0] for document in documents]


def stats(server: ServerThread) -> dict[str, float]:
    """Batches, and the requests and items in them."""
    found = {
        sample.name.removeprefix("tierstore_batch_"): sample.value
        for family in server.service.batches.families()
        for sample in family.samples
        if sample.name.endswith(("_count", "_sum", "_total"))
    }
    return {
        "batches": found["requests_count"],
        "requests": found["requests_sum"],
        "items": found["items_sum"],
        "apart": found["apart_total"],
    }


ROWS = [{"name": "score"}, {"name": "item_id"}, {"name": "item_id.found"}, {"name": "clicked"}]
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "scores": ("ctr", [ask([1]), ask([2, 3, 100]), ask([4, 5])]),
    "rows too": ("ctr", [ask([1], outputs=ROWS), ask([2, 3, 100], outputs=ROWS), ask([4, 5], outputs=ROWS)]),
    "ragged bags": (
        "ctr",
        [ragged([1, 2], [5, 6, 7], [0, 2]), ragged([3], [], [0]), ragged([4, 100, 6], [9, 8, 7, 6], [0, 0, 3])],
    ),
    "strings of the dense part": (
        "words",
        [
            {
                "inputs": [tensor("item_id", [[key, 2]] * n), tensor("word", ["a"] * n, "BYTES")],
                "outputs": [{"name": "total"}],
            }
            for key, n in ((1, 1), (2, 2), (3, 3))
        ],
    ),
    "some have an id": ("ctr", [ask([1], id="a"), ask([2, 3], id="b"), ask([4, 5, 6])]),
}


@pytest.mark.parametrize("case", CASES)
def test_joined_requests_answer_what_they_answer_alone(store: Store, plain: ServerThread, case: str) -> None:
    model, documents = CASES[case]
    expected = each(plain, documents, model)
    assert [answer.status for answer in expected] == [200] * len(documents), expected[0].body
    with serving(store, batch_max_items=6) as server:
        answers = send(server, documents, model)
        assert stats(server) == {"batches": 1, "requests": 3, "items": 6, "apart": 0}
    assert [answer.document for answer in answers] == [answer.document for answer in expected]
    assert stats(plain)["batches"] == 0


def test_binary_answers_too(store: Store, plain: ServerThread) -> None:
    documents = [ask([key], outputs=ROWS, parameters={"binary_data_output": True}) for key in (1, 2)]
    with serving(store, batch_max_items=2) as server:
        answers = send(server, documents)
        assert stats(server)["batches"] == 1
    assert [answer.body for answer in answers] == [answer.body for answer in each(plain, documents)]


def test_string_keys_are_joined(store: Store, plain: ServerThread) -> None:
    users = list(USERS)
    documents = [
        ask([1]) | {"outputs": [{"name": "score"}, {"name": "user"}]},
        ask([2]) | {"outputs": [{"name": "score"}, {"name": "user"}]},
    ]
    for document, user in zip(documents, users, strict=False):
        document["inputs"].append(tensor("user", [user], "BYTES"))
    with serving(store, batch_max_items=2) as server:
        answers = send(server, documents)
        assert stats(server)["batches"] == 1
    assert [answer.document for answer in answers] == [answer.document for answer in each(plain, documents)]


def test_what_does_not_fit_together_is_not_joined(store: Store) -> None:
    """Other bag lengths, other outputs, another combiner, another dtype; and it does not hold up what does."""
    documents = [
        ask([1]),
        ask([1], [[1, 2, 3]]),
        ask([1], outputs=[{"name": "score"}]),
        ask([1], parameters={"combiner": "sum"}),
        ask([1], outputs=[{"name": "item_id", "parameters": {"dtype": "FP16"}}, {"name": "score"}]),
    ]
    with serving(store, batch_max_items=2) as server:
        answers = send(server, documents + documents)
        assert [answer.status for answer in answers] == [200] * 10
        assert stats(server) == {"batches": 5, "requests": 10, "items": 10, "apart": 0}


@pytest.mark.parametrize(
    ("model", "document"),
    [
        ("ctr", {"inputs": [tensor("item_id", [1])], "outputs": [{"name": "item_id"}]}),
        ("ctr", ask([1, 2, 3])),
        ("apart", {"inputs": [tensor("user", ["u1"], "BYTES"), tensor("item_id", [1])]}),
        ("words", {"inputs": [tensor("item_id", [[1, 2]]), tensor("word", ["a"], "BYTES")]}),
    ],
    ids=["rows alone", "more than a batch holds", "rows of different number", "strings come out"],
)
def test_what_cannot_be_joined_is_answered_at_once(
    store: Store, plain: ServerThread, model: str, document: dict[str, Any]
) -> None:
    with serving(store, batch_max_items=2) as server:
        (answer,) = send(server, [document], model)
        assert stats(server)["batches"] == 0
    assert answer.status == 200, answer.body
    assert answer.document == each(plain, [document], model)[0].document


def test_a_request_with_an_error_fails_alone(store: Store, plain: ServerThread) -> None:
    """Joined, offsets that do not begin with 0 would take the last request's keys for their own."""
    good = [ragged([1], [5, 6], [0]), ragged([2], [7], [0])]
    bad = [ragged([3], [8, 9], [1]), ragged([3], [8, 9], [3])]
    with serving(store, batch_max_items=4) as server:
        answers = send(server, [good[0], bad[0], bad[1], good[1]])
        assert stats(server)["requests"] == 2
    assert [answer.status for answer in answers] == [200, 400, 400, 200]
    assert all("clicked.offsets" in answer.document["error"] for answer in answers[1:3])
    assert [answers[0].document, answers[3].document] == [answer.document for answer in each(plain, good)]


def test_where_the_joined_run_fails_each_is_run_by_itself(
    store: Store, plain: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DenseSession.run

    def fails(self: DenseSession, planned: Any, *more: Any) -> Any:
        if any(shape[0] != 1 for shape in planned.inputs.values()):
            raise InferenceError("no more than one")
        return run(self, planned, *more)

    documents = [ask([1]), ask([2]), ask([3])]
    expected = [answer.document for answer in each(plain, documents)]
    monkeypatch.setattr(DenseSession, "run", fails)
    with serving(store, batch_max_items=3) as server:
        answers = send(server, documents)
        assert stats(server) == {"batches": 0, "requests": 0, "items": 0, "apart": 3}
    assert [answer.document for answer in answers] == expected


def test_a_request_whose_deadline_passes_in_a_batch_is_left_out(
    store: Store, plain: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(store, batch_max_items=3) as server:
        check = server.service.shed.check
        ahead_ns = 0

        def later(caller: shed.Caller) -> None:
            if caller.deadline_ns is not None:
                caller.deadline_ns -= ahead_ns
            check(caller)

        monkeypatch.setattr(server.service.shed, "check", later)

        async def run() -> list[Answer]:
            nonlocal ahead_ns
            async with connections(server.port) as connect:
                asking = []
                for number, more in enumerate(({}, {"parameters": {"timeout": 3_600_000_000}}, {})):
                    connection = await connect()
                    document = ask([number + 1], **more)
                    asking.append(asyncio.ensure_future(connection.ask(request("/v2/models/ctr/infer", document))))
                    while server.service.batches.waiting < min(number + 1, 2):
                        await asyncio.sleep(0.001)
                    if number == 1:
                        ahead_ns = 7_200_000_000_000
                return list(await asyncio.gather(*asking))

        answers = asyncio.run(run())
    assert [answer.status for answer in answers] == [200, 504, 200]
    expected = each(plain, [ask([1]), ask([3])])
    assert [answers[0].document, answers[2].document] == [answer.document for answer in expected]


def test_without_a_delay_those_are_joined_that_wait_for_a_thread(store: Store, plain: ServerThread) -> None:
    with serving(store, batch_max_items=64, batch_delay_us=0) as server:
        (alone,) = send(server, [ask([1])])
        assert alone.status == 200
        assert stats(server)["batches"] == 0
        gate, waits = threading.Event(), threading.Event()
        pool, loop = server.service.lookup_pool, server._http._loop
        assert loop is not None

        def hold() -> None:
            waits.set()
            gate.wait(60)

        loop.call_soon_threadsafe(lambda: pool.run(hold))
        assert waits.wait(60)

        async def run() -> list[Answer]:
            async with connections(server.port) as connect:
                asking = []
                for key in range(10):
                    connection = await connect()
                    asking.append(
                        asyncio.ensure_future(connection.ask(request("/v2/models/ctr/infer", ask([key + 1]))))
                    )
                while server.service.batches.waiting < 10:
                    await asyncio.sleep(0.001)
                gate.set()
                return list(await asyncio.gather(*asking))

        answers = asyncio.run(run())
        assert stats(server) == {"batches": 1, "requests": 10, "items": 10, "apart": 0}
    expected = each(plain, [ask([key + 1]) for key in range(10)])
    assert [answer.document for answer in answers] == [answer.document for answer in expected]


def test_a_request_alone_in_its_batch_is_read_once_and_its_wait_is_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = InferMessage.read
    reads = []
    monkeypatch.setattr(InferMessage, "read", lambda self, *more: reads.append(1) or read(self, *more))
    with serving(store, batch_max_items=64, batch_delay_us=20_000) as server:
        (alone,) = send(server, [ask([1])])
        assert alone.status == 200
        assert (
            server.service.inference_stats.predicts()["ctr"].queued_ns >= 19_000_000
        )  # the loop's timers are of whole milliseconds
    assert len(reads) == 1


def test_requests_in_batches_are_bounded_too(store: Store) -> None:
    with serving(store, batch_max_items=64, batch_delay_us=500_000, lookup_queue=2) as server:
        answers = send(server, [ask([key + 1]) for key in range(8)])
        assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 5
        assert server.service.shed.of("queue_full") == 5
        assert stats(server)["requests"] == 3


def test_a_batch_is_answered_from_one_view_while_deltas_come(tmp_path: Path) -> None:
    """Every answer's rows are of one delta, and none is older than what was acknowledged before it was sent."""
    keys = np.arange(4)
    snapshot = write_stamped(tmp_path, dense=om.linear({"item_id": [1.0] + [0.0] * 7}))
    options = {"lookup_threads": 2, "batch_max_items": 8, "fold_grace_s": 0.0}
    with in_process(), Store(settings_for(tmp_path, **options)) as store:
        store.load_snapshot(snapshot)
        store.apply_delta(stamped(1, {"item": keys, "user": keys}))
        document = {
            "inputs": [tensor("item_id", keys), tensor("user_id", keys)],
            "outputs": [{"name": name} for name in ("score", "item_id", "user_id")],
        }
        message = request("/v2/models/ctr/infer", document)
        acknowledged, wrong, stop = 1, [], threading.Event()

        async def read(server: ServerThread) -> None:
            async with connections(server.port) as connect:
                connection = await connect()
                while not stop.is_set():
                    floor = acknowledged
                    answer = await connection.ask(message)
                    assert answer.status == 200, answer.body
                    outputs = [
                        np.reshape(out["data"], out["shape"])[:, 0] - keys % 64 for out in answer.document["outputs"]
                    ]
                    stamps = {float(stamp) / 64 for out in outputs for stamp in out}
                    if len(stamps) != 1 or not stamps <= {float(seq % 16) for seq in range(floor, acknowledged + 2)}:
                        wrong.append((stamps, floor, acknowledged))

        async def all_of(server: ServerThread) -> None:
            await asyncio.gather(*(read(server) for _ in range(8)))

        with ServerThread(store) as server:
            reader = threading.Thread(target=lambda: asyncio.run(all_of(server)))
            reader.start()
            for seq in range(2, 60):
                store.apply_delta(stamped(seq, {"item": keys, "user": keys}))
                acknowledged = seq
            stop.set()
            reader.join(60)
            assert stats(server)["requests"] > 0
            assert stats(server)["apart"] == 0
        assert not wrong


def quantizing() -> bytes:
    """A graph that quantizes by the largest number of the whole batch."""
    nodes = [
        om.node("DynamicQuantizeLinear", "item_id", "q scale zero"),
        om.node("MatMulInteger", "q w zero", "sum"),
        om.node("Cast", "sum", "total", to=om.FLOAT),
        om.node("Mul", "total scale", "score"),
    ]
    ports: om.Ports = {"item_id": (om.FLOAT, ["batch", 4])}
    return om.build(nodes, ports, {"score": (om.FLOAT, ["batch", 1])}, {"w": np.full((4, 1), 3, np.int8)})


def test_requests_of_a_graph_that_mixes_rows_are_not_joined(store: Store, plain: ServerThread, tmp_path: Path) -> None:
    store.load_snapshot(write_snapshot(tmp_path, model="mixing", dense=quantizing()))
    documents = [{"inputs": [tensor("item_id", [key])]} for key in (1, 3, 90)]
    with serving(store, batch_max_items=3) as server:
        answers = send(server, documents, "mixing")
        assert stats(server)["batches"] == 0
    assert [answer.document for answer in answers] == [answer.document for answer in each(plain, documents, "mixing")]
    assert store.status()["models"]["mixing"]["versions"][0]["mixes_rows"] == [""]


def test_a_missing_number_is_null_in_both_directions(store: Store, plain: ServerThread, tmp_path: Path) -> None:
    graph = om.build(
        [om.node("Add", "item_id hour", "score")],
        {"item_id": (om.FLOAT, ["batch", 4]), "hour": (om.FLOAT, ["batch", 1])},
        {"score": (om.FLOAT, ["batch", 4])},
    )
    store.load_snapshot(write_snapshot(tmp_path, model="lacking", dense=graph))
    hours = {"name": "hour", "datatype": "FP32", "shape": [2, 1], "data": [None, 1.0]}
    (answer,) = each(plain, [{"inputs": [tensor("item_id", [1, 2]), hours]}], "lacking")
    assert answer.status == 200, answer.body
    scores = answer.document["outputs"][0]["data"]
    assert scores[:4] == [None] * 4
    assert None not in scores[4:]
    hours = {"name": "hour", "datatype": "INT64", "shape": [2, 1], "data": [None, 1]}
    (answer,) = each(plain, [{"inputs": [tensor("item_id", [1, 2]), hours]}], "lacking")
    assert answer.status == 400
