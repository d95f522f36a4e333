"""The root application: `/v2` and `/v1` go to the data plane, `/upstream` to the routes for other nodes, all else to
the admin application.

Access is checked and requests are logged around all of it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import MutableMapping
from typing import Any

from tierstore.errors import TooLarge
from tierstore.service.access import Allow
from tierstore.service.admin.application import AdminApplication
from tierstore.service.context import Service
from tierstore.service.error_status import http_outcome
from tierstore.service.http.fronts import FrontsHttp
from tierstore.service.http.messages import Receive, Response, Scope, body_deadline, error_response
from tierstore.service.http.middleware import AccessCheck, RequestLogging
from tierstore.service.http.oip import OipHttp
from tierstore.service.http.tfserving import TfsHttp
from tierstore.types import NAME

ADMIN_BODY_BYTES = 1 << 20  # of any request but a delta
_PROTOCOL = "admin"
_DELTAS = re.compile(f"/admin/models/{NAME.pattern}/deltas")


class _Root:
    """Dispatches by path, and limits and counts requests to the admin application."""

    def __init__(self, service: Service, admin: AdminApplication) -> None:
        self._service = service
        self._oip = OipHttp(service)
        self._tfs = TfsHttp(service)
        self._fronts = FrontsHttp(service)
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive) -> Response | None:
        path: str = scope["path"]
        if path.startswith("/v2/") or path == "/v2":
            return await self._oip(scope, receive)
        if path.startswith("/v1/"):
            return await self._tfs(scope, receive)
        if path.startswith("/upstream/"):
            return await self._fronts(scope, receive)
        return await self._call_admin(scope, receive)

    async def _call_admin(self, scope: Scope, receive: Receive) -> Response:
        if asyncio.current_task() is None:
            await asyncio.sleep(0)  # FastAPI needs one
        began_s = time.perf_counter()
        status = 500
        is_delta = scope["method"] == "POST" and _DELTAS.fullmatch(scope["path"]) is not None
        remaining = sys.maxsize if is_delta else ADMIN_BODY_BYTES  # `max_delta` is checked where it is read
        # From here on: the admin interface may begin with the first request, and the connection is reset soon after.
        since, more = asyncio.get_running_loop().time(), True

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal remaining, more
            if not more:
                return await receive()
            async with body_deadline(since):
                message = await receive()
            remaining -= len(message.get("body", b""))
            more = message.get("more_body", False)
            if remaining < 0:
                raise _too_large()
            return message

        try:
            if _declared(scope) > remaining:
                response = error_response(_too_large())
            else:
                response = await self._admin(scope, bounded)
            status = response.status
            return response
        finally:
            self._service.request_times.add(_PROTOCOL, http_outcome(status), time.perf_counter() - began_s)


def _too_large() -> TooLarge:
    return TooLarge(f"the body has more than the {ADMIN_BODY_BYTES} bytes that are allowed")


def _declared(scope: Scope) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 19 else 0


def make_root(service: Service, admin: AdminApplication, allow: Allow) -> RequestLogging:
    """The whole service as one application; `allow` is called with the headers of callers whose look-ups reactors
    may answer too.
    """
    proxies = service.proxies
    checked = AccessCheck(_Root(service, admin), service.access, allow, service.store.audit, proxies)
    return RequestLogging(checked, service.request_log, proxies)
