"""The base of the data plane's HTTP applications: one request from its head to its response, counted once.

On the event loop a request is routed, and admitted once its body has come. Then a thread of its route's pool answers
it, or, where it has failed or never waits, the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
    take_body,
)
from tierstore.service.limits.shedding import WAITS_TOO_LONG, Caller, Gone
from tierstore.service.limits.worker_pool import ByteBudget, Reservation, WorkerPool

REFUSAL = ready_response(error_response(Overloaded(WAITS_TOO_LONG)))  # by a reactor, of a prediction


class HttpMessage(Message[Response], Protocol):
    """A look-up over HTTP, whose path says the model."""

    def receive(self, body: memoryview, caller: Caller) -> None:
        """Take the complete body."""


@dataclass(slots=True)
class Route:
    """How a request is answered: `answer`, on a thread of `pool`; None: at once, as it never waits.

    `body_limit`: the most bytes of its body; 0: it is not read. `setting` is the setting with this limit. `caller`: the
    one whose deadline counts while the request waits. `admit` charges the request once its body is there.
    """

    answer: Callable[[HttpRequest], Response]
    pool: WorkerPool | None = None
    body_limit: int = 0
    setting: str = ""
    caller: Caller | None = None
    admit: Callable[[HttpRequest], None] | None = None
    exchange: Exchange[Response] | None = None  # of a look-up


class HttpRequest:
    """A request to the data plane. One thread at a time.

    `refusal`: the answer to a caller that may not ask. `error`: what it is answered with, as it has failed.
    """

    __slots__ = ("application", "body", "error", "headers", "holding", "refusal", "route", "scope")

    def __init__(self, scope: Scope, application: ProtocolApplication, budget: ByteBudget) -> None:
        self.scope, self.application = scope, application
        # if a header comes twice the last one counts; Host and Origin are checked apart
        self.headers: Headers = dict(scope["headers"])
        self.holding = Reservation(budget)
        self.body = memoryview(b"")
        self.route: Route | None = None
        self.refusal: Response | None = None
        self.error: BaseException | None = None

    def take(self, body: memoryview | Exception) -> None:
        """Take the whole body, or what it has failed with, if it is wanted."""
        if self.route is None or not self.route.body_limit:
            return
        try:
            if isinstance(body, Exception):
                raise body
            self.body = take_body(body, self.headers, self.route.body_limit, self.holding, self.route.setting)
        except Exception as error:  # noqa: BLE001 - its answer
            self.error = error

    async def receive(self, receive: Receive) -> None:
        """`take` a body that may still come. Disconnected."""
        if self.route is None or not self.route.body_limit:
            return
        route = self.route
        try:
            self.body = await read_body(receive, self.headers, route.body_limit, self.holding, route.setting)
        except Disconnected:
            raise
        except Exception as error:  # noqa: BLE001 - its answer
            self.error = error

    def admit(self) -> WorkerPool | None:
        """Charge it. Returns the pool whose thread should answer it; None: it is to be answered now."""
        route = self.route
        if route is None or self.error is not None:
            return None
        try:
            if route.admit is not None:
                route.admit(self)
        except Exception as error:  # noqa: BLE001 - its answer
            self.error = error
            return None
        return route.pool


class ProtocolApplication:
    """The application of one protocol; a subclass implements how requests are answered. Keeps no state of a request."""

    PROTOCOL: str  # its label in the metrics

    def __init__(self, service: Service) -> None:
        self._service = service

    def route(self, request: HttpRequest) -> Route:
        """How a request is answered whose head has come."""
        raise NotImplementedError

    def answer(self, request: HttpRequest) -> Response | None:
        """The response to an admitted request, or to one that has failed; None: nobody waits for one. Any thread."""
        route, scope = request.route, request.scope
        try:
            if request.error is not None:
                raise request.error
            assert route is not None
            response = route.answer(request)
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            if route is not None and route.exchange is not None:
                route.exchange.fail(error)
            if isinstance(error, Gone):
                return None
            scope[ERROR] = error
            response = self._error(error)
            response.outcome = outcome_of(error)
        finally:
            request.holding.release()
        seconds = (time.perf_counter_ns() - scope[ARRIVED]) / 1e9
        self._service.request_times.add(self.PROTOCOL, response.outcome or http_outcome(response.status), seconds)
        return response

    # --- for subclasses

    def _look_up(self, request: HttpRequest, message: HttpMessage) -> Route:
        """The route of a look-up."""
        service, scope = self._service, request.scope
        caller = caller_of(scope, request.headers)
        exchange = Exchange(service, message, caller, request.headers.get(REQUEST_ID))
        scope[SPENT] = exchange.spent

        def admit(request: HttpRequest) -> None:
            message.receive(request.body, caller)
            exchange.admit(scope.get(FAILED))

        limit = service.settings.max_request
        return Route(lambda _: exchange.answer(), service.lookup_pool, limit, "max_request", caller, admit, exchange)

    def _error(self, error: BaseException) -> Response:
        """An error in the protocol's form."""
        return error_response(error)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD is allowed where GET is."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
