"""The lock on a table's stream, with the launch arguments that it guards; compiled code takes the same lock.

It is held for a few launches. Python code that finds it taken lets other threads run meanwhile. Nothing survives the process.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tierstore.tiers.device import round_trip
from tierstore.tiers.device.backend import NO_HOST, DeviceStream


class Order:
    """A lock, and `words` int64[ORDER_WORDS] for `round_trip.py`, which it guards.

    `stream`: the table's. `counters`: the device address where kernels that read count.
    """

    def __init__(self, stream: DeviceStream, counters: int) -> None:
        self.words = np.zeros(round_trip.ORDER_WORDS, np.int64)
        self.words[round_trip.NO_HOST] = NO_HOST.ctypes.data
        self.words[round_trip.STREAM] = stream.handle
        self.words[round_trip.COUNTERS] = counters

    def __enter__(self) -> None:
        while not round_trip.try_lock(self.words):
            time.sleep(0)

    def __exit__(self, *error: Any) -> None:
        round_trip.unlock(self.words)
