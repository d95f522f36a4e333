"""Background jobs: loads, exports and backups, one of each kind at a time, with a bounded queue and a bounded history.

A job that makes no progress (its mount hangs, say) lets those of other models pass it, so at times more than one runs.
Any thread may use `Jobs`; each job runs on a thread of its own. Jobs do not survive a restart: an interrupted job
leaves nothing that counts, and must be requested again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cachetools import LRUCache

from tierstore.engine.events.changes import REQUESTER, requester
from tierstore.errors import Closed, Conflict, NotFound, Overloaded, RateLimited, TierstoreError
from tierstore.phase_rate import PhaseRate
from tierstore.service.error_status import as_text, log_failure, message_of
from tierstore.threads import Thread
from tierstore.types import Progress

logger = logging.getLogger(__name__)

Kind = Literal["load", "export", "backup"]

QUEUE_LIMIT = 16  # running jobs included
HISTORY_LIMIT = 256
FAILURE_SHOWN_S = 86_400.0  # so long a failed load is a problem, if nobody acknowledges it
STUCK_S = 60.0  # without progress: after that the next job of its kind starts beside it
_POLL_S = 0.5


@dataclass(slots=True)
class Job:
    """One load, export or backup.

    Written by its own thread (and under the lock while it is queued); a reader may see a step late. `source` is the
    snapshot of a load, or the target directory or URL.
    """

    id: str
    model: str
    source: Path | str
    activate: bool
    requested_by: str | None = None
    kind: Kind = "load"
    wanted: Mapping[str, Any] = field(default_factory=dict)  # options of `Store.export` or `Store.backup`
    check: Callable[[], None] = lambda: None  # see `Jobs.submit`
    holding: Callable[[], AbstractContextManager[None]] = nullcontext
    created_s: float = field(default_factory=time.time)
    state: str = "running"
    phase: str = "queued"
    done: int = 0
    total: int = 0
    waits_for: str | None = None  # see Progress
    error: str | None = None
    error_type: str | None = None  # its class among `tierstore.errors`
    version: int | None = None
    seq: int | None = None  # of an export or a backup
    report: Mapping[str, Any] | None = None  # of a backup
    finished_s: float | None = None
    acknowledged: bool = False  # somebody knows that it failed
    cancelled: threading.Event = field(default_factory=threading.Event)
    pace: PhaseRate = field(default_factory=lambda: PhaseRate(Progress("queued"), time.monotonic()))
    moved_s: float = 0.0  # of the last progress; 0 before the job starts

    def note(self, progress: Progress) -> None:
        """Note the progress."""
        now_s = time.monotonic()
        if (progress.phase, progress.done) != (self.phase, self.done):
            self.moved_s = now_s
        if progress.phase != self.phase:
            self.phase, self.pace = progress.phase, PhaseRate(progress, now_s)
        self.pace.note(progress, now_s)
        self.done, self.total, self.waits_for = progress.done, progress.total, progress.waits_for

    @property
    def waits(self) -> str:
        """What it waits for, as the end of a sentence; empty if it does not wait."""
        return f", waits: {self.waits_for}" if self.waits_for else ""

    def document(self) -> dict[str, Any]:
        """The job as in `/admin/jobs/{id}`; `rate` in rows a second, `eta_s` to the end of the phase."""
        running, pace, now_s = self.state == "running", self.pace, time.monotonic()
        return {
            "job": self.id,
            "kind": self.kind,
            "model": self.model,
            "source": as_text(str(self.source)) if self.kind == "load" else None,
            "directory": as_text(str(self.source)) if self.kind != "load" else None,
            "activate": self.activate,
            "state": self.state,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "rate": (pace.per_second(now_s) or None) if running else None,
            "waits_for": self.waits_for if running else None,
            "eta_s": pace.left_s(now_s) if running else None,
            "error": self.error,
            "error_type": self.error_type,
            "version": self.version,
            "seq": self.seq,
            "report": self.report,
            "created_at": self.created_s,
            "finished_at": self.finished_s,
            "acknowledged": self.acknowledged,
        }


class Jobs:
    """The queue, its thread and the history."""

    limit = QUEUE_LIMIT

    def __init__(self, store: Any, limit_of: Callable[[str], int | None] = lambda model: None) -> None:
        """`limit_of`: model → how many of its loads may run or wait."""
        self._store, self._limit_of = store, limit_of
        self._lock = threading.Lock()
        # guarded by _lock
        self._active: dict[str, Job] = {}
        self._history: LRUCache[str, Job] = LRUCache(HISTORY_LIMIT)
        self.ended: Counter[tuple[str, str]] = Counter()  # by kind and state
        self._closed = False
        self._threads: dict[str, threading.Thread] = {}  # of running jobs, by id
        self._changed = threading.Condition(self._lock)
        self._thread = Thread(target=self._work, name="tierstore-jobs", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._active)

    def submit(
        self,
        model: str,
        source: Path | str,
        *,
        activate: bool,
        check: Callable[[], None] = lambda: None,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Job:
        """Queue a load. `check` is called when its turn comes, and raises if it is no longer allowed; the load runs
        in the block of `holding`.

        Overloaded when the queue is full.
        """
        job = Job(uuid.uuid4().hex[:16], model, source, activate, REQUESTER.get(), check=check, holding=holding)
        return self._submit(job)

    def submit_export(
        self, model: str, target: Path | str, wanted: Mapping[str, Any], kind: Literal["export", "backup"] = "export"
    ) -> Job:
        """Queue an export or a backup, with these options of that verb of `Store`.

        Overloaded when the queue is full.
        """
        return self._submit(Job(uuid.uuid4().hex[:16], model, target, False, REQUESTER.get(), kind, wanted))

    def _submit(self, job: Job) -> Job:
        with self._lock:
            if self._closed:
                raise Closed("the service is shutting down")
            if len(self._active) >= QUEUE_LIMIT:
                raise Overloaded(f"{QUEUE_LIMIT} jobs wait already; try again when one is done", retry_after_s=10.0)
            self._check_quota(job)
            self._active[job.id] = job
            self._changed.notify_all()
        return job

    def _check_quota(self, job: Job) -> None:
        limit = self._limit_of(job.model) if job.kind == "load" else None
        own = sum((other.model, other.kind) == (job.model, "load") for other in self._active.values())
        if limit is not None and own >= limit:
            raise RateLimited(
                f"{own} loads of {job.model!r} run or wait, its quota is {limit}; try again when one is done",
                retry_after_s=10.0,
            )

    def get(self, job_id: str, models: Collection[str] | None = None) -> Job:
        """A job that runs, waits, or ended lately, for a caller that may know of these models. NotFound otherwise."""
        with self._lock:
            job = self._active.get(job_id) or self._history.get(job_id)
        if job is None or (models is not None and job.model not in models):
            raise NotFound(f"no job {job_id[:40]!r}; the last {HISTORY_LIMIT} are kept, and none across a restart")
        return job

    def all(self) -> list[Job]:
        """Every kept job, the latest first."""
        with self._lock:
            jobs = [*self._active.values(), *self._history.values()]
        return sorted(jobs, key=lambda job: job.created_s, reverse=True)

    def failed(self) -> dict[str, str]:
        """Why the last load of a model failed, by model; cancelled and acknowledged ones, and those of more than a day
        ago, do not count.
        """
        last: dict[str, Job] = {}
        for job in self.all():
            if job.kind == "load" and job.state != "running" and not job.cancelled.is_set():
                last.setdefault(job.model, job)
        since_s = time.time() - FAILURE_SHOWN_S
        return {
            model: f"{job.source}: {job.error} (`tierstore jobs --acknowledge {job.id}` ends this problem)"
            for model, job in last.items()
            if job.state == "failed" and not job.acknowledged and (job.finished_s or 0.0) > since_s
        }

    def acknowledge(self, job_id: str, models: Collection[str] | None = None) -> Job:
        """Note that somebody knows of a failed job, so that it is no problem any more. Conflict for one that has not
        failed; `models` as for `get`.
        """
        job = self.get(job_id, models)
        if job.state != "failed":
            raise Conflict(f"job {job_id} has not failed, so there is nothing to acknowledge: {job.state}")
        if not job.acknowledged:
            job.acknowledged = True
            logger.info("job %s: its failure is acknowledged by %s", job.id, requester())
        return job

    def cancel(self, job_id: str, models: Collection[str] | None = None) -> Job:
        """Tell a job to stop; it ends as failed. Conflict for one that has ended; `models` as for `get`."""
        job = self.get(job_id, models)
        if job.state != "running":
            raise Conflict(f"job {job_id} has ended: {job.state}")
        job.cancelled.set()
        with self._lock:
            self._changed.notify_all()
        return job

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel all jobs, and end the thread."""
        with self._lock:
            self._closed = True
            for job in self._active.values():
                job.cancelled.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._active, timeout=timeout_s)

    def _work(self) -> None:
        """Start each job in its turn; a job that was cancelled while it waited comes first, and only ends."""
        with self._lock:
            while not (self._closed and not self._active):
                job = self._next()
                if job is None:
                    self._changed.wait(_POLL_S if self._threads else None)
                    continue
                job.moved_s = time.monotonic()
                thread = Thread(target=self._run, args=(job,), name=f"tierstore-{job.kind}-{job.id}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no memory for its stack, or too many threads
                    self._ended(job, f"no thread could be started for it: {error}; try again")
                else:
                    self._threads[job.id] = thread

    def _next(self) -> Job | None:
        waiting = [job for job in self._active.values() if job.id not in self._threads]
        if (gone := next((job for job in waiting if job.cancelled.is_set()), None)) is not None:
            return gone
        of_kinds = (self._next_of([job for job in waiting if job.kind == kind], kind) for kind in get_args(Kind))
        return next((job for job in of_kinds if job is not None), None)

    def _next_of(self, waiting: list[Job], kind: Kind) -> Job | None:
        at_work = [job for id_ in self._threads if (job := self._active[id_]).kind == kind]
        if any(not job.cancelled.is_set() and time.monotonic() - job.moved_s < STUCK_S for job in at_work):
            return None
        busy = {job.model for job in at_work}
        return next((job for job in waiting if job.model not in busy), None)

    def _ended(self, job: Job, error: str) -> None:
        """Note the end of a job that never began. Holds the lock."""
        logger.error("job %s: %s", job.id, error)
        job.error, job.finished_s, job.state = error, time.time(), "failed"
        del self._active[job.id]
        self._keep(job)

    def _run(self, job: Job) -> None:
        self._work_on(job)
        with self._lock:
            del self._active[job.id], self._threads[job.id]
            self._keep(job)

    def _keep(self, job: Job) -> None:
        """Keep the record of a job that has ended. Holds the lock."""
        self._history[job.id] = job
        self.ended[job.kind, job.state] += 1
        self._changed.notify_all()

    def _work_on(self, job: Job) -> None:
        state = "failed"
        REQUESTER.set(f"job {job.id}" if job.requested_by is None else f"job {job.id} of {job.requested_by}")
        try:
            if job.cancelled.is_set():
                raise Closed("cancelled before it began")
            {"load": self._load, "export": self._export, "backup": self._backup}[job.kind](job)
            state = "done"
        except Exception as error:  # noqa: BLE001 - reported in the job, whatever it is
            job.error = message_of(error)
            log_failure(error, f"job {job.id} ({job.source})")
            if isinstance(error, TierstoreError):
                job.error_type = type(error).__name__
                logger.warning("job %s: the %s of %s failed: %s", job.id, job.kind, job.source, error)
        job.finished_s = time.time()
        job.state = state  # last: a reader that sees the end sees all of it

    def _load(self, job: Job) -> None:
        with job.holding():
            job.check()
            job.version = self._store.load_snapshot(
                job.source, activate=job.activate, progress=job.note, cancelled=job.cancelled, model=job.model
            )

    def _export(self, job: Job) -> None:
        report = self._store.export(job.model, job.source, **job.wanted, progress=job.note, cancelled=job.cancelled)
        job.version, job.seq, job.done = report.version, report.seq, report.rows

    def _backup(self, job: Job) -> None:
        report = self._store.backup(job.model, job.source, **job.wanted, progress=job.note, cancelled=job.cancelled)
        job.version, job.seq, job.report = report.version, report.seq, asdict(report)
