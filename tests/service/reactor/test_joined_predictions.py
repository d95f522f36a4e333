"""Predictions that wait at the same time share a run of the graph: each gets what it gets alone, and fails alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.engine.scenes import stamped
from tests.engine.scenes import write_snapshot as write_stamped
from tests.predict import onnx_models as om
from tests.service.conftest import eventually, settings_for
from tests.service.raw_clients import connections, request
from tests.service.reactor.prediction_scenes import (
    DIM,
    ROWS,
    Drawn,
    OverGrpc,
    OverHttp,
    OverJson,
    Wire,
    ask,
    dense_runs,
    idle,
    linear,
    one,
    serving,
    thread_held,
    waiting,
    warm,
    write,
)
from tests.service.reactor.test_traffic import Answer, Served, in_json
from tierstore.engine.store import Store
from tierstore.predict.session import DenseSession
from tierstore.service.server import ServerThread

WIRES = [OverHttp, OverGrpc, OverJson]


def row_by_row() -> bytes:
    """Bags, several rows an item, and numbers of the request: a sum, and a copy of the numbers."""
    nodes = [
        om.node("ReduceSum", "one axis", "a", keepdims=1),
        om.node("ReduceSum", "bag axis", "b", keepdims=1),
        om.node("ReduceSum", "many axes", "c", keepdims=0),
        om.node("Unsqueeze", "c axis", "d"),
        om.node("ReduceSum", "hour axis", "h", keepdims=1),
        om.node("Sum", "a b d h", "score"),
        om.node("Identity", "hour", "hours"),
    ]
    inputs: om.Ports = {
        "one": (om.FLOAT, ["batch", DIM]),
        "bag": (om.FLOAT, ["batch", DIM]),
        "many": (om.FLOAT, ["batch", 2, DIM]),
        "hour": (om.FLOAT, ["batch", "hours"]),
    }
    outputs: om.Ports = {"score": (om.FLOAT, ["batch", 1]), "hours": (om.FLOAT, ["batch", "hours"])}
    return om.build(nodes, inputs, outputs, {"axis": np.array([1]), "axes": np.array([1, 2])})


def quantizing() -> bytes:
    """A graph that quantizes by the largest number of the whole batch."""
    nodes = [
        om.node("DynamicQuantizeLinear", "one", "q scale zero"),
        om.node("MatMulInteger", "q w zero", "sum"),
        om.node("Cast", "sum", "total", to=om.FLOAT),
        om.node("Mul", "total scale", "score"),
    ]
    ports: om.Ports = {"one": (om.FLOAT, ["batch", DIM])}
    return om.build(nodes, ports, {"score": (om.FLOAT, ["batch", 1])}, {"w": np.full((DIM, 1), 3, np.int8)})


def user_against_items() -> bytes:
    """A graph whose two inputs need not have as many rows."""
    nodes = [om.node("ReduceSum", "bag axes", "u", keepdims=0), om.node("MatMul", "one w", "i")]
    nodes.append(om.node("Add", "i u", "score"))
    inputs: om.Ports = {"bag": (om.FLOAT, ["users", DIM]), "one": (om.FLOAT, ["n", DIM])}
    constants = {"axes": np.array([0, 1]), "w": np.ones((DIM, 1), np.float32)}
    return om.build(nodes, inputs, {"score": (om.FLOAT, ["n", 1])}, constants)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One thread, which may join 64 items."""
    root = tmp_path_factory.mktemp("joined")
    with serving(root, row_by_row(), batch_max_items=64) as served:
        for model, dense in {"mixing": quantizing(), "pair": user_against_items(), "plain": linear()}.items():
            served.store.load_snapshot(write(root, dense, model))
        yield served


def items(first: int, n: int, *, bag: int = 3, hours: int = 1, outputs: tuple[str, ...] = ("score",)) -> Drawn:
    """A request of `n` items, whose bags begin anywhere."""
    rng = np.random.default_rng(first)
    starts = np.sort(rng.integers(0, bag + 1, n))
    starts[0] = 0
    inputs = {"one": np.arange(first, first + n), "many": rng.integers(1, ROWS, (n, 2))}
    inputs |= {"bag": rng.integers(0, ROWS, bag), "bag.offsets": starts}
    inputs |= {"bag.weights": rng.random(bag).astype(np.float32), "hour": rng.random((n, hours)).astype(np.float32)}
    return Drawn(inputs, list(outputs))


def batches(served: Served) -> dict[str, float]:
    """Runs that joined requests, and their requests and items; requests that were run apart."""
    stats = served.server.service.batches
    runs = sum(stats.requests.counts)
    return {"runs": runs, "requests": stats.requests.total, "items": stats.items.total, "apart": stats.apart}


