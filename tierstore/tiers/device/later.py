"""The end of look-ups whose callers do not wait: one thread of a store, which begins with the first of them.

A look-up is wholly in the caller's stream when its call returns. If keys are missing, the stream waits for a word in memory, which the finisher writes
once their rows are there. **It calls no function of the driver and waits for no lock that is held during one**: such a call may wait for the stream,
which waits for the finisher. It takes look-ups as they get on, in no order, because one may be behind another in a stream.

Nothing survives the process. `Finisher` is for any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from tierstore.errors import StorageError
from tierstore.kernels.codec import address_of
from tierstore.threads import Thread
from tierstore.tiers.device import driver_calls

log = logging.getLogger(__name__)
_MOST_FAILED = 256  # streams


class UnderWay(Protocol):
    """A look-up that was put off."""

    @property
    def word(self) -> int:
        """The address of the uint32 that is not 0 once there is something to do; 0: the look-up is over."""

    def answer_missing(self, failed: Callable[[int, Exception], None]) -> None:
        """Let the stream go on, if the kernel has listed keys; before that, call `failed` with the stream and why rows are missing."""

    def end(self) -> None:
        """Count, and give everything back, if the stream is past it."""

    def forsake(self) -> bool:
        """Give back what others need, if the device has failed, so that the look-up may never end. Returns whether that was done."""


class Finisher:
    """The look-ups under way. `failed` counts those whose rows could not be read."""

    def __init__(self, calls: np.ndarray) -> None:
        self._calls = calls
        self._new: SimpleQueue[UnderWay | None] = SimpleQueue()  # None: no more come
        self._woken = np.zeros(1, np.int64)
        self.failed = 0
        self._is_open = True  # only for the thread
        # guarded by _lock
        self._lock = threading.Lock()
        self._thread: Thread | None = None
        self._errors: dict[int, StorageError] = {}  # by stream, not raised yet

    def prepare(self, stream: int) -> None:
        """Be ready for a look-up in this stream. Raises, once, the error of an earlier one."""
        with self._lock:
            if (error := self._errors.pop(stream, None)) is not None:
                raise error
            if self._thread is None:
                thread = Thread(target=self._run, name="tierstore-device-answers", daemon=True)
                thread.start()
                self._thread = thread

    def add(self, look_up: UnderWay) -> None:
        """Begin to watch a look-up, after `prepare`."""
        self._new.put(look_up)
        self._woken[0] = 1

    def close(self) -> None:
        """Wait for the look-ups under way, unless the device has failed."""
        self._new.put(None)
        self._woken[0] = 1
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        under_way: list[UnderWay] = []
        while self._is_open or under_way:
            if under_way and not self._watch(under_way) and not self._is_open:
                return
            while self._is_open and not (under_way and self._new.empty()):
                self._take(under_way)
            under_way = self._go_on(under_way)

    def _watch(self, under_way: list[UnderWay]) -> bool:
        """Wait for something to do. Returns False if the device has failed, and nothing may ever come."""
        words = np.array([address_of(self._woken), *(one.word for one in under_way)])
        came = bool(driver_calls.watch(self._calls, words))
        self._woken[0] = 0
        if not came:
            came = [one.forsake() for one in under_way].count(False) > 0
        return came

    def _take(self, under_way: list[UnderWay]) -> None:
        new = self._new.get()
        if new is None:
            self._is_open = False
        else:
            under_way.append(new)

    def _go_on(self, under_way: list[UnderWay]) -> list[UnderWay]:
        """Do what can be done. Returns what is still under way."""
        for one in under_way:  # before anything else, as streams wait for this
            one.answer_missing(self._note)
        for one in under_way:
            try:
                one.end()
            except Exception:
                log.exception("a look-up in a stream was answered, and could not be counted")
        return [one for one in under_way if one.word]

    def _note(self, stream: int, error: Exception) -> None:
        log.warning("rows of a look-up in a stream could not be read, and are NaN: %s", error)
        with self._lock:
            self.failed += 1
            while len(self._errors) >= _MOST_FAILED:
                del self._errors[next(iter(self._errors))]
            said = f"a look-up before this one in its stream could not read rows, which are NaN there: {error}"
            self._errors[stream] = StorageError(said)
