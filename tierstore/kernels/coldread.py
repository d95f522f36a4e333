"""Reader threads without the interpreter: they read rows that memory does not hold from the sealed base.

A reactor that needs such rows, or has a request that would keep it from others for long, makes a job of it and writes its number to
a pipe, from which all reader threads read. One of them completes the answer in the job's own memory and writes the number to the reactor's pipe. A job keeps the
generation that the reactor had announced, and so its view, until the reactor reclaims it.

Keys that the filter of changed keys cannot rule out are for RocksDB, and keys that the drive could not read, or that are in
another node's partitions, need an error from Python: such a job ends as FOR_PYTHON, and Python answers the request from the start. Rows that were read are
offered to the cache through a pipe to Python, which writes them; an offer that finds no room is dropped.

Free functions of addresses, nogil. Nothing here survives a crash.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, bloom, compiled, lookupplan, sealed
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes
from tierstore.kernels.codec import decode_row
from tierstore.kernels.lookupplan import word
from tierstore.kernels.partitions import group, partition_at
from tierstore.kernels.raw import call_at, i64_at, load_u8, store_u8, store_u64, u32_at
from tierstore.kernels.sysio import EINTR, allocate, read, release, write
from tierstore.types import Tier

# words of a job
(
    FD, SERIAL, ANNOUNCED, VARIANT, VIEW, TAIL, BLOCK, RUN, HEAD_BYTES, DATA_BYTES, STATES, REACTOR, OUTCOME, BEGAN_NS,
    PLANNED_NS, PROBED, CALLER_RATES, MODEL_RATES, BODY_BYTES, KEYS, HELD_BYTES,
) = range(21)  # fmt: skip
# HELD_BYTES: what counts as held while it lasts; SCORING: which graph is run, of a prediction; the others are its own as well
SCORING, TABLE, QUEUED_NS, ARRIVED_NS, DEADLINE_NS = range(21, 26)
JOB_WORDS = 32
DONE, FOR_PYTHON = 0, 1  # of OUTCOME

# an offer of rows that were read: words, then keys int64[n], states uint8[n] padded to words, rows uint8[n, row_bytes]
OFFER_BYTES, OFFER_TABLE, OFFER_SEQ, OFFER_KEYS, OFFER_ROW_BYTES = range(5)
OFFER_WORDS = 5
MOST_OFFERED = 64 << 20  # bytes that wait for Python

# words that all readers share
OFFERED, RUN_AT = 0, 8  # RUN_AT: the address of `lookupplan.run`
SHARED_WORDS = 16

_WINDOW = 32  # blocks on their way for one job
_PENDING, _ABSENT, _DISK = int(Tier.PENDING), int(Tier.ABSENT), int(Tier.DISK)


@nb.njit
def _perhaps_changed(changed, keys):  # type: ignore[no-untyped-def]
    """Whether a delta may have changed one of `keys`; `changed` is the address of the address of the filter's layers."""
    layers = acquire_i64(changed)
    if layers == 0:
        return False
    perhaps = np.zeros(keys.size, np.bool_)
    found = 0
    for i in range(word(layers, 0)):
        words = nb.carray(u32_at(word(layers, 1 + 2 * i)), (word(layers, 2 + 2 * i),))
        found += bloom.probe(keys, words, perhaps)
    return found > 0


@nb.njit
def _are_own(table, keys):  # type: ignore[no-untyped-def]
    """Whether this node has the partitions of all `keys`."""
    is_own, partitions = word(table, lookupplan.OWN_AT), word(table, lookupplan.PARTITIONS)
    if is_own != 0:
        for i in range(keys.size):
            if load_u8(is_own, partition_at(keys[i], partitions)) == 0:
                return False
    return True