def more(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def together(served: Served, wires: list[Wire], requests: list[Drawn]) -> tuple[list[Any], dict[str, float]]:
    """(the answers to requests that all wait before the first is run, what was joined of them)."""
    before = batches(served)
    with ExitStack() as stack:
        askers = [stack.enter_context(wire(served)) for wire in wires]
        with thread_held(served):
            for number, (asker, asked) in enumerate(zip(askers, requests, strict=True), 1):
                asker.send(asked)
                waiting(served, number)
        answers = [asker.answer() for asker in askers]
    idle(served)
    return answers, more(batches(served), before)


@pytest.mark.parametrize("wires", [[wire] * 3 for wire in WIRES] + [WIRES], ids=["http", "grpc", "json", "mixed"])
def test_each_has_the_answer_that_it_has_alone(served: Served, wires: list[Wire]) -> None:
    requests = [items(5, 1), items(9, 4, bag=0), items(400, 3, bag=20)]
    for wire in set(wires):
        warm(served, wire, requests[0])
    alone = [score for wire, asked in zip(wires, requests, strict=True) for score in ask(served, wire, asked).scores]
    answers, joined = together(served, wires, requests)
    assert joined == {"runs": 1, "requests": 3, "items": 8, "apart": 0}
    np.testing.assert_allclose([score for answer in answers for score in answer.scores], alone, rtol=1e-6)


def test_a_single_one_that_waits_is_no_batch(served: Served) -> None:
    warm(served, OverHttp, items(5, 1))
    answers, joined = together(served, [OverHttp], [items(7, 3)])
    assert len(answers[0].scores) == 3
    assert set(joined.values()) == {0}


def test_what_does_not_fit_together_is_not_joined_and_does_not_hold_up_what_does(served: Served) -> None:
    """Another model, another number of numbers an item, other outputs, more items than a run takes."""
    kinds = [items(5, 2), items(5, 2, hours=2), items(5, 2, outputs=("hours", "score")), one(2, model="plain")]
    for asked in kinds:
        warm(served, OverHttp, asked)
    answers, joined = together(served, [OverHttp] * 9, [*kinds, *kinds, items(5, 64)])
    assert [answer.code for answer in answers] == [200] * 9
    assert joined == {"runs": 4, "requests": 8, "items": 16, "apart": 0}


@pytest.mark.parametrize("model", ["mixing", "pair"])
def test_requests_of_a_graph_that_needs_all_its_rows_together_are_not_joined(served: Served, model: str) -> None:
    requests = [one(n, model=model) for n in (2, 90, 7)]
    for asked in requests if model == "pair" else []:
        asked.inputs["bag"] = np.array([4])
    warm(served, OverHttp, requests[0])
    alone = [ask(served, OverHttp, asked).scores for asked in requests]
    answers, joined = together(served, [OverHttp] * 3, requests)
    assert [answer.scores for answer in answers] == alone
    assert set(joined.values()) == {0}
    mixes = served.store.status()["models"][model]["versions"][0]["mixes_rows"]
    assert mixes == ([""] if model == "mixing" else [])


def test_what_python_answers_is_answered_by_itself(served: Served) -> None:
    before, asked = batches(served), items(5, 2)
    unread = in_json(asked.inputs, asked.outputs, path="/v2/models/ctr/infer", unread=[])
    with ExitStack() as stack:
        sockets = [stack.enter_context(served.connect()) for _ in range(3)]
        with thread_held(served):
            for number, socket in enumerate(sockets, 1):
                socket.sendall(unread)
                waiting(served, number)
        answers = [Answer(socket) for socket in sockets]
    assert [answer.status for answer in answers] == [200] * 3
    assert [answer.outputs["score"].tolist() for answer in answers] == [answers[0].outputs["score"].tolist()] * 3
    assert set(more(batches(served), before).values()) == {0}


@pytest.mark.parametrize("wire", WIRES)
def test_a_request_with_an_error_fails_alone(served: Served, wire: Wire) -> None:
    """Joined, offsets that do not begin with 0 would take the last request's keys for their own."""
    good, bad = [items(1, 2), items(2, 3)], items(3, 2)
    warm(served, wire, good[0])
    bad.inputs["bag.offsets"] = np.array([1, 2])
    alone = [ask(served, wire, asked).scores for asked in good]
    answers, joined = together(served, [wire] * 3, [good[0], bad, good[1]])
    assert [answers[0].code, answers[2].code] == [wire.ok] * 2
    assert "bag.offsets" in answers[1].text
    np.testing.assert_allclose(answers[0].scores + answers[2].scores, alone[0] + alone[1], rtol=1e-6)
    assert joined["requests"] in (0, 2)  # Python's request may stand between them
    assert joined["apart"] == 0


@pytest.mark.parametrize("wire", WIRES)
def test_one_that_is_late_is_left_out(served: Served, wire: Wire) -> None:
    requests = [items(first, 2) for first in (1, 2, 3)]
    warm(served, wire, requests[0])
    alone = [ask(served, wire, asked).scores for asked in requests]
    requests[1].timeout_us = 100_000
    before = batches(served)
    with ExitStack() as stack:
        askers = [stack.enter_context(wire(served)) for _ in requests]
        with thread_held(served):
            for number, (asker, asked) in enumerate(zip(askers, requests, strict=True), 1):
                asker.send(asked)
                waiting(served, number)
            late_s = time.monotonic() + 0.1  # at the latest: the service has it by now
            eventually(lambda: time.monotonic() > late_s, "its deadline passes")
        answers = [asker.answer() for asker in askers]
    assert [answer.code for answer in answers] == [wire.ok, wire.late, wire.ok]
    np.testing.assert_allclose(answers[0].scores + answers[2].scores, alone[0] + alone[2], rtol=1e-6)
    assert more(batches(served), before) == {"runs": 1, "requests": 2, "items": 4, "apart": 0}


def test_empty_and_large_ones_run_alone_and_the_others_together(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), batch_max_items=16) as served, ExitStack() as stack:
        sizes, askers = [3, 4, 5, 0, 30, 2, 6], []
        for wire in (OverHttp, OverGrpc):
            warm(served, wire, one(3))
        with thread_held(served):
            for number, n in enumerate(sizes, 1):
                askers.append(stack.enter_context((OverHttp, OverGrpc)[number % 2](served)))
                askers[-1].send(one(n))
                waiting(served, number)
            runs = dense_runs(served)
        for n, asker in zip(sizes, askers, strict=True):
            assert asker.answer().scores == [2.75 * key for key in range(n)]
        assert dense_runs(served) - runs == 4  # those of 0 and 30 alone; 3 + 4 + 5 + 2 and 6, or so
        assert batches(served)["requests"] >= 4


