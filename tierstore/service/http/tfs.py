"""TensorFlow Serving's REST interface, as a raw ASGI application below `/v1`.

Runs on one event loop, which gathers bodies, sends answers, and answers small look-ups itself (`call.py`); other
look-ups run on the look-up pool, whatever may block for long on the control pool.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from tierstore.errors import InvalidInput, NotFound, NotReady
from tierstore.service.bounds.pool import Holding
from tierstore.service.http.call import HttpCall
from tierstore.service.http.face import HttpFace, allow
from tierstore.service.http.messages import (
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    json_response,
)
from tierstore.service.http.predict import PredictCall
from tierstore.service.plane.tensors import shown
from tierstore.service.tfs import models, signature

_PATH = re.compile(
    r"/v1/models(?:/(?P<model>[^/:]+))?(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(?:/(?P<metadata>metadata)|:(?P<verb>[a-z]+))?",
    re.ASCII | re.IGNORECASE,
)
_MAX_VERSION = (1 << 63) - 1


class TfsHttp(HttpFace):
    """The ASGI application. Event loop only."""

    PROTOCOL = "tfs_http"

    def _call(self, scope: Scope, headers: Headers, holding: Holding, began_ns: int) -> HttpCall[Any] | None:
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

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Holding) -> Response:
        path = _path(scope)
        name, version = path["model"], _version(path)
        allow(scope["method"], "GET")
        model = self._service.dataplane.model(name)
        if path["metadata"] is not None:
            return json_response(signature.metadata(model, version))
        document = await self._service.control.run(models.status_document, self._service.store, name, version)
        return json_response(document)

    def _error(self, error: Exception) -> Response:
        response = super()._error(error)
        if isinstance(error, NotReady):
            response.status = HTTPStatus.NOT_FOUND  # what is not served is not there, in these words
        return response


def _path(scope: Scope) -> re.Match[str]:
    path = _PATH.fullmatch(scope["path"])
    if path is None:
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
