"""Cold reads: rows that memory lacks, read from disk without the interpreter, by a reactor (page cache only) or by reader threads.

`finish` answers the keys that a run has left. A reactor calls it for a few keys, and never waits for the drive. Where that is not enough, or would
delay other requests, the reactor makes a job of the request and writes its number to a pipe that all reader threads read. A reader completes the rows
in the job's own memory, then writes the number to the reactor's pipe, or, for a prediction, to the pipe of the threads that run graphs. Until the
reactor reclaims it, a job keeps the generation that the reactor had announced, and so its view.

Three kinds of keys need Python: keys that only RocksDB has (`sealed_rows.SOME`), keys that the drive failed to read, and keys in another node's
partitions. Their job ends as FOR_PYTHON, and Python answers the request from the start. Rows that were read are offered to the cache through a pipe
to Python, which writes them; an offer that finds no room is dropped.

Free functions of records and addresses, nogil. Nothing here survives a crash.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled, compiled_c
from tierstore.kernels.atomics import add_at, copy_bytes, stack_bytes
from tierstore.kernels.codec import decode_row
from tierstore.kernels.partitions import group, partition_at
from tierstore.kernels.raw import call_at, load_i64, load_u8, store_i64, store_u8
from tierstore.kernels.records import at, define, place
from tierstore.kernels.sysio import EINTR, allocate, monotonic_ns, read, release, write
from tierstore.lookup import by_plan, json_answer, plans
from tierstore.lookup.table_rows import is_cold, pool_rows, probe, set_padding, store_half
from tierstore.tiers.disk import sealed_rows
from tierstore.types import Tier

JOB = define("Job", "a request that a reactor has given to the readers of cold rows, or to a thread that predicts", {
    "fd serial": "the connection that waits for the answer",
    "stream": "the stream that waits; 0: a request of HTTP/1.1",
    "request request_bytes": "the head and the body of a stream's request; the job has them until it ends",
    "announced": "the generation that the reactor had announced, which keeps its view; 0: no job",
    "variant": (plans.LOOKUP, "the variant of its plan"),
    "of_view": (plans.VIEW, "the view that it reads"),
    "tail": "the address of the request's data; until the job is submitted, their offset in the request",
    "block": "the address of the answer's head and data, and of the working memory after them",
    "rows": "the address for the rows: in the answer's data, or in the rows of a prediction",
    "run": (plans.RUN, "the look-ups"),
    "head_bytes data_bytes": "the bytes of the answer's head and data",
    "states": "the address of a byte for each key: the tier that answered it",
    "reactor": "the number of the reactor",
    "outcome": "DONE, FOR_PYTHON or RETURNED",
    "began_ns planned_ns": "the times at which the request came, and was planned",
    "probed": "1: memory has answered the keys that it holds",
    "cold": "1: rows must be read before anything else",
    "caller_rates model_rates": "the addresses of the rates that the request was charged to, or 0",
    "body_bytes keys": "the bytes and keys that were charged",
    "held_bytes": "the bytes that count as held until the job ends",
    "own_data": "the address of the request's data in the block, if they were written apart; else 0",
    "values id_at id_bytes": "of an answer in JSON (`json_answer.py`): the addresses of its values and of its id, and the bytes of that; else 0",
    "text_at text_bytes": "the address of the block with that answer's JSON behind its HEAD_ROOM, or 0; and the bytes of the JSON",
    "lost": "1: the client is gone or has reset its stream",
    "scoring": "the number of a prediction's graph, or 0. The fields from here on are those of predictions",
    "table": "the address of the places of its tensors (`scoring.py`)",
    "queued_ns arrived_ns deadline_ns": "the times at which it was queued and arrived, and its deadline, or 0",
}, size=320)  # fmt: skip
job_at = at(JOB)
DONE, FOR_PYTHON, RETURNED = range(3)  # a job's `outcome`; RETURNED: a thread that runs graphs has given it back
LEFT = 3  # result of `finish`: some rows need a wait for the drive

OFFER = define("Offer", "rows for the cache, followed by keys int64[n], states uint8[n] up to a multiple of 8, and the rows", {
    "table seq row_bytes": "the table, the sequence number under which the rows were read, and the bytes of a row",
    "keys": "the number n of keys",
    "bytes": "the bytes of the whole offer",
})  # fmt: skip
offer_at, _OFFER_BYTES = at(OFFER), OFFER.bytes
MOST_OFFERED = 64 << 20  # bytes of offers that wait for Python

READERS = define("Readers", "the state that all readers share", {
    "offered": "the bytes of offers that wait for Python",
    "run_at finish_at write_at": "the addresses of `by_plan.run`, `finish` and `json_answer.write`",
    "offers": "the descriptor of the pipe for offers to the cache",
    "predictions queued_at": "the descriptor of the pipe to the threads that run graphs, or -1, and the address of the number of predictions that wait there",
}, apart=True)  # fmt: skip
readers_at = at(READERS)

_WINDOW = 32  # blocks that one job reads at a time
_PENDING, _ABSENT, _DISK = int(Tier.PENDING), int(Tier.ABSENT), int(Tier.DISK)


@compiled(types.void(types.int64[::1], types.int64[:, ::1]), when=HTTP)
def read_heads(blocks: Any, heads: Any) -> Any:
    """Copy the fields of the offers at `blocks` to `heads`, in order."""
    for i in range(blocks.size):
        copy_bytes(nb.int64(heads[i].ctypes.data), blocks[i], _OFFER_BYTES)


@compiled(types.void(types.int64[::1], types.int64[::1], types.uint8[::1], types.int64), when=HTTP)
def gather(blocks: Any, keys: Any, states: Any, rows: Any) -> Any:
    """Copy keys, states and rows of the offers at `blocks` end to end; `rows` is an address."""
    at = 0
    for i in range(blocks.size):
        offer, data = offer_at(blocks[i]), blocks[i] + _OFFER_BYTES
        n, row_bytes, padded = offer.keys, offer.row_bytes, (offer.keys + 7) & ~7
        copy_bytes(nb.int64(keys.ctypes.data) + 8 * at, data, 8 * n)
        copy_bytes(nb.int64(states.ctypes.data) + at, data + 8 * n, n)
        copy_bytes(rows + row_bytes * at, data + 8 * n + padded, n * row_bytes)
        at += n


@nb.njit
def _are_own(table, keys):
    """Whether all `keys` are in this node's partitions."""
    is_own, partitions = table.own_at, table.partitions
    if is_own != 0:
        for i in range(keys.size):
            if load_u8(is_own, partition_at(keys[i], partitions)) == 0:
                return False
    return True


