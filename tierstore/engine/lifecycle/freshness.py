"""The freshness of a model's answers, against its limit (`freshness_max_s`).

Answers that are too old are a problem in the status, but are still given: readiness does not change, since other nodes
are as old. Any thread.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tierstore.engine.deltas.newest_event import Event, NewestEvent
from tierstore.engine.lifecycle.state import ModelState


class Freshness:
    """The age of the newest delta of one model, and whether it is too old."""

    def __init__(self, state: ModelState, newest: NewestEvent) -> None:
        self._state, self._newest = state, newest
        self._max_s = state.shared.settings.quota_of(state.name).freshness_max_s

    def status(self) -> dict[str, Any]:
        """`last_event_time` (ISO 8601) of the newest visible delta, when it was received and from whom, `delta_age_s`
        since its event (or since its receipt, if earlier), and whether that is `fresh`.

        If the log has no such delta, the age is that of the active version's snapshot. None if it is unknown; `fresh`
        is None without a limit.
        """
        event, age_s = self._event(), self._age_s()
        return {
            "last_event_time": None if event is None else event.time.isoformat(),
            "last_received_time": None if event is None else event.received.isoformat(),
            "last_received_from": None if event is None else event.sender,
            "delta_age_s": age_s,
            "freshness_max_s": self._max_s,
            "fresh": None if age_s is None or not self._max_s else age_s <= self._max_s,
        }

    @property
    def problem(self) -> str | None:
        """The problem that the newest delta is too old; None if it is not, or if nothing serves."""
        if not self._max_s:
            return None
        age_s = self._age_s()
        if age_s is None or age_s <= self._max_s:
            return None
        event = self._event()
        what = "there is no delta since the snapshot"
        if event is not None:
            ahead = f", but came {event.received.isoformat()}" if event.time > event.received else ""
            what = f"the newest delta is of {event.time.isoformat()}{ahead}"
        return f"answers are not fresh: {what}, and freshness_max_s is {self._max_s:g}"

    def _event(self) -> Event | None:
        view = self._state.live.current
        return None if view is None else self._newest.at(view.seq)

    def _age_s(self) -> float | None:
        view = self._state.live.current
        if view is None:
            return None
        event = self._newest.at(view.seq)
        since = view.open_version.info.manifest.created_at if event is None else event.since
        return None if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
