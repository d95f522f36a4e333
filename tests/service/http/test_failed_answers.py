"""Requests whose answer cannot be made or sent: the client hears of it, and waits for no answer that never comes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service import http2_client as h2
from tierstore.service.http import handoff
from tierstore.service.server import ServerThread

LIVE = "/v2/health/live"


def failing(monkeypatch: pytest.MonkeyPatch, what: str, times: int) -> None:
    """Have a part of `handoff` fail so many times."""
    work, calls = getattr(handoff, what), list[int]()

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise RuntimeError("injected failure")
        return work(*arguments, **options)

    monkeypatch.setattr(handoff, what, fails)


def test_an_answer_that_cannot_be_sent_becomes_an_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, "response_head", 1)
    assert http.get(LIVE, timeout=20).status_code == 500
    assert [record.exc_text for record in caplog.records if "injected failure" in str(record.exc_info)]
    assert http.get(LIVE).status_code == 200


@pytest.mark.parametrize("what", ["response_head", "scope_of"])
def test_a_connection_that_nothing_can_be_answered_on_is_closed(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, what, 1000)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            http.get(LIVE, timeout=20)
    assert http.get(LIVE).status_code == 200


@pytest.mark.parametrize("what", ["date_now", "scope_of"])
def test_a_stream_that_nothing_can_be_answered_on_is_reset(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with h2.Client(server.port) as client:
        with monkeypatch.context() as patch:
            failing(patch, what, 1000)
            client.send(h2.get(1, LIVE))
            assert client.until(h2.RST_STREAM) is not None
        client.send(h2.get(3, LIVE))
        assert client.until(h2.HEADERS) is not None
