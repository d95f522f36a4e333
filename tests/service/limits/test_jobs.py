"""Loads in the background: one at a time, in their turn, and none that hangs stands in another model's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import eventually
from tierstore.errors import Conflict, InvalidInput, LoadCancelled, NotFound, RateLimited
from tierstore.service.limits import jobs as module
from tierstore.service.limits.jobs import Job, Jobs
from tierstore.types import Progress


class Loads:
    """A store whose loads go on when they are told to, and do not notice that they are cancelled if they `hang`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.hang: set[str] = set()

    def load_snapshot(self, source: Path, *, progress: Any, cancelled: threading.Event, **_: Any) -> int:
        self.started.append(source.name)
        progress(Progress("read", 1, 10))
        end = self.ends.setdefault(source.name, threading.Event())
        while not end.wait(0.002):
            if cancelled.is_set() and source.name not in self.hang:
                raise LoadCancelled("the load was cancelled")
        return 1


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def jobs(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    jobs = Jobs(loads)
    yield jobs
    for end in loads.ends.values():
        end.set()
    jobs.close()


def test_a_job_for_which_no_thread_can_be_started_fails_and_the_next_runs(
    jobs: Jobs, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("tierstore-load"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        first = submit(jobs, "m", "first")
        ended(first, "failed")
    assert "no thread could be started" in str(first.error)
    assert jobs.get(first.id) is first
    second = submit(jobs, "m", "second")
    eventually(lambda: "second" in loads.started, "the second to run")
    loads.ends["second"].set()
    ended(second, "done")


def test_what_may_not_be_loaded_any_more_when_its_turn_has_come_is_not(jobs: Jobs, loads: Loads) -> None:
    def check() -> None:
        raise InvalidInput("it is a link now")

    job = jobs.submit("m", Path("first"), activate=True, check=check)
    ended(job, "failed")
    assert job.error == "it is a link now"
    assert loads.started == []


def submit(jobs: Jobs, model: str, name: str) -> Job:
    return jobs.submit(model, Path(name), activate=True)


def ended(job: Job, state: str) -> None:
    eventually(lambda: job.state != "running", f"the end of {job.source}")
    assert job.state == state, job.error


def test_one_at_a_time_in_their_order(jobs: Jobs, loads: Loads) -> None:
    all_ = [submit(jobs, model, name) for model, name in (("a", "1"), ("b", "2"), ("a", "3"))]
    for i, job in enumerate(all_):
        eventually(lambda i=i: len(loads.started) == i + 1, "the next one begins")
        loads.ends[loads.started[-1]].set()
        ended(job, "done")
    assert loads.started == ["1", "2", "3"]
    assert jobs.waiting == 0


def test_one_that_does_not_get_on_lets_another_models_pass(
    jobs: Jobs, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, behind, other = submit(jobs, "a", "1"), submit(jobs, "a", "2"), submit(jobs, "b", "3")
    eventually(lambda: loads.started == ["1"], "the first one begins")
    monkeypatch.setattr(module, "STUCK_S", 0.0)
    eventually(lambda: loads.started == ["1", "3"], "the other model's begins")
    loads.ends["3"].set()
    ended(other, "done")
    assert (stuck.state, behind.phase) == ("running", "queued"), "of one model one at a time"
    loads.ends["1"].set()
    ended(stuck, "done")
    eventually(lambda: loads.started == ["1", "3", "2"], "the one behind it begins")


def test_one_that_is_cancelled_and_hangs_stands_in_no_ones_way(jobs: Jobs, loads: Loads) -> None:
    loads.hang.add("1")
    stuck, other = submit(jobs, "a", "1"), submit(jobs, "b", "2")
    eventually(lambda: loads.started == ["1"], "the first one begins")
    jobs.cancel(stuck.id)
    eventually(lambda: loads.started == ["1", "2"], "the other model's begins")
    loads.ends["2"].set()
    ended(other, "done")


def test_one_that_waits_is_cancelled_at_once(jobs: Jobs, loads: Loads) -> None:
    first, second = submit(jobs, "a", "1"), submit(jobs, "a", "2")
    eventually(lambda: loads.started == ["1"], "the first one begins")
    jobs.cancel(second.id)
    ended(second, "failed")
    assert (first.state, loads.started) == ("running", ["1"])


def test_a_close_cancels_all(loads: Loads) -> None:
    jobs = Jobs(loads)
    all_ = [submit(jobs, model, model) for model in "abc"]
    eventually(lambda: loads.started, "the first one begins")
    jobs.close()
    assert [job.state for job in all_] == ["failed"] * 3


def test_a_failed_load_is_a_problem_until_it_is_acknowledged_or_another_is_done_or_a_day_has_passed(
    jobs: Jobs, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise InvalidInput("no such snapshot")

    wrong = {name: jobs.submit(name, Path("typo"), activate=True, check=fail) for name in "abc"}
    for job in wrong.values():
        ended(job, "failed")
    assert set(jobs.failed()) == {"a", "b", "c"}
    assert f"typo: no such snapshot (`tierstore jobs --acknowledge {wrong['a'].id}`" in jobs.failed()["a"]
    with pytest.raises(NotFound):
        jobs.acknowledge(wrong["a"].id, models=["b"])
    assert not wrong["a"].document()["acknowledged"]
    assert jobs.acknowledge(wrong["a"].id, models=["a"]).document()["acknowledged"]
    assert set(jobs.failed()) == {"b", "c"}
    good = submit(jobs, "b", "good")
    eventually(lambda: loads.started == ["good"], "the good load begins")
    assert set(jobs.failed()) == {"b", "c"}, "it may fail yet"
    with pytest.raises(Conflict, match="has not failed"):
        jobs.acknowledge(good.id)
    loads.ends["good"].set()
    ended(good, "done")
    assert set(jobs.failed()) == {"c"}
    now_s = wrong["c"].finished_s or 0.0
    monkeypatch.setattr(module.time, "time", lambda: now_s + 86_399)
    assert set(jobs.failed()) == {"c"}
    monkeypatch.setattr(module.time, "time", lambda: now_s + 86_401)
    assert jobs.failed() == {}
    again = jobs.submit("a", Path("typo"), activate=True, check=fail)
    ended(again, "failed")
    assert set(jobs.failed()) == {"a"}, "that another one failed was acknowledged"


def test_a_model_may_have_so_many_loads_that_run_or_wait(loads: Loads) -> None:
    jobs = Jobs(loads, {"m": 2}.get)
    try:
        for name in ("first", "second"):
            submit(jobs, "m", name)
        with pytest.raises(RateLimited, match="2 loads of 'm' run or wait, its quota is 2"):
            submit(jobs, "m", "third")
        submit(jobs, "other", "fourth")
    finally:
        jobs.close()
