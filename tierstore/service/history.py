"""The last hour of a service: requests, latencies, errors and keys in steps of a quarter of a minute, and changes.

`History` is an observer: the store's sampler tells it that time has passed, and it reads counters that exist anyway,
so that look-ups do nothing for it. Any thread may read. After a restart only the changes are known, from the audit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from tierstore.engine.data.hour import HOUR_S, Hour
from tierstore.engine.data.insight import read_keys
from tierstore.engine.events.observer import Observer
from tierstore.engine.serving.routing import Routing
from tierstore.errors import FAULTS, NO_VERSION, TierstoreError
from tierstore.service.stats import REQUEST_BOUNDS_S, InferenceStats, ModelCounts, RequestTimes, bucket_quantiles
from tierstore.types import model_and_head

log = logging.getLogger(__name__)

STEP_S = 15
_FAILURES = (*FAULTS, "overloaded")
_BUCKETS = len(REQUEST_BOUNDS_S) + 1
_OF_REQUESTS, _OF_KEYS = ("requests", "failed"), ("keys", "read", "absent")
_COUNTERS = (*_OF_REQUESTS, *_OF_KEYS, "deltas")  # behind the buckets of latencies
_OF_VERSION = _BUCKETS + len(_OF_REQUESTS)
_ROLES = ("active", "canary")
_MINUTE = 60 // STEP_S  # steps
_LEVELS = ("version", "seq")
_NOT_SHOWN = ("prune", "delta")  # changes that are not shown: housekeeping, and what `deltas` counts


class _Version:
    """Totals of the requests that a version answered."""

    def __init__(self) -> None:
        self.hour = Hour(_OF_VERSION, 0, STEP_S)
        self.sums = np.zeros(_OF_VERSION, np.int64)


class _Model:
    """Totals of a model's requests and keys, however its versions and tables come and go."""

    def __init__(self) -> None:
        self.hour = Hour(_BUCKETS + len(_COUNTERS), len(_LEVELS), STEP_S)
        self.versions: dict[int, _Version] = {}  # of the last hour; replaced as a whole, so any thread may read
        self._sums = np.zeros(_BUCKETS + len(_COUNTERS), np.int64)
        self._before: dict[
            Hashable, np.ndarray
        ] = {}  # of versions by name and number and of tables by name, when they were last seen
        self._noted_s: float | None = None

    @property
    def nbytes(self) -> int:
        return self.hour.nbytes + sum(version.hour.nbytes for version in self.versions.values())

    def note(
        self,
        now_s: float,
        versions: Mapping[tuple[str, int], ModelCounts],
        tables: dict[str, dict[str, int]],
        deltas: int,
        *levels: int,
    ) -> int:
        """Note a step. Returns how many keys were looked up in it.

        `versions` are by the name under which they were requested, the model's or a head's, and their number.
        """
        keys = -int(self._sums[_OF_VERSION])
        for (name, number), counts in versions.items():
            outcomes = counts.outcomes.copy()
            failed = sum(outcomes.get(outcome, 0) for outcome in _FAILURES)
            grown = self._grown((name, number), [*counts.seconds.counts, sum(outcomes.values()), failed])
            self._sums[:_OF_VERSION] += grown
            if grown.any():
                self._version(number).sums += grown
        for name, tiers in tables.items():
            self._sums[_OF_VERSION:-1] += self._grown(name, [sum(tiers.values()), read_keys(tiers), tiers["absent"]])
        for gone in [one for one in self._before if isinstance(one, tuple) and one not in versions]:
            del self._before[gone]
        self._sums[-1] = deltas
        self.hour.note(now_s, [*self._sums.tolist(), *levels])
        for version in self.versions.values():
            version.hour.note(now_s, version.sums.tolist())
        self.versions = {number: one for number, one in self.versions.items() if one.hour.steps()[:, 2:].any()}
        self._noted_s = now_s
        return keys + int(self._sums[_OF_VERSION])

    def _version(self, number: int) -> _Version:
        """The counts of a version; their first step begins where the model's last one ended."""
        if number not in self.versions:
            made = _Version()
            if self._noted_s is not None:
                made.hour.note(self._noted_s, made.sums.tolist())
            self.versions = {**self.versions, number: made}
        return self.versions[number]

    def _grown(self, what: Hashable, counted: list[int]) -> np.ndarray:
        """The counts of `what` since it was last seen; all of them if it is new, or its counts began anew."""
        now, before = np.array(counted, np.int64), self._before.get(what)
        self._before[what] = now
        return now if before is None or (now < before).any() else now - before


