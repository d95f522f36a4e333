"""Programs where nothing, or one directory alone, can be written."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or not can_mount(), reason="mount namespaces are not to be had here"
)


def read_only(command: list[str], but: Path | None, cwd: Path) -> list[str]:
    """The command that runs `command` where all file systems are read-only, `but` one directory."""
    steps = [] if but is None else [f"mount --bind {but} {but}"]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kept = ("/proc", "/sys", "/dev")
    steps += [f"mount -o remount,bind,ro {m} 2>/dev/null || true" for m in mounts if not m.startswith(kept)]
    steps += [] if but is None else [f"mount -o remount,bind,rw {but}"]
    steps += [
        "mount -o remount,bind,ro /dev/shm 2>/dev/null || true",
        f"cd {but or cwd}",
        shlex.join(["exec", *command]),
    ]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "; ".join(steps)]


def bare(**more: str) -> dict[str, str]:
    """An environment without HOME."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}
