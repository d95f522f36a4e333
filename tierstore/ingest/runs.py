"""Sorted runs of a bulk load: scratch files of rows by key, and the merge of many of them, a step at a time.

    n key codes (int64), by partition and then ascending | n rows in the storage dtype | the codes of some rows, evenly spaced (int64)

A merge holds one step of rows, however long and however many the runs are. For a helper's main thread, `quantiles` for the
load's. Runs lie in the load's own directory. The journal has their digest, two XXH3-64 as 32 hex digits (of the codes, and
of what follows): after a crash it shows which runs are whole.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.errors import StorageError
from tierstore.formats.keys import partition_of
from tierstore.ingest.load_plan import KEY_CODE_BYTES, SAMPLES
from tierstore.types import Keys, Rows

Run = tuple[str, int]  # path, rows
Part = tuple[int, int]  # which of how many partitions of the keys
ReportRows = Callable[[int], None]  # how many more rows are done
_READ_BYTES = 1 << 20


class RunWriter:
    """Writes a run of `rows` rows, which are added in order, in any number of parts. A context manager; `digest` is set at its end."""

    def __init__(self, path: str, rows: int, row_bytes: int) -> None:
        self._rows, self._row_bytes = rows, row_bytes
        self._samples = _sampled(rows)
        self._sampled = np.empty(len(self._samples), np.int64)
        self._at = 0
        self._digests = xxhash.xxh3_64(), xxhash.xxh3_64()  # of the keys, and of what follows them
        self.digest = ""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def add(self, keys: Keys, rows: Rows) -> None:
        """Add the next rows: int64 [n], uint8 [n, row_bytes]. Raises OSError."""
        at, end = self._at, self._at + len(keys)
        self._put(0, keys, at * KEY_CODE_BYTES)
        self._put(1, rows, self._rows * KEY_CODE_BYTES + at * self._row_bytes)
        first, last = np.searchsorted(self._samples, (at, end))
        self._sampled[first:last] = keys[self._samples[first:last] - at]
        self._at = end

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._at == self._rows
                self._put(1, self._sampled, self._rows * (KEY_CODE_BYTES + self._row_bytes))
                self.digest = "".join(part.hexdigest() for part in self._digests)
        finally:
            os.close(self._fd)

    def _put(self, part: int, array: npt.NDArray[Any], offset: int) -> None:
        remaining = np.ascontiguousarray(array).data.cast("B") if len(array) else memoryview(b"")
        self._digests[part].update(remaining)
        while remaining:
            written = os.pwrite(self._fd, remaining, offset)
            remaining, offset = remaining[written:], offset + written


def read_digest(path: str, rows: int, row_bytes: int, report: ReportRows) -> str | None:
    """The digest of a run, read from its file; None where there is no file of that length. Raises OSError."""
    keys = rows * KEY_CODE_BYTES
    parts = keys, rows * row_bytes + len(_sampled(rows)) * KEY_CODE_BYTES
    try:
        if os.stat(path).st_size != sum(parts):
            return None
    except FileNotFoundError:
        return None
    digests = []
    with open(path, "rb", buffering=0) as file:
        for remaining in parts:
            digest = xxhash.xxh3_64()
            while remaining and (block := file.read(min(remaining, _READ_BYTES))):
                digest.update(block)
                remaining -= len(block)
            digests.append(digest.hexdigest())
    report(rows)
    return "".join(digests)


def merged(
    runs: Sequence[Run],
    row_bytes: int,
    low: int | None,
    high: int | None,
    step_bytes: int,
    part: Part = (0, 1),
) -> Iterator[tuple[Keys, Rows]]:
    """(keys, rows) of all runs with keys in [low, high) (None: no limit), of one partition, ascending; at most `step_bytes` at a time.

    As much again is held while a step is sorted. Drop one step before you ask for the next.
    """
    with ExitStack() as stack:
        cursors = [_Cursor(run, row_bytes, low, high, part, stack) for run in runs]
        cursors = [cursor for cursor in cursors if cursor.remaining]
        rows_a_step = max(1, step_bytes // (row_bytes + KEY_CODE_BYTES))
        while cursors:
            for cursor in cursors:
                cursor.look_ahead(max(1, rows_a_step // len(cursors)))
            # beyond this key a run may have keys that are not read yet
            sure = min((int(cursor.ahead[-1]) for cursor in cursors if cursor.has_more), default=None)
            counts = [len(c.ahead) if sure is None else int(np.searchsorted(c.ahead, sure, "right")) for c in cursors]
            ends = np.cumsum(counts)
            keys, rows = np.empty(ends[-1], np.int64), np.empty((ends[-1], row_bytes), np.uint8)
            for cursor, count, end in zip(cursors, counts, ends.tolist(), strict=True):
                cursor.pop(keys[end - count : end], rows[end - count : end])
            if np.count_nonzero(counts) > 1:
                order = np.argsort(keys, kind="stable")
                keys, rows = keys[order], in_order(rows, order)
            yield keys, rows
            del keys, rows
            cursors = [cursor for cursor in cursors if cursor.remaining]


class _Cursor:
    """The remaining rows of one run, in a key range of a partition."""

    def __init__(
        self, run: Run, row_bytes: int, low: int | None, high: int | None, part: Part, stack: ExitStack
    ) -> None:
        path, self._rows = run
        self._path, self._row_bytes = path, row_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, self._fd)
        keys = _mapped(path, self._rows)
        first, end = _bounds(keys, part)
        self._at = first if low is None else first + int(np.searchsorted(keys[first:end], low))
        self._end = end if high is None else first + int(np.searchsorted(keys[first:end], high))
        self.ahead: Keys = np.empty(0, np.int64)  # the next keys

    @property
    def remaining(self) -> int:
        return max(0, self._end - self._at)

    @property
    def has_more(self) -> bool:
        """Whether there are keys after those in `ahead`."""
        return self.remaining > len(self.ahead)

    def look_ahead(self, wanted: int) -> None:
        more = min(wanted, self.remaining) - len(self.ahead)
        if more > 0:
            keys = np.empty(more, np.int64)
            self._read(keys, (self._at + len(self.ahead)) * KEY_CODE_BYTES)
            self.ahead = np.concatenate([self.ahead, keys])

    def pop(self, keys: Keys, rows: Rows) -> None:
        """Move the next keys out of `ahead` into `keys`, and read their rows into `rows`."""
        if len(keys):
            keys[:] = self.ahead[: len(keys)]
            self._read(rows, self._rows * KEY_CODE_BYTES + self._at * self._row_bytes)
            self.ahead = self.ahead[len(keys) :].copy()
            self._at += len(keys)

    def _read(self, into: npt.NDArray[Any], offset: int) -> None:
        remaining = into.data.cast("B")
        while remaining:
            got = os.preadv(self._fd, [remaining], offset)
            if not got:
                raise StorageError(f"{self._path} is shorter than it was written")
            remaining, offset = remaining[got:], offset + got


def run_keys(path: str, count: int, part: Part = (0, 1)) -> Keys:
    """The ascending key codes of a partition in a run of `count` rows, mapped from its file."""
    keys = _mapped(path, count)
    first, end = _bounds(keys, part)
    return keys[first:end]


def _mapped(path: str, count: int) -> Keys:
    return np.memmap(path, np.int64, "r", shape=(count,)) if count else np.empty(0, np.int64)


def order_of(keys: Keys, partitions: int) -> npt.NDArray[np.int64]:
    """The order of these keys in a run: by partition, then ascending."""
    if partitions == 1:
        return np.argsort(keys, kind="stable")
    return np.lexsort((keys, partition_of(keys, partitions)))


def _bounds(keys: Keys, part: Part) -> tuple[int, int]:
    """Where the keys of a partition begin and end among those of a run."""
    number, partitions = part
    if partitions == 1:
        return 0, len(keys)

    def partition_at(place: int) -> int:
        return int(partition_of(keys[place : place + 1], partitions)[0])

    places = range(len(keys))
    return bisect_left(places, number, key=partition_at), bisect_right(places, number, key=partition_at)


def quantiles(runs: Sequence[Run], row_bytes: int, ranges: int, part: Part = (0, 1)) -> list[int]:
    """Ascending keys that cut a partition's rows of all runs into about equal ranges, at most `ranges` of them.

    Takes memory for `SAMPLES` keys a run.
    """
    if ranges <= 1:
        return []
    samples: list[Keys] = []
    weights: list[npt.NDArray[np.float64]] = []
    for path, count in runs:
        held = len(_sampled(count))
        sample = np.fromfile(path, np.int64, held, offset=count * (KEY_CODE_BYTES + row_bytes))
        if len(sample) != held:
            raise StorageError(f"{path} is shorter than it was written")
        weight = count / max(1, held)
        if part[1] > 1:
            sample = sample[partition_of(sample, part[1]) == part[0]]
        samples.append(sample)
        weights.append(np.full(len(sample), weight))
    keys = np.concatenate(samples)
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    reached = np.cumsum(np.concatenate(weights)[order])
    cuts = np.searchsorted(reached, reached[-1] * np.arange(1, ranges) / ranges)
    return np.unique(keys[order][cuts]).tolist()  # type: ignore[no-any-return]


def in_order(rows: Rows, order: npt.NDArray[np.int64]) -> Rows:
    """rows[order], with each row copied as one item."""
    whole = rows.view(f"V{rows.shape[1]}").ravel()
    return whole[order].view(np.uint8).reshape(len(order), rows.shape[1])


def _sampled(rows: int) -> npt.NDArray[np.int64]:
    """The positions of a run's samples."""
    count = min(rows, SAMPLES)
    return (np.arange(count) * rows + rows // 2) // max(1, count)
