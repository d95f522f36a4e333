"""The reactors of a service: threads that run `kernels/reactor.py`, their memory, and the pipes between them and Python.

Made on any thread; `start`, `finish` and what comes through the pipe run on the event loop; `close` may block and runs
anywhere, once. A compiled loop never takes the interpreter lock, so its thread is Python's only by name.

A pipe carries fixed messages in one write each, so several threads may write to one without a lock, and reading it is
being woken. Every pipe has room for several messages of every connection there may be. Nothing here survives a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import resource
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.config import Settings
from tierstore.engine.epochs import Epochs
from tierstore.errors import ConfigError
from tierstore.kernels import coldread, httphead, lookupplan, reactor, sysio
from tierstore.kernels import epochs as atomics
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.service.tuning import take_short_turns
from tierstore.types import Tier

logger = logging.getLogger(__name__)

STALL_S = 20.0  # for an answer to leave, beside the time that it takes at SLOWEST_RATE
SLOWEST_RATE = 64 << 10  # bytes a second
MOST_BODY = 1 << 17  # of a request that a reactor reads whole; larger ones go over with their connection
MOST_THREADS = 64
_PIPE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 1 << 16
_MOST_HOSTS = 64
_MESSAGE = struct.Struct(f"<{kernel.MESSAGE_WORDS}q")
_READ_BYTES = 1 << 16
_CLOSES = 1 << 31  # beside a serial
_LINE = 64
_ADDRESS = struct.Struct("<q")
_END = _ADDRESS.pack(-1)

_libc = ctypes.CDLL(None)
_free, _malloc = _libc.free, _libc.malloc
_free.argtypes, _free.restype = [ctypes.c_void_p], None
_malloc.argtypes, _malloc.restype = [ctypes.c_size_t], ctypes.c_void_p


class Hands(Protocol):
    """Takes what reactors hand on. Event loop only."""

    def request(self, reply: Reply, data: bytes) -> None: ...
    def connection(self, sock: socket.socket, data: bytes) -> None: ...
    def refused(self, sock: socket.socket) -> None: ...


class Reply:
    """Where the answer to a request goes; one of `send`, `send_copy` and `drop` is to be called, once. Event loop only."""

    __slots__ = ("_fd", "_reactor", "_reactors", "_serial")

    def __init__(self, reactors: Reactors, reactor: int, fd: int, serial: int) -> None:
        self._reactors, self._reactor, self._fd, self._serial = reactors, reactor, fd, serial

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return bool(self._reactors.conns[self._fd, kernel.LOST])

    @property
    def client(self) -> tuple[str, int] | None:
        """The client's address and port, while it is not answered."""
        try:
            with socket.socket(fileno=os.dup(self._fd)) as connection:
                host, port = connection.getpeername()[:2]
        except OSError:
            return None
        return host, port

    @property
    def began_ns(self) -> int:
        """When the first bytes of the request came, on the monotonic clock; 0 where all came at once."""
        return int(self._reactors.conns[self._fd, kernel.BEGAN_NS])

    def send(self, pieces: list[bytes | memoryview], sent: Callable[[], None], *, closes: bool = False) -> None:
        """Answer with `pieces`, none empty; `sent` is called once they have left, or nobody wants them any more."""
        reactors = self._reactors
        arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
        places = np.array([(address_of(array), len(array)) for array in arrays], np.int64)
        reactors.sending[self._fd, self._serial] = (places, arrays, sent)
        size = len(arrays) | sum(map(len, arrays)) << 16
        flags = self._serial | (_CLOSES if closes else 0)
        reactors.tell(self._reactor, kernel.ANSWER, self._fd, flags, address_of(places), size)

    def send_copy(self, data: bytes, *, closes: bool = False) -> None:
        """Answer with a copy of `data`, which the reactor counts and frees: for few bytes, as it need not say when they left."""
        block = _malloc(len(data))
        if block is None:
            raise MemoryError
        ctypes.memmove(block, data, len(data))
        atomics.add(address_of(self._reactors.words) + 8 * kernel.INFLIGHT, len(data))
        flags = self._serial | (_CLOSES if closes else 0)
        self._reactors.tell(self._reactor, kernel.BLOCK, self._fd, flags, block, len(data))

    def drop(self) -> None:
        """Close the connection without an answer."""
        self._reactors.tell(self._reactor, kernel.DROP, self._fd, self._serial, 0, 0)


