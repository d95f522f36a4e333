"""Scorings: what a prediction needs beyond its look-ups. Which sizes must agree, where its graph reads each input, and how large the scores are.

A scoring is the part of a variant (`binding.py`) that says this for all requests of a structure. `bind` checks one request's sizes as the full
planner does; a request that fails goes to the full planner, which reports the fault. `write_table` lists, for the thread that runs the graph, the
place and shape of each input and the place of the scores.

Free functions of records and addresses, nogil. Layouts are in `plans.py`.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.records import at, define
from tierstore.lookup import answer_values, by_plan, plans, tensor_answer
from tierstore.wire.protobuf.varint import varint_bytes
from tierstore.wire.request_record import row_at

OWN = -1  # an input's `call`: it is a tensor of the request itself
GRAPH_ROW = define("GraphRow", "a tensor of a graph: its place in memory and its shape", {
    "at": "the address of the tensor",
    "sizes": ((np.int64, (5,)), "the shape of the tensor"),
})  # fmt: skip
graph_row_at, _ROW_BYTES = at(GRAPH_ROW), GRAPH_ROW.bytes

_MOST_BYTES = 0x7FFFFFFF


@nb.njit
def _size(values, size):
    return size if size >= 0 else values.named[~size]


@nb.njit
def bind(variant, record, values):
    """Check a request's sizes. Note in `values` the sizes that have names, and the bytes of each score and their place in the answer's data.

    Returns the bytes of all scores, with the tags and lengths between them if the answer is framed; or -1.
    """
    scoring, framed = variant.scoring, variant.framed
    for i in range(answer_values.MOST_NAMES):
        values.named[i] = -1
    check = scoring.first_check
    for _ in range(scoring.checks):
        size = row_at(record, 1 + check.input).dims[check.axis]
        wanted = check.size
        if wanted < 0 and _size(values, wanted) < 0:
            values.named[~wanted] = size
        elif _size(values, wanted) != size:
            return nb.int64(-1)
        check = plans.check_at(check, 1)
    total, score = nb.int64(0), scoring.first_score
    for i in range(scoring.scores):
        count = score.width
        for axis in range(score.rank):
            count *= _size(values, score.sizes[axis])
            if count > _MOST_BYTES:
                return nb.int64(-1)
        value = answer_values.value_at(values, i)
        value.bytes = count
        if framed == plans.TENSORS_FRAMED:
            total += tensor_answer.frame_bytes(variant, values, i)
        elif framed != plans.UNFRAMED:
            total += 1 + varint_bytes(count)
        value.at = total
        total += count
        score = plans.score_at(score, 1)
    if framed == plans.TENSORS_FRAMED:
        total += tensor_answer.ending_bytes(variant)
    return total


@nb.njit
def _aligned(size):
    return (size + 63) & ~63


@nb.njit
def table_bytes(scoring, record):
    """Bytes of a request's table and of the request's own tensors behind it."""
    size = _aligned(_ROW_BYTES * (scoring.inputs + scoring.scores))
    wanted = scoring.first_input
    for _ in range(scoring.inputs):
        if wanted.call == OWN:
            size += _aligned(row_at(record, 1 + wanted.of).size)
        wanted = plans.graph_input_at(wanted, 1)
    return size


@nb.njit
def write_table(scoring, record, run, tail, values, rows, scores, at):
    """Write the table of a request (inputs, then scores), and the request's own tensors behind it. All arguments but `scoring` are of one request.

    `rows`: the address of the rows that `run` looked up; `scores`: of the answer's data; `tail`: of the request's binary data.
    """
    table, inputs, count = graph_row_at(at), scoring.first_input, scoring.inputs
    own = table + _aligned(_ROW_BYTES * (count + scoring.scores))
    for _ in range(count):
        of, lead = row_at(record, 1 + inputs.of), inputs.lead
        if inputs.call == OWN:
            size = of.size
            copy_bytes(own, tail + of.at, size)
            table.at = own
            own += _aligned(size)
        else:
            call = plans.run_call_at(by_plan.first_call(run), inputs.call)
            table.at = rows + call.out_at
        for axis in range(lead):
            table.sizes[axis] = of.dims[axis]
        if inputs.width > 0:
            table.sizes[lead] = inputs.width
        elif inputs.flat > 0:
            table.sizes[lead - 1] = of.dims[lead - 1] * inputs.flat
        inputs = plans.graph_input_at(inputs, 1)
        table = graph_row_at(table, 1)
    score = scoring.first_score
    for i in range(scoring.scores):
        table.at = scores + answer_values.value_at(values, i).at
        for axis in range(score.rank):
            table.sizes[axis] = _size(values, score.sizes[axis])
        score = plans.score_at(score, 1)
        table = graph_row_at(table, 1)
