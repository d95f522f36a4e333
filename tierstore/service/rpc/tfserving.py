"""TensorFlow Serving's services over gRPC: `PredictionService` and `ModelService`.

`Predict` runs on the look-up threads, from its message to its answer; other methods run on the admin threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import STABLE
from tierstore.errors import InvalidInput, shown
from tierstore.service.context import Service
from tierstore.service.dataplane.datatypes import DATATYPES
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.dataplane.tensors import Elements, TensorSpec
from tierstore.service.dataplane.view import inputs_of
from tierstore.service.error_status import Unserved
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.protocols.tfserving.documents import STATE_NUMBERS, checked_label, version_states
from tierstore.service.protocols.tfserving.request import Tensor, request_of, room_for
from tierstore.service.protocols.tfserving.signature import METHOD, check_signature, signature_of
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.messages import REFUSAL, WireMessage
from tierstore.service.rpc.methods import Servicer, Unary, by_message, parse_message
from tierstore.service.rpc.plan_source import CallPlanSource
from tierstore.service.rpc.protobuf import first_field, first_text, message_class, parsed_bytes
from tierstore.service.rpc.tensor_proto import answer_of, ending, tensor_of

PredictRequest = message_class("tensorflow.serving.PredictRequest")
_PARSED_TIMES = 80  # memory for a byte of a request without its tensors' content: empty inputs are the worst
_CONTENT = (2, 2, 4)  # inputs, value, tensor_content


class PredictMessage:
    """A PredictRequest, as a `Message`."""

    __slots__ = (
        "_caller",
        "_elements",
        "_holding",
        "_made",
        "_message",
        "_received",
        "_service",
        "_signature",
        "_tensors",
        "model",
        "nbytes",
        "version",
    )

    _elements: list[Elements]
    _made: Request
    timeout_us = None  # the protocol has none

    def __init__(self, service: Service, message: WireMessage, caller: RpcCaller, holding: Reservation) -> None:
        self._service, self._message, self._holding, self._caller = service, message, holding, caller
        self._received: Any = None
        self._signature = ""
        self._tensors: list[Tensor] | None = None
        self.nbytes = len(message)
        self.model = first_text(first_field(message.plain))
        self.version: int | str | None = None

    def model_of_failed(self) -> str | None:
        return first_text(first_field(self._message.if_short()))

    def parse(self) -> None:
        message = self._message.decode(self._holding.reserve)
        self._holding.reserve(parsed_bytes(message, _PARSED_TIMES, _CONTENT))
        self._received = parse_message(PredictRequest, message)
        self.model, self.version = model_of(self._received.model_spec)

    @property
    def request(self) -> AnyRequest:
        if self._tensors is None:
            self._signature = check_signature(self._received.model_spec.signature_name)
            self._tensors = []
            for name, tensor in self._received.inputs.items():
                self._tensors.append(tensor_of(name, tensor, self._service.settings.max_request))
                self._holding.reserve(self._tensors[-1][1].nbytes)  # at once: one value may be repeated very often
        return self._request

    def _request(self, view: View) -> Request:
        assert self._tensors is not None
        picked = list(self._received.output_filter)
        tensors = self._tensors
        if any(spec.datatype == "INT32" for spec, _ in tensors):
            tensors = self._widened(view, tensors)
        self._made, self._elements = request_of(view, self._signature, tensors, picked)
        return self._made

    def _widened(self, view: View, tensors: list[Tensor]) -> list[Tensor]:
        """`tensors`, those of INT32 as INT64 where integers of 64 bits are expected.

        TensorFlow's `make_tensor_proto` makes INT32 of a plain list of integers, and so does OpenVINO's client.
        """
        wide = {tensor.name for tensor in inputs_of(view) if tensor.datatype in ("INT64", "UINT64")}
        widened = []
        for spec, elements in tensors:
            if spec.datatype == "INT32" and spec.name in wide:
                self._holding.reserve(2 * elements.nbytes)
                spec, elements = TensorSpec(spec.name, "INT64", spec.shape), elements.astype(np.int64)
            widened.append((spec, elements))
        return widened

    def opened(self, inference: Inference) -> None:
        service, plan, view = self._service, inference.plan, inference.view
        if service.plans is None or not self._caller.unplanned:
            return
        assert self.model is not None
        fields = ending(self.model, plan.version, self._signature)
        plan_source = CallPlanSource(self._message.plain, self.model, fields, self._made, plan.specs)
        service.plans.learn(self.model, view, self.version, plan, plan_source, None if plan.dense is None else REFUSAL)

    def read(self, inference: Inference) -> tuple[Sequence[Elements], list[Any]]:
        self._holding.reserve(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def encode(self, plan: Plan, arrays: list[Any]) -> bytes:
        assert self.model is not None
        return answer_of(self.model, plan.version, self._signature, plan, arrays)


def model_of(spec: Any) -> tuple[str, int | str | None]:
    """(name, version or label) of a ModelSpec. No version is 0: OpenVINO's client sends it where it means none."""
    name: str = spec.name
    if not name:
        raise InvalidInput("model_spec names no model")
    match spec.WhichOneof("version_choice"):
        case "version":
            return name, int(spec.version.value) or None
        case "version_label":
            return name, checked_label(spec.version_label)
    return name, None


