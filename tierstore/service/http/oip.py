"""The Open Inference Protocol v2 over HTTP, as a raw ASGI application below `/v2`.

Runs on one event loop, which gathers bodies, sends answers, and answers small look-ups itself (`call.py`); other
look-ups run on the look-up pool, whatever may block for long on the control pool.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson

from tierstore.errors import InvalidInput, NotFound
from tierstore.service.bounds.pool import Holding
from tierstore.service.http.call import HttpCall
from tierstore.service.http.face import HttpFace, allow
from tierstore.service.http.infer import InferCall
from tierstore.service.http.messages import (
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    decode_body,
    json_response,
    read_body,
)
from tierstore.service.oip import documents
from tierstore.service.oip.parameters import version_of
from tierstore.service.plane.tensors import shown

_CONTROL_BODY_BYTES = 1 << 20


class OipHttp(HttpFace):
    """The ASGI application. Event loop only."""

    PROTOCOL = "oip_http"

    def _call(self, scope: Scope, headers: Headers, holding: Holding, began_ns: int) -> HttpCall[Any] | None:
        parts = scope["path"].split("/")[2:]
        if len(parts) < 3 or parts[0] != "models" or parts[-1] != "infer":
            return None
        allow(scope["method"], "POST")
        name, version = _model_path(parts[1:-1])
        self._service.dataplane.model(name)  # an unknown one is refused before its body is read
        return InferCall(self._service, name, version, headers, holding, caller_of(scope, headers, began_ns))

    # --- documents

    async def _document(self, scope: Scope, headers: Headers, receive: Receive, holding: Holding) -> Response:
        method: str = scope["method"]
        body = memoryview(b"")
        if method == "POST":
            body = await read_body(receive, headers, _CONTROL_BODY_BYTES, holding)
        parts = [part for part in scope["path"].split("/")[2:] if part]
        match parts:
            case []:
                allow(method, "GET")
                return json_response(documents.server_metadata(shared_memory=self._service.regions.kinds))
            case ["health", ("live" | "ready") as kind]:
                allow(method, "GET")
                return self._health(kind)
            case ["models", "stats"]:
                allow(method, "GET")
                return await self._statistics(None, None)
            case ["models", _, "trace", "setting"] | ["trace", "setting"] | ["logging"]:
                raise InvalidInput(f"the {'logging' if parts == ['logging'] else 'trace'} extension is not served")
            case ["models", *rest]:
                return await self._model(method, rest)
            case ["repository", "index"]:
                allow(method, "POST")
                only_ready = _json_object(body, headers).get("ready") is True
                return json_response(
                    await self._service.control.run(documents.repository_index, self._service.store, only_ready)
                )
            case ["repository", "models", name, ("load" | "unload") as verb]:
                allow(method, "POST")
                return await self._repository(name, verb, _json_object(body, headers))
            case [("systemsharedmemory" | "cudasharedmemory") as kind, "region", name, verb] if name:
                return await self._region(method, kind.removesuffix("sharedmemory"), name, verb, body, headers)
            case [("systemsharedmemory" | "cudasharedmemory") as kind, ("status" | "unregister") as verb]:
                return await self._region(method, kind.removesuffix("sharedmemory"), None, verb, body, headers)
        raise NotFound(f"no such path: /v2/{shown('/'.join(parts))[1:-1]}")

    def _health(self, kind: str) -> Response:
        if kind == "live":
            return Response(200)
        ready, warming = self._service.ready, self._service.store.warming()
        status = 200 if ready else 400
        return Response(status) if warming is None else json_response({"ready": ready, "warming": warming}, status)

    async def _model(self, method: str, rest: list[str]) -> Response:
        verb = ""
        if rest and rest[-1] in ("ready", "stats", "config") and len(rest) in (2, 4):
            verb = rest.pop()
        name, version = _model_path(rest)
        allow(method, "GET")
        model = self._service.dataplane.model(name)
        if verb == "ready":
            return Response(200 if documents.is_ready(model, version) else 400)
        if verb == "config":
            return json_response(documents.model_config(model, version))
        if verb == "stats":
            return await self._statistics(name, version)
        return json_response(documents.model_metadata(model, version))

    async def _statistics(self, name: str | None, version: int | str | None) -> Response:
        service = self._service
        service.refresh()
        return json_response(documents.statistics(service.store, service.infer_stats, name, version))

    async def _region(
        self, method: str, kind: Any, name: str | None, verb: str, body: memoryview, headers: Headers
    ) -> Response:
        """Shared memory of a kind, `system` or `cuda`: one region, or with `name` None all of them."""
        regions = self._service.regions
        if verb == "status":
            allow(method, "GET")
            return json_response(regions.status(name, kind))
        allow(method, "POST")
        if verb == "unregister":  # where none can be registered too: benchmarks ask for it unconditionally
            await self._service.control.run(regions.unregister, name, kind)
        elif verb == "register" and name is not None:
            asked = _json_object(body, headers)
            if kind == "cuda":
                where = _handle(name, asked.get("raw_handle")), asked.get("device_id", 0), asked.get("byte_size")
                await self._service.control.run(regions.register_cuda, name, *where)
            else:
                place = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
                await self._service.control.run(regions.register, name, *place)
        else:
            raise NotFound(f"no such path: a region has no {shown(verb)}; expected register, unregister or status")
        return Response(200)

    async def _repository(self, name: str, verb: str, request: dict[str, Any]) -> Response:
        self._service.dataplane.model(name)
        parameters = request.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidInput(f"expected parameters as an object, came {shown(parameters)}")
        documents.check_load_parameters(parameters)
        if verb == "load":
            await self._service.change(documents.load, self._service.store, name)
        else:
            await self._service.change(self._service.store.deactivate, name)
        return Response(200)


def _handle(name: str, given: object) -> bytes:
    """The bytes of `{"b64": …}`."""
    text = given.get("b64") if isinstance(given, dict) else None
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise InvalidInput(
        f"region {shown(name)}: raw_handle is {shown(given)}, expected an IPC handle as {{'b64': base64}}"
    )


def _model_path(parts: list[str]) -> tuple[str, int | str | None]:
    """(model, version) of `{model}` or `{model}/versions/{number or label}`."""
    if len(parts) == 1:
        return parts[0], None
    if len(parts) != 3 or parts[1] != "versions":
        raise NotFound(f"no such path: /v2/models/{shown('/'.join(parts))[1:-1]}")
    return parts[0], version_of(parts[2])


def _json_object(body: memoryview, headers: Headers) -> dict[str, Any]:
    """A control request's body; an empty one counts as an empty object."""
    if coding := headers.get(b"content-encoding"):
        body = decode_body(body, coding.strip().lower(), _CONTROL_BODY_BYTES)
    if not len(body):
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput("expected the request as a JSON object")
    return document
