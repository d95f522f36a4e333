"""Reading the answers of other machines: an answer of unknown form becomes one kind of error. Any thread."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import RemoteUnavailable, TierstoreError

_SHOWN = 300  # characters of what was wrong


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise RemoteUnavailable, naming `what`, if the block fails on values that are malformed, missing, of another type, too large or nested too deep."""
    try:
        yield
    except TierstoreError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise RemoteUnavailable(f"{what} is invalid: {type(error).__name__}: {str(error)[:_SHOWN]}") from error
