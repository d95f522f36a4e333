"""TensorFlow Serving's REST interface, as a raw ASGI application below `/v1`.

Runs on one event loop, which gathers bodies, sends answers, and answers small look-ups itself (`predict.py`); other
look-ups run on the look-up pool, whatever may block for long on the control pool.
"""

from __future__ import annotations

import re
import time
from http import HTTPStatus

from tierstore.errors import InvalidInput, NotFound, NotReady, TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.http.face import HttpFace, allow
from tierstore.service.http.messages import (
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    json_response,
    read_body,
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

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, holding: Holding, began_ns: int
    ) -> Response:
        path = _PATH.fullmatch(scope["path"])
        if path is None:
            raise NotFound(f"no such path: {shown(scope['path'])}; expected /v1/models/{{model}}…")
        name, verb = path["model"], path["verb"]
        if name is None:
            raise InvalidInput(
                "no model is named; expected /v1/models/{model}, and /v2/repository/index lists them all"
            )
        version = _version(path)
        allow(scope["method"], "GET" if verb is None else "POST")
        model = self._service.dataplane.model(name)  # an unknown one is refused before its body is read
        if verb is None:
            if path["metadata"] is not None:
                return json_response(signature.metadata(model, version))
            document = await self._service.control.run(models.status_document, self._service.store, name, version)
            return json_response(document)
        if verb.lower() in ("classify", "regress"):
            raise InvalidInput(f"models here have no {verb.lower()} signature: ask for their outputs with :predict")
        if verb.lower() != "predict":
            raise NotFound(f"no such verb: {shown(verb)}; expected predict")
        caller = caller_of(scope, headers, began_ns)
        body = await read_body(receive, headers, self._service.settings.max_request, holding)
        return await self._predict(name, version, body, headers, holding, caller)

    def _refused(self, error: Exception) -> Response:
        response = super()._refused(error)
        if isinstance(error, NotReady):
            response.status = HTTPStatus.NOT_FOUND  # what is not served is not there, in these words
        return response

    async def _predict(
        self,
        name: str,
        version: int | str | None,
        body: memoryview,
        headers: Headers,
        holding: Holding,
        caller: Caller,
    ) -> Response:
        service = self._service
        began_ns = time.perf_counter_ns()
        call = PredictCall(service, name, version, body, headers, holding, caller)
        try:
            response, served = await call.run()
        except TierstoreError as error:
            if error.version is None:
                error.version = call.chosen
            service.count_failed(name, time.perf_counter_ns() - began_ns, error)
            raise
        service.infer_stats.succeeded(name, served, time.perf_counter_ns() - began_ns, call.spent)
        return response


def _version(path: re.Match[str]) -> int | str | None:
    """The version or label that a path names."""
    label: str | None = path["label"]
    if path["version"] is None:
        return label
    digits = path["version"]
    if len(digits) > 19 or int(digits) > _MAX_VERSION:
        raise InvalidInput(f"version {shown(digits)} does not fit 64 bits")
    return int(digits)
