"""A reactor's connections: taken in, ended, handed to Python; and the answers that leave on them. See `reactor.py`.

Kernels for the thread of one reactor, which is the only one to write the rows of its connections.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2core, h2words
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, raise_at, relaxed_i64, release_i64
from tierstore.kernels.raw import load_u64, store_u64
from tierstore.kernels.reactor_sockets import end_tls, send
from tierstore.kernels.reactor_words import (
    ACCEPTED,
    BEGAN_NS,
    CALLER_BYTES,
    CONNECTION,
    DEADLINE_NS,
    EPOLL,
    FLAGS,
    FREE,
    GRPC_LISTENER,
    HELD,
    HIGHEST,
    IDLE_NS,
    IN_AT,
    IN_BYTES,
    INFLIGHT,
    INTEREST,
    JOB,
    LISTENER,
    LOAD,
    LOST,
    MAY_READ,
    MESSAGE_WORDS,
    MOST_CONNECTIONS,
    MOST_DESCRIPTORS,
    MOST_INFLIGHT,
    MOVED_NS,
    NEEDED,
    OPEN,
    OTHER_INFLIGHT,
    OTHER_OPEN,
    OUT_AT,
    OUT_BASE,
    OUT_BYTES,
    OWNER,
    PAUSED,
    PIECES,
    PIECES_AT,
    REACTORS,
    READING,
    REASONS_FROM,
    REFUSED,
    SENDING,
    SENT,
    SERIAL,
    SERIALS,
    SESSION,
    SLOWEST_RATE,
    STALL_NS,
    STATE,
    STREAM_LOST,
    STREAMS_AWAY,
    TLS,
    UNREPORTED,
    WAITS,
    line_at,
    shared_at,
)
from tierstore.kernels.request_record import get
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
    epoll_set,
    monotonic_ns,
    release,
    send_at_once,
    write,
)

# --- to Python


@nb.njit
def notify(me, kind, fd, serial, value, more):  # type: ignore[no-untyped-def]
    """Write a message to Python's pipe, which has room for one from every connection."""
    at = me.date + 64
    store_u64(at, 0, nb.uint64(kind + 256 * fd))
    store_u64(at, 1, nb.uint64(serial))
    store_u64(at, 2, nb.uint64(value))
    store_u64(at, 3, nb.uint64(more))
    return write(me.outbox, at, 8 * MESSAGE_WORDS) == 8 * MESSAGE_WORDS


# --- connections


@nb.njit
def hold(me, fd, size):  # type: ignore[no-untyped-def]
    """Of a connection's request, this many bytes are held: a large one counts as far as it has come."""
    row = me.conns[fd]
    if row[HELD] != size:
        add_at(shared_at(me, INFLIGHT), size - row[HELD])
        row[HELD] = size


@nb.njit
def has_room(me, size):  # type: ignore[no-untyped-def]
    """Whether so many bytes more may be held."""
    held = acquire_i64(shared_at(me, INFLIGHT)) + acquire_i64(shared_at(me, OTHER_INFLIGHT))
    return held + size <= me.limits[MOST_INFLIGHT]


@nb.njit
def forget(me, fd):  # type: ignore[no-untyped-def]
    """A connection's row is free from here on; its descriptor and its bytes are somebody else's."""
    row = me.conns[fd]
    hold(me, fd, 0)
    row[STATE] = FREE
    row[SERIAL] = (row[SERIAL] + 1) & SERIALS
    row[IN_AT] = row[IN_BYTES] = row[OUT_AT] = row[OUT_BYTES] = row[OUT_BASE] = row[PIECES] = 0
    add_at(shared_at(me, OPEN), -1)
    add_at(line_at(me, me.number, LOAD), -1)


@nb.njit
def let_go_of_answer(me, fd):  # type: ignore[no-untyped-def]
    """The answer has left, or nobody wants it."""
    row = me.conns[fd]
    if row[PIECES] > 0:
        notify(me, SENT, fd, row[SERIAL], 0, 0)
    elif row[OUT_BASE] != 0:
        release(row[OUT_BASE])
        add_at(shared_at(me, INFLIGHT), -(row[OUT_AT] + row[OUT_BYTES] - row[OUT_BASE]))
    row[OUT_AT] = row[OUT_BYTES] = row[OUT_BASE] = row[PIECES] = 0


