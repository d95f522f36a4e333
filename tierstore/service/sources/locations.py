"""Snapshots from watched locations: the newest complete one of each model is loaded, and used as a policy says.

One thread for each location looks there, and loads by the jobs of the service; one more judges canaries. They start
with the service and end with it. The state of a version is recorded before the next step (`location_record.py`), so a
restart goes on from there.

No version is loaded twice. A version is not activated if it is older than one that was active, or if a person made a
change meanwhile: then it is kept, and the status says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.events.changes import REQUESTER
from tierstore.engine.events.observer import Observer
from tierstore.errors import Closed, Conflict, NotFound, Overloaded, TierstoreError
from tierstore.formats.names import DataDirectory
from tierstore.formats.snapshot.found import Finder, FoundSnapshot, fingerprint
from tierstore.service.error_status import log_failure, message_of
from tierstore.service.families import counter, gauge
from tierstore.service.limits.jobs import Jobs
from tierstore.service.sources.location_record import LocationRecords
from tierstore.service.stats import InferenceStats
from tierstore.threads import Thread
from tierstore.verdicts import CanaryTrial

logger = logging.getLogger(__name__)

TRIAL_POLL_S = 1.0
_JOB_POLL_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 3600.0  # for a version that cannot be loaded
_LONGEST_WAIT_S = 60.0  # for a version that something else blocks


@dataclass(slots=True)
class _Failure:
    """Why a snapshot was not loaded, or not used as it should be; tried again when it changes, or later."""

    error: str
    source: Path | str
    content: str | None  # its fingerprint
    pause_s: float
    retry_s: float


@dataclass(slots=True)
class _Place:
    """One location. Only for its thread, except what the status reads."""

    finder: Finder
    state: str = "not looked at yet"
    problem: str | None = None
    looked_at_s: float | None = None
    found: int = 0
    failures: dict[str, _Failure] = field(default_factory=dict)  # by model

    @property
    def name(self) -> str:
        return str(self.finder.location)

    def problems(self) -> Iterator[str]:
        if self.problem is not None:
            yield self.problem
        yield from (f"{source}: {problem}" for source, problem in list(self.finder.problems.items()))
        yield from (f"{failure.source}: {failure.error}" for failure in list(self.failures.values()))


class _Hold(Exception):
    """The version stays loaded and is not activated; the text says why."""


class Locations(Observer):
    """Follows the locations of `settings` until closed. `status`, `families` and `close`: any thread."""

    def __init__(
        self, store: Any, jobs: Jobs, stats: InferenceStats, settings: Settings, *, poll_s: float | None = None
    ) -> None:
        self._store, self._jobs, self._stats, self._settings = store, jobs, stats, settings
        self._poll_s = settings.watch_snapshots_s if poll_s is None else poll_s
        self._records = LocationRecords(DataDirectory(Path(settings.data).absolute()).watched)
        locations = [of.absolute() if isinstance(of, Path) else of for of in settings.watch_snapshots]
        self._places = [_Place(Finder(location)) for location in locations]
        self._busy: set[str] = set()  # models that a thread loads; under the lock of the records
        self._trials: dict[str, CanaryTrial] = {}  # for the thread that judges
        self._stop = threading.Event()
        self._counts = threading.Lock()
        self.loaded = self.errors = 0  # under _counts
        store.observers.append(self)
        self._threads = [*(self._thread(self._follow, of) for of in self._places), self._thread(self._judge_all)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _thread(work: Callable[..., None], *args: Any) -> threading.Thread:
        return Thread(target=work, args=args, name="tierstore-locations", daemon=True)

    def version_switched(self, model: str, old: int | None, new: int | None) -> None:
        """See Observer. A version older than one that was active is never activated automatically."""
        with self._records.lock:
            record = self._records.of(model)
            record.seen, record.problem = max(record.seen, old or 0, new or 0), None

    def status(self) -> dict[str, Any]:
        """The snapshots of each location, their state, and faults."""
        places = [
            {
                "location": place.name,
                "state": place.state,
                "looked_at": place.looked_at_s,
                "snapshots": place.found,
                "problems": list(place.problems()),
            }
            for place in self._places
        ]
        models = {
            model: {
                "seen": record.seen,
                "pending": record.pending,
                "canary": record.canary,
                "last": record.last,
                "problem": record.problem,
            }
            for model, record in self._records.models().items()
        }
        return {
            "locations": places,
            "loaded": self.loaded,
            "errors": self.errors,
            "models": models,
            "problems": self.problems(),
        }

    def problems(self) -> list[str]:
        """Why locations cannot be followed, for the health of the service."""
        found = [f"watched {place.name}: {problem}" for place in self._places for problem in place.problems()]
        return found + [f"{model}: {of.problem}" for model, of in self._records.models().items() if of.problem]

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        name = "tierstore_watched_snapshots"
        yield counter(f"{name}_loaded", "Snapshots loaded from watched locations.", self.loaded)
        yield counter(
            f"{name}_errors",
            "Failed attempts to load or activate a snapshot of a watched location, or to list the location.",
            self.errors,
        )
        text = "Watched locations that cannot be followed now, and canaries of theirs that were withdrawn."
        yield gauge(f"{name}_problems", text, len(self.problems()))

    def close(self, timeout_s: float = 10.0) -> None:
        """End. A running load is left to the jobs, and continued after a restart."""
        self._stop.set()
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if self in self._store.observers:
            self._store.observers.remove(self)

    # --- the threads of locations

    def _follow(self, place: _Place) -> None:
        REQUESTER.set(f"watch of {place.name}")
        while not self._stop.is_set():
            try:
                self._look(place)
            except Exception as error:  # noqa: BLE001 - the thread must outlive whatever it meets
                self._report(place, error)
            self._stop.wait(self._poll_s)

    def _report(self, place: _Place, error: Exception) -> None:
        if self._stop.is_set():
            return
        text = message_of(error)
        place.state = "cannot be read"
        self._count_error()
        if text != place.problem:
            place.problem = text
            log_failure(error, f"watching {place.name}")
            logger.warning("watching %s: %s", place.name, text)

    def _look(self, place: _Place) -> None:
        try:
            found = place.finder.find(self._floor)
            place.state = "followed"
        except FileNotFoundError:
            found, place.state = [], "nothing there yet"
        place.problem, place.looked_at_s = None, time.time()
        newest: dict[str, FoundSnapshot] = {}
        for snapshot in sorted(found, key=lambda of: of.version):
            newest[snapshot.model] = snapshot
        place.found = len(found)
        for model in set(place.failures) - set(newest):
            del place.failures[model]  # the snapshot that could not be loaded is gone
        for snapshot in newest.values():
            if self._stop.is_set():
                return
            self._consider(place, snapshot)
        self._records.save()

    def _floor(self, model: str) -> int:
        """Versions up to this one are not loaded, except the pending one."""
        record = self._records.of(model)
        seen = max(record.seen, self._active(model) or 0)
        return seen if record.pending is None else min(seen, record.pending - 1)

    def _active(self, model: str) -> int | None:
        try:
            active: int | None = self._store.model(model).active_version
        except NotFound:
            return None
        return active

    def _consider(self, place: _Place, snapshot: FoundSnapshot) -> None:
        """Load the newest snapshot of a model, unless that was done, or failed a moment ago."""
        model = snapshot.model
        record = self._records.of(model)
        if snapshot.version <= self._floor(model):
            place.failures.pop(model, None)
            return
        if record.canary is not None:
            return  # its trial goes on
        failure = place.failures.get(model)
        if failure is not None and failure.source == snapshot.source and time.monotonic() < failure.retry_s:
            place.finder.forget(snapshot.source)  # it may be removed, or written again
            if failure.content != _fingerprint(snapshot.source):
                failure.pause_s, failure.retry_s = _FIRST_PAUSE_S / 2, 0.0
            return
        with self._records.lock:
            if model in self._busy:
                return  # another location has it, too
            self._busy.add(model)
        try:
            if snapshot.version > self._floor(model):
                self._bring(snapshot)
            place.failures.pop(model, None)
        except Overloaded as error:  # the queue of jobs is full
            logger.info("watching %s: %s", place.name, error)
        except Exception as error:  # noqa: BLE001 - reported, and tried again
            self._fail(place, snapshot, error)
        finally:
            with self._records.lock:
                self._busy.discard(model)

    def _fail(self, place: _Place, snapshot: FoundSnapshot, error: Exception) -> None:
        if self._stop.is_set():
            return
        before = place.failures.get(snapshot.model)
        again = before is not None and before.source == snapshot.source
        longest_s = _LONGEST_WAIT_S if isinstance(error, Conflict) else _LONGEST_PAUSE_S
        pause_s = min(longest_s, 2 * before.pause_s) if before is not None and again else _FIRST_PAUSE_S
        text = message_of(error)
        place.finder.forget(snapshot.source)
        place.failures[snapshot.model] = _Failure(
            text, snapshot.source, _fingerprint(snapshot.source), pause_s, time.monotonic() + pause_s
        )
        self._count_error()
        if before is None or before.error != text:
            log_failure(error, f"watching {place.name}")
            logger.warning("watching %s: %s: %s", place.name, snapshot.source, text)

    def _bring(self, snapshot: FoundSnapshot) -> None:
        """Load a snapshot and use it as the policy says."""
        model, version = snapshot.model, snapshot.version
        record = self._records.of(model)
        kept = model in self._store.models() and version in self._store.model(model).versions
        if kept and record.pending != version:
            self._done(model, version, f"version {version} was there already")
            return
        try:
            if not kept:
                self._load(snapshot)
            last = self._activate(model, version)
        except _Hold as hold:
            last = str(hold)
        self._done(model, version, last)

    def _load(self, snapshot: FoundSnapshot) -> None:
        model, version = snapshot.model, snapshot.version
        record = self._records.of(model)
        with self._records.lock:
            record.pending, record.beside = version, self._active(model)
            record.last, record.problem = f"version {version} is being loaded", None
        self._records.save()
        try:
            job = self._jobs.submit(model, snapshot.source, activate=False)
            while job.state == "running":
                record.last = f"version {version} is being loaded{job.waits}"
                if self._stop.wait(_JOB_POLL_S):
                    raise Closed("the service is shutting down")
            if job.cancelled.is_set() and not self._stop.is_set():
                raise _Hold(f"the load of version {version} was cancelled")
            if job.state != "done":
                raise TierstoreError(job.error or "the load failed")
        except BaseException:
            if not self._stop.is_set():  # otherwise the next start goes on
                with self._records.lock:
                    record.pending = None
            raise
        with self._counts:
            self.loaded += 1

    def _activate(self, model: str, version: int) -> str:
        """Use a loaded version as the policy says. Returns its new state; _Hold if it stays kept."""
        policy = self._settings.snapshot_policy(model)
        record, active = self._records.of(model), self._active(model)
        if active == version:
            return f"version {version} is active"
        if active != record.beside or (active or 0) > version:
            raise _Hold(f"version {version} is loaded and kept: version {active} was made active meanwhile")
        if policy.watch_activate == "hold":
            raise _Hold(f"version {version} is loaded and kept, as the policy says")
        if policy.watch_activate == "now" or active is None:
            self._store.activate(model, version)
            return f"version {version} is active"
        self._store.canary(model, version, policy.canary_share)
        with self._records.lock:
            record.canary = version
        return f"version {version} is the canary, to be promoted after {policy.canary_minutes:g} minutes without errors"

    def _done(self, model: str, version: int, last: str) -> None:
        with self._records.lock:
            record = self._records.of(model)
            record.seen, record.pending, record.last = max(record.seen, version), None, last
        self._records.save()
        logger.info("model %s: %s", model, last)

    def _count_error(self) -> None:
        with self._counts:
            self.errors += 1

    # --- the thread that judges canaries

    def _judge_all(self) -> None:
        REQUESTER.set("watch of canaries")
        while not self._stop.wait(min(TRIAL_POLL_S, self._poll_s)):
            for model, record in self._records.models().items():
                if record.canary is None:
                    self._trials.pop(model, None)
                    continue
                try:
                    self._judge(model, record.canary)
                except Exception as error:  # noqa: BLE001 - as in `_follow`; looked at again
                    self._count_error()
                    log_failure(error, f"the canary of {model}")
                    logger.warning("the canary of %s: %s", model, error)

    def _judge(self, model: str, version: int) -> None:
        """Promote or withdraw the canary that a location brought, if it is time; forget it if a person did."""
        held = self._store.model(model)
        served, on_record = held.served, held.routes.canary
        active = None if served.active is None else served.active.version
        if on_record != version or active != self._records.of(model).beside:
            is_active = active == version
            self._end_trial(model, f"version {version} {'is active' if is_active else 'is no longer the canary'}")
            return
        if served.canary is None:
            self._withdraw(model, version, f"it cannot be opened: {held.problem}")
            return
        self._store.epochs.collect()
        now = self._stats.requests(model, version), self._stats.requests(model, active)
        trial = self._trials.get(model)
        if trial is None:
            trial = self._trials[model] = CanaryTrial(*now)
        verdict, words = trial.look(*now, self._settings.snapshot_policy(model).canary_minutes)
        if verdict == "bad":
            self._withdraw(model, version, words)
        elif verdict == "good":
            self._store.promote(model)
            self._end_trial(model, f"version {version} is active, promoted from canary: {words}")

    def _withdraw(self, model: str, version: int, why: str) -> None:
        self._store.withdraw(model)
        problem = f"version {version} was the canary and is withdrawn: {why}"
        self._count_error()
        logger.warning("model %s: %s", model, problem)
        self._end_trial(model, problem, problem)

    def _end_trial(self, model: str, last: str, problem: str | None = None) -> None:
        with self._records.lock:
            record = self._records.of(model)
            record.canary, record.beside, record.last, record.problem = None, None, last, problem
        self._trials.pop(model, None)
        self._records.save()


def _fingerprint(source: Path | str) -> str | None:
    try:
        return fingerprint(source)
    except (TierstoreError, OSError):
        return None
