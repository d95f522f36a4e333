"""What the raw ASGI applications of the data plane share: one request from its headers to its answer, counted once.

Event loop only. Keeps no state of a request.
"""

from __future__ import annotations

import time

from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Gone
from tierstore.service.context import Service
from tierstore.service.http.messages import Disconnected, Headers, Receive, Response, Scope, Send, error_response
from tierstore.service.plane.plan import Elsewhere
from tierstore.service.plane.tensors import shown
from tierstore.service.status import HttpError, log_failure, outcome_of


class HttpFace:
    """The ASGI application of one protocol, which says how it is answered. Event loop only."""

    PROTOCOL: str  # its name among the figures

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_ns = time.perf_counter_ns()
        holding = Holding(self._service.inflight)
        # of a header that comes twice the last counts; the guard has seen to Host and Origin
        headers: Headers = dict(scope["headers"])
        try:
            try:
                response = await self._answer(scope, headers, receive, holding, began_ns)
            except (Disconnected, Gone):
                return
            except Elsewhere:
                raise  # of a worker process, to its owner
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                log_failure(error, f"{scope['method']} {scope['path']}")
                response = self._refused(error)
            await response.send(send)
        finally:
            holding.release()
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self._service.request_times.add(self.PROTOCOL, outcome_of(response.status), seconds)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, holding: Holding, began_ns: int
    ) -> Response:
        raise NotImplementedError

    def _refused(self, error: Exception) -> Response:
        """An error in the protocol's words."""
        return error_response(error)


def allow(method: str, allowed: str) -> None:
    """HttpError 405 for another method; HEAD goes where GET does."""
    if method != allowed and not (allowed == "GET" and method == "HEAD"):
        raise HttpError(405, f"method {shown(method)} is not allowed here; use {allowed}")