@pytest.mark.parametrize("wire", WIRES)
def test_where_a_joined_run_fails_each_is_run_by_itself(
    tmp_path: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DenseSession.run_feed

    def fail(self: DenseSession, names: object, feed: dict[str, np.ndarray]) -> object:
        if len(feed["one"]) > 4:
            raise tierstore.InferenceError("too many")
        return run(self, names, feed)

    with serving(tmp_path, linear(), batch_max_items=16) as served, ExitStack() as stack:
        warm(served, wire, one(3))
        monkeypatch.setattr(DenseSession, "run_feed", fail)
        askers = [stack.enter_context(wire(served)) for _ in range(3)]
        with thread_held(served):
            for asker, n in zip(askers, (3, 4, 5), strict=True):
                asker.send(one(n))
            waiting(served, 3)
        assert [asker.answer().code for asker in askers] == [wire.ok, wire.ok, wire.failed]
        assert batches(served) == {"runs": 0, "requests": 0, "items": 0, "apart": 3}


def both_rows() -> bytes:
    """A graph that answers the rows of two tables as they are."""
    nodes = [om.node("Identity", "item_id", "item"), om.node("Identity", "user_id", "user")]
    inputs: om.Ports = {"item_id": (om.FLOAT, ["batch", 8]), "user_id": (om.FLOAT, ["batch", 4])}
    return om.build(nodes, inputs, {"item": (om.FLOAT, ["batch", 8]), "user": (om.FLOAT, ["batch", 4])}, {})


def test_each_is_answered_from_one_view_while_deltas_come(tmp_path: Path) -> None:
    """Every answer's rows are of one delta, and none is older than what was acknowledged before it was sent."""
    keys = np.arange(4)
    options = {"lookup_threads": 1, "batch_max_items": 16, "fold_grace_s": 0.0}
    with in_process(), Store(settings_for(tmp_path, **options)) as store:
        store.load_snapshot(write_stamped(tmp_path, dense=both_rows()))
        store.apply_delta(stamped(1, {"item": keys, "user": keys}))
        tensors = [
            {"name": name, "datatype": "INT64", "shape": [4], "data": keys.tolist()} for name in ("item_id", "user_id")
        ]
        message = request("/v2/models/ctr/infer", {"inputs": tensors})
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
            served = Served(store, server)
            reader = threading.Thread(target=lambda: asyncio.run(all_of(server)))
            reader.start()
            for seq in range(2, 60):
                store.apply_delta(stamped(seq, {"item": keys, "user": keys}))
                acknowledged = seq
            eventually(lambda: wrong or batches(served)["requests"] > 0 or not reader.is_alive(), "some are joined")
            stop.set()
            reader.join(60)
            assert batches(served)["requests"] > 0
            assert batches(served)["apart"] == 0
        assert not wrong
