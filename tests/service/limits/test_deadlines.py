"""Work is done only for those who still wait for it: deadlines, too long a queue, and clients that have gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeLookup, FakeStore
from tests.service.raw_clients import Answer, connections, many_files, request
from tierstore.errors import DeadlineExceeded, Overloaded
from tierstore.service.limits import shedding
from tierstore.service.limits.shedding import Caller, Gone, Shed, Waits
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.service.reactor.reactors import Reactors
from tierstore.service.server import ServerThread

PATH = "/v2/models/ctr/infer"
ITEM: dict[str, Any] = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]}
LARGE: dict[str, Any] = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [9000], "data": [1] * 9000}]}


class Clock:
    """In place of `time` in `shedding`: stands still, or runs `ahead_ns` before the real one."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.ahead_ns: int | None = None

    def perf_counter_ns(self) -> int:
        return self.now_ns if self.ahead_ns is None else time.perf_counter_ns() + self.ahead_ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shedding, "time", clock)
    return clock


# --- the rule


def test_a_call_whose_deadline_has_passed_is_refused_and_counted(clock: Clock) -> None:
    counts = Shed()
    caller = Caller(clock.now_ns)
    counts.check(caller)
    caller.within(5_000_000)
    caller.within(2_000_000)
    caller.within(None)
    clock.now_ns += 1_999_999
    counts.check(caller)
    clock.now_ns += 1
    with pytest.raises(DeadlineExceeded, match="2000 microseconds"):
        counts.check(caller)
    assert counts.of("deadline") == 1


def test_a_call_that_waited_too_long_is_refused_whatever_its_deadline(clock: Clock) -> None:
    counts = Shed()
    waits = Waits("lookup", counts, 0.5)
    waits.check(clock.now_ns - 500_000_000)
    with pytest.raises(Overloaded, match=r"0\.501 s.*max_queue_s is 0\.5"):
        waits.check(clock.now_ns - 501_000_000)
    with pytest.raises(Gone):
        waits.check(clock.now_ns, Caller(clock.now_ns, lambda: True))
    assert (counts.of("queue_wait"), counts.of("gone")) == (1, 1)
    waited = next(family for family in counts.families() if family.name == "tierstore_queue_seconds")
    assert next(sample.value for sample in waited.samples if sample.name.endswith("_count")) == 3


def test_the_pool_runs_no_call_that_nobody_waits_for() -> None:
    counts, ran = Shed(), []
    pool = WorkerPool("lookup", threads=1, queue_limit=9, waits=Waits("lookup", counts, 60.0))

    async def run() -> list[Any]:
        late = Caller(0)
        late.within(1)
        calls = [
            pool.run(ran.append, "first"),
            pool.run(ran.append, "late", caller=late),
            pool.run(ran.append, "gone", caller=Caller(0, lambda: True)),
            pool.run(ran.append, "last", caller=Caller(0, lambda: False)),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run())
    pool.close()
    assert ran == ["first", "last"]
    assert [type(outcome) for outcome in outcomes] == [type(None), DeadlineExceeded, Gone, type(None)]