@nb.njit
def _offer(shared, table, seq, keys, state, rows, row_bytes):
    """Offer rows that were read from disk to the cache."""
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
            copy_bytes(at + 8 * n + padded, rows, n * row_bytes)
            message = stack_bytes(8)
            store_i64(message, 0, block)
            if write(shared.offers, message, 8) == 8:
                return
            release(block)
    add_at(place(shared, "offered"), -size)


@nb.njit
def _fetch(shared, table, seq, keys_at, n, state_at, out_code, out, window):
    """Answer the PENDING keys from disk: write rows to `out`, and states. With a window of 0, keys that need a wait for the drive stay PENDING.

    Returns DONE, LEFT (keys are still PENDING) or FOR_PYTHON.
    """
    base, dim, code = table.base, table.dim, table.code
    if base == 0:
        return FOR_PYTHON
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
    which = np.empty(pending, np.int64)  # for each PENDING key, its place among the distinct keys
    keys = np.empty(pending, np.int64)
    distinct = 0
    for k in range(pending):
        key = wanted_keys[order[k]]
        if k == 0 or key != keys[distinct - 1]:
            keys[distinct] = key
            distinct += 1
        which[k] = distinct - 1
    keys = keys[:distinct]
    if not _are_own(table, keys):
        return FOR_PYTHON
    rows, state, trouble = (
        np.empty(distinct * row_bytes, np.uint8),
        np.zeros(distinct, np.uint8),
        np.zeros(distinct, np.int32),
    )
    failed = sealed_rows.read(
        base,
        table.patches_at,
        table.patches,
        table.changes,
        keys,
        nb.int64(rows.ctypes.data),
        row_bytes,
        state,
        trouble,
        window,
    )
    if failed != 0:
        return FOR_PYTHON
    default = table.half_default_at if out_code == 1 else table.default_at
    out_bytes = dim * (4 >> out_code)
    for k in range(pending):
        i, of = places[order[k]], which[k]
        store_u8(state_at, i, state[of])
        if state[of] == _DISK:
            decode_row(code, out_code, nb.int64(rows.ctypes.data) + of * row_bytes, out + i * out_bytes, dim)
        elif state[of] == _ABSENT:
            copy_bytes(out + i * out_bytes, default, out_bytes)
    read = 0
    for k in range(distinct):
        if state[k] != _PENDING:
            if read < k:
                keys[read], state[read] = keys[k], state[k]
                copy_bytes(
                    nb.int64(rows.ctypes.data) + read * row_bytes, nb.int64(rows.ctypes.data) + k * row_bytes, row_bytes
                )
            read += 1
    if read > 0:
        _offer(shared, table, seq, keys[:read], state[:read], nb.int64(rows.ctypes.data), row_bytes)
    return DONE if read == distinct and rows.size >= 0 else LEFT


