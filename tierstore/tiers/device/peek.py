"""A device table's entry for one key, read from device memory without counting, for people who inspect a store.

`cuda/layout.cuh` describes the memory. For a thread that holds the lock of the table's writers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierstore.tiers.base import Peek as Peek
from tierstore.tiers.device.backend import DeviceError
from tierstore.tiers.device.layout import ABSENT_WAYS, HEAT_AT, MAX_HEAT, WAYS, DeviceLayout
from tierstore.tiers.device.memory import TableMemory


def peek(memory: TableMemory | None, layout: DeviceLayout, key: int, give_up: Callable[[DeviceError], None]) -> Peek:
    """The table's entry for `key`, a code. `heat`: its recent hits (0 to 3).

    Calls `give_up` if the device fails.
    """
    if memory is None or memory.table is None:
        return Peek()
    try:
        line, absent, rows = memory.read_set(layout.set_of(key, memory.depth))
    except DeviceError as error:
        give_up(error)
        return Peek()
    head, wanted = int(line[0]), key & (1 << 64) - 1
    way = _place(head, line, WAYS, wanted)
    if way is None:
        return Peek(absent=_place(int(absent[0]), absent, ABSENT_WAYS, wanted) is not None)
    return Peek(rows[way, : layout.spec.row_bytes].tobytes(), heat={"hits": head >> (HEAT_AT + 2 * way) & MAX_HEAT})


def _place(head: int, words: npt.NDArray[np.uint64], ways: int, key: int) -> int | None:
    """The place of the key among the occupied ways; `words` are its line, and word 0 is `head`."""
    return next((way for way in range(ways) if head >> way & 1 and int(words[1 + way]) == key), None)
