"""Numba kernels: arrays and scalars in, arrays out.

numba keeps compiled kernels on disk and looks only at a kernel's own source file to tell whether one is out of date,
though kernels inline helpers from other files of this folder. So all of them carry one modification time: an edit to
any of them makes every kernel compile anew, instead of running with the old helper inside.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def share_one_mtime(folder: Path) -> None:
    """Bring every source in `folder` to the modification time of the newest."""
    sources = list(folder.glob("*.py"))
    newest_ns = max(source.stat().st_mtime_ns for source in sources)
    for source in sources:
        if source.stat().st_mtime_ns != newest_ns:
            with contextlib.suppress(OSError):  # an installation that is not ours to touch is replaced as a whole
                os.utime(source, ns=(newest_ns, newest_ns))


share_one_mtime(Path(__file__).parent)
