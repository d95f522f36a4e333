"""Retries of what goes over a network, with pauses that grow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tierstore.errors import StorageError, TierstoreError

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # how long what a load or a write needs is tried for
QUICK_PATIENCE_S = 10.0  # the same where somebody waits for the answer, or it is asked for again soon
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0

T = TypeVar("T")


def until_done(
    what: str, attempt: Callable[[float], T], *, patience_s: float, ended: threading.Event | None = None
) -> T:
    """The result of `attempt`, which is called again, with growing pauses, until it raises nothing.

    It is given the seconds that remain. FileNotFoundError, PermissionError and errors of ours are final, and
    pass. StorageError, which begins with `what`, when it has failed for `patience_s`, or when `ended` is set. Any
    thread; it is the one that pauses.
    """
    pause_s, give_up_s = _FIRST_PAUSE_S, time.monotonic() + patience_s
    ended = threading.Event() if ended is None else ended
    while not ended.is_set():
        try:
            return attempt(max(1.0, give_up_s - time.monotonic()))
        except (FileNotFoundError, PermissionError, TierstoreError):
            raise
        except Exception as error:  # a library of any storage, and whatever lies below it
            if time.monotonic() + pause_s >= give_up_s:
                raise StorageError(f"{what} within {patience_s:.0f} s: {error!r}") from error
            log.warning("%s yet, and is tried again: %s", what, str(error) or repr(error))
        ended.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise StorageError(f"{what}, and is tried no longer")
