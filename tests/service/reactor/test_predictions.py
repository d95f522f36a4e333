"""Predictions that reactors begin: the same answers as Python's, and every limit holds for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.test_traffic import Answer, Served, message
from tierstore.engine.store import Store
from tierstore.predict.session import DenseSession
from tierstore.service import server as server_module
from tierstore.service.error_status import CUT_OFF
from tierstore.service.server import ServerThread

COUNT = int(os.environ.get("PREDICTIONS", 1500))
ROWS, DIM = 500, 4
PATH = "/v2/models/ctr/infer"


def mixed() -> bytes:
    """Two features a row of the batch, one pooled, one of several rows, an input of its own and a number: a sum, and a copy as int64."""
    nodes = [
        om.node("ReduceSum", "one axis", "a", keepdims=1),
        om.node("ReduceSum", "bag axis", "b", keepdims=1),
        om.node("ReduceSum", "many axes", "c", keepdims=0),
        om.node("Unsqueeze", "c axis", "d"),
        om.node("Sum", "a b d hour", "sum"),
        om.node("Mul", "sum scale", "score"),
        om.node("Cast", "hour", "whole", to=om.INT64),
    ]
    inputs: om.Ports = {
        "one": (om.FLOAT, ["batch", DIM]),
        "bag": (om.FLOAT, ["batch", DIM]),
        "many": (om.FLOAT, ["batch", 2, DIM]),
        "hour": (om.FLOAT, ["batch", 1]),
        "scale": (om.FLOAT, []),
    }
    outputs: om.Ports = {"score": (om.FLOAT, ["batch", 1]), "whole": (om.INT64, ["batch", 1])}
    return om.build(nodes, inputs, outputs, {"axis": np.array([1]), "axes": np.array([1, 2])})


def linear(weight: float = 1.0) -> bytes:
    return om.linear({"one": [weight] * DIM})


def flat() -> bytes:
    """Several rows side by side, as half floats, and no other size than 3 of them."""
    nodes = [om.node("ReduceSum", "many axis", "score", keepdims=1)]
    inputs: om.Ports = {"many": (om.HALF, ["n", 3 * DIM])}
    return om.build(nodes, inputs, {"score": (om.HALF, ["n", 1])}, {"axis": np.array([1])})


def write(root: Path, dense: bytes, model: str = "ctr", version: int = 1, shift: float = 0.0) -> Path:
    where, keys = root / f"{model}-{version}", np.arange(ROWS)
    rows = np.outer(keys, [1, -0.5, 0.25, 2]).astype(np.float32) + np.float32(shift)
    with tierstore.SnapshotWriter(where, model=model, version=version) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(keys, rows)
        writer.feature("one", table="item")
        writer.feature("bag", table="item", combiner="mean")
        writer.feature("many", table="item", padding_key=0)
        writer.warmup("item", keys)
        writer.table("word", dim=DIM, key="string").write([f"w{i}" for i in range(50)], rows[:50])
        writer.feature("word", table="word")
        writer.warmup("word", [f"w{i}" for i in range(50)])
        writer.dense(dense)
    return where


@contextmanager
def serving(root: Path, dense: bytes, **settings: Any) -> Iterator[Served]:
    with in_process(), Store(settings_for(root, **{"lookup_threads": 1, **settings})) as store:
        store.load_snapshot(write(root, dense))
        with ServerThread(store) as server:
            yield Served(store, server)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    with two_services(tmp_path_factory.mktemp("both")) as both:
        yield both


@contextmanager
def two_services(root: Path, **settings: Any) -> Iterator[tuple[Served, Served]]:
    """One store by two services: of the second the reactors learn nothing, and all predictions are Python's."""
    words = om.linear({"word": [1.0, 2.0, 3.0, 4.0]})
    with in_process(), Store(settings_for(root, max_response="64KiB", **settings)) as store:
        for model, dense in {"ctr": mixed(), "flat": flat(), "word": words}.items():
            store.load_snapshot(write(root, dense, model))
        with ServerThread(store) as one, ServerThread(store) as other:
            other.service.plans = None
            yield Served(store, one), Served(store, other)


def ask(served: Served, *messages: bytes) -> list[Answer]:
    with served.connect() as made:
        answers = []
        for data in messages:
            made.sendall(data)
            answers.append(Answer(made))
        return answers


def warm(served: Served, data: bytes) -> None:
    """Ask until reactors begin such predictions."""

    def begun() -> bool:
        before = served.by_reactors
        ask(served, data)
        return served.by_reactors > before

    eventually(begun, "a reactor begins it")


