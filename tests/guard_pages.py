"""Memory between two pages that nobody may touch: a kernel that reads or writes beyond it ends the process at once."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_NO_ACCESS = 0  # PROT_NONE


class Guarded:
    """`size` bytes at least, with a page before and behind them that cannot be read. They stay as long as this does."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        self._memory = mmap.mmap(-1, self.size + 2 * page)
        whole = np.frombuffer(self._memory, np.uint8)
        for at in (0, page + self.size):
            if _LIBC.mprotect(whole.ctypes.data + at, page, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.array = whole[page : page + self.size]
        self.address = int(self.array.ctypes.data)

    def place(self, data: bytes, at_end: bool = True) -> int:
        """Put bytes against one of the guards. Returns their address."""
        at = self.size - len(data) if at_end else 0
        self.array[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return self.address + at

    def last(self, size: int) -> int:
        """The address of the last `size` bytes."""
        return self.address + self.size - size
