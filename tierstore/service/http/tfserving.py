"""TensorFlow Serving's JSON interface, below `/v1`.

Look-ups are answered by threads of the look-up pool, other requests by those of admin requests.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from tierstore.access.rules import is_listed
from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput, NotFound, NotReady, shown
from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.http.application import REFUSAL, HttpRequest, ProtocolApplication, Route, allow
from tierstore.service.http.messages import (
    UNPLANNED,
    Headers,
    Response,
    Scope,
    coded,
    decoded,
    json_response,
    to_parse,
)
from tierstore.service.limits.shedding import Caller
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.protocols.tfserving import documents
from tierstore.service.protocols.tfserving.json_messages import PredictBody, encode_answer, parse_predict, tensors_of
from tierstore.service.protocols.tfserving.request import request_of, room_for
from tierstore.service.reactor.predict_plan_sources import RestPlanSource


class PredictMessage:
    """A predict request over HTTP, as a `Message`.

    `version`: as its path says; `teaches`: whether reactors should learn from it.
    """

    __slots__ = (
        "_body",
        "_elements",
        "_headers",
        "_holding",
        "_made",
        "_named",
        "_parsed",
        "_service",
        "model",
        "teaches",
        "version",
    )

    _elements: list[Elements]
    _made: Request
    _parsed: PredictBody
    timeout_us = None  # the protocol has none

    def __init__(
        self,
        service: Service,
        model: str,
        version: int | str | None,
        headers: Headers,
        holding: Reservation,
        *,
        teaches: bool,
    ) -> None:
        self._service, self._headers, self._holding = service, headers, holding
        self.model, self.version, self.teaches = model, version or None, teaches
        self._named = version
        self._body = memoryview(b"")

    def receive(self, body: memoryview, caller: Caller) -> None:
        self._body = body

    @property
    def nbytes(self) -> int:
        return len(self._body)

    def parse(self) -> None:
        settings = self._service.settings
        text = decoded(self._body, self._headers, settings.max_request, self._holding)
        self._parsed = parse_predict(to_parse(text, settings.max_inflight, self._holding))

    @property
    def request(self) -> AnyRequest:
        return self._request

    def _request(self, view: View) -> Request:
        parsed, service = self._parsed, self._service
        tensors = tensors_of(parsed, service.signatures.of(self.model, view))
        self._made, self._elements = request_of(view, parsed.signature, tensors, parsed.picked)
        return self._made

    def opened(self, inference: Inference) -> None:
        service, plan, view = self._service, inference.plan, inference.view
        if not self.teaches or service.plans is None or b"content-encoding" in self._headers:
            return
        plan_source = RestPlanSource(
            self.model, self._named, self._body, self._made, plan.specs, rows=self._parsed.rows
        )
        service.plans.learn(self.model, view, self.version, plan, plan_source, None if plan.dense is None else REFUSAL)

    def read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        self._holding.reserve(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def encode(self, plan: Plan, arrays: list[Any]) -> Response:
        return coded(Response(200, [encode_answer(self._parsed.rows, plan.specs, arrays)]), self._headers)


_PATH = re.compile(
    r"/v1/models(?:/(?P<model>[^/:]+))?(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(?:/(?P<metadata>metadata)|:(?P<verb>[a-z]+))?",
    re.ASCII | re.IGNORECASE,
)
_MAX_VERSION = (1 << 63) - 1


class TfsHttp(ProtocolApplication):
    """The HTTP application of TensorFlow Serving's interface."""

    PROTOCOL = "tfs_http"

    def route(self, request: HttpRequest) -> Route:
        scope, service = request.scope, self._service
        path = _path(scope)
        if path["verb"] is None:
            return Route(self._document, service.admin_pool)
        name, version, verb = path["model"], _version(path), path["verb"].lower()
        allow(scope["method"], "POST")
        service.dataplane.model(name)  # an unknown one is refused before its body is read
        if verb in ("classify", "regress"):
            raise InvalidInput(f"models here have no {verb} signature: request their outputs with :predict")
        if verb != "predict":
            raise NotFound(f"no such verb: {shown(path['verb'])}; expected predict")
        teaches, headers, holding = scope.get(UNPLANNED, False), request.headers, request.holding
        return self._look_up(request, PredictMessage(service, name, version, headers, holding, teaches=teaches))

    def _document(self, request: HttpRequest) -> Response:
        path, service = _path(request.scope), self._service
        name, version = path["model"], _version(path) or None
        allow(request.scope["method"], "GET")
        service.dataplane.model(name)
        if path["metadata"] is not None:
            return json_response(documents.metadata(service.dataplane, name, version))
        return json_response(documents.status_document(service.store, service.dataplane, name, version))

    def _error(self, error: BaseException) -> Response:
        response = super()._error(error)
        if isinstance(error, NotReady):
            response.status = HTTPStatus.NOT_FOUND  # in this protocol, a model that is not served is not found
        return response


def _path(scope: Scope) -> re.Match[str]:
    path = _PATH.fullmatch(scope["path"])
    if path is None or not is_listed(scope["path"]):
        raise NotFound(f"no such path: {shown(scope['path'])}; expected /v1/models/{{model}}…")
    if path["model"] is None:
        raise InvalidInput("no model is named; expected /v1/models/{model}, and /v2/repository/index lists them all")
    return path


def _version(path: re.Match[str]) -> int | str | None:
    """The version or label in a path; 0, which no version has, is what OpenVINO's client names where it means none."""
    label: str | None = path["label"]
    if path["version"] is None:
        return None if label is None else documents.checked_label(label)
    digits = path["version"]
    if len(digits) > 19 or int(digits) > _MAX_VERSION:
        raise InvalidInput(f"version {shown(digits)} does not fit 64 bits")
    return int(digits)
