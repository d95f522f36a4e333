"""How requests of a structure are answered, as numbers: the words of a variant (`kernels/binding.py`). Pure functions; any thread."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels import binding
from tierstore.kernels import lookupplan as layout
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.kernels.pool import combiner_code
from tierstore.kernels.scoring import SCORE_RANK, SCORE_SIZES
from tierstore.predict.binding import ALIGNMENT
from tierstore.service.dataplane.datatypes import BYTES, KEY_DATATYPES
from tierstore.service.dataplane.plan import Call, Plan, Request
from tierstore.service.oip.json_request import InBody, InferRequest
from tierstore.service.oip.json_response import ResponseLayout

FOUND = ".found"
_PLACES = 1 << 61  # a number that stands for a value in the text of an answer, and those behind it for others
_PLACE = re.compile(rb"(23058430092136[0-9]{5})")


def address(data: bytes) -> int:
    """Of bytes that the caller keeps."""
    return address_of(np.frombuffer(data, np.uint8))


def variant_words(
    token: int, plan: Plan, pieces: list[tuple[bytes, int]], view: Any, counts: list[int]
) -> tuple[list[int], list[object]]:
    """(the words, what they point to), of look-ups. `pieces` are those of the answer; `counts` says where version and tables are counted."""
    rows = [(call.rows[0], plan.specs[call.rows[0]].datatype == "FP16") if call.rows else None for call in plan.calls]
    elements = [spec.dtype.itemsize * (1 if spec.name.endswith(FOUND) else spec.shape[-1]) for spec in plan.specs]
    return _variant_words(token, plan, pieces, view, counts, rows, elements, {binding.ALIGNMENT: 1})


def prediction_words(
    token: int,
    plan: Plan,
    pieces: list[tuple[bytes, int]],
    view: Any,
    counts: list[int],
    refusal: dict[int, int],
    scoring: npt.NDArray[np.int64],
) -> tuple[list[int], list[object]]:
    """As `variant_words`, of predictions, whose rows have places for their graph: with the words of a refusal, and of a scoring."""
    rows: list[tuple[int, bool] | None] = []
    elements: list[int] = []
    for call in plan.calls:
        rows.append(None if call.feeds is None else (len(elements), call.feeds.dtype == "float16"))
        elements += [] if call.feeds is None else [call.feeds.row_bytes]
    more = {binding.ALIGNMENT: ALIGNMENT, binding.SCORING_AT: address_of(scoring), **refusal}
    words, kept = _variant_words(token, plan, pieces, view, counts, rows, elements, more)
    return words, [*kept, scoring]


def _variant_words(
    token: int,
    plan: Plan,
    pieces: list[tuple[bytes, int]],
    view: Any,
    counts: list[int],
    rows: list[tuple[int, bool] | None],
    elements: list[int],
    more: dict[int, int],
) -> tuple[list[int], list[object]]:
    """`rows`: for each call which output its rows are, and whether as halves; `elements`: bytes of an element of each output."""
    order = list(view.open_version.tables)
    calls = [
        planned_words(call, of, order.index(call.table.name), row, view)
        for call, of, row in zip(plan.calls, rows, counts[1:], strict=True)
    ]
    placed = [(address(text), len(text), value) for text, value in pieces]
    parts = [np.array(part, np.int64) for part in (list(chain(*calls)), elements, list(chain(*placed)))]
    words = [0] * binding.VARIANT_WORDS
    for which, value in {
        layout.TOKEN: token,
        layout.COUNTS: counts[0],
        binding.OUTPUTS: len(elements),
        binding.PLANNED_CALLS: len(calls),
        binding.PIECES: len(pieces),
        binding.CALLS_FROM: address_of(parts[0]),
        binding.OUTPUTS_FROM: address_of(parts[1]),
        binding.PIECES_FROM: address_of(parts[2]),
        **more,
    }.items():
        words[which] = value
    return words, [pieces, parts]


def is_runnable(parsed: InferRequest, plan: Plan, answer: ResponseLayout) -> bool:
    """Whether a reactor can answer requests of this structure, whatever their sizes."""
    if plan.dense is not None or plan.numbers is not None or not isinstance(parsed.request, Request):
        return False
    if answer.header is None or answer.tail_bytes is None or answer.spans:
        return False
    if any(place is None for place in answer.positions) or not all(type(source) is InBody for source in parsed.sources):
        return False
    # strings that nothing is asked of are checked by Python
    return not any(call.spec.datatype == BYTES and not call.rows and not call.found for call in plan.calls)


def answer_pieces(plan: Plan, answer: ResponseLayout) -> list[tuple[bytes, int]] | None:
    """The text of a look-up's answer in pieces: (text, the value behind it, or NONE); None where it is too long for a reactor.

    Values are as `binding.py` has them. The brace that ends the text is not in it: an id may come before that.
    """
    shapes, sizes = [], []
    for i, spec in enumerate(plan.specs):
        first = _PLACES + binding.VALUE_WORDS * i
        inner = 0 if spec.name.endswith(FOUND) else 1  # sizes that are the same for all requests
        lead = len(spec.shape) - inner
        shapes.append([*(first + k for k in range(lead)), *spec.shape[lead:]])
        sizes.append(first + 2)
    return None if any(len(spec.shape) > 3 for spec in plan.specs) else _pieces(answer, shapes, sizes)


def score_pieces(scores: npt.NDArray[np.int64], answer: ResponseLayout) -> list[tuple[bytes, int]] | None:
    """`answer_pieces` of a prediction; `scores` are those of its scoring (`kernels/scoring.py`)."""
    shapes = [
        [
            size if size >= 0 else _PLACES + binding.NAMES_FROM + ~size
            for size in row[SCORE_SIZES : SCORE_SIZES + row[SCORE_RANK]]
        ]
        for row in scores.tolist()
    ]
    return _pieces(answer, shapes, [_PLACES + binding.SCORES_FROM + i for i in range(len(shapes))])


def _pieces(answer: ResponseLayout, shapes: list[list[int]], sizes: list[int]) -> list[tuple[bytes, int]] | None:
    text = answer.text_with(shapes, sizes)
    parts = _PLACE.split(text[:-1])
    values = [int(number) - _PLACES for number in parts[1::2]]
    wanted = [
        number - _PLACES
        for shape, size in zip(shapes, sizes, strict=True)
        for number in (*shape, size)
        if number >= _PLACES
    ]
    if values != wanted:
        return None
    pieces = list(zip(parts[::2], [*values, binding.NONE], strict=True))
    room = kernel.HEAD_ROOM - binding.MOST_ADDED_BYTES - binding.MOST_DIGITS * len(values)
    return pieces if sum(map(len, parts[::2])) <= room else None


def planned_words(call: Call, rows: tuple[int, bool] | None, table: int, counts: int, view: Any) -> list[int]:
    """A call as `binding.bind` reads it. `rows`: which output its rows are, and whether as halves."""
    if rows is not None:
        kind = layout.BAGS_OF_ROWS if call.pooled else layout.ROWS
    else:
        kind = layout.FOUND_ALONE if call.found else layout.CHECKED
    padding = view.open_version.padding.get(call.feature.name)
    usual = call.spec.datatype == KEY_DATATYPES[call.table.key][0]
    form = layout.STRINGS if call.spec.datatype == BYTES else layout.AS_CODES if usual else layout.NO_NEGATIVE
    words = [0] * binding.PLANNED_WORDS
    for which, value in {
        layout.TABLE: table,
        layout.KIND: kind,
        layout.OUT_CODE: int(rows is not None and rows[1]),
        layout.COMBINER: 0 if call.combiner is None else combiner_code(call.combiner),
        layout.PADDED: int(padding is not None),
        layout.PADDING: 0 if padding is None else int(padding),
        layout.TABLE_COUNTS: counts,
        layout.KEY_FORM: form,
        binding.KEYS_OF: call.keys,
        binding.OFFSETS_OF: binding.NONE if call.offsets is None else call.offsets,
        binding.WEIGHTS_OF: binding.NONE if call.weights is None else call.weights,
        binding.ROWS_TO: binding.NONE if rows is None else rows[0],
        binding.FOUND_TO: call.found[0] if call.found else binding.NONE,
    }.items():
        words[which] = value
    return words
