"""What this process really occupies, as the kernel counts it. Linux only; any thread."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def anonymous_bytes() -> int:
    """Bytes of memory that only this process holds and no file backs, after free memory has been given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves
    if trim is not None:
        trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/smaps_rollup does not say how much memory is anonymous")


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not say how much memory is available")


def load() -> list[float]:
    """The load averages of 1, 5 and 15 minutes: what else the machine did."""
    return [float(word) for word in Path("/proc/loadavg").read_text(encoding="ascii").split()[:3]]
