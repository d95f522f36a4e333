"""What reactors learn from: requests that Python has planned, as their protocol has them. Pure functions; any thread."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.kernels import binding, jsonscan
from tierstore.kernels import plan_records as layout
from tierstore.kernels.codec import address_of
from tierstore.service.dataplane.inference import AnyRequest
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.oip.json_request import InBody, InferRequest
from tierstore.service.oip.json_response import VALUE, ResponseLayout
from tierstore.service.reactor.plan_words import Pieces, has_room, leading_sizes


class Lesson(Protocol):
    """A request that Python has planned: what of its plan in a reactor depends on the protocol."""

    @property
    def protocol(self) -> str:
        """The label of its protocol in the metrics."""

    @property
    def form(self) -> int:
        """The form of the plan."""

    @property
    def path(self) -> bytes:
        """By which a plan is found, beside the structure."""

    def scan(self, record: int, structure: int) -> int:
        """Scan it as a reactor does, to these addresses. Returns the bytes of the structure; 0 where it is not of the form."""

    def is_binary(self) -> bool:
        """Whether all inputs lie in the request, and all outputs in the answer, as bytes."""

    @property
    def request(self) -> AnyRequest:
        """What is requested."""

    def pieces(self, plan: Plan) -> Pieces | None:
        """The text of a look-up's answer, as its writer has it; None where it is too long for a reactor."""

    def score_pieces(self, scores: npt.NDArray[Any]) -> Pieces | None:
        """As `pieces`, of a prediction; `scores` are those of its scoring (`kernels/scoring.py`)."""


class HttpLesson:
    """A request of the Open Inference Protocol over HTTP, as a `Lesson`."""

    protocol, form = "oip_http", layout.TENSORS

    def __init__(
        self, model: str, version: int | str | None, text: memoryview, parsed: InferRequest, answer: ResponseLayout
    ) -> None:
        """`text` is its JSON, `version` the one that its path names, `answer` the layout of its outputs."""
        of = "" if version is None else f"versions/{version}/"
        self.path = f"/v2/models/{model}/{of}infer".encode()
        self._text, self._parsed, self._answer = text, parsed, answer

    def scan(self, record: int, structure: int) -> int:
        data = np.frombuffer(self._text, np.uint8)
        return int(jsonscan.scan(address_of(data), len(data), record, structure))

    @property
    def request(self) -> AnyRequest:
        return self._parsed.request

    def is_binary(self) -> bool:
        parsed, answer = self._parsed, self._answer
        if not isinstance(parsed.request, Request) or answer.header is None or answer.tail_bytes is None:
            return False
        if answer.spans or any(place is None for place in answer.positions):
            return False
        return all(type(source) is InBody for source in parsed.sources)

    def pieces(self, plan: Plan) -> Pieces | None:
        """Texts with the values behind them, as `binding.write_head` has them. The brace that ends it is not in it: an id may come before that."""
        shapes: list[list[Any]] = []
        values: list[int] = []
        for i, spec in enumerate(plan.specs):
            first, lead = binding.OUTPUT.bytes // 8 * i, leading_sizes(spec)
            shapes.append([*[VALUE] * lead, *spec.shape[lead:]])
            values += [*range(first, first + lead), first + binding.OUTPUT.offset("bytes") // 8]
        return None if any(len(shape) > 3 for shape in shapes) else self._pieces(shapes, values)

    def score_pieces(self, scores: npt.NDArray[Any]) -> Pieces | None:
        named, sizes = binding.VALUES.offset("named") // 8, binding.VALUES.offset("scores") // 8
        shapes = [row["sizes"][: row["rank"]].tolist() for row in scores]
        values: list[int] = []
        for i, shape in enumerate(shapes):
            values += [*(named + ~size for size in shape if size < 0), sizes + i]
        return self._pieces([[VALUE if size < 0 else size for size in shape] for shape in shapes], values)

    def _pieces(self, shapes: list[list[Any]], values: list[int]) -> Pieces | None:
        texts = self._answer.texts_around(shapes)
        return list(zip(texts, [*values, binding.NONE], strict=True)) if has_room(texts, len(values)) else None
