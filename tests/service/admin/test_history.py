"""The last hour of a service: what the admin route says of it, against what was sent, and what it takes to know it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.scenes import delta, write_snapshot
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.data.hour import HOUR_S
from tierstore.engine.events.observer import Observer
from tierstore.engine.store import Store
from tierstore.service import history
from tierstore.service.history import STEP_S
from tierstore.service.server import ServerThread
from tierstore.service.stats import REQUEST_BOUNDS_S, Timings, bucket_quantiles

Own = tuple[Store, ServerThread, httpx.Client]


def look_up(http: httpx.Client, keys: list[int], feature: str = "item_id") -> int:
    body = {"inputs": [{"name": feature, "datatype": "INT64", "shape": [len(keys)], "data": keys}]}
    return http.post("/v2/models/ctr/infer", json=body).status_code


def of(http: httpx.Client, model: str = "ctr") -> dict[str, Any]:
    answer = http.get(f"/admin/models/{model}/history")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


@pytest.fixture
def turn(own: Own) -> Callable[[int], None]:
    """Has a step of the history end; the argument says which."""
    store, server, _ = own
    store.shared.sampler.close()
    began_s = (time.time() // STEP_S + 1) * STEP_S  # the sampler may have noted this one
    return lambda step: server.service.history.time_passed(began_s + STEP_S * step)


@pytest.mark.thorough
def test_each_step_has_the_requests_keys_and_deltas_that_came_in_it(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:  # fmt: skip
    store, _, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    turn(0)
    for _ in range(7):
        assert look_up(http, [1, 2, 1000]) == 200
    assert look_up(http, [1], "nothing") == 400  # a fault of the caller
    turn(1)
    for seq in (1, 2, 3):
        store.apply_delta(delta(seq, {1: float(seq)}))
    turn(2)
    store.load_snapshot(write_snapshot(tmp_path, 2, delta_seq=3))
    assert look_up(http, [1]) == 200
    turn(3)
    document = of(http)
    steps = document["steps"]
    assert steps["seconds"] == [STEP_S] * 3
    assert [b - a for a, b in zip(steps["at_s"], steps["at_s"][1:], strict=False)] == [STEP_S] * 2
    assert (steps["keys"], steps["absent"], steps["deltas"]) == ([21, 0, 1], [7, 0, 0], [0, 3, 0])
    assert steps["requests"] == [8, 0, 1]
    assert steps["failed"] == [0, 0, 0]
    assert (steps["version"], steps["seq"]) == ([1, 1, 2], [0, 3, 3])
    assert [value is None for value in steps["p99_s"]] == [False, True, False]
    assert 0 < steps["p50_s"][0] <= steps["p99_s"][0] < 10
    hour = document["hour"]
    assert (hour["requests"], hour["keys"], hour["absent"], hour["deltas"]) == (9, 22, 7, 3)
    assert hour["read"] <= 3, "rows that memory lacked, each once"
    minute = http.get("/admin/models").json()["service"]["last_minute"]
    assert minute["seconds"] >= 3 * STEP_S
    assert (minute["requests"], minute["failed"]) == (9, 0)
    assert 0 < minute["p50_s"] <= minute["p99_s"]
    assert (minute["at_s"], minute["keys"]) == (steps["at_s"][-1], 22)
    assert 0 < minute["cpu_s"] < 60
    assert {name: document["minute"][name] for name in hour} == hour, "less than a minute has passed"


def test_versions_are_compared_over_one_time_since_there_is_a_canary(own: Own, turn: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    store, server, _ = own
    for version in (1, 2):
        store.load_snapshot(write_snapshot(tmp_path, version))
    stats = server.service.inference_stats

    def answer(version: int, requests: int, failed: int, ms: int) -> None:
        for _ in range(requests - failed):
            stats.succeeded("ctr", version, ms * 1_000_000, Timings())
        stats.failed("ctr", version, 1000, "error", failed)

    turn(0)
    answer(2, 100, 0, 2)
    turn(1)
    steps = server.service.history.document("ctr", time.time(), to_admin=True)["steps"]
    began_s = steps["at_s"][-1] + 1.0
    store.canary("ctr", 1, 0.25)
    latest = store.audit.latest

    def lines(since_s: float) -> list[dict[str, Any]]:
        return [line | ({"at_s": began_s} if line["what"] == "canary" else {}) for line in latest(since_s)]

    monkeypatch.setattr(store.audit, "latest", lines)
    answer(2, 30, 1, 2)
    turn(2)
    answer(1, 10, 2, 20)
    turn(3)
    document = server.service.history.document("ctr", time.time(), to_admin=True)
    assert document["versions_since_s"] == began_s
    active, canary = document["versions"]
    shown = ("version", "state", "share", "requests", "failed")
    assert [active[name] for name in shown] == [2, "active", 0.75, 30, 1]
    assert [canary[name] for name in shown] == [1, "canary", 0.25, 10, 2]
    assert canary["since_s"] == began_s > active["since_s"]
    assert 0.001 < active["p50_s"] <= 0.0025 < 0.01 < canary["p50_s"] <= canary["p99_s"] <= 0.025
    assert (active["steps"]["requests"], canary["steps"]["requests"]) == ([100, 30, 0], [None, None, 10])
    assert (active["minute"]["requests"], canary["minute"]["requests"]) == (130, 10)


def test_a_version_that_serves_no_more_and_a_canary_that_nobody_has_asked_are_told(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:  # fmt: skip
    store, server, http = own
    for version in (1, 2):
        store.load_snapshot(write_snapshot(tmp_path, version))

    def told() -> dict[int, tuple[str | None, float | None, int]]:
        return {one["version"]: (one["state"], one["share"], one["requests"]) for one in of(http)["versions"]}

    turn(0)
    server.service.inference_stats.failed("ctr", 1, 1000, "error", 3)
    turn(1)
    assert told() == {2: ("active", 1.0, 0), 1: (None, None, 3)}
    for step in range(2, HOUR_S // STEP_S + 2):
        turn(step)
    assert told() == {2: ("active", 1.0, 0)}
    store.canary("ctr", 1, 0.0)
    assert told() == {2: ("active", 1.0, 0), 1: ("canary", 0.0, 0)}


def test_failures_of_the_service_are_told_apart_from_those_of_callers(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:  # fmt: skip
    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    turn(0)
    stats = server.service.inference_stats
    for outcome, count in (("error", 2), ("unavailable", 1), ("overloaded", 4), ("bad_input", 8), ("deadline", 16)):
        stats.failed("ctr", 1, 1000, outcome, count)
    turn(1)
    steps = of(http)["steps"]
    assert (steps["requests"], steps["failed"]) == ([31], [7])


@pytest.mark.thorough
def test_counts_go_on_where_versions_are_counted_anew_or_gone(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:  # fmt: skip
    """Of a model the statistics of eight versions are kept, and one that comes back is counted from nothing."""
    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    stats = server.service.inference_stats
    turn(0)
    for step in range(1, 31):
        stats.failed("ctr", step % 10 + 1, 1000, "error", 5)
        turn(step)
    assert of(http)["steps"]["failed"] == [5] * 30
    store.deactivate("ctr")
    turn(31)
    store.activate("ctr", 1)
    assert look_up(http, [1, 2]) == 200
    turn(32)
    steps = of(http)["steps"]
    assert (steps["version"][-3:], steps["keys"][-3:]) == ([1, 0, 1], [0, 0, 2])


@pytest.mark.thorough
def test_an_hour_is_kept_within_so_much_memory(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:
    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    turn(0)
    kept = server.service.history
    nbytes = kept.nbytes
    for step in range(1, 600):
        turn(step)
    assert len(of(http)["steps"]["at_s"]) == HOUR_S // STEP_S
    assert kept.nbytes == nbytes < 100_000
    assert f'tierstore_memory_bytes{{part="history"}} {float(nbytes)}' in http.get("/metrics").text
    assert sum(map(sys.getsizeof, kept._models["ctr"]._before.values())) < 10_000


@pytest.mark.thorough
def test_the_sampler_tells_it_of_the_time(own: Own, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody has to ask for it, and no other thread is there for it."""
    store, server, http = own
    monkeypatch.setattr(history, "STEP_S", 1)
    kept = server.service.history
    store.load_snapshot(write_snapshot(tmp_path, 1))
    eventually(lambda: len(of(http)["steps"]["at_s"]) >= 2, "two steps")
    assert kept in store.observers


