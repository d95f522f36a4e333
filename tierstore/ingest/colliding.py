"""Keys of a load that collide: two strings with one hash. They are found where runs are merged, by reading the shards again.

Runs hold hashes only. So the keys of all shards are read once more, and the rows of shards that hold a colliding key. Each
such row gets a code of its own within the key range that is being merged, and no row keeps the hash itself.

In a helper process, on its main thread. A table rarely has such keys, so this may take as long as reading the table's keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.colliding import free_code
from tierstore.formats.row_times import as_rows
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.load_plan import run_row_bytes
from tierstore.ingest.runs import Part, Run, RunWriter, run_keys
from tierstore.kernels.codec import encode
from tierstore.types import Keys, KeyType, Rows, TableSpec, Vectors

_MOST = 10_000  # in one key range; more are no accident, and would cost memory

Steps = Iterator[tuple[Keys, Rows]]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A row of a snapshot: its key as text, for a string key its vector, and its time where the table has a ttl."""

    file: str
    row: int
    key: str
    code: int
    vector: Vectors | None
    time: int | None = None

    @property
    def shown(self) -> str:
        return self.key if self.vector is None else repr(self.key)


@dataclass(frozen=True, slots=True)
class Limits:
    """The keys of a partition in [low, high) (None: no limit), of rows that were not written before `oldest_s`."""

    part: Part
    low: int | None
    high: int | None
    oldest_s: int


