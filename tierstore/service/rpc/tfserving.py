"""TensorFlow Serving's services over gRPC: `PredictionService` and `ModelService`.

`Predict` runs on the look-up threads, from its message to its answer's; the rest on the control threads.
"""

from __future__ import annotations

from typing import Any

from tierstore.engine.served import STABLE
from tierstore.errors import InvalidInput
from tierstore.service.context import Service
from tierstore.service.plane.tensors import shown
from tierstore.service.rpc.calls import Servicer, by_message
from tierstore.service.rpc.messages import message
from tierstore.service.rpc.predict import PredictCall, model_of
from tierstore.service.rpc.status import Unserved
from tierstore.service.rpc.types import Context, Unary
from tierstore.service.tfs import models as tfs_models
from tierstore.service.tfs import signature as tfs_signature

PROTOCOL = "tfs_grpc"
SIGNATURE_FIELD = "signature_def"  # of a model's metadata; TensorFlow Serving has no other
_PREDICTION, _MODEL = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
_UNSERVED = {
    "Classify": "models here have no classify signature; ask for their outputs with Predict",
    "Regress": "models here have no regress signature; ask for their outputs with Predict",
    "MultiInference": "models here have no classify or regress signatures; ask for their outputs with Predict",
}
_NO_RELOAD = "models are loaded by snapshots, not by a model server's configuration: POST /admin/models/{model}/snapshots, or `tierstore load`"

MetadataRequest = message("tensorflow.serving.GetModelMetadataRequest")
MetadataResponse = message("tensorflow.serving.GetModelMetadataResponse")
SignatureDefMap = message("tensorflow.serving.SignatureDefMap")
StatusRequest = message("tensorflow.serving.GetModelStatusRequest")
StatusResponse = message("tensorflow.serving.GetModelStatusResponse")


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

    def _metadata(self, asked: Any) -> Any:
        name, version = model_of(asked.model_spec)
        if not asked.metadata_field:
            raise InvalidInput(f"metadata_field: expected {SIGNATURE_FIELD}, came none")
        for field in asked.metadata_field:
            if field != SIGNATURE_FIELD:
                raise InvalidInput(f"metadata_field {shown(field)} is not known; expected {SIGNATURE_FIELD}")
        with self._service.dataplane.model(name).view(STABLE if version is None else version) as view:
            signature = tfs_signature.signature_of(view)
            answer = MetadataResponse()
            answer.model_spec.name = name
            answer.model_spec.version.value = view.version
        every = SignatureDefMap()
        for each, outputs in signature.outputs.items():
            definition = every.signature_def[each]
            definition.method_name = tfs_signature.METHOD
            for tensors, into in ((signature.inputs.values(), definition.inputs), (outputs, definition.outputs)):
                for tensor in tensors:
                    info = into[tensor.name]
                    info.name = f"{tensor.name}:0"
                    info.dtype = tfs_signature.DTYPES[tensor.datatype][0]
                    for size in tensor.shape:
                        info.tensor_shape.dim.add(size=size)
        answer.metadata[SIGNATURE_FIELD].Pack(every)
        return answer

    def _status(self, asked: Any) -> Any:
        name, version = model_of(asked.model_spec)
        self._service.dataplane.model(name)
        answer = StatusResponse()
        for number, state in tfs_models.version_states(self._service.store, name, version):
            entry = answer.model_version_status.add(version=number, state=tfs_models.STATE_NUMBERS[state])
            entry.status.SetInParent()
        return answer


def _unserved(why: str) -> Unary:
    def call(received: bytes, context: Context) -> bytes:
        raise Unserved(why)

    return call
