"""Predictions over gRPC that reactors begin: the same answers as Python's, and every limit holds for them, and for their streams."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service import http2_client as h2
from tests.service.conftest import ask_while_versions_change, eventually, settings_for
from tests.service.reactor import test_predictions as over_http
from tests.service.reactor.test_calls import request
from tests.service.reactor.test_predictions import (
    COUNT,
    DIM,
    LOOP,
    add_large,
    dense_runs,
    drawn,
    linear,
    looping,
    predicted,
    seen,
    serving,
    thread_held,
    waiting,
    write,
)
from tests.service.reactor.test_traffic import Served
from tests.wire.test_protobuf_scan import spoil
from tierstore.engine.store import Store
from tierstore.predict.session import DenseSession
from tierstore.service import server as server_module
from tierstore.service.error_status import CUT_OFF
from tierstore.service.limits.shedding import WAITS_TOO_LONG
from tierstore.service.reactor import predictions
from tierstore.service.rpc.messages import CODES
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.server import ServerThread

INFER = "/inference.GRPCInferenceService/ModelInfer"
Response = message_class("inference.ModelInferResponse")
_NAMES = {str(number): name for name, number in CODES.items()}

both = over_http.both


class Answer:
    def __init__(self, fields: dict[str, str], body: bytes) -> None:
        self.code, self.text = _NAMES[fields["grpc-status"]], unquote(fields.get("grpc-message", ""))
        self.request_id, self.message = fields.get("x-request-id"), body[5:]
        self.response = Response.FromString(self.message)
        assert not body or body[:5] == b"\0" + (len(body) - 5).to_bytes(4, "big")

    @property
    def scores(self) -> list[float]:
        assert self.code == "OK", self.text
        scores: list[float] = np.frombuffer(self.response.raw_output_contents[0], np.float32).tolist()
        return scores


class Asker:
    """A connection, and a stream of it for each call."""

    def __init__(self, served: Served) -> None:
        self.client, self.stream = h2.Client(served.server.port), -1

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.socket.close()

    def send(self, asked: Any, *headers: tuple[str, str]) -> None:
        """`asked`: a message, or its bytes."""
        self.stream += 2
        message = asked if isinstance(asked, bytes) else asked.SerializeToString()
        self.client.send(h2.call(self.stream, INFER, message, *headers))

    def answer(self) -> Answer:
        return Answer(*self.client.answer(self.stream))

    def ask(self, asked: Any, *headers: tuple[str, str]) -> Answer:
        self.send(asked, *headers)
        return self.answer()


def ask(served: Served, asked: Any, *headers: tuple[str, str]) -> Answer:
    with Asker(served) as asker:
        return asker.ask(asked, *headers)


def one(n: int, **fields: Any) -> Any:
    return request({"one": np.arange(n) % 500}, ["score"], **fields)


def warm(served: Served, asked: Any) -> None:
    """Ask until reactors begin such predictions."""

    def begun() -> bool:
        before = served.by_reactors
        ask(served, asked)
        return served.by_reactors > before

    eventually(begun, "a reactor begins it")


def idle(served: Served) -> None:
    service = served.server.service
    eventually(lambda: service.inflight.used_bytes == 0, "nothing is held")
    eventually(lambda: service.reactors.cold_readers.idle, "no job is left")


# --- the same answers


def test_reactors_and_python_predict_alike(both: tuple[Served, Served]) -> None:
    here, other = both
    rng = np.random.default_rng(int(os.environ.get("PREDICTIONS_SEED", 8)))
    here.server.service.plans._may_learn = 1e9
    before, python = here.by_reactors, other.by_reactors
    right = 0
    with Asker(here) as mine, Asker(other) as theirs:
        for number in range(COUNT):
            wanted = drawn(rng)
            more = {} if wanted.id is None else {"id": wanted.id}
            asked = request(wanted.inputs, wanted.outputs, model_name=wanted.model, **more)
            headers = [("x-request-id", f"r{number}")] if number % 3 == 0 else []
            mine.send(asked, *headers)
            theirs.send(asked, *headers)
            got, expected = mine.answer(), theirs.answer()
            assert (got.code, got.text, got.request_id) == (expected.code, expected.text, expected.request_id), asked
            assert got.response == expected.response, asked
            assert len(got.message) == len(expected.message)
            right += got.code == "OK"
    assert right > COUNT // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > COUNT // 2
    idle(here)


def test_whatever_comes_reactors_and_python_answer_alike(both: tuple[Served, Served]) -> None:
    here, other = both
    rng, before = np.random.default_rng(9), here.by_reactors
    spoiling = random.Random(9)
    with Asker(here) as mine, Asker(other) as theirs:
        for _ in range(COUNT // 2):
            wanted = drawn(rng)
            message = request(wanted.inputs, wanted.outputs, model_name=wanted.model).SerializeToString()
            spoiled = spoil(spoiling, message)
            mine.send(spoiled)
            theirs.send(spoiled)
            got, expected = mine.answer(), theirs.answer()
            assert (got.code, got.text, got.response) == (expected.code, expected.text, expected.response), spoiled
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
    with serving(tmp_path, shaped()) as served, Asker(served) as asker:
        for outputs in (["rows"], ["wide", "turned"], ["turned", "pair", "sums"], ["whole", "rows"], ["pair"]):
            sizes, wanted = (3, 1, 0, 130, 300), []
            for n in sizes:
                served.server.service.plans, plans = None, served.server.service.plans
                wanted.append(asker.ask(request({"many": keys[:n]}, outputs, id=f"{n}")))
                served.server.service.plans = plans
            asker.ask(request({"many": keys[:3]}, outputs))
            before = served.by_reactors
            for n, expected in zip(sizes, wanted, strict=True):
                answer = asker.ask(request({"many": keys[:n]}, outputs, id=f"{n}"))
                assert (answer.code, answer.response) == ("OK", expected.response)
                assert [output.name for output in answer.response.outputs] == outputs
            assert served.by_reactors - before == len(sizes)


def test_a_prediction_is_counted_as_pythons_are(both: tuple[Served, Served]) -> None:
    inputs = {
        "one": np.arange(3),
        "many": np.ones((3, 2), np.int64),
        "bag": np.arange(3),
        "hour": np.ones((3, 1), np.float32),
    }
    asked = request(inputs | {"scale": np.ones(1, np.float32)}, ["score"])
    counts = []
    for served in both:
        warm(served, asked) if served is both[0] else ask(served, asked)
        times, before = served.server.service.request_times, seen(served)
        answered = sum(times.histograms["oip_grpc", "ok"].counts)
        with Asker(served) as asker:
            assert [asker.ask(asked).code for _ in range(5)] == ["OK"] * 5
        if served is both[0]:  # counted before it leaves; Python counts afterwards
            assert sum(times.histograms["oip_grpc", "ok"].counts) - answered == 5
        counts.append({name: value - before[name] for name, value in seen(served).items()})
    assert counts[0] == counts[1]
    assert counts[0]["ok"] == counts[0]["predicted"] == counts[0]["queued"] == 5
    assert counts[0]["keys"] == 5 * 12


# --- limits


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One thread."""
    with serving(tmp_path_factory.mktemp("alone"), linear(), max_response="64KiB", max_inflight="8MiB") as served:
        warm(served, one(3))
        yield served


