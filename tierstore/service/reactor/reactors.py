"""The reactors of a service: threads that run `reactor/loop.py`, their memory, and the pipes between them and Python.

Made on any thread. `start`, `start_http2`, `finish` and everything that comes through the pipe run on the event loop;
`close` may block, and runs on any thread, once. A compiled loop never takes the interpreter lock. A pipe carries
messages of a fixed size, each in one write, so several threads may write to it without a lock; it has room for several
messages of every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels import epochs as atomics
from tierstore.kernels import sysio
from tierstore.kernels.codec import address_of
from tierstore.lookup import by_plan, front_rows, json_answer
from tierstore.lookup import cold_reads as cold_read_kernels
from tierstore.open_files import may_open
from tierstore.reactor import calls as reactor_calls
from tierstore.reactor import http2 as reactor_http2
from tierstore.reactor import layout as kernel
from tierstore.reactor import loop as reactor_loop
from tierstore.service.families import counters, gauge, gauges
from tierstore.service.openssl import TlsSession
from tierstore.service.process import request_short_slices
from tierstore.service.reactor.cold_reads import ColdReaders, free
from tierstore.service.reactor.lanes import Lanes, Message
from tierstore.service.reactor.memory import areas, limits_of, register
from tierstore.service.reactor.predictions import Counted, Predictions
from tierstore.service.reactor.reply import Reply, Sending
from tierstore.service.reactor.scorings import Scoring
from tierstore.service.reactor.silent import SilentConnections
from tierstore.service.reactor.streams import StreamReceiver, Streams
from tierstore.service.reactor.tls_rows import TlsRows
from tierstore.threads import Thread
from tierstore.wire.json import predict as json_predict
from tierstore.wire.json import scan as json_scan

logger = logging.getLogger(__name__)

_PIPE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 1 << 16
_MESSAGE = struct.Struct("<4q")  # of `kernel.MESSAGE_RECORD`
_READ_BYTES = 1 << 16
_ON_THEIR_WAY = 64  # connections beyond the limit, whose place another is about to leave


class HandoffReceiver(Protocol):
    """Receives what reactors hand off to Python."""

    def request(self, reply: Reply, data: bytes) -> None: ...
    def refused(self, fd: int) -> None: ...


class Reactors:
    """`threads` reactors, which accept from the same ports together. `words` is the memory that they share."""

    def __init__(self, threads: int, settings: Settings, epochs: Epochs, most_connections: int) -> None:
        # constant after construction
        self.threads, self._epochs = threads, epochs
        most = min(may_open() or _MOST_DESCRIPTORS, _MOST_DESCRIPTORS)
        self.words, self.conns = kernel.SHARED.new(), kernel.CONNECTION_RECORD.new(most)
        self._lines = kernel.LINE.new(threads)
        self._limits = limits_of(settings, threads, most_connections, most)
        self.words["generation_at"], self.words["models_at"] = address_of(epochs.generation), address_of(epochs.models)
        self.cold_readers = ColdReaders(threads, settings.disk_threads, epochs)
        self._memory = [mmap.mmap(-1, sum(areas().values())) for _ in range(threads)]
        self._predictions: Predictions | None = None  # set before `start`, with the pipe of their threads
        self._prediction_outbox = -1
        # the event loop's
        self.running = False  # from `start` on, for good
        self.sending: dict[tuple[int, int], Sending] = {}
        self.lanes = Lanes(self._serve_message)
        self.streams = Streams(self)
        self.tls = TlsRows(self.conns, self._limits, with_tls=settings.tls_cert is not None)
        self._silent = SilentConnections(self.conns, self._limits, self.words)
        self._receiver: HandoffReceiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[threading.Thread] = []
        self._epolls: list[select.epoll] = []
        self._heres: list[npt.NDArray[Any]] = []
        self._pipes: list[int] = []
        self._writing = threading.Lock()
        self._inboxes: list[int] = []  # guarded by _writing once threads may answer
        self._inbox_ends: list[int] = []
        self._outbox = -1

    # --- from start to end

    def start(
        self,
        listeners: Sequence[socket.socket],
        receiver: HandoffReceiver,
        streams: StreamReceiver,
        streaming: Sequence[bytes] = (),
    ) -> None:
        """Serve HTTP/1.1, on the running event loop, for connections to `listeners`, one at most, and those given back.

        They listen already. `streaming`: gRPC paths whose requests are passed on as they arrive.
        """
        self.streams.start(streams, streaming)
        self._receiver, self._loop = receiver, asyncio.get_running_loop()
        for listener in listeners:
            listener.setblocking(False)
        port = listeners[0].fileno() if listeners else -1
        self._outbox, outbox = self._pipe()
        self._epochs.add_readers(self._lines)
        queued_at = kernel.SHARED.place(self.words, "queued")
        self.cold_readers.start(
            self._pipe, self._prediction_outbox, queued_at
        )  # after the reactors' own: an announcement passes from them to their jobs
        for number in range(self.threads):
            inbox, far = self._pipe()
            self._inboxes.append(far)
            self._inbox_ends.append(inbox)
            epoll = select.epoll()
            self._epolls.append(epoll)
            line = self._lines[number]
            line["epoll"], line["dice"] = epoll.fileno(), secrets.randbits(62) | 1
            register(epoll.fileno(), inbox, sysio.READABLE, kernel.INBOX)
            register(epoll.fileno(), self.cold_readers.inboxes[number], sysio.READABLE, kernel.JOB_INBOX)
            if port >= 0:
                register(epoll.fileno(), port, sysio.READABLE | sysio.EXCLUSIVE, kernel.LISTENER)
            here = self._record(number, port, inbox, outbox)
            self._heres.append(here)
            self._workers.append(Thread(target=_serve, args=(here,), name=f"tierstore-reactor-{number}", daemon=True))
        self._loop.add_reader(self._outbox, self._on_messages)
        for worker in self._workers:
            worker.start()
        self.running = True

    def start_http2(self, listeners: Sequence[socket.socket] = ()) -> None:
        """Serve HTTP/2 and fronts as well, and connections to `listeners`, one at most, which listen already.

        After `start`, once its kernels are compiled: reading an address compiles.
        """
        run, run_call, run_rows = reactor_http2.run.address, reactor_calls.run.address, front_rows.run.address
        for here, epoll in zip(self._heres, self._epolls, strict=True):
            here["run_rows"], here["run_call"] = run_rows, run_call
            here["http2"] = run
            for listener in listeners:
                listener.setblocking(False)
                here["grpc_listener"] = listener.fileno()
                with contextlib.suppress(FileExistsError):  # the reactor has just begun to accept again
                    register(epoll.fileno(), listener.fileno(), sysio.READABLE | sysio.EXCLUSIVE, kernel.GRPC_LISTENER)

    def predict_with(self, service: Counted, scorings: Mapping[int, Scoring]) -> None:
        """Let the threads of a service's look-up pool run the graphs of predictions. Before `start`."""
        pool = service.lookup_pool
        assert pool.jobs is not None
        self._predictions = Predictions(service, scorings, self, self.cold_readers, self._epochs.views)
        self._prediction_outbox = pool.jobs.outbox
        pool.serve_jobs(self.words, self._predictions.serve)

    def drain(self) -> None:
        """From now on each connection is closed after its next answer, which says so."""
        self._set_mode(kernel.DRAIN)

    def finish(self) -> None:
        """Accept no more connections, answer the requests in progress, and close idle connections."""
        self._set_mode(kernel.FINISH)

    def close(self) -> None:
        """End the threads, and close every open connection. Once; not on the event loop while it runs."""
        self._set_mode(kernel.STOP)
        for worker in self._workers:
            if worker.ident is not None:
                worker.join()
        self.cold_readers.stop()
        if self._predictions is not None:
            self._predictions.close()
        self._epochs.remove_readers(self._lines)
        for fd in np.flatnonzero(self.conns["state"] != kernel.FREE).tolist():
            self.tls.close(fd)
            row = self.conns[fd]
            for block in (row["in_at"], row["out_base"]):
                free(int(block) or None)
            if session := int(row["session"]):
                reactor_loop.free_session(session)
        self.conns["state"] = kernel.FREE
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._outbox)
        with self._writing:  # threads may still answer
            self._inboxes = []
        for what, _, value, _ in (*self.lanes.drain(), *self._left_in(self._outbox)):
            if what & 255 == kernel.REFUSED:
                os.close(what >> 8)
            elif what & 255 in (kernel.STREAM_REQUEST, kernel.STREAM_OPENED, kernel.STREAM_DATA):
                free(value or None)
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
        self.streams.close()
        self._workers.clear()

    def _close_left(self, inbox: int) -> None:
        """Close connections that an ended reactor was to take over, and free answers that it has not read."""
        for what, _, value, _ in self._left_in(inbox):
            if what & 255 == kernel.SERVE:
                self.tls.close(what >> 8)
            elif what & 255 in (kernel.BLOCK, kernel.STREAM_BLOCK):
                free(value)

    @staticmethod
    def _left_in(pipe: int) -> Iterator[Message]:
        """Messages that were not read."""
        with contextlib.suppress(BlockingIOError):
            while pipe >= 0 and (data := os.read(pipe, _READ_BYTES // _MESSAGE.size * _MESSAGE.size)):
                yield from _MESSAGE.iter_unpack(data)

    @property
    def idle(self) -> bool:
        """Whether the reactors have no connection."""
        return int(self.words["open"]) + self.refused == 0

    def _set_mode(self, mode: int) -> None:
        self.words["mode"] = max(mode, int(self.words["mode"]))
        for number in range(len(self._inboxes)):
            self.notify(number, kernel.WAKE, 0, 0, 0, 0)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pipes += ends
        with contextlib.suppress(OSError):  # a user may have used up all pipe memory
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # for each connection a pipe has at most a request, a sent answer and the connection itself
        fit = int(fcntl.fcntl(ends[1], fcntl.F_GETPIPE_SZ)) // _MESSAGE.size // 4
        if fit < self._limits["most_connections"]:
            logger.warning("pipes are short: %d HTTP connections may be open", fit)
            self._limits["most_connections"] = fit
        return ends

    def _record(self, number: int, port: int, inbox: int, outbox: int) -> npt.NDArray[Any]:
        base = address_of(np.frombuffer(self._memory[number], np.uint8))
        cold, places = self.cold_readers, {}
        for field, size in areas().items():
            places[field] = base
            base += size
        return kernel.REACTOR.make(
            number=number, listener=port, grpc_listener=-1, inbox=inbox, outbox=outbox,
            job_inbox=cold.inboxes[number], job_outbox=cold.outbox, prediction_outbox=self._prediction_outbox,
            shared=address_of(self.words), limits=address_of(self._limits), conns=address_of(self.conns),
            lines=address_of(self._lines), line=address_of(self._lines[number:]),
            jobs=address_of(cold.jobs), free_jobs=address_of(cold.free_jobs[number:]), readers=address_of(cold.shared),
            counts=self.counts_at[number], table_counts=self.table_counts_at[number],
            run=by_plan.run.address, finish=cold_read_kernels.finish.address, scan=json_scan.fill.address,
            write=json_answer.write.address, scan_predict=json_predict.fill.address,
            read_predict=json_predict.read.address, **places,
        )  # fmt: skip

    def count_in(self, versions: npt.NDArray[np.int64], tables: npt.NDArray[np.int64]) -> None:
        """Set where each thread counts, int64[threads, rows, words]. Called before `start`."""
        self.counts_at = [address_of(of) for of in versions]
        self.table_counts_at = [address_of(of) for of in tables]

    # --- messages

    def notify(self, reactor: int, kind: int, fd: int, serial: int, address: int, count: int) -> None:
        """Write to a reactor's pipe; nothing, once that is closed."""
        with self._writing:
            if self._inboxes:
                os.write(self._inboxes[reactor], _MESSAGE.pack(kind | fd << 8, serial, address, count))

    def reply(self, number: int, what: int, serial: int, data: npt.NDArray[np.uint8]) -> None:
        """Write a message with a copy of `data` to a reactor's pipe."""
        inflight = kernel.SHARED.place(self.words, "inflight")
        with self._writing:
            if not self._inboxes:
                return
            failed = reactor_loop.reply(self._inboxes[number], what, serial, address_of(data), len(data), inflight)
        if failed:
            raise OSError(-failed, os.strerror(-failed))

    def cut_off(self, error: BaseException) -> None:
        """Answer predictions with an error, in place of their threads."""
        for words, request in [] if self._predictions is None else self._predictions.cut_off():
            if words["stream"]:
                self.streams.fail(words, request, error)
                continue
            reply = Reply(self, words["reactor"], words["fd"], words["serial"])
            reply.error = error
            assert self._receiver is not None
            self._receiver.request(reply, request)

    def error_of(self, fd: int, serial: int, stream: int = 0) -> BaseException | None:
        return None if self._predictions is None else self._predictions.error_of(fd, serial, stream)

    def send_stream(self, reactor_number: int, write: Callable[[int], int]) -> None:
        """Have `write` write to a reactor's pipe; nothing, once that is closed."""
        with self._writing:
            failed = write(self._inboxes[reactor_number]) if self._inboxes else 0
        if failed:
            raise OSError(-failed, os.strerror(-failed))

    def serve_connection(self, fd: int, session: TlsSession | None = None, refused: bool = False) -> None:
        """Give a connection to a reactor, which owns the descriptor and the session from now on.

        It is counted already, as on its way or as refused. Event loop only.
        """
        if not self.tls.put(fd, session):
            (self.count_refused if refused else self.count_other)(-1)
            return
        self.notify(fd % self.threads, kernel.SERVE, fd, 0, kernel.TURNED_OFF if refused else 0, 0)

    def count_other(self, connections: int) -> None:
        """Add to the number of connections on their way to reactors; it may be negative."""
        atomics.add(kernel.SHARED.place(self.words, "other_open"), connections)

    def count_refused(self, connections: int) -> None:
        """Add to the number of refused connections; it may be negative."""
        atomics.add(kernel.SHARED.place(self.words, "turned_off"), connections)

    @property
    def refused(self) -> int:
        """Connections beyond the limit that are being refused in words."""
        return int(self.words["turned_off"])

    def make_room(self) -> bool:
        """End a silent connection, and count another one in its place. False if there is none, or too many are on
        their way.
        """
        most = int(self._limits["most_connections"])
        if self.open >= most + min(most, _ON_THEIR_WAY) or (found := self._silent.pop()) is None:
            return False
        owner, fd, serial = found
        self.notify(owner, kernel.MAKE_ROOM, fd, serial, 0, 0)
        self.count_other(1)
        return True

    @property
    def open(self) -> int:
        """Open connections, including those on their way here."""
        return int(self.words["open"]) + int(self.words["other_open"])

    @property
    def unsent_bytes(self) -> int:
        """Bytes of unsent answers, without those in Python's memory."""
        return int(self.words["inflight"])

    def _on_messages(self) -> None:
        try:
            data = os.read(self._outbox, _READ_BYTES // _MESSAGE.size * _MESSAGE.size)
        except BlockingIOError:
            return
        for message in _MESSAGE.iter_unpack(data):
            what, serial, value, more = message
            if what & 255 == kernel.STREAM_SENT:
                self.streams.serve(what & 255, what >> 8, serial, value, more)
            elif what & 255 != kernel.SENT:
                self.lanes.put(message)
            elif (entry := self.sending.pop((what >> 8, serial), None)) is not None:
                entry[2]()
        if self.words["unreported"]:
            self.words["unreported"] = 0
            self.streams.lose_unreported()
        self.lanes.start()

    def _serve_message(self, message: Message) -> None:
        what, serial, value, more = message
        kind, fd = what & 255, what >> 8
        receiver = self._receiver
        assert receiver is not None
        if kind == kernel.REQUEST:
            owner = int(self.conns["owner"][fd])
            reply = Reply(self, owner, fd, serial)
            reply.error = self.error_of(fd, serial & kernel.SERIALS)
            receiver.request(reply, ctypes.string_at(value, more))
        elif kind >= kernel.STREAM_REQUEST:
            self.streams.serve(kind, what >> 8, serial, value, more)
        else:
            receiver.refused(fd)
            atomics.add(kernel.SHARED.place(self.words, "undecided"), -1)
            for number in np.flatnonzero(self._lines["paused"] == kernel.UNDECIDED).tolist():
                self.notify(number, kernel.WAKE, 0, 0, 0, 0)

    # --- stats

    @property
    def answers(self) -> int:
        """Look-ups that reactors have answered."""
        return int(self._lines["answers"].sum())

    @property
    def handed_on(self) -> dict[str, int]:
        """Requests that reactors have handed to Python, by reason."""
        counts = self._lines["reasons"].sum(0)
        return dict(zip(kernel.REASONS, counts.tolist(), strict=True))

    @property
    def unfinished(self) -> int:
        """Connections on which a request has begun to arrive and is not complete."""
        rows = self.conns[: int(self.words["highest"]) + 1]
        return int(np.count_nonzero((rows["state"] == kernel.READING) & (rows["in_bytes"] > 0)))

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        text = "Requests that a reactor answered or refused without the interpreter."
        answers = {str(number): int(line["answers"]) for number, line in enumerate(self._lines)}
        yield counters("tierstore_reactor_answers", text, "reactor", answers)
        handed = [
            ((str(number), name), count)
            for number, line in enumerate(self._lines)
            for name, count in zip(kernel.REASONS, line["reasons"].tolist(), strict=True)
        ]
        text = "Requests and connections that a reactor handed to Python, by the reason."
        yield counters("tierstore_reactor_handed_on", text, "reactor reason", handed)
        loads = {str(number): int(line["load"]) for number, line in enumerate(self._lines)}
        yield gauges("tierstore_reactor_connections", "Connections that a reactor serves.", "reactor", loads)
        yield gauge("tierstore_unfinished_requests", "Requests that have begun to arrive.", self.unfinished)
        yield gauge("tierstore_unsent_bytes", "Bytes of answers that clients have not read yet.", self.unsent_bytes)


def _serve(here: npt.NDArray[Any]) -> None:
    request_short_slices()
    reactor_loop.serve(address_of(here))
