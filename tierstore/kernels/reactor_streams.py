"""What a reactor does with the streams of HTTP/2: answers calls, gives all else to Python, and tells it of what comes and what is lost.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2core, h2out, h2words, httphead
from tierstore.kernels.atomics import acquire_i64, add_at, fence_all, release_i64
from tierstore.kernels.h2errors import read_u32
from tierstore.kernels.h2request import keep_body
from tierstore.kernels.raw import call_at, load_u8
from tierstore.kernels.reactor_connections import notify
from tierstore.kernels.reactor_frames import push_all, push_row, set_deadline
from tierstore.kernels.reactor_words import (
    ANNOUNCED,
    ANSWER_AT,
    ANSWER_BYTES,
    ANSWERED,
    DESCRIPTION,
    DRAIN,
    GENERATION_AT,
    LOST,
    MODE,
    OTHER,
    REASONS_FROM,
    SERIAL,
    SINCE_NS,
    SIZE,
    STREAM_DATA,
    STREAM_LOST,
    STREAM_OPENED,
    STREAM_REQUEST,
    STREAMS_AWAY,
    line_at,
    shared_at,
)
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import monotonic_ns

MOST_AWAY = 2048  # streams of all connections that Python has: each has a few messages in its pipe at most


@nb.njit
def _is_full(me):  # type: ignore[no-untyped-def]
    return acquire_i64(shared_at(me, STREAMS_AWAY)) >= MOST_AWAY


@nb.njit
def _refuse(me, s, row):  # type: ignore[no-untyped-def]
    """A request that was not started, and may be sent again."""
    h2out.write_reset(s, get(row, h2words.ID), h2words.REFUSED_STREAM)
    h2out.close_row(s, row)


@nb.njit
def _give(me, fd, s, row, kind, reason):  # type: ignore[no-untyped-def]
    """Give a stream's head, and the body behind it, to Python, which frees them."""
    me.lines[me.number, REASONS_FROM + reason] += 1
    at, size, head = get(row, h2words.AT), get(row, h2words.BYTES), get(row, h2words.HEAD_BYTES)
    fd_stream = fd | get(row, h2words.ID) << 24
    if _is_full(me) or not notify(me, kind, fd_stream, me.conns[fd, SERIAL] | reason << 32, at, head | size << 20):
        _refuse(me, s, row)
        return
    add_at(shared_at(me, STREAMS_AWAY), 1)
    h2out.hold(s, -size)
    put(row, h2words.AT, 0)
    put(row, h2words.BYTES, 0)
    put(row, h2words.HEAD_BYTES, 0)
    put(row, h2words.ROOM, 0)
    put(row, h2words.DEADLINE_NS, 0)
    put(row, h2words.STATE, get(row, h2words.STATE) | h2words.AWAY)


@nb.njit
def report_data(me, fd, s, row):  # type: ignore[no-untyped-def]
    """Give Python what has come of a stream, and its end, unless it has not taken what came before."""
    state = get(row, h2words.STATE)
    ended = 1 if state & h2words.ENDED else 0
    if state & h2words.DELIVERING or (get(row, h2words.BYTES) == 0 and (not ended or state & h2words.END_DELIVERED)):
        return
    at, size = get(row, h2words.AT), get(row, h2words.BYTES)
    fd_stream = fd | get(row, h2words.ID) << 24
    if not notify(me, STREAM_DATA, fd_stream, me.conns[fd, SERIAL] | ended << 32, at, size):
        return  # with what comes next, or when Python has taken something
    h2out.hold(s, -size)
    put(row, h2words.AT, 0)
    put(row, h2words.BYTES, 0)
    put(row, h2words.ROOM, 0)
    put(row, h2words.STATE, state | h2words.DELIVERING | (h2words.END_DELIVERED if ended else 0))


@nb.njit
def lose(me, fd, s, row):  # type: ignore[no-untyped-def]
    """A stream was reset, by its client or for its error."""
    if get(row, h2words.STATE) & h2words.AWAY:
        add_at(shared_at(me, STREAMS_AWAY), -1)
        if not notify(me, STREAM_LOST, fd | get(row, h2words.ID) << 24, me.conns[fd, SERIAL], 0, 0):
            me.conns[fd, LOST] = 1
    h2out.close_row(s, row)


# --- events