@pytest.mark.parametrize("how", ["grpc-timeout", "parameter"])
def test_a_deadline_that_passes_in_the_queue_is_told_and_nothing_is_run(alone: Served, how: str) -> None:
    shed = alone.server.service.shed
    before, runs = shed.of("deadline"), predicted(alone)
    asked, headers = one(3), [("grpc-timeout", "100m")] if how == "grpc-timeout" else []
    if how == "parameter":
        asked.parameters["timeout"].int64_param = 100_000
    with Asker(alone) as asker:
        with thread_held(alone) as gate:
            asker.send(asked, *headers)
            waiting(alone, 1)
            job = held_job(alone)
            eventually(lambda: time.monotonic_ns() > job["deadline_ns"], "the deadline passes")
            gate.set()
        answer = asker.answer()
    assert answer.code == "DEADLINE_EXCEEDED"
    assert "timeout of 100000 microseconds passed" in answer.text
    assert (shed.of("deadline"), predicted(alone)) == (before + 1, runs)
    assert ask(alone, one(2)).scores == [0.0, 2.75]


def held_job(served: Served) -> Any:
    """The only job that there is."""
    jobs = served.server.service.reactors.cold_readers.jobs
    (job,) = jobs[jobs["announced"] != 0]
    return job


def cancelled(served: Served) -> int:
    histogram = served.server.service.request_times.histograms.get(("oip_grpc", "cancelled"))
    return 0 if histogram is None else sum(histogram.counts)


