"""A mapping of shared memory where huge pages can be had.

Huge pages need an address that is a multiple of theirs, and shared memory gets them by itself only where the machine's
settings say so (`shmem_enabled`, mostly `never`). But a process may ask for ranges that hold memory already, whatever
the settings (`MADV_COLLAPSE`, Linux 6.1); then every process that maps them has them. Any thread may call anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

HUGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class SharedMapping:
    """The first `size` bytes of the file `fd`, writable. The mapping goes with the last array made of it."""

    def __init__(self, fd: int, size: int) -> None:
        if os.fstat(fd).st_size < size:
            raise OSError(f"the file has {os.fstat(fd).st_size} bytes, not {size}")  # beyond them a read kills
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        # room for the mapping and for moving it to the next multiple; what is left over is given back
        room = whole + HUGE_BYTES
        begin = _checked(_libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
        address = -(-begin // HUGE_BYTES) * HUGE_BYTES
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _checked(_libc.mmap(address, whole, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
        except OSError:
            _libc.munmap(begin, room)
            raise
        for left, end in ((begin, address), (address + whole, begin + room)):
            if end > left:
                _libc.munmap(left, end - left)
        self._address, self._size = address, size
        memory = (ctypes.c_ubyte * size).from_address(address)
        # not at the interpreter's end, when threads may still read: the kernel takes it back
        weakref.finalize(memory, _libc.munmap, address, whole).atexit = False
        self.array: np.ndarray = np.ctypeslib.as_array(memory)

    def __len__(self) -> int:
        return self._size

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        """As `mmap.mmap.madvise`."""
        if _libc.madvise(self._address + start, self._size - start if length is None else length, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def collapse(self, start: int) -> bool:
        """Have the HUGE_BYTES from `start` on, a multiple of them, in one page. False if they are empty, or it cannot be had."""
        return bool(_libc.madvise(self._address + start, HUGE_BYTES, _MADV_COLLAPSE) == 0)


def _checked(address: int) -> int:
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
