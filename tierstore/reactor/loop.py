"""The reactor: a compiled loop that owns client connections and answers look-ups whose rows are in memory.

It runs in threads of its own and never takes the interpreter lock. `wire/http1/head.py` reads requests, `lookup/by_plan.py` looks rows up. Other
threads (`lookup/cold_reads.py`) read rows that memory lacks and complete the answer. Every other request goes to Python through a pipe, whole
(`REQUEST`, framed by `wire/http1/frame.py`), and its answer comes back. A body that is too large, or for which there is no room, is not kept: Python
refuses the request by its head, and the bytes of the body are dropped.

A connection is a row of `conns`, found by its descriptor. One reactor owns it for life and alone writes its row; Python reads LOST, and the bytes of
a request that it was given. States of a connection:

                    accept
                      │
                      ▼    memory has the rows, and the socket takes only a part of the answer
        ┌─────────► READING ────────────────────────────────────────────────► SENDING ─┐
        │             │  │                                                      ▲      │
        │             │  └─ for a reader, or for Python ─► AWAY ─► answered ────┘      │ all was sent
        │             ▼                                                                │
        │   FREE (closed)                                                              │
        └──────────────────────────────────────────────────────────────────────────────┘

An answer that is sent at once skips SENDING, and a request that is answered at once is never stored: an idle connection holds no memory. A connection
is read again only after its answer was sent, so a client that does not read gets no further answers.

A client may end its side of a connection and still wait for answers; a client that has gone looks the same. So while a request of such a client
waits, the reactor sends an interim answer (`probe_client`), which resets the connection if the client has gone. With TLS, an end ends both sides.

After its last answer a connection goes back to READING, and all further bytes are dropped: a reset would lose the answer of a client that is still
sending (`end_after_answer`).

Time limits: for a request to arrive whole, for an answer to be sent and to make progress, and for an idle connection. All are short once the service
ends. Byte limits: of a head in `wire/http1/head.py`, of bodies and answers in the settings; answers that wait to be sent count in INFLIGHT, which is
shared with Python's own count. Records are in `layout.py`, connections in `connections.py`, requests in `requests.py`, answers in `answers.py`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from tierstore.kernels import HTTP, compiled
from tierstore.kernels.atomics import add_at, copy_bytes, relaxed_i64, stack_bytes
from tierstore.kernels.raw import call_at, load_i64, load_u32
from tierstore.kernels.records import place, text_at
from tierstore.kernels.sysio import (
    EPOLL_ADD,
    EPOLL_DEL,
    EVENT_BYTES,
    EVENT_DATA,
    FAILED,
    HALF_CLOSED,
    HUNG_UP,
    READABLE,
    WRITABLE,
    allocate,
    close,
    epoll_set,
    epoll_wait,
    monotonic_ns,
    read,
    release,
    wall_ns,
    write,
)
from tierstore.lookup.cold_reads import job_at
from tierstore.reactor.connections import (
    accept_again,
    accept_new,
    end,
    end_after_answer,
    listen,
    lose_client,
    probe_client,
    set_send_deadline,
    start_serving,
)
from tierstore.reactor.connections import (
    free_session as release_session,
)
from tierstore.reactor.jobs import finish_job
from tierstore.reactor.layout import (
    AWAY,
    BLOCK,
    CLOSES,
    DROP,
    ENDED,
    EVENTS,
    FINISH,
    FIRST_PART,
    FRAMES,
    FREE,
    HTTP2,
    JOB_ENDED,
    LINGERS,
    MAKE_ROOM,
    MAY_READ,
    MESSAGE,
    MESSAGE_BYTES,
    MESSAGES,
    MOST_UNDECIDED,
    NO_DESCRIPTORS,
    PROBE_NS,
    READING,
    RUN,
    SENDING,
    SERIALS,
    SERVE,
    STOP,
    STREAM_BLOCK,
    SWEEP,
    SWEEP_NS,
    UNDECIDED,
    WAITS,
    WAKE,
    connection_at,
    message_at,
    reactor_at,
)
from tierstore.reactor.requests import continue_sending, read_requests
from tierstore.reactor.sockets import end_tls, send
from tierstore.wire.http1.date import write_date_at
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.http2 import out as http2_out

ENOMEM = 12
_TOO_SLOW = np.frombuffer(
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 51\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":"the body of the request came too slowly"}',
    np.uint8,
)


@nb.njit
def _on_connection(me, fd, mask, now):
    """Note what an event reports. Returns True if the connection can be read now."""
    row = connection_at(me.conns, fd)
    state, has_ended = row.state, mask & HALF_CLOSED != 0 and row.flags & ENDED == 0
    if mask & (READABLE | HALF_CLOSED | FAILED | HUNG_UP):
        row.flags |= MAY_READ
    if mask & HALF_CLOSED:
        row.flags |= ENDED
    if state == READING:
        return row.flags & MAY_READ != 0
    if state == HTTP2:
        if mask & (FAILED | HUNG_UP):
            end(me, fd, True)
            return False
        return True
    if state == AWAY:
        if mask & (FAILED | HUNG_UP) or (mask & HALF_CLOSED and row.tls != 0):
            lose_client(me, fd)
        elif has_ended and now - row.moved_ns > PROBE_NS:
            probe_client(me, fd)
        return False
    if mask & (FAILED | HUNG_UP):
        end(me, fd, True)
        return False
    return mask & WRITABLE != 0 and continue_sending(me, fd, now)


@nb.njit
def _read(me, fd, now):
    if connection_at(me.conns, fd).state == HTTP2:
        call_at(me.http2, me, FRAMES, fd, now, 0, 0)
    else:
        read_requests(me, fd, now)


@nb.njit
def _make_room(me, fd, serial, now):
    """End a silent connection, unless its client has just begun to send."""
    row = connection_at(me.conns, fd)
    if row.serial != serial or row.owner != me.number or row.flags & (MAY_READ | WAITS) != 0:
        return
    if row.state == READING and row.needed == 0:
        end(me, fd, False)
    elif row.state == HTTP2 and row.session.open == 0 and row.session.out_kept == 0:
        row.deadline_ns = 1
        call_at(me.http2, me, SWEEP, fd, now, me.limits.stall_ns, 0)
        if row.flags & LINGERS:
            end(me, fd, False)


@nb.njit
def _on_message(me, message, now):
    """Do what a message of Python asks for. Flags are in the same word as its serial. Returns the connection to read next, or -1."""
    what = message.what
    kind, fd = what & 255, (what & FIRST_PART) >> 8
    serial = message.serial
    if kind == SERVE:
        off = message.value
        if not start_serving(me, fd, now, off):
            end_tls(me, fd, True)
            close(fd)
        if off == 0:
            add_at(place(me.shared, "other_open"), -1)
        return -1
    row = connection_at(me.conns, fd)
    value, size = message.value, message.more
    if kind == MAKE_ROOM:
        _make_room(me, fd, serial, now)
        return -1
    if kind >= STREAM_BLOCK:
        call_at(me.http2, me, MESSAGE, fd, now, message, 0)
        return -1
    if kind == WAKE or row.state != AWAY or row.serial != serial & SERIALS:
        if kind == BLOCK:
            release(value)
            add_at(place(me.shared, "inflight"), -size)
        return -1
    if kind == DROP:
        end(me, fd, True)
        return -1
    row.state = SENDING
    if kind == BLOCK:
        row.out_base, row.out_at, row.out_bytes, row.pieces = value, value, size, 0
    else:
        row.pieces_at, row.pieces = value, size & 0xFFFF
        piece = text_at(value)
        row.out_at, row.out_bytes = piece.at, piece.bytes
        size >>= 16
    if serial > SERIALS:
        row.flags |= CLOSES
    if row.lost != 0:
        end(me, fd, True)
        return -1
    set_send_deadline(me, fd, size)
    return fd if continue_sending(me, fd, now) else -1


@nb.njit
def _sweep(me, now):
    """End late connections, and idle connections when the service ends. Try again to accept.

    The more bytes wait to be sent, the sooner a client that reads nothing of its answer is late.
    """
    finishing = me.shared.mode >= FINISH
    held = relaxed_i64(place(me.shared, "inflight")) + relaxed_i64(place(me.shared, "other_inflight"))
    stall = me.limits.pressed_stall_ns if 2 * held > me.limits.most_inflight else me.limits.stall_ns
    if me.line.paused == NO_DESCRIPTORS and not finishing:
        accept_again(me)
    for fd in range(relaxed_i64(place(me.shared, "highest")) + 1):
        row = connection_at(me.conns, fd)
        if row.state == FREE or row.owner != me.number:
            continue
        if row.state == HTTP2:
            call_at(me.http2, me, SWEEP, fd, now, stall, 0)
        elif row.state == AWAY and row.flags & ENDED and row.tls == 0:
            probe_client(me, fd)
        elif finishing and row.state == READING and row.in_bytes == 0 and row.to_drop == 0:
            end(me, fd, False)
        elif (row.deadline_ns != 0 and now > row.deadline_ns) or (row.state == SENDING and now - row.moved_ns > stall):
            if row.state == READING and row.needed > 0:  # its head has arrived
                send(me, fd, nb.int64(_TOO_SLOW.ctypes.data), _TOO_SLOW.size, 0)
                end_after_answer(me, fd, now)
            else:
                end(me, fd, row.state == SENDING)
        elif finishing and row.deadline_ns > now + me.limits.finish_ns:
            row.deadline_ns = now + me.limits.finish_ns


@compiled("void(int64)", when=HTTP)
def serve(at: Any) -> Any:
    """Serve until MODE is STOP, with the Reactor record at address `at`."""
    me = reactor_at(at)
    line = me.line
    mode = RUN
    while True:
        line.turns += 1
        turn = epoll_wait(line.epoll, me.events, EVENTS, 0 if me.again.count > 0 else 500)
        now = monotonic_ns()
        seconds = wall_ns() // 1_000_000_000
        if seconds != line.date_s:
            line.date_s = seconds
            write_date_at(seconds, me.date)
        if relaxed_i64(place(me.shared, "mode")) != mode:
            mode = relaxed_i64(place(me.shared, "mode"))
            if mode == STOP:
                return
            if mode >= FINISH:
                listen(me, EPOLL_DEL)
                line.next_sweep_ns = 0
        more, current = me.again.count, me.again.current
        if more > 0:
            copy_bytes(place(me.again, "current"), place(me.again, "following"), 8 * more)
            me.again.count = 0
        for i in range(turn):
            event = me.events + EVENT_BYTES * i
            mask = nb.int64(load_u32(event, 0))
            fd = nb.int64(load_u32(event + EVENT_DATA, 0))
            serial = nb.int64(load_u32(event + EVENT_DATA, 1))
            if serial <= SERIALS:
                there = connection_at(me.conns, fd).serial == serial and connection_at(me.conns, fd).state != FREE
                if there and _on_connection(me, fd, mask, now):
                    _read(me, fd, now)
            elif fd == 0:
                accept_new(me, me.listener, now)
            elif fd == 3:
                accept_new(me, me.grpc_listener, now)
            elif fd == 2:
                got = read(me.job_inbox, me.messages, MESSAGES * 8)
                for k in range(max(got, 0) // 8):
                    number = load_i64(me.messages, k)
                    job = job_at(me.jobs, number)
                    if job.stream != 0:
                        call_at(me.http2, me, JOB_ENDED, job.fd, now, number, 0)
                        continue
                    fd = finish_job(me, number)
                    if fd >= 0 and continue_sending(me, fd, now):
                        read_requests(me, fd, now)
            else:
                got = read(me.inbox, me.messages, MESSAGES * MESSAGE_BYTES)
                for k in range(max(got, 0) // MESSAGE_BYTES):
                    fd = _on_message(me, message_at(me.messages, k), now)
                    if fd >= 0:
                        read_requests(me, fd, now)
        for i in range(more):
            fd = current[i]
            if connection_at(me.conns, fd).owner == me.number and connection_at(me.conns, fd).flags & WAITS != 0:
                connection_at(me.conns, fd).flags &= ~WAITS
                if connection_at(me.conns, fd).state in (READING, HTTP2):
                    _read(me, fd, now)
        if line.paused == UNDECIDED and mode < FINISH and relaxed_i64(place(me.shared, "undecided")) < MOST_UNDECIDED:
            accept_again(me)
        if now >= line.next_sweep_ns:
            line.next_sweep_ns = now + SWEEP_NS
            _sweep(me, now)


@nb.njit
def _write_message(pipe, what, serial, value, more):
    message = message_at(stack_bytes(MESSAGE_BYTES))
    message.what, message.serial, message.value, message.more = what, serial, value, more
    wrote = write(pipe, message, MESSAGE_BYTES)
    return 0 if wrote == MESSAGE_BYTES else wrote


@nb.njit
def _send_block(pipe, what, serial, block, size, inflight):
    """Send a block to a reactor, which frees it; until then it counts as held. Returns 0; or minus the error number, with the block freed."""
    add_at(inflight, size)
    failed = _write_message(pipe, what, serial, block, size)
    if failed != 0:
        release(block)
        add_at(inflight, -size)
    return failed


@compiled("int64(int64, int64, int64, int64, int64, int64)", when=HTTP)
def reply(pipe: Any, what: Any, serial: Any, data: Any, size: Any, inflight: Any) -> Any:
    """For Python: send a copy of `size` bytes at `data` to a reactor's pipe, as the message `what` with a block that the reactor frees.

    `inflight`: the address of INFLIGHT. Returns 0, or minus the error number.
    """
    block = allocate(size)
    if block == 0:
        return -ENOMEM
    copy_bytes(block, data, size)
    return _send_block(pipe, what, serial, block, size, inflight)


@compiled("int64(int64, int64, int64, int64, int64)", when=HTTP)
def write_message(pipe: Any, what: Any, serial: Any, value: Any, more: Any) -> Any:
    """Write a message to a reactor's pipe. Returns 0, or minus the error number."""
    return _write_message(pipe, what, serial, value, more)