@pytest.mark.parametrize("how", ["reset", "connection"])
def test_who_is_gone_is_not_predicted_for(alone: Served, how: str) -> None:
    service = alone.server.service
    jobs, before = service.reactors.cold_readers.jobs, service.shed.of("gone")
    runs, calls = predicted(alone), cancelled(alone)
    with thread_held(alone):
        with Asker(alone) as asker:
            asker.send(one(4))
            waiting(alone, 1)
            if how == "reset":
                asker.client.send(h2.reset(asker.stream))
                assert asker.client.is_alive()
        eventually(lambda: (jobs["lost"] * jobs["announced"]).any(), "the reactor knows it")
    eventually(lambda: service.shed.of("gone") == before + 1, "it was left out")
    eventually(lambda: cancelled(alone) == calls + 1, "it is counted")
    assert predicted(alone) == runs
    idle(alone)


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
    with Asker(alone) as asker, Asker(alone) as other:
        asker.send(one(4))
        assert begun.wait(60)
        asker.client.send(h2.reset(asker.stream))
        assert asker.client.is_alive()
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

    with monkeypatch.context() as patch, Asker(alone) as asker:
        patch.setattr(DenseSession, "run_feed", fail)
        for _ in range(8):
            asker.send(one(4))
            assert begun.acquire(timeout=60)
            asker.client.send(h2.reset(asker.stream))
            assert asker.client.is_alive()
            gate.release()
        eventually(lambda: reactors.cold_readers.idle, "no job is left")
    assert len(reactors._predictions._errors) <= 3
    reactors._predictions._errors.clear()
    assert ask(alone, one(2)).scores == [0.0, 2.75]
    idle(alone)


def test_what_waits_counts_as_held_with_its_request(alone: Served) -> None:
    service = alone.server.service
    with Asker(alone) as asker:
        with thread_held(alone):
            asker.send(one(1000))
            waiting(alone, 1)
            assert service.inflight.used_bytes > 1000 * (DIM * 4 + 8)
        assert len(asker.answer().scores) == 1000
    idle(alone)


def test_an_answer_beyond_max_response_is_refused_as_python_does(alone: Served) -> None:
    answer = ask(alone, one(4000))
    assert (answer.code, answer.text.startswith("the look-up takes")) == ("INVALID_ARGUMENT", True)


def test_a_graph_that_fails_is_told_and_the_next_is_answered(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran = DenseSession.run_feed, list[int]()

    def fail(self: DenseSession, names: Any, feed: Any) -> Any:
        ran.append(1)
        monkeypatch.setattr(DenseSession, "run_feed", run)
        raise tierstore.InferenceError("a node has no kernel")

    monkeypatch.setattr(DenseSession, "run_feed", fail)
    service = alone.server.service
    before, handed_on = service.inference_stats.of("ctr", 1).failed, alone.handed_on["prediction"]
    with Asker(alone) as asker:
        first, second = asker.ask(one(3), ("x-request-id", "abc")), asker.ask(one(2))
    assert (first.code, first.text, first.request_id) == ("UNAVAILABLE", "a node has no kernel", "abc")
    assert second.scores == [0.0, 2.75]
    assert (len(ran), service.inference_stats.of("ctr", 1).failed) == (1, before + 1)
    assert alone.handed_on["prediction"] == handed_on + 1
    idle(alone)


def test_answers_leave_as_windows_allow(alone: Served) -> None:
    before = alone.by_reactors
    with h2.Client(alone.server.port, h2.settings((h2.INITIAL_WINDOW_SIZE, 100))) as client:
        client.send(h2.call(1, INFER, one(1000).SerializeToString()))
        eventually(lambda: alone.by_reactors > before, "it is answered")
        client.send(h2.credit(1, 1 << 20))
        assert len(Answer(*client.answer(1)).scores) == 1000
    idle(alone)


def test_what_waited_longer_than_max_queue_s_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), max_queue_s=0.1) as served, Asker(served) as asker:
        warm(served, one(3))
        with thread_held(served):
            asker.send(one(3))
            waiting(served, 1)
            until = held_job(served)["queued_ns"] + 150_000_000
            eventually(lambda: time.monotonic_ns() > until, "it has waited too long")
        answer = asker.answer()
    assert (answer.code, "max_queue_s is 0.1" in answer.text) == ("RESOURCE_EXHAUSTED", True)


def test_a_full_queue_refuses_what_comes(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), lookup_queue=2) as served:
        warm(served, one(3))
        service, askers = served.server.service, [Asker(served) for _ in range(3)]
        with thread_held(served):
            for number, asker in enumerate(askers[:2], 1):
                asker.send(one(3))
                waiting(served, number)
            before = served.by_reactors
            refused = askers[2].ask(one(3), ("x-request-id", "late"))
            assert (refused.code, refused.text, refused.request_id) == ("RESOURCE_EXHAUSTED", WAITS_TOO_LONG, "late")
            assert askers[2].ask(one(5)).code == "RESOURCE_EXHAUSTED"
            assert served.by_reactors == before + 2  # no thread of Python was asked
        assert [len(asker.answer().scores) for asker in askers[:2]] == [3, 3]
        service.refresh()
        assert sum(service.request_times.histograms["oip_grpc", "overloaded"].counts) == 2
        assert service.shed.of("queue_full") == 2
        for asker in askers:
            asker.client.socket.close()


