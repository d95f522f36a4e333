"""Predictions that reactors begin: the same answers as Python's over each wire, and every limit holds for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.prediction_scenes import (
    DIM,
    LOOP,
    Drawn,
    OverGrpc,
    OverHttp,
    OverJson,
    OverPredict,
    OverRest,
    Wire,
    add_large,
    ask,
    drawn,
    idle,
    linear,
    looping,
    one,
    predicted,
    seen,
    serving,
    thread_held,
    two_services,
    waiting,
    warm,
    write,
)
from tests.service.reactor.test_traffic import Served
from tierstore.engine.store import Store
from tierstore.predict.session import DenseSession
from tierstore.service import server as server_module
from tierstore.service.error_status import CUT_OFF
from tierstore.service.limits.shedding import WAITS_TOO_LONG
from tierstore.service.server import ServerThread

COUNT = int(os.environ.get("PREDICTIONS", 1500))
WIRES = [OverHttp, OverGrpc, OverJson]
EVERY = [*WIRES, OverRest, OverPredict]


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    made: Wire = request.param
    return made


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    with two_services(tmp_path_factory.mktemp("both")) as both:
        yield both


# --- the same answers


@pytest.mark.parametrize("wire", EVERY)
def test_reactors_and_python_predict_alike(both: tuple[Served, Served], wire: Wire) -> None:
    predict_alike(both, COUNT, wire)
    idle(both[0])


def predict_alike(both: tuple[Served, Served], count: int, wire: Wire = OverHttp) -> None:
    """Both services answer drawn requests with the same bytes, the first one most of them by reactors."""
    here, other = both
    rng = np.random.default_rng(int(os.environ.get("PREDICTIONS_SEED", 7 + EVERY.index(wire))))
    here.server.service.plans._may_learn = 1e9
    before, python = here.by_reactors, other.by_reactors
    right = 0
    with wire(here) as mine, wire(other) as theirs:
        for number in range(count):
            asked = drawn(rng)
            headers = [("x-request-id", f"r{number}")] if number % 3 == 0 else []
            mine.send(asked, *headers)
            theirs.send(asked, *headers)
            got, wanted = mine.answer(), theirs.answer()
            assert got.said == wanted.said, asked
            right += got.code == wire.ok
    assert right > count // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > count // 3


@pytest.mark.parametrize("wire", EVERY)
def test_a_prediction_is_counted_as_pythons_are(both: tuple[Served, Served], wire: Wire) -> None:
    compare_counts(both, wire)


def compare_counts(both: tuple[Served, Served], wire: Wire = OverHttp) -> None:
    inputs = {"one": np.arange(3), "many": np.ones((3, 2), np.int64), "bag": np.arange(3)}
    inputs |= {"hour": np.ones((3, 1), np.float32), "scale": np.ones(1, np.float32)}
    asked, counts = Drawn(inputs, ["score"]), []
    for served in both:
        warm(served, wire, asked) if served is both[0] else ask(served, wire, asked)
        times, before = served.server.service.request_times, seen(served)
        requests = times.requests
        with wire(served) as asker:
            assert [asker.ask(asked).code for _ in range(5)] == [wire.ok] * 5
        if served is both[0]:  # counted before it leaves; Python counts afterwards
            assert times.requests - requests == 5
        counts.append({name: value - before[name] for name, value in seen(served).items()})
    assert counts[0] == counts[1]
    assert counts[0]["ok"] == counts[0]["predicted"] == counts[0]["queued"] == 5
    assert counts[0]["keys"] == 5 * 12


# --- limits


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One thread."""
    with serving(tmp_path_factory.mktemp("alone"), linear(), max_response="64KiB", max_inflight="8MiB") as served:
        for wire in WIRES:
            warm(served, wire, one(3))
        yield served


@pytest.mark.parametrize("how", ["header", "parameter"])
def test_a_deadline_that_passes_in_the_queue_is_told_and_nothing_is_run(alone: Served, wire: Wire, how: str) -> None:
    shed = alone.server.service.shed
    before, runs = shed.of("deadline"), predicted(alone)
    asked, headers = (one(3), [wire.timeout]) if how == "header" else (one(3, timeout_us=100_000), [])
    with wire(alone) as asker:
        with thread_held(alone):
            asker.send(asked, *headers)
            waiting(alone, 1)
            late_s = time.monotonic() + 0.1  # at the latest: the service has it by now
            eventually(lambda: time.monotonic() > late_s, "the deadline passes")
        answer = asker.answer()
    assert answer.code == wire.late
    assert "timeout of 100000 microseconds passed" in answer.text
    assert (shed.of("deadline"), predicted(alone)) == (before + 1, runs)
    assert ask(alone, wire, one(2)).scores == [0.0, 2.75]


