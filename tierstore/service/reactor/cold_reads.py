"""Threads that read rows from disk for the reactors, and the thread that offers those rows to the caches.

`Reactors` makes, starts and stops `ColdReaders`; a reader never takes the interpreter lock (`lookup/cold_reads.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels import epochs as atomics
from tierstore.kernels.codec import address_of
from tierstore.lookup import by_plan, cold_reads, json_answer
from tierstore.reactor import layout as kernel
from tierstore.threads import Thread
from tierstore.types import Tier

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_ADDRESS = struct.Struct("<q")
_END, _MARK = _ADDRESS.pack(-1), _ADDRESS.pack(-2)
_GATHER_S = 0.02  # time in which offers are gathered
_OFFERS_S = 10.0  # the longest wait for offers; longer only if the threads are being ended

_libc = ctypes.CDLL(None)
free = _libc.free  # frees blocks that compiled threads make
free.argtypes, free.restype = [ctypes.c_void_p], None


class ColdReaders:
    """`threads` readers for `reactors` reactors, and the jobs that reactors may give them or the threads that
    predict.
    """

    def __init__(self, reactors: int, threads: int, epochs: Epochs) -> None:
        # constant after construction
        self.jobs = cold_reads.JOB.new(reactors * kernel.JOBS)
        self.free_jobs = kernel.FREE_JOBS.new(reactors)
        self.free_jobs["count"] = kernel.JOBS
        self.free_jobs["numbers"] = np.arange(reactors * kernel.JOBS).reshape(reactors, kernel.JOBS)
        self._epochs = epochs
        self.shared = cold_reads.READERS.make()
        self.done_at = np.zeros(reactors, np.int64)  # for each reactor: the pipe for finished jobs
        self._thread_count = threads
        # descriptors of pipes, after `start`
        self.inboxes: list[int] = []  # of each reactor: finished jobs
        self.outbox = self._offers = -1
        self._threads: list[threading.Thread] = []
        self._promoter: _Promoter | None = None  # guarded by _marking
        self._marking = threading.Lock()

    def start(self, open_pipe: Callable[[], tuple[int, int]], predictions: int, queued_at: int) -> None:
        """Begin to read, once the kernels are compiled: reading an address compiles.

        `open_pipe` gives (end to read, end to write); the caller closes both after `stop`. `predictions`: the pipe for
        predictions whose rows are complete, or -1; `queued_at`: the address of the number that wait in it.
        """
        self.shared["run_at"], self.shared["finish_at"] = by_plan.run.address, cold_reads.finish.address
        self.shared["write_at"] = json_answer.write.address
        self._epochs.add_readers(self.jobs)
        inbox, self.outbox = open_pipe()
        offers, self._offers = open_pipe()
        os.set_blocking(inbox, True)
        os.set_blocking(offers, True)
        self.shared["offers"], self.shared["predictions"], self.shared["queued_at"] = (
            self._offers,
            predictions,
            queued_at,
        )
        for number in range(len(self.done_at)):
            done, self.done_at[number] = open_pipe()
            self.inboxes.append(done)
        arguments = (address_of(self.shared), address_of(self.jobs), inbox, address_of(self.done_at))
        self._threads = [
            Thread(target=cold_reads.serve, args=arguments, name=f"tierstore-cold-{number}", daemon=True)
            for number in range(self._thread_count)
        ]
        self._promoter = _Promoter(self._epochs, self.shared, offers)
        for thread in (*self._threads, self._promoter):
            thread.start()
        self._epochs.add_offers(self._await_offers)

    def _await_offers(self) -> None:
        """Wait until all offers made so far were handled."""
        passed = threading.Event()
        with self._marking:
            if self._promoter is None:
                return
            self._promoter.marks.append(passed)
            os.write(self._offers, _MARK)
        passed.wait(_OFFERS_S)

    def stop(self) -> None:
        """End the threads, once the reactors have ended and give no more jobs."""
        for _ in self._threads:
            os.write(self.outbox, _END)
        for thread in self._threads:
            thread.join()
        with self._marking:
            promoter, self._promoter = self._promoter, None
        if promoter is not None:
            self._epochs.remove_offers(self._await_offers)
            os.write(self._offers, _END)
            promoter.join()
        self._epochs.remove_readers(self.jobs)
        left = self.jobs[(self.jobs["announced"] != 0) & (self.jobs["scoring"] == 0)]
        for memory in chain(*left[["block", "request", "text_at"]].tolist()):
            free(memory)

    @property
    def idle(self) -> bool:
        """Whether no reactor has a job here."""
        return not self.jobs["announced"].any()


class _Promoter(Thread):
    """Offers rows that readers have read to the caches of their tables, until it pops the end mark.

    A thread that puts another mark into the pipe has appended an event to `marks` before, which is set when the mark
    is popped.
    """

    def __init__(self, epochs: Epochs, shared: npt.NDArray[Any], inbox: int) -> None:
        super().__init__(target=self._offer_all, name="tierstore-promote", daemon=True)
        self._epochs, self._shared, self._inbox = epochs, shared, inbox
        self.marks: deque[threading.Event] = deque()

    def _offer_all(self) -> None:
        while True:
            select.select([self._inbox], [], [])
            time.sleep(
                _GATHER_S
            )  # one request offers few rows, and a turn of the interpreter costs as much as many rows
            messages = np.frombuffer(os.read(self._inbox, _READ_BYTES), np.int64)
            try:
                if (offers := messages[messages > 0]).size:
                    self._offer(offers)
            except Exception:
                logger.exception("rows that were read are not cached")
            for _ in range(np.count_nonzero(messages == -2)):
                self.marks.popleft().set()
            if -1 in messages:
                return

    def _offer(self, blocks: npt.NDArray[np.int64]) -> None:
        heads = np.empty((len(blocks), cold_reads.OFFER.bytes // 8), np.int64)
        cold_reads.read_heads(blocks, heads)
        try:
            for number, seq, row_bytes in set(map(tuple, heads[:, :3].tolist())):
                mine = (heads[:, :3] == (number, seq, row_bytes)).all(1)
                n = int(heads[mine, 3].sum())
                keys, state, rows = np.empty(n, np.int64), np.empty(n, np.uint8), np.empty((n, row_bytes), np.uint8)
                cold_reads.gather(blocks[mine], keys, state, address_of(rows))
                table = self._epochs.table(number)
                if table is not None:
                    table.promote(seq, keys, rows, state == Tier.DISK)
        finally:
            for block in blocks.tolist():
                free(block)
            atomics.add(cold_reads.READERS.place(self._shared, "offered"), -int(heads[:, 4].sum()))
