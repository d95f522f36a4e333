"""Graphs that do not end, or grow without measure: their runs are ended, and the sessions go on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tests.predict.conftest import FEATURES, TABLES
from tests.predict.test_session import run
from tierstore.config import load_settings
from tierstore.errors import Closed, LoadCancelled, Overloaded, RunLimit, TooLarge
from tierstore.predict import making
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import DenseCounts
from tierstore.predict.warmup import warm

MIB = 1 << 20
ROWS = {"user_id": np.ones((2, 4), np.float32)}


def peak_mib() -> int:
    """The most memory that this process has had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(load_settings(None))


def score(session, rows=ROWS):
    return run(session, {"user_id": (2,)}, rows=rows)["score"].tolist()


def test_a_loop_without_an_end_is_ended_and_other_runs_go_on(load):
    session = load(om.looping(always=False), dense_timeout_s=0.3)
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(RunLimit, match=r"longer than the 0\.3 s of dense_timeout_s"):
            score(session, {"user_id": np.full((2, 4), 99)})
        assert time.monotonic() - began_s < 30
        assert score(session) == [[1.0] * 4] * 2
        time.sleep(0.4)  # the thread that watches has seen the end of the last one
        assert score(session) == [[1.0] * 4] * 2


def test_a_loop_without_an_end_is_ended_where_outputs_cannot_be_bound(load):
    session = load(om.looping(), dense_timeout_s=0.3)
    with pytest.raises(RunLimit):
        warm(session, lambda feature, lead: np.zeros((*lead, feature.dim), np.float32), lambda: None)


def test_all_runs_end_when_that_is_said_and_none_begins_after_a_close(load):
    session = load(om.looping(always=False), dense_timeout_s=3600)
    limits = session.limits._runs
    errors: list[BaseException] = []

    def predict() -> None:
        try:
            score(session, {"user_id": np.full((2, 4), 99)})
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    for end in (limits.end_all, limits.close):
        threads = [threading.Thread(target=predict) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while len(limits._running) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        end()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert [type(error) for error in errors] == [RunLimit] * 6
    with pytest.raises(Closed):
        score(session)


def test_a_tensor_beyond_the_limit_is_not_made(load):
    session = load(om.swelling(800_000_000), dense_memory=64 * MIB)
    before = peak_mib()
    for _ in range(3):
        with pytest.raises(Overloaded, match="no memory"):
            score(session)
    assert peak_mib() - before < 64
    assert score(load(om.swelling(1_000_000), dense_memory=64 * MIB)) == [[1.0] * 4] * 2


def test_each_session_has_a_limit_of_its_own(load):
    small, large = load(om.swelling(4 * MIB), dense_memory=8 * MIB), load(om.swelling(4 * MIB), dense_memory=64 * MIB)
    for _ in range(2):
        assert score(large) == [[1.0] * 4] * 2
        with pytest.raises(Overloaded):
            score(small)


def test_room_that_small_regions_hold_is_given_back_to_a_large_tensor(load):
    """The arena has taken what the sizes before it needed, and none of its regions is large enough."""
    session = load(om.swelling(1), dense_memory=64 * MIB)
    sizes = om.build(
        [om.node("Expand", "zero size", "large"), om.node("ReduceSum", "large", "score", keepdims=1)],
        {"size": (om.INT64, [1])},
        {"score": (om.FLOAT, [1])},
        {"zero": np.float32(0)},
    )
    session = load(sizes, dense_memory=64 * MIB)

    def of(mib: int) -> list[float]:
        return run(session, given={"size": np.array([mib * MIB // 4])})["score"].tolist()

    for mib in (1, 2, 4, 8, 16):
        assert of(mib) == [0.0]
    failed = 0
    while failed < 3:
        try:
            assert of(50) == [0.0]
            break
        except Overloaded:
            failed += 1
            of(1)
    assert failed < 3


def test_constants_are_not_computed_ahead_beyond_the_size_of_weights(load):
    before = peak_mib()
    session = load(om.swelling(200_000_000, ahead=True), dense_memory=64 * MIB)
    assert peak_mib() - before < 200
    with pytest.raises(Overloaded):
        score(session)


@pytest.mark.parametrize("arena", [True, False])
def test_answers_are_the_same_with_and_without_an_arena_that_keeps_memory(load, arena):
    session = load(om.linear({"user_id": np.ones(4)}), dense_options={"enable_cpu_mem_arena": arena})
    assert [score(session) for _ in range(3)] == [[[4.0]] * 2] * 3


def test_a_graph_whose_inputs_or_outputs_can_never_fit_is_refused_before_they_are_made(load):
    huge: om.Ports = {"x": (om.FLOAT, [1 << 20, 1 << 20])}
    for model in (
        om.build([om.node("ReduceSum", "x", "y", keepdims=0)], huge, {"y": (om.FLOAT, [])}),
        om.build(
            [om.node("Expand", "x size", "y")],
            {"x": (om.FLOAT, [1])},
            {"y": (om.FLOAT, [1 << 40])},
            {"size": np.array([1 << 40])},
        ),
    ):
        with pytest.raises((TooLarge, Overloaded)):
            warm(load(model), lambda feature, lead: np.zeros((*lead, feature.dim), np.float32), lambda: None)


def test_who_waits_for_another_session_to_be_made_may_stop_waiting(load, monkeypatch):
    """And none waits for good: that one may never be made."""

    def cancelled() -> None:
        raise LoadCancelled("the load was cancelled")

    with making._creating:
        with pytest.raises(LoadCancelled):
            load(om.linear({"user_id": np.ones(4)}), may_go_on=cancelled)
        monkeypatch.setattr(making, "CREATE_S", 0.0)
        with pytest.raises(Overloaded, match="another dense part has been made ready for more than 0 s"):
            load(om.linear({"user_id": np.ones(4)}))


@pytest.mark.parametrize("end", ["end_all", "close"])
def test_who_waits_for_another_session_is_told_of_a_stop(runtime, end):
    started = threading.Event()
    errors: list[BaseException] = []

    def make() -> None:
        try:
            runtime.load(om.linear({"user_id": np.ones(4)}), FEATURES, TABLES, DenseCounts(), may_go_on=started.set)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    with making._creating:
        thread = threading.Thread(target=make)
        thread.start()
        assert started.wait(60)
        getattr(runtime.limits, end)()
        thread.join(60)
    assert [type(error) for error in errors] == [Closed]