@pytest.mark.parametrize(("wire", "how"), [(OverHttp, "connection"), (OverGrpc, "connection"), (OverGrpc, "reset")])
def test_who_is_gone_is_not_predicted_for(alone: Served, wire: Wire, how: str) -> None:
    service = alone.server.service
    before, runs, calls = service.shed.of("gone"), predicted(alone), cancelled(alone)
    with thread_held(alone):
        with wire(alone) as asker:
            asker.send(one(4))
            waiting(alone, 1)
            if how == "reset":
                asker.reset()  # type: ignore[attr-defined]
        eventually(lambda: wire.knows_lost(alone), "the reactor knows it")
    eventually(lambda: service.shed.of("gone") == before + 1, "it was left out")
    eventually(lambda: cancelled(alone) == calls + (wire is OverGrpc), "it is counted")
    assert predicted(alone) == runs
    eventually(lambda: service.reactors.open == 0, "its connection is closed")
    idle(alone)


def cancelled(served: Served) -> int:
    histogram = served.server.service.request_times.histograms.get(("oip_grpc", "cancelled"))
    return 0 if histogram is None else sum(histogram.counts)


def test_what_waits_counts_as_held_and_what_has_no_room_is_pythons(alone: Served, wire: Wire) -> None:
    service = alone.server.service
    with wire(alone) as asker:
        with thread_held(alone):
            asker.send(one(1000))
            waiting(alone, 1)
            assert service.inflight.used_bytes > 1000 * wire.held_a_row
        assert len(asker.answer().scores) == 1000
    idle(alone)


def test_an_answer_beyond_max_response_is_refused_as_python_does(alone: Served, wire: Wire) -> None:
    answer = ask(alone, wire, one(4000))
    assert (answer.code, answer.text.startswith("the look-up takes")) == (wire.too_large, True)


def test_scores_that_take_long_to_write_as_json_are_left_to_python(tmp_path: Path) -> None:
    """A reactor that wrote them would keep the others waiting."""
    with serving(tmp_path, linear()) as served:
        warm(served, OverJson, one(3))
        before = served.by_reactors
        many = ask(served, OverJson, one(40_000)).scores
        assert (len(many), served.by_reactors) == (40_000, before)
        assert ask(served, OverJson, one(3)).scores == many[:3]
        assert served.by_reactors == before + 1
        idle(served)


def test_a_graph_that_fails_is_told_and_the_next_is_answered(
    alone: Served, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = DenseSession.run_feed, list[int]()

    def fail(self: DenseSession, names: object, feed: object) -> object:
        ran.append(1)
        monkeypatch.setattr(DenseSession, "run_feed", run)
        raise tierstore.InferenceError("a node has no kernel")

    monkeypatch.setattr(DenseSession, "run_feed", fail)
    stats = alone.server.service.inference_stats
    before, handed_on = stats.of("ctr", 1).failed, alone.handed_on["prediction"]
    with wire(alone) as asker:
        first, second = asker.ask(one(3), ("x-request-id", "abc")), asker.ask(one(2))
    assert (first.code, first.text, first.request_id) == (wire.failed, "a node has no kernel", "abc")
    assert second.scores == [0.0, 2.75]
    assert (len(ran), stats.of("ctr", 1).failed) == (1, before + 1)
    assert alone.handed_on["prediction"] == handed_on + 1
    idle(alone)


def test_what_waited_longer_than_max_queue_s_is_refused(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, linear(), max_queue_s=0.1) as served, wire(served) as asker:
        warm(served, wire, one(3))
        with thread_held(served):
            asker.send(one(3))
            waiting(served, 1)
            late_s = time.monotonic() + 0.15
            eventually(lambda: time.monotonic() > late_s, "it has waited too long")
        answer = asker.answer()
    assert (answer.code, "max_queue_s is 0.1" in answer.text) == (wire.overloaded, True)


@pytest.mark.parametrize("wire", EVERY)
def test_a_full_queue_refuses_what_comes(tmp_path: Path, wire: Wire) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(serving(tmp_path, linear(), lookup_queue=2))
        warm(served, wire, one(3))
        service, askers = served.server.service, [stack.enter_context(wire(served)) for _ in range(3)]
        with thread_held(served):
            for number, asker in enumerate(askers[:2], 1):
                asker.send(one(3))
                waiting(served, number)
            before = served.by_reactors
            refused = askers[2].ask(one(3), ("x-request-id", "late"))
            assert (refused.code, refused.text, refused.request_id) == (
                wire.overloaded,
                WAITS_TOO_LONG,
                "late" if issubclass(wire, OverGrpc) else None,
            )
            assert askers[2].ask(one(5)).code == wire.overloaded
            assert served.by_reactors == before + 2  # no thread of Python was asked
        assert [len(asker.answer().scores) for asker in askers[:2]] == [3, 3]
        service.refresh()
        assert sum(service.request_times.histograms[wire.kind, "overloaded"].counts) == 2
        assert service.shed.of("queue_full") == 2


def test_rates_count_a_prediction_once(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, linear(), quotas={"ctr": {"keys_per_second": 100}}) as served, wire(served) as asker:
        codes = [asker.ask(one(10)).code for _ in range(40)]
    assert codes.count(wire.ok) >= 10
    assert wire.beyond_rate in codes


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, looping(), dense_timeout_s=0.3) as served:
        add_large(served.store, tmp_path)
        warm(served, wire, one(3))
        answer = ask(served, wire, Drawn(LOOP, ["score"]))
        assert (answer.code, "dense_timeout_s" in answer.text) == (wire.late, True)
        assert served.handed_on["prediction"] > 0
        assert ask(served, wire, one(3)).code == wire.ok


