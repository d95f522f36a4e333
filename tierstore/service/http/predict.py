"""One predict request of TensorFlow Serving's REST interface, from its body to its answer."""

from __future__ import annotations

from typing import Any

from tierstore.service.http.call import DIRECT_JSON_BYTES, HttpCall
from tierstore.service.http.messages import Response
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.plan import Plan, Request, View
from tierstore.service.plane.tensors import Elements
from tierstore.service.tfs.request import request_of, room_for
from tierstore.service.tfs.rest import PredictBody, encode_answer, parse_predict, tensors_of
from tierstore.service.tfs.signature import DEFAULT


class PredictCall(HttpCall[PredictBody]):
    """A predict request under way."""

    __slots__ = ("_elements",)

    _elements: list[Elements]

    def _parse_here(self) -> PredictBody | None:
        if len(self.body) > DIRECT_JSON_BYTES or b"content-encoding" in self.headers:
            return None
        return parse_predict(self.body)

    def _parse_all(self) -> PredictBody:
        return parse_predict(self._decoded())

    def _is_known_as_large(self, asked: PredictBody) -> bool:
        # what the request is depends on the view; but its default outputs are the dense part's where there is one
        if asked.signature != DEFAULT or asked.picked:
            return False
        return self.service.dataplane.scores(self.model)

    def _fits_here(self, asked: PredictBody, plan: Plan) -> bool:
        return sum(spec.nbytes for spec in plan.specs) <= DIRECT_JSON_BYTES

    def _asks(self, asked: PredictBody) -> Asked:
        def request(view: View) -> Request:
            service = self.service
            tensors = tensors_of(asked, service.signatures.of(self.model, view))
            made, self._elements = request_of(
                service.known_requests, self.model, view, asked.signature, tensors, asked.picked
            )
            return made

        return request

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        self.holding.take(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        assert self._asked is not None
        return Response(200, [encode_answer(self._asked.rows, plan.specs, arrays)])
