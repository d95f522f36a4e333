"""Keys of a load that collide: two strings with one hash, found where runs are merged, and told apart by reading shards.

Runs hold hashes alone. So the shards' keys are read once more, and of a shard that holds a colliding one its rows too. Each
such row gets a code of its own within the key range that is being merged, and the hash is left to nobody.

In a helper process, on its main thread, as `tasks.py` is. A table has such keys once in many loads, so what is done here may
take as long as reading the table's keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.colliding import free_code
from tierstore.formats.keys import partition_of
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.runs import Part, Run, RunWriter, run_keys
from tierstore.kernels.codec import encode
from tierstore.types import Keys, KeyType, Rows, TableSpec, Vectors

_MOST = 10_000  # in one key range; so many hashes that are no accident cost memory

Steps = Iterator[tuple[Keys, Rows]]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A row of a snapshot: its key as text, and of a string key its vector."""

    file: str
    row: int
    key: str
    code: int
    vector: Vectors | None

    @property
    def shown(self) -> str:
        return self.key if self.vector is None else repr(self.key)


class Repeated(Exception):
    """A code came twice."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def distinct(steps: Steps) -> Steps:
    """The steps, as long as no code comes twice. Raises Repeated."""
    last: int | None = None
    for keys, rows in steps:
        same = np.flatnonzero(keys[1:] == keys[:-1])
        if len(same) or (last is not None and int(keys[0]) == last):
            raise Repeated(int(keys[same[0]]) if len(same) else int(keys[0]))
        last = int(keys[-1])
        yield keys, rows
        del keys, rows


def repeated(steps: Steps) -> Keys:
    """The codes that come more than once, ascending; of very many, some."""
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
    part: Part,
    low: int | None,
    high: int | None,
    out: str,
) -> tuple[Run, list[tuple[str, int]]]:
    """Make a run `out` of the rows of colliding keys, under codes of the partition from `low` to below `high`, in none of `runs`.

    Returns it, and (string, code) of each. Raises SnapshotError where a key is given twice.
    """
    found: dict[str, Occurrence] = {}
    for each in occurrences(snapshot, spec, codes):
        if (first := found.setdefault(each.key, each)) is not each:
            raise given_twice(first, each)
    if len(codes) > _MOST:
        raise SnapshotError(
            f"table {spec.name}: {len(codes)} hashes or more are shared by several keys, which is no accident"
        )
    held = [keys for path, rows in runs if len(keys := run_keys(path, rows, part))]
    taken: set[int] = set()

    def is_taken(code: int) -> bool:
        elsewhere = part[1] > 1 and partition_of(np.array([code]), part[1])[0] != part[0]
        return (
            elsewhere
            or code in taken
            or any(keys[min(int(np.searchsorted(keys, code)), len(keys) - 1)] == code for keys in held)
        )

    limits = {} if low is None else {"low": low}
    limits |= {} if high is None else {"high": high - 1}
    entries: list[tuple[str, int]] = []
    for each in found.values():
        try:
            code = free_code(each.code, is_taken, **limits)
        except ValueError as error:
            raise SnapshotError(f"key {each.shown} shares its hash: {error}", file=each.file, row=each.row) from error
        taken.add(code)
        entries.append((each.key, code))
    order = sorted(range(len(entries)), key=lambda i: entries[i][1])
    vectors = np.stack([np.asarray(each.vector, np.float32) for each in found.values()])
    with RunWriter(out, len(entries), spec.row_bytes) as run:
        run.add(np.array([entries[i][1] for i in order], np.int64), encode(vectors[order], spec.dtype))
    return (out, len(entries)), entries


def duplicate(snapshot: Snapshot, spec: TableSpec, code: int) -> SnapshotError:
    """The error for a number that is a key twice. Reads the shards again."""
    first: Occurrence | None = None
    for each in occurrences(snapshot, spec, np.array([code])):
        if first is not None:
            return given_twice(first, each)
        first = each
    return SnapshotError(
        f"table {spec.name}: the shards changed while they were read", file=None if first is None else first.file
    )


def given_twice(first: Occurrence, again: Occurrence) -> SnapshotError:
    return SnapshotError(
        f"duplicate key {again.shown}: it is also in {first.file}, row {first.row}", file=again.file, row=again.row
    )


def occurrences(snapshot: Snapshot, spec: TableSpec, codes: Keys) -> Iterator[Occurrence]:
    """Every row with one of these codes. Vectors are read of string keys alone, and of no shard without such a row."""
    for number, shard in enumerate(snapshot.manifest.table(spec.name).shards):
        first_row = 0
        there = False
        for keys in snapshot.shard_keys(spec.name, number):
            at = np.flatnonzero(np.isin(keys, codes))
            there = there or at.size > 0
            if spec.key is not KeyType.STRING:
                for row, code in zip((first_row + at).tolist(), keys[at].tolist(), strict=True):
                    shown = str(code if spec.key is KeyType.INT64 else code % 2**64)
                    yield Occurrence(shard.path, row, shown, code, None)
            first_row += len(keys)
        if there and spec.key is KeyType.STRING:
            yield from _rows_of(snapshot, spec, number, codes)


def _rows_of(snapshot: Snapshot, spec: TableSpec, number: int, codes: Keys) -> Iterator[Occurrence]:
    path = snapshot.manifest.table(spec.name).shards[number].path
    for batch in snapshot.batches(spec.name, number):
        assert batch.strings is not None
        for i in np.flatnonzero(np.isin(batch.keys, codes)).tolist():
            row, vector = batch.first_row + i, np.array(batch.vectors[i])
            yield Occurrence(path, row, batch.strings[i].as_py(), int(batch.keys[i]), vector)
