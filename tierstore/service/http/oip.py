"""The Open Inference Protocol v2 over HTTP, below `/v2`.

Look-ups are answered by threads of the look-up pool, what may take long by those of admin requests, the remainder, such
as health, on the event loop.
"""

from __future__ import annotations

from typing import Any

import orjson

from tierstore.access.rules import is_listed
from tierstore.arguments import as_version
from tierstore.errors import InvalidInput, NotFound, shown
from tierstore.service.context import PlanIndex, Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.http.application import REFUSAL, HttpRequest, ProtocolApplication, Route, allow
from tierstore.service.http.messages import (
    PEER,
    UNNAMED,
    UNPLANNED,
    Headers,
    Response,
    Scope,
    coded,
    decode_body,
    decoded,
    json_response,
    principal_of,
    to_parse,
)
from tierstore.service.limits.shedding import Caller
from tierstore.service.limits.worker_pool import Reservation, WorkerPool
from tierstore.service.protocols.oip import documents
from tierstore.service.protocols.oip.json_request import (
    HEADER_LENGTH,
    InferRequest,
    parse_raw,
    parse_request,
    read_elements,
    split_body,
)
from tierstore.service.protocols.oip.json_response import ResponseBody, ResponseLayout
from tierstore.service.protocols.oip.shared_memory import CudaRegions
from tierstore.service.reactor.plan_sources import HttpPlanSource

_BINARY = b"application/octet-stream"


class InferMessage:
    """An inference request over HTTP, as a `Message`. `teaches`: whether reactors should learn from it."""

    __slots__ = (
        "_answer",
        "_body",
        "_caller",
        "_headers",
        "_holding",
        "_layout",
        "_parsed",
        "_service",
        "_tail",
        "model",
        "teaches",
        "version",
    )

    _answer: ResponseBody
    _caller: Caller
    _layout: ResponseLayout
    _parsed: InferRequest
    _tail: memoryview | None  # the bytes behind the JSON

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
        self._service, self.model, self.version, self.teaches = service, model, version, teaches
        self._headers, self._holding = headers, holding
        self._body = memoryview(b"")

    def receive(self, body: memoryview, caller: Caller) -> None:
        self._body, self._caller = body, caller

    @property
    def nbytes(self) -> int:
        return len(self._body)

    @property
    def timeout_us(self) -> int | None:
        return self._parsed.timeout_us

    @property
    def request(self) -> AnyRequest:
        return self._parsed.request

    def parse(self) -> None:
        length = _header_length(self._headers)
        body = decoded(self._body, self._headers, self._service.settings.max_request, self._holding)
        if length == 0:
            self._tail = None
            self._parsed = parse_raw(body)
        else:
            header, self._tail = split_body(body, length)
            text = to_parse(header, self._service.settings.max_inflight, self._holding)
            self._parsed = parse_request(text, None if self._tail is None else len(self._tail))

    def opened(self, inference: Inference) -> None:
        self._layout = ResponseLayout(self._parsed, self.model, inference.plan)
        if self.teaches and self._service.plans is not None and isinstance(self._parsed.request, Request):
            self._teach(self._service.plans, inference)

    def _teach(self, plans: PlanIndex, inference: Inference) -> None:
        """Teach reactors to answer or begin requests like this one, or at least to refuse them if they would wait
        too long.
        """
        plan, view = inference.plan, inference.view
        if b"content-encoding" in self._headers:
            return
        text = self._body[: len(self._body) - len(self._tail or b"")]
        plan_source = HttpPlanSource(self.model, self.version, text, self._parsed, self._layout)
        plans.learn(self.model, view, self.version, plan, plan_source, None if plan.dense is None else REFUSAL)

    def read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        parsed, plan, raw = self._parsed, inference.plan, inference.raw
        regions = self._service.regions.of(self._caller.principal)
        self._layout.check_spans(regions)
        self._holding.reserve(plan.work_bytes + parsed.span_bytes)
        elements = [raw] if raw is not None else read_elements(parsed, self._tail, regions)
        self._answer = self._layout.allocate()
        return elements, self._answer.arrays

    def encode(self, plan: Plan, arrays: list[Any]) -> Response:
        chunks, header_bytes = self._answer.encode(self._service.regions.of(self._caller.principal))
        if header_bytes is None:
            return coded(Response(200, chunks), self._headers)
        return coded(Response(200, chunks, _BINARY, [(HEADER_LENGTH, b"%d" % header_bytes)]), self._headers)


def _header_length(headers: Headers) -> int | None:
    value = headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise InvalidInput(f"Inference-Header-Content-Length is {shown(value)}, expected a number of bytes")
    return int(value)


_ADMIN_BODY_BYTES = 1 << 20


