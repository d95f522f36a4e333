"""Deltas over HTTP: `POST /admin/models/{model}/deltas`, answered by a thread of the admin pool.

Apart from the admin application, which would make a small delta a third dearer; its document of the interface describes
this path too (`admin/routes.py`).
"""

from __future__ import annotations

import re
from functools import partial

from tierstore.errors import Overloaded
from tierstore.service.error_status import HttpError, retry_after
from tierstore.service.http.application import HttpRequest, ProtocolApplication, Route
from tierstore.service.http.messages import (
    Response,
    Scope,
    json_response,
    principal_of,
    problem,
    problem_response,
)
from tierstore.service.limits.worker_pool import Reservation
from tierstore.types import NAME

DELTA_TYPE = "application/vnd.apache.arrow.stream"
_TYPES = DELTA_TYPE.encode(), b"application/octet-stream"
_PATH = re.compile(f"/admin/models/({NAME.pattern})/deltas")


class DeltasHttp(ProtocolApplication):
    """The application of deltas. Whichever limit is reached, the producer is told to slow down (429)."""

    PROTOCOL = "admin"

    @staticmethod
    def has(scope: Scope) -> bool:
        """Whether a request is one for this application."""
        return scope["method"] == "POST" and _PATH.fullmatch(scope["path"]) is not None

    def route(self, request: HttpRequest) -> Route:
        given = request.headers.get(b"content-type", _TYPES[0]).partition(b";")[0].strip().lower()
        if given not in _TYPES:
            raise HttpError(415, f"content type {given[:60].decode('latin-1')!r}: expected {DELTA_TYPE}")
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError(415, "deltas are not sent with a Content-Encoding")
        service, match = self._service, _PATH.fullmatch(request.scope["path"])
        assert match is not None
        model = match[1]
        request.holding = Reservation(service.delta_bytes)

        def admit(request: HttpRequest) -> None:
            service.rates.admit(principal_of(request.scope), model, len(request.body))

        answer = partial(self._apply, model)
        return Route(answer, service.admin_pool, service.settings.max_delta, "max_delta", admit=admit)

    def _apply(self, model: str, request: HttpRequest) -> Response:
        result = self._service.store.apply_delta(request.body, model=model)
        document = {"seq": result.seq, "applied": result.applied}
        if result.send_as is not None:
            document["send_as"] = result.send_as
        return json_response(document)

    def _error(self, error: BaseException) -> Response:
        if isinstance(error, Overloaded):
            return problem(429, str(error), {b"retry-after": retry_after(error) or b"1"})
        return problem_response(error)