@nb.njit
def _finish_bags(shared, call, table, seq, keys, n, state, tail, out, window):
    """Answer the bags of a call that have no answer yet: bags with a PENDING key, or all. Changes nothing unless it returns DONE."""
    dim, bags, keys_a_bag = table.dim, call.bags, call.bag_keys
    weights = 0 if call.weights_at < 0 else tail + call.weights_at
    given = 0 if call.starts_at < 0 else tail + call.starts_at
    which, ends, starts = np.empty(bags, np.int64), np.empty(bags, np.int64), np.empty(bags, np.int64)
    left, some, end = 0, 0, 0
    for bag in range(bags):
        begin, end = end, n
        if bag + 1 < bags:
            end = load_i64(given, bag + 1) if given != 0 else begin + keys_a_bag
        if call.pooled == 0 or is_cold(state + begin, end - begin):
            which[left], ends[left], starts[left] = bag, end, some
            some += end - begin
            left += 1
    some_keys, some_weights, some_state = np.empty(some, np.int64), np.empty(some, np.float32), np.zeros(some, np.uint8)
    rows, pooled = np.empty(some * dim, np.float32), np.empty(left * dim, np.float32)
    keys_at, state_at, rows_at = (
        nb.int64(some_keys.ctypes.data),
        nb.int64(some_state.ctypes.data),
        nb.int64(rows.ctypes.data),
    )
    for j in range(left):
        count = (starts[j + 1] if j + 1 < left else some) - starts[j]
        copy_bytes(keys_at + 8 * starts[j], keys + 8 * (ends[j] - count), 8 * count)
        if weights != 0:
            copy_bytes(nb.int64(some_weights.ctypes.data) + 4 * starts[j], weights + 4 * (ends[j] - count), 4 * count)
    if call.padded != 0:
        set_padding(call.padding, keys_at, some, state_at, 0, 0)
    probe(table, keys_at, some, state_at, 0, rows_at)
    came = _fetch(shared, table, seq, keys_at, some, state_at, 0, rows_at, window)
    if came != DONE:
        return came
    pooled_at, factors = nb.int64(pooled.ctypes.data), nb.int64(some_weights.ctypes.data) if weights != 0 else 0
    pool_rows(
        rows_at, keys_at, some, call.padded, call.padding, nb.int64(starts.ctypes.data), left, factors, call.combiner,
        dim, pooled_at,
    )  # fmt: skip
    for j in range(left):
        count = (starts[j + 1] if j + 1 < left else some) - starts[j]
        copy_bytes(state + ends[j] - count, state_at + starts[j], count)
        if call.out_code == 1:
            store_half(pooled_at + 4 * dim * j, dim, out + 2 * dim * which[j])
        else:
            copy_bytes(out + 4 * dim * which[j], pooled_at + 4 * dim * j, 4 * dim)
    # keep the arrays alive until here
    return (
        DONE
        if rows.size + pooled.size + some_keys.size + some_state.size + some_weights.size + starts.size >= 0
        else LEFT
    )


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def finish(shared: Any, run: Any, view: Any, tail: Any, data: Any, states: Any) -> Any:
    """Answer a run's PENDING keys from disk. Returns DONE, LEFT (the drive would have to be waited for) or FOR_PYTHON.

    `data`: where the rows of the run go; other addresses as for `by_plan.run`. The run's `window` limits how many blocks may be waited for at a time.
    """
    shared, run, view = readers_at(shared), plans.run_at(run), plans.view_at(view)
    call, state, seq, window, outcome = by_plan.first_call(run), states, view.seq, run.window, DONE
    for _ in range(run.calls):
        table = plans.table_at(view.tables, call.table)
        keys, n, kind = by_plan.keys_of(run, call, tail), call.keys_n, call.kind
        if kind == plans.CHECKED:
            call = plans.run_call_at(call, 1)
            continue
        if is_cold(state, n):
            out = data + call.out_at
            if kind == plans.BAGS_OF_ROWS:
                came = _finish_bags(shared, call, table, seq, keys, n, state, tail, out, window)
            elif kind == plans.ROWS:
                came = _fetch(shared, table, seq, keys, n, state, call.out_code, out, window)
            else:
                rows = np.empty(n * table.dim, np.float32)
                came = _fetch(shared, table, seq, keys, n, state, 0, nb.int64(rows.ctypes.data), window)
                if rows.size < 0:
                    return FOR_PYTHON
            if came == FOR_PYTHON:
                return FOR_PYTHON
            if came == LEFT:
                outcome = LEFT
            if call.found_at >= 0:
                found = data + call.found_at
                for i in range(n):
                    store_u8(found, i, nb.uint8(load_u8(state, i) != _ABSENT))
        state += n
        call = plans.run_call_at(call, 1)
    return outcome


