"""A node's answers to a front that requests rows, made without the interpreter where memory has all of them.

Free functions of addresses; any thread. `tiers/upstream/wire.py` describes request and answer. The request's path and line select a plan
(`by_plan.py`).
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.codec import AS_STORED
from tierstore.kernels.partitions import partition_at
from tierstore.kernels.raw import load_i64, load_u8, load_u64, store_u8, store_u64
from tierstore.kernels.sysio import clear_bytes
from tierstore.lookup import plans
from tierstore.lookup.table_rows import probe
from tierstore.tiers.upstream.layout import (
    ABSENT,
    ANSWER_HEAD_BYTES,
    FLOOR,
    FOREIGN,
    REQUEST_HEAD_BYTES,
    THERE,
    UPTO,
    rows_begin,
)
from tierstore.types import Tier

DIGITS = 10
CANNOT = 0  # in place of the answer's bytes: Python must answer

_PENDING, _ABSENT, _HOST = int(Tier.PENDING), int(Tier.ABSENT), int(Tier.HOST)
_NOT_OURS = 255  # a tier number for codes of other nodes' partitions


@nb.njit
def _mark_foreign(table, codes, n, tiers):
    """Set the tier of each code to PENDING or _NOT_OURS. False where the codes are not ascending and distinct."""
    own, count = table.own_at, table.partitions
    for i in range(n):
        code = load_i64(codes, i)
        if i > 0 and load_i64(codes, i - 1) >= code:
            return False
        ours = own == 0 or load_u8(own, partition_at(code, count)) != 0
        store_u8(tiers, i, nb.uint8(_PENDING if ours else _NOT_OURS))
    return True


@nb.njit
def _close_gaps(n, tiers, states, rows, row_bytes):
    """Write the states, and close the gaps between rows that were found. Returns their number; -1 where memory lacks a row."""
    there = 0
    for i in range(n):
        tier = load_u8(tiers, i)
        if tier == _PENDING:
            return -1
        if tier == _NOT_OURS:
            store_u8(states, i, nb.uint8(FOREIGN))
        elif tier == _ABSENT:
            store_u8(states, i, nb.uint8(ABSENT))
        else:
            store_u8(states, i, nb.uint8(THERE))
            if there < i:
                copy_bytes(rows + there * row_bytes, rows + i * row_bytes, row_bytes)
            there += 1
    return there


@compiled_c(types.int64(*[types.int64] * 6), when=LAST)
def run(variant: Any, view: Any, body: Any, size: Any, answer: Any, scratch: Any) -> Any:
    """Answer the request of `size` bytes at `body` under a view. Returns the bytes of the answer, or CANNOT.

    `answer` is the address of room for `rows_begin(n)` bytes and n rows. `scratch`: n bytes, set to the tier that answered each code.
    """
    variant, view = plans.front_rows_at(variant), plans.view_at(view)
    table = plans.table_at(view.tables, variant.table)
    n, codes, seq = (size - REQUEST_HEAD_BYTES) >> 3, body + REQUEST_HEAD_BYTES, view.seq
    if seq > load_i64(body, UPTO) or seq < load_i64(body, FLOOR) or not _mark_foreign(table, codes, n, scratch):
        return CANNOT
    states, rows, row_bytes = answer + ANSWER_HEAD_BYTES, answer + rows_begin(n), table.row_bytes
    probe(table, codes, n, scratch, AS_STORED, rows)
    there = _close_gaps(n, scratch, states, rows, row_bytes)
    if there < 0:
        return CANNOT
    store_u64(answer, 0, nb.uint64(seq))
    store_u64(answer, 1, nb.uint64(n))
    clear_bytes(states + n, rows - states - n)
    return rows - answer + there * row_bytes


@nb.njit
def write_digits(at, value):
    """Write `value` with DIGITS digits, zeros first."""
    for i in range(DIGITS):
        store_u8(at, DIGITS - 1 - i, nb.uint8(48 + value % 10))
        value //= 10


@nb.njit
def count_codes(n, tiers, row):
    """Count in a table's counts, one word a tier at address `row`, which tier answered each code."""
    host = 0
    for i in range(n):
        tier = nb.int64(load_u8(tiers, i))
        if tier == _HOST:
            host += 1
        elif tier != _NOT_OURS:
            store_u64(row, tier, load_u64(row, tier) + np.uint64(1))
    store_u64(row, _HOST, load_u64(row, _HOST) + np.uint64(host))
