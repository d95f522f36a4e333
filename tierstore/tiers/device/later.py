"""Ends look-ups whose callers do not wait: rows that are missing, and what is given back when a stream is past one.

A look-up is wholly in the caller's stream when its call returns. If keys are missing, the stream waits for a word in memory, which the thread of this
module writes once their rows are there. **It calls no function of the driver and waits for no lock that is held during one**: such a call may wait for
the stream, which waits for the thread. For the same reason it hears of a look-up before the first of its calls of the driver. It takes look-ups as they
get on, in no order, because one may be behind another in a stream. It watches them without the interpreter, and sleeps while none is under way.

Look-ups are ended by the next caller, or by the thread. Nothing survives the process. `Finisher` is for any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from tierstore.errors import InvalidInput, StorageError, TierstoreError
from tierstore.threads import Thread
from tierstore.tiers.device import reports

log = logging.getLogger(__name__)
_MOST_FAILED = 256  # streams
_LOWER = (1 << 32) - 1


class UnderWay(Protocol):
    """A look-up that was put off. `number`: its place; no other has it before `end`. `report`: its address.

    `kept`: memory on the device, of the caller's, that its kernels read. After `end` it has no reference to that, as the thread may keep it a while.
    """

    number: int
    report: int
    kept: Any

    def answer_missing(self, listed: int, failed: Callable[[int, Exception], None]) -> None:
        """Get the rows of the listed keys, and let the stream go on. `failed` is called with the stream and why they cannot be had."""

    def end(self) -> None:
        """Count, and give everything back. The stream is past it."""

    def forsake(self) -> bool:
        """Give back what others need, if the device has failed, so that the look-up may never end. Returns whether that was done."""


class Finisher:
    """The look-ups under way, `places` at most. `failed` counts those whose rows could not be read."""

    def __init__(self, calls: np.ndarray, places: int) -> None:
        self._calls = calls
        self._under_way: dict[int, UnderWay] = {}  # by number
        self._reports = np.zeros(places, np.int64)  # their addresses, 0 for none
        self.failed = 0
        self._is_open = True
        self._asleep = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # something is put while the thread is asleep
        # by look-ups that the thread has ended; callers let it go, as that may wait for a stream
        self._kept: list[Any] = []
        self._answering = threading.Lock()  # held while rows are got; _lock may be taken meanwhile
        # guarded by _lock
        self._lock = threading.Lock()
        self._thread: Thread | None = None
        self._errors: dict[int, TierstoreError] = {}  # by stream, not raised yet

    def prepare(self, stream: int) -> None:
        """Be ready for a look-up in this stream. Raises, once, the error of an earlier one."""
        if self._thread is None or self._errors:
            with self._lock:
                if (error := self._errors.pop(stream, None)) is not None:
                    raise error
                if self._thread is None:
                    thread = Thread(target=self._run, name="tierstore-device-answers", daemon=True)
                    thread.start()
                    self._thread = thread
        self._kept.clear()
        self.end_some()

    def add(self, look_up: UnderWay) -> None:
        """Begin to watch a look-up, after `prepare`, and before it is put into streams."""
        self._under_way[look_up.number] = look_up
        self._reports[look_up.number] = look_up.report
        if self._asleep:
            self._asleep = False
            self._wake.put(None)

    def take_back(self, look_up: UnderWay) -> None:
        """Watch it no more, and do not end it, as it is not whole in its stream. Nothing, if it was not added or has ended."""
        with self._lock:
            if self._under_way.get(look_up.number) is not look_up:
                return
            self._reports[look_up.number] = 0
            del self._under_way[look_up.number]
        if reports.said(look_up.report):
            with self._answering:  # the thread may have taken it before
                pass

    def end_some(self) -> list[Any]:
        """End the look-ups that their streams are past. Returns what they have kept."""
        kept = []
        while (look_up := self._take_ended()) is not None:
            kept.append(look_up.kept)
            try:
                look_up.end()
            except Exception:
                log.exception("a look-up in a stream was answered, and could not be counted")
        return kept

    def _take_ended(self) -> UnderWay | None:
        if not self._under_way:
            return None
        with self._lock:  # otherwise another thread may end it, and a later look-up be in its place
            number = reports.ended(self._reports)
            if number < 0:
                return None
            self._reports[number] = 0
            return self._under_way.pop(number)

    def close(self) -> None:
        """Wait for the look-ups under way, unless the device has failed."""
        self._is_open = False
        self._wake.put(None)
        if self._thread is not None:
            self._thread.join()
        self._kept.clear()

    def _run(self) -> None:
        while True:
            came = reports.watch(self._calls, self._reports)
            if came == reports.MISSING:
                self._answer_missing()
            elif came == reports.ENDED:
                self._kept += self.end_some()
            elif came == reports.SILENT:
                forsaken = [look_up.forsake() for look_up in list(self._under_way.values())]
                if not self._is_open and all(forsaken):
                    return
            elif not self._is_open:
                return
            else:
                self._sleep()

    def _answer_missing(self) -> None:
        for look_up in list(self._under_way.values()):
            said = reports.said(look_up.report)
            if said & _LOWER != reports.DONE:
                continue
            with self._answering:
                # after the report was read, which may be that of a later look-up at the same place
                if self._under_way.get(look_up.number) is look_up:
                    look_up.answer_missing(said >> 32, self._note)

    def _sleep(self) -> None:
        """Until something is put, or has been put meanwhile."""
        self._asleep = True
        if not self._under_way and self._is_open:
            self._wake.get()
        self._asleep = False

    def _note(self, stream: int, error: Exception) -> None:
        log.warning("rows of a look-up in a stream could not be read, and are NaN: %s", error)
        with self._lock:
            self.failed += 1
            while len(self._errors) >= _MOST_FAILED:
                del self._errors[next(iter(self._errors))]
            kind = InvalidInput if isinstance(error, InvalidInput) else StorageError
            said = f"a look-up before this one in its stream could not read rows, which are NaN there: {error}"
            self._errors[stream] = kind(said)
