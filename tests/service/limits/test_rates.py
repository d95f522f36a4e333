"""Rates of callers and of models: buckets, and what a client of each protocol gets when they are empty."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.extras import has_grpc
from tests.service.conftest import GRPC, settings_for
from tests.service.scenes import KEYS as ALL_KEYS
from tests.service.scenes import delta, items, write_small, write_snapshot
from tierstore.access.roles import LOCAL, Principal, Rates, Role
from tierstore.access.tokens import TokenFile, Tokens
from tierstore.client import Client
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, InvalidInput, RateLimited
from tierstore.service.limits import rates as module
from tierstore.service.limits.rates import RateLimits
from tierstore.service.server import ServerThread

KEYS = ALL_KEYS[:3]  # there are rows of all of them
SLOW = 0.001  # a second request only after a quarter of an hour


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, **quotas: Any) -> RateLimits:
    return RateLimits(load_settings(None, quotas=quotas), clock)


def test_a_bucket_has_what_a_second_allows_and_fills_again() -> None:
    clock = Clock()
    of = limits(clock, ctr={"requests_per_second": 4})
    for _ in range(4):
        assert of.admit(LOCAL, "ctr", 0) is not None
    with pytest.raises(RateLimited, match="model ctr may have 4 requests a second") as caught:
        of.admit(LOCAL, "ctr", 0)
    assert caught.value.retry_after_s == pytest.approx(0.25)
    assert of.admit(LOCAL, "other", 0) is None
    clock.now += 0.25
    of.admit(LOCAL, "ctr", 0)
    with pytest.raises(RateLimited):
        of.admit(LOCAL, "ctr", 0)
    clock.now += 1000
    for _ in range(4):
        of.admit(LOCAL, "ctr", 0)
    with pytest.raises(RateLimited):
        of.admit(LOCAL, "ctr", 0)


def test_one_that_is_larger_than_a_second_allows_passes_and_what_follows_waits() -> None:
    clock = Clock()
    of = limits(clock, ctr={"keys_per_second": 100, "bytes_per_second": "1000B"})
    charge = of.admit(LOCAL, "ctr", 10)
    assert charge is not None
    charge.keys(1100)
    charge.keys(1100)  # the same request, planned again
    with pytest.raises(RateLimited, match="100 keys a second") as caught:
        of.admit(LOCAL, "ctr", 10)
    assert caught.value.retry_after_s == pytest.approx(10.01)
    clock.now += 11
    of.admit(LOCAL, "ctr", 5000)
    with pytest.raises(RateLimited, match="1000 bytes a second"):
        of.admit(LOCAL, "ctr", 10)


def test_callers_have_rates_of_their_own_and_of_the_model_and_a_refusal_costs_nothing() -> None:
    clock = Clock()
    of = limits(clock, **{"*": {"requests_per_second": 3}, "free": {}})
    first, second = (Principal(name, Role.READER, rates=Rates(requests=2)) for name in ("token 1", "token 2"))
    for _ in range(2):
        of.admit(first, "ctr", 0)
    for _ in range(3):
        with pytest.raises(RateLimited, match="token 1 may have 2"):
            of.admit(first, "ctr", 0)
    of.admit(second, "ctr", 0)
    with pytest.raises(RateLimited, match="model ctr may have 3"):
        of.admit(second, "ctr", 0)
    of.admit(second, "free", 0)
    assert of.admit(LOCAL, "free", 0) is None


def test_names_of_models_that_there_are_not_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BUCKETS", 10)
    of = limits(Clock(), **{"*": {"requests_per_second": 3}})
    for number in range(100):
        of.admit(LOCAL, f"m{number}", 0)
    assert len(of._buckets) == 10


def test_rates_are_in_the_record_of_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    _, secret = TokenFile(path).create(Role.READER, rates=Rates(requests=5, nbytes=1e6))
    _, plain = TokenFile(path).create(Role.READER)
    tokens = Tokens(path)
    assert tokens.principal(f"Bearer {secret}").rates == Rates(5, None, 1e6)
    assert not tokens.principal(f"Bearer {plain}").rates
    for rate in (0, -1, float("inf"), float("nan"), True):
        with pytest.raises(InvalidInput, match="positive number of requests"):
            TokenFile(path).create(Role.READER, rates=Rates(requests=rate))


@pytest.mark.parametrize(
    "quotas", [{"ctr": {"requests_per_second": 0}}, {"ctr": {"wishes": 1}}, {"ctr": {"log_bytes": "x"}}]
)
def test_quotas_without_a_meaning_are_refused(quotas: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quotas"):
        load_settings(None, quotas=quotas)


def statuses(server: ServerThread, model: str, headers: dict[str, str], times: int = 6) -> list[int]:
    """Of binary look-ups of one form, which reactors answer once they have seen it."""
    found = []
    header = b'{"inputs":[{"name":"item_id","datatype":"INT64","shape":[2],"parameters":{"binary_data_size":16}}],"outputs":[{"name":"item_id","parameters":{"binary_data":true}}]}'
    body = header + np.array([5, 0], np.int64).tobytes()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for _ in range(times):
            answer = http.post(
                f"/v2/models/{model}/infer",
                content=body,
                headers={**headers, "inference-header-content-length": str(len(header))},
            )
            found.append(answer.status_code)
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert "a second; try again in" in answer.json()["error"]
    return found


def test_over_http_a_model_with_rates_is_429_however_its_look_ups_are_answered(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, quotas={"ctr": {"requests_per_second": SLOW}, "keyed": {"keys_per_second": SLOW}})
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        for model in ("one", "keyed"):
            store.load_snapshot(write_small(tmp_path, model, "item"))
        with ServerThread(store) as server:
            assert statuses(server, "ctr", {}) == [200] + [429] * 5
            assert statuses(server, "keyed", {}) == [200] + [429] * 5
            assert statuses(server, "one", {}, 20) == [200] * 20
            text = httpx.post(f"{server.url}/v1/models/ctr:predict", json={"inputs": {"item_id": [5]}})
            assert text.status_code == 429
            changed = httpx.post(f"{server.url}/admin/models/ctr/deltas", content=delta(1, {5: 1.0}))
            assert changed.status_code == 429
            assert int(changed.headers["retry-after"]) > 60


def test_over_http_a_token_with_rates_is_429_and_another_one_is_not(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    tokens = TokenFile(settings.data / "tokens.json")
    _, limited = tokens.create(Role.WRITER, rates=Rates(requests=SLOW))
    _, sized = tokens.create(Role.WRITER, rates=Rates(nbytes=SLOW))
    _, free = tokens.create(Role.READER)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store) as server:
            bearer = {name: {"authorization": f"Bearer {name}"} for name in (limited, sized, free)}
            assert statuses(server, "ctr", bearer[free], 20) == [200] * 20
            assert statuses(server, "ctr", bearer[limited]) == [200] + [429] * 5
            assert statuses(server, "ctr", bearer[sized]) == [200] + [429] * 5
            assert statuses(server, "ctr", bearer[free], 20) == [200] * 20
            answer = httpx.post(
                f"{server.url}/admin/models/ctr/deltas", content=delta(1, {5: 1.0}), headers=bearer[sized]
            )
            assert answer.status_code == 429


def test_who_goes_beyond_a_rate_is_counted_and_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(tmp_path)
    record, limited = TokenFile(settings.data / "tokens.json").create(Role.READER, rates=Rates(requests=SLOW))
    with Store(settings) as store:
        store.load_snapshot(write_small(tmp_path, "one", "item"))
        with ServerThread(store) as server:
            assert statuses(server, "one", {"authorization": f"Bearer {limited}"}) == [200] + [429] * 5
            assert server.service.shed.of("rate") == 5
    told = [line for line in caplog.text.splitlines() if ": 429 in " in line]
    assert len(told) == 5
    assert all(f"token {record.id} may have" in line for line in told)


@pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
def test_over_grpc_it_is_resource_exhausted(tmp_path: Path) -> None:
    from tritonclient.grpc import InferenceServerClient, InferInput
    from tritonclient.utils import InferenceServerException

    settings = settings_for(tmp_path, grpc_port=GRPC, quotas={"keyed": {"keys_per_second": SLOW}})
    tokens = TokenFile(settings.data / "tokens.json")
    _, limited = tokens.create(Role.READER, rates=Rates(requests=SLOW))
    _, free = tokens.create(Role.READER)
    with Store(settings) as store:
        for model in ("one", "keyed"):
            store.load_snapshot(write_small(tmp_path, model, "item"))
        with ServerThread(store) as server:
            client = InferenceServerClient(server.grpc_target)
            wanted = InferInput("item_id", [len(KEYS)], "INT64")
            wanted.set_data_from_numpy(KEYS)

            def ask(model: str, token: str) -> str:
                try:
                    result = client.infer(model, [wanted], headers={"authorization": f"Bearer {token}"})
                except InferenceServerException as error:
                    return str(error.status())
                np.testing.assert_array_equal(result.as_numpy("item_id"), items(KEYS))
                return "ok"

            assert [ask("one", free) for _ in range(4)] == ["ok"] * 4
            assert [ask("one", limited) for _ in range(3)] == ["ok"] + ["StatusCode.RESOURCE_EXHAUSTED"] * 2
            assert [ask("keyed", free) for _ in range(3)] == ["ok"] + ["StatusCode.RESOURCE_EXHAUSTED"] * 2
            client.close()


def test_the_client_waits_as_long_as_it_is_told_and_asks_again(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, quotas={"one": {"requests_per_second": 1}})
    with Store(settings) as store:
        store.load_snapshot(write_small(tmp_path, "one", "item"))
        with ServerThread(store) as server, Client(server.url) as client:
            began_s = time.monotonic()
            for _ in range(3):
                np.testing.assert_array_equal(client.lookup("one", "item_id", KEYS), items(KEYS))
            assert time.monotonic() - began_s > 1
