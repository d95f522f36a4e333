"""The deltas of the log that wrote or deleted a few keys of a table: for `explain`. Any thread; only reads.

The log is read from its newest entry back, within bounds; the result says what was not searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import InvalidInput, NotFound, TierstoreError
from tierstore.formats.delta.reader import read_changes
from tierstore.formats.times import format_time
from tierstore.types import Keys

SEARCH_BYTES = 256 << 20  # of deltas that are read for one request
SEARCH_S = 5.0


class Write(NamedTuple):
    """A delta that wrote or deleted a key.

    `received_s`: when the log got it, seconds since 1970; None if its file is gone.
    """

    seq: int
    event_time: datetime
    received_s: float | None
    deleted: bool
    base_version: int | None

    def document(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "deleted": self.deleted,
            "event_time": format_time(self.event_time),
            "received_at": None if self.received_s is None else iso_time(self.received_s),
        }


@dataclass(slots=True)
class KeyHistory:
    """The log's writes to the keys: newest first, by code.

    `first`: the oldest seq that was searched; `ended`: why not further.
    """

    last: dict[int, Write] = field(default_factory=dict)
    undone: dict[int, list[Write]] = field(default_factory=dict)
    others: dict[int, list[Write]] = field(default_factory=dict)  # only for another version
    first: int = 0
    newest: int = 0
    ended: str | None = None


def search(
    log: DeltaLog, info: VersionInfo, table: str, codes: Keys, to_codes: Callable[[Any], Keys], upto: int
) -> KeyHistory:
    """The deltas that wrote or deleted `codes`: from `upto` back until each is found, or the bounds are reached."""
    floor = max(log.start or 0, info.manifest.delta_seq)
    history = KeyHistory(first=upto + 1, newest=upto)
    left, nbytes, until_s = {*codes.tolist()}, 0, time.monotonic() + SEARCH_S
    for seq in range(upto, floor, -1):
        if not left:
            return history
        if nbytes >= SEARCH_BYTES or time.monotonic() >= until_s:
            history.ended = f"deltas up to {seq} were not searched: there are too many"
            return history
        try:
            data = log.read(seq)
            found = read_changes(data, table, np.array(sorted(left), np.int64), to_codes)
        except NotFound:
            history.ended = f"the log holds no delta up to {seq} any more"
            return history
        except InvalidInput:  # it does not fit the table: the version has skipped it
            history.first = seq
            continue
        except TierstoreError as error:
            history.ended = f"delta {seq} cannot be read: {error}"
            return history
        nbytes, history.first = nbytes + len(data), seq
        for code, deleted in found.deleted.items():
            write = Write(seq, found.event_time, log.received_s(seq), deleted, found.base_version)
            if found.base_version not in (None, info.number):
                history.others.setdefault(code, []).append(write)
            elif log.undone.range_of(seq) is not None:
                history.undone.setdefault(code, []).append(write)
            else:
                history.last[code] = write
                left.discard(code)
    if left and floor > info.manifest.delta_seq:
        history.ended = f"the log holds no delta up to {floor} any more"
    return history


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return format_time(datetime.fromtimestamp(int(seconds), UTC))
