"""TensorFlow Serving's services over gRPC: `PredictionService` and `ModelService`.

`Predict` runs on the look-up threads, from its message to its answer; other methods run on the admin threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tierstore.access.roles import LOCAL
from tierstore.engine.serving.routing import STABLE
from tierstore.errors import InvalidInput, TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.datatypes import DATATYPES
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import DIRECT_KEYS, Request
from tierstore.service.dataplane.tensors import Elements, shown
from tierstore.service.dataplane.view import View
from tierstore.service.error_status import Unserved
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.rpc.methods import Servicer, Unary, by_message, parse_message
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.rpc.tensor_proto import answer_of, tensor_of
from tierstore.service.tfserving.documents import STATE_NUMBERS, version_states
from tierstore.service.tfserving.request import request_of, room_for
from tierstore.service.tfserving.signature import METHOD, check_signature, signature_of

PredictRequest = message_class("tensorflow.serving.PredictRequest")
DIRECT_PREDICT_BYTES = 16 << 10  # of a message that is parsed where it was received: its elements may come one by one


class PredictCall:
    """A PredictRequest as an `RpcCall`."""

    __slots__ = (
        "_elements",
        "_message",
        "_received",
        "_service",
        "_signature",
        "model",
        "principal",
        "request",
        "short",
        "version",
    )

    def __init__(self, service: Service, message: bytes) -> None:
        self._service, self._message = service, message
        self.short = len(message) <= DIRECT_PREDICT_BYTES
        self.request: Request | None = None  # it depends on the version that answers
        self._received: Any = None
        self._signature = ""
        self._elements: list[Elements] = []
        self.principal = LOCAL
        self.model: str
        self.version: int | str | None

    def parse(self) -> None:
        self._received = parse_message(PredictRequest, self._message)
        self.model, self.version = model_of(self._received.model_spec)
        self.short = self.short and not self._is_long()

    def _is_long(self) -> bool:
        """Whether it is much work to read, because one value may be repeated very often, or needs the dense part."""
        shapes = [[dim.size for dim in tensor.tensor_shape.dim] for tensor in self._received.inputs.values()]
        if any(math.prod(shape) > DIRECT_KEYS for shape in shapes):
            return True
        try:
            return self._service.dataplane.scores(self.model)
        except TierstoreError:  # reported when it is answered
            return False

    def plane_request(self, waited_ns: int, holding: Reservation) -> AnyRequest:
        received, service = self._received, self._service
        signature = self._signature = check_signature(received.model_spec.signature_name)
        tensors = []
        for name, tensor in received.inputs.items():
            tensors.append(tensor_of(name, tensor, service.settings.max_request))
            holding.reserve(tensors[-1][1].nbytes)  # of each tensor at once: one value may be repeated very often
        picked = list(received.output_filter)

        def request(view: View) -> Request:
            made, self._elements = request_of(service.plan_cache, self.model, view, signature, tensors, picked)
            return made

        return request

    def read(self, inference: Inference, holding: Reservation) -> tuple[Sequence[Elements], list[Any]]:
        holding.reserve(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def encode(self, inference: Inference) -> bytes:
        return answer_of(self.model, inference.version, self._signature, inference.plan, inference.arrays)


def model_of(spec: Any) -> tuple[str, int | str | None]:
    """(name, version or label) of a ModelSpec."""
    name: str = spec.name
    if not name:
        raise InvalidInput("model_spec names no model")
    match spec.WhichOneof("version_choice"):
        case "version":
            return name, int(spec.version.value)
        case "version_label":
            return name, str(spec.version_label)
    return name, None


PROTOCOL = "tfs_grpc"
SIGNATURE_FIELD = "signature_def"  # of a model's metadata; TensorFlow Serving has no other
_PREDICTION, _MODEL = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
_UNSERVED = {
    "Classify": "models here have no classify signature; ask for their outputs with Predict",
    "Regress": "models here have no regress signature; ask for their outputs with Predict",
    "MultiInference": "models here have no classify or regress signatures; ask for their outputs with Predict",
}
_NO_RELOAD = "models are loaded by snapshots, not by a model server's configuration: POST /admin/models/{model}/snapshots, or `tierstore load`"

MetadataRequest = message_class("tensorflow.serving.GetModelMetadataRequest")
MetadataResponse = message_class("tensorflow.serving.GetModelMetadataResponse")
SignatureDefMap = message_class("tensorflow.serving.SignatureDefMap")
StatusRequest = message_class("tensorflow.serving.GetModelStatusRequest")
StatusResponse = message_class("tensorflow.serving.GetModelStatusResponse")


class TensorFlowServing:
    """The methods; any thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.servicers = [
            Servicer(
                _PREDICTION,
                PROTOCOL,
                lookups={"Predict": lambda received: PredictCall(service, received)},
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

    def _metadata(self, request: Any) -> Any:
        name, version = model_of(request.model_spec)
        if not request.metadata_field:
            raise InvalidInput(f"metadata_field: expected {SIGNATURE_FIELD}, got none")
        for field in request.metadata_field:
            if field != SIGNATURE_FIELD:
                raise InvalidInput(f"metadata_field {shown(field)} is not known; expected {SIGNATURE_FIELD}")
        with self._service.dataplane.model(name).view(STABLE if version is None else version) as view:
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

    def _status(self, request: Any) -> Any:
        name, version = model_of(request.model_spec)
        self._service.dataplane.model(name)
        answer = StatusResponse()
        for number, state in version_states(self._service.store, name, version):
            entry = answer.model_version_status.add(version=number, state=STATE_NUMBERS[state])
            entry.status.SetInParent()
        return answer


def _unserved(why: str) -> Unary:
    def call(received: bytes) -> bytes:
        raise Unserved(why)

    return call
