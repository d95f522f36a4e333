"""The records, messages and bounds of reactors. See `loop.py`.

Python makes the memory and reads the counts (`service/reactor/`).
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.latency import BOUNDS_NS, BUCKETS
from tierstore.kernels.records import TEXT, at, define
from tierstore.kernels.sysio import EDGE, HALF_CLOSED, READABLE, WRITABLE
from tierstore.lookup import binding, cold_reads, plans
from tierstore.wire import request_record
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2 import layout as http2_layout

FREE, READING, AWAY, SENDING, HTTP2 = range(5)  # a connection's `state`
CONNECTION_RECORD = define("Connection", "a client's connection, by its descriptor; its reactor writes it, while it is FREE Python", {
    "state": "FREE, READING, AWAY, SENDING or HTTP2",
    "serial": "tells connections that had the descriptor one after another apart",
    "owner": "the number of its reactor",
    "in_at in_room in_bytes": "bytes that have come and wait: where, how many there may be, how many there are",
    "needed": "bytes of the request that they begin, once its head has come; else 0",
    "out_at out_bytes": "what is to leave next of an answer",
    "out_base": "the block that it is in, to be freed; 0: it is in Python's memory",
    "pieces_at pieces": "the piece of Python's memory that is leaving, and how many there are with those behind it",
    "deadline_ns": "until when something must have come or left; 0: it may take any time",
    "flags": "MAY_READ, CLOSES, ENDED, WAITS, TURNED_OFF, LINGERS",
    "lost": "1: the client is gone",
    "began_ns": "when the first bytes of the request came; 0: all came at once",
    "job": "the number of the job that it waits for, from 1 on; or 0",
    "moved_ns": "when something has left, or the request was given away",
    "held": "bytes that count in `inflight`",
    "reason": "why its request is Python's",
    "session": (http2_layout.SESSION, "of HTTP/2, or 0"),
    "chunks_head chunks_at chunk_left": "of a request in chunks that is coming: bytes of its head, or 0; where its next chunk begins; what is to come of that (`wire/http1/frame.py`)",
    "beside": "bytes of lines since the last data of a chunk",
    "to_drop": "bytes of a body that nobody wants, which are to be passed over",
    "tls": "an `SSL *`, or 0",
    "caller_at caller_bytes": "stands for the names of the client's certificate where a request has no Authorization",
})  # fmt: skip
# bits of `flags`, in order: bytes may wait in the socket; the connection ends with this answer; the client sends nothing more; it is due for a turn at
# once; it is above the limit and gets a refusal; its last answer was sent
MAY_READ, CLOSES, ENDED, WAITS, TURNED_OFF, LINGERS = 1, 2, 4, 8, 16, 32
MOST_DROPPED = 1 << 26  # bytes that a client may still send after its last answer

SHARED = define("Shared", "what all reactors of a service share with Python", {
    "mode": "RUN, DRAIN, FINISH or STOP",
    "generation_at": "the address of the generation (`engine/serving/epochs.py`)",
    "plans_at": "of the index of plans",
    "models_at": "of the addresses of what each model serves",
    "inflight other_inflight": "bytes that requests and answers hold, here and in Python",
    "open other_open": "connections that are open, here and in Python",
    "turned_off": "connections that are one too many",
    "undecided": "connections beyond the limit of which Python has not said what becomes of them",
    "highest": "the highest descriptor of a connection",
    "allowed_at": "who may ask (`wire/callers.py`)",
    "queued other_queued": "predictions of reactors, and calls of Python, that wait for a thread or have one",
    "call_ns": "what one of them takes its thread",
    "streams_away": "streams that Python has",
    "streaming_paths": "paths whose requests are given as they come",
    "unreported": "1: a connection has ended and Python was not told which of its streams are lost",
}, apart=True)  # fmt: skip
FULL = 1 << 62  # a wait for a thread: the queue has no room
# values of `mode`: answer; answer, and close each connection after its answer; answer what has started, then close; end now
RUN, DRAIN, FINISH, STOP = range(4)

OPENSSL = define("OpenSsl", "addresses of functions of OpenSSL", {
    "read write error_of clear_errors shut_down free_session": "what they do (`service/openssl.py`)",
})  # fmt: skip
LIMITS = define("Limits", "what bounds connections and requests; constant", {
    "most_connections most_descriptors": "how many may be open, and the first descriptor that has no row",
    "most_body most_upload most_message most_answer": "bytes of a look-up's body, of any other body, of a message of gRPC, of an answer",
    "most_inflight": "bytes of all that is held",
    "idle_ns arrival_ns finish_ns turn_off_ns": "how long a connection may be idle, a request arrive, the end take, a request arrive on a connection too many",
    "stall_ns pressed_stall_ns": "how long an answer may not move, and where many bytes wait",
    "slowest_rate": "bytes a second that a client takes of an answer",
    "reactors": "how many",
    "most_wait_ns pool_threads pool_queue": "of predictions: how long one may wait, how many threads and places there are",
    "traces": "whether the service reports them",
    "openssl": (OPENSSL, "where the service has TLS"),
})  # fmt: skip
# why Python gets a request: not a look-up; unknown form of head; too many bytes; caller unknown or above its rates; unknown form of description; no
# plan; a prediction; a row that readers cannot reach; its numbers fail a check; no room, or too late; its id decides the version; the service is
# ending; its trace must be reported
(
    OTHER, HEADER, SIZE, ACCESS, DESCRIPTION, NO_PLAN, PREDICTION, ROWS_ON_DISK, VALUES, BUSY, CANARY, ENDING, TRACED,
) = range(13)  # fmt: skip
REASONS = (
    "other_request", "header", "size", "access", "form", "no_plan", "prediction", "rows_on_disk", "values", "busy", "canary", "ending", "traced",
)  # fmt: skip
LINE = define("ReactorLine", "what one reactor says of itself", {
    "announced": "the generation that it reads under, or 0",
    "load": "connections that it has",
    "epoll": "a descriptor",
    "answers": "that it has given",
    "turns": "of its loop",
    "next_sweep_ns": "when it looks for connections that are late",
    "date_s": "the second that its date says",
    "paused": "why it does not accept: NO_DESCRIPTORS, UNDECIDED, or 0",
    "dice": "the state of its random numbers",
    "reasons": ((np.int64, (len(REASONS),)), "how often a request or a connection was handed to Python, by reason"),
}, size=256)  # fmt: skip

# kinds of messages to Python
(
    REQUEST, REFUSED, SENT, STREAM_REQUEST, STREAM_OPENED, STREAM_DATA, STREAM_LOST, STREAM_SENT,
) = range(8)  # fmt: skip
# kinds of messages to a reactor, in order: an answer in Python's memory; a connection to serve; end a connection; wake up; an answer in a block that
# becomes the reactor's; end a silent connection; of a stream: a block, data that Python has consumed, a reset
ANSWER, SERVE, DROP, WAKE, BLOCK, MAKE_ROOM, STREAM_BLOCK, STREAM_CONSUMED, STREAM_RESET = range(9)
STREAM_SHIFT = 32  # first bit of a stream's number in the first word of a message
FIRST_PART = (1 << STREAM_SHIFT) - 1
FRAMES, MESSAGE, SWEEP, JOB_ENDED = range(4)  # what `http2.run` is to do

MESSAGE_RECORD = define("Message", "a message to Python or back", {
    "what": "its kind, from bit 8 on a descriptor, from bit 32 on the number of a stream",
    "serial": "of the connection; of a REQUEST the reason behind it, from bit 32 on",
    "value more": "an address and a size, mostly",
})  # fmt: skip
VERSION_COUNTS = define("VersionCounts", "what one reactor has counted of a version", {
    "successes success_ns input_ns infer_ns output_ns": "answers, how long they took in all and in parts",
    "last_ms": "when the last one was",
    "refusals full_refusals": "requests that would wait too long, or found the queue full",
    "refusal_ns": "how long it took to refuse them",
    "buckets": ((np.int64, (BUCKETS,)), "of answers' latencies"),
})  # fmt: skip
TABLE_COUNT_WORDS = 8  # one for each tier

ANSWERED_CALL = define("AnsweredCall", "a call of gRPC", {
    "answer_at answer_bytes": "the answer's message, or the header block of a refusal, until the next one is made",
    "since_ns": "when the call's first bytes came; 0: all came at once",
    "job": "the number of the job that was made of it",
})  # fmt: skip

# results for a request
ANSWERED, MADE_A_JOB, TURNED_AWAY = -1, -2, -3  # otherwise a reason; TURNED_AWAY: a gRPC call is answered with a status

EVENTS = 256  # in one turn
ACCEPTED = 64  # connections accepted in one turn
MOST_UNDECIDED = 32  # connections that wait for Python's decision; others wait to be accepted
NO_DESCRIPTORS, UNDECIDED = 1, 2  # values of `paused`
PIPELINED = 16  # requests of one connection in one turn
JOBS = 512  # of one reactor, with readers or with threads that run graphs
KEPT_JOBS = 128  # of these, not for predictions
READ_HERE = 64  # missing keys that a reactor reads itself from the page cache: 0.1 ms
AGAIN_WORDS = 1 << 16  # room for all connections that are due for a turn at once
MESSAGES = 64  # from Python, in one turn
LISTENER, INBOX, JOB_INBOX, GRPC_LISTENER = (k - (1 << 32) for k in range(4))  # in events, where no serial is so high
BUFFER_BYTES = 1 << 17
LARGE_TURN = 1 << 20  # bytes read from one connection in one turn
HEAD_ROOM = 1 << 15  # bytes in front of the answer's data
FRAMES_BYTES = 1 << 18
SWEEP_NS = 1_000_000_000
PROBE_NS = 50_000_000  # after this time away, an end of the client's side most likely means that the client has gone

SERIALS = 0x7FFFFFFF
BOUNDS = np.array(BOUNDS_NS, np.int64)
INTEREST = READABLE | WRITABLE | HALF_CLOSED | EDGE


TURNS = define("Turns", "connections that have more to be answered", {
    "count": "how many",
    "following": ((np.int64, (AGAIN_WORDS,)), "which have the next turn"),
    "current": ((np.int64, (AGAIN_WORDS,)), "which have this one"),
})  # fmt: skip
FREE_JOBS = define("FreeJobs", "numbers of jobs of a reactor that are free", {
    "count": "how many",
    "numbers": ((np.int64, (JOBS,)), "which"),
})  # fmt: skip
REACTOR = define("Reactor", "what one reactor works with, in memory that Python keeps while it runs", {
    "number": "its own",
    "listener grpc_listener": "descriptors of the ports; -1: there is no second one, or not yet",
    "inbox outbox": "descriptors of pipes: from Python, and to it",
    "job_inbox job_outbox": "jobs that readers are done with, and jobs for them",
    "prediction_outbox": "predictions for threads of Python, which end where the others do; or -1",
    "shared": (SHARED, ""), "limits": (LIMITS, ""), "lines": (LINE, "of all reactors"), "line": (LINE, "its own"),
    "conns": (CONNECTION_RECORD, "by descriptor"),
    "jobs": (cold_reads.JOB, "of all reactors"), "free_jobs": (FREE_JOBS, "its own"),
    "readers": (cold_reads.READERS, "what reads rows from disk"),
    "counts": (VERSION_COUNTS, "of versions"), "table_counts": "of tables: TABLE_COUNT_WORDS for each",
    "run finish": "addresses of `by_plan.run` and `cold_reads.finish`",
    "run_rows http2 run_call": "addresses of `front_rows.run`, `reactor_http2.run` and `reactor_calls.run`; 0 until they are compiled",
    "found": (http1_head.HEAD, "what a head says"),
    "call": (ANSWERED_CALL, "what has become of a call of gRPC"),
    "again": (TURNS, ""),
    "events": "of a turn, as the kernel of the system writes them",
    "messages": (MESSAGE_RECORD, "of Python, of a turn"),
    "message": (MESSAGE_RECORD, "one that is being written"),
    "buffer": "BUFFER_BYTES of what comes",
    "answer": "HEAD_ROOM and the largest answer, aligned",
    "states": "a byte a key",
    "scratch": "to work in",
    "record": (request_record.RECORD, "of a request"), "structure": "its structure",
    "bound": (plans.RUN, "its run"), "values": (binding.VALUES, "of its answer"), "codes": "of keys that are strings",
    "date": "29 bytes of today's date",
    "headers": "of HTTP/2: http2_layout.WORK_BYTES for a header list that is decoded",
    "frames": "FRAMES_BYTES of frames that are to leave",
    "pieces": (TEXT, "`http2_layout.PIECES`, where data of frames stay where they are"),
})  # fmt: skip
connection_at, line_at, reactor_at, message_at, version_counts_at = (
    at(kind) for kind in (CONNECTION_RECORD, LINE, REACTOR, MESSAGE_RECORD, VERSION_COUNTS)
)
MESSAGE_BYTES = MESSAGE_RECORD.bytes
