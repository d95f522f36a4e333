"""How many HTTP connections there are, and what those beyond the limit are told.

A connection beyond `limit` is let in to have its first request refused in the words of that request's protocol, and is
closed then; of those there are `REFUSED_AT_ONCE` at a time, further ones are closed without a word. Event loop only.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric

from tierstore.errors import Overloaded
from tierstore.service.context import Service
from tierstore.service.http.logged import Logged
from tierstore.service.http.messages import Receive, Scope, Send, error_response
from tierstore.service.http.problem import answer_error

REFUSED_AT_ONCE = 256
REFUSED_S = 5.0  # for the request of a connection that is refused to arrive
_DRAINED_BYTES = 1 << 20  # of its body: a connection that is closed with bytes unread loses the answer too
MOST_FILES = 1 << 16


def raise_file_limit() -> None:
    """Let this process open as many files as it may, within reason: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(max_connections: int) -> int:
    """The setting, or half of the files that this process may open if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if soft == resource.RLIM_INFINITY else max(1, min(max_connections, soft // 2))


class Served(Protocol):
    """Who counts connections that are served, wherever that is."""

    @property
    def open(self) -> int: ...
    def count_other(self, connections: int) -> None: ...


class Door:
    """Counts connections; also the ASGI application of those that are refused."""

    def __init__(self, service: Service, limit: int, served: Served) -> None:
        """`served` has counted connections in, or refused them, before they come here."""
        self._service, self.limit, self._served = service, limit, served
        self.refused = 0  # those that are being refused
        self.app = Logged(self, service.request_log)

    @property
    def open(self) -> int:
        return self._served.open

    def enter(self, *, refused: bool = False) -> bool | None:
        """For a connection that came: whether it is served; None: close it at once. `leave` follows unless None."""
        if not refused:
            return True
        self._service.shed.count("connections")
        if self.refused >= REFUSED_AT_ONCE:
            return None
        self.refused += 1
        return False

    def leave(self, served: bool) -> None:
        if served:
            self._served.count_other(-1)
        else:
            self.refused -= 1

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        yield GaugeMetricFamily("tierstore_connections", "HTTP connections that are open.", value=self.open)
        yield GaugeMetricFamily("tierstore_connections_limit", "HTTP connections that may be open.", value=self.limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = Overloaded(
            f"{self.limit} connections are open, as many as there may be; use one for many requests, and try again in a second"
        )
        path: str = scope["path"]
        data_plane = path.startswith(("/v2", "/v1"))
        protocol = "oip_http" if path.startswith("/v2") else "tfs_http" if path.startswith("/v1") else "admin"
        self._service.request_times.add(protocol, "overloaded", 0.0)

        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await _drain(receive)
        if data_plane:
            await error_response(error).send(closing)
        else:
            await answer_error(error)(scope, receive, closing)


async def _drain(receive: Receive) -> None:
    left = _DRAINED_BYTES
    try:
        async with asyncio.timeout(REFUSED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
