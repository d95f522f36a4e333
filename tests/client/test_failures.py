"""What both clients do when connections fail, the service refuses, or time is over."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest

from tests.client.conftest import Make, fake, same
from tests.client.fake_service import Act, FakeService, rows
from tierstore.errors import (
    Closed,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    TierstoreError,
    Unreachable,
)

QUICK = {"backoff_s": 0.001}


# --- failures


@pytest.mark.parametrize(
    "act",
    [
        Act(how="reset"),
        Act(how="cut"),
        Act(status=503, headers={"Retry-After": "0"}),
        Act(status=429, headers={"Retry-After": "0"}),
        Act(status=503),
        Act(status=500),
        Act(status=502),
        Act(status=504),
    ],
)
@pytest.mark.parametrize("split_keys", [None, 20])
def test_what_failed_on_its_way_is_sent_again(
    make: Make, service: FakeService, act: Act, split_keys: int | None
) -> None:
    service.script = [Act(), act, act]
    client = make(service.url, split_keys=split_keys, **QUICK)
    for _ in range(2):
        same(client.lookup("m", "f", np.arange(40)), rows(np.arange(40)))
    assert len(service.seen) == (2 if split_keys is None else 4) + 2


@pytest.mark.parametrize(
    ("act", "kind"), [(Act(how="reset"), Unreachable), (Act(status=503, headers={"Retry-After": "0"}), Overloaded)]
)
def test_it_is_sent_again_only_so_often(make: Make, service: FakeService, act: Act, kind: type[TierstoreError]) -> None:
    service.script = [act] * 20
    with pytest.raises(kind):
        make(service.url, retries=2, **QUICK).lookup("m", "f", [1])
    assert len(service.seen) == 3


@pytest.mark.parametrize(
    ("status", "kind"), [(500, TierstoreError), (502, Unreachable), (503, NotReady), (504, DeadlineExceeded)]
)
def test_a_node_that_fails_for_a_while_is_failed_over_from_and_skipped(
    make: Make, service: FakeService, status: int, kind: type[TierstoreError]
) -> None:
    """Behind a proxy these are a node that starts again."""
    with fake() as other:
        service.script, other.script = [Act(status=status)] * 100, []
        client = make([service.url, other.url], backoff_s=60.0)
        for key in range(8):
            same(client.lookup("m", "f", [key]), rows(np.array([key])))
        assert len(service.seen) == 1, "it is skipped after the first"
        assert client.figures()["nodes"][service.url] > 0
    with pytest.raises(kind, match=f"refused with {status}"):
        make(service.url, retries=0).lookup("m", "f", [1])


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_change_that_failed_is_not_sent_again(make: Make, service: FakeService, status: int) -> None:
    service.documents = lambda method, path, body: (status, {"error": "no"})
    with pytest.raises(TierstoreError):
        make(service.url, **QUICK).activate("m", 1)
    assert len(service.paths) == 1


def test_a_wait_beyond_the_deadline_does_not_start(make: Make, service: FakeService) -> None:
    service.script = [Act(status=503, headers={"Retry-After": "7"})]
    with pytest.raises(Overloaded) as refused:
        make(service.url).lookup("m", "f", [1], timeout_s=5)
    assert refused.value.retry_after_s == 7
    assert len(service.seen) == 1


def test_all_calls_together_repeat_only_so_much(make: Make, service: FakeService) -> None:
    service.script = [Act(how="reset")] * 100
    client = make(service.url, **QUICK)
    for _ in range(10):
        with pytest.raises(Unreachable):
            client.lookup("m", "f", [1])
    assert len(service.seen) == 10 + 10, "ten calls, and the ten repeats of the budget"
    figures = client.figures()["repeats"]
    assert figures["taken"] == 10
    assert figures["refused"] > 0
    assert figures["left"] < 1


@pytest.mark.parametrize("status", [400, 404, 413, 501])
def test_a_lasting_refusal_is_not_retried(make: Make, service: FakeService, status: int) -> None:
    service.script = [Act(status=status)]
    with pytest.raises(TierstoreError, match=f"refused with {status}"):
        make(service.url, **QUICK).lookup("m", "f", [1])
    assert len(service.seen) == 1


def test_a_deadline_ends_a_call_whatever_the_service_does(make: Make, service: FakeService) -> None:
    service.script = [Act(how="hang")]
    client = make(service.url)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.0\d+ s"):
        client.lookup("m", "f", [1], timeout_s=0.05)
    assert client.figures()["connections"]["busy"] == 0
    same(client.lookup("m", "f", [1]), rows(np.array([1])))
    first, second = (int(seen.headers["x-request-timeout-ms"]) for seen in service.seen)
    assert 0 < first <= 50
    assert 20_000 < second <= 30_000
    with pytest.raises(InvalidInput, match="timeout_s"):
        client.lookup("m", "f", [1], timeout_s=0)


def test_all_parts_send_the_service_the_same_json(make: Make, service: FakeService) -> None:
    make(service.url, split_keys=10).lookup("m", "f", np.arange(40))
    assert len({json.dumps(seen.document) for seen in service.seen}) == 1


def test_a_slow_request_is_sent_twice_and_the_first_answer_counts(make: Make, service: FakeService) -> None:
    service.script = [Act(how="wait")]
    client = make(service.url, hedge_after_s=0.01)
    same(client.lookup("m", "f", np.arange(40)), rows(np.arange(40)))
    assert len(service.seen) == 2
    assert client.figures()["connections"]["busy"] == 0
    service.script = [Act(), Act(how="wait")]
    client = make(service.url, hedge_after_s=0.01, split_keys=20)
    same(client.lookup("m", "f", np.arange(40)), rows(np.arange(40)))
    assert len({seen.headers["x-request-id"] for seen in service.seen[2:]}) == 1


def test_without_hedging_nothing_is_sent_twice(make: Make, service: FakeService) -> None:
    service.script = [Act(how="wait")]
    threading.Timer(0.05, service.released.set).start()
    same(make(service.url).lookup("m", "f", [1]), rows(np.array([1])))
    assert len(service.seen) == 1


@pytest.mark.parametrize("how", ["chunked", "until_close"])
def test_other_framings_of_an_answer_are_read_too(make: Make, service: FakeService, how: str) -> None:
    service.script = [Act(how=how)] * 2
    client = make(service.url)
    for _ in range(3):
        same(client.lookup("m", "f", np.arange(40)), rows(np.arange(40)))


@pytest.mark.parametrize(
    "raw",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: ²\r\n\r\n{}".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: notchunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+0x2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nInference-Header-Content-Length: ²\r\n\r\n{}".encode("latin-1"),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_ours(make: Make, service: FakeService, raw: bytes) -> None:
    service.script = [Act(raw=raw)]
    client = make(service.url, **QUICK)
    with pytest.raises(TierstoreError) as raised:
        client.lookup("m", "f", [1], timeout_s=5)
    assert not isinstance(raised.value, Unreachable), "the service did answer"
    assert len(service.seen) == 1
    same(client.lookup("m", "f", [1]), rows(np.array([1])))


def test_a_refused_lookup_of_a_model_that_does_not_serve_is_not_ready(make: Make, service: FakeService) -> None:
    """Also where it serves again by the time that somebody could ask."""
    service.script = [Act(status=400), Act(status=400, headers={"Retry-After": "1"})]
    client = make(service.url)
    with pytest.raises(InvalidInput, match="refused"):
        client.lookup("m", "f", [1])
    with pytest.raises(NotReady, match="refused"):
        client.lookup("m", "f", [1])
    assert client.model("m").ready
    service.ready = False
    assert not client.model("m").ready


def test_no_service_is_unreachable(make: Make) -> None:
    client = make("http://127.0.0.1:1", **QUICK)
    for attempt in (client.ready, client.status, lambda: client.lookup("m", "f", [1])):
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            attempt()


# --- connections


def test_connections_are_kept_and_bounded(make: Make, service: FakeService) -> None:
    client = make(service.url, split_keys=10, parallel=8, max_connections=2)
    for _ in range(3):
        same(client.lookup("m", "f", np.arange(95)), rows(np.arange(95)))
    assert service.connections <= 2
    figures = client.figures()["connections"]
    assert figures["busy"] == 0
    assert 1 <= figures["idle"] <= figures["limit"] == 2


def test_many_calls_share_few_connections(make: Make, service: FakeService) -> None:
    client = make(service.url, split_keys=10, max_connections=2)
    keys = np.arange(35)
    if make.kind == "async":  # type: ignore[attr-defined]
        answers = client.together([lambda c: c.lookup("m", "f", keys)] * 20)
    else:
        answers = [None] * 20

        def ask(number: int) -> None:
            answers[number] = client.lookup("m", "f", keys)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for answer in answers:
        same(answer, rows(keys))
    assert service.connections <= 2
    assert client.figures()["connections"]["busy"] == 0


def test_who_waits_for_a_connection_keeps_to_the_deadline(make: Make, service: FakeService) -> None:
    service.script = [Act(how="hang")] * 3
    client = make(service.url, split_keys=10, max_connections=1)
    with pytest.raises(DeadlineExceeded):
        client.lookup("m", "f", np.arange(35), timeout_s=0.05)
    assert client.figures()["connections"]["busy"] == 0


def test_a_connection_that_the_service_closed_costs_no_repeat(make: Make, service: FakeService) -> None:
    client = make(service.url, retries=0)
    service.script = [Act(), Act(how="reset")]
    client.lookup("m", "f", [1])
    same(client.lookup("m", "f", [1]), rows(np.array([1])))
    assert client.figures()["repeats"]["taken"] == 0


def test_a_closed_client_says_so(make: Make, service: FakeService) -> None:
    client = make(service.url)
    client.lookup("m", "f", [1])
    if make.kind == "async":  # type: ignore[attr-defined]
        client.wait(client.client.close())
        client.wait(client.client.close())
    else:
        client.close()
        client.close()
    with pytest.raises(Closed):
        client.lookup("m", "f", [1])


# --- request ids


def test_an_error_names_the_request_that_the_services_log_names_too(make: Make, service: FakeService) -> None:
    client = make(service.url, retries=0)
    service.script = [Act(status=404)] * 3
    for given in ("user-7", None):
        with pytest.raises(NotFound) as raised:
            client.lookup("m", "f", [1], request_id=given)
        sent = service.seen[-1].headers["x-request-id"]
        assert raised.value.request_id == sent
        assert raised.value.__notes__ == [f"request id {sent}"]
        assert given in (None, sent)
    with pytest.raises(NotFound) as raised:
        client.predict("nobody", {"f": [1]}, request_id="user-8")
    assert raised.value.request_id == "user-8", "also where it is the metadata that fails"


def test_an_error_of_a_connection_that_was_refused_names_no_request_as_no_log_has_it(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable) as refused:
        make(f"http://127.0.0.1:{port}", retries=1, backoff_s=0.001).lookup("m", "f", [1], request_id="user-9")
    assert refused.value.request_id is None
    assert "request id" not in "".join(getattr(refused.value, "__notes__", []))


def test_an_error_of_another_verb_and_of_no_answer_names_its_request_too(make: Make, service: FakeService) -> None:
    client = make(service.url, retries=0)
    with pytest.raises(NotFound, match="no such path") as raised:
        client.activate("m", 1)
    assert raised.value.request_id
    service.script = [Act(how="reset")] * 2  # a used connection is tried once more
    with pytest.raises(Unreachable) as lost:
        client.lookup("m", "f", [1], request_id="user-9")
    assert lost.value.request_id == "user-9"
    with pytest.raises(InvalidInput) as ours:
        client.lookup("m", "f", "word")
    assert ours.value.request_id is None, "nothing was sent"
