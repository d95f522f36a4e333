"""What other machines answer, as it is read: what is of no form that its reader knows is one error. Any thread."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import RemoteUnavailable, TierstoreError

_SHOWN = 300  # characters of what was wrong


@contextmanager
def reading(what: str) -> Iterator[None]:
    """RemoteUnavailable, naming `what` is read, for whatever its reader fails by: numbers that are none, things that
    are missing, of another kind, too large, or nested too deep.
    """
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
