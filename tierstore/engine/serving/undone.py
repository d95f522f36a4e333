"""The deltas of a model that a rollback has undone: a part of the model's document (`document.py`).

An undone delta is applied to no version from the log, now or later. A version that had it is built again from its
base: that makes a new **line** of it, in a directory of its own, and this part names the line that counts. So
publishing the document is the one step from the old state to the new one. Immutable values and pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tierstore.engine.versions.left_out import joined
from tierstore.formats.names import MAX_ORDINAL

Ranges = tuple[tuple[int, int], ...]
Rollbacks = tuple[tuple[int, int], ...]
Age = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Undone:
    """What is undone. `rollbacks`: (to which delta, the newest delta then), in order; of those with the same newest
    delta only the last. `lines`: of versions whose line is not 0.

    `outdated`: versions whose line holds undone deltas, or lacks deltas that are no longer undone.
    """

    rollbacks: Rollbacks = ()
    lines: Mapping[int, int] = field(default_factory=dict)
    outdated: frozenset[int] = frozenset()
    ranges: Ranges = field(init=False)  # (first, last) of undone seqs, ascending, none in two

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", _undone_by(self.rollbacks))

    @property
    def newest(self) -> int:
        """The newest delta when the last rollback was done; 0 where there was none."""
        return self.rollbacks[-1][1] if self.rollbacks else 0

    @property
    def age(self) -> Age:
        """What grows with every change: how often versions were built again, and `newest`."""
        return sum(self.lines.values()), self.newest

    def line(self, version: int) -> int:
        return self.lines.get(version, 0)

    def range_of(self, seq: int) -> tuple[int, int] | None:
        """The first and the last seq of the undone range that `seq` is in; None if it is not undone."""
        return next(((first, last) for first, last in self.ranges if first <= seq <= last), None)

    def as_of(self, seq: int, last: int) -> Undone:
        """The record after a rollback to delta `seq`, where `last` is the newest delta: what was undone when `seq`
        was applied, and everything after it.
        """
        before = _before(self.rollbacks, last)
        return replace(self, rollbacks=(*before, (seq, last)) if seq < last else before)

    def differs_from(self, other: Undone, low: int, high: int) -> bool:
        """Whether of the seqs above `low` and up to `high` others are undone here than there."""
        return self.within(low, high) != other.within(low, high)

    def within(self, low: int, high: int) -> list[list[int]]:
        """(first, last) of what is undone of the seqs above `low` and up to `high`; neighbours as one."""
        return joined(self.ranges, low, high)

    def made(self, left_out: bytes | None) -> bool:
        """Whether rows whose disk tier says that (`versions/left_out.py`) are without these deltas, and without no
        others, as far as it is known.
        """
        if left_out is None:
            return True
        try:
            document = json.loads(left_out)
            return bool(self.within(document["after"], document["upto"]) == document["ranges"])
        except (ValueError, LookupError, TypeError):
            return False

    def with_line(self, version: int, line: int) -> Undone:
        """The same record, with a version built again as this line."""
        return replace(self, lines={**self.lines, version: line}, outdated=self.outdated - {version})

    def without(self, versions: Iterable[int]) -> Undone:
        """The same record, without versions that are gone.

        The numbers of their lines stay: a load may be using one.
        """
        return replace(self, outdated=self.outdated - {*versions})

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Undone:
        """From its JSON. KeyError, TypeError, ValueError or AttributeError if it is invalid."""
        ranges = _pairs(document["ranges"])
        ends = [-1, *(end for each in ranges for end in each)]
        if any(end >= next_ if at % 2 == 0 else end > next_ for at, (end, next_) in enumerate(pairwise(ends))):
            raise ValueError("the ranges are not ascending")
        rollbacks = _pairs(document["rollbacks"])
        if any(to >= last for to, last in rollbacks) or any(one[1] >= two[1] for one, two in pairwise(rollbacks)):
            raise ValueError("the rollbacks are not in order")
        lines = {ordinal(version): ordinal(line) for version, line in document["lines"].items()}
        undone = cls(rollbacks, lines, frozenset(map(ordinal, document["outdated"])))
        if undone.ranges != ranges:
            raise ValueError("the ranges are not those of the rollbacks")
        return undone

    def document(self) -> dict[str, Any]:
        lines = {str(version): line for version, line in sorted(self.lines.items())}
        return {
            "ranges": [list(each) for each in self.ranges],
            "rollbacks": [list(each) for each in self.rollbacks],
            "lines": lines,
            "outdated": sorted(self.outdated),
        }


def _before(rollbacks: Rollbacks, seq: int) -> Rollbacks:
    """The rollbacks that were done before delta `seq` was applied."""
    return tuple(each for each in rollbacks if each[1] < seq)


def _undone_by(rollbacks: Rollbacks) -> Ranges:
    if not rollbacks:
        return ()
    to, last = rollbacks[-1]
    return (*_undone_by(_before(rollbacks, to)), (to + 1, last))


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple((ordinal(low), ordinal(high)) for low, high in value)


def ordinal(value: Any) -> int:
    """A number of a version, a line or a delta. ValueError, TypeError."""
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int:
        raise TypeError(f"expected a number, got {value!r}")
    if not 0 <= number <= MAX_ORDINAL:
        raise ValueError(f"expected a number from 0 to {MAX_ORDINAL}, got {number}")
    return number
