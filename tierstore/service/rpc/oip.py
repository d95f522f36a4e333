"""`inference.GRPCInferenceService`: the Open Inference Protocol v2 over gRPC, with the extensions of Triton's clients.

Documents are those of `oip/documents.py`, as messages. Methods run on the threads of the server's pools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
from google.protobuf import json_format

from tierstore.access.roles import LOCAL
from tierstore.errors import DeadlineExceeded, InvalidInput, NotFound
from tierstore.service.access import CALLER, check_model
from tierstore.service.context import Service
from tierstore.service.dataplane.datatypes import BYTES
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.plan_cache import MOST_CACHED_BYTES
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.error_status import Cancelled, Unserved, message_of
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.oip import documents
from tierstore.service.oip.parameters import version_of
from tierstore.service.oip.shared_memory import Regions
from tierstore.service.rpc.caller import CALL_OF
from tierstore.service.rpc.lookup import DIRECT_BYTES, DIRECT_META_BYTES, answer
from tierstore.service.rpc.methods import (
    Accounts,
    Context,
    Servicer,
    by_message,
    caller_in,
    check_waited_for,
    principal_in,
)
from tierstore.service.rpc.oip_messages import ResponseLayout, RpcRequest, parse_request, read_elements, split_message
from tierstore.service.rpc.protobuf import Frame, Parts, length_delimited, message_class, service_descriptor

FRAME_BYTES = 24  # the first bytes of a message; with its length they say which frame it may have


class InferCall:
    """A ModelInferRequest, from its message to its answer, as an `RpcCall`. `extra` are further serialized fields of the answer."""

    __slots__ = (
        "_extra",
        "_frame_key",
        "_framed",
        "_id",
        "_layout",
        "_message",
        "_parsed",
        "_parts",
        "_raw",
        "_service",
        "model",
        "principal",
        "request",
        "short",
        "version",
    )  # fmt: skip

    def __init__(self, service: Service, message: bytes, extra: bytes = b"") -> None:
        self._service, self._message, self._extra = service, message, extra
        self.short = len(message) <= DIRECT_BYTES
        self._parsed: RpcRequest
        self._parts: Parts
        self._layout: ResponseLayout
        self.principal = LOCAL
        self.model: str
        self.version: int | str | None
        self.request: Request
        self._frame_key = ("frame", len(message), message[:FRAME_BYTES])
        cached = service.plan_cache.find(self._frame_key)
        if cached is not None:
            frame, parsed = cached
            raw = frame.raw_of(message)
            if raw is not None:
                self._framed, self._parsed, self._raw, self._id = True, parsed, raw, b""
                return
        self._framed = False
        parts = self._parts = split_message(message)
        self._raw, self._id = parts.raw, parts.id
        self.short = self.short and len(parts.meta) <= DIRECT_META_BYTES

    def parse(self) -> None:
        if not self._framed:
            self._parsed = self._parse()
        parsed = self._parsed
        self.model, self.version, self.request = parsed.model, parsed.version, parsed.request

    def _parse(self) -> RpcRequest:
        """`parse_request`, or its earlier result for a message that differs only in its data, or in its id and its data."""
        parts, cache = self._parts, self._service.plan_cache
        key = (bool(parts.raw), parts.meta)
        parsed: RpcRequest | None = cache.find(key)
        if parsed is None:
            parsed = parse_request(parts.meta, raw=bool(parts.raw))
            if len(parts.meta) > MOST_CACHED_BYTES or not parsed.reusable:
                return parsed
            if self._has_frame(parsed):
                cache.keep(self._frame_key, (Frame(self._message, parts.positions), parsed))
            else:
                cache.keep(key, parsed)
        return parsed

    def _has_frame(self, parsed: RpcRequest) -> bool:
        """Whether the length and the first bytes identify a message like this, whatever its data are."""
        if self._id or any(spec.datatype == BYTES for spec in parsed.request.inputs):
            return False
        return len(self._message) >= FRAME_BYTES and all(start >= FRAME_BYTES for start, _ in self._parts.positions)

    def plane_request(self, waited_ns: int, holding: Reservation) -> AnyRequest:
        timeout_us = self._parsed.timeout_us
        if timeout_us is not None and waited_ns >= timeout_us * 1000:
            raise DeadlineExceeded(f"the request waited longer than its timeout of {timeout_us} microseconds")
        return self._parsed.request

    def read(self, inference: Inference, holding: Reservation) -> tuple[Sequence[Elements], list[Any]]:
        parsed = self._parsed
        layout = self._layout = _layout_of(parsed, inference.plan)
        regions = self._service.regions.of(self.principal)
        layout.check_spans(regions)
        holding.reserve(inference.plan.work_bytes + parsed.span_bytes)
        return read_elements(parsed, self._raw, regions), layout.allocate()

    def encode(self, inference: Inference) -> bytes:
        regions = self._service.regions.of(self.principal)
        return self._layout.encode(self._id, inference.arrays, regions, self._extra)


def _layout_of(parsed: RpcRequest, plan: Plan) -> ResponseLayout:
    layout: Any = plan.memo
    if layout is None:
        layout = plan.memo = ResponseLayout(parsed, plan)
    assert isinstance(layout, ResponseLayout)
    return layout


NAME = "inference.GRPCInferenceService"
PROTOCOL = "oip_grpc"
_SWITCHES = ("RepositoryModelLoad", "RepositoryModelUnload")
_HEALTH = ("ServerLive", "ServerReady")

_StreamAnswer = message_class("inference.ModelStreamInferResponse")


def _final_response() -> bytes:
    """Serialized: the parameter that says to a streaming client that a request has no further answer."""
    answer = message_class("inference.ModelInferResponse")()
    answer.parameters["triton_final_response"].bool_param = True
    fields: bytes = answer.SerializeToString()
    return fields


_FINAL = _final_response()
_STREAMED = bytes([_StreamAnswer.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2])


class InferenceService:
    """The methods, over the parts of `service`. Any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._methods = {method.name: method for method in service_descriptor(NAME).methods}
        controls: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": service.ready},
            "ModelReady": lambda request: {
                "ready": documents.is_ready(self._model(request.name), _version(request.version))
            },
            "ServerMetadata": lambda _: documents.server_metadata(shared_memory=service.regions.kinds),
            "ModelMetadata": lambda request: documents.model_metadata(
                self._model(request.name), _version(request.version)
            ),
            "ModelConfig": lambda request: {
                "config": documents.model_config(self._model(request.name), _version(request.version))
            },
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": lambda request: {
                "regions": {region["name"]: region for region in self._regions().status(request.name or None)}
            },
            "SystemSharedMemoryRegister": lambda request: self._regions().register(
                request.name, request.key, request.offset, request.byte_size, on_host=CALL_OF.get().on_host
            ),
            "SystemSharedMemoryUnregister": lambda request: self._regions().unregister(request.name or None, "system"),
            "CudaSharedMemoryStatus": self._cuda_regions,
            "CudaSharedMemoryRegister": lambda request: self._regions().register_cuda(
                request.name, request.raw_handle, request.device_id, request.byte_size, on_host=CALL_OF.get().on_host
            ),
            # served even where none can be registered: benchmarks request it unconditionally
            "CudaSharedMemoryUnregister": lambda request: self._regions().unregister(request.name or None, "cuda"),
            "TraceSetting": _unserved("trace"),
            "LogSettings": _unserved("logging"),
        }
        methods = {name: self._control(name, method) for name, method in controls.items()}
        self.servicer = Servicer(
            NAME,
            PROTOCOL,
            lookups={"ModelInfer": lambda received: InferCall(service, received)},
            controls={name: method for name, method in methods.items() if name not in (*_SWITCHES, *_HEALTH)},
            switches={name: methods[name] for name in _SWITCHES},
            health={name: methods[name] for name in _HEALTH},
            streams={"ModelStreamInfer": self._stream},
        )

    def _regions(self) -> Regions:
        return self._service.regions.of(CALLER.get())

    def _cuda_regions(self, request: Any) -> dict[str, Any]:
        regions = self._regions()
        if not regions.enabled and not request.name:
            return {}  # benchmarks request it unconditionally
        return {"regions": {region["name"]: region for region in regions.status(request.name or None, "cuda")}}

    # --- look-ups

    def _stream(self, received: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """Answers in the order of the requests. An error is the answer to its own request, and the stream goes on."""
        service = self._service

        def streamed(message: bytes) -> InferCall:
            return InferCall(service, message, _FINAL)

        caller = caller_in(context)
        accounts = Accounts(service, self.servicer, "ModelStreamInfer")
        for request in received:
            began_ns = time.perf_counter_ns()
            try:
                check_waited_for(context)
                metadata, principal = context.invocation_metadata() or (), principal_in(service, context)
                answered = answer(service, streamed, request, metadata, principal, began_ns)
            except Cancelled:
                return
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                accounts.failed(caller, error, began_ns)
                yield _stream_error(request, error)
            else:
                yield length_delimited(_STREAMED, len(answered)) + answered
                accounts.answered(caller, began_ns)

    # --- other methods

    def _control(self, name: str, method: Callable[[Any], dict[str, Any] | None]) -> Callable[[bytes], bytes]:
        described = self._methods[name]
        answer_kind = message_class(described.output_type.full_name)

        def call(request: Any) -> Any:
            document = method(request)
            answer = answer_kind()
            if document:
                # fields of a document that the message does not have are left out
                json_format.Parse(orjson.dumps(document), answer, ignore_unknown_fields=True)
            return answer

        return by_message(message_class(described.input_type.full_name), call)

    def _model(self, name: str) -> Any:
        return self._service.dataplane.model(name)

    def _index(self, request: Any) -> dict[str, Any]:
        check_model(None)
        return {"models": documents.repository_index(self._service.store, request.ready)}

    def _statistics(self, request: Any) -> dict[str, Any]:
        service = self._service
        if request.name:
            self._model(request.name)
        else:
            check_model(None)
        service.refresh()
        return documents.statistics(
            service.store, service.inference_stats, request.name or None, _version(request.version)
        )

    def _load(self, request: Any) -> None:
        self._repository(request)
        documents.load(self._service.store, request.model_name)

    def _unload(self, request: Any) -> None:
        self._repository(request)
        self._service.store.deactivate(request.model_name)

    def _repository(self, request: Any) -> None:
        if request.repository_name:
            raise NotFound(f"no repository {request.repository_name[:80]!r}: there is one, without a name")
        self._model(request.model_name)
        documents.check_load_parameters(request.parameters)


def _version(name: str) -> int | str | None:
    return version_of(name) if name else None


def _unserved(extension: str) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise Unserved(f"the {extension} extension is not served")

    return refuse


def _stream_error(request: bytes, error: Exception) -> bytes:
    answer = _StreamAnswer(error_message=message_of(error))
    try:
        answer.infer_response.id = Parts(request).id.decode()
    except (InvalidInput, UnicodeDecodeError):  # an answer without the id is better than none
        answer.infer_response.SetInParent()
    made: bytes = answer.SerializeToString()
    return made