def one(n: int, *headers: str, **more: Any) -> bytes:
    return message({"one": np.arange(n) % ROWS}, ["score"], *headers, **more)


# --- the same answers


@dataclass
class Drawn:
    """A request, in any protocol. No outputs: those of the graph."""

    inputs: dict[str, Any]
    outputs: list[str]
    model: str = "ctr"
    id: str | None = None

    def over_http(self) -> bytes:
        more: dict[str, Any] = {} if self.id is None else {"id": self.id}
        if not self.outputs:
            more["parameters"] = {"binary_data_output": True}
        return message(self.inputs, self.outputs, path=f"/v2/models/{self.model}/infer", **more)


def drawn(rng: np.random.Generator) -> Drawn:
    """A request for one of the models; some of them are wrong."""
    n, kind = int(rng.integers(0, 12)), rng.integers(0, 10)
    keys = lambda *shape: rng.integers(-2, ROWS + 3, shape)  # noqa: E731
    ident = f"i{rng.integers(99)}" if rng.integers(2) else None
    if kind == 0:
        inputs: dict[str, Any] = {"many": keys(n, 3 if rng.integers(5) else 2)}
        return Drawn(inputs, ["score"], "flat", ident)
    if kind == 1:
        words = [b"w%d" % key if key % 7 else b"\xff" * (key % 2) for key in rng.integers(0, 60, n)]
        return Drawn({"word": words}, ["score"], "word", ident)
    inputs = {"one": keys(n), "many": keys(n, 2), "hour": rng.normal(size=(n, 1)).astype(np.float32)}
    inputs["scale"] = rng.normal(size=1).astype(np.float32)
    if rng.integers(2):
        inputs["bag"] = keys(n, int(rng.integers(0, 4)))
    else:
        flat_keys = int(rng.integers(0, 30))
        starts = np.sort(rng.integers(0, flat_keys + 1, n))
        starts[:1] = 0
        inputs |= {"bag": keys(flat_keys if n else 0), "bag.offsets": starts.astype(np.int64)}
        if rng.integers(2):
            inputs["bag.weights"] = rng.random(len(inputs["bag"])).astype(np.float32)
    wrong = rng.integers(0, 20)
    if wrong == 0:
        inputs["one"] = keys(n + 1)  # sizes that disagree
    elif wrong == 1:
        inputs.pop(str(rng.choice(list(inputs))))
    elif wrong == 2:
        inputs["many"] = keys(n, 3)
    elif wrong == 3:
        inputs["scale"] = rng.normal(size=2).astype(np.float32)
    elif wrong == 4:
        inputs["one"] = keys(3000)  # more rows than an answer may need
    elif wrong == 5:
        inputs["clicked"] = keys(n)
    names = list(inputs)
    if rng.integers(2):
        names.reverse()
    outputs = [["score"], ["score", "whole"], ["whole", "score"], ["score", "one"], []][
        rng.choice(5, p=[0.4, 0.3, 0.2, 0.05, 0.05])
    ]
    return Drawn({name: inputs[name] for name in names}, outputs, id=ident)


def test_reactors_and_python_predict_alike(both: tuple[Served, Served]) -> None:
    predict_alike(both, COUNT)
    eventually(lambda: both[0].server.service.inflight.used_bytes == 0, "nothing is held")


def predict_alike(both: tuple[Served, Served], count: int) -> None:
    """Both services answer drawn requests with the same bytes, the first one most of them by reactors."""
    here, other = both
    rng = np.random.default_rng(int(os.environ.get("PREDICTIONS_SEED", 7)))
    here.server.service.plans._may_learn = 1e9
    before, python = here.by_reactors, other.by_reactors
    right = 0
    with here.connect() as mine, other.connect() as theirs:
        for _ in range(count):
            data = drawn(rng).over_http()
            mine.sendall(data)
            theirs.sendall(data)
            got, wanted = Answer(mine), Answer(theirs)
            assert (got.status, got.document) == (wanted.status, wanted.document), data
            assert got.body == wanted.body, data
            right += got.status == 200
    assert right > count // 2
    assert other.by_reactors == python
    assert here.by_reactors - before > count // 3


def test_a_prediction_is_counted_as_pythons_are(both: tuple[Served, Served]) -> None:
    compare_counts(both)


