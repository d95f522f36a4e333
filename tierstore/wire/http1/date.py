"""The Date header of an HTTP answer (IMF-fixdate of RFC 9110, 5.6.7), written without the interpreter. Any thread."""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import store_u8

DATE_BYTES = 29
DATE_PLACE = b"." * DATE_BYTES  # a placeholder in a prepared head

_DAYS = np.frombuffer(b"Thu, Fri, Sat, Sun, Mon, Tue, Wed, ", np.uint8)  # 1 January 1970 was a Thursday
_MONTHS = np.frombuffer(b" Mar  Apr  May  Jun  Jul  Aug  Sep  Oct  Nov  Dec  Jan  Feb ", np.uint8)
_GMT = np.frombuffer(b" GMT", np.uint8)


@nb.njit(inline="always")
def _put(at, i, value, digits):
    for k in range(digits):
        store_u8(at, i + digits - 1 - k, nb.uint8(48 + value % 10))
        value //= 10


@nb.njit
def write_date_at(seconds, at):
    """Write the date of `seconds` since 1970 to DATE_BYTES bytes at an address."""
    days, of_day = seconds // 86400, seconds % 86400
    # days from 1 March of year 0, so that a leap day comes last (Hinnant, "chrono-compatible date algorithms")
    shifted = days + 719468
    era, of_era = shifted // 146097, shifted % 146097
    year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    copy_bytes(at, nb.int64(_DAYS.ctypes.data) + 5 * (days % 7), 5)
    _put(at, 5, of_year - (153 * month + 2) // 5 + 1, 2)
    copy_bytes(at + 7, nb.int64(_MONTHS.ctypes.data) + 5 * month, 5)
    _put(at, 12, year + 400 * era + (1 if month >= 10 else 0), 4)
    store_u8(at, 16, nb.uint8(32))
    _put(at, 17, of_day // 3600, 2)
    store_u8(at, 19, nb.uint8(58))
    _put(at, 20, of_day // 60 % 60, 2)
    store_u8(at, 22, nb.uint8(58))
    _put(at, 23, of_day % 60, 2)
    copy_bytes(at + 25, nb.int64(_GMT.ctypes.data), 4)
