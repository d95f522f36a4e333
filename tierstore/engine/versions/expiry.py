"""Removing expired rows from an open version, as if a delta had deleted them, but without a seq.

The times of a table's rows are rows themselves, of four bytes, under their own id in the same disk tier (`times_id`).
`expire` writes a deletion mark for each expired row and for its time, in one atomic step: so no replay and no look-up
brings it back, and a later delta revives the key. A delta that is not folded yet is above, and is not touched.

A reader that read the row before may still put it into a cache after `expire` has removed it. So once all such readers
have ended, `forget` is called with the same keys.

One thread at a time for a version, beside folds and look-ups. A crash leaves each step whole or undone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.engine.data import row_count as rowcount
from tierstore.engine.versions.info import EXPIRED, watermark_record
from tierstore.engine.versions.version import Version
from tierstore.formats import files
from tierstore.formats.row_times import TIME_BYTES, from_rows
from tierstore.types import Keys, Tier

_MOST_KEYS, _ROW_BYTES = 32768, 16 << 20  # in one step


def old_keys(version: Version, table: str, oldest_s: int) -> Iterator[Keys]:
    """Keys of rows that were written before `oldest_s`, ascending, for one step each time; as of the first request.

    Many of these batches are empty: the caller may pause, or end.
    """
    most = max(1024, min(_MOST_KEYS, _ROW_BYTES // version.specs[table].row_bytes))
    waiting = np.empty(0, np.int64)
    for keys, times in version.disk.scan(version.info.times_ids[table], TIME_BYTES, most):
        waiting = np.concatenate([waiting, keys[from_rows(times) < oldest_s]])
        step = most if len(waiting) >= most else 0
        yield waiting[:step]
        waiting = waiting[step:]
    yield waiting


def times_in_batches(version: Version, table: str) -> Iterator[npt.NDArray[np.uint32]]:
    """When each row of a table was last written, in seconds since 1970, in batches; as of the first request."""
    for _, times in version.disk.scan(version.info.times_ids[table], TIME_BYTES, _MOST_KEYS):
        yield from_rows(times)


def expire(version: Version, table: str, keys: Keys, oldest_s: int) -> Keys:
    """Remove those of `keys` (ascending, distinct) that were still written before `oldest_s`. Returns them.
    StorageError.
    """
    info, disk = version.info, version.disk
    with version.writing:
        times, state = np.zeros((len(keys), TIME_BYTES), np.uint8), np.zeros(len(keys), np.uint8)
        disk.get(info.times_ids[table], keys, times, state)
        keys = keys[(state == Tier.DISK) & (from_rows(times) < oldest_s)]
        if not len(keys):
            return keys
        counts = {**info.counts, table: info.counts[table].plus(rowcount.RowCount(-len(keys), exact=True))}
        expired = {**info.expired, table: info.expired.get(table, 0) + len(keys)}
        records = watermark_record(version.watermark) | rowcount.record(version.watermark, counts)
        records |= {EXPIRED: json.dumps(expired).encode()} | info.expired_before_record()
        gone = np.ones(len(keys), np.bool_)
        sizes = (info.tables[table]["id"], version.specs[table].row_bytes), (info.times_ids[table], TIME_BYTES)
        none = [(number, keys, np.zeros((len(keys), size), np.uint8), gone) for number, size in sizes]
        disk.change(files.make_dir(info.where.build) / "expired.sst", records, none)
        info.set_counts(counts, version.watermark)
        info.expired = expired
        _erase(version, table, keys)
    return keys


def forget(version: Version, table: str, keys: Keys) -> None:
    """Remove from the caches again what readers have put there since, except keys that a delta has revived."""
    with version.writing:
        state = np.zeros(len(keys), np.uint8)
        version.disk.get(version.info.times_ids[table], keys, np.zeros((len(keys), TIME_BYTES), np.uint8), state)
        _erase(version, table, keys[state == Tier.ABSENT])


def _erase(version: Version, table: str, keys: Keys) -> None:
    rows = np.zeros((len(keys), version.specs[table].row_bytes), np.uint8)
    version.tables[table].update_caches(keys, rows, np.ones(len(keys), np.bool_))