def compare_counts(both: tuple[Served, Served]) -> None:
    inputs = {
        "one": np.arange(3),
        "many": np.ones((3, 2), np.int64),
        "bag": np.arange(3),
        "hour": np.ones((3, 1), np.float32),
    }
    data = message(inputs | {"scale": np.ones(1, np.float32)}, ["score"])
    counts = []
    for served in both:
        warm(served, data) if served is both[0] else ask(served, data)
        before, requests = seen(served), served.server.service.request_times.requests
        assert [answer.status for answer in ask(served, *[data] * 5)] == [200] * 5
        if served is both[0]:  # counted before it leaves; Python counts afterwards
            assert served.server.service.request_times.requests - requests == 5
        counts.append({name: value - before[name] for name, value in seen(served).items()})
    assert counts[0] == counts[1]
    assert counts[0]["ok"] == counts[0]["predicted"] == counts[0]["queued"] == 5
    assert counts[0]["keys"] == 5 * 12


def seen(served: Served) -> dict[str, int]:
    """What the service has counted, of the requests through `served` and of keys."""
    service = served.server.service
    service.refresh()
    stats = service.inference_stats
    view = served.store.model("ctr").publisher.current
    assert view is not None
    counts = {id(table.counts): table.counts for table in view.open_version.tables.values()}
    return {
        "ok": stats.of("ctr", 1).success,
        "predicted": stats.predicts()["ctr"].count,
        "runs": dense_runs(served),
        "queued": sum(service.shed._waits["lookup"].counts),
        "keys": sum(of.total for of in counts.values()),
    }


# --- limits


@contextmanager
def thread_held(served: Served) -> Iterator[threading.Event]:
    """The look-up thread is at work until the event is set, or the end."""
    pool, gate, begun = served.server.service.lookup_pool, threading.Event(), Future[Any]()

    def begin() -> None:
        pool.waits.call_s = 0.0  # what was held before is no measure of what waits
        begun.set_result(pool.run(gate.wait, 60))

    served.server._http._loop.call_soon_threadsafe(begin)  # type: ignore[union-attr]
    begun.result(60)
    eventually(lambda: pool.busy == 1, "it is at work")
    try:
        yield gate
    finally:
        gate.set()


def waiting(served: Served, count: int) -> None:
    pool = served.server.service.lookup_pool
    eventually(lambda: pool.waiting == count, f"{count} wait")


def asked(served: Served, data: bytes) -> tuple[threading.Thread, list[Answer]]:
    """A thread that asks, and the answer, once there is one."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(served, data)))
    thread.start()
    return thread, answers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One thread."""
    with serving(tmp_path_factory.mktemp("alone"), linear(), max_response="64KiB", max_inflight="8MiB") as served:
        warm(served, one(3))
        yield served


def score(answer: Answer) -> list[float]:
    assert answer.status == 200, answer.document
    scores: list[float] = answer.outputs["score"].reshape(-1).tolist()
    return scores


@pytest.mark.parametrize("how", ["X-Request-Timeout-Ms", "parameter"])
def test_a_deadline_that_passes_in_the_queue_is_told_and_nothing_is_run(alone: Served, how: str) -> None:
    shed = alone.server.service.shed
    before = shed.of("deadline")
    headers = ["X-Request-Timeout-Ms: 100"] if how != "parameter" else []
    more: dict[str, Any] = {"parameters": {"timeout": 100_000}} if how == "parameter" else {}
    runs = predicted(alone)
    with thread_held(alone) as gate:
        thread, answers = asked(alone, one(3, *headers, **more))
        waiting(alone, 1)
        time.sleep(0.15)  # the deadline passes
        gate.set()
        thread.join(60)
    assert answers[0].status == 504
    assert "timeout of 100000 microseconds passed" in answers[0].document["error"]
    assert (shed.of("deadline"), predicted(alone)) == (before + 1, runs)
    assert score(ask(alone, one(2))[0]) == [0.0, 2.75]


def predicted(served: Served) -> int:
    counts: int = served.server.service.inference_stats.predicts()["ctr"].count
    return counts


def test_a_client_that_is_gone_is_not_predicted_for(alone: Served) -> None:
    shed, reactors = alone.server.service.shed, alone.server.service.reactors
    before, runs = shed.of("gone"), predicted(alone)
    with thread_held(alone):
        with alone.connect() as made:
            made.sendall(one(4))
            waiting(alone, 1)
        eventually(lambda: reactors.conns["lost"].any(), "the reactor knows it")
    eventually(lambda: shed.of("gone") == before + 1, "it was left out")
    assert predicted(alone) == runs
    eventually(lambda: reactors.open == 0, "its connection is closed")
    assert alone.server.service.inflight.used_bytes == 0


