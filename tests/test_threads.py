"""Threads that cannot be started: nobody waits for one that died before it began, and nothing hangs behind that."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tierstore import threads
from tierstore.engine.operations.low_priority import low_priority
from tierstore.threads import NEVER_S, OwnThreadCall, Pool, Scheduler, Thread, Timer
from tierstore.tiers.background import in_background, is_background
from tierstore.tiers.disk.reader_pool import ReaderPool

ROOT = Path(tierstore.__file__).parent


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """From now on threads of the system are made, and die before they say that they run; what they would have done."""
    made: list[Callable[[], None]] = []
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    monkeypatch.setattr(threading, name, lambda run, *_, **__: made.append(run))
    monkeypatch.setattr(threads, "START_S", 0.05)
    return made


def test_a_thread_that_dies_before_it_begins_is_an_error_and_never_runs(stillborn: list[Callable[[], None]]) -> None:
    ran: list[int] = []
    thread = Thread(target=ran.append, args=(1,))
    with pytest.raises(RuntimeError, match="can't start new thread: it did not begin"):
        thread.start()
    assert len(stillborn) == 1
    thread.run()  # it begins after all
    assert ran == []


def test_work_in_the_background_is_done_by_its_caller_where_no_thread_begins(
    stillborn: list[Callable[[], None]],
) -> None:
    assert in_background(threading.current_thread) is threading.current_thread()
    assert len(stillborn) == 1


def test_a_pool_of_which_a_thread_does_not_begin_is_refused_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, started = threading.active_count(), Thread.start, list[Thread]()

    def third_fails(thread: Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", third_fails)
        with pytest.raises(RuntimeError, match="can't start"):
            Pool(4, "pool")
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)
    assert threading.active_count() <= before


def test_readers_need_no_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReaderPool(2)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    done: list[tuple[int, int]] = []
    pool.run(1000, lambda start, stop: done.append((start, stop)))
    assert sum(stop - start for start, stop in done) == 1000
    pool.close()


def test_a_pool_does_calls_in_their_order_and_raises_what_they_raise() -> None:
    begun: list[str] = []
    with Pool(2, "pool", lambda: begun.append(threading.current_thread().name)) as pool:
        assert pool.map(lambda number: number * 2, range(50)) == [number * 2 for number in range(50)]
        failed = pool.submit(int, "x")
        assert isinstance(failed.exception(), ValueError)
        with pytest.raises(ValueError, match="invalid literal"):
            pool.map(int, ["1", "x", "2"])
    assert sorted(begun) == ["pool_0", "pool_1"]
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_calls_that_wait_are_cancelled_with_the_pool() -> None:
    pool, hold, at_work = Pool(1, "pool"), threading.Event(), threading.Event()
    first = pool.submit(lambda: (at_work.set(), hold.wait(30)))
    waiting = pool.submit(int)
    assert at_work.wait(30)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    hold.set()
    assert first.result(30)[1]


def test_a_call_returns_and_raises_and_a_timer_can_be_cancelled() -> None:
    assert in_background(is_background)
    assert OwnThreadCall("call", lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        OwnThreadCall("call", lambda: 1 // 0).result()
    rung = threading.Event()
    cancelled, timer = Timer(60, rung.set), Timer(0, rung.set)
    for each in (cancelled, timer):
        each.daemon = True
        each.start()
    assert rung.wait(30)
    rung.clear()
    cancelled.cancel()
    cancelled.join(30)
    assert not cancelled.is_alive()
    assert not rung.is_set()


def test_long_work_aside_that_fails_says_why() -> None:
    class Still:
        def at_work(self, _: str) -> threading.Lock:
            return threading.Lock()

    assert low_priority(Still(), "test", lambda stops: (is_background(), stops()), None) == (True, False)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        low_priority(Still(), "test", lambda _: {}["x"], None)  # type: ignore[arg-type]


def test_nothing_starts_a_thread_otherwise() -> None:
    """Helper processes may: nobody waits for their threads but they themselves."""
    apart = {"threads.py", "ingest/worker.py", "predict/sandbox_process.py"}
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(
            r"threading\.(Thread|Timer)\(|ThreadPoolExecutor\(|class \w+\(threading\.Thread", path.read_text("utf-8")
        )
    ]
    assert [path for path in wrong if path not in apart and not path.startswith("demo/")] == []


def test_a_job_is_on_one_thread_at_a_time_and_runs_once_more_where_it_is_woken_meanwhile() -> None:
    ran, together = threading.Semaphore(0), 0
    go_on, most = threading.Semaphore(0), 0

    def run() -> float:
        nonlocal together, most
        together += 1
        most = max(most, together)
        ran.release()
        assert go_on.acquire(timeout=10)
        together -= 1
        return NEVER_S

    scheduler = Scheduler(3, "job")
    try:
        job = scheduler.add(run, 0.0)
        assert ran.acquire(timeout=10)
        for _ in range(5):
            job.wake()
        assert not ran.acquire(timeout=0.05), "not while it runs"
        go_on.release()
        assert ran.acquire(timeout=10), "it was woken while it ran"
        go_on.release()
        assert not ran.acquire(timeout=0.05), "once"
        assert most == 1
    finally:
        scheduler.close()


def test_jobs_run_when_they_are_due_and_one_that_fails_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_AFTER_FAILURE_S", 0.01)
    order: list[str] = []
    done, failures = threading.Event(), iter([ValueError("injected failure")])

    def fail() -> float:
        order.append("fails")
        for error in failures:
            raise error
        return NEVER_S

    def later() -> float:
        order.append("later")
        done.set()
        return NEVER_S

    scheduler = Scheduler(1, "job")
    try:
        scheduler.add(later, 0.2)
        scheduler.add(fail, 0.0)
        assert done.wait(10)
    finally:
        scheduler.close()
    assert order == ["fails", "fails", "later"]


def test_a_job_that_has_ended_runs_no_more() -> None:
    started, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def run() -> float:
        ran.append(1)
        started.set()
        assert go_on.wait(10)
        return 0.0

    scheduler = Scheduler(2, "job")
    try:
        job = scheduler.add(run, 0.0)
        assert started.wait(10)
        ending = OwnThreadCall("ending", job.end)
        go_on.set()
        ending.result()
        count = len(ran)
        job.wake()
        after, passed = threading.Event(), lambda: after.set() or NEVER_S
        scheduler.add(passed, 0.0)
        assert after.wait(10)
        assert len(ran) == count
    finally:
        scheduler.close()