# --- over HTTP


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    """One thread, and a gate that holds it up."""
    store = FakeStore(settings_for(tmp_path, lookup_threads=1, lookup_queue=10, max_queue_s=3600))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        try:
            yield store, server
        finally:
            store.model("ctr").gate.set()


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of keys of the look-ups that were finished."""
    done: list[int] = []
    finish = FakeLookup.finish

    def noted(self: FakeLookup) -> Any:
        done.append(len(self._codes))
        return finish(self)

    monkeypatch.setattr(FakeLookup, "finish", noted)
    return done


def blocked(store: FakeStore, server: ServerThread, clock: Clock, messages: list[bytes]) -> list[Answer]:
    """Answers to messages that are sent while the only thread is held up, and wait for it for 20 seconds by the clock."""
    pool, waits = server.service.lookup_pool, server.service.shed._waits
    clock.ahead_ns = 0

    def references() -> int:
        """Calls that the thread has taken: it has looked at the clock for them."""
        return sum(waits["lookup"].counts) if "lookup" in waits else 0

    before = references()

    async def run() -> list[Answer]:
        async with asyncio.timeout(60), connections(server.port) as connect:
            store.model("ctr").gate.clear()
            first = asyncio.ensure_future((await connect()).ask(request(PATH, ITEM)))
            while references() == before:
                await asyncio.sleep(0.001)
            asking = []
            for number, message in enumerate(messages, 1):
                asking.append(asyncio.ensure_future((await connect()).ask(message)))
                while pool.waiting < number:
                    await asyncio.sleep(0.001)
            clock.ahead_ns = 20_000_000_000
            store.model("ctr").gate.set()
            assert (await first).status == 200
            return [await answer for answer in asking]

    return asyncio.run(run())


def test_a_request_whose_timeout_passes_in_the_queue_is_refused_and_not_worked_on(
    served: tuple[FakeStore, ServerThread], clock: Clock, finished: list[int]
) -> None:
    timed = ITEM | {"parameters": {"timeout": 15_000_000}}
    (late, patient) = blocked(*served, clock, [request(PATH, timed), request(PATH, ITEM)])
    assert late.status == 504
    assert "15000000 microseconds" in late.document["error"]
    assert patient.status == 200
    assert finished == [2, 2]
    times = served[1].service.request_times.histograms
    assert sum(times["oip_http", "deadline"].counts) == 1


@pytest.mark.parametrize("name", ["X-Request-Timeout-Ms", "x-envoy-expected-rq-timeout-ms"])
def test_a_deadline_may_come_in_a_header(
    served: tuple[FakeStore, ServerThread], clock: Clock, finished: list[int], name: str
) -> None:
    answers = blocked(*served, clock, [request(PATH, ITEM, {name: ms}) for ms in (15_000, 600_000, 0)])
    assert [answer.status for answer in answers] == [504, 200, 200]
    assert len(finished) == 3


@pytest.mark.parametrize(
    ("parameters", "headers", "words"),
    [
        ({"timeout": "soon"}, {}, "timeout"),
        ({"timeout": -1}, {}, "timeout"),
        ({}, {"X-Request-Timeout-Ms": "1.5"}, "x-request-timeout-ms"),
        ({}, {"X-Request-Timeout-Ms": "9" * 20}, "milliseconds"),
    ],
)
def test_a_timeout_that_has_no_meaning_is_bad_input(
    http: httpx.Client, parameters: dict[str, object], headers: dict[str, str], words: str
) -> None:
    answer = http.post(PATH, json=ITEM | {"parameters": parameters}, headers=headers)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_request_of_a_client_that_has_gone_is_not_worked_on(
    served: tuple[FakeStore, ServerThread], finished: list[int]
) -> None:
    store, server = served
    pool, counts = server.service.lookup_pool, server.service.shed

    async def run() -> None:
        async with asyncio.timeout(60), connections(server.port) as connect:
            store.model("ctr").gate.clear()
            first = asyncio.ensure_future((await connect()).ask(request(PATH, ITEM)))
            while pool.busy < 1:
                await asyncio.sleep(0.001)
            leaver = await connect()
            asking = asyncio.ensure_future(leaver.ask(request(PATH, LARGE)))
            while pool.waiting < 1:
                await asyncio.sleep(0.001)
            leaver.close()
            assert (await asking).status == 0
            reactors = server.service.reactors
            assert isinstance(reactors, Reactors)
            while not reactors.conns["lost"].any():
                await asyncio.sleep(0.001)
            store.model("ctr").gate.set()
            assert (await first).status == 200

    asyncio.run(run())
    eventually(lambda: counts.of("gone") == 1, "its call was dropped")
    assert finished == [2]
    eventually(lambda: server.service.inflight.used_bytes == 0, "what it held is given back")


CLIENTS = 1000


def test_nothing_runs_for_a_thousand_clients_that_have_gone(tmp_path: Path) -> None:
    store = FakeStore(settings_for(tmp_path, lookup_threads=1, lookup_queue=CLIENTS, max_queue_s=3600))
    model, opened = store.model("ctr"), list[object]()
    view = model.view
    model.view = lambda *of: (opened.append(of), view(*of))[1]  # type: ignore[method-assign]
    message = request(PATH, ITEM)

    async def run(server: ServerThread) -> None:
        pool, reactors = server.service.lookup_pool, server.service.reactors
        assert isinstance(reactors, Reactors)
        async with asyncio.timeout(60), connections(server.port) as connect:
            model.gate.clear()
            first = asyncio.ensure_future((await connect()).ask(message))
            while not opened:
                await asyncio.sleep(0.001)
            leavers = [await connect() for _ in range(CLIENTS)]
            asking = [asyncio.ensure_future(leaver.ask(message)) for leaver in leavers]
            while pool.waiting < CLIENTS:
                await asyncio.sleep(0.001)
            for leaver in leavers:
                leaver.close()
            assert {(await each).status for each in asking} == {0}
            while np.count_nonzero(reactors.conns["lost"]) < CLIENTS:
                await asyncio.sleep(0.001)
            model.gate.set()
            assert (await first).status == 200

    with many_files(), ServerThread(store) as server:  # type: ignore[arg-type]
        try:
            asyncio.run(run(server))
        finally:
            model.gate.set()
        eventually(lambda: not server.service.lookup_pool.under_way(), "the queue is empty")
        assert server.service.shed.of("gone") == CLIENTS
        assert len(opened) == 1
        eventually(lambda: server.service.inflight.used_bytes == 0, "what they held is given back")


def test_over_tensorflow_serving_json_too(
    served: tuple[FakeStore, ServerThread], clock: Clock, finished: list[int]
) -> None:
    path = "/v1/models/one:predict"
    served[0].model("one").gate = served[0].model("one")._view._gate = served[0].model("ctr").gate
    small, large = {"inputs": {"item_id": [1, 2]}}, {"inputs": {"item_id": [1] * 9000}}
    timeout = {"X-Request-Timeout-Ms": 15_000}
    messages = [request(path, small, timeout), request(path, large, timeout), request(path, small)]
    assert [answer.status for answer in blocked(*served, clock, messages)] == [504, 504, 200]
    assert finished == [2, 2]


def test_what_waited_too_long_is_refused(tmp_path: Path, clock: Clock, finished: list[int]) -> None:
    store = FakeStore(settings_for(tmp_path, lookup_threads=1, lookup_queue=10, max_queue_s=15))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        (answer,) = blocked(store, server, clock, [request(PATH, ITEM)])
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert "max_queue_s" in answer.document["error"]
    assert len(finished) == 1


def test_a_deadline_that_is_not_reached_changes_no_answer(http: httpx.Client) -> None:
    plain = http.post(PATH, json=ITEM).json()
    timed = http.post(PATH, json=ITEM | {"parameters": {"timeout": 60_000_000}}).json()
    assert plain == timed
    np.testing.assert_array_equal(plain["outputs"][0]["shape"], [2, 4])
