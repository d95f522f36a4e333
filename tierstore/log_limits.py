"""No more of one line in the log than a person can use, whoever has it written: clients must not fill a disk.

Any thread may log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 100  # warnings and errors of one place in the code at once
EVERY_S = 1.0  # and then one in so long


@dataclass(slots=True)
class _Place:
    left: float
    at_s: float
    withheld: int = 0


class Limited(logging.Filter):
    """Lets `BURST` warnings or errors of one place in the code pass, then one every `EVERY_S`, which says how many were not written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[
            tuple[str, int], _Place
        ] = {}  # as many as there are such lines in the code; guarded by _lock

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            now = self._clock()
            place = self._places.setdefault((record.pathname, record.lineno), _Place(BURST, now))
            place.left = min(BURST, place.left + (now - place.at_s) / EVERY_S)
            place.at_s = now
            if place.left < 1:
                place.withheld += 1
                return False
            place.left -= 1
            withheld, place.withheld = place.withheld, 0
        if withheld:
            record.msg, record.args = f"{record.getMessage()} (and {withheld} more like it that were not written)", None
        return True
