"""`inference.GRPCInferenceService`: the Open Inference Protocol v2 over gRPC, with the extensions of Triton's clients.

Its look-ups are `infer.py`; the documents are those of the HTTP front (`oip/documents.py`), turned into messages. Methods
run on the threads of the server's pools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
from google.protobuf import json_format

from tierstore.errors import InvalidInput, NotFound
from tierstore.service.context import Service
from tierstore.service.oip import documents
from tierstore.service.oip.parameters import version_of
from tierstore.service.rpc.calls import Accounts, Servicer, by_message, caller_in, check_waited_for
from tierstore.service.rpc.infer import InferCall
from tierstore.service.rpc.lookups import answer
from tierstore.service.rpc.messages import message
from tierstore.service.rpc.messages import service as descriptor_of
from tierstore.service.rpc.status import Cancelled, Unserved
from tierstore.service.rpc.types import Context
from tierstore.service.rpc.wire import Parts, length_delimited
from tierstore.service.status import message_of

NAME = "inference.GRPCInferenceService"
PROTOCOL = "oip_grpc"

_StreamAnswer = message("inference.ModelStreamInferResponse")


def _final_response() -> bytes:
    """Serialized: the parameter by which a streaming client knows that a request has no further answer."""
    answer = message("inference.ModelInferResponse")()
    answer.parameters["triton_final_response"].bool_param = True
    fields: bytes = answer.SerializeToString()
    return fields


_FINAL = _final_response()
_STREAMED = bytes([_StreamAnswer.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2])


class Inference:
    """The methods, over the parts of `service`. Any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._methods = {method.name: method for method in descriptor_of(NAME).methods}
        controls: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": service.ready},
            "ModelReady": lambda asked: {"ready": documents.is_ready(self._model(asked.name), _version(asked.version))},
            "ServerMetadata": lambda _: documents.server_metadata(shared_memory=service.regions.kinds),
            "ModelMetadata": lambda asked: documents.model_metadata(self._model(asked.name), _version(asked.version)),
            "ModelConfig": lambda asked: {
                "config": documents.model_config(self._model(asked.name), _version(asked.version))
            },
            "ModelStatistics": self._statistics,
            "RepositoryIndex": lambda asked: {"models": documents.repository_index(service.store, asked.ready)},
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": lambda asked: {
                "regions": {region["name"]: region for region in service.regions.status(asked.name or None)}
            },
            "SystemSharedMemoryRegister": lambda asked: service.regions.register(
                asked.name, asked.key, asked.offset, asked.byte_size
            ),
            "SystemSharedMemoryUnregister": lambda asked: service.regions.unregister(asked.name or None, "system"),
            "CudaSharedMemoryStatus": self._cuda_regions,
            "CudaSharedMemoryRegister": lambda asked: service.regions.register_cuda(
                asked.name, asked.raw_handle, asked.device_id, asked.byte_size
            ),
            # where none can be registered too: benchmarks ask for it unconditionally
            "CudaSharedMemoryUnregister": lambda asked: service.regions.unregister(asked.name or None, "cuda"),
            "TraceSetting": _unserved("trace"),
            "LogSettings": _unserved("logging"),
        }
        self.servicer = Servicer(
            NAME,
            PROTOCOL,
            lookups={"ModelInfer": lambda received: InferCall(service, received)},
            controls={name: self._control(name, method) for name, method in controls.items()},
            streams={"ModelStreamInfer": self._stream},
        )

    def _cuda_regions(self, asked: Any) -> dict[str, Any]:
        regions = self._service.regions
        if not regions.enabled and not asked.name:
            return {}  # benchmarks ask for it unconditionally
        return {"regions": {region["name"]: region for region in regions.status(asked.name or None, "cuda")}}

    # --- look-ups

    def _stream(self, received: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """Answers in the order of the requests; what is wrong with one is its own answer, and the stream goes on."""
        service = self._service

        def streamed(message: bytes) -> InferCall:
            return InferCall(service, message, _FINAL)

        caller = caller_in(context)
        accounts = Accounts(service, self.servicer, "ModelStreamInfer")
        for request in received:
            began_ns = time.perf_counter_ns()
            try:
                check_waited_for(context)
                answered = answer(service, streamed, request, context.invocation_metadata() or (), began_ns)
            except Cancelled:
                return
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                accounts.failed(caller, error, began_ns)
                yield _stream_error(request, error)
            else:
                yield length_delimited(_STREAMED, len(answered)) + answered
                accounts.answered(caller, began_ns)

    # --- the rest

    def _control(self, name: str, method: Callable[[Any], dict[str, Any] | None]) -> Callable[[bytes, Context], bytes]:
        described = self._methods[name]
        answer_kind = message(described.output_type.full_name)

        def call(asked: Any) -> Any:
            document = method(asked)
            answer = answer_kind()
            if document:
                # what the documents of the HTTP front say beyond the message is left out
                json_format.Parse(orjson.dumps(document), answer, ignore_unknown_fields=True)
            return answer

        return by_message(message(described.input_type.full_name), call)

    def _model(self, name: str) -> Any:
        return self._service.dataplane.model(name)

    def _statistics(self, asked: Any) -> dict[str, Any]:
        service = self._service
        if asked.name:
            self._model(asked.name)
        service.refresh()
        return documents.statistics(service.store, service.infer_stats, asked.name or None, _version(asked.version))

    def _load(self, asked: Any) -> None:
        self._repository(asked)
        documents.load(self._service.store, asked.model_name)

    def _unload(self, asked: Any) -> None:
        self._repository(asked)
        self._service.store.deactivate(asked.model_name)

    def _repository(self, asked: Any) -> None:
        if asked.repository_name:
            raise NotFound(f"no repository {asked.repository_name[:80]!r}: there is one, without a name")
        self._model(asked.model_name)
        documents.check_load_parameters(asked.parameters)


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
    except (InvalidInput, UnicodeDecodeError):  # the answer without it is better than none
        answer.infer_response.SetInParent()
    made: bytes = answer.SerializeToString()
    return made
