"""How requests of a structure are answered, as numbers: the words of a variant (`kernels/binding.py`). Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from tierstore.kernels import binding
from tierstore.kernels import lookupplan as layout
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.kernels.pool import combiner_code
from tierstore.service.dataplane.datatypes import BYTES, KEY_DATATYPES
from tierstore.service.dataplane.plan import Call, OutputSpec, Plan

FOUND = ".found"
Pieces = list[tuple[bytes, int]]  # of an answer: texts, each with what its writer puts behind it, or NONE


def address(data: bytes) -> int:
    """Of bytes that the caller keeps."""
    return address_of(np.frombuffer(data, np.uint8))


def variant_words(
    token: int, plan: Plan, form: int, pieces: Pieces, view: Any, counts: list[int]
) -> tuple[list[int], list[object]]:
    """(the words, what they point to). `pieces` are those of an answer of the `form`; `counts` says where version and tables are counted."""
    order = list(view.open_version.tables)
    calls = [
        planned_words(call, plan, order.index(call.table.name), row, view)
        for call, row in zip(plan.calls, counts[1:], strict=True)
    ]
    elements = [spec.dtype.itemsize * (1 if spec.name.endswith(FOUND) else spec.shape[-1]) for spec in plan.specs]
    placed = [(address(text), len(text), value) for text, value in pieces]
    parts = [np.array(part, np.int64) for part in (list(chain(*calls)), elements, list(chain(*placed)))]
    words = [0] * binding.VARIANT_WORDS
    for which, value in {
        layout.TOKEN: token,
        layout.COUNTS: counts[0],
        binding.FRAMED: int(form == layout.MESSAGE),
        binding.OUTPUTS: len(elements),
        binding.PLANNED_CALLS: len(calls),
        binding.PIECES: len(pieces),
        binding.CALLS_FROM: address_of(parts[0]),
        binding.OUTPUTS_FROM: address_of(parts[1]),
        binding.PIECES_FROM: address_of(parts[2]),
    }.items():
        words[which] = value
    return words, [pieces, parts]


def is_runnable(plan: Plan) -> bool:
    """Whether a reactor can answer requests of this plan's structure, whatever their sizes."""
    if plan.dense is not None or plan.numbers is not None:
        return False
    # strings that nothing is asked of are checked by Python
    return not any(call.spec.datatype == BYTES and not call.rows and not call.found for call in plan.calls)


def leading_sizes(spec: OutputSpec) -> int:
    """How many of an output's sizes are values of the request; those behind them are the same for all requests."""
    return len(spec.shape) - (0 if spec.name.endswith(FOUND) else 1)


def has_room(texts: Iterable[bytes], values: int) -> bool:
    """Whether an answer of these texts, with so many values between them, is short enough for a reactor."""
    return sum(map(len, texts)) <= kernel.HEAD_ROOM - binding.MOST_ADDED_BYTES - binding.MOST_DIGITS * values


def planned_words(call: Call, plan: Plan, table: int, counts: int, view: Any) -> list[int]:
    """A call as `binding.bind` reads it."""
    ragged = call.rows and call.pooled
    kind = (
        layout.BAGS_OF_ROWS
        if ragged
        else layout.ROWS
        if call.rows
        else layout.FOUND_ALONE
        if call.found
        else layout.CHECKED
    )
    half = bool(call.rows) and plan.specs[call.rows[0]].datatype == "FP16"
    padding = view.open_version.padding.get(call.feature.name)
    usual = call.spec.datatype == KEY_DATATYPES[call.table.key][0]
    form = layout.STRINGS if call.spec.datatype == BYTES else layout.AS_CODES if usual else layout.NO_NEGATIVE
    words = [0] * binding.PLANNED_WORDS
    for which, value in {
        layout.TABLE: table,
        layout.KIND: kind,
        layout.OUT_CODE: int(half),
        layout.COMBINER: 0 if call.combiner is None else combiner_code(call.combiner),
        layout.PADDED: int(padding is not None),
        layout.PADDING: 0 if padding is None else int(padding),
        layout.TABLE_COUNTS: counts,
        layout.KEY_FORM: form,
        binding.KEYS_OF: call.keys,
        binding.OFFSETS_OF: binding.NONE if call.offsets is None else call.offsets,
        binding.WEIGHTS_OF: binding.NONE if call.weights is None else call.weights,
        binding.ROWS_TO: call.rows[0] if call.rows else binding.NONE,
        binding.FOUND_TO: call.found[0] if call.found else binding.NONE,
    }.items():
        words[which] = value
    return words
