"""What runs beside requests gives way to them, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from tierstore.tiers import background
from tierstore.tiers.background import (
    NICENESS,
    in_background,
    is_background,
    register_requests,
    without_yielding,
    yield_to_requests,
)
from tierstore.tiers.disk import reader_pool
from tierstore.tiers.disk.reader_pool import ReaderPool


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_background_work_has_a_low_priority_and_its_caller_keeps_its_own() -> None:
    before = niceness()
    assert in_background(niceness) == min(19, max(before, NICENESS))
    assert niceness() == before
    assert not is_background()


def test_background_work_has_the_context_of_its_caller() -> None:
    name = ContextVar("name", default="")
    name.set("me")
    assert in_background(name.get) == "me"


def test_an_error_in_the_background_is_the_callers() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        in_background(fail)


@pytest.mark.parametrize("call", [in_background, lambda work: work()])
def test_helpers_of_a_read_have_the_priority_of_its_caller(call: Callable[[Callable[[], int]], int]) -> None:
    """Also where the first read of a pool, which starts its threads, is in the background."""
    pool = ReaderPool(2, chunk_keys=1)
    seen: dict[int, int] = {}
    both = threading.Barrier(3, timeout=10)

    def work(start: int, stop: int) -> None:
        seen[threading.get_native_id()] = niceness()
        both.wait()

    def read() -> int:
        pool.run(3, work)  # the barrier takes the caller and both helpers
        return niceness()

    try:
        in_background(lambda: None)
        expected = call(read)
        assert len(seen) == 3
        assert set(seen.values()) == {expected}
    finally:
        pool.close()


def test_a_read_in_the_background_gives_way_after_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[bool] = []
    monkeypatch.setattr(reader_pool, "yield_if_background", lambda: rests.append(is_background()))
    pool = ReaderPool(0, chunk_keys=10)
    in_background(lambda: pool.run(35, lambda start, stop: None))
    assert rests == [True] * 4


class Clock:
    """A clock that moves on while somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now_s, self.worked_s = 1_000.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.worked_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.worked_s += seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Traffic:
    """Requests that are under way for a while."""

    def __init__(self, clock: Clock, for_s: float = 0.0) -> None:
        self.clock, self.until_s = clock, clock.now_s + for_s

    def under_way(self) -> bool:
        return self.clock.now_s < self.until_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(background, "time", clock)
    monkeypatch.setattr(background, "_sources", ())
    monkeypatch.setattr(background, "_thread", background._ThreadState())
    clock.work(1.0)
    return clock


def pause(clock: Clock) -> float:
    began = clock.now_s
    yield_to_requests()
    return clock.now_s - began


def test_a_pause_ends_when_requests_have_been_answered(clock: Clock) -> None:
    traffic, idle = Traffic(clock, for_s=1e-3), Traffic(clock)
    register_requests(traffic)
    register_requests(idle)
    assert 1e-3 <= pause(clock) < 1.3e-3
    assert pause(clock) < 0.1e-3  # there are none now


def test_requests_without_end_slow_work_down_to_a_quarter(clock: Clock) -> None:
    traffic = Traffic(clock, for_s=3_600.0)
    register_requests(traffic)
    worked_s = paused_s = 0.0
    for _ in range(2_000):
        clock.work(0.5e-3)
        worked_s += 0.5e-3
        took_s = pause(clock)
        assert took_s < 4.2e-3
        paused_s += took_s
    assert 0.9 < paused_s / (3.25 * worked_s) < 1.1


def test_requests_of_somebody_who_is_gone_are_not_waited_for(clock: Clock) -> None:
    traffic = Traffic(clock, for_s=3_600.0)
    register_requests(traffic)
    assert pause(clock) > 1e-3
    del traffic
    assert pause(clock) < 0.1e-3


def test_work_in_a_hurry_waits_for_no_request(clock: Clock) -> None:
    traffic = Traffic(clock, for_s=3_600.0)
    register_requests(traffic)
    with without_yielding(True):
        assert pause(clock) < 0.1e-3
        with without_yielding(False):
            assert pause(clock) > 1e-3
        clock.work(1.0)
        assert pause(clock) < 0.1e-3
    clock.work(1.0)
    assert pause(clock) > 1e-3
