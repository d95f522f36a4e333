"""Predictions over gRPC that reactors begin: whatever bytes come, answers of any shape, and what becomes of their streams."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tests.service import http2_client as h2
from tests.service.conftest import ask_while_versions_change, eventually
from tests.service.reactor import test_predictions as over_each_wire
from tests.service.reactor.prediction_scenes import (
    DIM,
    INFER,
    Drawn,
    GrpcAnswer,
    OverGrpc,
    ask,
    drawn,
    idle,
    linear,
    one,
    over_grpc,
    serving,
    write,
)
from tests.service.reactor.test_predictions import COUNT
from tests.service.reactor.test_traffic import Served
from tests.wire.test_protobuf_scan import spoil
from tierstore.predict.session import DenseSession
from tierstore.service.reactor import predictions

both, alone = over_each_wire.both, over_each_wire.alone


def test_whatever_comes_reactors_and_python_answer_alike(both: tuple[Served, Served]) -> None:
    here, other = both
    rng, before = np.random.default_rng(9), here.by_reactors
    spoiling = random.Random(9)
    with OverGrpc(here) as mine, OverGrpc(other) as theirs:
        for _ in range(COUNT // 2):
            wanted = drawn(rng)
            message = over_grpc(wanted).SerializeToString()
            spoiled = spoil(spoiling, message)
            mine.send(spoiled)
            theirs.send(spoiled)
            got, expected = mine.answer(), theirs.answer()
            assert got.said == expected.said, spoiled
    assert here.by_reactors > before
    idle(here)


def shaped() -> bytes:
    """Scores of one to four sizes, and of named ones between those that all answers have."""
    nodes = [
        om.node("Identity", "many", "rows"),
        om.node("Unsqueeze", "many first", "wide"),
        om.node("ReduceSum", "many ends", "pair", keepdims=0),
        om.node("ReduceSum", "many last", "sums", keepdims=0),
        om.node("Transpose", "sums", "turned", perm=[1, 0]),
        om.node("Cast", "pair", "whole", to=om.INT64),
    ]
    outputs: om.Ports = {
        "rows": (om.FLOAT, ["batch", 2, DIM]),
        "wide": (om.FLOAT, [1, "batch", 2, DIM]),
        "pair": (om.FLOAT, [2]),
        "sums": (om.FLOAT, ["batch", 2]),
        "turned": (om.FLOAT, [2, "batch"]),
        "whole": (om.INT64, [2]),
    }
    constants = {"first": np.array([0]), "ends": np.array([0, 2]), "last": np.array([2])}
    return om.build(nodes, {"many": (om.FLOAT, ["batch", 2, DIM])}, outputs, constants)


def test_scores_of_any_shape(tmp_path: Path) -> None:
    """Sizes and bytes of an output take one byte of the message, or two."""
    keys = np.arange(300)[:, None] * np.array([1, 2]) % 500
    with serving(tmp_path, shaped()) as served, OverGrpc(served) as asker:
        for outputs in (["rows"], ["wide", "turned"], ["turned", "pair", "sums"], ["whole", "rows"], ["pair"]):
            sizes, wanted = (3, 1, 0, 130, 300), []
            for n in sizes:
                served.server.service.plans, plans = None, served.server.service.plans
                wanted.append(asker.ask(Drawn({"many": keys[:n]}, outputs, id=f"{n}")))
                served.server.service.plans = plans
            asker.ask(Drawn({"many": keys[:3]}, outputs))
            before = served.by_reactors
            for n, expected in zip(sizes, wanted, strict=True):
                answer = asker.ask(Drawn({"many": keys[:n]}, outputs, id=f"{n}"))
                assert (answer.code, answer.response) == ("OK", expected.response)
                assert [output.name for output in answer.response.outputs] == outputs
            assert served.by_reactors - before == len(sizes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_that_is_reset_while_its_graph_runs_leaves_nothing(
    alone: Served, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run, begun, gate = DenseSession.run_feed, threading.Event(), threading.Event()

    def wait(self: DenseSession, names: Any, feed: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        if fails:
            raise tierstore.InferenceError("a node has no kernel")
        return run(self, names, feed)

    monkeypatch.setattr(DenseSession, "run_feed", wait)
    with OverGrpc(alone) as asker, OverGrpc(alone) as other:
        asker.send(one(4))
        assert begun.wait(60)
        asker.reset()
        gate.set()
        monkeypatch.setattr(DenseSession, "run_feed", run)
        assert asker.ask(one(2)).scores == other.ask(one(2)).scores == [0.0, 2.75]
    idle(alone)


def test_errors_that_nobody_asks_for_are_few(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_MOST_ERRORS", 3)
    reactors, begun, gate = alone.server.service.reactors, threading.Semaphore(0), threading.Semaphore(0)

    def fail(self: DenseSession, names: Any, feed: Any) -> Any:
        begun.release()
        assert gate.acquire(timeout=60)
        raise tierstore.InferenceError("a node has no kernel")

    with monkeypatch.context() as patch, OverGrpc(alone) as asker:
        patch.setattr(DenseSession, "run_feed", fail)
        for _ in range(8):
            asker.send(one(4))
            assert begun.acquire(timeout=60)
            asker.reset()
            gate.release()
        eventually(lambda: reactors.cold_readers.idle, "no job is left")
    assert len(reactors._predictions._errors) <= 3
    reactors._predictions._errors.clear()
    assert ask(alone, OverGrpc, one(2)).scores == [0.0, 2.75]
    idle(alone)


def test_answers_leave_as_windows_allow(alone: Served) -> None:
    before = alone.by_reactors
    with h2.Client(alone.server.port, h2.settings((h2.INITIAL_WINDOW_SIZE, 100))) as client:
        client.send(h2.call(1, INFER, over_grpc(one(1000)).SerializeToString()))
        eventually(lambda: alone.by_reactors > before, "it is answered")
        client.send(h2.credit(1, 1 << 20))
        assert len(GrpcAnswer(*client.answer(1)).scores) == 1000
    idle(alone)


def test_many_ask_while_versions_change(tmp_path: Path) -> None:
    """Each has the rows and the graph of one version, some reset their streams, and nothing is held afterwards."""
    with serving(tmp_path, linear(1.0), lookup_threads=2) as served:
        served.store.load_snapshot(write(tmp_path, linear(10.0), version=2, shift=1.0), activate=False)
        expected = {"1": [0.0, 2.75, 5.5], "2": [40.0, 67.5, 95.0]}
        wrong, before = list[Any](), served.by_reactors

        def try_it(seed: int, over: threading.Event) -> None:
            rng = np.random.default_rng(seed)
            with OverGrpc(served) as asker:
                while not over.is_set():
                    if rng.integers(4) == 0:
                        asker.send(one(3))
                        asker.client.send(h2.reset(asker.stream))
                    answer = asker.ask(one(3))
                    if answer.code != "OK" or answer.scores != expected[answer.version]:
                        wrong.append((answer.code, answer.text, answer.response))

        ask_while_versions_change(served.store, try_it)
        assert not wrong
        assert served.by_reactors > before
        idle(served)
        eventually(lambda: len(served.server.service.plans.scorings) <= 2, "no more graphs are kept than versions")