@nb.njit
def _offer(shared, outbox, table, seq, keys, state, rows, row_bytes):  # type: ignore[no-untyped-def]
    """Offer rows that were read to the cache."""
    n = keys.size
    padded = (n + 7) & ~7
    size = 8 * OFFER_WORDS + 8 * n + padded + n * row_bytes
    if add_at(shared + 8 * OFFERED, size) + size <= MOST_OFFERED:
        block = allocate(size)
        if block != 0:
            for i, value in enumerate((size, word(table, lookupplan.TABLE_ID), seq, n, row_bytes)):
                store_u64(block, i, nb.uint64(value))
            at = block + 8 * OFFER_WORDS
            copy_bytes(at, nb.int64(keys.ctypes.data), 8 * n)
            copy_bytes(at + 8 * n, nb.int64(state.ctypes.data), n)
            copy_bytes(at + 8 * n + padded, nb.int64(rows.ctypes.data), n * row_bytes)
            message = np.empty(1, np.int64)
            message[0] = block
            if write(outbox, nb.int64(message.ctypes.data), 8) == 8:
                return
            release(block)
    add_at(shared + 8 * OFFERED, -size)


@nb.njit
def _fetch(shared, outbox, table, seq, keys_at, n, state_at, out_code, out):  # type: ignore[no-untyped-def]
    """Answer the keys that are PENDING from the base: rows to `out`, states. False if it cannot answer all."""
    base, dim, code = word(table, lookupplan.BASE_AT), word(table, lookupplan.TABLE_DIM), word(table, lookupplan.CODE)
    if base == 0:
        return False
    row_bytes = word(table, lookupplan.ROW_BYTES)
    pending = 0
    for i in range(n):
        pending += load_u8(state_at, i) == _PENDING
    places, wanted_keys = np.empty(pending, np.int64), np.empty(pending, np.int64)
    k = 0
    for i in range(n):
        if load_u8(state_at, i) == _PENDING:
            places[k], wanted_keys[k] = i, word(keys_at, i)
            k += 1
    order, parts = np.argsort(wanted_keys), word(base, lookupplan.PARTS)
    if parts > 1:
        ascending, starts = order, np.empty(parts + 1, np.int64)
        order = np.empty(pending, np.int64)
        group(wanted_keys, ascending, order, starts)
    which = np.empty(pending, np.int64)  # of the distinct keys, for each in order
    keys = np.empty(pending, np.int64)
    distinct = 0
    for k in range(pending):
        key = wanted_keys[order[k]]
        if k == 0 or key != keys[distinct - 1]:
            keys[distinct] = key
            distinct += 1
        which[k] = distinct - 1
    keys = keys[:distinct]
    if not _are_own(table, keys) or _perhaps_changed(word(base, lookupplan.CHANGED_AT), keys):
        return False
    files = word(base, lookupplan.FILES)
    fences = nb.carray(i64_at(word(base, lookupplan.FENCES_AT)), (word(base, lookupplan.FENCES),))
    part_starts = nb.carray(i64_at(word(base, lookupplan.PART_STARTS_AT)), (parts + 1,))
    ends = nb.carray(i64_at(word(base, lookupplan.ENDS_AT)), (files,))
    counts = nb.carray(i64_at(word(base, lookupplan.ROWS_AT)), (files,))
    fds = nb.carray(i64_at(word(base, lookupplan.FDS_AT)), (files,))
    block_bytes = word(base, lookupplan.BLOCK_BYTES)
    rows, buffer = np.empty(distinct * row_bytes, np.uint8), np.empty(block_bytes, np.uint8)
    state, trouble = np.zeros(distinct, np.uint8), np.zeros(distinct, np.int32)
    failed = sealed._look_up(
        keys, np.ones(distinct, np.bool_), nb.int64(rows.ctypes.data), row_bytes, row_bytes, state, trouble, fences, part_starts,
        ends, counts, fds, word(base, lookupplan.PER_BLOCK), block_bytes, nb.int64(buffer.ctypes.data), _WINDOW,
    )  # fmt: skip
    if failed != 0 or buffer.size == 0:
        return False
    default = word(table, lookupplan.HALF_DEFAULT_AT if out_code == 1 else lookupplan.DEFAULT_AT)
    out_bytes = dim * (4 >> out_code)
    for k in range(pending):
        i, of = places[order[k]], which[k]
        store_u8(state_at, i, state[of])
        if state[of] == _DISK:
            decode_row(code, out_code, nb.int64(rows.ctypes.data) + of * row_bytes, out + i * out_bytes, dim)
        else:
            copy_bytes(out + i * out_bytes, default, out_bytes)
    _offer(shared, outbox, table, seq, keys, state, rows, row_bytes)
    return True