def test_what_waits_counts_as_held_and_what_has_no_room_is_pythons(alone: Served) -> None:
    service = alone.server.service
    with thread_held(alone) as gate:
        thread, answers = asked(alone, one(1000))
        waiting(alone, 1)
        assert service.inflight.used_bytes > 1000 * DIM * 4
        gate.set()
        thread.join(60)
    assert len(score(answers[0])) == 1000
    eventually(lambda: service.inflight.used_bytes == 0, "nothing is held")


def test_an_answer_beyond_max_response_is_refused_as_python_does(alone: Served) -> None:
    answer = ask(alone, one(4000))[0]
    assert (answer.status, answer.document["error"].startswith("the look-up takes")) == (413, True)


def test_what_waited_longer_than_max_queue_s_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), max_queue_s=0.1) as served:
        warm(served, one(3))
        with thread_held(served) as gate:
            thread, answers = asked(served, one(3))
            waiting(served, 1)
            time.sleep(0.15)
            gate.set()
            thread.join(60)
    assert answers[0].status == 503
    assert "max_queue_s is 0.1" in answers[0].document["error"]


def test_rates_count_a_prediction_once(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), quotas={"ctr": {"keys_per_second": 100}}) as served, served.connect() as made:
        statuses = []
        for _ in range(40):
            made.sendall(one(10))
            statuses.append(Answer(made).status)
    assert statuses.count(200) >= 10
    assert 429 in statuses


LOOP = {"one": np.array([9999])}


def looping() -> bytes:
    """Of rows that sum to more than a million it does not end."""
    return om.changed(om.looping(always=False), rename)


def rename(model: Any) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == "user_id":
                    names[i] = "one"
    model.graph.input[0].name = "one"
    for constant in model.graph.initializer:
        if constant.name == "most":
            constant.CopyFrom(om.numpy_helper.from_array(np.float32(1e6), "most"))


def add_large(store: Store, root: Path) -> None:
    """A row above all others."""
    with tierstore.DeltaWriter(root / "large", model="ctr", seq=1) as writer:
        writer.upsert("item", LOOP["one"], np.full((1, DIM), 1e6, np.float32))
    store.apply_delta((root / "large").read_bytes())


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with serving(tmp_path, looping(), dense_timeout_s=0.3) as served:
        add_large(served.store, tmp_path)
        warm(served, one(3))
        answer = ask(served, message(LOOP, ["score"]))[0]
        assert answer.status == 504
        assert "dense_timeout_s" in answer.document["error"]
        assert served.handed_on["prediction"] > 0
        assert ask(served, one(3))[0].status == 200


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
            threads = [asked(served, message(LOOP, ["score"])) for _ in range(2)]  # one runs, one waits
            waiting(served, 1)
            eventually(lambda: store.shared.dense.limits._running, "the run")
        for thread, _ in threads:
            thread.join(60)
    for _, answers in threads:
        assert [(answer.status, answer.document["error"]) for answer in answers] == [(503, CUT_OFF)]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_graph_that_fails_is_told_and_the_next_is_answered(alone: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DenseSession.run_feed
    ran = []

    def fail(self: DenseSession, names: Any, feed: Any) -> Any:
        ran.append(1)
        monkeypatch.setattr(DenseSession, "run_feed", run)
        raise tierstore.InferenceError("a node has no kernel")

    monkeypatch.setattr(DenseSession, "run_feed", fail)
    before = alone.server.service.inference_stats.of("ctr", 1).failed
    first, second = ask(alone, one(3, "X-Request-Id: abc"), one(2))
    assert (first.status, first.document["error"]) == (503, "a node has no kernel")
    assert b"x-request-id: abc" in first.head
    assert score(second) == [0.0, 2.75]
    assert (len(ran), alone.server.service.inference_stats.of("ctr", 1).failed) == (1, before + 1)


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
    with serving(tmp_path, dense) as served:
        add_large(served.store, tmp_path)
        warm(served, one(3))
        large = message(LOOP, ["score"])
        answers = ask(served, large, large, one(3))
        assert [answer.status for answer in answers] == [503, 200, 200]
        assert answers[1].outputs["score"].shape == (2, 1)
        assert answers[2].outputs["score"].shape == (3, 1)


def test_a_slow_one_is_logged_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, linear(), slow_request_ms=1e-3) as served:
        warm(served, one(3))
        before = served.by_reactors
        ask(served, one(3, "X-Request-Id: so-slow"))
        assert served.by_reactors == before + 1
    lines = [record.getMessage() for record in caplog.records if "so-slow" in record.getMessage()]
    assert len(lines) == 1
    assert "200" in lines[0]
    assert "127.0.0.1" in lines[0]


