"""Reader threads without the interpreter: they read rows that memory does not hold from the sealed base.

A reactor that needs such rows, or has a request that would keep it from others for long, makes a job of it and writes its number to
a pipe, from which all reader threads read. One of them completes the answer in the job's own memory and writes the number to the reactor's pipe. A job keeps the
generation that the reactor had announced, and so its view, until the reactor reclaims it.

Keys that the filter of changed keys cannot rule out are for RocksDB, and keys that the drive could not read, or that are in
another node's partitions, need an error from Python: such a job ends as FOR_PYTHON, and Python answers the request from the start. Rows that were read are
offered to the cache through a pipe to Python, which writes them; an offer that finds no room is dropped.

Free functions of records and addresses, nogil. Nothing here survives a crash.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, bloom, compiled, lookupplan, plan_records, sealed
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes
from tierstore.kernels.codec import decode_row
from tierstore.kernels.partitions import group, partition_at
from tierstore.kernels.raw import call_at, i64_at, load_i64, load_u8, store_u8, u32_at
from tierstore.kernels.records import at, define, place
from tierstore.kernels.sysio import EINTR, allocate, read, release, write
from tierstore.types import Tier

JOB = define("Job", "a request that a reactor leaves to readers of cold rows, or to a thread that predicts", {
    "fd serial": "the connection that waits for it",
    "stream": "the stream of it that waits; 0: it is one of HTTP/1.1",
    "request request_bytes": "of a stream: its head and body, which are the job's while it lasts",
    "announced": "the generation that the reactor had announced: its view is kept; 0: there is no job",
    "variant": (plan_records.VARIANT, "of its plan"),
    "of_view": (plan_records.VIEW, "what it reads"),
    "tail": "the request's data; until it is submitted, counted from the request's first byte",
    "block": "the answer's head and data; what else it needs lies behind them",
    "run": (plan_records.RUN, "what is asked"),
    "head_bytes data_bytes": "of the answer",
    "states": "a byte for each key: the tier that answered it",
    "reactor": "its number",
    "outcome": "DONE or FOR_PYTHON",
    "began_ns planned_ns": "when it came, and when it was planned",
    "probed": "1: memory has answered what it holds",
    "caller_rates model_rates": "what it has drawn from, or 0",
    "body_bytes keys": "what it has drawn",
    "held_bytes": "what counts as held while it lasts",
    "lost": "1: nobody waits for it any more, as the client is gone or has reset its stream",
    "scoring": "of a prediction: the number of its graph; else 0. What follows is a prediction's",
    "table": "where its tensors lie (`scoring.py`)",
    "queued_ns arrived_ns deadline_ns": "when it was queued and came, and when it is late, or 0",
}, size=256)  # fmt: skip
job_at = at(JOB)
DONE, FOR_PYTHON = 0, 1  # of `outcome`

OFFER = define("Offer", "rows for the cache; behind it keys int64[n], states uint8[n] up to a multiple of 8, rows", {
    "bytes": "of all of it",
    "table seq": "of which table, read under which sequence number",
    "keys row_bytes": "n, and the bytes of a row",
})  # fmt: skip
offer_at, _OFFER_BYTES = at(OFFER), OFFER.bytes
MOST_OFFERED = 64 << 20  # bytes that wait for Python

READERS = define("Readers", "what all readers share", {
    "offered": "bytes that wait for Python",
    "run_at": "the address of `lookupplan.run`",
}, apart=True)  # fmt: skip
readers_at = at(READERS)

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
    for i in range(load_i64(layers, 0)):
        words = nb.carray(u32_at(load_i64(layers, 1 + 2 * i)), (load_i64(layers, 2 + 2 * i),))
        found += bloom.probe(keys, words, perhaps)
    return found > 0


@nb.njit
def _are_own(table, keys):  # type: ignore[no-untyped-def]
    """Whether this node has the partitions of all `keys`."""
    is_own, partitions = table.own_at, table.partitions
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
    size = _OFFER_BYTES + 8 * n + padded + n * row_bytes
    if add_at(place(shared, "offered"), size) + size <= MOST_OFFERED:
        block = allocate(size)
        if block != 0:
            offer = offer_at(block)
            offer.bytes, offer.table, offer.seq, offer.keys, offer.row_bytes = size, table.id, seq, n, row_bytes
            at = block + _OFFER_BYTES
            copy_bytes(at, nb.int64(keys.ctypes.data), 8 * n)
            copy_bytes(at + 8 * n, nb.int64(state.ctypes.data), n)
            copy_bytes(at + 8 * n + padded, nb.int64(rows.ctypes.data), n * row_bytes)
            message = np.empty(1, np.int64)
            message[0] = block
            if write(outbox, nb.int64(message.ctypes.data), 8) == 8:
                return
            release(block)
    add_at(place(shared, "offered"), -size)


@nb.njit
def _fetch(shared, outbox, table, seq, keys_at, n, state_at, out_code, out):  # type: ignore[no-untyped-def]
    """Answer the keys that are PENDING from the base: rows to `out`, states. False if it cannot answer all."""
    base, dim, code = table.base, table.dim, table.code
    if base == 0:
        return False
    row_bytes = table.row_bytes
    pending = 0
    for i in range(n):
        pending += load_u8(state_at, i) == _PENDING
    places, wanted_keys = np.empty(pending, np.int64), np.empty(pending, np.int64)
    k = 0
    for i in range(n):
        if load_u8(state_at, i) == _PENDING:
            places[k], wanted_keys[k] = i, load_i64(keys_at, i)
            k += 1
    order, parts = np.argsort(wanted_keys), base.parts
    if parts > 1:
        ascending, starts = order, np.empty(parts + 1, np.int64)
        order = np.empty(pending, np.int64)
        group(wanted_keys, ascending, np.arange(parts), order, starts)
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
    if not _are_own(table, keys) or _perhaps_changed(base.changed_at, keys):
        return False
    files = base.files
    fences = nb.carray(i64_at(base.fences_at), (base.fences,))
    part_starts = nb.carray(i64_at(base.part_starts_at), (parts + 1,))
    ends = nb.carray(i64_at(base.ends_at), (files,))
    counts = nb.carray(i64_at(base.rows_at), (files,))
    fds = nb.carray(i64_at(base.fds_at), (files,))
    block_bytes = base.block_bytes
    rows, buffer = np.empty(distinct * row_bytes, np.uint8), np.empty(block_bytes, np.uint8)
    state, trouble = np.zeros(distinct, np.uint8), np.zeros(distinct, np.int32)
    failed = sealed._look_up(
        keys, np.ones(distinct, np.bool_), nb.int64(rows.ctypes.data), row_bytes, row_bytes, state, trouble, fences, part_starts,
        ends, counts, fds, base.per_block, block_bytes, nb.int64(buffer.ctypes.data), _WINDOW,
    )  # fmt: skip
    if failed != 0 or buffer.size == 0:
        return False
    default = table.half_default_at if out_code == 1 else table.default_at
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
    dim = table.dim
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
    run, data = job.run, job.block + job.head_bytes
    scratch = allocate(run.scratch + 64)
    if scratch == 0:
        return lookupplan.DOUBTFUL
    came = call_at(shared.run_at, run, job.of_view, job.tail, data, job.states, scratch)
    release(scratch)
    return came


@compiled(types.int64(types.int64, types.int64, types.int64), when=LAST)
def finish(shared: Any, outbox: Any, job: Any) -> Any:
    """Complete the answer of a job: DONE or FOR_PYTHON."""
    shared, job = readers_at(shared), job_at(job)
    run, view, tail = job.run, job.of_view, job.tail
    data = job.block + job.head_bytes
    call, state, seq = lookupplan.first_call(run), job.states, view.seq
    if job.probed == 0:
        came = _probe_all(shared, job)
        if came != lookupplan.COLD:
            return DONE if came == lookupplan.ANSWERED else FOR_PYTHON
    for _ in range(run.calls):
        table = plan_records.table_at(view.tables, call.table)
        keys, n, kind = lookupplan.keys_of(run, call, tail), call.keys_n, call.kind
        if kind == plan_records.CHECKED:
            call = plan_records.run_call_at(call, 1)
            continue
        if lookupplan.is_cold(state, n):
            out = data + call.out_at
            if kind == plan_records.BAGS_OF_ROWS:
                done = _finish_bags(shared, outbox, call, table, seq, keys, n, state, tail, out)
            elif kind == plan_records.ROWS:
                done = _fetch(shared, outbox, table, seq, keys, n, state, call.out_code, out)
            else:
                rows = np.empty(n * table.dim, np.float32)
                done = (
                    _fetch(shared, outbox, table, seq, keys, n, state, 0, nb.int64(rows.ctypes.data)) and rows.size >= 0
                )
            if not done:
                return FOR_PYTHON
            if call.found_at >= 0:
                found = data + call.found_at
                for i in range(n):
                    store_u8(found, i, nb.uint8(load_u8(state, i) != _ABSENT))
        state += n
        call = plan_records.run_call_at(call, 1)
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
        job = job_at(jobs, message[0])
        job.outcome = finish(shared, outbox, job)
        write(load_i64(done, job.reactor), at, 8)
