"""The root application: `/v2` and `/v1` go to the data plane, the rest to the admin application, all of it behind the guard.

Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import Any

from tierstore.errors import TooLarge
from tierstore.service.context import Service
from tierstore.service.control.admin import make_app
from tierstore.service.http.guard import Guard
from tierstore.service.http.logged import Logged
from tierstore.service.http.messages import Receive, Response, Scope, Send, error_response
from tierstore.service.http.oip import OipHttp
from tierstore.service.http.tfs import TfsHttp
from tierstore.service.status import outcome_of

ADMIN_BODY_BYTES = 1 << 20  # of any request but a delta
_PROTOCOL = "admin"


class _Root:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._oip = OipHttp(service)
        self._tfs = TfsHttp(service)
        self._admin = make_app(service)

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        path: str = scope["path"]
        if path.startswith("/v2/"):
            return self._oip.at_once(scope, body)
        return self._tfs.at_once(scope, body) if path.startswith("/v1/") else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith("/v2/") or path == "/v2":
            await self._oip(scope, receive, send)
            return
        if path.startswith("/v1/"):
            await self._tfs(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = 500

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        left = ADMIN_BODY_BYTES

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise TooLarge(f"the body has more than the {ADMIN_BODY_BYTES} bytes that are allowed")
            return message

        try:
            if path.endswith("/deltas"):  # bounded by max_delta where it is read
                await self._admin(scope, receive, note)
            elif _declared(scope) > ADMIN_BODY_BYTES:
                await error_response(
                    TooLarge(f"the body has more than the {ADMIN_BODY_BYTES} bytes that are allowed")
                ).send(note)
            else:
                await self._admin(scope, bounded, note)
        finally:
            self._service.request_times.add(_PROTOCOL, outcome_of(status), time.perf_counter() - began_s)


def _declared(scope: Scope) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 19 else 0


def make_root(service: Service, allowed: Callable[[bytes], None]) -> Logged:
    """The whole service as one ASGI application; `allowed` is told of each value of Host that passes."""
    return Logged(Guard(_Root(service), service.settings, allowed), service.request_log)