@nb.njit
def free_session(s):  # type: ignore[no-untyped-def]
    h2core.end_session(s)
    release(get(s, h2words.OUT_KEPT))
    release(s)


@nb.njit
def _end_session(me, fd):  # type: ignore[no-untyped-def]
    """Free the session of a connection of HTTP/2. Python hears that those of its streams that it has are lost."""
    conn = me.conns[fd]
    s, away = conn[SESSION], 0
    conn[SESSION] = 0
    row = get(s, h2words.STREAMS_AT)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        if get(row, h2words.ID) != 0 and get(row, h2words.STATE) & h2words.AWAY:
            away += 1
        row += 8 * h2words.STREAM_WORDS
    if away > 0:
        add_at(shared_at(me, STREAMS_AWAY), -away)
        if not notify(me, STREAM_LOST, fd, conn[SERIAL], 0, 0):
            me.shared[UNREPORTED] = 1
    free_session(s)


@nb.njit
def wait_for_turn(me, fd):  # type: ignore[no-untyped-def]
    """Go on with a connection when others have had their turn."""
    row = me.conns[fd]
    if row[FLAGS] & WAITS == 0:
        row[FLAGS] |= WAITS
        me.again[0] += 1
        me.again[me.again[0]] = fd


@nb.njit
def end(me, fd, abort):  # type: ignore[no-untyped-def]
    """End a connection. With `abort` it is reset, and what it has not taken is dropped."""
    row = me.conns[fd]
    let_go_of_answer(me, fd)
    if row[SESSION] != 0:
        _end_session(me, fd)
    release(row[IN_AT])
    if abort:
        drop_on_close(fd)
    end_tls(me, fd, abort)
    forget(me, fd)
    close(fd)


@nb.njit
def yield_to_requests(me, fd, reason):  # type: ignore[no-untyped-def]
    """Give a connection to Python, with its bytes, which Python frees."""
    row = me.conns[fd]
    epoll_set(me.lines[me.number, EPOLL], EPOLL_DEL, fd, 0, 0)
    at, size, serial = row[IN_AT], row[IN_BYTES], row[SERIAL]
    add_at(shared_at(me, OTHER_OPEN), 1)  # before it is counted out here: there are never fewer than there are
    forget(me, fd)
    me.lines[me.number, REASONS_FROM + reason] += 1
    if not notify(me, CONNECTION, fd, serial, at, size):
        release(at)
        end_tls(me, fd, True)
        close(fd)
        add_at(shared_at(me, OTHER_OPEN), -1)


@nb.njit
def start_serving(me, fd, now):  # type: ignore[no-untyped-def]
    """Begin to serve a connection, on the reactor that has the fewest. False where it cannot be watched."""
    owner = me.number
    for other in range(me.limits[REACTORS]):
        if relaxed_i64(line_at(me, other, LOAD)) < relaxed_i64(line_at(me, owner, LOAD)):
            owner = other
    row = me.conns[fd]
    # OpenSSL may hold bytes already, of which the socket does not tell
    row[OWNER], row[FLAGS], row[LOST] = owner, MAY_READ if row[TLS] != 0 else 0, 0
    row[NEEDED] = row[BEGAN_NS] = row[JOB] = row[HELD] = row[SESSION] = 0
    row[DEADLINE_NS] = now + me.limits[IDLE_NS]
    # last: the reactor that owned the row before may be looking at it just now, to end those that are late
    release_i64(nb.int64(row.ctypes.data) + 8 * STATE, READING)
    raise_at(shared_at(me, HIGHEST), fd)
    add_at(line_at(me, owner, LOAD), 1)
    add_at(shared_at(me, OPEN), 1)
    data = fd | (row[SERIAL] << 32)
    if epoll_set(me.lines[owner, EPOLL], EPOLL_ADD, fd, INTEREST, data) == 0:
        return True
    add_at(line_at(me, owner, LOAD), -1)
    add_at(shared_at(me, OPEN), -1)
    row[STATE] = FREE
    return False


