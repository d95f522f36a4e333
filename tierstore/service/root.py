"""The root application: `/v2` and `/v1` go to the data plane, `/upstream` to the routes for other nodes, deltas to
theirs, all else to the admin application.

Access is checked before all of it, and every request is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from tierstore.errors import TierstoreError, TooLarge
from tierstore.service.access import Allow
from tierstore.service.admin.application import AdminApplication
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError, http_outcome
from tierstore.service.http.application import HttpRequest
from tierstore.service.http.deltas import DeltasHttp
from tierstore.service.http.fronts import FrontsHttp
from tierstore.service.http.messages import (
    Disconnected,
    Receive,
    Response,
    Scope,
    body_deadline,
    error_response,
    failed_response,
)
from tierstore.service.http.middleware import AccessCheck, RequestLogging
from tierstore.service.http.oip import OipHttp
from tierstore.service.http.tfserving import TfsHttp

ADMIN_BODY_BYTES = 1 << 20  # of a request to the admin application
_PROTOCOL = "admin"


class Root:
    """The whole service, for every server.

    A request whose body has come is opened and admitted on the event loop, and answered by a thread; one for the admin
    application, and one whose body may still come, is awaited. `allow` is called with the headers of callers
    whose look-ups reactors may answer too.
    """

    def __init__(self, service: Service, admin: AdminApplication, allow: Allow) -> None:
        self._service = service
        self._access = AccessCheck(service.access, allow, service.store.audit, service.proxies)
        self._log = RequestLogging(service.request_log, service.proxies)
        self._applications = {"v2": OipHttp(service), "v1": TfsHttp(service), "upstream": FrontsHttp(service)}
        self._deltas, self._admin = DeltasHttp(service), admin

    # --- requests that threads answer

    def open(self, scope: Scope) -> HttpRequest | None:
        """Check access, and route a request; None if it is for the admin application. Event loop only."""
        path: str = scope["path"]
        application = self._applications.get(path[1:].partition("/")[0])
        if application is None and DeltasHttp.has(scope):
            application = self._deltas
        if application is None or path == "/v1" or path == "/upstream":
            return None
        request = HttpRequest(scope, application, self._service.inflight)
        request.refusal = self._access.refusal(scope)
        if request.refusal is None:
            try:
                request.route = application.route(request)
            except Exception as error:  # noqa: BLE001 - its answer
                request.error = error
        return request

    def begin(self, request: HttpRequest, done: Callable[[Response | None], None]) -> None:
        """Admit a request whose body has come, and have `done` called with its response: by a thread, or at once if it
        has failed or never waits. Event loop only.
        """
        pool = request.admit()
        if pool is None:
            done(self._answer(request))
            return

        def ended(response: Any, error: BaseException | None) -> None:
            if error is not None:  # it was not run
                request.error = error
                response = self._answer(request)
            done(response)

        assert request.route is not None
        try:
            pool.start(ended, self._answer, request, caller=request.route.caller)
        except TierstoreError as error:
            ended(None, error)

    def _answer(self, request: HttpRequest) -> Response | None:
        """The response, on whichever thread; None: nobody waits for one."""
        try:
            response = request.refusal  # which has its line in the audit
            if response is None:
                with self._access.attempt(request.scope) as attempt:
                    response = attempt.response = request.application.answer(request)
            self._log.note(request.scope, response)
        except Exception:  # noqa: BLE001 - the last place where an error can still be answered
            return failed_response(request.scope["path"])
        return response

    def cut_off(self, scope: Scope) -> Response:
        """The response to a request whose time is over; its thread's is dropped."""
        return self._log.cut_off(scope)

    # --- any request

    async def __call__(self, scope: Scope, receive: Receive) -> Response | None:
        """Answer a request whose body may still come."""
        try:
            request = self.open(scope)
            if request is not None:
                return await self._receive(request, receive)
            response = self._access.refusal(scope)
            if response is None:
                with self._access.attempt(scope) as attempt:
                    response = attempt.response = await self._call_admin(scope, receive)
        except asyncio.CancelledError:
            return self._log.cut_off(scope)
        self._log.note(scope, response)
        return response

    async def _receive(self, request: HttpRequest, receive: Receive) -> Response | None:
        try:
            await request.receive(receive)
        except Disconnected:
            if request.application is self._deltas:  # nobody waits for the answer, but the audit has it
                request.error = HttpError(400, "the body ended early")
                self._answer(request)
            request.holding.release()
            return None
        except asyncio.CancelledError:
            request.holding.release()
            raise
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Response | None] = loop.create_future()

        def done(response: Response | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
                loop.call_soon_threadsafe(_resolve, answered, response)

        self.begin(request, done)
        return await answered

    async def _call_admin(self, scope: Scope, receive: Receive) -> Response:
        began_s = time.perf_counter()
        status = 500
        remaining = ADMIN_BODY_BYTES
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


def _resolve(future: asyncio.Future[Response | None], response: Response | None) -> None:
    if not future.done():
        future.set_result(response)
