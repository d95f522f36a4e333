"""HTTP/2 (RFC 9113) in memory: the records of a session, its streams and blocks, and all bounds.

A *session* is the state of one connection. A *stream* is a row of its table of streams. A *block* is a part of an answer that waits to be sent on a
stream: header block, data, trailers. `core.py` and `out.py` write them.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.records import ITSELF, TEXT, at, define
from tierstore.wire.http2 import hpack

PREFACE = np.frombuffer(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", np.uint8)

# frames: types, flags, error codes
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FRAME_HEAD = 9
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
(
    NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM,
    CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM,
) = range(12)  # fmt: skip
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
MOST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = (1 << 16) - 1  # of a connection, and of streams until SETTINGS change it
FRAME_BYTES = 1 << 14  # the most of a sent frame, until SETTINGS change it; the most of a received one

# bounds
MOST_STREAMS = 100  # open at a time on a connection; MAX_CONCURRENT_STREAMS
MOST_LIST_BYTES = 1 << 14  # of a decoded header list; MAX_HEADER_LIST_SIZE
MOST_FIELDS = 256
MOST_BLOCK_BYTES = 1 << 15  # of a header block as it arrives
MOST_CONTINUATIONS = 16
MOST_RESETS = 400  # streams reset in a second, by the client or for its errors
ANSWER_RESETS = 4  # resets allowed in addition for each answered stream, in that second or later
MOST_SAVED_RESETS = 4_000  # of these, the most that may be left for later
MOST_CONTROLS = 20_000  # PING, SETTINGS, PRIORITY, frames of unknown types and empty frames in a second
STREAM_WINDOW = 1 << 20  # bytes that a client may send ahead on a stream
CONNECTION_WINDOW = 1 << 24  # and on a connection
CREDIT_BYTES = 1 << 22  # credit of a connection that is given back at once

# a block begins with this record; header block, data and trailers follow
BLOCK = define("OutgoingBlock", "a header block, data and trailers for a stream; their bytes follow the record in memory", {
    "next_block": (ITSELF, "the block that leaves after this one, or 0"),
    "ends": "bits: ENDS, REPORTS",
    "header_bytes data_bytes trailer_bytes": "the bytes of each part",
    "headers_done data_done": "1 once the header block has left, and the bytes of data that have left",
    "size": "the bytes of the record and all parts",
})  # fmt: skip
block_at, BLOCK_BYTES = at(BLOCK), BLOCK.bytes
STREAM = define("Stream", "a request over HTTP/2 and its answer; offsets of texts count from `at`", {
    "id": "the number of the stream; 0: the row is free",
    "state": "bits: ENDED, AWAY, DELIVERING, END_DELIVERED, TOO_LARGE, FINAL, HAS_JOB",
    "window receive": "the bytes that the client takes now, and the bytes that it may send",
    "credit": "the further bytes that it may send, of which it was not told yet",
    "at bytes room": "the address of head and body, their bytes so far, and the bytes for which there is room",
    "head_bytes": "the bytes of the head",
    "declared": "the bytes of the body that are still to come, as the client has declared; -1: not declared",
    "kind": "CALL, PREDICT, WHOLE or STREAMING",
    "host_at host_bytes authorization_at authorization_bytes": "the offsets and bytes of host and authorization in the head",
    "timeout_ms unusual": "as in the head of a request (`wire/http1/head.py`)",
    "request_id_at request_id_bytes": "the offset and the bytes of the request's id in the head",
    "began_ns": "the time at which the headers came",
    "deadline_ns": "the time by which the first block must have left; 0: no deadline",
    "first_out last_out": (BLOCK, "the first and the last of the blocks that wait to leave"),
    "path_at path_bytes": "the offset and the bytes of the path in the head",
    "seen": "a note of the sweep that ends late streams",
    "job": "the number of its job, if it HAS_JOB",
})  # fmt: skip
stream_at, STREAM_BYTES = at(STREAM), STREAM.bytes
PATHS = define(
    "Paths",
    "the paths whose requests Python gets in parts, as they come",
    {"count": "the number of paths", "first": (TEXT, "the first of them")},
)
SESSION = define("Session", "a connection of HTTP/2; the table of the peer's encoder follows the record in memory", {
    "flags": "bits: HAS_SETTINGS, GOING, BROKEN, GREETED, TABLE_SHRUNK, NO_TABLE",
    "newest": "the highest number of a stream so far",
    "open": "the number of open streams",
    "streams": (STREAM, "the rows of streams"),
    "streams_room": "the number of rows",
    "send_window initial": "the bytes that the peer takes on the connection, and at first on a stream",
    "peer_frame": "the largest frame that the peer takes, in bytes",
    "receive_window eaten": "the bytes that the peer may send, and those that have come since it was told",
    "block_at block_bytes block_room": "the address of an unfinished header block, its bytes so far, and the bytes for which there is room",
    "block_stream block_flags block_frames": "the stream of that block, the flags of its first frame, and the number of its frames",
    "out_at out_bytes out_room": "the address of the buffer for frames that are to leave, its bytes, and the bytes for which there is room",
    "out_kept": "the address of that buffer if it is the session's own, or 0",
    "pieces": (TEXT, "the parts of the output in order, of the buffer and of data elsewhere; 0: the output is the buffer"),
    "pieces_used": "the number of PIECES in use",
    "piece_from": "the address in the buffer behind the last of them",
    "held": "the bytes that all streams hold",
    "second resets controls": "a second, and the resets and control frames of the peer within it, which are bounded; `resets` below 0: unused ones that were saved",
    "waiting": "the number of streams with blocks that wait to leave",
    "next": "the number of the row that has the next turn",
    "event_row": (STREAM, "the stream that the last frame was about"),
    "event_at event_bytes": "the bytes that the last frame brought",
    "most_body": "the most bytes of a request's body",
    "streaming_at": (PATHS, "the paths whose requests Python gets in parts, or 0"),
    "started": "the number of streams since the beginning",
    "cut_ns": "the time since which a frame or a header block is unfinished, or 0",
})  # fmt: skip
session_at = at(SESSION)
SESSION_HEAD_BYTES = SESSION.bytes
SESSION_BYTES = SESSION_HEAD_BYTES + hpack.TABLE.bytes
# bits of a session's `flags`, in order: the peer's first SETTINGS have come; GOAWAY was written; an error occurred, and nothing more is read; SETTINGS
# were written; the peer has made the table for our headers smaller, which the next header block must say; it has been said, for good
HAS_SETTINGS, GOING, BROKEN, GREETED, TABLE_SHRUNK, NO_TABLE = 1, 2, 4, 8, 16, 32

FIRST_ROOM = 4  # streams that a new session has room for
# bits of a stream's `state`, in order: the client sends no more; Python has its request; data are on their way to Python; Python was told its end; its
# request was too large; the last block of the answer is here; a job has its request
ENDED, AWAY, DELIVERING, END_DELIVERED, TOO_LARGE, FINAL, HAS_JOB = 1, 2, 4, 8, 16, 32, 64
# a stream's `kind`: a ModelInfer call that may be answered here; a request that Python gets whole; a request that Python gets in parts
CALL, WHOLE, STREAMING, PREDICT = range(4)

# bits of a block's `ends`: the stream ends with it; Python is told when it was sent
ENDS, REPORTS = 1, 2

# results of `core.step`
NOTHING, REQUEST, OPENED, CAME, RESET, SENDABLE, FAILED = range(7)

CONTROL_ROOM = 256  # the most bytes that a step writes
PIECES = 528  # for an answer of 4 MiB in the smallest frames

# memory for decoding a header list
FIELDS_BYTES = hpack.FIELD.bytes * MOST_FIELDS
WORK_BYTES = FIELDS_BYTES + MOST_LIST_BYTES + 2 * MOST_FIELDS + 64
