"""Connections that are long in coming: names that are not resolved, addresses that are silent, handshakes that stop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import Make, same
from tests.client.fake_service import FakeService, rows
from tierstore.client import AsyncClient
from tierstore.errors import DeadlineExceeded, Unreachable

Answer = Callable[[], list[tuple[str, int]]]


@pytest.fixture
def silent() -> Iterator[Callable[[str], tuple[str, int]]]:
    """Makes addresses at which no connection is ever made: those of listeners whose queues are full."""
    with ExitStack() as stack:

        def made(host: str) -> tuple[str, int]:
            listener = stack.enter_context(socket.create_server((host, 0), backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            address: tuple[str, int] = listener.getsockname()
            return address

        yield made


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What names resolve to, by name; others resolve as ever."""
    known: dict[str, Answer] = {}
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host not in known or options.get("flags", 0) & socket.AI_NUMERICHOST:
            return resolve(host, port, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in known[host]()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def refused_within(make: Make, url: str, timeout_s: float = 0.4, **options: Any) -> DeadlineExceeded:
    client = make(url, timeout_s=timeout_s, **options)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as raised:
        client.lookup("m", "f", [1])
    assert timeout_s <= time.monotonic() - began < 2 * timeout_s
    assert client.figures()["connections"]["busy"] == 0
    return raised.value


def refused_in_a_loop_of_its_own(url: str) -> float:
    """The seconds that the whole program takes."""

    async def ask() -> None:
        async with AsyncClient(url, timeout_s=0.2) as client:
            await client.ready()

    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        asyncio.run(ask())
    return time.monotonic() - began


def test_a_call_ends_in_time_whatever_number_of_addresses_is_silent(
    make: Make, silent: Callable[[str], tuple[str, int]], names: dict[str, Answer]
) -> None:
    addresses = [silent(f"127.0.0.{number}") for number in range(2, 6)]
    names["dead.test"] = lambda: addresses
    error = refused_within(make, "http://dead.test:80")
    assert "no service answers at http://dead.test" in str(error)
    refused_within(make, ",".join(f"http://{host}:{port}" for host, port in addresses))


def test_a_call_ends_in_time_though_its_name_is_not_resolved(make: Make, names: dict[str, Answer]) -> None:
    resolved, asked = threading.Event(), []

    def slowly() -> list[tuple[str, int]]:
        asked.append(threading.current_thread())
        resolved.wait(30)
        return []

    names["slow.test"] = slowly
    try:
        for _ in range(2):
            refused_within(make, "http://slow.test:80")
        assert len(asked) == 1, "a name that is being resolved is not asked for again"
        if make.kind == "async":  # type: ignore[attr-defined]
            assert refused_in_a_loop_of_its_own("http://slow.test:80") < 2.0, "and the loop ends without its thread"
    finally:
        resolved.set()


def test_an_address_that_is_silent_does_not_hide_the_one_that_answers(
    make: Make, service: FakeService, silent: Callable[[str], tuple[str, int]], names: dict[str, Answer]
) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    dead = [silent("127.0.0.2"), ("127.0.0.3", 1)]
    names["half.test"] = lambda: [*dead, (host, int(port))]
    client = make("http://half.test:80", timeout_s=3.0)
    same(client.lookup("m", "f", [1]), rows(np.array([1])))
    assert client.figures()["repeats"]["taken"] == 0


def test_a_call_ends_in_time_though_a_handshake_of_tls_stops(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refused_within(make, f"https://127.0.0.1:{listener.getsockname()[1]}")


def test_a_name_that_nobody_knows_is_unreachable(make: Make, names: dict[str, Answer]) -> None:
    def unknown() -> list[tuple[str, int]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    names["nobody.test"] = unknown
    for url in ("http://nobody.test", "http://" + "a" * 70 + ".test"):
        with pytest.raises(Unreachable, match=f"no service answers at {url}: "):
            make(url, retries=0).ready()
    names["nobody.test"] = list
    with pytest.raises(Unreachable, match=r"no service answers at http://nobody\.test: .*address"):
        make("http://nobody.test", retries=0).ready()
