"""Expiry: a check of the row times of each served version, after it is opened and then every `ttl_check_s`.

A clock that is wrong during one check must not delete a table. So expired rows are counted first. If a table would
lose more than a share (`ttl_most_share`, or what expires evenly since the last check), none is deleted: `check` fails
until the clock was set, the next check is due, or the setting allows it.

On the thread of housekeeping's tasks, at the pace of the throttle. What a crash or an error leaves undone, the next
check does.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime

from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.versions.expiry import expire, forget, old_keys
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict, StorageError
from tierstore.formats.times import format_time
from tierstore.tiers.background import Pace
from tierstore.types import Keys

log = logging.getLogger(__name__)

_CLOCK_SET_S = 60.0  # by at least so much: less is a clock that is adjusted
_READERS_S = 30.0  # the wait for requests that began before; after that the next try goes on


class _Ended(Exception):
    """The check was ended: the version is needed otherwise, or the model is being closed."""


class Expiry:
    """Finds expired rows of one model and deletes them.

    `stopping`: the model is being closed.
    """

    def __init__(self, state: ModelState, stopping: Callable[[], bool]) -> None:
        self._state, self._stopping = state, stopping
        self._checked_s: weakref.WeakKeyDictionary[Version, float] = weakref.WeakKeyDictionary()
        # removed from disk, but perhaps in caches again; of versions that are open
        # rows that were not removed because they are too many, and how far the clock was ahead of the monotonic one
        # then
        self._refused: weakref.WeakKeyDictionary[Version, tuple[str, float]] = weakref.WeakKeyDictionary()
        self._to_forget: weakref.WeakKeyDictionary[Version, tuple[str, Keys]] = weakref.WeakKeyDictionary()

    def check(self) -> None:
        """Remove expired rows of each served version, if its check is due. StorageError; Conflict if they are too
        many.
        """
        live = self._state.live
        for number in live.served.versions:
            with live.publisher.pinned(number) as version:
                if version is None or not self._is_due(version):
                    continue
                try:
                    with self._state.shared.throttle.at_work("expire"):
                        self._check(version)
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
        return version in self._to_forget or before is None or time.monotonic() - before >= every_s

    def _check(self, version: Version) -> None:
        self._forget(version)
        pace = Pace(lambda: self._state.shared.throttle.share)
        began, now_s, ahead_s, refused = time.monotonic(), time.time(), _ahead_s(), list[str]()
        since_s = began - self._checked_s.get(version, began)
        for table in version.info.times_ids:
            ttl_s, expired = version.specs[table].ttl_s, 0
            assert ttl_s is not None
            oldest_s = max(0, int(now_s) - ttl_s)
            old = self._count(version, table, oldest_s, pace)
            rows = max(old, version.info.counts[table].rows)
            if old > rows * max(self._state.shared.settings.ttl_most_share, since_s / (since_s + ttl_s)):
                refused.append(
                    f"version {version.number}: {old:,} of about {rows:,} rows of table {table!r} are older than their "
                    f"ttl of {ttl_s} s, by a clock that says {format_time(datetime.fromtimestamp(int(now_s), UTC))}: "
                    "none of them is deleted; where the clock is right, set ttl_most_share to 1 and start again"
                )
                continue
            if not old:
                continue
            for keys in old_keys(version, table, oldest_s):
                self._check_goes_on(version)
                if len(keys):
                    self._to_forget[version] = table, keys  # noted before: if it fails it may have been done
                    expired += len(expire(version, table, keys, oldest_s))
                    self._forget(version)
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

    def _count(self, version: Version, table: str, oldest_s: int, pace: Pace) -> int:
        """The number of rows that were written before `oldest_s`."""
        count = 0
        for keys in old_keys(version, table, oldest_s):
            self._check_goes_on(version)
            count += len(keys)
            pace.sleep()
        return count

    def _forget(self, version: Version) -> None:
        """Once no reader has the rows that were removed last, remove them from all caches."""
        if version not in self._to_forget:
            return
        live, changed = self._state.live, self._state.live.publisher.changed
        if not live.renew(version):
            raise _Ended
        with changed:
            changed.wait_for(lambda: self._ends(version) or not live.publisher.read_before(version), timeout=_READERS_S)
            if live.publisher.read_before(version) and not self._ends(version):
                raise StorageError(f"requests that began {_READERS_S:.0f} s ago still read version {version.number}")
        self._check_goes_on(version)
        self._state.shared.epochs.await_offers()
        table, keys = self._to_forget[version]
        promoter = self._state.shared.devices.promoter
        if promoter is None:
            forget(version, table, keys)
        else:  # or a row might be on its way between host and device
            promoter.alone(lambda: forget(version, table, keys))
        del self._to_forget[version]

    def _check_goes_on(self, version: Version) -> None:
        if self._ends(version):
            raise _Ended

    def _ends(self, version: Version) -> bool:
        awaited = self._state.retiring.is_awaited(version.number)
        return self._stopping() or awaited or self._state.live.served.view_of(version) is None


def _ahead_s() -> float:
    """How far the clock is ahead of the monotonic clock, which nobody sets."""
    return time.time() - time.monotonic()
