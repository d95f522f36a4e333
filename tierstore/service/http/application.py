"""The base of the data plane's ASGI applications: one request from its headers to its response, counted once.

Event loop only. Keeps no state of a request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tierstore.access.roles import LOCAL
from tierstore.errors import TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.tensors import shown
from tierstore.service.error_status import HttpError, http_outcome
from tierstore.service.http.call import DIRECT_BODY_BYTES, Answered, HttpCall, PendingResponse
from tierstore.service.http.messages import (
    ARRIVED,
    ERROR,
    LATER,
    LEFT,
    PRINCIPAL,
    SPENT,
    Disconnected,
    Headers,
    Receive,
    Response,
    Scope,
    Send,
    error_response,
    read_body,
)
from tierstore.service.limits.shedding import Gone
from tierstore.service.limits.worker_pool import Reservation

_STARTED = "tierstore.begun"  # in a scope: the call that `at_once` has started, and its pending response


class ProtocolApplication:
    """The ASGI application of one protocol; a subclass says how requests are answered. Event loop only."""

    PROTOCOL: str  # its label in the metrics

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_at_once = min(DIRECT_BODY_BYTES, service.settings.max_request)

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        """The response to a POST whose `body` is complete, if it is a look-up that can be answered without waiting.

        None: the request is for `__call__`, which continues where this stopped.
        """
        if len(body) > self._most_at_once:
            return None
        began_ns: int = scope.get(ARRIVED) or time.perf_counter_ns()
        headers: Headers = dict(scope["headers"])
        holding = Reservation(self._service.inflight)
        waits = False
        try:
            call = self._call(scope, headers, holding, began_ns)
            if call is None:
                return None
            scope[SPENT] = call.spent
            holding.reserve(len(body))
            answer = self._begin(call, body, scope, self._answered(call, scope, began_ns))
            if not isinstance(answer, Response):
                waits = True
                if answer is None:
                    scope[LEFT] = True
                else:
                    scope[_STARTED] = call, answer
                return None
        except Gone:
            return None
        except Exception as error:  # noqa: BLE001 - as below
            answer = self._refused(error, scope)
        finally:
            if not waits:
                holding.release()
        self._count(answer, began_ns)
        return answer

    def _answered(self, call: HttpCall[Any], scope: Scope, began_ns: int) -> Answered | None:
        """What a thread of the pool is to do with the response of a call, or the error; None where the loop awaits it."""
        later = scope.get(LATER)
        if later is None:
            return None

        def answered(response: Response | None, error: BaseException | None) -> None:
            call.release()
            try:
                if error is None:
                    self._count_done(call)
                elif not isinstance(error, Gone):
                    if isinstance(error, TierstoreError):
                        self._count_failed(call, error)
                    response = self._refused(error, scope)
                first = later(response)
            finally:
                call.holding.release()
            if first and response is not None:
                self._count(response, began_ns)

        return answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started: tuple[HttpCall[Any], PendingResponse] | None = scope.get(_STARTED)
        if started is None:
            began_ns = scope.get(ARRIVED) or time.perf_counter_ns()
            holding = Reservation(self._service.inflight)
        else:
            began_ns, holding = started[0].caller.arrived_ns, started[0].holding
        try:
            try:
                if started is not None:
                    response = await self._await(*started)
                else:
                    response = await self._answer(scope, receive, holding, began_ns)
            except (Disconnected, Gone):
                return
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                response = self._refused(error, scope)
            await response.send(send)
        finally:
            holding.release()
        self._count(response, began_ns)

    async def _answer(self, scope: Scope, receive: Receive, holding: Reservation, began_ns: int) -> Response:
        # of a header that comes twice the last counts; Host and Origin were checked before
        headers: Headers = dict(scope["headers"])
        call = self._call(scope, headers, holding, began_ns)
        if call is None:
            return await self._document(scope, headers, receive, holding)
        scope[SPENT] = call.spent
        body = await read_body(receive, headers, self._service.settings.max_request, holding)
        answer = self._begin(call, body, scope)
        assert answer is not None
        return answer if isinstance(answer, Response) else await self._await(call, answer)

    # --- for subclasses

    def _call(self, scope: Scope, headers: Headers, holding: Reservation, began_ns: int) -> HttpCall[Any] | None:
        """The look-up that is requested, its body not read yet; None for any other request."""
        raise NotImplementedError

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Reservation) -> Response:
        """The response to a request that is no look-up."""
        raise NotImplementedError

    def _error(self, error: BaseException) -> Response:
        """An error in the protocol's words."""
        return error_response(error)

    # --- counted

    def _begin(
        self, call: HttpCall[Any], body: memoryview, scope: Scope, answered: Answered | None = None
    ) -> Response | PendingResponse | None:
        call.started_ns = time.perf_counter_ns()
        try:
            call.charge = self._service.rates.admit(scope.get(PRINCIPAL, LOCAL), call.model, len(body))
            answer = call.begin(body, answered)
        except TierstoreError as error:
            self._count_failed(call, error)
            raise
        if isinstance(answer, Response):
            self._count_done(call)
        return answer

    async def _await(self, call: HttpCall[Any], pending: PendingResponse) -> Response:
        try:
            # Where this task is cancelled, the thread goes on, because it has to release the view.
            response = await asyncio.shield(pending)
        except TierstoreError as error:
            self._count_failed(call, error)
            raise
        self._count_done(call)
        return response

    def _count_done(self, call: HttpCall[Any]) -> None:
        assert call.chosen is not None
        elapsed_ns = time.perf_counter_ns() - call.started_ns
        self._service.inference_stats.succeeded(call.model, call.chosen, elapsed_ns, call.spent)

    def _count_failed(self, call: HttpCall[Any], error: TierstoreError) -> None:
        if error.version is None:
            error.version = call.chosen
        self._service.count_failed(call.model, time.perf_counter_ns() - call.started_ns, error)

    def _refused(self, error: BaseException, scope: Scope) -> Response:
        scope[ERROR] = error
        return self._error(error)

    def _count(self, response: Response, began_ns: int) -> None:
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self._service.request_times.add(self.PROTOCOL, http_outcome(response.status), seconds)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD goes where GET does."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
