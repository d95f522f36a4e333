"""What the raw ASGI applications of the data plane share: one request from its headers to its answer, counted once.

Event loop only. Keeps no state of a request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tierstore.errors import TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Gone
from tierstore.service.context import Service
from tierstore.service.http.call import DIRECT_BODY_BYTES, Coming, HttpCall
from tierstore.service.http.messages import (
    ARRIVED,
    ERROR,
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
from tierstore.service.plane.tensors import shown
from tierstore.service.status import HttpError, outcome_of

_BEGUN = "tierstore.begun"  # in a scope: the call that `at_once` has begun, and its answer to come


class HttpFace:
    """The ASGI application of one protocol, which says how it is answered. Event loop only."""

    PROTOCOL: str  # its name among the figures

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_at_once = min(DIRECT_BODY_BYTES, service.settings.max_request)

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        """The answer to a POST whose `body` is all there, if it is a look-up that need not wait for anything.

        None: the request is one for `__call__`, which goes on from where this has stopped.
        """
        if len(body) > self._most_at_once:
            return None
        began_ns: int = scope.get(ARRIVED) or time.perf_counter_ns()
        headers: Headers = dict(scope["headers"])
        holding = Holding(self._service.inflight)
        coming = None
        try:
            call = self._call(scope, headers, holding, began_ns)
            if call is None:
                return None
            scope[SPENT] = call.spent
            holding.take(len(body))
            answer = self._begin(call, body)
            if not isinstance(answer, Response):
                coming = scope[_BEGUN] = call, answer
                return None
        except Gone:
            return None
        except Exception as error:  # noqa: BLE001 - as below
            answer = self._refused(error, scope)
        finally:
            if coming is None:
                holding.release()
        self._count(answer, began_ns)
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: tuple[HttpCall[Any], Coming] | None = scope.get(_BEGUN)
        if begun is None:
            began_ns = scope.get(ARRIVED) or time.perf_counter_ns()
            holding = Holding(self._service.inflight)
        else:
            began_ns, holding = begun[0].caller.arrived_ns, begun[0].holding
        try:
            try:
                if begun is not None:
                    response = await self._come(*begun)
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

    async def _answer(self, scope: Scope, receive: Receive, holding: Holding, began_ns: int) -> Response:
        # of a header that comes twice the last counts; the guard has seen to Host and Origin
        headers: Headers = dict(scope["headers"])
        call = self._call(scope, headers, holding, began_ns)
        if call is None:
            return await self._document(scope, headers, receive, holding)
        scope[SPENT] = call.spent
        answer = self._begin(call, await read_body(receive, headers, self._service.settings.max_request, holding))
        return answer if isinstance(answer, Response) else await self._come(call, answer)

    # --- what a protocol says

    def _call(self, scope: Scope, headers: Headers, holding: Holding, began_ns: int) -> HttpCall[Any] | None:
        """The look-up that is asked for, its body not read yet; None if something else is."""
        raise NotImplementedError

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Holding) -> Response:
        """The answer to a request that is no look-up."""
        raise NotImplementedError

    def _error(self, error: Exception) -> Response:
        """An error in the protocol's words."""
        return error_response(error)

    # --- counted

    def _begin(self, call: HttpCall[Any], body: memoryview) -> Response | Coming:
        try:
            answer = call.begin(body)
        except TierstoreError as error:
            self._count_failed(call, error)
            raise
        if isinstance(answer, Response):
            self._count_done(call)
        return answer

    async def _come(self, call: HttpCall[Any], coming: Coming) -> Response:
        try:
            # Should whoever waits here be cancelled, the thread goes on: it is the one to leave the view.
            response = await asyncio.shield(coming)
        except TierstoreError as error:
            self._count_failed(call, error)
            raise
        self._count_done(call)
        return response

    def _count_done(self, call: HttpCall[Any]) -> None:
        assert call.chosen is not None
        elapsed_ns = time.perf_counter_ns() - call.started_ns
        self._service.infer_stats.succeeded(call.model, call.chosen, elapsed_ns, call.spent)

    def _count_failed(self, call: HttpCall[Any], error: TierstoreError) -> None:
        if error.version is None:
            error.version = call.chosen
        self._service.count_failed(call.model, time.perf_counter_ns() - call.started_ns, error)

    def _refused(self, error: Exception, scope: Scope) -> Response:
        scope[ERROR] = error
        return self._error(error)

    def _count(self, response: Response, began_ns: int) -> None:
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self._service.request_times.add(self.PROTOCOL, outcome_of(response.status), seconds)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD goes where GET does."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
