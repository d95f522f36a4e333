"""The steps of an answer by plan, one call each: words are bound, heads and messages are written."""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.lookup import binding, grpc_answer, json_answer, plans
from tierstore.lookup.answer_values import values_at
from tierstore.lookup.plans import lookup_at
from tierstore.wire.request_record import record_at


@compiled(types.int64(*[types.int64] * 8), when=LAST)
def bind(variant: Any, view: Any, record: Any, tail: Any, codes: Any, most: Any, run: Any, values: Any) -> Any:
    variant, view, record = lookup_at(variant), plans.view_at(view), record_at(record)
    return binding.bind(variant, view, record, tail, codes, most, plans.run_at(run), values_at(values))


@compiled(types.int64(*[types.int64] * 6), when=LAST)
def write_head(variant: Any, record: Any, values: Any, size: Any, date: Any, end: Any) -> Any:
    return binding.write_head(lookup_at(variant), record_at(record), values_at(values), size, False, date, end)


@compiled(types.int64(*[types.int64] * 4), when=LAST)
def write_message(variant: Any, record: Any, values: Any, data: Any) -> Any:
    grpc_answer.frame_outputs(lookup_at(variant), values_at(values), data)
    return grpc_answer.describe(lookup_at(variant), record_at(record), values_at(values), data)


@compiled(types.int64(types.int64, types.int64), when=LAST)
def most_bytes(variant: Any, values: Any) -> Any:
    return json_answer.most_bytes(lookup_at(variant), values_at(values))
