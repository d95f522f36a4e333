"""The last step of every answer of Python's over HTTP: the request's own id is sent back, and the log is told.

Event loop only; keeps no state of a request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from tierstore.engine.changes import ASKED_BY
from tierstore.service.http.guard import DataApp
from tierstore.service.http.messages import (
    ARRIVED,
    CONNECTION,
    ERROR,
    REQUEST_ID,
    SPENT,
    Receive,
    Response,
    Scope,
    Send,
)
from tierstore.service.request_log import RequestLog, shown

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Logged:
    """Wraps the whole application, refusals of the guard included."""

    def __init__(self, app: DataApp | App, log: RequestLog) -> None:
        self._app, self._log = app, log

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        began_ns = scope.get(ARRIVED) or time.perf_counter_ns()
        response = self._app.at_once(scope, body)  # type: ignore[union-attr]  # asked only of one that has it
        if response is not None:
            request_id = _id_of(scope)
            if request_id is not None:
                response.headers.append((REQUEST_ID, request_id))
            self._note(scope, response.status, began_ns, request_id)
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_ns = scope.get(ARRIVED) or time.perf_counter_ns()
        request_id = _id_of(scope)
        status = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if request_id is not None:
                    message = {**message, "headers": [*message["headers"], (REQUEST_ID, request_id)]}
            await send(message)

        if not scope["path"].startswith(("/v2/models/", "/v1/models/")):
            who = _client_of(scope) or "somebody"
            ASKED_BY.set(who if request_id is None else f"{who} (id {shown(request_id.decode('latin-1'))})")
        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if scope.get(ERROR) is not error:  # else it has been answered, and is logged here
                raise
        finally:
            if status:
                self._note(scope, status, began_ns, request_id)

    def _note(self, scope: Scope, status: int, began_ns: int, request_id: bytes | None) -> None:
        if status < 400 and not self._log.of_successes:
            return
        self._log.note(
            scope["method"],
            scope["path"],
            status,
            began_ns,
            request_id=None if request_id is None else request_id.decode("latin-1"),
            client=lambda: _client_of(scope),
            error=scope.get(ERROR),
            spent=scope.get(SPENT),
        )


def _id_of(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            found: bytes = value
            return found
    return None


def _client_of(scope: Scope) -> str | None:
    client = scope.get("client")
    if client is None:
        connection = scope.get(CONNECTION)
        client = None if connection is None else connection.client
    return None if client is None else address_of(*client[:2])


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
