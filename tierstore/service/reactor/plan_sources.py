"""Plan sources for reactors: requests that Python has planned, in their protocol's form. Pure functions; any thread."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.lookup import answer_values, binding, json_answer
from tierstore.lookup import plans as layout
from tierstore.service.dataplane.inference import AnyRequest
from tierstore.service.dataplane.plan import Plan
from tierstore.service.protocols.oip.json_request import InferRequest
from tierstore.service.protocols.oip.json_response import VALUE, ResponseLayout
from tierstore.service.protocols.oip.shared_memory import Span
from tierstore.service.reactor import variants
from tierstore.service.reactor.variants import Pieces, has_room, leading_sizes
from tierstore.wire import request_record
from tierstore.wire.json import scan as json_scan
from tierstore.wire.json.elements import GROWTH

Logged = tuple[str, str, str | None]  # a method, a path, and the name of the status of success if it is not HTTP's


class PlanSource(variants.Protocol, Protocol):
    """A request that Python has planned: the parts of its plan in a reactor that depend on the protocol."""

    @property
    def protocol(self) -> str:
        """The label of its protocol in the metrics."""

    @property
    def form(self) -> int:
        """The form of the plan."""

    @property
    def path(self) -> bytes:
        """The path by which a plan is found, besides the structure."""

    @property
    def logged(self) -> Logged:
        """The name of such requests in the log."""

    def scan(self, record: int, structure: int) -> int:
        """Scan it as a reactor does, to these addresses. Returns the bytes of the structure; 0 if it is not of the
        form.
        """

    def is_plain(self) -> bool:
        """Whether a reactor can read all inputs, and write all outputs: all of them as bytes, or all in the JSON."""

    @property
    def request(self) -> AnyRequest:
        """What is requested."""

    def pieces(self, plan: Plan) -> Pieces | None:
        """The text of a look-up's answer, for its writer; None if it is too long for a reactor."""

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        """`pieces` for a prediction; `scores` are those of its scoring (`lookup/scoring.py`)."""


def size_value(output: int, which: int) -> int:
    """The number of the value for a size of an output: its first (0) or second (1) size."""
    return (answer_values.VALUES.offset("outputs") + answer_values.OUTPUT.bytes * output) // 8 + which


def bytes_value(output: int) -> int:
    """The number of the value for the bytes of an output."""
    return size_value(output, answer_values.OUTPUT.offset("bytes") // 8)


def row_shapes(plan: Plan) -> list[list[int]] | None:
    """The shape of each output of a look-up: sizes, or ~ the number of a value. None: some output has more sizes
    than there are values.
    """
    shapes = []
    for i, spec in enumerate(plan.specs):
        lead = leading_sizes(spec)
        if lead not in (1, 2):
            return None
        shapes.append([*(~size_value(i, k) for k in range(lead)), *spec.shape[lead:]])
    return shapes


def score_shapes(scores: npt.NDArray[Any]) -> list[list[int]]:
    """The shape of each score: sizes, or ~ the number of a value."""
    named = answer_values.VALUES.offset("named") // 8
    sizes = [row["sizes"][: row["rank"]].tolist() for row in scores]
    return [[size if size >= 0 else ~(named + ~size) for size in shape] for shape in sizes]


class HttpPlanSource:
    """A request of the Open Inference Protocol over HTTP, as a `PlanSource`."""

    protocol, form = "oip_http", layout.TENSORS
    datatypes = ()

    def __init__(
        self, model: str, version: int | str | None, text: memoryview, parsed: InferRequest, answer: ResponseLayout
    ) -> None:
        """`text` is its JSON, `version` the version in its path, `answer` the layout of its outputs."""
        of = "" if version is None else f"versions/{version}/"
        path = f"/v2/models/{model}/{of}infer"
        self.path, self.logged = path.encode(), ("POST", path, None)
        self._text, self._parsed, self._answer = text, parsed, answer

    def scan(self, record: int, structure: int) -> int:
        text = np.frombuffer(self._text, np.uint8)
        data = np.empty(GROWTH * len(text) + 1, np.uint8)
        return json_scan.scan(address_of(text), len(text), record, address_of(data), structure)

    @property
    def request(self) -> AnyRequest:
        return self._parsed.request

    @property
    def written(self) -> dict[str, int]:
        return {"as_json": layout.FLAT} if self._answer.in_json else {}

    def is_plain(self) -> bool:
        parsed, answer = self._parsed, self._answer
        if answer.late or answer.spans or any(type(source) is Span for source in parsed.sources):
            return False
        if answer.tail_bytes is not None:
            return not answer.in_json
        return bool(answer.in_json) and all(spec.datatype in json_answer.WRITTEN for spec in answer.specs)

    def pieces(self, plan: Plan) -> Pieces | None:
        """Texts with the values behind them, for `binding.write_head` or `json_answer.write`.

        The closing brace is not in it: an id may come before that.
        """
        return self._pieces(row_shapes(plan))

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        return self._pieces(score_shapes(scores))

    def _pieces(self, shapes: list[list[int]] | None) -> Pieces | None:
        if shapes is None:
            return None
        values: list[
            tuple[int, int]
        ] = []  # what follows a text: a value; or the elements of an output, and their datatype
        for i, (spec, shape) in enumerate(zip(self._answer.specs, shapes, strict=True)):
            values += [(~size, 0) for size in shape if size < 0]
            in_json = bool(self._answer.in_json)
            values.append((i, 1 + request_record.DATATYPES.index(spec.datatype)) if in_json else (bytes_value(i), 0))
        texts = self._answer.texts_around([[VALUE if size < 0 else size for size in shape] for shape in shapes])
        if not has_room(texts, len(values)):
            return None
        return [(text, *value) for text, value in zip(texts, [*values, (binding.NONE, 0)], strict=True)]
