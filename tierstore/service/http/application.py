"""The base of the data plane's applications: one request from its headers to its response, counted once.

Event loop only. Keeps no state of a request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, TypeAlias

from tierstore.service.context import Service
from tierstore.service.dataplane.tensors import shown
from tierstore.service.error_status import HttpError, http_outcome, outcome_of
from tierstore.service.exchange import DIRECT_BYTES, Answered, Exchange, Message
from tierstore.service.http.messages import (
    ARRIVED,
    ERROR,
    FAILED,
    LATER,
    LEFT,
    REQUEST_ID,
    SPENT,
    Disconnected,
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    error_response,
    read_body,
)
from tierstore.service.limits.shedding import Caller, Gone
from tierstore.service.limits.worker_pool import Reservation

_STARTED = "tierstore.begun"  # in a scope: what `at_once` has started, what it holds, and its pending response
PendingResponse: TypeAlias = "asyncio.Future[Response]"  # that a thread will give


class HttpMessage(Message[Response], Protocol):
    """A look-up over HTTP, whose path says the model."""

    def receive(self, body: memoryview, caller: Caller) -> None:
        """Take the body, which is complete."""


class ProtocolApplication:
    """The application of one protocol; a subclass says how requests are answered. Event loop only."""

    PROTOCOL: str  # its label in the metrics

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_at_once = min(DIRECT_BYTES, service.settings.max_request)

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        """The response to a POST whose `body` is complete, if it is a look-up that can be answered without waiting.

        None: the request is for `__call__`, which continues where this stopped.
        """
        if len(body) > self._most_at_once:
            return None
        began_ns: int = scope.get(ARRIVED) or time.perf_counter_ns()
        holding = Reservation(self._service.inflight)
        waits = False
        try:
            headers: Headers = dict(scope["headers"])
            message = self._lookup(scope, headers, holding)
            if message is None:
                return None
            caller = caller_of(scope, headers, began_ns)
            holding.reserve(len(body))
            exchange = self._exchange(scope, message, body, caller, headers)
            answer = exchange.begin(failed=scope.get(FAILED))
            if answer is None:
                pending = exchange.hand_over(self._answered(exchange, holding, scope))
                waits = True
                if pending is None:
                    scope[LEFT] = True
                else:
                    scope[_STARTED] = exchange, holding, pending
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

    def _answered(self, exchange: Exchange[Response], holding: Reservation, scope: Scope) -> Answered | None:
        """What a thread of the pool is to do with the response, or the error; None where the loop awaits it."""
        later = scope.get(LATER)
        if later is None:
            return None

        def answered(response: Response | None, error: BaseException | None) -> None:
            try:
                if error is not None:
                    exchange.fail(error)
                    response = None if isinstance(error, Gone) else self._refused(error, scope)
                first = later(response)
            finally:
                holding.release()
            if first and response is not None:
                self._count(response, exchange.caller.arrived_ns)

        return answered

    async def __call__(self, scope: Scope, receive: Receive) -> Response | None:
        started: tuple[Exchange[Response], Reservation, PendingResponse] | None = scope.get(_STARTED)
        if started is None:
            began_ns = scope.get(ARRIVED) or time.perf_counter_ns()
            holding = Reservation(self._service.inflight)
        else:
            exchange, holding, pending = started
            began_ns = exchange.caller.arrived_ns
        try:
            if started is not None:
                response = await self._await(exchange, pending)
            else:
                response = await self._answer(scope, receive, holding, began_ns)
        except (Disconnected, Gone):
            return None
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            response = self._refused(error, scope)
        finally:
            holding.release()
        self._count(response, began_ns)
        return response

    async def _answer(self, scope: Scope, receive: Receive, holding: Reservation, began_ns: int) -> Response:
        # of a header that comes twice the last counts; Host and Origin were checked before
        headers: Headers = dict(scope["headers"])
        message = self._lookup(scope, headers, holding)
        if message is None:
            return await self._document(scope, headers, receive, holding)
        caller = caller_of(scope, headers, began_ns)
        body = await read_body(receive, headers, self._service.settings.max_request, holding, "max_request")
        exchange = self._exchange(scope, message, body, caller, headers)
        response = exchange.begin(failed=scope.get(FAILED))
        if response is not None:
            return response
        pending = exchange.hand_over()
        assert pending is not None
        return await self._await(exchange, pending)

    def _exchange(
        self, scope: Scope, message: HttpMessage, body: memoryview, caller: Caller, headers: Headers
    ) -> Exchange[Response]:
        message.receive(body, caller)
        exchange = Exchange(self._service, message, caller, headers.get(REQUEST_ID))
        scope[SPENT] = exchange.spent
        return exchange

    # --- for subclasses

    def _lookup(self, scope: Scope, headers: Headers, holding: Reservation) -> HttpMessage | None:
        """The look-up that is requested, its body not read yet; None for any other request."""
        raise NotImplementedError

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Reservation) -> Response:
        """The response to a request that is no look-up."""
        raise NotImplementedError

    def _error(self, error: BaseException) -> Response:
        """An error in the protocol's words."""
        return error_response(error)

    async def _await(self, exchange: Exchange[Response], pending: PendingResponse) -> Response:
        try:
            # Where this task is cancelled, the thread goes on, because it has to release the view.
            return await asyncio.shield(pending)
        except Exception as error:
            exchange.fail(error)
            raise

    def _refused(self, error: BaseException, scope: Scope) -> Response:
        scope[ERROR] = error
        response = self._error(error)
        response.outcome = outcome_of(error)
        return response

    def _count(self, response: Response, began_ns: int) -> None:
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self._service.request_times.add(self.PROTOCOL, response.outcome or http_outcome(response.status), seconds)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD goes where GET does."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