PROTOCOL = "tfs_grpc"
SIGNATURE_FIELD = "signature_def"  # of a model's metadata; TensorFlow Serving has no other
_PREDICTION, _MODEL = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
_UNSERVED = {
    "Classify": "models here have no classify signature; ask for their outputs with Predict",
    "Regress": "models here have no regress signature; ask for their outputs with Predict",
    "MultiInference": "models here have no classify or regress signatures; ask for their outputs with Predict",
}
_NO_RELOAD = (
    "models are loaded by snapshots, not by a model server's configuration: POST "
    "/admin/models/{model}/snapshots, or `tierstore load`"
)

MetadataRequest = message_class("tensorflow.serving.GetModelMetadataRequest")
MetadataResponse = message_class("tensorflow.serving.GetModelMetadataResponse")
SignatureDefMap = message_class("tensorflow.serving.SignatureDefMap")
StatusRequest = message_class("tensorflow.serving.GetModelStatusRequest")
StatusResponse = message_class("tensorflow.serving.GetModelStatusResponse")


class TensorFlowServing:
    """The methods of both services; any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.servicers = [
            Servicer(
                _PREDICTION,
                PROTOCOL,
                lookups={"Predict": partial(PredictMessage, service)},
                controls={
                    "GetModelMetadata": by_message(MetadataRequest, self._metadata),
                    **{name: _unserved(why) for name, why in _UNSERVED.items()},
                },
            ),
            Servicer(
                _MODEL,
                PROTOCOL,
                controls={
                    "GetModelStatus": by_message(StatusRequest, self._status),
                    "HandleReloadConfigRequest": _unserved(_NO_RELOAD),
                },
            ),
        ]

    def _metadata(self, request: Any, caller: RpcCaller) -> Any:
        name, version = model_of(request.model_spec)
        caller.principal.check_model(name)
        if not request.metadata_field:
            raise InvalidInput(f"metadata_field: expected {SIGNATURE_FIELD}, got none")
        for field in request.metadata_field:
            if field != SIGNATURE_FIELD:
                raise InvalidInput(f"metadata_field {shown(field)} is not known; expected {SIGNATURE_FIELD}")
        with self._service.dataplane.view(name, STABLE if version is None else version) as view:
            signature = signature_of(view)
            answer = MetadataResponse()
            answer.model_spec.name = name
            answer.model_spec.version.value = view.version
        every = SignatureDefMap()
        for each, outputs in signature.outputs.items():
            definition = every.signature_def[each]
            definition.method_name = METHOD
            for tensors, into in ((signature.inputs.values(), definition.inputs), (outputs, definition.outputs)):
                for tensor in tensors:
                    info = into[tensor.name]
                    info.name = f"{tensor.name}:0"
                    info.dtype = DATATYPES[tensor.datatype].tf_number
                    for size in tensor.shape:
                        info.tensor_shape.dim.add(size=size)
        answer.metadata[SIGNATURE_FIELD].Pack(every)
        return answer

    def _status(self, request: Any, caller: RpcCaller) -> Any:
        name, version = model_of(request.model_spec)
        caller.principal.check_model(name)
        dataplane = self._service.dataplane
        dataplane.model(name)
        answer = StatusResponse()
        for number, state in version_states(self._service.store, dataplane, name, version):
            entry = answer.model_version_status.add(version=number, state=STATE_NUMBERS[state])
            entry.status.SetInParent()
        return answer


def _unserved(why: str) -> Unary:
    def call(*_: Any) -> bytes:
        raise Unserved(why)

    return call
