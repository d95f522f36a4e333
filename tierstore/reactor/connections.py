"""A reactor's connections: accepting them, ending them, and sending answers on them. See `loop.py`.

Kernels for the thread of one reactor, the only thread that writes the rows of its connections.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, raise_at, relaxed_i64, release_i64
from tierstore.kernels.raw import load_u8
from tierstore.kernels.records import place, text_at
from tierstore.kernels.sysio import (
    EAGAIN,
    EINTR,
    EPOLL_ADD,
    EPOLL_DEL,
    EXCLUSIVE,
    READABLE,
    accept,
    allocate,
    close,
    drop_on_close,
    end_sending,
    epoll_set,
    monotonic_ns,
    release,
    send_at_once,
    write,
)
from tierstore.lookup.cold_reads import job_at
from tierstore.reactor.layout import (
    ACCEPTED,
    CLOSES,
    ENDED,
    FREE,
    GRPC_LISTENER,
    INTEREST,
    LINGERS,
    LISTENER,
    MAY_READ,
    MESSAGE_BYTES,
    MOST_DROPPED,
    MOST_UNDECIDED,
    NO_DESCRIPTORS,
    READING,
    REFUSED,
    SENDING,
    SENT,
    SERIALS,
    STREAM_LOST,
    TURNED_OFF,
    UNDECIDED,
    WAITS,
    connection_at,
    line_at,
)
from tierstore.reactor.sockets import end_tls, send
from tierstore.wire.http2 import core as http2_core
from tierstore.wire.http2 import layout as http2_layout

_CONTINUE = np.frombuffer(b"HTTP/1.1 100 Continue\r\n\r\n", np.uint8)
_ONE, _LF = b"1\n"

# --- messages to Python


@nb.njit
def notify(me, kind, fd, serial, value, more):
    """Write a message to Python's pipe, which has room for one message from every connection."""
    message = me.message
    message.what, message.serial, message.value, message.more = kind + 256 * fd, serial, value, more
    return write(me.outbox, message, MESSAGE_BYTES) == MESSAGE_BYTES


# --- connections


@nb.njit
def hold(me, fd, size):
    """Set the bytes that count as held for a connection's request. A large request counts as far as it has arrived."""
    row = connection_at(me.conns, fd)
    if row.held != size:
        add_at(place(me.shared, "inflight"), size - row.held)
        row.held = size


@nb.njit
def has_room(me, size):
    """Whether `size` more bytes may be held."""
    held = acquire_i64(place(me.shared, "inflight")) + acquire_i64(place(me.shared, "other_inflight"))
    return held + size <= me.limits.most_inflight


@nb.njit
def forget(me, fd):
    """Free a connection's row. The caller closes the descriptor and frees its bytes."""
    row = connection_at(me.conns, fd)
    hold(me, fd, 0)
    row.state = FREE
    row.serial = (row.serial + 1) & SERIALS
    row.in_at = row.in_bytes = row.out_at = row.out_bytes = row.out_base = row.pieces = 0
    if row.flags & TURNED_OFF:
        add_at(place(me.shared, "turned_off"), -1)
    else:
        add_at(place(me.shared, "open"), -1)
    add_at(place(me.line, "load"), -1)


@nb.njit
def let_go_of_answer(me, fd):
    """Free an answer that was sent, or that nobody wants."""
    row = connection_at(me.conns, fd)
    if row.pieces > 0:
        notify(me, SENT, fd, row.serial, 0, 0)
    elif row.out_base != 0:
        release(row.out_base)
        add_at(place(me.shared, "inflight"), -(row.out_at + row.out_bytes - row.out_base))
    row.out_at = row.out_bytes = row.out_base = row.pieces = 0


@nb.njit
def free_session(s):
    http2_core.end_session(s)
    release(s.out_kept)
    release(s)


@nb.njit
def _end_session(me, fd):
    """Free the session of an HTTP/2 connection. Python is told which streams are lost, and readers which jobs are."""
    conn = connection_at(me.conns, fd)
    s, away = conn.session, 0
    conn.session = 0
    row = s.streams
    for _ in range(s.streams_room):
        if row.id != 0 and row.state & http2_layout.AWAY:
            away += 1
        if row.id != 0 and row.state & http2_layout.HAS_JOB:
            job_at(me.jobs, row.job).lost = 1
        row = http2_layout.stream_at(row, 1)
    if away > 0:
        add_at(place(me.shared, "streams_away"), -away)
        if not notify(me, STREAM_LOST, fd, conn.serial, 0, 0):
            me.shared.unreported = 1
    free_session(s)


