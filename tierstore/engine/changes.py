"""The log of what serves: a line a change, with who asked for it where that is known. Any thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)

ASKED_BY: ContextVar[str | None] = ContextVar("ASKED_BY", default=None)  # whose request this thread or task is at


@contextlib.contextmanager
def changing(change: str, model: str, active: Callable[[], int | None], **fields: Any) -> Iterator[dict[str, Any]]:
    """Log a change of `model` once the block ends without an error. The block may add to what it is given.

    `active` tells which version is active, before and after. Of `fields` those that are None are left out.
    """
    began_s = time.monotonic()
    before = active()
    yield fields
    after, seconds, asked_by = active(), time.monotonic() - began_s, ASKED_BY.get()
    told = {name: value for name, value in fields.items() if value is not None}
    text = "".join(f", {name} {value}" for name, value in told.items())
    moved = f"active version {before} → {after}" if before != after else f"active version {after}"
    by = "" if asked_by is None else f", asked by {asked_by}"
    more = {"model": model, "change": change, "from": before, "to": after, "seconds": round(seconds, 3), **told}
    logger.info(
        "model %s: %s%s: %s, in %.3f s%s", model, change, text, moved, seconds, by,
        extra={"fields": more | ({} if asked_by is None else {"asked_by": asked_by})},
    )  # fmt: skip
