"""What the figures were measured on, in one line."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path


def describe() -> str:
    """Processor, cores that this process may use, memory, Python, and the day."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory:.0f} GiB, CPython {platform.python_version()}, {datetime.date.today().isoformat()}"
