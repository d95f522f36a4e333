"""Progress of a long command: a bar on a terminal, and now and then a line anywhere else; what becomes of it on Ctrl-C.

Written to standard error: standard output is for results. One thread at a time may report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.phase_rate import PhaseRate
    from tierstore.types import Progress, ProgressFn

LINE_EVERY_S = 3.0


@contextmanager
def shown_progress(what: str, interrupted: str | Callable[[], str]) -> Iterator[ProgressFn]:
    """Yields the function to report progress to; it is shown under the title `what`.

    interrupted: what becomes of the work where Ctrl-C ends it, which is printed then; or what ends it and returns that.
    """
    try:
        if sys.stderr.isatty():
            with _bar(what) as report:
                yield report
        else:
            lines = _Lines(what)
            yield lines.report
            lines.end_phase()
    except KeyboardInterrupt:
        fate = interrupted if isinstance(interrupted, str) else interrupted()
        sys.stderr.write(f"tierstore: {what}: interrupted; {fate}\n")
        raise


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
    """A line as a phase begins, one every few seconds during it, with its rate and what is left, and one at its end."""

    def __init__(self, what: str) -> None:
        self._what, self._last_s = what, 0.0
        self._now: Progress | None = None  # the newest of the phase
        self._began_s = 0.0
        self._rate: PhaseRate | None = None

    def report(self, progress: Progress) -> None:
        from tierstore.phase_rate import PhaseRate

        now_s = time.monotonic()
        if self._rate is None or self._now is None or progress.phase != self._now.phase:
            self.end_phase()
            self._began_s = self._last_s = now_s
            self._rate = PhaseRate(progress, now_s)
            self._write(progress, f"{_waits(progress)} …")
        else:
            self._rate.note(progress, now_s)
            if now_s - self._last_s >= LINE_EVERY_S:
                self._last_s = now_s
                rate, left_s = self._rate.per_second(now_s), self._rate.left_s(now_s)
                ahead = f", {_time(left_s)} left" if left_s is not None else ""
                self._write(progress, f"{_amount(progress)}{_per_second(rate)}{ahead}{_waits(progress)}")
        self._now = progress

    def end_phase(self) -> None:
        """What was reported last has ended well."""
        if (last := self._now) is not None and self._rate is not None:
            now_s = time.monotonic()
            amount = f" {last.done:,}" if last.done else ""
            rate = self._rate.per_second(now_s)
            self._write(last, f"{amount} done in {_time(now_s - self._began_s)}{_per_second(rate)}")
        self._now = self._rate = None

    def _write(self, progress: Progress, text: str) -> None:
        sys.stderr.write(f"{_label(self._what, progress.phase)}{text}\n")
        sys.stderr.flush()


def _amount(progress: Progress) -> str:
    return f" {progress.done:,} of {progress.total:,}" if progress.total else ""


def _per_second(rate: float) -> str:
    return f", {rate:,.0f} a second" if rate >= 1 else ""


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