@nb.njit
def wait_for_turn(me, fd):
    """Have this connection go on after others have had their turn."""
    row = connection_at(me.conns, fd)
    if row.flags & WAITS == 0:
        row.flags |= WAITS
        me.again.following[me.again.count] = fd
        me.again.count += 1


@nb.njit
def _let_go(me, fd):
    """Free what a connection holds: its answer, its session, and the bytes of its requests."""
    row = connection_at(me.conns, fd)
    let_go_of_answer(me, fd)
    if row.session != 0:
        _end_session(me, fd)
    release(row.in_at)
    row.in_at = row.in_bytes = 0


@nb.njit
def end(me, fd, abort):
    """End a connection. `abort`: reset it and drop what the client has not read."""
    _let_go(me, fd)
    if abort:
        drop_on_close(fd)
    end_tls(me, fd, abort)
    forget(me, fd)
    close(fd)


@nb.njit
def end_after_answer(me, fd, now):
    """End a connection whose last answer is in the socket.

    Closing a socket with unread bytes resets the connection, and the client may lose the answer. So this side ends its sending half first; what the
    client still sends is read and dropped for a time (RFC 9112, 9.6).
    """
    row = connection_at(me.conns, fd)
    if row.flags & LINGERS or row.flags & (ENDED | MAY_READ) == ENDED:
        end(me, fd, False)
        return
    _let_go(me, fd)
    end_tls(me, fd, False)
    end_sending(fd)
    hold(me, fd, 0)
    row.state, row.needed, row.chunks_head, row.to_drop = READING, 0, 0, MOST_DROPPED
    row.flags |= CLOSES | LINGERS
    row.deadline_ns = now + me.limits.finish_ns
    if row.flags & MAY_READ:
        wait_for_turn(me, fd)


@nb.njit
def start_serving(me, fd, now, off):
    """Serve a connection on the reactor that has the fewest. `off` is TURNED_OFF or 0. False where epoll cannot watch it."""
    owner = me.number
    for other in range(me.limits.reactors):
        if relaxed_i64(place(line_at(me.lines, other), "load")) < relaxed_i64(place(line_at(me.lines, owner), "load")):
            owner = other
    row = connection_at(me.conns, fd)
    # OpenSSL may already hold bytes that the socket no longer reports
    row.owner, row.flags, row.lost = owner, off | (MAY_READ if row.tls != 0 else 0), 0
    row.needed = row.began_ns = row.job = row.held = row.session = row.chunks_head = row.to_drop = 0
    row.deadline_ns = now + (me.limits.idle_ns if off == 0 else me.limits.turn_off_ns)
    # write the state last: the reactor that owned the row before may be checking it for lateness now
    release_i64(place(row, "state"), READING)
    raise_at(place(me.shared, "highest"), fd)
    add_at(place(line_at(me.lines, owner), "load"), 1)
    if off == 0:  # otherwise Python has counted it
        add_at(place(me.shared, "open"), 1)
    data = fd | (row.serial << 32)
    if epoll_set(line_at(me.lines, owner).epoll, EPOLL_ADD, fd, INTEREST, data) == 0:
        return True
    add_at(place(line_at(me.lines, owner), "load"), -1)
    if off != 0:
        add_at(place(me.shared, "turned_off"), -1)
    else:
        add_at(place(me.shared, "open"), -1)
    row.state = FREE
    return False


@nb.njit
def listen(me, how):
    """Have epoll report connections that wait to be accepted (EPOLL_ADD), or stop reporting them (EPOLL_DEL)."""
    epoll = me.line.epoll
    epoll_set(epoll, how, me.listener, READABLE | EXCLUSIVE, LISTENER)
    if me.grpc_listener >= 0:
        epoll_set(epoll, how, me.grpc_listener, READABLE | EXCLUSIVE, GRPC_LISTENER)


@nb.njit
def _pause(me, why):
    listen(me, EPOLL_DEL)
    me.line.paused = why


