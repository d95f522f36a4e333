"""The durable record of the deltas that a rollback has undone: `undone.json` in the model's directory.

An undone delta is applied to no version from the log, now or later. What a version had of it goes when the version is built
again from its base: that makes a new **line** of it, in a directory of its own, and this record names the line that counts.
So publishing the record is the one step from the old state to the new one. Immutable values and pure functions; writes are the
model's, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tierstore.errors import Corruption, NotFound
from tierstore.formats import files
from tierstore.formats.names import MAX_ORDINAL

FORMAT = 1
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Undone:
    """`ranges`: (first, last) of undone seqs, ascending, none in two. `lines`: of versions whose line is not 0.

    `outdated`: versions whose line holds what is undone now, or lacks what is not undone any more.
    """

    ranges: Ranges = ()
    lines: Mapping[int, int] = field(default_factory=dict)
    outdated: frozenset[int] = frozenset()

    def line(self, version: int) -> int:
        return self.lines.get(version, 0)

    def end_of_range(self, seq: int) -> int | None:
        """The last seq of the range that `seq` is in; None where it is not undone."""
        return next((last for first, last in self.ranges if first <= seq <= last), None)

    def begin_of_range(self, seq: int) -> int | None:
        """The first seq of the range that `seq` is in; None where it is not undone."""
        return next((first for first, last in self.ranges if first <= seq <= last), None)

    def as_of(self, seq: int, last: int) -> Undone:
        """What is undone in the state right after delta `seq` was applied, where `last` is the newest delta.

        A range whose end is `seq` or later was undone after that, so it is undone no more, but for what comes after `seq`.
        """
        before = tuple(each for each in self.ranges if each[1] < seq)
        return replace(self, ranges=(*before, (seq + 1, last)) if seq < last else before)

    def with_last(self, last: int) -> Undone:
        """The same, of a log that ends with `last`."""
        cut = tuple((first, min(end, last)) for first, end in self.ranges if first <= last)
        return self if cut == self.ranges else replace(self, ranges=cut)

    def differs_from(self, other: Undone, low: int, high: int) -> bool:
        """Whether of the seqs above `low` and up to `high` others are undone here than there."""
        return _within(self.ranges, low, high) != _within(other.ranges, low, high)

    def with_line(self, version: int, line: int) -> Undone:
        """The same, with a version built again as that line."""
        return replace(self, lines={**self.lines, version: line}, outdated=self.outdated - {version})

    def without(self, versions: Iterable[int]) -> Undone:
        """The same, with nothing said of versions that are gone. The numbers of their lines stay: a load may be using one."""
        return replace(self, outdated=self.outdated - {*versions})

    def document(self) -> dict[str, Any]:
        lines = {str(version): line for version, line in sorted(self.lines.items())}
        return {
            "format": FORMAT,
            "ranges": [list(each) for each in self.ranges],
            "lines": lines,
            "outdated": sorted(self.outdated),
        }


def _within(ranges: Ranges, low: int, high: int) -> list[list[int]]:
    """What of the ranges is above `low` and up to `high`; neighbours as one."""
    joined: list[list[int]] = []
    for first, last in ranges:
        first, last = max(first, low + 1), min(last, high)
        if first > last:
            continue
        if joined and joined[-1][1] + 1 == first:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return joined


def read_undone(path: Path) -> Undone:
    """The record at `path`; empty where there is none. Corruption if it makes no sense."""
    try:
        document = files.read_json(path)
    except NotFound:
        return Undone()
    try:
        if document["format"] != FORMAT:
            raise Corruption(f"{path}: expected format {FORMAT}, got {document['format']!r}; another release wrote it")
        ranges = tuple((_ordinal(first), _ordinal(last)) for first, last in document["ranges"])
        ends = [-1, *(end for each in ranges for end in each)]
        if any(end >= next_ if at % 2 == 0 else end > next_ for at, (end, next_) in enumerate(pairwise(ends))):
            raise ValueError("the ranges are not ascending")
        lines = {_ordinal(version): _ordinal(line) for version, line in document["lines"].items()}
        return Undone(ranges, lines, frozenset(map(_ordinal, document["outdated"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"{path} makes no sense ({error}); restore it, and start again") from error


def save_undone(path: Path, undone: Undone) -> None:
    """Publish the record."""
    files.publish_record(path, undone.document())


def _ordinal(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= MAX_ORDINAL:
        raise ValueError(f"expected a number from 0 to {MAX_ORDINAL}, got {number}")
    return number