def test_a_full_queue_refuses_what_comes(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), lookup_queue=2) as served:
        warm(served, one(3))
        with thread_held(served) as gate:
            threads = [asked(served, one(3)) for _ in range(2)]
            waiting(served, 2)
            assert ask(served, one(3))[0].status == 503
            gate.set()
            for thread, _ in threads:
                thread.join(60)
        assert [len(score(answers[0])) for _, answers in threads] == [3, 3]


# --- versions and deltas


def test_a_prediction_that_waits_has_rows_and_graph_of_one_moment(tmp_path: Path) -> None:
    with serving(tmp_path, linear(1.0)) as served:
        warm(served, one(3))
        with thread_held(served) as gate:
            threads = [asked(served, one(3)) for _ in range(3)]
            waiting(served, 3)
            rows = np.full((3, DIM), 7, np.float32)
            with tierstore.DeltaWriter(tmp_path / "delta", model="ctr", seq=1) as writer:
                writer.upsert("item", np.arange(3), rows)
                writer.dense(linear(10.0))
            served.store.apply_delta((tmp_path / "delta").read_bytes())
            gate.set()
            for thread, _ in threads:
                thread.join(60)
        assert [score(answers[0]) for _, answers in threads] == [[0.0, 2.75, 5.5]] * 3
        assert score(ask(served, one(3))[0]) == [280.0] * 3
        warm(served, one(3))
        assert score(ask(served, one(3))[0]) == [280.0] * 3
        eventually(lambda: len(served.server.service.plans.scorings) <= 2, "no more graphs are kept than versions")


def test_a_canary_predicts_for_its_share(tmp_path: Path) -> None:
    with serving(tmp_path, linear(1.0)) as served:
        served.store.load_snapshot(write(tmp_path, linear(2.0), version=2), activate=False)
        served.store.canary("ctr", 2, 0.5)
        with served.connect() as made:
            seen = []
            before = served.by_reactors
            for _ in range(200):
                made.sendall(one(2))
                answer = Answer(made)
                seen.append((answer.document["model_version"], score(answer)[1]))
        assert set(seen) == {("1", 2.75), ("2", 5.5)}
        assert served.by_reactors - before > 150


# --- micro-batches


def test_predictions_that_wait_are_joined_and_each_has_its_own_scores(tmp_path: Path) -> None:
    with serving(tmp_path, linear(), batch_max_items=16) as served:
        warm(served, one(3))
        service = served.server.service
        with thread_held(served) as gate:
            sizes = [3, 4, 5, 0, 30, 2, 6]
            threads = [asked(served, one(n)) for n in sizes]
            waiting(served, len(sizes))
            runs = dense_runs(served)
            gate.set()
            for thread, _ in threads:
                thread.join(60)
        for n, (_, answers) in zip(sizes, threads, strict=True):
            assert score(answers[0]) == [2.75 * key for key in range(n)]
        assert dense_runs(served) - runs == 4  # those of 0 and 30 alone; 3 + 4 + 5 + 2 and 6, or so
        samples = {sample.name: sample.value for of in service.batches.families() for sample in of.samples}
        assert samples["tierstore_batch_requests_sum"] >= 4


def dense_runs(served: Served) -> int:
    return int(served.store.model("ctr").publisher.current.predictor._counts.as_dict()["runs"])


def test_where_a_joined_run_fails_each_is_run_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DenseSession.run_feed

    def fail(self: DenseSession, names: Any, feed: Any) -> Any:
        if len(feed["one"]) > 4:
            raise tierstore.InferenceError("too many")
        return run(self, names, feed)

    with serving(tmp_path, linear(), batch_max_items=16) as served:
        warm(served, one(3))
        monkeypatch.setattr(DenseSession, "run_feed", fail)
        with thread_held(served) as gate:
            threads = [asked(served, one(n)) for n in (3, 4, 5)]
            waiting(served, 3)
            gate.set()
            for thread, _ in threads:
                thread.join(60)
    assert [answers[0].status for _, answers in threads] == [200, 200, 503]
