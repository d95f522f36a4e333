"""Lessons for reactors: requests that Python has planned, in their protocol's form. Pure functions; any thread."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.lookup import binding
from tierstore.lookup import plans as layout
from tierstore.service.dataplane.inference import AnyRequest
from tierstore.service.dataplane.plan import Plan, Request
from tierstore.service.protocols.oip.json_request import InBody, InferRequest
from tierstore.service.protocols.oip.json_response import VALUE, ResponseLayout
from tierstore.service.reactor.variants import Pieces, has_room, leading_sizes
from tierstore.wire.json import scan as json_scan

Logged = tuple[str, str, str | None]  # a method, a path, and the name of the status of success if it is not HTTP's


class Lesson(Protocol):
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

    def is_binary(self) -> bool:
        """Whether all inputs in the request, and all outputs in the answer, are bytes."""

    @property
    def request(self) -> AnyRequest:
        """What is requested."""

    def pieces(self, plan: Plan) -> Pieces | None:
        """The text of a look-up's answer, for its writer; None if it is too long for a reactor."""

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        """`pieces` for a prediction; `scores` are those of its scoring (`lookup/scoring.py`)."""


def size_value(output: int, which: int) -> int:
    """The number of the value for a size of an output: its first (0) or second (1) size."""
    return binding.OUTPUT.bytes // 8 * output + which


def bytes_value(output: int) -> int:
    """The number of the value for the bytes of an output."""
    return size_value(output, binding.OUTPUT.offset("bytes") // 8)


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
    named = binding.VALUES.offset("named") // 8
    sizes = [row["sizes"][: row["rank"]].tolist() for row in scores]
    return [[size if size >= 0 else ~(named + ~size) for size in shape] for shape in sizes]


class HttpLesson:
    """A request of the Open Inference Protocol over HTTP, as a `Lesson`."""

    protocol, form = "oip_http", layout.TENSORS

    def __init__(
        self, model: str, version: int | str | None, text: memoryview, parsed: InferRequest, answer: ResponseLayout
    ) -> None:
        """`text` is its JSON, `version` the version in its path, `answer` the layout of its outputs."""
        of = "" if version is None else f"versions/{version}/"
        path = f"/v2/models/{model}/{of}infer"
        self.path, self.logged = path.encode(), ("POST", path, None)
        self._text, self._parsed, self._answer = text, parsed, answer

    def scan(self, record: int, structure: int) -> int:
        data = np.frombuffer(self._text, np.uint8)
        return int(json_scan.scan(address_of(data), len(data), record, structure))

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
        """Texts with the values behind them, for `binding.write_head`. The closing brace is not in it: an id may
        come before that.
        """
        return self._pieces(row_shapes(plan))

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        return self._pieces(score_shapes(scores))

    def _pieces(self, shapes: list[list[int]] | None) -> Pieces | None:
        if shapes is None:
            return None
        values: list[int] = []
        for i, shape in enumerate(shapes):
            values += [*(~size for size in shape if size < 0), bytes_value(i)]
        texts = self._answer.texts_around([[VALUE if size < 0 else size for size in shape] for shape in shapes])
        return list(zip(texts, [*values, binding.NONE], strict=True)) if has_room(texts, len(values)) else None
