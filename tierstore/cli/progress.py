"""Progress of a long command: a bar on a terminal, and now and then a line anywhere else.

Written to standard error: standard output is for results. One thread at a time may report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.types import Progress, ProgressFn

LINE_EVERY_S = 5.0


@contextmanager
def shown_progress(what: str) -> Iterator[ProgressFn]:
    """Yields the function to report progress to; it is shown under the title `what`."""
    if sys.stderr.isatty():
        with _bar(what) as report:
            yield report
    else:
        yield _Lines(what).report


@contextmanager
def _bar(what: str) -> Iterator[ProgressFn]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        phase = ""

        def report(progress: Progress) -> None:
            nonlocal phase, task
            if progress.phase != phase:
                phase = progress.phase
                bar.remove_task(task)  # a task keeps its total, so a new phase is a new task
                task = bar.add_task(_label(what, phase), total=None)
            description = _label(what, phase) + _waits(progress)
            bar.update(task, description=description, completed=progress.done, total=progress.total or None)

        yield report


def _label(what: str, phase: str) -> str:
    return phase if phase.startswith(what) else f"{what}: {phase}"


def _waits(progress: Progress) -> str:
    return f", waits: {progress.waits_for}" if progress.waits_for else ""


class _Lines:
    """A line at each new phase, and one every few seconds during it."""

    def __init__(self, what: str) -> None:
        self._what, self._phase, self._last_s = what, "", 0.0

    def report(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase == self._phase and now_s - self._last_s < LINE_EVERY_S:
            return
        self._phase, self._last_s = progress.phase, now_s
        amount = f" {progress.done:,} of {progress.total:,}" if progress.total else ""
        sys.stderr.write(f"{_label(self._what, progress.phase)}{amount}{_waits(progress)}\n")
        sys.stderr.flush()
