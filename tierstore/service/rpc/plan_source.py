"""Plan sources for reactors from requests over gRPC. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.lookup import binding
from tierstore.lookup import plans as layout
from tierstore.service.dataplane.datatypes import BYTES, DATATYPES
from tierstore.service.dataplane.plan import OutputSpec, Plan, Request
from tierstore.service.reactor.plan_sources import row_shapes, score_shapes
from tierstore.service.reactor.predict_plan_sources import PredictPlanSource
from tierstore.service.reactor.variants import Pieces, has_room
from tierstore.service.rpc.oip_messages import Raw, RpcRequest
from tierstore.service.rpc.protobuf import message_class, varint
from tierstore.service.rpc.tensor_proto import field
from tierstore.wire.http2 import head as http2_head
from tierstore.wire.protobuf import predict as protobuf_predict
from tierstore.wire.protobuf import scan as protobuf_scan

_Response = message_class("inference.ModelInferResponse")
_Output = message_class("inference.ModelInferResponse.InferOutputTensor")


class MessagePlanSource:
    """A request of the Open Inference Protocol over gRPC, as a `PlanSource` (`reactor/plan_sources.py`)."""

    protocol, form = "oip_grpc", layout.MESSAGE
    logged = "gRPC", http2_head.INFER_PATH.tobytes().decode(), "OK"
    written, datatypes = {"framed": layout.FRAMED}, ()

    def __init__(self, message: bytes | memoryview, parsed: RpcRequest) -> None:
        """`message` is a whole serialized ModelInferRequest."""
        self.path = parsed.model.encode()
        self._message, self._parsed = message, parsed

    def scan(self, record: int, structure: int) -> int:
        data = np.frombuffer(self._message, np.uint8)
        return int(protobuf_scan.scan(address_of(data), len(data), record, structure))

    @property
    def request(self) -> Request:
        return self._parsed.request

    def is_plain(self) -> bool:
        parsed = self._parsed
        return all(type(source) is Raw for source in parsed.sources) and not any(parsed.targets)

    def pieces(self, plan: Plan) -> Pieces | None:
        return self._pieces(plan, row_shapes(plan))

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        return self._pieces(plan, score_shapes(scores))

    def _pieces(self, plan: Plan, shapes: list[list[int]] | None) -> Pieces | None:
        """The pieces of an answer, for `lookup/grpc_answer.py`."""
        if shapes is None:
            return None
        head = _Response(model_name=self._parsed.model, model_version=str(plan.version))
        pieces: Pieces = [(head.SerializeToString(), len(shapes), 0)]
        for spec, shape in zip(plan.specs, shapes, strict=True):
            sizes, text = list[tuple[bytes, int, int]](), b""
            for size in shape:
                if size >= 0:
                    text += varint(size)
                else:
                    sizes.append((text, ~size, 0))
                    text = b""
            if text:
                sizes.append((text, binding.NONE, 0))
            described = _Output(name=spec.name, datatype=spec.datatype)
            pieces += [*sizes, (described.SerializeToString(), len(sizes), 0)]
        values = sum(size < 0 for shape in shapes for size in shape)
        return pieces if has_room((text for text, *_ in pieces), values) else None


class CallPlanSource(PredictPlanSource):
    """A PredictRequest of TensorFlow Serving, as a `PlanSource`."""

    protocol, form = "tfs_grpc", layout.PREDICT_MESSAGE
    logged = "gRPC", http2_head.PREDICT_PATH.tobytes().decode(), "OK"
    written = {"framed": layout.TENSORS_FRAMED}  # noqa: RUF012 - nobody changes it

    def __init__(
        self, message: bytes, model: str, ending: bytes, request: Request, specs: Sequence[OutputSpec]
    ) -> None:
        """`ending` are the fields of an answer behind its outputs."""
        super().__init__(message, request, specs)
        self.path, self._ending = model.encode(), ending

    def scan(self, record: int, structure: int) -> int:
        message = np.frombuffer(self._text, np.uint8)
        return int(protobuf_predict.scan(address_of(message), len(message), record, structure))

    def is_plain(self) -> bool:
        """Whether all outputs have shapes that are known, and none is of strings."""
        return all(spec.fixed and spec.datatype != BYTES for spec in self._specs)

    def _pieces(self, shapes: list[list[int]]) -> Pieces:
        """The pieces of an answer, for `lookup/tensor_answer.py`."""
        made: Pieces = []
        for i, (spec, shape) in enumerate(zip(self._specs, shapes, strict=True)):
            made.append((field(1, spec.name.encode()), i, DATATYPES[spec.datatype].tf_number, len(shape), *shape))
        return [*made, (self._ending, binding.NONE)]