@pytest.mark.thorough
def test_another_observer_that_fails_does_not_keep_the_time_from_it(
    own: Own, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing(Observer):
        asked = 0

        def time_passed(self, now_s: float) -> None:
            self.asked += 1
            raise RuntimeError("a fault of a program that has the store open")

    store, _, http = own
    monkeypatch.setattr(history, "STEP_S", 1)
    store.observers.insert(0, failing := Failing())
    store.load_snapshot(write_snapshot(tmp_path, 1))
    eventually(lambda: len(of(http)["steps"]["at_s"]) >= 2, "two steps")
    assert failing.asked == 1


@pytest.mark.thorough
def test_a_step_that_fails_is_not_the_last(own: Own, turn: Callable[[int], None], tmp_path: Path) -> None:
    store, server, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    turn(0)
    kept = server.service.history
    refresh, kept._refresh = kept._refresh, lambda: 1 // 0
    turn(1)
    kept._refresh = refresh
    turn(2)
    assert of(http)["steps"]["seconds"] == [2 * STEP_S]


@pytest.mark.thorough
def test_changes_are_told_newest_first_and_outlast_the_service(own: Own, tmp_path: Path) -> None:
    store, _, http = own
    for version in (1, 2):
        store.load_snapshot(write_snapshot(tmp_path, version))
    assert http.post("/admin/models/ctr/rollback", json={"expected_active": 2}).status_code == 200
    assert http.post("/admin/models/ctr/activate", json={"version": 77}).status_code == 404
    assert http.post("/admin/models/ctr/canary", json={"version": 2, "share": 0.25}).status_code == 200
    store.apply_delta(delta(1, {1: 1.0}))
    told = of(http)["changes"]
    assert [(one["what"], one["outcome"]) for one in told] == [
        ("canary", "done"), ("activate", "failed"), ("rollback", "done"), ("load", "done"), ("load", "done"),
    ]  # fmt: skip
    canary, failed, rollback, load, _ = told
    assert (canary["version"], canary["share"]) == (2, 0.25)
    assert "77" in failed["error"]
    assert (rollback["active_before"], rollback["active_after"]) == (2, 1)
    assert rollback["who"].startswith("127.0.0.1")
    assert (load["version"], load["active_after"]) == (2, 2)
    assert time.time() - 60 < load["at_s"] <= canary["at_s"] <= time.time()
    with ServerThread(store) as again, httpx.Client(base_url=again.url) as other:
        assert of(other)["changes"] == told


@pytest.mark.thorough
def test_changes_that_cannot_be_written_yet_are_told(own: Own, tmp_path: Path) -> None:
    store, _, http = own
    store.load_snapshot(write_snapshot(tmp_path, 1))
    lines = store.audit._changes
    lines.close()
    path, lines._path = lines._path, tmp_path / "no directory" / "\0"
    lines._waiting.append(path.read_bytes().splitlines(keepends=True)[-1].replace(b'"load"', b'"label"'))
    lines._path = path
    assert [one["what"] for one in of(http)["changes"]] == ["label", "load"]


def test_who_changed_what_is_for_admins(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, grpc_port=GRPC)
    held = TokenFile(settings.data / "tokens.json")
    reader, admin = (held.create(role)[1] for role in (Role.READER, Role.ADMIN))
    with Store(settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        found = {}
        for name, secret in (("reader", reader), ("admin", admin)):
            with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {secret}"}) as http:
                (found[name],) = of(http)["changes"]
                assert http.get("/admin/models").json()["service"]["access"]["role"] == name
    assert found["admin"].keys() - found["reader"].keys() == {"who", "source"}
    assert found["reader"]["what"] == "load"


@pytest.mark.parametrize("counted", [[5, 3, 2], [0, 0, 4], [1, 0, 0], [3, 0, 1]])
def test_quantiles_are_within_the_bucket_that_has_them(counted: list[int]) -> None:
    counts = np.zeros((2, len(REQUEST_BOUNDS_S) + 1), np.int64)
    counts[1, 2:5] = counted
    none, some = bucket_quantiles(0.5, counts)
    assert np.isnan(none)
    taken = np.repeat(range(2, 5), counted)
    bucket = taken[(len(taken) - 1) // 2]
    assert REQUEST_BOUNDS_S[bucket - 1] < some <= REQUEST_BOUNDS_S[bucket]


def test_what_takes_longer_than_all_bounds_is_shown_as_the_last() -> None:
    counts = np.zeros((1, len(REQUEST_BOUNDS_S) + 1), np.int64)
    counts[0, -1] = 3
    assert bucket_quantiles(0.99, counts).tolist() == [REQUEST_BOUNDS_S[-1]]


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    assert http.get("/admin/models/nobody/history").status_code == 404
