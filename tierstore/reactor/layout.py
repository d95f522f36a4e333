"""The records, messages and bounds of reactors. See `loop.py`.

Python makes the memory and reads the counts (`service/reactor/`).
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.latency import BOUNDS_NS, BUCKETS
from tierstore.kernels.records import TEXT, at, define
from tierstore.kernels.sysio import EDGE, HALF_CLOSED, READABLE, WRITABLE
from tierstore.lookup import answer_values, cold_reads, plans
from tierstore.wire import request_record
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2 import layout as http2_layout

FREE, READING, AWAY, SENDING, HTTP2 = range(5)  # a connection's `state`
CONNECTION_RECORD = define("Connection", "a client's connection, by its descriptor. Its reactor writes the record; while it is FREE, Python does", {
    "state": "FREE, READING, AWAY, SENDING or HTTP2",
    "serial": "a number that differs for connections that had the descriptor one after another",
    "owner": "the number of its reactor",
    "in_at in_room in_bytes": "the address of bytes that have come and wait, the bytes for which there is room, and the bytes that are there",
    "needed": "the bytes of the request at their beginning, once its head has come; else 0",
    "out_at out_bytes": "the address and the bytes of the answer that are to leave next",
    "out_base": "the address of the block with these bytes, to be freed; 0: they are in Python's memory",
    "pieces_at pieces": "the address of the piece of Python's memory that is leaving, and the number of pieces from it on",
    "deadline_ns": "the time by which bytes must have come or left; 0: no deadline",
    "flags": "bits: MAY_READ, CLOSES, ENDED, WAITS, TURNED_OFF, LINGERS",
    "lost": "1: the client is gone",
    "began_ns": "the time at which the first bytes of the request came; 0: all came at once",
    "job": "the number of the job that it waits for, from 1 on; or 0",
    "moved_ns": "the time at which bytes left last, or at which the request was given away",
    "held": "the bytes that count in `inflight`",
    "reason": "the reason for which Python has its request",
    "session": (http2_layout.SESSION, "the session of HTTP/2, or 0"),
    "chunks_head chunks_at chunk_left": "of a request in chunks that is coming: the bytes of its head, or 0; the offset of its next chunk; the bytes of that chunk that are to come (`wire/http1/frame.py`)",
    "beside": "the bytes of lines since the last data of a chunk",
    "to_drop": "the bytes of an unwanted body that are to be skipped",
    "tls": "the address of an `SSL`, or 0",
    "caller_at caller_bytes": "the address and the bytes of the names in the client's certificate, in place of an Authorization header",
})  # fmt: skip
# bits of `flags`, in order: bytes may wait in the socket; the connection ends with this answer; the client sends nothing more; it is due for a turn at
# once; it is above the limit and gets a refusal; its last answer was sent
MAY_READ, CLOSES, ENDED, WAITS, TURNED_OFF, LINGERS = 1, 2, 4, 8, 16, 32
MOST_DROPPED = 1 << 26  # bytes that a client may still send after its last answer

SHARED = define("Shared", "the state that all reactors of a service share with Python", {
    "mode": "RUN, DRAIN, FINISH or STOP",
    "generation_at": "the address of the generation (`engine/serving/epochs.py`)",
    "plans_at": "the address of the index of plans",
    "models_at": "the address of the addresses of each model's Served",
    "inflight other_inflight": "the bytes that requests and answers hold, here and in Python",
    "open other_open": "the number of open connections, here and in Python",
    "turned_off": "the number of connections above the limit that get a refusal",
    "undecided": "the number of connections above the limit that wait for Python's decision",
    "highest": "the highest descriptor of a connection",
    "allowed_at": "the address of the hosts and tokens that are let in (`wire/callers.py`)",
    "queued other_queued": "the number of predictions of reactors, and of calls of Python, that wait for a thread or have one",
    "call_ns": "the time for which one of them has its thread",
    "streams_away": "the number of streams that Python has",
    "streaming_paths": "the address of the paths whose requests Python gets in parts",
    "unreported": "1: a connection has ended, and Python was not told yet which of its streams are lost",
}, apart=True)  # fmt: skip
FULL = 1 << 62  # a wait for a thread: the queue has no room
# values of `mode`: answer; answer, and close each connection after its answer; answer what has started, then close; end now
RUN, DRAIN, FINISH, STOP = range(4)

OPENSSL = define("OpenSsl", "the addresses of functions of OpenSSL", {
    "read write error_of clear_errors shut_down free_session": "functions that `service/openssl.py` describes",
})  # fmt: skip
LIMITS = define("Limits", "the bounds of connections and requests; constant", {
    "most_connections most_descriptors": "the most open connections, and the first descriptor that has no row",
    "most_body most_upload most_message most_answer": "the most bytes of a look-up's body, of any other body, of a message of gRPC, of an answer",
    "most_inflight": "the most bytes that requests and answers may hold",
    "idle_ns arrival_ns finish_ns turn_off_ns": "the most time for an idle connection, for a request's arrival, for the end, and for a request's arrival on a connection above the limit",
    "stall_ns pressed_stall_ns": "the most time in which no byte of an answer leaves, and the same while many bytes wait",
    "slowest_rate": "the least bytes a second that a client must take of an answer",
    "reactors": "the number of reactors",
    "most_wait_ns pool_threads pool_queue": "the most time that a prediction may wait, the number of threads for predictions, and of places in their queue",
    "traces": "1: the service reports traces",
    "openssl": (OPENSSL, "the functions of OpenSSL, if the service has TLS"),
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
LINE = define("ReactorLine", "the state that one reactor publishes", {
    "announced": "the generation under which it reads, or 0",
    "load": "the number of its connections",
    "epoll": "the descriptor of its epoll",
    "answers": "the number of answers that it has given",
    "turns": "the number of turns of its loop",
    "next_sweep_ns": "the time at which it next looks for late connections",
    "date_s": "the second for which its date was made",
    "paused": "the reason for which it accepts no connection: NO_DESCRIPTORS, UNDECIDED, or 0",
    "dice": "the state of its random numbers",
    "reasons": ((np.int64, (len(REASONS),)), "the number of requests and connections that it has given to Python, by reason"),
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

MESSAGE_RECORD = define("Message", "a message to Python or from it", {
    "what": "the kind, from bit 8 on a descriptor, from bit 32 on the number of a stream",
    "serial": "the serial of the connection; of a REQUEST the reason too, from bit 32 on",
    "value more": "an address and a size, in most kinds",
})  # fmt: skip
VERSION_COUNTS = define("VersionCounts", "the counts of one version in one reactor", {
    "successes success_ns input_ns infer_ns output_ns": "the number of answers, and their time in all and in parts",
    "last_ms": "the time of the last answer",
    "refusals full_refusals": "the numbers of requests that would have waited too long, and that found the queue full",
    "refusal_ns": "the time that refusals took",
    "buckets": ((np.int64, (BUCKETS,)), "the numbers of answers by latency"),
})  # fmt: skip
TABLE_COUNT_WORDS = 8  # one for each tier

ANSWERED_CALL = define("AnsweredCall", "the outcome of a call of gRPC", {
    "answer_at answer_bytes": "the address and the bytes of the answer's message, or of a refusal's header block, valid until the next call",
    "since_ns": "the time at which the first bytes of the call came; 0: all came at once",
    "job": "the number of the job that the call became",
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
HEAD_ROOM = 1 << 18  # bytes in front of the answer's data
MOST_AS_JSON = (
    1 << 17
)  # bytes of elements that a reactor writes as JSON itself: a millisecond. Readers write more of them
MOST_TEXT_BYTES = 1 << 20  # of JSON that a reactor writes itself
FRAMES_BYTES = 1 << 18
SWEEP_NS = 1_000_000_000
PROBE_NS = 50_000_000  # after this time away, an end of the client's side most likely means that the client has gone

SERIALS = 0x7FFFFFFF
BOUNDS = np.array(BOUNDS_NS, np.int64)
INTEREST = READABLE | WRITABLE | HALF_CLOSED | EDGE


TURNS = define("Turns", "the connections that have more requests to be answered", {
    "count": "the number of connections",
    "following": ((np.int64, (AGAIN_WORDS,)), "the connections that have the next turn"),
    "current": ((np.int64, (AGAIN_WORDS,)), "the connections that have this turn"),
})  # fmt: skip
FREE_JOBS = define("FreeJobs", "the free numbers of jobs of a reactor", {
    "count": "the number of free numbers",
    "numbers": ((np.int64, (JOBS,)), "the free numbers"),
})  # fmt: skip
REACTOR = define("Reactor", "the working memory of one reactor; Python keeps it while the reactor runs", {
    "number": "the number of the reactor",
    "listener grpc_listener": "the descriptors of the ports; -1: there is no second port, or not yet",
    "inbox outbox": "the descriptors of the pipes from Python and to it",
    "job_inbox job_outbox": "the descriptors of the pipes from the readers and to them",
    "prediction_outbox": "the descriptor of the pipe to Python's threads for predictions, which come back by `job_inbox`; or -1",
    "shared": (SHARED, "the state that is shared with Python"), "limits": (LIMITS, "the bounds"), "lines": (LINE, "the lines of all reactors"), "line": (LINE, "its own line"),
    "conns": (CONNECTION_RECORD, "the connections, by descriptor"),
    "jobs": (cold_reads.JOB, "the jobs of all reactors"), "free_jobs": (FREE_JOBS, "its own free jobs"),
    "readers": (cold_reads.READERS, "the state of the readers of cold rows"),
    "counts": (VERSION_COUNTS, "the counts of versions"), "table_counts": "the address of the counts of tables, TABLE_COUNT_WORDS for each",
    "run finish scan write": "the addresses of `by_plan.run`, `cold_reads.finish`, `json/scan.fill` and `json_answer.write`",
    "scan_predict read_predict": "the addresses of `json/predict.fill` and `json/predict.read`",
    "run_rows http2 run_call": "the addresses of `front_rows.run`, `reactor_http2.run` and `reactor_calls.run`; 0 until they are compiled",
    "found": (http1_head.HEAD, "the head of the present request"),
    "call": (ANSWERED_CALL, "the outcome of the present call of gRPC"),
    "again": (TURNS, "the connections that have more requests to be answered"),
    "events": "the address of the events of a turn, as the kernel of the system writes them",
    "messages": (MESSAGE_RECORD, "the messages of Python in a turn"),
    "message": (MESSAGE_RECORD, "the message that is being written"),
    "buffer": "the address of BUFFER_BYTES for bytes that come",
    "answer": "the address of HEAD_ROOM and the largest answer, aligned",
    "data": "the address of the present request's elements where they do not stay as they came, scan.DATA_BYTES",
    "text text_bytes": "the address of an answer in JSON, behind its HEAD_ROOM, MOST_TEXT_BYTES; and its bytes",
    "states": "the address of a byte for each key",
    "scratch": "the address of working memory",
    "record": (request_record.RECORD, "the record of the present request"), "structure": "the address of its structure",
    "bound": (plans.RUN, "the run of the present request"), "values": (answer_values.VALUES, "the values of its answer"), "codes": "the address of the codes of its string keys",
    "date": "the address of the 29 bytes of the date",
    "headers": "the address of http2_layout.WORK_BYTES for decoding a header list of HTTP/2",
    "frames": "the address of FRAMES_BYTES for frames that are to leave",
    "pieces": (TEXT, "`http2_layout.PIECES` parts of the output, where data of frames stay where they are"),
})  # fmt: skip
connection_at, line_at, reactor_at, message_at, version_counts_at = (
    at(kind) for kind in (CONNECTION_RECORD, LINE, REACTOR, MESSAGE_RECORD, VERSION_COUNTS)
)
MESSAGE_BYTES = MESSAGE_RECORD.bytes
