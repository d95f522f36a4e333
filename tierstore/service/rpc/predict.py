"""One predict request of TensorFlow Serving over gRPC, from its message to its answer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tierstore.errors import InvalidInput, TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.plan import Request, View
from tierstore.service.plane.short import DIRECT_KEYS
from tierstore.service.plane.tensors import Elements
from tierstore.service.rpc.calls import parsed
from tierstore.service.rpc.messages import message
from tierstore.service.rpc.tfs_tensors import answer_of, tensor_of
from tierstore.service.tfs.request import request_of, room_for
from tierstore.service.tfs.signature import check_signature

PredictRequest = message("tensorflow.serving.PredictRequest")
DIRECT_PREDICT_BYTES = 16 << 10  # of a message that is parsed where it was received: its elements may come one by one


class PredictCall:
    """A PredictRequest as an `RpcCall`."""

    __slots__ = ("_asked", "_elements", "_message", "_service", "_signature", "model", "request", "short", "version")

    def __init__(self, service: Service, message: bytes) -> None:
        self._service, self._message = service, message
        self.short = len(message) <= DIRECT_PREDICT_BYTES
        self.request: Request | None = None  # it depends on the version that answers
        self._asked: Any = None
        self._signature = ""
        self._elements: list[Elements] = []
        self.model: str
        self.version: int | str | None

    def parse(self) -> None:
        self._asked = parsed(PredictRequest, self._message)
        self.model, self.version = model_of(self._asked.model_spec)
        self.short = self.short and not self._is_long()

    def _is_long(self) -> bool:
        """Whether it is a lot to read, as one value may stand for very many, or for the dense part."""
        shapes = [[dim.size for dim in tensor.tensor_shape.dim] for tensor in self._asked.inputs.values()]
        if any(math.prod(shape) > DIRECT_KEYS for shape in shapes):
            return True
        try:
            return self._service.dataplane.scores(self.model)
        except TierstoreError:  # told by whoever answers
            return False

    def asks(self, waited_ns: int, holding: Holding) -> Asked:
        asked, service = self._asked, self._service
        signature = self._signature = check_signature(asked.model_spec.signature_name)
        tensors = []
        for name, tensor in asked.inputs.items():
            tensors.append(tensor_of(name, tensor, service.settings.max_request))
            holding.take(tensors[-1][1].nbytes)  # of each at once: one value may stand for very many
        picked = list(asked.output_filter)

        def request(view: View) -> Request:
            made, self._elements = request_of(service.known_requests, self.model, view, signature, tensors, picked)
            return made

        return request

    def read(self, inference: Inference, holding: Holding) -> tuple[Sequence[Elements], list[Any]]:
        holding.take(inference.plan.work_bytes)
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
