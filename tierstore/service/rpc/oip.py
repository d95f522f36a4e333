"""`inference.GRPCInferenceService`: the Open Inference Protocol v2 over gRPC, with the extensions of Triton's clients.

Documents are those of `oip/documents.py`, as messages. `calls.py` decides where methods run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
from google.protobuf import json_format

from tierstore.arguments import as_version
from tierstore.errors import InvalidInput, NotFound, TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, DataPlane, Inference
from tierstore.service.dataplane.plan import Plan
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.error_status import Unserved, message_of
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.protocols.oip import documents
from tierstore.service.protocols.oip.shared_memory import CudaRegions, Regions
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.messages import REFUSAL, WireMessage
from tierstore.service.rpc.methods import Accounts, MessageStream, Receive, Servicer, Unary, by_message, look_up
from tierstore.service.rpc.oip_messages import ResponseLayout, RpcRequest, parse_request, read_elements, split_message
from tierstore.service.rpc.plan_source import MessagePlanSource
from tierstore.service.rpc.protobuf import (
    Parts,
    first_text,
    length_delimited,
    message_class,
    parsed_bytes,
    service_descriptor,
)
from tierstore.service.stats import Timings

_PARSED_TIMES = 48  # memory for a byte of a request without its raw tensors: empty inputs are the worst


class InferMessage:
    """A ModelInferRequest, as a `Message`. `extra` are further serialized fields of the answer."""

    __slots__ = (
        "_caller",
        "_extra",
        "_holding",
        "_id",
        "_layout",
        "_message",
        "_parsed",
        "_raw",
        "_service",
        "model",
        "nbytes",
        "version",
    )  # fmt: skip

    _id: bytes
    _layout: ResponseLayout
    _parsed: RpcRequest
    _raw: list[memoryview]

    def __init__(
        self, service: Service, message: WireMessage, caller: RpcCaller, holding: Reservation, extra: bytes = b""
    ) -> None:
        self._service, self._message, self._caller = service, message, caller
        self._holding, self._extra = holding, extra
        self.nbytes = len(message)
        self.model = first_text(message.plain)
        self.version: int | str | None = None

    def model_of_failed(self) -> str | None:
        return first_text(self._message.if_short())

    @property
    def timeout_us(self) -> int | None:
        return self._parsed.timeout_us

    @property
    def request(self) -> AnyRequest:
        return self._parsed.request

    def parse(self) -> None:
        parts = split_message(self._message.decode(self._holding.reserve))
        self._raw, self._id = parts.raw, parts.id
        self._holding.reserve(parsed_bytes(parts.meta, _PARSED_TIMES))
        self._parsed = parse_request(parts.meta, raw=bool(parts.raw))
        self.model, self.version = self._parsed.model, self._parsed.version

    def opened(self, inference: Inference) -> None:
        service, plan, view = self._service, inference.plan, inference.view
        if service.plans is None or not self._caller.unplanned or self._extra:
            return
        plan_source = MessagePlanSource(self._message.plain, self._parsed)
        refusal = None if plan.dense is None else REFUSAL
        service.plans.learn(self._parsed.model, view, self.version, plan, plan_source, refusal)

    def read(self, inference: Inference) -> tuple[Sequence[Elements], list[Any]]:
        parsed, plan = self._parsed, inference.plan
        layout = self._layout = ResponseLayout(parsed, plan)
        regions = self._service.regions.of(self._caller.principal)
        layout.check_spans(regions)
        self._holding.reserve(plan.work_bytes + parsed.span_bytes)
        return read_elements(parsed, self._raw, regions), layout.allocate()

    def encode(self, plan: Plan, arrays: list[Any]) -> bytes:
        return self._layout.encode(self._id, arrays, self._service.regions.of(self._caller.principal), self._extra)


NAME = "inference.GRPCInferenceService"
PROTOCOL = "oip_grpc"
_SWITCHES = ("RepositoryModelLoad", "RepositoryModelUnload")
_HEALTH = ("ServerLive", "ServerReady")

_StreamAnswer = message_class("inference.ModelStreamInferResponse")


def _final_response() -> bytes:
    """Serialized: the parameter that tells a streaming client that a request has no further answer."""
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
        controls: dict[str, Callable[[Any, RpcCaller], Any]] = {
            "ServerLive": lambda *_: {"live": True},
            "ServerReady": lambda *_: {"ready": service.ready},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda *_: documents.server_metadata(shared_memory=service.regions.enabled),
            "ModelMetadata": lambda request, caller: documents.model_metadata(
                *self._named(request.name, caller), _version(request.version)
            ),
            "ModelConfig": lambda request, caller: {
                "config": documents.model_config(*self._named(request.name, caller), _version(request.version))
            },
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": lambda request, caller: _by_name(
                self._regions(caller).status(request.name or None)
            ),
            "SystemSharedMemoryRegister": lambda request, caller: self._regions(caller).register(
                request.name, request.key, request.offset, request.byte_size, on_host=caller.on_host
            ),
            "SystemSharedMemoryUnregister": lambda request, caller: self._regions(caller).unregister(
                request.name or None
            ),
            "CudaSharedMemoryStatus": lambda request, caller: _by_name(CudaRegions.status(request.name or None)),
            "CudaSharedMemoryRegister": lambda request, caller: CudaRegions.register(request.name),
            "CudaSharedMemoryUnregister": lambda request, caller: CudaRegions.unregister(request.name or None),
            "TraceSetting": _unserved("trace"),
            "LogSettings": _unserved("logging"),
        }
        methods = {name: self._control(name, method) for name, method in controls.items()}
        self.servicer = Servicer(
            NAME,
            PROTOCOL,
            lookups={"ModelInfer": partial(InferMessage, service)},
            controls={name: method for name, method in methods.items() if name not in (*_SWITCHES, *_HEALTH)},
            switches={name: methods[name] for name in _SWITCHES},
            health={name: methods[name] for name in _HEALTH},
            streams={"ModelStreamInfer": self._streamed},
        )

        self._accounts = Accounts(service, self.servicer, "ModelStreamInfer")
        self._receive_streamed: Receive = partial(InferMessage, service, extra=_FINAL)

    def _regions(self, caller: RpcCaller) -> Regions:
        return self._service.regions.of(caller.principal)

    # --- look-ups

    def _streamed(self, message: WireMessage, flow: MessageStream) -> None:
        """Handle a request of a stream: its answer comes before that of the next. An error is an answer too, and the
        stream goes on.
        """
        loop, accounts, caller = asyncio.get_running_loop(), self._accounts, flow.caller

        def answered(
            answer: bytes | None, error: BaseException | None, spent: Timings | None, holding: Reservation | None
        ) -> None:
            if answer is None:
                assert error is not None
                accounts.failed(caller, error)
                framed = _stream_error(message.if_short(), error)
            else:
                accounts.answered(caller, spent)
                framed = _stream_answer(answer)

            def sent() -> None:
                if holding is not None:
                    holding.release()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(flow.done)

            flow.send(framed, sent)

        try:
            caller = flow.caller_now()
            self._service.shed.check(caller.waiting)
        except TierstoreError as error:
            answered(None, error, None, None)
            return
        look_up(self._service, self._receive_streamed, message, caller, answered)

    # --- other methods

    def _control(self, name: str, method: Callable[[Any, RpcCaller], dict[str, Any] | None]) -> Unary:
        described = self._methods[name]
        answer_kind = message_class(described.output_type.full_name)

        def call(request: Any, caller: RpcCaller) -> Any:
            document = method(request, caller)
            answer = answer_kind()
            if document:
                # fields of a document that the message does not have are left out
                json_format.Parse(orjson.dumps(document), answer, ignore_unknown_fields=True)
            return answer

        return by_message(message_class(described.input_type.full_name), call)

    def _named(self, name: str, caller: RpcCaller) -> tuple[DataPlane, str]:
        caller.principal.check_model(name)
        return self._service.dataplane, name

    def _model_ready(self, request: Any, caller: RpcCaller) -> dict[str, Any]:
        """As Triton answers it: clients ask until a model is ready, and end at an error."""
        try:
            return {"ready": documents.is_ready(*self._named(request.name, caller), _version(request.version))}
        except NotFound:
            return {"ready": False}

    def _index(self, request: Any, caller: RpcCaller) -> dict[str, Any]:
        caller.principal.check_model(None)
        return {"models": documents.repository_index(self._service.store, request.ready)}

    def _statistics(self, request: Any, caller: RpcCaller) -> dict[str, Any]:
        service = self._service
        caller.principal.check_model(request.name or None)
        service.refresh()
        return documents.statistics(
            service.dataplane, service.inference_stats, request.name or None, _version(request.version)
        )

    def _load(self, request: Any, caller: RpcCaller) -> None:
        self._repository(request, caller)
        documents.load(self._service.store, request.model_name)

    def _unload(self, request: Any, caller: RpcCaller) -> None:
        self._repository(request, caller)
        self._service.store.deactivate(request.model_name)

    def _repository(self, request: Any, caller: RpcCaller) -> None:
        if request.repository_name:
            raise NotFound(f"no repository {request.repository_name[:80]!r}: there is one, without a name")
        caller.principal.check_model(request.model_name)
        documents.check_whole(self._service.store, request.model_name)
        documents.check_load_parameters(request.parameters)


def _version(name: str) -> int | str | None:
    return as_version(name or None)


def _by_name(regions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in regions}}


def _unserved(extension: str) -> Callable[[Any, RpcCaller], None]:
    def refuse(*_: Any) -> None:
        raise Unserved(f"the {extension} extension is not served")

    return refuse


def _stream_answer(answer: bytes) -> bytes:
    """The answer to a request of a stream."""
    return length_delimited(_STREAMED, len(answer)) + answer


def _stream_error(request: bytes, error: BaseException) -> bytes:
    answer = _StreamAnswer(error_message=message_of(error))
    try:
        answer.infer_response.id = Parts(request).id.decode()
    except (InvalidInput, UnicodeDecodeError):  # an answer without the id is better than none
        answer.infer_response.SetInParent()
    made: bytes = answer.SerializeToString()
    return made
