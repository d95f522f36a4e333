"""The helper process of a bulk load: `python -m tierstore.ingest.worker`, started by `helpers.py`.

It reads JSON lines from stdin and answers on what was stdout when it started:

    in   {"root": …, "manifest": {…}}             the snapshot that the tasks after it are about
         {"task": "SortShards", …fields}          one at a time
         {"share": 0.5}                           at any time: of the time, how much it may be at work
    out  {"rows": 65536}                          rows done since the last such line
         {"waits": "s3://…"}                      what does not come, and is tried again
         {"done": {…}, "peak_bytes": …}           the task's result
         {"error": kind, …}                       kind: snapshot, storage, full, corruption or internal; the helper goes on

When stdin ends, which it does when the parent dies however it dies, the helper exits at once, in the
middle of a task if need be. It runs on one thread, beside the one that watches stdin.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tierstore.errors import Corruption, DiskFull, SnapshotError, StorageError, TierstoreError
from tierstore.formats import patience
from tierstore.formats.objects import ObjectPath
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.finished_files import check_file, copy_file, ingest, read_back, read_file
from tierstore.ingest.merge import merge_runs
from tierstore.ingest.runs import ReportRows, read_digest
from tierstore.ingest.sort import join_runs, sort_shards
from tierstore.ingest.strings import copy_strings, sort_strings
from tierstore.ingest.tasks import (
    TASKS,
    Checked,
    CheckFile,
    CheckRun,
    CopyFile,
    CopyStrings,
    Ingest,
    JoinRuns,
    MergeRuns,
    ReadBack,
    ReadFile,
    Result,
    SortShards,
    SortStrings,
    Task,
)
from tierstore.kernels.slices import Slices
from tierstore.tiers.background import Pace

_REPORT_EVERY_S = 0.1


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its helpers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    patience.log.addHandler(_Waits(answers))
    os.dup2(2, 1)  # what a library prints must not get between the answers
    lines: queue.Queue[str] = queue.Queue()
    share = [1.0]  # of the time; `kernels/slices.py` enforces a share between 0 and 1
    threading.Thread(target=_watch_stdin, args=(lines, share), daemon=True).start()
    snapshot: Snapshot | None = None
    while True:
        fields = json.loads(lines.get())
        if "root" in fields:
            root = fields["root"]
            place = Path(root) if isinstance(root, str) else ObjectPath.from_document(root)
            snapshot = Snapshot(place, Manifest.parse(json.dumps(fields["manifest"])))
            continue
        assert snapshot is not None
        task = TASKS[fields.pop("task")](**fields)
        reporter = _RowReporter(answers, Pace(lambda: float(share[0] > 0)))
        try:
            result = run_task(snapshot, task, reporter.report)
            reporter.flush()
            answer = {"done": asdict(result), "peak_bytes": reporter.peak_bytes}
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            answer = describe(error)
        _send(answers, answer)


def run_task(snapshot: Snapshot, task: Task, report: ReportRows) -> Result:
    """Do a task. Raises SnapshotError for a snapshot that may not be loaded, StorageError and OSError for the disk."""
    match task:
        case SortShards():
            return sort_shards(snapshot, task, report)
        case SortStrings():
            return sort_strings(snapshot, task, report)
        case CopyStrings():
            return copy_strings(snapshot, task, report)
        case JoinRuns():
            return join_runs(snapshot, task, report)
        case MergeRuns():
            return merge_runs(snapshot, task, report)
        case CopyFile():
            return copy_file(snapshot, task, report)
        case CheckRun():
            return Checked(read_digest(task.path, task.rows, task.row_bytes, report) == task.digest)
        case CheckFile():
            return check_file(task, report)
        case Ingest():
            return ingest(task)
        case ReadFile():
            return read_file(task, report)
        case ReadBack():
            return read_back(task, report)


def private_bytes() -> int:
    """Memory of this process, without pages of mapped files, which the system may reclaim."""
    resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


class _RowReporter:
    """Adds up rows, reports them from time to time, watches memory, and pauses as `pace` says."""

    def __init__(self, answers: TextIO, pace: Pace) -> None:
        self.peak_bytes = 0
        self._pace = pace
        self._answers = answers
        self._rows = 0
        self._next = time.monotonic()

    def report(self, rows: int) -> None:
        self.peak_bytes = max(self.peak_bytes, private_bytes())
        self._rows += rows
        if time.monotonic() >= self._next:
            self.flush()
        self._pace.sleep()

    def flush(self) -> None:
        if self._rows:
            _send(self._answers, {"rows": self._rows})
        self._rows = 0
        self._next = time.monotonic() + _REPORT_EVERY_S


def _watch_stdin(lines: queue.Queue[str], share: list[float]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # the signal is for the main thread
    slices: Slices | None = None  # compiled only where it is needed
    for line in sys.stdin:
        if line.startswith('{"share"'):
            share[0] = float(json.loads(line)["share"])
            if slices is None and 0 < share[0] < 1:
                slices = Slices()
            if slices is not None:
                slices.set_share(share[0])
        else:
            lines.put(line)
    os._exit(0)


class _Waits(logging.Handler):
    """Sends what is tried again. Records come from several threads."""

    def __init__(self, answers: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._answers, {"waits": record.getMessage()})


_sending = threading.Lock()


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    try:
        with _sending:
            answers.write(json.dumps(message) + "\n")
    except BrokenPipeError:
        os._exit(0)


def describe(error: Exception) -> dict[str, Any]:
    """What a task has raised, as an answer."""
    if isinstance(error, SnapshotError):
        return {"error": "snapshot", "reason": error.reason, "file": error.file, "row": error.row}
    if isinstance(error, MemoryError):
        return {"error": "storage", "message": "not enough memory for a load helper; lower load_memory or load_workers"}
    if isinstance(error, Corruption):
        return {"error": "corruption", "message": str(error)}
    if isinstance(error, StorageError):
        return {"error": "full" if isinstance(error, DiskFull) else "storage", "message": str(error)}
    if isinstance(error, OSError) and not isinstance(error, TierstoreError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        words = "the disk is full" if full else error.strerror or str(error)
        message = f"{error.filename or 'the build directory'}: {words}"
        return {"error": "full" if full else "storage", "message": message}
    return {"error": "internal", "message": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main()