class Reactors:
    """`threads` of them, which accept from `listener` together. `words` is what they share among them."""

    def __init__(self, threads: int, settings: Settings, epochs: Epochs, most_connections: int) -> None:
        # constant after construction
        self.threads, self._epochs = threads, epochs
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
        self.words = np.zeros(kernel.SHARED_WORDS, np.int64)
        self.conns = np.zeros((most, kernel.CONNECTION_WORDS), np.int64)
        self._lines = np.zeros((threads, kernel.LINE_WORDS), np.int64)
        self._limits = np.zeros(kernel.LIMIT_WORDS, np.int64)
        for word, value in {
            kernel.MOST_CONNECTIONS: most_connections,
            kernel.MOST_BODY: min(MOST_BODY, settings.max_request),
            kernel.MOST_INFLIGHT: settings.max_inflight,
            kernel.IDLE_NS: int(settings.idle_timeout_s * 1e9),
            kernel.ARRIVAL_NS: int(settings.arrival_timeout_s * 1e9),
            kernel.STALL_NS: int(STALL_S * 1e9),
            kernel.SLOWEST_RATE: SLOWEST_RATE,
            kernel.REACTORS: threads,
            kernel.MOST_DESCRIPTORS: most,
        }.items():
            self._limits[word] = value
        self.words[kernel.GENERATION_AT] = address_of(epochs.generation)
        self.words[kernel.MODELS_AT] = address_of(epochs.models)
        self.words[kernel.ANY_HOST] = int(settings.allow_open_network)
        self._jobs = np.zeros((threads * kernel.JOBS, coldread.JOB_WORDS), np.int64)
        self._free_jobs = np.zeros((threads, kernel.JOBS + 1), np.int64)
        self._free_jobs[:, 0] = kernel.JOBS
        self._free_jobs[:, 1:] = np.arange(threads * kernel.JOBS).reshape(threads, kernel.JOBS)
        self._reader_words = np.zeros(coldread.SHARED_WORDS, np.int64)
        self._reader_threads = settings.disk_threads
        self._done_at = np.zeros(threads, np.int64)
        self._memory = [mmap.mmap(-1, _memory_bytes()) for _ in range(threads)]
        # the event loop's
        self.sending: dict[
            tuple[int, int], tuple[npt.NDArray[np.int64], list[npt.NDArray[np.uint8]], Callable[[], None]]
        ] = {}
        self._hosts: list[bytes] = []
        self._host_words: list[npt.NDArray[np.int64]] = []
        self._publish_hosts([0])
        self._hands: Hands | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[threading.Thread] = []
        self._readers: list[threading.Thread] = []
        self._promoter: Promoter | None = None
        self._job_inboxes: list[int] = []
        self._job_outbox = self._offer_outbox = -1
        self._epolls: list[select.epoll] = []
        self._pipes: list[int] = []
        self._inboxes: list[int] = []
        self._inbox_ends: list[int] = []
        self._outbox = -1

    # --- from start to end

    def start(self, listener: socket.socket, hands: Hands) -> None:
        """Listen and serve, on the running event loop."""
        self._hands, self._loop = hands, asyncio.get_running_loop()
        listener.setblocking(False)
        self._outbox, outbox = self._pipe()
        self._epochs.add_readers(self._lines, kernel.ANNOUNCED)
        self._epochs.add_readers(self._jobs, coldread.ANNOUNCED)  # asked after the reactors, who pass their word on
        job_outbox = self._start_readers()
        for number in range(self.threads):
            inbox, far = self._pipe()
            self._inboxes.append(far)
            self._inbox_ends.append(inbox)
            epoll = select.epoll()
            self._epolls.append(epoll)
            line = self._lines[number]
            line[kernel.EPOLL] = epoll.fileno()
            line[kernel.DICE] = secrets.randbits(62) | 1
            _register(epoll.fileno(), inbox, sysio.READABLE, kernel.INBOX)
            _register(epoll.fileno(), self._job_inboxes[number], sysio.READABLE, kernel.JOB_INBOX)
            _register(epoll.fileno(), listener.fileno(), sysio.READABLE | sysio.EXCLUSIVE, kernel.LISTENER)
            here = self._here(number, listener.fileno(), inbox, outbox, job_outbox)
            self._workers.append(
                threading.Thread(target=_serve, args=(here,), name=f"tierstore-reactor-{number}", daemon=True)
            )
        self._loop.add_reader(self._outbox, self._on_messages)
        for worker in self._workers:
            worker.start()

    def finish(self) -> None:
        """Accept nothing more, answer what has begun, and close what is idle. Event loop only."""
        self._set_mode(kernel.FINISH)

    def close(self) -> None:
        """End the threads, and close whatever connections are left. Once; not on the event loop while it runs."""
        self._set_mode(kernel.STOP)
        for worker in self._workers:
            if worker.ident is not None:
                worker.join()
        self._stop_readers()
        self._epochs.remove_readers(self._lines)
        self._epochs.remove_readers(self._jobs)
        for job in self._jobs[self._jobs[:, coldread.ANNOUNCED] != 0]:
            _free(int(job[coldread.BLOCK]))
        for fd in np.flatnonzero(self.conns[:, kernel.STATE] != kernel.FREE).tolist():
            os.close(fd)
            for word in (kernel.IN_AT, kernel.OUT_BASE):
                _free(int(self.conns[fd, word]) or None)
        self.conns[:, kernel.STATE] = kernel.FREE
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._outbox)
        for inbox in self._inbox_ends:
            self._close_left(inbox)
        for epoll in self._epolls:
            epoll.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        for *_, sent in self.sending.values():
            sent()
        self.sending.clear()
        self._workers.clear()

    @staticmethod
    def _close_left(inbox: int) -> None:
        """Close connections that were to come back to a reactor that has ended."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(inbox, _READ_BYTES // _MESSAGE.size * _MESSAGE.size):
                for what, *_ in _MESSAGE.iter_unpack(data):
                    if what & 255 == kernel.COME_BACK:
                        os.close(what >> 8)

    @property
    def idle(self) -> bool:
        """Whether no connection is left here."""
        return int(self.words[kernel.OPEN]) == 0

    def _set_mode(self, mode: int) -> None:
        self.words[kernel.MODE] = max(mode, int(self.words[kernel.MODE]))
        for number in range(len(self._inboxes)):
            self.tell(number, kernel.WAKE, 0, 0, 0, 0)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pipes += ends
        with contextlib.suppress(OSError):  # a user may have no more of it left
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # a connection has at most a request, an answer that has left and itself under way in one pipe
        fit = int(fcntl.fcntl(ends[1], fcntl.F_GETPIPE_SZ)) // _MESSAGE.size // 4
        if fit < self._limits[kernel.MOST_CONNECTIONS]:
            logger.warning("pipes are short: %d HTTP connections may be open", fit)
            self._limits[kernel.MOST_CONNECTIONS] = fit
        return ends

    def _start_readers(self) -> int:
        """Start the threads that read cold rows, and the one that offers them to the caches. Returns where jobs go."""
        job_inbox, job_outbox = self._pipe()
        offer_inbox, offer_outbox = self._pipe()
        os.set_blocking(job_inbox, True)
        os.set_blocking(offer_inbox, True)
        for number in range(self.threads):
            done, far = self._pipe()
            self._job_inboxes.append(done)
            self._done_at[number] = far
        self._job_outbox, self._offer_outbox = job_outbox, offer_outbox
        places = (
            address_of(self._reader_words),
            address_of(self._jobs),
            job_inbox,
            offer_outbox,
            address_of(self._done_at),
        )
        self._readers = [
            threading.Thread(target=coldread.serve, args=places, name=f"tierstore-cold-{number}", daemon=True)
            for number in range(self._reader_threads)
        ]
        self._promoter = Promoter(self._epochs, self._reader_words, offer_inbox)
        for reader in (*self._readers, self._promoter):
            reader.start()
        return job_outbox

    def _stop_readers(self) -> None:
        """After the reactors: nobody makes a job any more."""
        for _ in self._readers:
            os.write(self._job_outbox, _END)
        for reader in self._readers:
            reader.join()
        if self._promoter is not None:
            os.write(self._offer_outbox, _END)
            self._promoter.join()

    def _here(self, number: int, listener: int, inbox: int, outbox: int, job_outbox: int) -> kernel.Here:
        base = address_of(np.frombuffer(self._memory[number], np.uint8))
        places = []
        for size in _areas():
            places.append(base)
            base += size
        events, messages, buffer, answer, states, scratch, date = places
        return kernel.Here(
            number, listener, inbox, outbox, self.words, self._limits, self._lines, self.conns,
            np.zeros(httphead.FOUND_WORDS, np.int64), np.zeros(1 + 2 * kernel.AGAIN_WORDS, np.int64),
            self._free_jobs[number], job_outbox, self._job_inboxes[number], address_of(self._jobs), lookupplan.run.address, self.counts_at[number], self.table_counts_at[number], events, messages, buffer, answer, states, scratch, date,
        )  # fmt: skip

    def count_in(self, versions: npt.NDArray[np.int64], tables: npt.NDArray[np.int64]) -> None:
        """Where each thread counts, int64[threads, rows, words]. To be called before `start`."""
        self.counts_at = [address_of(of) for of in versions]
        self.table_counts_at = [address_of(of) for of in tables]

    # --- messages

    def tell(self, reactor: int, kind: int, fd: int, serial: int, address: int, count: int) -> None:
        """Write to a reactor's pipe."""
        os.write(self._inboxes[reactor], _MESSAGE.pack(kind | fd << 8, serial, address, count))

    def come_back(self, fd: int) -> None:
        """Have a connection served here again. Its descriptor is the reactor's from now on."""
        self.tell(fd % self.threads, kernel.COME_BACK, fd, 0, 0, 0)

    def count_other(self, connections: int) -> None:
        """So many more, or fewer, connections are served by Python."""
        atomics.add(address_of(self.words) + 8 * kernel.OTHER_OPEN, connections)

    @property
    def open(self) -> int:
        """Connections there are, here and in Python."""
        return int(self.words[kernel.OPEN]) + int(self.words[kernel.OTHER_OPEN])

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that clients have not taken yet, but for those that are in Python's memory."""
        return int(self.words[kernel.INFLIGHT])

    def allow_host(self, value: bytes) -> None:
        """Requests with this value of Host pass the guard. Their number is bounded; others are for Python to check."""
        if value in self._hosts or len(self._hosts) >= _MOST_HOSTS:
            return
        self._hosts.append(value)
        arrays = [np.frombuffer(host, np.uint8) for host in self._hosts]
        self._publish_hosts([len(arrays), *(word for array in arrays for word in (address_of(array), len(array)))])

    def _publish_hosts(self, words: list[int]) -> None:
        array = np.array(words, np.int64)
        self._host_words.append(array)  # all of them are kept: they are few and small
        self.words[kernel.HOSTS_AT] = address_of(array)

    def _on_messages(self) -> None:
        try:
            data = os.read(self._outbox, _READ_BYTES // _MESSAGE.size * _MESSAGE.size)
        except BlockingIOError:
            return
        hands = self._hands
        assert hands is not None
        for what, serial, value, more in _MESSAGE.iter_unpack(data):
            kind, fd = what & 255, what >> 8
            if kind == kernel.REQUEST:
                owner = int(self.conns[fd, kernel.OWNER])
                hands.request(Reply(self, owner, fd, serial), ctypes.string_at(value, more))
            elif kind == kernel.SENT:
                entry = self.sending.pop((fd, serial), None)
                if entry is not None:
                    entry[2]()
            elif kind == kernel.CONNECTION:
                came = ctypes.string_at(value, more) if more else b""
                _free(value or None)
                hands.connection(socket.socket(fileno=fd), came)
            else:
                hands.refused(socket.socket(fileno=fd))

    # --- figures

    @property
    def unfinished(self) -> int:
        """Connections on which a request has begun to arrive, and not all of it."""
        rows = self.conns[: int(self.words[kernel.HIGHEST]) + 1]
        return int(np.count_nonzero((rows[:, kernel.STATE] == kernel.READING) & (rows[:, kernel.IN_BYTES] > 0)))

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        answers = CounterMetricFamily(
            "tierstore_reactor_answers", "Look-ups that a reactor answered without the interpreter.", labels=["reactor"]
        )
        handed = CounterMetricFamily(
            "tierstore_reactor_handed_on", "Requests and connections that it handed to Python.", labels=["reactor"]
        )
        connections = GaugeMetricFamily(
            "tierstore_reactor_connections", "Connections that it serves.", labels=["reactor"]
        )
        for number, line in enumerate(self._lines):
            answers.add_metric([str(number)], int(line[kernel.ANSWERS]))
            handed.add_metric([str(number)], int(line[kernel.HANDED]))
            connections.add_metric([str(number)], int(line[kernel.LOAD]))
        yield from (answers, handed, connections)
        yield GaugeMetricFamily(
            "tierstore_unfinished_requests", "Requests that have begun to arrive.", value=self.unfinished
        )
        yield GaugeMetricFamily(
            "tierstore_unsent_bytes",
            "Bytes of answers that clients have not taken yet.",
            value=self.unsent_bytes,
        )


def _serve(here: kernel.Here) -> None:
    take_short_turns()
    reactor.serve(here)


class Promoter(threading.Thread):
    """Offers what readers have read to the caches of its tables, until it is told to end."""

    def __init__(self, epochs: Epochs, words: npt.NDArray[np.int64], inbox: int) -> None:
        super().__init__(name="tierstore-promote", daemon=True)
        self._epochs, self._words, self._inbox = epochs, words, inbox

    def run(self) -> None:
        while True:
            for (block,) in _ADDRESS.iter_unpack(os.read(self._inbox, _READ_BYTES)):
                if block < 0:
                    return
                try:
                    self._offer(block)
                except Exception:
                    logger.exception("rows that were read are not cached")

    def _offer(self, block: int) -> None:
        size, table_id, seq, n, row_bytes = np.frombuffer(_memory(block, 8 * coldread.OFFER_WORDS), np.int64).tolist()
        try:
            data = np.frombuffer(_memory(block, size), np.uint8)
            at = 8 * coldread.OFFER_WORDS
            keys = data[at : at + 8 * n].view(np.int64)
            state = data[at + 8 * n : at + 9 * n]
            at += 8 * n + -(-n // 8) * 8
            table = self._epochs.table(table_id)
            if table is not None:
                table.promote(seq, keys, data[at : at + n * row_bytes].reshape(n, row_bytes), state == Tier.DISK)
        finally:
            _free(block)
            atomics.add(address_of(self._words) + 8 * coldread.OFFERED, -size)


def _memory(address: int, size: int) -> Any:
    """`size` bytes at an address, as a buffer."""
    return (ctypes.c_char * size).from_address(address)


def _areas() -> tuple[int, ...]:
    """Bytes of a reactor's own memory, part by part, each aligned: events, messages, what comes, an answer, states, scratch, date."""
    sizes = (
        kernel.EVENTS * sysio.EVENT_BYTES,
        kernel.MESSAGES * _MESSAGE.size,
        kernel.BUFFER_BYTES + _LINE,
        kernel.HEAD_ROOM + lookupplan.MOST_WORK_BYTES + _LINE,
        lookupplan.MOST_KEYS + _LINE,
        lookupplan.SCRATCH_BYTES,
        4096,
    )
    return tuple(-(-size // _LINE) * _LINE for size in sizes)


def _memory_bytes() -> int:
    return sum(_areas())


def _register(epoll: int, fd: int, mask: int, data: int) -> None:
    """`epoll_ctl` with 64 bits of data, which the standard library does not offer."""
    failed = reactor.watch(epoll, fd, mask, data)
    if failed:
        raise OSError(-failed, os.strerror(-failed))


def check_threads(threads: int) -> None:
    if threads > MOST_THREADS:
        raise ConfigError(f"threads = {threads}: expected at most {MOST_THREADS}, about one a core")