class History(Observer):
    """The last hour of one service. `refresh` brings its counters up to date. One thread tells it the time."""

    def __init__(self, store: Any, stats: InferenceStats, times: RequestTimes, refresh: Callable[[], None]) -> None:
        self._store, self._stats, self._times, self._refresh = store, stats, times, refresh
        self._all = Hour(_BUCKETS + 3, 0, STEP_S)
        self._models: dict[str, _Model] = {}
        self._deltas: Counter[str] = Counter()  # visible deltas by model; those of one model come one by one
        self._keys = 0  # keys looked up in all models
        self._step = -1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, approximately."""
        return self._all.nbytes + sum(model.nbytes for model in list(self._models.values()))

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        self._deltas[model] += 1

    def time_passed(self, now_s: float) -> None:
        if self._step == (step := int(now_s // STEP_S)):
            return
        self._step = step
        try:
            self._note(now_s)
        except Exception:
            log.exception("the history of the last hour lacks a step")

    def _note(self, now_s: float) -> None:
        self._refresh()
        whole = self._times.of_data_plane()
        versions: dict[str, dict[tuple[str, int], ModelCounts]] = {}
        for name, number, counts in self._stats.by_version():
            if number != NO_VERSION:
                versions.setdefault(model_and_head(name)[0], {})[name, number] = counts
        there = self._store.models()
        for gone in self._models.keys() - set(there):
            del self._models[gone]
        for name in there:
            try:
                model = self._store.model(name)
            except TierstoreError:  # it goes at this moment
                continue
            view = model.served.active
            levels = (0, 0) if view is None else (view.version, view.seq)
            kept = self._models.setdefault(name, _Model())
            self._keys += kept.note(now_s, versions.get(name, {}), model.looked_up(), self._deltas[name], *levels)
        self._all.note(now_s, [*whole["counts"], whole["failed"], self._keys, round(1000 * time.process_time())])

    def last_minute(self) -> dict[str, Any]:
        """Requests of the data plane in the last minute, by completed steps: their number, failures, p50 and p99 in
        seconds; keys, and seconds of processors. `at_s`: the end of the last step.
        """
        steps = self._all.steps(_MINUTE)
        counted = steps.sum(axis=0)
        buckets, (failed, keys, cpu_ms) = counted[2 : 2 + _BUCKETS], counted[2 + _BUCKETS :].tolist()
        return {
            "at_s": int(steps[-1, 0]) if len(steps) else None,
            "seconds": int(counted[1]),
            "requests": int(buckets.sum()),
            "failed": failed,
            "keys": keys,
            "cpu_s": cpu_ms / 1000,
            **_latencies(buckets),
        }

    def document(self, model: str, now_s: float, *, to_admin: bool) -> dict[str, Any]:
        """The data for the status page's charts of a model, see docs/http-api.md.

        Only admins see who has made a change, and from where.
        """
        kept = self._models.get(model) or _Model()
        steps = kept.hour.steps()
        lines = [line for line in self._store.audit.latest(0.0) if line.get("model") == model]
        return {
            "step_s": STEP_S,
            "minute": _summed(steps[-_MINUTE:]),
            "hour": _summed(steps),
            "steps": {"at_s": steps[:, 0].tolist(), "seconds": steps[:, 1].tolist(), **_columns(steps)},
            **_versions(self._store.model(model).served, kept.versions, lines, steps),
            "changes": _changes([line for line in lines if line["at_s"] >= now_s - HOUR_S], to_admin=to_admin),
        }


def _columns(steps: np.ndarray) -> dict[str, list[Any]]:
    """The numbers of steps, a list for each."""
    buckets, behind = steps[:, 2 : 2 + _BUCKETS], steps[:, 2 + _BUCKETS :]
    columns = dict(zip((*_COUNTERS, *_LEVELS), behind.T.tolist(), strict=False))
    return {**columns, **{name: [*map(_rounded, bucket_quantiles(q, buckets).tolist())] for name, q in _SHOWN}}


def _summed(steps: np.ndarray) -> dict[str, Any]:
    """Several steps added together."""
    columns = steps.sum(axis=0, keepdims=True)
    return {
        "seconds": int(columns[0, 1]),
        **{name: of[0] for name, of in _columns(columns).items() if name not in _LEVELS},
    }


def _versions(
    served: Routing, counted: Mapping[int, _Version], lines: list[dict[str, Any]], whole: np.ndarray
) -> dict[str, Any]:
    """The versions that serve or were requested, newest first, over one time: since there is a canary, or the last
    hour.
    """
    roles = {view.version: role for role, view in zip(_ROLES, (served.active, served.canary), strict=True) if view}
    since = {number: _since(lines, number, role) for number, role in roles.items()}
    canary = None if served.canary is None else since[served.canary.version]
    at_s: list[int] = whole[:, 0].tolist()
    last_s = max(at_s, default=0)
    begins_s = max([*(whole[:1, 0] - whole[:1, 1]).tolist(), *([] if canary is None else [canary])], default=0)
    found = []
    for number in sorted({*roles, *counted}, reverse=True):
        steps = (counted.get(number) or _Version()).hour.steps()
        columns, place = _columns(steps), dict(zip(steps[:, 0].tolist(), range(len(steps)), strict=True))
        found.append(
            {
                "version": number,
                "state": roles.get(number),
                "share": {"canary": served.share, "active": 1.0 - served.share}.get(roles.get(number, "")),
                "since_s": since.get(number),
                **_summed(steps[steps[:, 0] > begins_s]),
                "minute": _summed(steps[steps[:, 0] > last_s - 60]),
                "steps": {
                    name: [columns[name][place[at]] if at in place else None for at in at_s]
                    for name in ("requests", "failed", "p99_s")
                },
            }
        )
    return {"versions_since_s": begins_s or None, "versions": found}


def _since(lines: list[dict[str, Any]], number: int, role: str) -> float | None:
    """When a version got its present role; None if the end of the audit does not say."""
    for line in reversed(lines):
        before, after = line.get("before") or {}, line.get("after") or {}
        if after.get(role) == number != before.get(role):
            return float(line["at_s"])
    return None


def _changes(lines: list[dict[str, Any]], *, to_admin: bool) -> list[dict[str, Any]]:
    """Changes of a model, and failed attempts, newest first."""
    found = []
    for line in lines:
        if line["what"] in _NOT_SHOWN or line["outcome"] == "refused":
            continue
        before, after = line.get("before") or {}, line.get("after") or {}
        entry = {
            name: line.get(name) for name in ("at_s", "what", "outcome", "version", "share", "label", "to_seq", "error")
        }
        entry |= {"active_before": before.get("active"), "active_after": after.get("active")}
        if to_admin:
            entry |= {name: line.get(name) for name in ("who", "source", "directory")}
        found.append({name: value for name, value in entry.items() if value is not None})
    return found[::-1]


_SHOWN = (("p50_s", 0.5), ("p99_s", 0.99))


def _latencies(buckets: np.ndarray) -> dict[str, float | None]:
    """p50 and p99 in seconds of requests counted by bucket, int64 [buckets]; None without any."""
    return {name: _rounded(float(bucket_quantiles(q, buckets[None])[0])) for name, q in _SHOWN}


def _rounded(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(f"{seconds:.3g}")
