"""Answers to gRPC calls on an HTTP/2 session: the frames of a message and of the call's status.

Free functions of addresses, nogil; the thread of the session.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import store_u8
from tierstore.kernels.sysio import allocate
from tierstore.wire.http2 import hpack, layout
from tierstore.wire.http2.out import (
    add_piece,
    begin_block,
    block_bytes,
    end_of,
    finish,
    queue,
    room_of_data,
    use_windows,
    write_frame_head,
    write_headers,
    write_u32,
    wrote,
)

_STARTS = np.frombuffer(b"\x88\x0f\x10\x10application/grpc", np.uint8)  # :status 200, content-type
_GOOD = np.frombuffer(b"\x00\x0bgrpc-status\x010", np.uint8)
_REQUEST_ID = np.frombuffer(b"x-request-id", np.uint8)
_STAYS_FROM = 1 << 15  # a message of at least so many bytes is not copied; below that, a copy is cheaper than pieces
PREFIX = 5  # bytes before a gRPC message: whether it is compressed, its length


@nb.njit
def trailers_bytes(request_id_bytes):
    """The most bytes that the trailers of a successful call take."""
    return _GOOD.size + (_REQUEST_ID.size + request_id_bytes + hpack.MOST_ADDED if request_id_bytes > 0 else 0)


@nb.njit
def write_trailers(target, request_id, request_id_bytes):
    """Write grpc-status 0, and the request's id if it has one. Returns the bytes written."""
    copy_bytes(target, nb.int64(_GOOD.ctypes.data), _GOOD.size)
    if request_id_bytes == 0:
        return _GOOD.size
    name = nb.int64(_REQUEST_ID.ctypes.data)
    return _GOOD.size + hpack.encode_field(target + _GOOD.size, name, _REQUEST_ID.size, request_id, request_id_bytes)


@nb.njit
def _write_call(s, row, message, size, request_id, request_id_bytes, most, stays):
    """Write all frames of a call's answer, of at most `most` bytes each. `stays`: the sent part of the message is not copied."""
    stream = row.id
    write_headers(s, stream, nb.int64(_STARTS.ctypes.data), _STARTS.size, 0)
    before, left = PREFIX, size
    while True:
        part = min(left, most - before)
        begin = end_of(s)
        write_frame_head(begin, before + part, layout.DATA, 0, stream)
        if before > 0:
            store_u8(begin, layout.FRAME_HEAD, nb.uint8(0))
            write_u32(begin + layout.FRAME_HEAD + 1, size)
        wrote(s, layout.FRAME_HEAD + before)
        if stays:
            add_piece(s, message, part)
        else:
            copy_bytes(end_of(s), message, part)
            wrote(s, part)
        use_windows(s, row, before + part)
        message += part
        left -= part
        before = 0
        if left == 0:
            break
    begin = end_of(s)
    trailers = write_trailers(begin + layout.FRAME_HEAD, request_id, request_id_bytes)
    write_frame_head(begin, trailers, layout.HEADERS, layout.END_HEADERS | layout.END_STREAM, stream)
    wrote(s, layout.FRAME_HEAD + trailers)


@nb.njit
def refuse_call(s, row, head, size, request_id, request_id_bytes):
    """Queue, as a block, a header block that has the status and, if there is one, the request's id. False: no memory."""
    room = _REQUEST_ID.size + request_id_bytes + hpack.MOST_ADDED
    block = allocate(block_bytes(size + room, 0, 0))
    if block == 0:
        return False
    at = block + layout.BLOCK_BYTES
    copy_bytes(at, head, size)
    if request_id_bytes > 0:
        name = nb.int64(_REQUEST_ID.ctypes.data)
        size += hpack.encode_field(at + size, name, _REQUEST_ID.size, request_id, request_id_bytes)
    begin_block(block, layout.ENDS, size, 0, 0)
    queue(s, row, block)
    return True


@nb.njit
def answer_call(s, row, message, size, request_id, request_id_bytes):
    """Answer a call with a message: at once where windows and room allow, otherwise as a block. False: no memory.

    Where pieces are used, the message must stay unchanged until it was sent.
    """
    data = PREFIX + size
    most = min(s.peer_frame, nb.int64(layout.FRAME_BYTES))
    frames = 1 + data // most
    stays = s.pieces != 0 and size >= _STAYS_FROM and s.pieces_used + 2 * frames < layout.PIECES
    heads = layout.FRAME_HEAD * (2 + frames) + 1 + _STARTS.size + PREFIX + trailers_bytes(request_id_bytes)
    if (
        row.first_out == 0
        and data <= row.window
        and data <= s.send_window
        and heads + (0 if stays else size) <= room_of_data(s)
        and trailers_bytes(request_id_bytes) <= most
    ):
        _write_call(s, row, message, size, request_id, request_id_bytes, most, stays)
        finish(s, row)
        return True
    block = allocate(block_bytes(_STARTS.size, data, trailers_bytes(request_id_bytes)))
    if block == 0:
        return False
    at = block + layout.BLOCK_BYTES
    copy_bytes(at, nb.int64(_STARTS.ctypes.data), _STARTS.size)
    store_u8(at, _STARTS.size, nb.uint8(0))
    write_u32(at + _STARTS.size + 1, size)
    copy_bytes(at + _STARTS.size + PREFIX, message, size)
    trailers = write_trailers(at + _STARTS.size + data, request_id, request_id_bytes)
    begin_block(block, layout.ENDS, _STARTS.size, data, trailers)
    queue(s, row, block)
    return True
