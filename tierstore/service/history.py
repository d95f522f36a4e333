"""The last hour of a service: requests, latencies, errors and keys in steps of a quarter of a
minute, and what was changed.

`History` is an observer: the store's sampler tells it that time has passed, and it reads counters that are
kept anyway, so that look-ups do nothing for it. Any thread may read. Nothing survives the process but the
changes, which are in the audit.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from tierstore.engine.data.hour import HOUR_S, Hour
from tierstore.engine.data.insight import read_keys
from tierstore.engine.events.observer import Observer
from tierstore.errors import FAULTS, TierstoreError
from tierstore.service.stats import REQUEST_BOUNDS_S, InferenceStats, ModelCounts, RequestTimes, bucket_quantiles

log = logging.getLogger(__name__)

STEP_S = 15
_FAILURES = (*FAULTS, "overloaded")
_BUCKETS = len(REQUEST_BOUNDS_S) + 1
_OF_REQUESTS, _OF_KEYS = ("requests", "failed"), ("keys", "read", "absent")
_COUNTERS = (*_OF_REQUESTS, *_OF_KEYS, "deltas")  # behind the buckets of latencies
_LEVELS = ("version", "seq")
_NOT_SHOWN = ("prune", "delta")  # of changes: housekeeping, and what `deltas` counts


class _Model:
    """What the requests and keys of a model have come to, however its versions and tables come and go."""

    def __init__(self) -> None:
        self.hour = Hour(_BUCKETS + len(_COUNTERS), len(_LEVELS), STEP_S)
        self._sums = np.zeros(_BUCKETS + len(_COUNTERS), np.int64)
        self._before: dict[
            Hashable, np.ndarray
        ] = {}  # of versions by number and of tables by name, when they were last seen

    def note(
        self,
        now_s: float,
        versions: dict[int, ModelCounts],
        tables: dict[str, dict[str, int]],
        deltas: int,
        *levels: int,
    ) -> None:
        for number, counts in versions.items():
            outcomes = counts.outcomes.copy()
            failed = sum(outcomes.get(outcome, 0) for outcome in _FAILURES)
            self._add(number, slice(0, _BUCKETS + 2), [*counts.seconds.counts, sum(outcomes.values()), failed])
        for name, keys in tables.items():
            self._add(name, slice(_BUCKETS + 2, -1), [sum(keys.values()), read_keys(keys), keys["absent"]])
        for gone in [one for one in self._before if isinstance(one, int) and one not in versions]:
            del self._before[gone]
        self._sums[-1] = deltas
        self.hour.note(now_s, [*self._sums.tolist(), *levels])

    def _add(self, what: Hashable, where: slice, counted: list[int]) -> None:
        """Add what was counted since `what` was last seen; all of it where that was never, or
        where its counts began anew.
        """
        now, before = np.array(counted, np.int64), self._before.get(what)
        self._sums[where] += now if before is None or (now < before).any() else now - before
        self._before[what] = now


class History(Observer):
    """The last hour of one service. `refresh` brings its counters up to now. One thread tells it of the time."""

    def __init__(self, store: Any, stats: InferenceStats, times: RequestTimes, refresh: Callable[[], None]) -> None:
        self._store, self._stats, self._times, self._refresh = store, stats, times, refresh
        self._all = Hour(_BUCKETS + 1, 0, STEP_S)
        self._models: dict[str, _Model] = {}
        self._deltas: Counter[str] = Counter()  # that have become visible, by model: the deltas of one come one by one
        self._step = -1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, but for small change."""
        return self._all.nbytes + sum(model.hour.nbytes for model in list(self._models.values()))

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
        self._all.note(now_s, [*whole["counts"], whole["failed"]])
        versions: dict[str, dict[int, ModelCounts]] = {}
        for model, number, counts in self._stats.by_version():
            versions.setdefault(model, {})[number] = counts
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
            kept.note(now_s, versions.get(name, {}), model.looked_up(), self._deltas[name], *levels)

    def last_minute(self) -> dict[str, Any]:
        """Requests of the data plane in the last minute, as far as steps have ended: how many,
        failures, p50 and p99 in seconds.
        """
        counted = self._all.steps(60 // STEP_S).sum(axis=0)
        buckets = counted[2 : 2 + _BUCKETS]
        return {
            "seconds": int(counted[1]),
            "requests": int(buckets.sum()),
            "failed": int(counted[-1]),
            **_latencies(buckets),
        }

    def document(self, model: str) -> dict[str, Any]:
        """`{"step_s", "hour", "steps"}` of a model: the hour as one, and its steps, a list for each of
        their numbers, oldest first.
        """
        kept = self._models.get(model)
        steps = (_Model() if kept is None else kept).hour.steps()
        buckets, behind = steps[:, 2 : 2 + _BUCKETS], steps[:, 2 + _BUCKETS :]
        columns = dict(zip((*_COUNTERS, *_LEVELS), behind.T.tolist(), strict=True))
        whole = {name: sum(columns[name]) for name in _COUNTERS}
        return {
            "step_s": STEP_S,
            "hour": {"seconds": int(steps[:, 1].sum()), **whole, **_latencies(buckets.sum(axis=0))},
            "steps": {
                "at_s": steps[:, 0].tolist(),
                "seconds": steps[:, 1].tolist(),
                **columns,
                **{name: [_rounded(value) for value in bucket_quantiles(q, buckets).tolist()] for name, q in _SHOWN},
            },
        }

    def changes(self, model: str, now_s: float, *, to_admin: bool) -> list[dict[str, Any]]:
        """What was changed of a model in the last hour, or tried in vain, newest first; who did it,
        and from where, is for admins.
        """
        found = []
        for line in self._store.audit.latest(now_s - HOUR_S):
            if line.get("model") != model or line["what"] in _NOT_SHOWN or line["outcome"] == "refused":
                continue
            before, after = line.get("before") or {}, line.get("after") or {}
            entry = {
                name: line.get(name)
                for name in ("at_s", "what", "outcome", "version", "share", "label", "to_seq", "error")
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
