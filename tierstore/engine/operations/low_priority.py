"""Runs long work on a model on a thread of low priority, beside what serves; the caller waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tierstore.engine.lifecycle.throttle import Throttle
from tierstore.threads import OwnThreadCall
from tierstore.tiers.background import become_background

T = TypeVar("T")


def low_priority(
    throttle: Throttle, name: str, work: Callable[[Callable[[], bool]], T], cancelled: threading.Event | None
) -> T:
    """The result of `work`. The function that it gets says when to end: when `cancelled`, or after Ctrl-C."""
    interrupted = threading.Event()

    def stops() -> bool:
        return interrupted.is_set() or (cancelled is not None and cancelled.is_set())

    def lowly() -> T:
        become_background()
        return work(stops)

    with throttle.at_work(name):
        call = OwnThreadCall(f"tierstore-{name}", lowly)
        try:
            return call.result()
        except BaseException:  # Ctrl-C: the thread is waited for
            interrupted.set()
            call.wait()
            raise