@nb.njit
def _probe_all(shared, job):
    """Look a job's keys up in memory, as a reactor does for a small request. Returns a result of `by_plan.run`."""
    scratch = allocate(job.run.scratch + 64)
    if scratch == 0:
        return by_plan.DOUBTFUL
    came = call_at(shared.run_at, job.run, job.of_view, job.tail, job.rows, job.states, scratch)
    release(scratch)
    return came


@nb.njit
def write_answer(job, write_at):
    """Write the JSON of a job's answer into a block of its own. False: there is no memory, or the full writer must write it."""
    block = allocate(json_answer.HEAD_ROOM + json_answer.most_bytes(job.variant, job.values))
    if block == 0:
        return False
    begin = block + json_answer.HEAD_ROOM
    end = call_at(write_at, job.variant, job.values, job.id_at, job.id_bytes, job.block, begin)
    if end == 0:
        release(block)
        return False
    job.text_at, job.text_bytes = block, end - begin
    return True


@compiled(types.int64(types.int64, types.int64), when=HTTP)
def complete(shared: Any, job: Any) -> Any:
    """Complete the rows of a job: DONE or FOR_PYTHON."""
    shared, job = readers_at(shared), job_at(job)
    if job.probed == 0:
        came = _probe_all(shared, job)
        if came != by_plan.COLD:
            return DONE if came == by_plan.ANSWERED else FOR_PYTHON
    job.run.window = _WINDOW
    came = call_at(shared.finish_at, shared, job.run, job.of_view, job.tail, job.rows, job.states)
    return DONE if came == DONE else FOR_PYTHON


@compiled(types.void(*[types.int64] * 4), when=HTTP)
def serve(shared: Any, jobs: Any, inbox: Any, done: Any) -> Any:
    """Take jobs from the pipe `inbox` (a descriptor) until a number below 0 comes. `done`: address of the reactors' own pipes."""
    message = np.empty(1, np.int64)
    at = nb.int64(message.ctypes.data)
    readers = readers_at(shared)
    while True:
        got = read(inbox, at, 8)
        if got == -EINTR:
            continue
        if got != 8 or message[0] < 0:
            return
        job = job_at(jobs, message[0])
        came = FOR_PYTHON if job.lost != 0 else complete(shared, job)
        if came == DONE and job.scoring == 0 and job.values != 0 and not write_answer(job, readers.write_at):
            came = FOR_PYTHON
        if came == DONE and job.scoring != 0 and queue(job, message[0], readers.predictions, readers.queued_at):
            continue
        job.outcome = came if job.scoring == 0 else FOR_PYTHON
        write(load_i64(done, job.reactor), at, 8)


@nb.njit
def queue(job, number, predictions, queued_at):
    """Pass a prediction whose rows are complete to the threads that run graphs. False: their pipe is full."""
    message = stack_bytes(8)
    store_i64(message, 0, number)
    job.queued_ns = monotonic_ns()
    job.outcome = FOR_PYTHON  # until the thread has finished
    add_at(queued_at, 1)
    if write(predictions, message, 8) == 8:
        return True
    add_at(queued_at, -1)
    return False
