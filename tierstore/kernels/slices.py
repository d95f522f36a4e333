"""Short work slices for a load's helper process: a timer stops its main thread again and again, for a part of each period.

A look-up on the same processor then waits for at most one slice. A helper that paused only between its batches would delay a look-up by a whole
batch; measured, that was slower for look-ups than a helper that never paused.

A timer's signal comes once a period. Its compiled handler sleeps for the part of the period that is not work. So no other process must wake the
helper, and a killed parent leaves no helper stopped. For the main thread.
"""

from __future__ import annotations

import ctypes
import signal

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels.codec import address_of

SLICE_S = 0.0005

_nanosleep = types.ExternalFunction("nanosleep", types.int32(types.int64, types.int64))


class Slices:
    """The slices of this process, one object. For any thread that blocks SIGALRM, as all but the main thread must."""

    def __init__(self) -> None:
        self._pause = np.zeros(2, np.int64)  # a timespec that the handler reads
        at = address_of(self._pause)

        @nb.cfunc(types.void(types.int32))
        def stop(_signal):
            _nanosleep(at, 0)

        self._handler = stop  # kept alive while signals may come
        self._share = 1.0
        install = ctypes.CDLL(None).signal  # C's `signal`, so that interrupted calls are restarted
        install.restype, install.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
        install(signal.SIGALRM, stop.address)

    def set_share(self, share: float) -> None:
        """Work for this share of the time from now on; 1 or 0 stop nothing."""
        if share == self._share:
            return
        self._share = share
        if not 0 < share < 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        period_s = SLICE_S / share
        self._pause[1] = int((period_s - SLICE_S) * 1e9)
        signal.setitimer(signal.ITIMER_REAL, period_s, period_s)
