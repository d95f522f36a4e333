"""What a prediction asks beyond its look-ups: which sizes must agree, where its graph reads what, and how large the scores are.

A scoring is the part of a variant (`binding.py`) that says this for all requests of a structure. `bind` checks one request's
sizes as the full planner does; what does not pass is for that one, which says what is wrong. `write_table` notes for whoever
runs the graph where each of its inputs lies, in which shape, and where the scores go.

Free functions of addresses, nogil. Layouts: int64 words.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import binding, lookupplan
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.request_record import AT, DIMS, SIZE, get, put, row_at

# a scoring; NUMBER names its graph; HALF: rows of some input come as half the bytes that count in the look-up's limit
NUMBER, CHECKS, CHECKS_FROM, INPUTS, INPUTS_FROM, SCORES, SCORES_FROM, HALF = range(8)
SCORING_WORDS = 8
# a check: an input of the request, one of its axes, and what size that has: a number, or that of a name, as ~name
CHECK_INPUT, CHECK_AXIS, CHECK_SIZE = range(3)
CHECK_WORDS = 3
# an input of the graph: the look-up that it has the rows of (OWN: it is the request's tensor itself); the input of the request that
# has its first LEAD sizes; then the size behind them (WIDTH), or by which the last is multiplied (FLAT)
CALL, OF, LEAD, WIDTH, FLAT = range(5)
INPUT_WORDS = 5
OWN = -1
# a score: bytes of an element, its rank, and its sizes as in a check
SCORE_WIDTH, SCORE_RANK, SCORE_SIZES = range(3)
MOST_SCORE_RANK = 4
SCORE_WORDS = SCORE_SIZES + MOST_SCORE_RANK
# a row of the table: an address, and sizes
ROW_AT, ROW_SIZES = 0, 1
ROW_WORDS = 6

_MOST_BYTES = 0x7FFFFFFF


@nb.njit
def _size(values, size):  # type: ignore[no-untyped-def]
    return size if size >= 0 else get(values, binding.NAMES_FROM + ~size)


@nb.njit
def bind(scoring, record, values):  # type: ignore[no-untyped-def]
    """Check a request's sizes, and note those that have names and the bytes of each score in `values`. Returns the bytes of all scores, or -1."""
    for i in range(binding.MOST_NAMES):
        put(values, binding.NAMES_FROM + i, -1)
    check = get(scoring, CHECKS_FROM)
    for _ in range(get(scoring, CHECKS)):
        size = get(row_at(record, 1 + get(check, CHECK_INPUT)), DIMS + get(check, CHECK_AXIS))
        wanted = get(check, CHECK_SIZE)
        if wanted < 0 and _size(values, wanted) < 0:
            put(values, binding.NAMES_FROM + ~wanted, size)
        elif _size(values, wanted) != size:
            return nb.int64(-1)
        check += 8 * CHECK_WORDS
    total, score = nb.int64(0), get(scoring, SCORES_FROM)
    for i in range(get(scoring, SCORES)):
        count = get(score, SCORE_WIDTH)
        for axis in range(get(score, SCORE_RANK)):
            count *= _size(values, get(score, SCORE_SIZES + axis))
            if count > _MOST_BYTES:
                return nb.int64(-1)
        put(values, binding.SCORES_FROM + i, count)
        total += count
        score += 8 * SCORE_WORDS
    return total


@nb.njit
def _aligned(size):  # type: ignore[no-untyped-def]
    return (size + 63) & ~63


@nb.njit
def table_bytes(scoring, record):  # type: ignore[no-untyped-def]
    """Bytes of a request's table, and of its own tensors behind that."""
    size = _aligned(8 * ROW_WORDS * (get(scoring, INPUTS) + get(scoring, SCORES)))
    wanted = get(scoring, INPUTS_FROM)
    for _ in range(get(scoring, INPUTS)):
        if get(wanted, CALL) == OWN:
            size += _aligned(get(row_at(record, 1 + get(wanted, OF)), SIZE))
        wanted += 8 * INPUT_WORDS
    return size


@nb.njit
def write_table(scoring, record, run, tail, values, rows, scores, table):  # type: ignore[no-untyped-def]
    """Write the table of a request, and its own tensors behind it: first inputs, then scores. All but `scoring` are addresses of one request.

    `rows`: of those that `run` has looked up; `scores`: where those go; `tail`: of the request's binary data.
    """
    inputs, count = get(scoring, INPUTS_FROM), get(scoring, INPUTS)
    own = table + _aligned(8 * ROW_WORDS * (count + get(scoring, SCORES)))
    for _ in range(count):
        of, lead = row_at(record, 1 + get(inputs, OF)), get(inputs, LEAD)
        if get(inputs, CALL) == OWN:
            size = get(of, SIZE)
            copy_bytes(own, tail + get(of, AT), size)
            put(table, ROW_AT, own)
            own += _aligned(size)
        else:
            call = run + 8 * (lookupplan.RUN_WORDS + lookupplan.CALL_WORDS * get(inputs, CALL))
            put(table, ROW_AT, rows + get(call, lookupplan.OUT_AT))
        for axis in range(lead):
            put(table, ROW_SIZES + axis, get(of, DIMS + axis))
        if get(inputs, WIDTH) > 0:
            put(table, ROW_SIZES + lead, get(inputs, WIDTH))
        elif get(inputs, FLAT) > 0:
            put(table, ROW_SIZES + lead - 1, get(of, DIMS + lead - 1) * get(inputs, FLAT))
        inputs += 8 * INPUT_WORDS
        table += 8 * ROW_WORDS
    score = get(scoring, SCORES_FROM)
    for i in range(get(scoring, SCORES)):
        put(table, ROW_AT, scores)
        for axis in range(get(score, SCORE_RANK)):
            put(table, ROW_SIZES + axis, _size(values, get(score, SCORE_SIZES + axis)))
        scores += get(values, binding.SCORES_FROM + i)
        score += 8 * SCORE_WORDS
        table += 8 * ROW_WORDS
