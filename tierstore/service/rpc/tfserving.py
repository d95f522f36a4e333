"""TensorFlow Serving's services over gRPC: `PredictionService` and `ModelService`.

`Predict` runs on the look-up threads, from its message to its answer's; the rest on the control threads.
"""

from __future__ import annotations

import time
from typing import Any

from tierstore.engine.served import STABLE
from tierstore.errors import InvalidInput, TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.plane.plan import Request, View
from tierstore.service.plane.tensors import Elements, shown
from tierstore.service.rpc.calls import Servicer, by_message, parsed, request_id
from tierstore.service.rpc.messages import message
from tierstore.service.rpc.pools import submitted_ns
from tierstore.service.rpc.status import Unserved
from tierstore.service.rpc.tfs_tensors import answer_of, tensor_of
from tierstore.service.rpc.types import Context, Unary
from tierstore.service.tfs import models as tfs_models
from tierstore.service.tfs import signature as tfs_signature
from tierstore.service.tfs.request import request_of, room_for

PROTOCOL = "tfs_grpc"
SIGNATURE_FIELD = "signature_def"  # of a model's metadata; TensorFlow Serving has no other
_PREDICTION, _MODEL = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
_UNSERVED = {
    "Classify": "models here have no classify signature; ask for their outputs with Predict",
    "Regress": "models here have no regress signature; ask for their outputs with Predict",
    "MultiInference": "models here have no classify or regress signatures; ask for their outputs with Predict",
}
_NO_RELOAD = "models are loaded by snapshots, not by a model server's configuration: POST /admin/models/{model}/snapshots, or `tierstore load`"

PredictRequest = message("tensorflow.serving.PredictRequest")
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
                lookups={"Predict": self._predict},
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

    def _predict(self, received: bytes, context: Context) -> bytes:
        service = self._service
        arrived_ns, began_ns = submitted_ns(), time.perf_counter_ns()
        holding = Holding(service.inflight)
        model = None
        try:
            holding.take(len(received))
            asked = parsed(PredictRequest, received)
            model, wanted = _model_of(asked.model_spec)
            signature = tfs_signature.check_signature(asked.model_spec.signature_name)
            tensors = []
            for name, tensor in asked.inputs.items():
                tensors.append(tensor_of(name, tensor, service.settings.max_request))
                holding.take(tensors[-1][1].nbytes)  # of each at once: one value may stand for very many
            picked = list(asked.output_filter)
            elements: list[Elements] = []
            spent = Timings(queued_ns=began_ns - arrived_ns)

            def request(view: View) -> Request:
                made, ordered = request_of(service.known_requests, model, view, signature, tensors, picked)
                elements.extend(ordered)
                return made

            plane = service.dataplane
            route = request_id(context) if wanted is None and plane.splits(model) else None
            with plane.open(model, wanted, request, route=route) as inference:
                plan = inference.plan
                holding.take(plan.work_bytes)
                parsed_ns = time.perf_counter_ns()
                inference.begin(elements, room_for(plan.specs))
                inference.finish()
                version, arrays = inference.version, inference.arrays
                spent.lookup_ns, spent.dense_ns = inference.lookup_ns, inference.dense_ns
            answered_ns = time.perf_counter_ns()
            answer = answer_of(model, version, signature, plan, arrays)
            ended_ns = time.perf_counter_ns()
            spent.input_ns, spent.infer_ns, spent.output_ns = (
                parsed_ns - began_ns,
                answered_ns - parsed_ns,
                ended_ns - answered_ns,
            )
            service.infer_stats.succeeded(model, version, ended_ns - arrived_ns, spent)
            return answer
        except TierstoreError as error:
            if model is not None:
                service.count_failed(model, time.perf_counter_ns() - arrived_ns, error)
            raise
        finally:
            holding.release()

    def _metadata(self, asked: Any) -> Any:
        name, version = _model_of(asked.model_spec)
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
        name, version = _model_of(asked.model_spec)
        self._service.dataplane.model(name)
        answer = StatusResponse()
        for number, state in tfs_models.version_states(self._service.store, name, version):
            entry = answer.model_version_status.add(version=number, state=tfs_models.STATE_NUMBERS[state])
            entry.status.SetInParent()
        return answer


def _model_of(spec: Any) -> tuple[str, int | str | None]:
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


def _unserved(why: str) -> Unary:
    def call(received: bytes, context: Context) -> bytes:
        raise Unserved(why)

    return call