@nb.njit
def listen(me, how):  # type: ignore[no-untyped-def]
    """Be told of connections that wait (EPOLL_ADD), or no more (EPOLL_DEL)."""
    epoll = me.lines[me.number, EPOLL]
    epoll_set(epoll, how, me.listener, READABLE | EXCLUSIVE, LISTENER)
    if me.grpc_listener >= 0:
        epoll_set(epoll, how, me.grpc_listener, READABLE | EXCLUSIVE, GRPC_LISTENER)


@nb.njit
def _start_new(me, fd, now):  # type: ignore[no-untyped-def]
    if fd >= me.limits[MOST_DESCRIPTORS]:
        return False
    me.conns[fd, TLS] = me.conns[fd, CALLER_BYTES] = 0
    return start_serving(me, fd, now)


@nb.njit
def accept_new(me, listener, now):  # type: ignore[no-untyped-def]
    for _ in range(ACCEPTED):
        fd = accept(listener)
        if fd == -EINTR:
            continue
        if fd < 0:
            if fd != -EAGAIN:  # no descriptors left, say: the listener would be told of again at once, for ever
                listen(me, EPOLL_DEL)
                me.lines[me.number, PAUSED] = 1
            return
        send_at_once(fd)
        there = acquire_i64(shared_at(me, OPEN)) + acquire_i64(shared_at(me, OTHER_OPEN))
        if there >= me.limits[MOST_CONNECTIONS]:
            if not notify(me, REFUSED, fd, 0, 0, 0):
                close(fd)
        elif not _start_new(me, fd, now):
            close(fd)


@nb.njit
def send_first(me, fd, at, size):  # type: ignore[no-untyped-def]
    """Send an answer out of the reactor's own memory; what the socket does not take is kept."""
    row = me.conns[fd]
    sent = 0
    while sent < size:
        took = send(me, fd, at + sent, size - sent, 0)
        if took > 0:
            sent += took
        elif took == -EAGAIN:
            break
        elif took != -EINTR:
            row[LOST] = 1
            return
    if sent == size:
        return
    left = size - sent
    kept = allocate(left)
    if kept == 0:
        row[LOST] = 1
        return
    copy_bytes(kept, at + sent, left)
    add_at(shared_at(me, INFLIGHT), left)
    row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES], row[STATE] = kept, kept, left, 0, SENDING
    set_send_deadline(me, fd, left)


@nb.njit
def set_send_deadline(me, fd, size):  # type: ignore[no-untyped-def]
    """Until when an answer must have left: so long without any rate, and the time that it takes at the slowest."""
    slowest = size * 1_000_000_000 // me.limits[SLOWEST_RATE]
    me.conns[fd, MOVED_NS] = monotonic_ns()
    me.conns[fd, DEADLINE_NS] = me.conns[fd, MOVED_NS] + me.limits[STALL_NS] + slowest


@nb.njit
def send_on(me, fd):  # type: ignore[no-untyped-def]
    """Go on with an answer. True once all of it has left; a connection that is lost is marked."""
    row = me.conns[fd]
    moved = False
    while True:
        while row[OUT_BYTES] > 0:
            took = send(me, fd, row[OUT_AT], row[OUT_BYTES], 1 if row[PIECES] > 1 else 0)
            if took > 0:
                row[OUT_AT] += took
                row[OUT_BYTES] -= took
                moved = True
            elif took == -EAGAIN:
                if moved:
                    row[MOVED_NS] = monotonic_ns()
                return False
            elif took != -EINTR:
                row[LOST] = 1
                return False
        if row[PIECES] <= 1:
            return True
        row[PIECES] -= 1
        row[PIECES_AT] += 16
        row[OUT_AT] = nb.int64(load_u64(row[PIECES_AT], 0))
        row[OUT_BYTES] = nb.int64(load_u64(row[PIECES_AT], 1))
