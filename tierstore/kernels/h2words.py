"""The words of HTTP/2 (RFC 9113) in memory: a session, its streams, blocks that are to leave; and every bound of it.

A *session* is the state of one connection: words, then the peer's HPACK table. A *stream* is a row of its table of streams. A *block* is
what is to leave on a stream: a header block, data, trailers. `h2core.py` says who writes them. Layouts: int64 words.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels import hpack

PREFACE = np.frombuffer(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", np.uint8)

# frames: their types, flags, and error codes
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
FIRST_WINDOW = (1 << 16) - 1  # of a connection, and of streams until SETTINGS say otherwise
FRAME_BYTES = 1 << 14  # what a frame may have, unless SETTINGS say otherwise; and what it may have here

# bounds
MOST_STREAMS = 100  # of a connection at a time; MAX_CONCURRENT_STREAMS
MOST_LIST_BYTES = 1 << 14  # of a header list, decoded; MAX_HEADER_LIST_SIZE
MOST_FIELDS = 256
MOST_BLOCK_BYTES = 1 << 15  # of a header block, as it comes
MOST_CONTINUATIONS = 16
MOST_RESETS = 400  # of streams, by the client or for its errors, in a second
MOST_CONTROLS = 20_000  # PING, SETTINGS, PRIORITY, frames without meaning and empty ones, in a second
STREAM_WINDOW = 1 << 20  # what a client may send ahead on a stream
CONNECTION_WINDOW = 1 << 24  # and on a connection
CREDIT_BYTES = 1 << 22  # of a connection, that are given back at once

# a session
(
    FLAGS, NEWEST, OPEN, STREAMS_AT, STREAMS_ROOM, SEND_WINDOW, INITIAL, PEER_FRAME, RECEIVE_WINDOW, EATEN, BLOCK_AT, BLOCK_BYTES,
    BLOCK_ROOM, BLOCK_STREAM, BLOCK_FLAGS, BLOCK_FRAMES, OUT_AT, OUT_BYTES, OUT_ROOM, OUT_KEPT, HELD, SECOND, RESETS, CONTROLS,
    WAITING, NEXT, EVENT_ROW, EVENT_AT, EVENT_BYTES, MOST_BODY, STREAMING_AT, STARTED, CUT_NS,
) = range(33)  # fmt: skip
SESSION_WORDS = 40
SESSION_BYTES = 8 * SESSION_WORDS + hpack.TABLE_BYTES
# of FLAGS: the peer's first SETTINGS have come; GOAWAY was written; after an error nothing more is read; SETTINGS were written;
# the peer's table of our headers has become smaller, which the next header block has to say; it has said so, once for all
HAS_SETTINGS, GOING, BROKEN, GREETED, TABLE_SHRUNK, NO_TABLE = 1, 2, 4, 8, 16, 32

# a stream
(
    ID, STATE, WINDOW, RECEIVE, CREDIT, AT, BYTES, ROOM, HEAD_BYTES, DECLARED, KIND, HOST_AT, HOST_BYTES, AUTHORIZATION_AT,
    AUTHORIZATION_BYTES, TIMEOUT_MS, UNUSUAL, REQUEST_ID_AT, REQUEST_ID_BYTES, BEGAN_NS, DEADLINE_NS, FIRST_OUT, LAST_OUT,
    PATH_AT, PATH_BYTES, SEEN,
) = range(26)  # fmt: skip
STREAM_WORDS = 26
FIRST_ROOM = 4  # streams that a new session has room for
# of STATE: the client sends no more; its request is Python's; data of it are on their way there; its end was told there; its
# request was too large; the last block of the answer is there
ENDED, AWAY, DELIVERING, END_DELIVERED, TOO_LARGE, FINAL = 1, 2, 4, 8, 16, 32
# of KIND: a call of ModelInfer that is answered here, perhaps; a request that is given on whole; one that is given on as it comes
CALL, WHOLE, STREAMING = range(3)

# a block, which begins with these words; then the header block, the data, the trailers
NEXT_BLOCK, BLOCK_ENDS, HEADER_BYTES, DATA_BYTES, TRAILER_BYTES, HEADERS_DONE, DATA_DONE, SIZE = range(8)
QUEUED_WORDS = 8
# of BLOCK_ENDS: the stream ends with it; somebody waits to hear that it has left
ENDS, REPORTS = 1, 2

# what a step comes to
NOTHING, REQUEST, OPENED, CAME, RESET, SENDABLE, FAILED = range(7)

CONTROL_ROOM = 256  # bytes that a step may write

# memory to decode a header list in
FIELDS_BYTES = 8 * hpack.FIELD_WORDS * MOST_FIELDS
WORK_BYTES = FIELDS_BYTES + MOST_LIST_BYTES + 2 * MOST_FIELDS + 64