def test_a_stop_answers_a_run_that_does_not_end_once(
    tmp_path: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.3)
    with in_process(), Store(settings_for(tmp_path, lookup_threads=1, dense_timeout_s=3600)) as store:
        store.load_snapshot(write(tmp_path, looping()))
        with ServerThread(store) as server:
            served = Served(store, server)
            add_large(store, tmp_path)
            warm(served, wire, one(3))
            askers = [wire(served) for _ in range(3)]  # one runs, two wait
            for number, asker in enumerate(askers):
                asker.send(Drawn(LOOP, ["score"]), ("x-request-id", f"{number}"))
                eventually(lambda: store.shared.dense.limits._running, "the run")
                waiting(served, number)
            askers[2].__exit__()
        answers = [asker.answer() for asker in askers[:2]]
    for number, answer in enumerate(answers):
        assert (answer.code, answer.text, answer.request_id) == (wire.failed, CUT_OFF, f"{number}")
    assert not [record for record in caplog.records if record.exc_info]


def test_an_output_that_is_not_as_it_was_declared_is_pythons_from_then_on(tmp_path: Path) -> None:
    """A graph says [batch, 1] and gives [2 * batch, 1] for a row above a million."""
    nodes = [
        om.node("ReduceSum", "one axis", "sum", keepdims=1),
        om.node("ReduceMax", "sum", "top", keepdims=0),
        om.node("Greater", "top limit", "large"),
        om.node("Cast", "large", "whole", to=om.INT64),
        om.node("Add", "whole unit", "times"),
        om.node("Concat", "times unit", "reps", axis=0),
        om.node("Tile", "sum reps", "score"),
    ]
    constants = {"axis": np.array([1]), "limit": np.float32(1e6), "unit": np.array([1])}
    inputs: om.Ports = {"one": (om.FLOAT, ["batch", DIM])}
    dense = om.build(nodes, inputs, {"score": (om.FLOAT, ["batch", 1])}, constants)
    with serving(tmp_path, dense) as served, OverHttp(served) as asker:
        add_large(served.store, tmp_path)
        warm(served, OverHttp, one(3))
        large = Drawn(LOOP, ["score"])
        answers = [asker.ask(asked).whole for asked in (large, large, one(3))]
        assert [answer.status for answer in answers] == [503, 200, 200]
        assert answers[1].outputs["score"].shape == (2, 1)
        assert answers[2].outputs["score"].shape == (3, 1)


def test_a_slow_one_is_logged_with_its_id(tmp_path: Path, wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, linear(), slow_request_ms=1e-3, trusted_proxies=["127.0.0.0/8"]) as served:
        warm(served, wire, one(3))
        before = served.by_reactors
        ask(served, wire, one(3), ("x-request-id", "so-slow"), ("x-forwarded-for", "192.0.2.9"))
        assert served.by_reactors == before + 1
    (line,) = [record.getMessage() for record in caplog.records if "so-slow" in record.getMessage()]
    assert line.startswith("slow: ")
    assert f": {wire.ok} in " in line
    assert "client 192.0.2.9" in line


# --- versions and deltas


def test_a_prediction_that_waits_has_rows_and_graph_of_one_moment(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, linear(1.0)) as served, ExitStack() as stack:
        warm(served, wire, one(3))
        askers = [stack.enter_context(wire(served)) for _ in range(3)]
        with thread_held(served):
            for asker in askers:
                asker.send(one(3))
            waiting(served, 3)
            rows = np.full((3, DIM), 7, np.float32)
            with tierstore.DeltaWriter(tmp_path / "delta", model="ctr", seq=1) as writer:
                writer.upsert("item", np.arange(3), rows)
                writer.dense(linear(10.0))
            served.store.apply_delta((tmp_path / "delta").read_bytes())
        assert [asker.answer().scores for asker in askers] == [[0.0, 2.75, 5.5]] * 3
        assert ask(served, wire, one(3)).scores == [280.0] * 3
        warm(served, wire, one(3))
        assert ask(served, wire, one(3)).scores == [280.0] * 3
        eventually(lambda: len(served.server.service.plans.scorings) <= 2, "no more graphs are kept than versions")


def test_a_canary_predicts_for_its_share(tmp_path: Path, wire: Wire) -> None:
    with serving(tmp_path, linear(1.0)) as served, wire(served) as asker:
        served.store.load_snapshot(write(tmp_path, linear(2.0), version=2), activate=False)
        served.store.canary("ctr", 2, 0.5)
        before, answers = served.by_reactors, [asker.ask(one(2)) for _ in range(200)]
        assert {(answer.version, answer.scores[1]) for answer in answers} == {("1", 2.75), ("2", 5.5)}
        assert served.by_reactors - before > 150
