"""One predict request of TensorFlow Serving's REST interface, from its body to its answer."""

from __future__ import annotations

from typing import Any

from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.context import Service
from tierstore.service.http.call import DIRECT_JSON_BYTES, HttpCall
from tierstore.service.http.messages import Headers, Response, decode_body
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.plan import Plan, Request, View
from tierstore.service.plane.tensors import Elements
from tierstore.service.tfs.request import request_of, room_for
from tierstore.service.tfs.rest import PredictBody, encode_answer, parse_predict, tensors_of
from tierstore.service.tfs.signature import DEFAULT


class PredictCall(HttpCall):
    """A predict request under way."""

    __slots__ = ("_asked", "_elements")

    def __init__(
        self,
        service: Service,
        model: str,
        version: int | str | None,
        headers: Headers,
        holding: Holding,
        caller: Caller,
    ) -> None:
        super().__init__(service, model, version, headers, holding, caller)
        self._asked: PredictBody | None = None
        self._elements: list[Elements] = []

    def _parse_here(self) -> bool:
        if len(self.body) > DIRECT_JSON_BYTES or b"content-encoding" in self.headers:
            return False
        self._asked = parse_predict(self.body)
        return True

    def _parse_all(self) -> None:
        if self._asked is not None:
            return
        body = self.body
        if coding := self.headers.get(b"content-encoding"):
            body = decode_body(body, coding.strip().lower(), self.service.settings.max_request)
            self.holding.take(len(body))
        self._asked = parse_predict(body)

    def _is_known_as_large(self) -> bool:
        asked = self._asked
        assert asked is not None
        # what the request is depends on the view; but its default outputs are the dense part's where there is one
        if asked.signature != DEFAULT or asked.picked:
            return False
        return self.service.dataplane.scores(self.model)

    def _fits_here(self, plan: Plan) -> bool:
        return sum(spec.nbytes for spec in plan.specs) <= DIRECT_JSON_BYTES

    def _asks(self) -> Asked:
        return self._request

    def _request(self, view: View) -> Request:
        asked = self._asked
        assert asked is not None
        tensors = tensors_of(asked, self.service.signatures.of(self.model, view))
        request, self._elements = request_of(
            self.service.known_requests, self.model, view, asked.signature, tensors, asked.picked
        )
        return request

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        self.holding.take(inference.plan.work_bytes)
        return self._elements, room_for(inference.plan.specs)

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        assert self._asked is not None
        return Response(200, [encode_answer(self._asked.rows, plan.specs, arrays)])
