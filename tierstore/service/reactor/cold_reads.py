"""Threads that read rows from disk for the reactors, and the thread that offers those rows to the caches.

`ColdReaders` is made, started and stopped by `Reactors`; a reader never takes the interpreter
lock (`kernels/coldread.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels import coldread, lookupplan
from tierstore.kernels import epochs as atomics
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.threads import Thread
from tierstore.types import Tier

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_ADDRESS = struct.Struct("<q")
_END, _MARK = _ADDRESS.pack(-1), _ADDRESS.pack(-2)
_OFFERS_S = 10.0  # that offers may be on their way; longer only where the threads are being ended

_libc = ctypes.CDLL(None)
free = _libc.free  # of blocks that compiled threads make
free.argtypes, free.restype = [ctypes.c_void_p], None


class ColdReaders:
    """`threads` readers for `reactors` reactors, with the jobs that those may give them, or to threads that predict."""

    def __init__(self, reactors: int, threads: int, epochs: Epochs) -> None:
        # constant after construction
        self.jobs = coldread.JOB.new(reactors * kernel.JOBS)
        self.free_jobs = kernel.FREE_JOBS.new(reactors)
        self.free_jobs["count"] = kernel.JOBS
        self.free_jobs["numbers"] = np.arange(reactors * kernel.JOBS).reshape(reactors, kernel.JOBS)
        self._epochs = epochs
        self._shared = coldread.READERS.make(run_at=lookupplan.run.address)
        self.done_at = np.zeros(reactors, np.int64)  # of each reactor: where to write what is done
        self._thread_count = threads
        # from `start` on: descriptors of pipes
        self.inboxes: list[int] = []  # of each reactor: jobs that are done
        self.outbox = self._offers = -1
        self._threads: list[threading.Thread] = []
        self._promoter: _Promoter | None = None  # guarded by _marking
        self._marking = threading.Lock()

    def start(self, open_pipe: Callable[[], tuple[int, int]]) -> None:
        """Begin to read. `open_pipe` gives (end to read, end to write); the caller closes both after `stop`."""
        self._epochs.add_readers(self.jobs)
        inbox, self.outbox = open_pipe()
        offers, self._offers = open_pipe()
        os.set_blocking(inbox, True)
        os.set_blocking(offers, True)
        for number in range(len(self.done_at)):
            done, self.done_at[number] = open_pipe()
            self.inboxes.append(done)
        arguments = (address_of(self._shared), address_of(self.jobs), inbox, self._offers, address_of(self.done_at))
        self._threads = [
            Thread(target=coldread.serve, args=arguments, name=f"tierstore-cold-{number}", daemon=True)
            for number in range(self._thread_count)
        ]
        self._promoter = _Promoter(self._epochs, self._shared, offers)
        for thread in (*self._threads, self._promoter):
            thread.start()
        self._epochs.add_offers(self._await_offers)

    def _await_offers(self) -> None:
        """Wait until the offers made until now were handled."""
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
        for memory in (*left["block"].tolist(), *left["request"].tolist()):
            free(memory)

    @property
    def idle(self) -> bool:
        """Whether no reactor has a job here."""
        return not self.jobs["announced"].any()


class _Promoter(Thread):
    """Offers rows that readers have read to the caches of their tables, until it pops the end mark.

    Whoever puts another mark into the pipe has appended an event to `marks` before; it is set once the mark is popped.
    """

    def __init__(self, epochs: Epochs, shared: npt.NDArray[Any], inbox: int) -> None:
        super().__init__(target=self._offer_all, name="tierstore-promote", daemon=True)
        self._epochs, self._shared, self._inbox = epochs, shared, inbox
        self.marks: deque[threading.Event] = deque()

    def _offer_all(self) -> None:
        while True:
            for (block,) in _ADDRESS.iter_unpack(os.read(self._inbox, _READ_BYTES)):
                if block == -1:
                    return
                if block < 0:
                    self.marks.popleft().set()
                    continue
                try:
                    self._offer(block)
                except Exception:
                    logger.exception("rows that were read are not cached")

    def _offer(self, block: int) -> None:
        offer = coldread.OFFER.view(block)
        size, n, row_bytes = offer.bytes, offer.keys, offer.row_bytes
        try:
            data = np.frombuffer(_memory(block, size), np.uint8)
            at = coldread.OFFER.bytes
            keys = data[at : at + 8 * n].view(np.int64)
            state = data[at + 8 * n : at + 9 * n]
            at += 8 * n + -(-n // 8) * 8
            table = self._epochs.table(offer.table)
            if table is not None:
                table.promote(offer.seq, keys, data[at : at + n * row_bytes].reshape(n, row_bytes), state == Tier.DISK)
        finally:
            free(block)
            atomics.add(coldread.READERS.place(self._shared, "offered"), -size)


def _memory(address: int, size: int) -> Any:
    """`size` bytes at an address, as a buffer."""
    return (ctypes.c_char * size).from_address(address)
