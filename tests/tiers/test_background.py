"""What runs beside requests gives way to them, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from tierstore.tiers.background import NICENESS, gives_way, in_background
from tierstore.tiers.readers import ReaderPool


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_background_work_has_a_low_priority_and_its_caller_keeps_its_own() -> None:
    before = niceness()
    assert in_background(niceness) == min(19, max(before, NICENESS))
    assert niceness() == before
    assert not gives_way()


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


def test_a_read_that_gets_no_more_threads_waits_for_what_it_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReaderPool(2, chunk_keys=1)
    done, caller = set(), threading.current_thread()
    taken, alone = threading.Event(), threading.Event()

    def refuse(thread: threading.Thread) -> None:
        assert taken.wait(10)  # by the thread that there is
        raise RuntimeError("can't start new thread")

    def work(start: int, stop: int) -> None:
        if threading.current_thread() is not caller:
            taken.set()
            assert alone.wait(10)
        done.add(start)
        if len(done) == 3:
            threading.Timer(0.05, alone.set).start()

    class Busy:  # every thread of the pool is, at the moment of asking
        def acquire(self, timeout: float) -> bool:
            return False

        def release(self) -> None:
            pass

    try:
        pool.run(2, lambda start, stop: None)
        executor = pool._helpers._executor
        assert executor is not None
        assert len(executor._threads) == 1
        with monkeypatch.context() as patch:
            patch.setattr(executor, "_idle_semaphore", Busy())
            begin = threading.Thread.start
            patch.setattr(
                threading.Thread,
                "start",
                lambda thread: refuse(thread) if thread.name.startswith("tierstore-read") else begin(thread),
            )
            pool.run(4, work)
        assert done == {0, 1, 2, 3}
    finally:
        alone.set()
        pool.close()
