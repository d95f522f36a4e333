"""Heads of HTTP/1.1 and dates, read and written as the reactors do, from addresses that Python has."""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.wire.http1.date import write_date_at
from tierstore.wire.http1.head import head_at, parse_at


@compiled(types.int64(types.int64, types.int64, types.int64), when=LAST)
def parse(at: Any, n: Any, found: Any) -> Any:
    """What the `n` bytes at address `at` begin with: PLAIN, CUT or FOREIGN. The HEAD at address `found` says the remainder."""
    return parse_at(at, n, head_at(found))


@compiled(types.void(types.int64, types.int64), when=LAST)
def write_date(seconds: Any, at: Any) -> Any:
    """Write the date of `seconds` since 1970 to an address."""
    write_date_at(seconds, at)
