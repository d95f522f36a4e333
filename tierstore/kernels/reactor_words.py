"""What reactors work with: the words of their memory, and what each may touch. See `reactor.py`.

Constants, and the addresses of words for kernels. Python makes the memory and reads the counts (`service/reactor/`).
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from tierstore.kernels.latency import BOUNDS_NS, BUCKETS
from tierstore.kernels.raw import i64_at
from tierstore.kernels.request_record import get
from tierstore.kernels.sysio import EDGE, HALF_CLOSED, READABLE, WRITABLE

# a connection's row
FREE, READING, AWAY, SENDING, HTTP2 = range(5)
(
    STATE, SERIAL, OWNER, IN_AT, IN_ROOM, IN_BYTES, NEEDED, OUT_AT, OUT_BYTES, OUT_BASE, PIECES_AT, PIECES, DEADLINE_NS,
    FLAGS, LOST, BEGAN_NS, JOB, MOVED_NS, HELD, REASON, SESSION, TLS, CALLER_AT, CALLER_BYTES,
) = range(24)  # fmt: skip
CONNECTION_WORDS = 24
# TLS, CALLER_AT, CALLER_BYTES: an `SSL *`, or 0; and what stands for the names of the client's certificate where a request has no
# Authorization. Python writes them where it gives a connection to a reactor, as long as the row is FREE
# of FLAGS: bytes may be waiting in the socket; no request is read after this answer; the client sends nothing more
# and it is among those that have their next turn at once
MAY_READ, CLOSES, ENDED, WAITS = 1, 2, 4, 8

# words of `shared`, a cache line each, as some are written often
(
    MODE, GENERATION_AT, PLANS_AT, MODELS_AT, INFLIGHT, OTHER_INFLIGHT, OPEN, OTHER_OPEN, HIGHEST, ALLOWED_AT,
    QUEUED, OTHER_QUEUED, CALL_NS, STREAMS_AWAY, STREAMING_PATHS, UNREPORTED,
) = range(0, 16 * 8, 8)  # fmt: skip
SHARED_WORDS = 16 * 8
FULL = 1 << 62  # of a wait for a thread: the queue has no room
# of predictions: how many of reactors and how many calls of Python wait or run, and what one takes its thread
# of MODE: answer; answer, and close each connection after its answer; answer what has started, then close; end now
RUN, DRAIN, FINISH, STOP = range(4)

# words of `limits`
(
    MOST_CONNECTIONS, MOST_BODY, MOST_INFLIGHT, IDLE_NS, ARRIVAL_NS, STALL_NS, SLOWEST_RATE, REACTORS, MOST_DESCRIPTORS,
    PRESSED_STALL_NS, FINISH_NS, MOST_WAIT_NS, MOST_ANSWER, POOL_THREADS, POOL_QUEUE, MOST_MESSAGE, OPENSSL, TRACES,
) = range(18)  # fmt: skip
LIMIT_WORDS = 18  # no limits: where OpenSSL's functions are (`reactor_sockets`), and whether traces are reported

# words of a reactor's line in `lines`
ANNOUNCED, LOAD, EPOLL, ANSWERS, TURNS, NEXT_SWEEP_NS, DATE_S, PAUSED, DICE = range(9)
REASONS_FROM = 16  # how often a request or a connection was handed to Python, by reason
# why: it is no look-up; its head is of another form; too many bytes; its caller is not known here, or has used up its rates; its description is of another
# form; no plan is known; it is a prediction; a row is where readers do not read; its numbers do not pass; no room, or too late;
# its id says which version answers; the service is ending; its trace is to be reported
(
    OTHER, HEADER, SIZE, ACCESS, DESCRIPTION, NO_PLAN, PREDICTION, ROWS_ON_DISK, VALUES, BUSY, CANARY, ENDING, TRACED,
) = range(13)  # fmt: skip
REASONS = (
    "other_request", "header", "size", "access", "form", "no_plan", "prediction", "rows_on_disk", "values", "busy", "canary", "ending", "traced",
)  # fmt: skip
LINE_WORDS = 32

# messages to Python and back: MESSAGE_WORDS int64 each, the first is kind + fd * 256
(
    REQUEST, CONNECTION, REFUSED, SENT, STREAM_REQUEST, STREAM_OPENED, STREAM_DATA, STREAM_LOST, STREAM_SENT,
) = range(9)  # fmt: skip
# an answer in Python's memory, or in a block that becomes the reactor's; of a silent connection: its end; of a stream: a block, more of the
# request is wanted, its end
ANSWER, COME_BACK, DROP, WAKE, BLOCK, MAKE_ROOM, STREAM_BLOCK, STREAM_CONSUMED, STREAM_RESET = range(9)
STREAM_SHIFT = 32  # where the number of a stream begins in the first word of a message
FIRST_PART = (1 << STREAM_SHIFT) - 1
FRAMES, MESSAGE, SWEEP = range(3)  # what `reactor_http2.run` is to do
MESSAGE_WORDS = 4  # the serial of a REQUEST has the reason behind it, from bit 32 on

# a version's counts, int64 words: of answers, of requests that would wait too long or found the queue full; then the buckets of answers' latencies
SUCCESSES, SUCCESS_NS, INPUT_NS, INFER_NS, OUTPUT_NS, LAST_MS, REFUSALS, FULL_REFUSALS, REFUSAL_NS = range(9)
BUCKETS_FROM = 9
COUNT_WORDS = BUCKETS_FROM + BUCKETS
TABLE_COUNT_WORDS = 8  # one a tier

# words of `call`: where the answer's message lies until the next one is made
ANSWER_AT, ANSWER_BYTES = range(2)
CALL_WORDS = 16
SINCE_NS = 2  # when the call's first bytes came; 0: all of them came at once

# what comes of a request
ANSWERED, MADE_A_JOB = -1, -2  # else a reason

EVENTS = 256  # of one turn
ACCEPTED = 64  # connections of one turn
PIPELINED = 16  # requests of one connection, before others have their turn
JOBS = 512  # of one reactor, that readers or threads that predict are at or have before them
KEPT_JOBS = 128  # that predictions leave to others
AGAIN_WORDS = 1 << 16  # connections that have their next turn at once: there is room for all
MESSAGES = 64  # of Python, of one turn
LISTENER, INBOX, JOB_INBOX, GRPC_LISTENER = (k - (1 << 32) for k in range(4))  # in events: no serial is so high
BUFFER_BYTES = 1 << 17
LARGE_TURN = 1 << 20  # bytes of one connection that are read before others have their turn
HEAD_ROOM = 1 << 15  # before the answer's data
FRAMES_BYTES = 1 << 18
SWEEP_NS = 1_000_000_000

SERIALS = 0x7FFFFFFF
BOUNDS = np.array(BOUNDS_NS, np.int64)
INTEREST = READABLE | WRITABLE | HALF_CLOSED | EDGE


class Here(NamedTuple):
    """What one reactor works with. Addresses are of memory that Python keeps while the reactor runs."""

    at: int  # the address of the words that all this was read from
    number: int
    listener: int  # descriptors
    inbox: int
    outbox: int
    shared: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]  # [reactors, LINE_WORDS]
    conns: npt.NDArray[np.int64]  # [descriptors, CONNECTION_WORDS]
    found: npt.NDArray[np.int64]  # what a head says
    call: npt.NDArray[np.int64]  # what has become of a call of gRPC
    again: npt.NDArray[np.int64]  # connections that have more to be answered
    free_jobs: npt.NDArray[np.int64]  # how many, and which
    job_outbox: int  # descriptors of pipes: jobs for readers, and those that they are done with
    job_inbox: int
    prediction_outbox: int  # predictions for threads of Python, which end where the others do; or -1
    jobs: int  # addresses: of all reactors' jobs
    run: int  # of `lookupplan.run`
    run_rows: int  # of `front_rows.run`
    http2: int  # of `reactor_http2.run`
    run_call: int  # of `reactor_calls.run`
    counts: int  # of versions' counts
    table_counts: int
    events: int
    messages: int
    buffer: int  # BUFFER_BYTES of what comes
    answer: int  # HEAD_ROOM and the largest answer, aligned
    states: int  # a byte a key
    scratch: int
    record: int  # of a request, its structure, its run, the values of its answer, and the codes of its strings
    structure: int
    bound: int
    values: int
    codes: int
    date: int  # 29 bytes of today's date, and a message
    headers: int  # of HTTP/2: h2words.WORK_BYTES for a header list that is decoded
    frames: int  # FRAMES_BYTES of frames that are to leave
    grpc_listener: int  # a descriptor, or -1: the other port, which is served alike


def words_of(here: Here) -> npt.NDArray[np.int64]:
    """What `here_at` reads: a word for each number, and for each array its address and its shape."""
    words: list[int] = []
    for part in here:
        words += [part] if isinstance(part, int) else [part.ctypes.data, *part.shape]
    found = np.array(words, np.int64)
    found[0] = found.ctypes.data
    return found


@nb.njit(inline="always")
def _array(at, i):  # type: ignore[no-untyped-def]
    return nb.carray(i64_at(get(at, i)), (get(at, i + 1),))


@nb.njit(inline="always")
def _rows(at, i):  # type: ignore[no-untyped-def]
    return nb.carray(i64_at(get(at, i)), (get(at, i + 1), get(at, i + 2)))


@nb.njit
def here_at(at):  # type: ignore[no-untyped-def]
    """The Here whose words are at an address: parts of a reactor that are compiled apart take no more."""
    return Here(
        get(at, 0), get(at, 1), get(at, 2), get(at, 3), get(at, 4), _array(at, 5), _array(at, 7), _rows(at, 9), _rows(at, 12),
        _array(at, 15), _array(at, 17), _array(at, 19), _array(at, 21), get(at, 23), get(at, 24), get(at, 25), get(at, 26),
        get(at, 27), get(at, 28), get(at, 29), get(at, 30), get(at, 31), get(at, 32), get(at, 33), get(at, 34), get(at, 35),
        get(at, 36), get(at, 37), get(at, 38), get(at, 39), get(at, 40), get(at, 41), get(at, 42), get(at, 43), get(at, 44),
        get(at, 45), get(at, 46), get(at, 47),
    )  # fmt: skip


@nb.njit(inline="always")
def shared_at(me, which):  # type: ignore[no-untyped-def]
    return nb.int64(me.shared.ctypes.data) + 8 * which


@nb.njit(inline="always")
def line_at(me, reactor, which):  # type: ignore[no-untyped-def]
    return nb.int64(me.lines.ctypes.data) + 8 * (reactor * LINE_WORDS + which)