@nb.njit
def _call(me, fd, row, body, size, now):  # type: ignore[no-untyped-def]
    """Answer the call whose body is `size` bytes: ANSWERED, and `call` says where its message is; or why it is for Python."""
    if size < h2out.PREFIX or load_u8(body, 0) != 0 or read_u32(body + 1) != size - h2out.PREFIX:
        return DESCRIPTION
    found, began = me.found, monotonic_ns()
    for there, here in (
        (httphead.HOST_AT, h2words.HOST_AT), (httphead.HOST_BYTES, h2words.HOST_BYTES),
        (httphead.AUTHORIZATION_AT, h2words.AUTHORIZATION_AT), (httphead.AUTHORIZATION_BYTES, h2words.AUTHORIZATION_BYTES),
        (httphead.TIMEOUT_MS, h2words.TIMEOUT_MS), (httphead.UNUSUAL, h2words.UNUSUAL), (httphead.PATH_AT, h2words.PATH_AT),
        (httphead.PATH_BYTES, h2words.PATH_BYTES),
    ):  # fmt: skip
        found[there] = get(row, here)
    found[httphead.HEAD_BYTES] = found[httphead.CLOSING] = 0
    found[httphead.BODY_BYTES], found[httphead.JSON_BYTES] = size - h2out.PREFIX, httphead.NONE
    found[httphead.KIND] = httphead.INFER
    since = get(row, h2words.BEGAN_NS)
    me.call[SINCE_NS] = since if since < now else 0  # 0: it came with what came last
    line = line_at(me, me.number, ANNOUNCED)
    release_i64(line, acquire_i64(me.shared[GENERATION_AT]))
    fence_all()
    came = call_at(me.run_call, me.at, fd, get(row, h2words.AT), body + h2out.PREFIX, size - h2out.PREFIX, began)
    release_i64(line, 0)
    return came


@nb.njit
def _on_request(me, fd, s, row, body, size, now):  # type: ignore[no-untyped-def]
    """Answer a whole request, or give it to Python."""
    if get(row, h2words.STATE) & h2words.TOO_LARGE:
        _give(me, fd, s, row, STREAM_REQUEST, SIZE)
        return
    reason = OTHER
    if get(row, h2words.KIND) == h2words.CALL:
        reason = _call(me, fd, row, body, size, now)
        if reason == ANSWERED:
            request_id = get(row, h2words.AT) + get(row, h2words.REQUEST_ID_AT)
            if not h2out.answer_call(
                s, row, me.call[ANSWER_AT], me.call[ANSWER_BYTES], request_id, get(row, h2words.REQUEST_ID_BYTES)
            ):
                h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
                h2out.close_row(s, row)
            elif get(row, h2words.FIRST_OUT) != 0:
                h2out.drop_request(s, row)
                set_deadline(me, row)
                push_row(me, fd, s, row)
            return
    if get(row, h2words.BYTES) == get(row, h2words.HEAD_BYTES) and not keep_body(s, row, body, size, -1):
        _refuse(me, s, row)
        return
    _give(me, fd, s, row, STREAM_REQUEST, reason)


@nb.njit
def on_event(me, fd, s, event, now):  # type: ignore[no-untyped-def]
    """Do what a step asks for."""
    row, at, size = get(s, h2words.EVENT_ROW), get(s, h2words.EVENT_AT), get(s, h2words.EVENT_BYTES)
    if event == h2words.REQUEST:
        _on_request(me, fd, s, row, at, size, now)
    elif event == h2words.RESET:
        lose(me, fd, s, row)
    elif event == h2words.SENDABLE:
        if row == 0:
            push_all(me, fd, s)
        else:
            push_row(me, fd, s, row)
    elif event == h2words.OPENED:
        stream = get(row, h2words.ID)
        _give(me, fd, s, row, STREAM_OPENED, OTHER)
        if get(row, h2words.ID) == stream:
            report_data(me, fd, s, row)
    elif event == h2words.CAME:
        if not keep_body(s, row, at, size, -1):
            h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
            lose(me, fd, s, row)
        else:
            report_data(me, fd, s, row)
    if me.shared[MODE] >= DRAIN and event in (h2words.REQUEST, h2words.OPENED):
        h2core.go_away(s)


@nb.njit
def shed(me, fd, s):  # type: ignore[no-untyped-def]
    """Reset streams whose requests are arriving, or wait for Python: there is no room for them."""
    row = get(s, h2words.STREAMS_AT)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        state = get(row, h2words.STATE)
        arrives = state & (h2words.ENDED | h2words.AWAY) == 0 or (
            state & h2words.AWAY != 0 and get(row, h2words.BYTES) > 0
        )
        if get(row, h2words.ID) != 0 and arrives:
            if h2out.room_of(s) < h2words.CONTROL_ROOM:
                return
            h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
            lose(me, fd, s, row)
        row += 8 * h2words.STREAM_WORDS