def test_rates_count_a_prediction_once(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), quotas={"ctr": {"keys_per_second": 100}}) as served, Asker(served) as asker:
        codes = [asker.ask(one(10)).code for _ in range(40)]
    assert codes.count("OK") >= 10
    assert "RESOURCE_EXHAUSTED" in codes


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with serving(tmp_path, looping(), dense_timeout_s=0.3) as served:
        add_large(served.store, tmp_path)
        warm(served, one(3))
        answer = ask(served, request(LOOP, ["score"]))
        assert (answer.code, "dense_timeout_s" in answer.text) == ("DEADLINE_EXCEEDED", True)
        assert served.handed_on["prediction"] > 0
        assert ask(served, one(3)).code == "OK"


def test_a_stop_answers_a_run_that_does_not_end_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.3)
    with in_process(), Store(settings_for(tmp_path, lookup_threads=1, dense_timeout_s=3600)) as store:
        store.load_snapshot(write(tmp_path, looping()))
        with ServerThread(store) as server:
            served = Served(store, server)
            add_large(store, tmp_path)
            warm(served, one(3))
            askers = [Asker(served) for _ in range(3)]  # one runs, two wait
            for number, asker in enumerate(askers):
                asker.send(request(LOOP, ["score"]), ("x-request-id", f"{number}"))
                eventually(lambda: store.shared.dense.limits._running, "the run")
                waiting(served, number)
            askers[2].client.socket.close()
        answers = [asker.answer() for asker in askers[:2]]
    for number, answer in enumerate(answers):
        assert (answer.code, answer.text, answer.request_id) == ("UNAVAILABLE", CUT_OFF, f"{number}")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_slow_one_is_logged_with_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, linear(), slow_request_ms=1e-3, trusted_proxies=["127.0.0.0/8"]) as served:
        warm(served, one(3))
        before = served.by_reactors
        ask(served, one(3), ("x-request-id", "so-slow"), ("x-forwarded-for", "192.0.2.9"))
        assert served.by_reactors == before + 1
    (line,) = [record.getMessage() for record in caplog.records if "so-slow" in record.getMessage()]
    assert line.startswith(f"slow: gRPC {INFER}: OK in ")
    assert "client 192.0.2.9" in line


# --- versions, deltas and canaries


def test_many_ask_while_versions_change(tmp_path: Path) -> None:
    """Each has the rows and the graph of one version, some reset their streams, and nothing is held afterwards."""
    with serving(tmp_path, linear(1.0), lookup_threads=2) as served:
        served.store.load_snapshot(write(tmp_path, linear(10.0), version=2, shift=1.0), activate=False)
        expected = {"1": [0.0, 2.75, 5.5], "2": [40.0, 67.5, 95.0]}
        wrong, before = list[Any](), served.by_reactors

        def try_it(seed: int, over: threading.Event) -> None:
            rng = np.random.default_rng(seed)
            with Asker(served) as asker:
                while not over.is_set():
                    if rng.integers(4) == 0:
                        asker.send(one(3))
                        asker.client.send(h2.reset(asker.stream))
                    answer = asker.ask(one(3))
                    if answer.code != "OK" or answer.scores != expected[answer.response.model_version]:
                        wrong.append((answer.code, answer.text, answer.response))

        ask_while_versions_change(served.store, try_it)
        assert not wrong
        assert served.by_reactors > before
        idle(served)
        eventually(lambda: len(served.server.service.plans.scorings) <= 2, "no more graphs are kept than versions")


def test_a_canary_predicts_for_its_share(tmp_path: Path) -> None:
    with serving(tmp_path, linear(1.0)) as served, Asker(served) as asker:
        served.store.load_snapshot(write(tmp_path, linear(2.0), version=2), activate=False)
        served.store.canary("ctr", 2, 0.5)
        before, answers = served.by_reactors, [asker.ask(one(2)) for _ in range(200)]
        assert {(answer.response.model_version, answer.scores[1]) for answer in answers} == {("1", 2.75), ("2", 5.5)}
        assert served.by_reactors - before > 150


# --- micro-batches


def test_predictions_over_http_and_grpc_are_joined_and_each_has_its_own_scores(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), batch_max_items=16) as served:
        warm(served, one(3))
        over_http.warm(served, over_http.one(3))
        with thread_held(served):
            askers = [Asker(served) for _ in range(3)]
            threads = []
            for number, (asker, n) in enumerate(zip(askers, (3, 5, 6), strict=True)):
                asker.send(one(n))
                waiting(served, 2 * number + 1)
                threads.append(over_http.asked(served, over_http.one(n + 1)))
                waiting(served, 2 * number + 2)
            runs = dense_runs(served)
        for asker, n in zip(askers, (3, 5, 6), strict=True):
            assert asker.answer().scores == [2.75 * key for key in range(n)]
            asker.client.socket.close()
        for (thread, answers), n in zip(threads, (4, 6, 7), strict=True):
            thread.join(60)
            assert over_http.score(answers[0]) == [2.75 * key for key in range(n)]
        assert dense_runs(served) - runs <= 3  # 3 + 4 + 5, and so on