class OipHttp(ProtocolApplication):
    """The HTTP application of the Open Inference Protocol."""

    PROTOCOL = "oip_http"

    def route(self, request: HttpRequest) -> Route:
        scope, service = request.scope, self._service
        path, method = scope["path"], scope["method"]
        if not is_listed(path):
            raise NotFound(f"no such path: {shown(path)}")
        parts = path.split("/")[2:]
        if len(parts) >= 3 and parts[0] == "models" and parts[-1] == "infer":
            allow(method, "POST")
            name, version = _model_path(parts[1:-1], path)
            service.dataplane.model(name)  # an unknown one is refused before its body is read
            teaches = scope.get(UNPLANNED, False)
            headers, holding = request.headers, request.holding
            return self._look_up(request, InferMessage(service, name, version, headers, holding, teaches=teaches))
        match [part for part in parts if part]:
            case ["repository", "models", *_]:
                pool: WorkerPool | None = service.switch_pool
            case ["repository" | "systemsharedmemory" | "cudasharedmemory", *_] | ["models", *_, "stats"]:
                pool = service.admin_pool
            case _:
                pool = None
        return Route(self._document, pool, _ADMIN_BODY_BYTES if method == "POST" else 0)

    # --- documents

    def _document(self, request: HttpRequest) -> Response:
        scope, body, headers = request.scope, request.body, request.headers
        method: str = scope["method"]
        parts = [part for part in scope["path"].split("/")[2:] if part]
        match parts:
            case []:
                allow(method, "GET")
                return json_response(documents.server_metadata(shared_memory=self._service.regions.enabled))
            case ["health", ("live" | "ready") as kind]:
                allow(method, "GET")
                return self._health(kind)
            case ["models", "stats"]:
                allow(method, "GET")
                return self._statistics(None, None)
            case ["models", _, "trace", "setting"] | ["trace", "setting"] | ["logging"]:
                raise InvalidInput(f"the {'logging' if parts == ['logging'] else 'trace'} extension is not served")
            case ["models", *path]:
                return self._model(scope, path)
            case ["repository", "index"]:
                allow(method, "POST")
                only_ready = _json_object(body, headers).get("ready") is True
                return json_response(documents.repository_index(self._service.store, only_ready))
            case ["repository", "models", name, ("load" | "unload") as verb]:
                allow(method, "POST")
                return self._repository(name, verb, _json_object(body, headers))
            case [("systemsharedmemory" | "cudasharedmemory") as kind, "region", name, verb] if name:
                return self._region(scope, kind.removesuffix("sharedmemory"), name, verb, body, headers)
            case [("systemsharedmemory" | "cudasharedmemory") as kind, ("status" | "unregister") as verb]:
                return self._region(scope, kind.removesuffix("sharedmemory"), None, verb, body, headers)
        raise NotFound(f"no such path: {shown(scope['path'])}")

    def _health(self, kind: str) -> Response:
        if kind == "live":
            return json_response({"live": True})
        ready, warming = self._service.ready, self._service.store.warming()
        document: dict[str, Any] = {} if warming is None else {"warming": warming}
        if unserved := self._service.unserved():
            document["unserved"] = unserved
        if self._service.awaits_grpc:
            document["compiling"] = True
        return json_response({"ready": ready, **document}, 200 if ready else 400)

    def _model(self, scope: Scope, path: list[str]) -> Response:
        verb = ""
        if path and path[-1] in ("ready", "stats", "config") and len(path) in (2, 4):
            verb = path.pop()
        name, version = _model_path(path, scope["path"])
        allow(scope["method"], "GET")
        dataplane = self._service.dataplane
        if verb == "ready":
            return Response(200 if documents.is_ready(dataplane, name, version) else 400)
        if verb == "config":
            return json_response(documents.model_config(dataplane, name, version))
        if verb == "stats":
            return self._statistics(name, version)
        return json_response(documents.model_metadata(dataplane, name, version))

    def _statistics(self, name: str | None, version: int | str | None) -> Response:
        service = self._service
        service.refresh()
        return json_response(documents.statistics(service.dataplane, service.inference_stats, name, version))

    def _region(
        self, scope: Scope, kind: Any, name: str | None, verb: str, body: memoryview, headers: Headers
    ) -> Response:
        """Shared memory of a kind, `system` or `cuda`: one of the caller's regions, or with `name` None all of them."""
        method, regions = scope["method"], self._service.regions.of(principal_of(scope))
        of_kind = CudaRegions if kind == "cuda" else regions
        if verb == "status":
            allow(method, "GET")
            return json_response(of_kind.status(name))
        allow(method, "POST")
        if verb == "unregister":  # served even if none can be registered: benchmarks always request it
            of_kind.unregister(name)
        elif verb == "register" and name is not None:
            document = _json_object(body, headers)
            if kind == "cuda":
                CudaRegions.register(name)
            size, on_host = document.get("byte_size"), scope.get(PEER, UNNAMED).on_host
            key, offset = document.get("key"), document.get("offset", 0)
            regions.register(name, key, offset, size, on_host=on_host)
        else:
            raise NotFound(f"no such path: a region has no {shown(verb)}; expected register, unregister or status")
        return Response(200)

    def _repository(self, name: str, verb: str, request: dict[str, Any]) -> Response:
        documents.check_whole(self._service.store, name)
        parameters = request.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidInput(f"expected parameters as an object, got {shown(parameters)}")
        documents.check_load_parameters(parameters)
        if verb == "load":
            documents.load(self._service.store, name)
        else:
            self._service.store.deactivate(name)
        return Response(200)


def _model_path(parts: list[str], path: str) -> tuple[str, int | str | None]:
    """(model, version) of `{model}` or `{model}/versions/{number or label}`, the `parts` of a `path`."""
    if len(parts) == 1:
        return parts[0], None
    if len(parts) != 3 or parts[1] != "versions":
        raise NotFound(f"no such path: {shown(path)}")
    return parts[0], as_version(parts[2])


def _json_object(body: memoryview, headers: Headers) -> dict[str, Any]:
    """The body of a request other than a look-up, as a JSON object; an empty body is an empty object."""
    if coding := headers.get(b"content-encoding"):
        body = decode_body(body, coding.strip().lower(), _ADMIN_BODY_BYTES, lambda nbytes: None)
    if not len(body):
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput("expected the request as a JSON object")
    return document
