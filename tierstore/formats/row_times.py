"""Row times: when rows were last written, in whole seconds since 1970, as uint32. Kept for tables whose rows expire (a
`ttl_s`).

Pure functions; any thread may call them. `schema/layout.md` says where times are on disk.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.errors import InvalidInput
from tierstore.formats.columns import Malformed
from tierstore.types import Rows

Times = npt.NDArray[np.uint32]
TIME = "time"  # the column, or tensor, that writers make
TIME_BYTES = 4
MAX_TTL_S = 100 * 366 * 86400
_MAX_TIME_S = (1 << 32) - 1  # in the year 2106
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_TTL = re.compile(r"([0-9]{1,10})([smhdw]?)")
_SUFFIX = ".times"  # no name of a table holds a dot
_EXPECTED = "expected seconds since 1970, or a column of timestamps or dates"


def times_of(table: str) -> str:
    """The name under which a load and a built version have the times of a table."""
    return table + _SUFFIX


def table_of(name: str) -> tuple[str, bool]:
    """The table that is meant by a name, and whether its times are."""
    return name.removesuffix(_SUFFIX), name.endswith(_SUFFIX)


def ttl_seconds(value: Any) -> Any:
    """`30d`, `12h`, `90m`, `45s`, `2w` or digits as seconds; anything but text as it is. ValueError for other text."""
    if not isinstance(value, str):
        return value
    found = _TTL.fullmatch(value)
    if found is None:
        raise ValueError(f"expected seconds, or a time such as 30d, 12h, 90m, 45s or 2w, got {value!r}")
    return int(found[1]) * _UNITS_S[found[2]]


def seconds_of(moment: datetime) -> int:
    """A moment as a row's time."""
    return min(max(0, int(moment.timestamp())), _MAX_TIME_S)


def as_times(values: Any) -> Times:
    """Times of rows, uint32 [n], of integers or floats (seconds since 1970), or of timestamps or dates.

    NumPy, Arrow and pandas columns, tensors, and sequences. A timestamp without a zone is in UTC. Raises Malformed,
    with the row of a null, or of a number that is no such time.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if not isinstance(values, pa.Array):
        array = np.asarray(values)
        if array.dtype.kind != "O":
            return _checked(_seconds(array))
        try:
            values = pa.array(array)
        except pa.ArrowException as error:
            raise Malformed(f"{_EXPECTED}: {error}") from error
    return _checked(_arrow_seconds(values))


def given_times(values: Any) -> Times:
    """`as_times` of what a caller passes: InvalidInput in place of Malformed."""
    try:
        return as_times(values)
    except Malformed as error:
        row = "" if error.row is None else f", in row {error.row}"
        raise InvalidInput(f"times: {error.reason}{row}") from error


def as_rows(times: Times) -> Rows:
    """uint8 [n, 4], little-endian: times as they are stored."""
    return np.ascontiguousarray(times, "<u4").view(np.uint8).reshape(len(times), TIME_BYTES)


def from_rows(rows: Rows) -> Times:
    """The times that are stored as uint8 [n, 4]."""
    return np.ascontiguousarray(rows).view("<u4").ravel().astype(np.uint32, copy=False)


def live_at(times: Times, at_s: int, ttl_s: int) -> npt.NDArray[np.bool_]:
    """Which rows are not expired at `at_s`, seconds since 1970: bool [n]. One whose time is 0 is not there."""
    live: npt.NDArray[np.bool_] = times >= max(1, at_s - ttl_s)
    return live


def _arrow_seconds(array: pa.Array) -> npt.NDArray[Any]:
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise Malformed("time is null: every row of a table with a ttl needs one", row)
    kind = array.type
    if pa.types.is_timestamp(kind):
        return np.asarray(array.cast(pa.int64()).to_numpy(zero_copy_only=False) // _A_SECOND[kind.unit])
    if pa.types.is_date(kind):
        return np.asarray(array.cast(pa.timestamp("s")).cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    raise Malformed(f"{_EXPECTED}, got {kind}")


def _seconds(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim != 1 or array.dtype.kind not in "iufM":
        raise Malformed(f"{_EXPECTED}, one dimension of them; got {list(array.shape)} of {array.dtype}")
    if array.dtype.kind == "M":
        return array.astype("datetime64[s]").astype(np.int64)
    return array


def _checked(seconds: npt.NDArray[Any]) -> Times:
    right = (seconds >= 0) & (seconds < _MAX_TIME_S + 1)  # false for NaN
    if not right.all():
        row = int(np.argmin(right))
        hint = "; it seems to be in milliseconds or less" if seconds[row] > _MAX_TIME_S else ""
        raise Malformed(f"{seconds[row]} is not a time in seconds since 1970{hint}", row)
    return seconds.astype(np.uint32)
