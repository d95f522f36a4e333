"""HTTP/2 streams of a reactor: it answers calls, gives all other requests to Python, and reports their data and their loss.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import acquire_i64, add_at, fence_all, release_i64
from tierstore.kernels.raw import call_at, load_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import monotonic_ns, release
from tierstore.lookup.cold_reads import job_at
from tierstore.reactor.connections import notify
from tierstore.reactor.frames import flush, push_all, push_row, set_deadline
from tierstore.reactor.jobs import drop_job, end_job, hand_out, reason_of
from tierstore.reactor.layout import (
    ANSWERED,
    DESCRIPTION,
    DRAIN,
    MADE_A_JOB,
    OTHER,
    SIZE,
    STREAM_DATA,
    STREAM_LOST,
    STREAM_OPENED,
    STREAM_REQUEST,
    TURNED_AWAY,
    connection_at,
)
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2 import calls as http2_calls
from tierstore.wire.http2 import core as http2_core
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.http2 import out as http2_out
from tierstore.wire.http2.errors import read_u32
from tierstore.wire.http2.request import keep_body

MOST_AWAY = 2048  # streams that Python has, over all connections; for each its pipe has a few messages at most


@nb.njit
def _is_full(me):
    return acquire_i64(place(me.shared, "streams_away")) >= MOST_AWAY


@nb.njit
def _refuse(me, s, row):
    """Refuse a request that was not started, so that its client may send it again."""
    http2_out.write_reset(s, row.id, http2_layout.REFUSED_STREAM)
    http2_out.close_row(s, row)


@nb.njit
def _give(me, fd, s, row, kind, reason):
    """Give a stream's head, and the body behind it, to Python, which frees both."""
    me.line.reasons[reason] += 1
    at, size, head = row.at, row.bytes, row.head_bytes
    fd_stream = fd | row.id << 24
    if _is_full(me) or not notify(
        me, kind, fd_stream, connection_at(me.conns, fd).serial | reason << 32, at, head | size << 20
    ):
        _refuse(me, s, row)
        return
    add_at(place(me.shared, "streams_away"), 1)
    http2_out.hold(s, -size)
    row.at = 0
    row.bytes = 0
    row.head_bytes = 0
    row.room = 0
    row.deadline_ns = 0
    row.state |= http2_layout.AWAY


@nb.njit
def report_data(me, fd, s, row):
    """Give Python the data of a stream that have come, and its end, once Python has consumed the data before."""
    state = row.state
    ended = 1 if state & http2_layout.ENDED else 0
    if state & http2_layout.DELIVERING or (row.bytes == 0 and (not ended or state & http2_layout.END_DELIVERED)):
        return
    at, size = row.at, row.bytes
    fd_stream = fd | row.id << 24
    if not notify(me, STREAM_DATA, fd_stream, connection_at(me.conns, fd).serial | ended << 32, at, size):
        return  # it is reported with the data that come next, or when Python has consumed some
    http2_out.hold(s, -size)
    row.at = 0
    row.bytes = 0
    row.room = 0
    row.state = state | http2_layout.DELIVERING | (http2_layout.END_DELIVERED if ended else 0)


@nb.njit
def lose(me, fd, s, row):
    """Close a stream that was reset, by its client or for an error."""
    if row.state & http2_layout.HAS_JOB:
        job_at(me.jobs, row.job).lost = 1
    if row.state & http2_layout.AWAY:
        add_at(place(me.shared, "streams_away"), -1)
        if not notify(me, STREAM_LOST, fd | row.id << 24, connection_at(me.conns, fd).serial, 0, 0):
            connection_at(me.conns, fd).lost = 1
    http2_out.close_row(s, row)


# --- events


@nb.njit
def _call(me, fd, row, body, size, now):
    """Answer the call whose body is `size` bytes, as `calls.answer_call` does."""
    if size < http2_calls.PREFIX or load_u8(body, 0) != 0 or read_u32(body + 1) != size - http2_calls.PREFIX:
        return DESCRIPTION
    found, began = me.found, monotonic_ns()
    found.host_at, found.host_bytes = row.host_at, row.host_bytes
    found.authorization_at, found.authorization_bytes = row.authorization_at, row.authorization_bytes
    found.timeout_ms, found.unusual = row.timeout_ms, row.unusual
    found.path_at, found.path_bytes = row.path_at, row.path_bytes
    found.head_bytes = found.closing = 0
    found.body_bytes, found.json_bytes = size - http2_calls.PREFIX, http1_head.NONE
    found.kind = http1_head.PREDICT if row.kind == http2_layout.PREDICT else http1_head.INFER
    since = row.began_ns
    me.call.since_ns = since if since < now else 0  # 0: all of it came in the last read
    line = place(me.line, "announced")
    release_i64(line, acquire_i64(me.shared.generation_at))
    fence_all()
    came = call_at(me.run_call, me, fd, row.at, body + http2_calls.PREFIX, size - http2_calls.PREFIX, began)
    release_i64(line, 0)
    return came