@nb.njit
def accept_again(me):
    me.line.paused = 0
    listen(me, EPOLL_ADD)


@nb.njit
def _start_new(me, fd, now):
    if fd >= me.limits.most_descriptors:
        return False
    connection_at(me.conns, fd).tls = connection_at(me.conns, fd).caller_bytes = 0
    return start_serving(me, fd, now, 0)


@nb.njit
def accept_new(me, listener, now):
    for _ in range(ACCEPTED):
        fd = accept(listener)
        if fd == -EINTR:
            continue
        if fd < 0:
            if fd != -EAGAIN:  # such as no descriptors: epoll would report the listener again and again
                _pause(me, NO_DESCRIPTORS)
            return
        send_at_once(fd)
        there = acquire_i64(place(me.shared, "open")) + acquire_i64(place(me.shared, "other_open"))
        if there >= me.limits.most_connections:
            add_at(place(me.shared, "undecided"), 1)
            if not notify(me, REFUSED, fd, 0, 0, 0):
                add_at(place(me.shared, "undecided"), -1)
                close(fd)
            if acquire_i64(place(me.shared, "undecided")) >= MOST_UNDECIDED:
                _pause(me, UNDECIDED)
                return
        elif not _start_new(me, fd, now):
            close(fd)


@nb.njit
def send_first(me, fd, at, size):
    """Send an answer from the reactor's own memory, and keep what the socket does not take."""
    row = connection_at(me.conns, fd)
    sent = 0
    while sent < size:
        took = send(me, fd, at + sent, size - sent, 0)
        if took > 0:
            sent += took
        elif took == -EAGAIN:
            break
        elif took != -EINTR:
            row.lost = 1
            return
    if sent == size:
        return
    left = size - sent
    kept = allocate(left)
    if kept == 0:
        row.lost = 1
        return
    copy_bytes(kept, at + sent, left)
    add_at(place(me.shared, "inflight"), left)
    row.out_base, row.out_at, row.out_bytes, row.pieces, row.state = kept, kept, left, 0, SENDING
    set_send_deadline(me, fd, left)


@nb.njit
def lose_client(me, fd):
    """Note that the client of an HTTP/1.1 connection has gone while its request is elsewhere."""
    row = connection_at(me.conns, fd)
    row.lost = 1
    if row.job != 0:
        job_at(me.jobs, row.job - 1).lost = 1


@nb.njit
def go_on(me, fd):
    """Send 100 Continue."""
    took = send(me, fd, nb.int64(_CONTINUE.ctypes.data), _CONTINUE.size, 0)
    if took not in (_CONTINUE.size, -EAGAIN, -EINTR):
        lose_client(me, fd)


@nb.njit
def probe_client(me, fd):
    """Send an interim answer (RFC 9110, 15.2) to a client whose request is elsewhere: if the client has gone, this resets the connection. Not for HTTP/1.0."""
    at = connection_at(me.conns, fd).in_at
    while load_u8(at, 1) != _LF:
        at += 1
    if load_u8(at, -1) == _ONE:
        go_on(me, fd)


@nb.njit
def set_send_deadline(me, fd, size):
    """Set the deadline of an answer: a fixed time, and the time for its bytes at the slowest rate allowed."""
    slowest = size * 1_000_000_000 // me.limits.slowest_rate
    connection_at(me.conns, fd).moved_ns = monotonic_ns()
    connection_at(me.conns, fd).deadline_ns = connection_at(me.conns, fd).moved_ns + me.limits.stall_ns + slowest


@nb.njit
def send_on(me, fd):
    """Send more of an answer. Returns True once all of it was sent; marks a connection that is lost."""
    row = connection_at(me.conns, fd)
    moved = False
    while True:
        while row.out_bytes > 0:
            took = send(me, fd, row.out_at, row.out_bytes, 1 if row.pieces > 1 else 0)
            if took > 0:
                row.out_at += took
                row.out_bytes -= took
                moved = True
            elif took == -EAGAIN:
                if moved:
                    row.moved_ns = monotonic_ns()
                return False
            elif took != -EINTR:
                row.lost = 1
                return False
        if row.pieces <= 1:
            return True
        row.pieces -= 1
        row.pieces_at += 16
        piece = text_at(row.pieces_at)
        row.out_at, row.out_bytes = piece.at, piece.bytes
