"""Bulk loads of the tests use the same helper processes again and again: starting one costs most of a small load.

What a load does is unchanged: the helper is `tierstore.ingest.worker`, told of a new snapshot. Tests that are about
helpers have the fixture `own_helpers`. A helper that was cut off in a task, or has failed in one for another reason than the
snapshot, is ended; so is one that was started with other variables of the environment, which say where an object storage is.

They have the priority of all else, and all processors: with the lowest they would wait for the tests of other processes.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tierstore.ingest import helpers

_MOST = 4

_start, _Helper = helpers.start, helpers._Helper
_lower_priority, _use_half_of_processors = helpers._lower_priority, helpers._use_half_of_processors
_lock = threading.Lock()
_idle: list[subprocess.Popen[bytes]] = []
_environments: dict[int, dict[str, str]] = {}  # of helpers, by process id


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _take(stderr: Path) -> subprocess.Popen[bytes]:
    now = _environment()
    with _lock:
        for process in reversed(_idle):
            if process.poll() is None and _environments[process.pid] == now:
                _idle.remove(process)
                return process
    process = _start(stderr)
    _environments[process.pid] = now
    return process


class _Kept(helpers._Helper):
    def receive(self) -> list[dict[str, Any]]:
        answers = super().receive()
        if any(answer.get("error") == "snapshot" for answer in answers):
            self._task = None  # it has refused a snapshot, and waits for the next task
        return answers

    def end(self) -> None:
        if self._task is None and not self._partial and self.process.poll() is None:
            with _lock:  # loads of several stores end at once
                _idle.append(self.process)
                least = _idle.pop(0) if len(_idle) > _MOST else None  # of another environment, as a rule
            if least is not None:
                _end(least)
        else:
            super().end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@atexit.register
def _end_all() -> None:
    for process in _idle:
        _end(process)


@contextmanager
def kept() -> Iterator[None]:
    """Within the block, loads of this process take helpers that are there and leave them there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "start", _take)
        patch.setattr(helpers, "_Helper", _Kept)
        patch.setattr(helpers, "_lower_priority", lambda _: None)
        patch.setattr(helpers, "_use_half_of_processors", lambda _: None)
        yield


@contextmanager
def not_kept() -> Iterator[None]:
    """Within the block each load starts helpers of its own, and ends them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "start", _start)
        patch.setattr(helpers, "_Helper", _Helper)
        yield


@contextmanager
def as_in_a_service() -> Iterator[None]:
    """Within the block, as without `kept`: they have the lowest priority as well, and half of the processors where asked for."""
    with not_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "_lower_priority", _lower_priority)
        patch.setattr(helpers, "_use_half_of_processors", _use_half_of_processors)
        yield
