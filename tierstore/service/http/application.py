"""The base of the data plane's HTTP applications: one request from its headers to its response, counted once.

It begins on the event loop, and goes on on the thread that has a look-up's answer. Keeps no state of a request.
"""

from __future__ import annotations

import time
from typing import Protocol

from tierstore.errors import Overloaded, shown
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError, http_outcome, outcome_of
from tierstore.service.exchange import Exchange, Message
from tierstore.service.http.messages import (
    ARRIVED,
    ERROR,
    FAILED,
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
    ready_response,
)
from tierstore.service.limits.shedding import WAITS_TOO_LONG, Caller, Gone
from tierstore.service.limits.worker_pool import Reservation

REFUSAL = ready_response(error_response(Overloaded(WAITS_TOO_LONG)))  # by a reactor, of a prediction


class HttpMessage(Message[Response], Protocol):
    """A look-up over HTTP, whose path says the model."""

    def receive(self, body: memoryview, caller: Caller) -> None:
        """Take the complete body."""


class ProtocolApplication:
    """The application of one protocol; a subclass implements how requests are answered."""

    PROTOCOL: str  # its label in the metrics

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive) -> Response | None:
        began_ns: int = scope.get(ARRIVED) or time.perf_counter_ns()
        holding = Reservation(self._service.inflight)
        try:
            response = await self._answer(scope, receive, holding, began_ns)
        except (Disconnected, Gone):
            return None
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            scope[ERROR] = error
            response = self._error(error)
            response.outcome = outcome_of(error)
        finally:
            holding.release()
        self._count(response, began_ns)
        return response

    async def _answer(self, scope: Scope, receive: Receive, holding: Reservation, began_ns: int) -> Response:
        # if a header comes twice the last one counts; Host and Origin were checked before
        headers: Headers = dict(scope["headers"])
        message = self._lookup(scope, headers, holding)
        if message is None:
            return await self._document(scope, headers, receive, holding)
        caller = caller_of(scope, headers, began_ns)
        body = await read_body(receive, headers, self._service.settings.max_request, holding, "max_request")
        message.receive(body, caller)
        exchange = Exchange(self._service, message, caller, headers.get(REQUEST_ID))
        scope[SPENT] = exchange.spent
        response = exchange.begin(failed=scope.get(FAILED))
        return await exchange.handed_over() if response is None else response

    # --- for subclasses

    def _lookup(self, scope: Scope, headers: Headers, holding: Reservation) -> HttpMessage | None:
        """The requested look-up, its body not read yet; None for any other request."""
        raise NotImplementedError

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Reservation) -> Response:
        """The response to a request other than a look-up."""
        raise NotImplementedError

    def _error(self, error: BaseException) -> Response:
        """An error in the protocol's form."""
        return error_response(error)

    def _count(self, response: Response, began_ns: int) -> None:
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self._service.request_times.add(self.PROTOCOL, response.outcome or http_outcome(response.status), seconds)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD is allowed where GET is."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
