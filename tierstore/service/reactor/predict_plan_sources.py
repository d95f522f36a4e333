"""Plan sources for reactors (`reactor/plan_sources.py`) from predict requests. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.kernels.codec import address_of
from tierstore.lookup import binding, json_answer
from tierstore.lookup import plans as layout
from tierstore.service.dataplane.plan import OutputSpec, Plan, Request
from tierstore.service.reactor.plan_sources import row_shapes, score_shapes
from tierstore.service.reactor.variants import Pieces, has_room
from tierstore.wire import request_record
from tierstore.wire.json import predict as json_predict
from tierstore.wire.json.elements import GROWTH


class PredictPlanSource:
    """The part of a plan source that JSON and gRPC share: inputs are in the order of their names, the plan has their
    datatypes.
    """

    def __init__(self, text: bytes | memoryview, request: Request, specs: Sequence[OutputSpec]) -> None:
        """`text` is the whole request, `specs` those of its plan."""
        self._text, self.request, self._specs = text, request, specs
        self.datatypes = [1 + request_record.DATATYPES.index(spec.datatype) for spec in request.inputs]

    def pieces(self, plan: Plan) -> Pieces | None:
        shapes = row_shapes(plan)
        return None if shapes is None else self._checked(self._pieces(shapes), shapes)

    def score_pieces(self, plan: Plan, scores: npt.NDArray[Any]) -> Pieces | None:
        shapes = score_shapes(scores)
        return self._checked(self._pieces(shapes), shapes)

    def _pieces(self, shapes: list[list[int]]) -> Pieces:
        raise NotImplementedError

    @staticmethod
    def _checked(pieces: Pieces, shapes: list[list[int]]) -> Pieces | None:
        return pieces if has_room((text for text, *_ in pieces), sum(map(len, shapes))) else None


class RestPlanSource(PredictPlanSource):
    """A predict request in JSON, as a `PlanSource`; `rows`: in the row form."""

    protocol, form = "tfs_http", layout.TENSORS

    def __init__(
        self,
        model: str,
        version: int | str | None,
        text: memoryview,
        request: Request,
        specs: Sequence[OutputSpec],
        *,
        rows: bool,
    ) -> None:
        super().__init__(text, request, specs)
        of = "" if version is None else f"/labels/{version}" if isinstance(version, str) else f"/versions/{version}"
        path = f"/v1/models/{model}{of}:predict"
        self.path, self.logged, self._rows = path.encode(), ("POST", path, None), rows

    def scan(self, record: int, structure: int) -> int:
        text = np.frombuffer(self._text, np.uint8)
        data = np.empty(GROWTH * len(text) + 1, np.uint8)
        return json_predict.scan(address_of(text), len(text), record, address_of(data), structure)

    @property
    def written(self) -> dict[str, int]:
        return {"as_json": layout.BY_ROW if self._rows and len(self._specs) > 1 else layout.NESTED}

    def is_plain(self) -> bool:
        """Whether all outputs are numbers whose shapes are known, and in the row form all of them have rows."""
        return all(
            spec.fixed and spec.datatype in json_answer.WRITTEN and (spec.shape or not self._rows)
            for spec in self._specs
        )

    def _pieces(self, shapes: list[list[int]]) -> Pieces:
        """Texts with the outputs behind them, for `json_answer.write`. The closing brace is not in it."""
        outer = b'{"predictions":' if self._rows else b'{"outputs":'
        behind = [
            (i, 1 + request_record.DATATYPES.index(spec.datatype), len(shape), *shape)
            for i, (spec, shape) in enumerate(zip(self._specs, shapes, strict=True))
        ]
        if len(behind) == 1:
            return [(outer, *behind[0])]
        names = [orjson.dumps(spec.name) + b":" for spec in self._specs]
        texts = [(b"," if i else b"{") + name for i, name in enumerate(names)]
        if self._rows:
            return [(outer + b"[", binding.NONE), *((text, *of) for text, of in zip(texts, behind, strict=True))]
        texts[0] = outer + texts[0]
        return [*((text, *of) for text, of in zip(texts, behind, strict=True)), (b"}", binding.NONE)]