@nb.njit
def _finish_bags(shared, outbox, call, table, seq, keys, n, state, tail, out):  # type: ignore[no-untyped-def]
    """Look all keys of a call's bags up as rows, and pool those."""
    dim = word(table, lookupplan.TABLE_DIM)
    size = lookupplan.bag_scratch(call, n, dim)
    scratch = allocate(size)
    if scratch == 0:
        return False
    rows = lookupplan.probe_for_bags(call, table, keys, n, state, tail, scratch)
    done = _fetch(shared, outbox, table, seq, keys, n, state, 0, rows)
    if done:
        lookupplan.pool_probed(call, table, keys, n, tail, rows, out, scratch)
    release(scratch)
    return done


@nb.njit
def _probe_all(shared, job):  # type: ignore[no-untyped-def]
    """Do what a reactor does with a small request: what comes of it, as `lookupplan.run` says."""
    run, data = word(job, RUN), word(job, BLOCK) + word(job, HEAD_BYTES)
    scratch = allocate(word(run, lookupplan.SCRATCH) + 64)
    if scratch == 0:
        return lookupplan.DOUBTFUL
    came = call_at(word(shared, RUN_AT), run, word(job, VIEW), word(job, TAIL), data, word(job, STATES), scratch)
    release(scratch)
    return came


@compiled(types.int64(types.int64, types.int64, types.int64), when=LAST)
def finish(shared: Any, outbox: Any, job: Any) -> Any:
    """Complete the answer of a job: DONE or FOR_PYTHON."""
    run, view, tail = word(job, RUN), word(job, VIEW), word(job, TAIL)
    data = word(job, BLOCK) + word(job, HEAD_BYTES)
    call, state, seq = run + 8 * lookupplan.RUN_WORDS, word(job, STATES), word(view, lookupplan.VIEW_SEQ)
    if word(job, PROBED) == 0:
        came = _probe_all(shared, job)
        if came != lookupplan.COLD:
            return DONE if came == lookupplan.ANSWERED else FOR_PYTHON
    for _ in range(word(run, lookupplan.CALLS)):
        table = view + 8 * (lookupplan.VIEW_WORDS + lookupplan.TABLE_WORDS * word(call, lookupplan.TABLE))
        keys, n, kind = lookupplan.keys_of(run, call, tail), word(call, lookupplan.KEYS_N), word(call, lookupplan.KIND)
        if kind == lookupplan.CHECKED:
            call += 8 * lookupplan.CALL_WORDS
            continue
        if lookupplan.is_cold(state, n):
            out = data + word(call, lookupplan.OUT_AT)
            if kind == lookupplan.BAGS_OF_ROWS:
                done = _finish_bags(shared, outbox, call, table, seq, keys, n, state, tail, out)
            elif kind == lookupplan.ROWS:
                done = _fetch(shared, outbox, table, seq, keys, n, state, word(call, lookupplan.OUT_CODE), out)
            else:
                rows = np.empty(n * word(table, lookupplan.TABLE_DIM), np.float32)
                done = (
                    _fetch(shared, outbox, table, seq, keys, n, state, 0, nb.int64(rows.ctypes.data)) and rows.size >= 0
                )
            if not done:
                return FOR_PYTHON
            if word(call, lookupplan.FOUND_AT) >= 0:
                found = data + word(call, lookupplan.FOUND_AT)
                for i in range(n):
                    store_u8(found, i, nb.uint8(load_u8(state, i) != _ABSENT))
        state += n
        call += 8 * lookupplan.CALL_WORDS
    return DONE


@compiled(types.void(*[types.int64] * 5), when=LAST)
def serve(shared: Any, jobs: Any, inbox: Any, outbox: Any, done: Any) -> Any:
    """Take jobs from `inbox` (descriptors of pipes) until one below 0 comes. `done`: address of the reactors' own pipes."""
    message = np.empty(1, np.int64)
    at = nb.int64(message.ctypes.data)
    while True:
        got = read(inbox, at, 8)
        if got == -EINTR:
            continue
        if got != 8 or message[0] < 0:
            return
        job = jobs + 8 * JOB_WORDS * message[0]
        store_u64(job, OUTCOME, nb.uint64(finish(shared, outbox, job)))
        write(word(done, word(job, REACTOR)), at, 8)
