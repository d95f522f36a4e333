"""Socket reads and writes of a reactor's connections, in clear or with TLS by OpenSSL. See `loop.py`.

Python makes the handshake (`service/openssl.py`); then the connection's row has the address of its session (`SSL *`), and one thread at a time uses
it. OpenSSL's functions are called by address. Sessions read ahead, and write whole records, one at a time.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import sysio
from tierstore.kernels.raw import call_at
from tierstore.kernels.sysio import EAGAIN
from tierstore.reactor.layout import ENDED, connection_at

WANT_READ, WANT_WRITE, ZERO_RETURN = 2, 3, 6  # results of SSL_get_error
_EPIPE = 32
_MOST = 1 << 30  # the largest size given as a C int
_RECORD_BYTES = 1 << 14


@nb.njit
def _call(function, session, at, size):
    """The C int that a function returns."""
    got = call_at(function, session, at, size, 0, 0, 0)
    return nb.int64(nb.int32(got))


@nb.njit
def _receive_tls(me, row, at, room):
    """`receive` with TLS. Returns less than `room` only where the socket has nothing more, or with ENDED set."""
    session, got = row.tls, nb.int64(0)
    while got < room:
        _call(me.limits.openssl.clear_errors, 0, 0, 0)
        took = _call(me.limits.openssl.read, session, at + got, min(room - got, _MOST))
        if took > 0:
            got += took
            continue
        error = _call(me.limits.openssl.error_of, session, took, 0)
        if error in (WANT_READ, WANT_WRITE):
            return got if got > 0 else nb.int64(-EAGAIN)
        row.flags |= ENDED
        if got > 0 or error == ZERO_RETURN:
            return got
        return nb.int64(-_EPIPE)
    return got


@nb.njit
def receive(me, fd, at, room):
    """`sysio.receive` on a connection."""
    row = connection_at(me.conns, fd)
    if row.tls != 0:
        return _receive_tls(me, row, at, room)
    return sysio.receive(fd, at, room)


@nb.njit
def _write(me, session, at, size):
    """Send one record. Returns the bytes taken, or minus the error number."""
    _call(me.limits.openssl.clear_errors, 0, 0, 0)
    took = _call(me.limits.openssl.write, session, at, min(size, _MOST))
    if took > 0:
        return took
    error = _call(me.limits.openssl.error_of, session, took, 0)
    return nb.int64(-EAGAIN if error in (WANT_READ, WANT_WRITE) else -_EPIPE)


@nb.njit
def send(me, fd, at, size, more):
    """`sysio.send` on a connection. After EAGAIN the same bytes must be sent next; others may follow them."""
    if connection_at(me.conns, fd).tls == 0:
        return sysio.send(fd, at, size, more)
    if size <= _RECORD_BYTES:
        return _write(me, connection_at(me.conns, fd).tls, at, size)
    sysio.hold_packets(fd)  # put the records of one answer into fewer packets
    sent = took = nb.int64(0)
    while sent < size:
        took = _write(me, connection_at(me.conns, fd).tls, at + sent, size - sent)
        if took < 0:
            break
        sent += took
    sysio.send_packets(fd)
    return sent if sent > 0 else took


@nb.njit
def end_tls(me, fd, abort):
    """Free a connection's TLS session, if it has one. Without `abort`, tell the other side of the end first."""
    row = connection_at(me.conns, fd)
    session, row.tls = row.tls, 0
    if session != 0:
        _call(me.limits.openssl.clear_errors, 0, 0, 0)
        if not abort:
            _call(me.limits.openssl.shut_down, session, 0, 0)
        _call(me.limits.openssl.free_session, session, 0, 0)
