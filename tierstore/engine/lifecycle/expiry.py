"""Expiry: a check of the row times of each served version, after it is opened and then every `ttl_check_s`.

A clock that is wrong during one check must not delete a table. So expired rows are counted first. If a table would
lose more than a share (`ttl_most_share`, or what expires evenly since the last check), none of them is deleted: `check`
fails until the clock was set, the next check is due, or the setting allows it. Rows that an earlier check has found
expired, and that a rollback to a delta has brought back, are not counted, and are deleted in any case.

On the thread of housekeeping's tasks, at the pace of the throttle. Other models need that thread, so it waits only
`_WAIT_S` for requests that began before; the next round of housekeeping goes on. What a crash or an error leaves
undone, the next check does.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.reads.view import View
from tierstore.engine.versions.expiry import expire, forget, old_keys, times_in_batches
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict, StorageError
from tierstore.formats.times import format_time
from tierstore.tiers.background import Pace
from tierstore.types import Keys

log = logging.getLogger(__name__)

_CLOCK_SET_S = 60.0  # by at least so much: less is a clock that is adjusted
_WAIT_S = 1.0  # for requests that began before; after that the next round goes on
_READERS_S = 30.0  # that take longer are a problem
_MOST_KEPT = 1 << 20  # keys of removed rows that wait for such requests


class _Ended(Exception):
    """The check was ended: the version is needed otherwise, or the model is being closed."""


@dataclass(slots=True, eq=False)
class _Removed:
    """Rows of a version that were removed from disk, and perhaps are in caches again.

    `views`: those that were read before, as of `since_s`; None if rows were removed since. They hold the version, which
    nothing here may keep.
    """

    keys: list[tuple[str, Keys]] = field(default_factory=list)  # with their tables
    views: weakref.WeakSet[View] | None = None
    since_s: float = 0.0

    @property
    def are_many(self) -> bool:
        return sum(len(keys) for _, keys in self.keys) >= _MOST_KEPT


class Expiry:
    """Finds expired rows of one model and deletes them.

    `stopping`: the model is being closed.
    """

    def __init__(self, state: ModelState, stopping: Callable[[], bool]) -> None:
        self._state, self._stopping = state, stopping
        # of versions that are open
        self._checked_s: weakref.WeakKeyDictionary[Version, float] = weakref.WeakKeyDictionary()
        # rows that were not removed because they are too many, and how far the clock was ahead of the monotonic one
        # then
        self._refused: weakref.WeakKeyDictionary[Version, tuple[str, float]] = weakref.WeakKeyDictionary()
        self._to_forget: weakref.WeakKeyDictionary[Version, _Removed] = weakref.WeakKeyDictionary()

    def check(self) -> None:
        """Remove expired rows of each served version, if its check is due. StorageError; Conflict if they are too
        many.
        """
        live = self._state.live
        for number in live.served.versions:
            with live.publisher.pinned(number) as version:
                if version is None:
                    continue
                try:
                    if self._has_forgotten(version) and self._is_due(version):
                        with self._state.shared.throttle.at_work("expire"):
                            self._check(version)
                        self._has_forgotten(version)
                except _Ended:
                    return
        served = [view.open_version for view in live.served.views]
        if refused := [self._refused[version][0] for version in served if version in self._refused]:
            raise Conflict("; ".join(refused))

    def _is_due(self, version: Version) -> bool:
        every_s, before = self._state.shared.settings.ttl_check_s, self._checked_s.get(version)
        if not version.info.times_ids or not every_s:
            return False
        if (refused := self._refused.get(version)) is not None and abs(_ahead_s() - refused[1]) > _CLOCK_SET_S:
            return True
        return before is None or time.monotonic() - before >= every_s

    def _check(self, version: Version) -> None:
        pace = Pace(lambda: self._state.shared.throttle.share)
        began, now_s, ahead_s, refused = time.monotonic(), time.time(), _ahead_s(), list[str]()
        since_s = began - self._checked_s.get(version, began)
        for table in version.info.times_ids:
            ttl_s, expired = version.specs[table].ttl_s, 0
            assert ttl_s is not None
            oldest_s = max(0, int(now_s) - ttl_s)
            known_s = min(oldest_s, version.info.expired_before.get(table, 0))
            known, old = self._count(version, table, known_s, oldest_s, pace)
            rows = max(old, version.info.counts[table].rows - known)
            if old > rows * max(self._state.shared.settings.ttl_most_share, since_s / (since_s + ttl_s)):
                refused.append(
                    f"version {version.number}: {old:,} of about {rows:,} rows of table {table!r} are older than their "
                    f"ttl of {ttl_s} s, by a clock that says {format_time(datetime.fromtimestamp(int(now_s), UTC))}: "
                    "none of them is deleted; where the clock is right, set ttl_most_share to 1 and start again"
                )
                oldest_s, old = known_s, 0
            else:
                version.info.note_expired_before(table, oldest_s)
            if not known and not old:
                continue
            for keys in old_keys(version, table, oldest_s):
                self._check_goes_on(version)
                if len(keys):
                    removed = self._to_forget.setdefault(version, _Removed())
                    removed.views = None
                    removed.keys.append((table, keys))  # noted before: if it fails it may have been done
                    expired += len(expire(version, table, keys, oldest_s))
                    if removed.are_many and not self._has_forgotten(version):
                        return
                pace.sleep()
            if expired:
                log.info(
                    "model %s: version %d: %d rows of table %s have expired",
                    self._state.name, version.number, expired, table,
                )  # fmt: skip
        self._checked_s[version], version.info.expiry_checked_s = began, now_s
        self._refused.pop(version, None)
        if refused:
            self._refused[version] = "; ".join(refused), ahead_s

    def _count(self, version: Version, table: str, known_s: int, oldest_s: int, pace: Pace) -> tuple[int, int]:
        """The numbers of rows that were written before `known_s`, and from then to before `oldest_s`."""
        known = old = 0
        for times in times_in_batches(version, table):
            self._check_goes_on(version)
            known += int(np.count_nonzero(times < known_s))
            old += int(np.count_nonzero(times < oldest_s))
            pace.sleep()
        return known, old - known

    def _has_forgotten(self, version: Version) -> bool:
        """Remove the rows that were removed from all caches too, once no reader has them. False while one has."""
        if (removed := self._to_forget.get(version)) is None:
            return True
        live, publisher = self._state.live, self._state.live.publisher
        if removed.views is None:
            if not live.renew(version):
                raise _Ended
            with publisher.changed:
                removed.views, removed.since_s = weakref.WeakSet(publisher.read_before(version)), time.monotonic()
        views = removed.views
        with publisher.changed:
            unread = publisher.changed.wait_for(
                lambda: self._ends(version) or not publisher.are_read(views), timeout=_WAIT_S
            )
        self._check_goes_on(version)
        if not unread:
            if time.monotonic() - removed.since_s >= _READERS_S:
                raise StorageError(f"requests that began {_READERS_S:.0f} s ago still read version {version.number}")
            return False
        self._state.shared.epochs.await_offers()
        promoter = self._state.shared.devices.promoter
        for table, keys in removed.keys:
            if promoter is None:
                forget(version, table, keys)
            else:  # or a row might be on its way between host and device
                promoter.alone(lambda table=table, keys=keys: forget(version, table, keys))  # type: ignore[misc]
        del self._to_forget[version]
        return True

    def _check_goes_on(self, version: Version) -> None:
        if self._ends(version):
            raise _Ended

    def _ends(self, version: Version) -> bool:
        awaited = self._state.retiring.is_awaited(version.number)
        return self._stopping() or awaited or self._state.live.served.view_of(version) is None


def _ahead_s() -> float:
    """How far the clock is ahead of the monotonic clock, which nobody sets."""
    return time.time() - time.monotonic()