@compiled("int64(int64, int64, int64, int64[:, ::1], int64, int64, int64, int64, int64)", when=HTTP)
def write_block(
    pipe: Any, what: Any, serial: Any, places: Any, flags: Any, headers: Any, data: Any, trailers: Any, inflight: Any
) -> Any:
    """Send a copy of a header block, data and trailers, at `places` (address, size), to a reactor's pipe as a block of a stream.

    `inflight`: the address of INFLIGHT. Returns 0, or minus the error number.
    """
    size = http2_out.block_bytes(headers, data, trailers)
    block = allocate(size)
    if block == 0:
        return -ENOMEM
    at = http2_out.begin_block(block, flags, headers, data, trailers)
    for i in range(places.shape[0]):
        copy_bytes(at, places[i, 0], places[i, 1])
        at += places[i, 1]
    return _send_block(pipe, what, serial, block, size, inflight)


@compiled("int64(int64, int64, int64, int64)", when=HTTP)
def watch(epoll: Any, fd: Any, mask: Any, data: Any) -> Any:
    """Have an epoll report events of `mask` on `fd`, with the 64 bits `data`. Returns 0, or minus the error number."""
    return epoll_set(epoll, EPOLL_ADD, fd, mask, data)


@compiled("void(int64)", when=HTTP)
def free_session(session: Any) -> Any:
    """Free the HTTP/2 session of a connection, after its reactor has ended."""
    release_session(http2_layout.session_at(session))
