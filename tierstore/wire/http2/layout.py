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
BLOCK = define("OutgoingBlock", "what is to leave on a stream: a header block, data and trailers lie behind it", {
    "next_block": (ITSELF, "what leaves after it"),
    "ends": "ENDS, REPORTS",
    "header_bytes data_bytes trailer_bytes": "of what lies behind it",
    "headers_done data_done": "what has left: whether the header block, how many bytes of data",
    "size": "bytes of all of it",
})  # fmt: skip
block_at, BLOCK_BYTES = at(BLOCK), BLOCK.bytes
STREAM = define("Stream", "a request over HTTP/2, and its answer; its places of text count from `at`", {
    "id": "its number, or 0: the row is free",
    "state": "ENDED, AWAY, DELIVERING, END_DELIVERED, TOO_LARGE, FINAL, HAS_JOB",
    "window receive": "bytes that the client takes, and that it may send",
    "credit": "bytes that it may send more, which it was not told yet",
    "at bytes room": "head and body, as far as they have come",
    "head_bytes": "of the head",
    "declared": "bytes of the body that are to come, as the client says; or -1",
    "kind": "CALL, WHOLE or STREAMING",
    "host_at host_bytes authorization_at authorization_bytes": "in the head",
    "timeout_ms unusual": "as of a head (`wire/http1/head.py`)",
    "request_id_at request_id_bytes": "in the head",
    "began_ns": "when its headers came",
    "deadline_ns": "until when its first block must have left; 0: there is none",
    "first_out last_out": (BLOCK, "what waits to leave"),
    "path_at path_bytes": "in the head",
    "seen": "for who ends what is late",
    "job": "where it HAS_JOB: its number",
})  # fmt: skip
stream_at, STREAM_BYTES = at(STREAM), STREAM.bytes
PATHS = define(
    "Paths", "paths whose requests are given as they come", {"count": "how many", "first": (TEXT, "where they are")}
)
SESSION = define("Session", "a connection of HTTP/2; the table of the peer's encoder lies behind it", {
    "flags": "HAS_SETTINGS, GOING, BROKEN, GREETED, TABLE_SHRUNK, NO_TABLE",
    "newest": "the highest number of a stream",
    "open": "streams that are open",
    "streams": (STREAM, "their rows"),
    "streams_room": "how many rows there are",
    "send_window initial": "bytes that the peer takes, on the connection and at first on a stream",
    "peer_frame": "bytes of a frame that it takes",
    "receive_window eaten": "bytes that it may send, and that have come since it was told",
    "block_at block_bytes block_room": "a header block that is cut, as far as it has come",
    "block_stream block_flags block_frames": "of which stream it is, the flags of its first frame, and its frames",
    "out_at out_bytes out_room": "the buffer for what is to leave",
    "out_kept": "that buffer, where it is the session's own; else 0",
    "pieces": (TEXT, "what is to leave, in order: parts of the buffer, and data that stay where they are; 0: all is in the buffer"),
    "pieces_used": "of PIECES, for data that stay and the parts before them",
    "piece_from": "the end of those parts",
    "held": "bytes that all streams hold",
    "second resets controls": "a second, and what the peer has done in it that it may not do without end; `resets` below 0: what it has saved of them",
    "waiting": "streams whose blocks wait to leave",
    "next": "the row that has the next turn",
    "event_row": (STREAM, "of what the last frame came to"),
    "event_at event_bytes": "its bytes",
    "most_body": "bytes of a request",
    "streaming_at": (PATHS, "or 0"),
    "started": "streams since the beginning",
    "cut_ns": "since when a frame or a header block is not whole, or 0",
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
CALL, WHOLE, STREAMING = range(3)

# bits of a block's `ends`: the stream ends with it; Python is told when it was sent
ENDS, REPORTS = 1, 2

# results of `core.step`
NOTHING, REQUEST, OPENED, CAME, RESET, SENDABLE, FAILED = range(7)

CONTROL_ROOM = 256  # the most bytes that a step writes
PIECES = 528  # for an answer of 4 MiB in the smallest frames

# memory for decoding a header list
FIELDS_BYTES = hpack.FIELD.bytes * MOST_FIELDS
WORK_BYTES = FIELDS_BYTES + MOST_LIST_BYTES + 2 * MOST_FIELDS + 64
