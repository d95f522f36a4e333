"""Bulk loads of the tests use the same helper processes again and again: starting one costs most of a small load.

What a load does is unchanged: the helper is `tierstore.ingest.worker`, told of a new snapshot. Tests that are about
helpers have the fixture `own_helpers`. A helper that was cut off in a task, or has failed in one, is ended.
"""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierstore.ingest import helpers

_MOST = 4

_start, _Helper = helpers.start, helpers._Helper
_idle: list[subprocess.Popen[bytes]] = []


def _take(stderr: Path) -> subprocess.Popen[bytes]:
    while _idle:
        process = _idle.pop()
        if process.poll() is None:
            return process
    return _start(stderr)


class _Kept(helpers._Helper):
    def end(self) -> None:
        if self._task is None and not self._partial and self.process.poll() is None and len(_idle) < _MOST:
            _idle.append(self.process)
        else:
            super().end()


@atexit.register
def _end() -> None:
    for process in _idle:
        process.kill()
        process.wait()


@contextmanager
def kept() -> Iterator[None]:
    """Within the block, loads of this process take helpers that are there and leave them there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "start", _take)
        patch.setattr(helpers, "_Helper", _Kept)
        yield


@contextmanager
def not_kept() -> Iterator[None]:
    """Within the block, as without `kept`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "start", _start)
        patch.setattr(helpers, "_Helper", _Helper)
        yield
