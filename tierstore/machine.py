"""The processors and memory that this process may use: the machine's, less where a control group allows less.

Functions over files of the kernel; any thread. Limits are read when they are asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_ENDED_FIRST = "1000"
_PROC, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def processors(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """How many processors this process may keep busy; a part of one counts as one."""
    most = len(os.sched_getaffinity(0))
    for folder in _folders("cpu", proc, groups):
        words = _words(folder / "cpu.max")  # `max 100000`, or the time in each period, and the period
        if len(words) != 2:
            words = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            most = min(most, math.ceil(int(words[0]) / int(words[1])))
    return max(1, most)


def memory_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """How many bytes of memory this process may use, together with others."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _folders("memory", proc, groups):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limits = [int(word) for word in _words(folder / name) if word.isdigit()]
            most = min([most, *limits])
    return most


def end_first(pid: int) -> None:
    """Have the kernel end this process before others where memory runs out; where that is refused, it chooses."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(_ENDED_FIRST)


def _folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """The folders of the process's control group and of the groups around it, for either version of control groups."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        roots = [groups / controllers, groups / controller] if controllers else [groups, groups / "unified"]
        inner = path.strip("/")
        for root in roots:
            folder = root / inner
            yield from (folder, *folder.parents[: len(Path(inner).parts)])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