class Repeated(Exception):
    """A code appears twice."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def distinct(steps: Steps) -> Steps:
    """The steps, checked: raises Repeated where a code appears twice."""
    last: int | None = None
    for keys, rows in steps:
        same = np.flatnonzero(keys[1:] == keys[:-1])
        if len(same) or (last is not None and int(keys[0]) == last):
            raise Repeated(int(keys[same[0]]) if len(same) else int(keys[0]))
        last = int(keys[-1])
        yield keys, rows
        del keys, rows


def repeated(steps: Steps) -> Keys:
    """The codes that appear more than once, ascending; at most `_MOST` + 1 of them."""
    found, count = [np.empty(0, np.int64)], 0
    last = np.empty(0, np.int64)
    for keys, rows in steps:
        del rows
        keys = np.concatenate([last, keys])
        found.append(np.unique(keys[1:][keys[1:] == keys[:-1]]))
        count, last = count + len(found[-1]), keys[-1:]
        if count > _MOST:
            break
    return np.unique(np.concatenate(found))[: _MOST + 1]


def without(steps: Steps, codes: Keys) -> Steps:
    """The steps without the rows of these codes."""
    for keys, rows in steps:
        others = ~np.isin(keys, codes)
        if others.all():
            yield keys, rows
        elif others.any():
            yield keys[others], rows[others]
        del keys, rows


def set_apart(
    snapshot: Snapshot,
    spec: TableSpec,
    codes: Keys,
    runs: Sequence[Run],
    limits: Limits,
    out: str,
    partitions: int,
) -> tuple[Run, list[tuple[str, int]]]:
    """Make a run `out` of the rows of colliding keys, under codes within `limits` that are in none of `runs`.

    Each is in the same one of so many `partitions` as the key's hash, and so in the `part` that is merged. Returns the run, and (string, code) of each row. Raises SnapshotError for a duplicate key.
    """
    found: dict[str, Occurrence] = {}
    part = limits.part
    for each in occurrences(snapshot, spec, codes, limits.oldest_s):
        if (first := found.setdefault(each.key, each)) is not each:
            raise duplicate_error(first, each)
    if len(codes) > _MOST:
        raise SnapshotError(
            f"table {spec.name}: {len(codes)} hashes or more are shared by several keys, which cannot be chance"
        )
    keys_of_runs = [keys for path, rows in runs if len(keys := run_keys(path, rows, part))]
    used_codes: set[int] = set()

    def is_used(code: int) -> bool:
        return code in used_codes or any(
            keys[min(int(np.searchsorted(keys, code)), len(keys) - 1)] == code for keys in keys_of_runs
        )

    bounds = {} if limits.low is None else {"low": limits.low}
    bounds |= {} if limits.high is None else {"high": limits.high - 1}
    entries: list[tuple[str, int]] = []
    for each in found.values():
        try:
            code = free_code(each.code, is_used, **bounds, partitions=partitions)
        except ValueError as error:
            raise SnapshotError(f"key {each.shown} shares its hash: {error}", file=each.file, row=each.row) from error
        used_codes.add(code)
        entries.append((each.key, code))
    order = sorted(range(len(entries)), key=lambda i: entries[i][1])
    vectors = np.stack([np.asarray(each.vector, np.float32) for each in found.values()])
    rows = encode(vectors[order], spec.dtype)
    if spec.ttl_s is not None:
        times = np.array([each.time for each in found.values()], np.uint32)
        rows = np.concatenate([rows, as_rows(times[order])], axis=1)
    with RunWriter(out, len(entries), run_row_bytes(spec)) as run:
        run.add(np.array([entries[i][1] for i in order], np.int64), rows)
    return (out, len(entries)), entries


def duplicate(snapshot: Snapshot, spec: TableSpec, code: int, oldest_s: int) -> SnapshotError:
    """The error for a number that appears twice as a key. Reads the shards again."""
    first: Occurrence | None = None
    for each in occurrences(snapshot, spec, np.array([code]), oldest_s):
        if first is not None:
            return duplicate_error(first, each)
        first = each
    return SnapshotError(
        f"table {spec.name}: the shards changed while they were read", file=None if first is None else first.file
    )


def duplicate_error(first: Occurrence, again: Occurrence) -> SnapshotError:
    return SnapshotError(
        f"duplicate key {again.shown}: it is also in {first.file}, row {first.row}", file=again.file, row=again.row
    )


def occurrences(snapshot: Snapshot, spec: TableSpec, codes: Keys, oldest_s: int = 0) -> Iterator[Occurrence]:
    """Every row with one of these codes that was not written before `oldest_s`.

    Whole rows are read only for string keys and where rows have times, and only of shards with such a row.
    """
    keys_suffice = spec.key is not KeyType.STRING and spec.ttl_s is None
    for number, shard in enumerate(snapshot.manifest.table(spec.name).shards):
        first_row = 0
        there = False
        for keys in snapshot.shard_keys(spec.name, number):
            at = np.flatnonzero(np.isin(keys, codes))
            there = there or at.size > 0
            if keys_suffice:
                for row, code in zip((first_row + at).tolist(), keys[at].tolist(), strict=True):
                    yield Occurrence(shard.path, row, _shown(spec, code), code, None)
            first_row += len(keys)
        if there and not keys_suffice:
            yield from _rows_of(snapshot, spec, number, codes, oldest_s)


def _rows_of(snapshot: Snapshot, spec: TableSpec, number: int, codes: Keys, oldest_s: int) -> Iterator[Occurrence]:
    path = snapshot.manifest.table(spec.name).shards[number].path
    with snapshot.checking(spec.name, number):  # it may be another one than was read before
        for batch in snapshot.batches(spec.name, number):
            meant = np.isin(batch.keys, codes)
            if batch.times is not None:
                meant &= batch.times >= oldest_s
            for i in np.flatnonzero(meant).tolist():
                row, code = batch.first_row + i, int(batch.keys[i])
                time = None if batch.times is None else int(batch.times[i])
                if batch.strings is None:
                    yield Occurrence(path, row, _shown(spec, code), code, None, time)
                else:
                    yield Occurrence(path, row, batch.strings[i].as_py(), code, np.array(batch.vectors[i]), time)


def _shown(spec: TableSpec, code: int) -> str:
    """A number as a key."""
    return str(code if spec.key is KeyType.INT64 else code % 2**64)
