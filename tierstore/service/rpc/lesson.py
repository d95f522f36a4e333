"""What reactors learn from requests over gRPC. Pure functions; any thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels import binding, protoscan
from tierstore.kernels import plan_records as layout
from tierstore.kernels.codec import address_of
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.reactor.plan_words import Pieces, has_room, leading_sizes
from tierstore.service.rpc.oip_messages import Raw, RpcRequest
from tierstore.service.rpc.protobuf import message_class, varint

_Response = message_class("inference.ModelInferResponse")
_Output = message_class("inference.ModelInferResponse.InferOutputTensor")


class MessageLesson:
    """A request of the Open Inference Protocol over gRPC, as a `Lesson` (`reactor/lessons.py`)."""

    protocol, form = "oip_grpc", layout.MESSAGE

    def __init__(self, message: bytes | memoryview, parsed: RpcRequest) -> None:
        """`message` is a whole serialized ModelInferRequest."""
        self.path = parsed.model.encode()
        self._message, self._parsed = message, parsed

    def scan(self, record: int, structure: int) -> int:
        data = np.frombuffer(self._message, np.uint8)
        return int(protoscan.scan(address_of(data), len(data), record, structure))

    @property
    def request(self) -> Request:
        return self._parsed.request

    def is_binary(self) -> bool:
        parsed = self._parsed
        return all(type(source) is Raw for source in parsed.sources) and not any(parsed.targets)

    def pieces(self, plan: Plan) -> Pieces | None:
        """The pieces of an answer as `kernels/protowrite.py` has them."""
        head = _Response(model_name=self._parsed.model, model_version=str(plan.version))
        pieces: Pieces = [(head.SerializeToString(), binding.NONE)]
        values = 0
        for spec in plan.specs:
            lead = leading_sizes(spec)
            if lead not in (1, 2):
                return None
            described = _Output(name=spec.name, datatype=spec.datatype)
            pieces.append((described.SerializeToString(), lead))
            pieces.append((b"".join(map(varint, spec.shape[lead:])), binding.NONE))
            values += lead
        return pieces if has_room((text for text, _ in pieces), values) else None

    def score_pieces(self, scores: npt.NDArray[Any]) -> None:
        """None: predictions over gRPC are begun by Python."""
