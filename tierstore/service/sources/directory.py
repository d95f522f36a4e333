"""Deltas from a directory: `<dir>/<model>/<seq>.arrow`, written under another name and renamed, applied in order; or
files of rows, such as `<seq>.parquet`, which are made into deltas.

One thread, which the service starts and ends. Files stay where they are; after a restart those that the store has
already are skipped by their seq. A file that cannot be applied blocks its model, is reported, and is tried again when
it changes or after a pause that doubles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from tierstore.engine.events.changes import REQUESTER
from tierstore.errors import NotFound, NotReady, Overloaded, SequenceGap, TierstoreError, TooLarge
from tierstore.formats.names import parse_delta_file
from tierstore.imports.deltas import holds_rows, rows_delta
from tierstore.service.error_status import log_failure
from tierstore.service.families import counter
from tierstore.threads import Thread
from tierstore.types import NAME

logger = logging.getLogger(__name__)

POLL_S = 0.2
MOST_RUN, RUN_BYTES = 64, 8 << 20  # files that are applied together, and their bytes
_CLOCK_STEP_NS = 2_000_000_000  # a directory that changed more recently is listed again: its clock is coarse
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0  # for a bad file
_LONGEST_WAIT_S = 2.0  # for a file that came too early


@dataclass(slots=True)
class _Feed:
    """One model's directory. Only for the watcher's thread."""

    done: int | None = None  # every seq up to this one is applied; None: unknown yet
    listed_ns: int = -1  # the directory's mtime when it was last listed and nothing was left to do
    failed: tuple[Any, ...] | None = None  # the state of the file that was not applied
    pause_s: float = 0.0
    retry_s: float = 0.0
    error: str | None = None


class Watcher:
    """Follows a directory until closed. `applied`, `errors` and `status` may be read from any thread."""

    def __init__(self, store: Any, directory: Path, *, max_delta: int, poll_s: float = POLL_S) -> None:
        self._store, self._directory, self._max_delta, self._poll_s = store, directory, max_delta, poll_s
        self._feeds: dict[str, _Feed] = {}
        self._stop = threading.Event()
        # written by the thread alone
        self.applied = 0
        self.errors = 0
        self._problem: str | None = None
        self._thread = Thread(target=self._work, name="tierstore-watch", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """What was applied, and which file blocks which model."""
        held_up = {model: feed.error for model, feed in list(self._feeds.items()) if feed.error is not None}
        return {
            "directory": str(self._directory),
            "applied": self.applied,
            "errors": self.errors,
            "problem": self._problem,
            "problems": [
                *([] if self._problem is None else [f"watched {self._directory}: {self._problem}"]),
                *(f"watched {self._directory / model}: {why}" for model, why in held_up.items()),
            ],
            "held_up": held_up,
        }

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        yield counter("tierstore_watch_applied", "Deltas applied from the watched directory.", self.applied)
        yield counter("tierstore_watch_errors", "Failed attempts to apply a delta from there.", self.errors)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the delta that is being applied, and end."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        REQUESTER.set(f"watch of {self._directory}")
        while not self._stop.is_set():
            problem: str | None
            try:
                problem = self._scan()
            except Exception as error:  # noqa: BLE001 - the watcher must outlive whatever it meets
                problem = str(error)
                if problem != self._problem:
                    log_failure(error, f"watching {self._directory}")
            if problem not in (None, self._problem):
                self.errors += 1
                logger.warning("watching %s: %s", self._directory, problem)
            self._problem = problem
            self._stop.wait(self._poll_s)

    def _scan(self) -> str | None:
        """Read every model's directory. Returns faults of other files there."""
        misplaced = []
        for path in sorted(self._directory.iterdir()):
            if self._stop.is_set():
                return None
            if NAME.fullmatch(path.name) and path.is_dir():
                self._follow(path, self._feeds.setdefault(path.name, _Feed()))
            elif parse_delta_file(path.name) is not None:
                misplaced.append(path.name)
        if not misplaced:
            return None
        more = f" and {len(misplaced) - 1:,} more" if misplaced[1:] else ""
        return (
            f"{misplaced[0]}{more} of no model: expected <model>/<seq>.arrow; move deltas into their model's directory"
        )

    def _follow(self, directory: Path, feed: _Feed) -> None:
        changed_ns = directory.stat().st_mtime_ns
        if feed.error is None and changed_ns == feed.listed_ns:
            return
        if feed.done is None:
            feed.done = self._watermark(directory.name)
        files = sorted((seq, path) for path in directory.iterdir() if (seq := parse_delta_file(path.name)) is not None)
        waiting = [(seq, path) for seq, path in files if feed.done is None or seq > feed.done]
        nothing_waits = not waiting
        while waiting:
            if self._stop.is_set():
                return
            together = self._apply_run(directory.name, feed, waiting)
            if not together and not self._apply(directory.name, feed, *waiting[0]):
                return
            del waiting[: together or 1]
        if nothing_waits:
            feed.error = feed.failed = None  # the file that blocked the model is gone
        feed.listed_ns = changed_ns if time.time_ns() - changed_ns > _CLOCK_STEP_NS else -1

    def _watermark(self, model: str) -> int | None:
        try:
            watermark: int | None = self._store.status(model)["models"][model]["watermark"]
        except TierstoreError:
            return None  # an unknown model: applying the delta reports it
        return watermark

    def _apply_run(self, model: str, feed: _Feed, waiting: list[tuple[int, Path]]) -> int:
        """Apply the first of these files together. Returns how many; where it is none, `_apply` says why."""
        run: list[tuple[int, Path, None]] = []
        left = RUN_BYTES
        for seq, path in waiting[:MOST_RUN]:
            try:
                size = path.stat().st_size
            except OSError:
                break
            left -= size
            if left < 0 or size > self._max_delta or (feed.done is not None and seq != feed.done + len(run) + 1):
                break
            if holds_rows(path):  # which `_apply` makes a delta of
                break
            run.append((seq, path, None))
        if len(run) < 2 or feed.failed is not None:
            return 0
        try:
            applied: int = self._store.apply_run(model, run)
        except TierstoreError:
            return 0
        if applied:
            feed.done, feed.error, feed.pause_s = run[applied - 1][0], None, 0.0
            self.applied += applied
        return applied

    def _apply(self, model: str, feed: _Feed, seq: int, path: Path) -> bool:
        """Apply one file. Returns whether the next may follow."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return True
        identity = (seq, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if identity == feed.failed and time.monotonic() < feed.retry_s:
            return False
        try:
            if stat.st_size > self._max_delta:
                raise TooLarge(f"{path} has {stat.st_size} bytes, {self._max_delta} are allowed (max_delta)")
            source = self._of_rows(model, seq, path) if holds_rows(path) else path
            result = self._store.apply_delta(source, model=model, seq=seq)
        except SequenceGap as gap:
            if gap.expected_seq > seq:
                feed.done = seq  # older than the log: the snapshot that began it has this delta
                return True
            self._fail(path, feed, identity, gap)
            return False
        except TierstoreError as error:
            if isinstance(error, NotReady):
                feed.done = None  # the version that is served later may begin at another seq
            self._fail(path, feed, identity, error)
            return False
        feed.done, feed.error, feed.failed, feed.pause_s = seq, None, None, 0.0
        self.applied += result.applied
        return True

    def _of_rows(self, model: str, seq: int, path: Path) -> bytes:
        """The delta that a file of rows makes."""
        tables = self._store.status(model)["models"][model]["tables"]
        types = {name: table["key"] for name, table in tables.items()}
        return rows_delta(path, model=model, seq=seq, tables=types or None, max_bytes=self._max_delta)

    def _fail(self, path: Path, feed: _Feed, identity: tuple[Any, ...], error: TierstoreError) -> None:
        early = isinstance(error, (NotFound, NotReady, Overloaded, SequenceGap))
        longest_s = _LONGEST_WAIT_S if early else _LONGEST_PAUSE_S
        why = f"{path.name}: {error}{'' if early else '; write this file again, those after it wait'}"
        again = identity == feed.failed
        feed.pause_s = min(longest_s, feed.pause_s * 2) if again else _FIRST_PAUSE_S
        feed.retry_s = time.monotonic() + feed.pause_s
        feed.failed = identity
        self.errors += 1
        if why != feed.error:
            feed.error = why
            logger.warning("watching %s: %s", path.parent, why)
