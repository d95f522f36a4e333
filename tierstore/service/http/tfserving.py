"""TensorFlow Serving's JSON interface, as a raw ASGI application below `/v1`.

Runs on one event loop, which reads bodies, sends responses, and answers small look-ups itself (`call.py`). Other look-ups
run on the look-up pool, and calls that may block for long on the admin pool.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from tierstore.access.rules import is_listed
from tierstore.errors import InvalidInput, NotFound, NotReady
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.tensors import Elements, shown
from tierstore.service.dataplane.view import View
from tierstore.service.http.application import ProtocolApplication, allow
from tierstore.service.http.call import DIRECT_JSON_BYTES, HttpCall
from tierstore.service.http.messages import (
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    json_response,
)
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.tfserving import documents
from tierstore.service.tfserving.json_messages import PredictBody, encode_answer, parse_predict, tensors_of
from tierstore.service.tfserving.request import request_of, room_for
from tierstore.service.tfserving.signature import DEFAULT


class PredictCall(HttpCall[PredictBody]):
    """One predict request, from its body to its response."""

    __slots__ = ("_elements",)

    _elements: list[Elements]

    def _parse_here(self) -> PredictBody | None:
        if len(self.body) > DIRECT_JSON_BYTES or b"content-encoding" in self.headers:
            return None
        return parse_predict(self.body)

    def _parse_all(self) -> PredictBody:
        return parse_predict(self._decoded())

    def _is_surely_large(self, parsed: PredictBody) -> bool:
        # the request depends on the view; but default outputs are those of the dense part where there is one
        if parsed.signature != DEFAULT or parsed.picked:
            return False
        return self.service.dataplane.scores(self.model)

    def _fits_here(self, parsed: PredictBody, plan: Plan) -> bool:
        return sum(spec.nbytes for spec in plan.specs) <= DIRECT_JSON_BYTES

    def _plane_request(self, parsed: PredictBody) -> AnyRequest:
        def request(view: View) -> Request:
            service = self.service
            tensors = tensors_of(parsed, service.signatures.of(self.model, view))
            made, self._elements = request_of(
                service.plan_cache, self.model, view, parsed.signature, tensors, parsed.picked
            )
            return made

        return request

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        self.holding.reserve(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        assert self._parsed is not None
        return Response(200, [encode_answer(self._parsed.rows, plan.specs, arrays)])


_PATH = re.compile(
    r"/v1/models(?:/(?P<model>[^/:]+))?(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(?:/(?P<metadata>metadata)|:(?P<verb>[a-z]+))?",
    re.ASCII | re.IGNORECASE,
)
_MAX_VERSION = (1 << 63) - 1


class TfsHttp(ProtocolApplication):
    """The ASGI application. Event loop only."""

    PROTOCOL = "tfs_http"

    def _call(self, scope: Scope, headers: Headers, holding: Reservation, began_ns: int) -> HttpCall[Any] | None:
        path = _path(scope)
        if path["verb"] is None:
            return None
        name, version, verb = path["model"], _version(path), path["verb"].lower()
        allow(scope["method"], "POST")
        self._service.dataplane.model(name)  # an unknown one is refused before its body is read
        if verb in ("classify", "regress"):
            raise InvalidInput(f"models here have no {verb} signature: ask for their outputs with :predict")
        if verb != "predict":
            raise NotFound(f"no such verb: {shown(path['verb'])}; expected predict")
        return PredictCall(self._service, name, version, headers, holding, caller_of(scope, headers, began_ns))

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Reservation) -> Response:
        path = _path(scope)
        name, version = path["model"], _version(path)
        allow(scope["method"], "GET")
        model = self._service.dataplane.model(name)
        if path["metadata"] is not None:
            return json_response(documents.metadata(model, version))
        document = await self._service.admin_pool.run(documents.status_document, self._service.store, name, version)
        return json_response(document)

    def _error(self, error: BaseException) -> Response:
        response = super()._error(error)
        if isinstance(error, NotReady):
            response.status = HTTPStatus.NOT_FOUND  # in this protocol, what is not served is not found
        return response


def _path(scope: Scope) -> re.Match[str]:
    path = _PATH.fullmatch(scope["path"])
    if path is None or not is_listed(scope["path"]):
        raise NotFound(f"no such path: {shown(scope['path'])}; expected /v1/models/{{model}}…")
    if path["model"] is None:
        raise InvalidInput("no model is named; expected /v1/models/{model}, and /v2/repository/index lists them all")
    return path


def _version(path: re.Match[str]) -> int | str | None:
    """The version or label that a path names."""
    label: str | None = path["label"]
    if path["version"] is None:
        return label
    digits = path["version"]
    if len(digits) > 19 or int(digits) > _MAX_VERSION:
        raise InvalidInput(f"version {shown(digits)} does not fit 64 bits")
    return int(digits)