@nb.njit
def _answer(me, fd, s, row, came, at, size):
    """Answer a call with a message, or with the header block of a status (TURNED_AWAY). The bytes at `at` may change afterwards."""
    request_id, request_id_bytes = row.at + row.request_id_at, row.request_id_bytes
    if came == TURNED_AWAY:
        there = http2_calls.refuse_call(s, row, at, size, request_id, request_id_bytes)
    else:
        there = http2_calls.answer_call(s, row, at, size, request_id, request_id_bytes)
    if not there:
        http2_out.write_reset(s, row.id, http2_layout.ENHANCE_YOUR_CALM)
        http2_out.close_row(s, row)
    elif row.first_out != 0:
        http2_out.drop_request(s, row)
        set_deadline(me, row)
        push_row(me, fd, s, row)
    elif s.pieces_used > 0:
        flush(me, fd, s)


@nb.njit
def on_job(me, fd, s, row, number):
    """Take back a finished job. `row` is its stream, or 0 if the stream has closed."""
    job = job_at(me.jobs, number)
    answered = end_job(me, number)
    block, request, request_bytes = job.block, job.request, job.request_bytes
    message_bytes, reason = job.head_bytes + job.data_bytes, reason_of(job)
    add_at(place(me.shared, "inflight"), -job.held_bytes)
    if row == 0:
        release(request)
    else:
        row.state &= ~http2_layout.HAS_JOB
        row.at = request
        row.bytes = row.room = request_bytes
        http2_out.hold(s, request_bytes)
        if answered:
            _answer(me, fd, s, row, ANSWERED, block, message_bytes)
        else:
            _give(me, fd, s, row, STREAM_REQUEST, reason)
    release(block)


@nb.njit
def _submit(me, fd, s, row, number):
    """Hand out the job of a stream's call together with the request, which may outlive the stream."""
    job = job_at(me.jobs, number)
    job.stream, job.request, job.request_bytes = row.id, row.at, row.bytes
    job.tail = job.own_data if job.own_data != 0 else row.at + row.head_bytes + http2_calls.PREFIX
    job.held_bytes += row.bytes
    add_at(place(me.shared, "inflight"), row.bytes)
    http2_out.hold(s, -row.bytes)
    row.at = row.bytes = row.room = row.deadline_ns = 0
    row.state |= http2_layout.HAS_JOB
    row.job = number
    if not hand_out(me, number):
        on_job(me, fd, s, row, number)


@nb.njit
def _on_request(me, fd, s, row, body, size, now):
    """Answer a whole request, or make a job of it, or give it to Python."""
    if row.state & http2_layout.TOO_LARGE:
        _give(me, fd, s, row, STREAM_REQUEST, SIZE)
        return
    reason = OTHER
    if row.kind in (http2_layout.CALL, http2_layout.PREDICT):
        reason = _call(me, fd, row, body, size, now)
        if reason in (ANSWERED, TURNED_AWAY):
            _answer(me, fd, s, row, reason, me.call.answer_at, me.call.answer_bytes)
            return
    if row.bytes == row.head_bytes and not keep_body(s, row, body, size, -1):
        if reason == MADE_A_JOB:
            drop_job(me, me.call.job)
        _refuse(me, s, row)
    elif reason == MADE_A_JOB:
        _submit(me, fd, s, row, me.call.job)
    else:
        _give(me, fd, s, row, STREAM_REQUEST, reason)


@nb.njit
def on_event(me, fd, s, event, now):
    """Act on the result of `core.step`."""
    row, at, size = s.event_row, s.event_at, s.event_bytes
    if event == http2_layout.REQUEST:
        _on_request(me, fd, s, row, at, size, now)
    elif event == http2_layout.RESET:
        lose(me, fd, s, row)
    elif event == http2_layout.SENDABLE:
        if row == 0:
            push_all(me, fd, s)
        else:
            push_row(me, fd, s, row)
    elif event == http2_layout.OPENED:
        stream = row.id
        _give(me, fd, s, row, STREAM_OPENED, OTHER)
        if row.id == stream:
            report_data(me, fd, s, row)
    elif event == http2_layout.CAME:
        if not keep_body(s, row, at, size, -1):
            http2_out.write_reset(s, row.id, http2_layout.ENHANCE_YOUR_CALM)
            lose(me, fd, s, row)
        else:
            report_data(me, fd, s, row)
    if me.shared.mode >= DRAIN and event in (http2_layout.REQUEST, http2_layout.OPENED):
        http2_core.go_away(s)


@nb.njit
def shed(me, fd, s):
    """Reset streams whose requests are arriving, or wait for Python, because there is no room for them."""
    row = s.streams
    for _ in range(s.streams_room):
        state = row.state
        arrives = state & (http2_layout.ENDED | http2_layout.AWAY) == 0 or (
            state & http2_layout.AWAY != 0 and row.bytes > 0
        )
        if row.id != 0 and arrives:
            if http2_out.room_of(s) < http2_layout.CONTROL_ROOM:
                return
            http2_out.write_reset(s, row.id, http2_layout.ENHANCE_YOUR_CALM)
            lose(me, fd, s, row)
        row = http2_layout.stream_at(row, 1)
