"""Compiled kernels are never older than a helper that they inline."""

from __future__ import annotations

import os
from pathlib import Path

from tierstore import kernels


def test_kernel_sources_share_one_mtime():
    sources = list(Path(kernels.__file__).parent.glob("*.py"))
    newest_ns = max(source.stat().st_mtime_ns for source in sources) + 1_000_000_000
    os.utime(sources[0], ns=(newest_ns, newest_ns))
    kernels._share_one_mtime()
    assert {source.stat().st_mtime_ns for source in sources} == {newest_ns}
