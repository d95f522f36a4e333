"""The log and the audit of changes to what serves: one line a change, with the requester if there is one. Any
thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tierstore.access.audit import Audit
from tierstore.errors import TierstoreError, explained

logger = logging.getLogger(__name__)

IN_PROCESS = "in process"  # a program that has the store open and does not name its user
REQUESTER: ContextVar[str | None] = ContextVar("REQUESTER", default=None)  # on whose behalf this thread or task works

State = Callable[[], dict[str, Any] | None]  # the state that a change may alter; called before and after


def requester() -> str:
    """The requester of the change that this thread or task makes."""
    return REQUESTER.get() or IN_PROCESS


@contextlib.contextmanager
def audited(
    audit: Audit, change: str, model: str | None, state: State, *, flush: bool = True, **fields: Any
) -> Iterator[dict[str, Any]]:
    """Add a line to the audit when the block ends, with or without an error.

    The block may add to the fields that it gets. If it sets `unchanged`, there is no line.
    """
    before = state()
    try:
        yield fields
    except BaseException as error:
        why = explained(error) if isinstance(error, TierstoreError) else type(error).__name__
        audit.change(
            change, requester(), "failed", flush=False, **{"model": model, "before": before, **fields, "error": why}
        )
        raise
    if not fields.pop("unchanged", False):
        audit.change(
            change, requester(), "done", flush=flush, **{"model": model, "before": before, "after": state(), **fields}
        )


@contextlib.contextmanager
def changing(audit: Audit, change: str, model: str, state: State, **fields: Any) -> Iterator[dict[str, Any]]:
    """`audited`, and a line in the log once the block ends without an error.

    `state` has the active version as `active`. `fields` that are None are not logged.
    """
    began_s = time.monotonic()
    was = state() or {}
    with audited(audit, change, model, state, **fields) as noted:
        yield noted
    now, seconds, by = state() or {}, time.monotonic() - began_s, REQUESTER.get()
    before, after, canary = was.get("active"), now.get("active"), was.get("canary")
    reported = {name: value for name, value in noted.items() if value is not None}
    text = "".join(f", {name} {value}" for name, value in reported.items())
    moved = f"active version {before} → {after}" if before != after else f"active version {after}"
    if canary is not None and canary not in (after, now.get("canary")):
        moved += f", canary {canary} withdrawn"
    more = {"model": model, "change": change, "from": before, "to": after, "seconds": round(seconds, 3), **reported}
    logger.info(
        "model %s: %s%s: %s, in %.3f s%s", model, change, text, moved, seconds,
        "" if by is None else f", asked by {by}",
        extra={"fields": more | ({} if by is None else {"asked_by": by})},
    )  # fmt: skip
