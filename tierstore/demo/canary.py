"""Canaries: rows of known content that every look-up of the load generator asks for along with its own.

Both tables hold two. One carries the snapshot's version and comes with the snapshot alone; the other
carries the seq of the last delta and is upserted by every delta, in both tables. A request whose four
rows do not tell one version and one seq was answered from two states at once.

Free functions of arrays; any thread may use them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.demo.clicklog import item_keys, user_keys
from tierstore.demo.trainer import DIM
from tierstore.types import Keys

BASE = 1000  # float16 holds every whole number up to 2048
_ROWS = (-1, -2)  # no user or item has a negative row number


def user_canaries() -> Keys:
    """Keys of the version row and of the seq row in the user table (int64[2])."""
    return user_keys(np.array(_ROWS, np.int64))


def item_canaries() -> Keys:
    """The same in the item table."""
    return item_keys(np.array(_ROWS, np.int64))


def write_number(number: int) -> npt.NDArray[np.float32]:
    """`number` (0 to 10**12 - 1) as a row that float16 keeps exactly: four digits to the base 1000, zeros."""
    row = np.zeros(DIM, np.float32)
    row[:4] = number // BASE ** np.arange(4) % BASE
    return row


def read_numbers(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """What `write_number` put into `rows` [n, DIM]: int64[n]."""
    return rows[:, :4].astype(np.int64) @ BASE ** np.arange(4)
