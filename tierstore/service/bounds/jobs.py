"""Loads that run in the background: one at a time, a bounded queue, a bounded history.

One that does not get on (a mount that hangs, say) lets those of other models pass it, so at times more than one is at work.

`Jobs` may be used from any thread; each load runs on a thread of its own. Jobs do not survive a restart: a load that was cut off
leaves nothing behind, and is asked for again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from tierstore.engine.changes import ASKED_BY
from tierstore.errors import Closed, Conflict, NotFound, Overloaded, TierstoreError
from tierstore.service.status import as_text, log_failure, message_of
from tierstore.types import Progress

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 16  # running ones included
HISTORY_LIMIT = 256
STUCK_S = 60.0  # without a step forward: then the next one begins beside it
_POLL_S = 0.5


@dataclass(slots=True)
class Job:
    """One load. Written by the jobs' thread (and under the lock where it is queued); a reader may see a step late."""

    id: str
    model: str
    source: Path
    activate: bool
    asked_by: str | None = None
    created_s: float = field(default_factory=time.time)
    state: str = "running"
    phase: str = "queued"
    done: int = 0
    total: int = 0
    error: str | None = None
    version: int | None = None
    finished_s: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    phase_began_s: float = field(default_factory=time.monotonic)
    phase_began_at: int = 0
    moved_s: float = 0.0  # when it got on last; 0 before it begins

    def note(self, progress: Progress) -> None:
        """Take the loader's progress; the rate is that of the phase."""
        if (progress.phase, progress.done) != (self.phase, self.done):
            self.moved_s = time.monotonic()
        if progress.phase != self.phase:
            self.phase, self.phase_began_s, self.phase_began_at = progress.phase, time.monotonic(), progress.done
        self.done, self.total = progress.done, progress.total

    def document(self) -> dict[str, Any]:
        """The job as `/admin/jobs/{id}` shows it; `rate` in rows a second, `eta_s` to the end of the phase."""
        running = self.state == "running"
        elapsed_s = time.monotonic() - self.phase_began_s
        moved = self.done - self.phase_began_at
        rate = moved / elapsed_s if running and moved > 0 and elapsed_s > 0 else None
        return {
            "job": self.id,
            "model": self.model,
            "source": as_text(str(self.source)),
            "activate": self.activate,
            "state": self.state,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "rate": rate,
            "eta_s": (self.total - self.done) / rate if rate and self.total >= self.done else None,
            "error": self.error,
            "version": self.version,
            "created_at": self.created_s,
            "finished_at": self.finished_s,
        }


class Jobs:
    """The queue, its thread and the history."""

    limit = QUEUE_LIMIT

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        # guarded by _lock
        self._active: dict[str, Job] = {}
        self._history: LRUCache[str, Job] = LRUCache(HISTORY_LIMIT)
        self._closed = False
        self._threads: dict[str, threading.Thread] = {}  # of those at work, by id
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._work, name="tierstore-jobs", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that have not ended."""
        return len(self._active)

    def submit(self, model: str, source: Path, *, activate: bool) -> Job:
        """Queue a load. Overloaded when the queue is full."""
        job = Job(uuid.uuid4().hex[:16], model, source, activate, ASKED_BY.get())
        with self._lock:
            if self._closed:
                raise Closed("the service is shutting down")
            if len(self._active) >= QUEUE_LIMIT:
                raise Overloaded(f"{QUEUE_LIMIT} loads wait already; try again when one is done", retry_after_s=10.0)
            self._active[job.id] = job
            self._changed.notify_all()
        return job

    def get(self, job_id: str) -> Job:
        """A job that runs, waits, or ended lately. NotFound otherwise."""
        with self._lock:
            job = self._active.get(job_id) or self._history.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id[:40]!r}; the last {HISTORY_LIMIT} are kept, and none across a restart")
        return job

    def all(self) -> list[Job]:
        """Every known job, the latest first."""
        with self._lock:
            jobs = [*self._active.values(), *self._history.values()]
        return sorted(jobs, key=lambda job: job.created_s, reverse=True)

    def cancel(self, job_id: str) -> Job:
        """Ask a load to stop; it ends as failed. Conflict for one that has ended."""
        job = self.get(job_id)
        if job.state != "running":
            raise Conflict(f"job {job_id} has ended: {job.state}")
        job.cancelled.set()
        with self._lock:
            self._changed.notify_all()
        return job

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what runs and what waits, and end the thread."""
        with self._lock:
            self._closed = True
            for job in self._active.values():
                job.cancelled.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._active, timeout=timeout_s)

    def _work(self) -> None:
        """Begin each load in its turn; those that were cancelled while they waited need none."""
        with self._lock:
            while not (self._closed and not self._active):
                job = self._next()
                if job is None:
                    self._changed.wait(_POLL_S if self._threads else None)
                    continue
                job.moved_s = time.monotonic()
                thread = threading.Thread(target=self._run, args=(job,), name=f"tierstore-load-{job.id}", daemon=True)
                self._threads[job.id] = thread
                thread.start()

    def _next(self) -> Job | None:
        waiting = [job for job in self._active.values() if job.id not in self._threads]
        if (gone := next((job for job in waiting if job.cancelled.is_set()), None)) is not None:
            return gone
        at_work = [self._active[id_] for id_ in self._threads]
        if any(not job.cancelled.is_set() and time.monotonic() - job.moved_s < STUCK_S for job in at_work):
            return None
        busy = {job.model for job in at_work}
        return next((job for job in waiting if job.model not in busy), None)

    def _run(self, job: Job) -> None:
        self._load(job)
        with self._lock:
            del self._active[job.id], self._threads[job.id]
            self._history[job.id] = job
            self._changed.notify_all()

    def _load(self, job: Job) -> None:
        state = "failed"
        ASKED_BY.set(f"job {job.id}" if job.asked_by is None else f"job {job.id} of {job.asked_by}")
        try:
            if job.cancelled.is_set():
                raise Closed("cancelled before it began")
            job.version = self._store.load_snapshot(
                job.source, activate=job.activate, progress=job.note, cancelled=job.cancelled, model=job.model
            )
            state = "done"
        except Exception as error:  # noqa: BLE001 - reported in the job, whatever it is
            job.error = message_of(error)
            log_failure(error, f"job {job.id} ({job.source})")
            if isinstance(error, TierstoreError):
                logger.warning("job %s: %s was not loaded: %s", job.id, job.source, error)
        job.finished_s = time.time()
        job.state = state  # last: who sees the end sees all of it
