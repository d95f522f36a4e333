"""Merging of sorted rows: rows in ascending order of keys, with later changes applied.

Pure functions over immutable arrays; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.types import Keys, Rows

Changes = tuple[Keys, npt.NDArray[np.bool_], Rows]  # keys [n], which of them are deleted, the rows of the others


def merged_blocks(
    base: Iterator[tuple[Keys, Rows]], changes: Iterator[Changes], entries: int
) -> Iterator[tuple[Keys, Rows, int]]:
    """Apply `changes` to the rows of `base`: yields keys, rows, and how many deleted keys were among them.

    In both, keys ascend from batch to batch, and no batch is empty. Yielded batches have at most `entries` rows if those of `base` and `changes` do.
    The first batch of changes is read before the first of `base`.
    """
    pending = next(changes, None)
    for keys, rows in base:
        while len(keys):
            if pending is None or pending[0][0] > keys[-1]:
                yield keys, rows, 0
                break
            end = min(int(keys[-1]), int(pending[0][-1]))
            part, later = _split_at(pending, end)
            upto = int(np.searchsorted(keys, end, "right"))
            merged_keys, merged, gone = _merge(keys[:upto], rows[:upto], *part)
            for start in range(0, max(1, len(merged_keys)), entries):
                piece = slice(start, start + entries)
                yield merged_keys[piece], merged[piece], 0 if start else gone
            keys, rows = keys[upto:], rows[upto:]
            pending = later if len(later[0]) else next(changes, None)
    while pending is not None:
        changed, deleted, new = pending
        yield changed[~deleted], new, int(np.count_nonzero(deleted))
        pending = next(changes, None)


def ascending(parts: Sequence[Iterator[tuple[Keys, Rows]]], each: int) -> Iterator[tuple[Keys, Rows]]:
    """The rows of all parts by key. Keys of a part ascend, and no key is in two parts.

    With batches of at most `each` rows, it holds and yields at most twice as many for each part.
    """
    if len(parts) == 1:
        yield from parts[0]
        return
    sources = [_Ahead(part, each) for part in parts]
    while sources := [source for source in sources if source.fill()]:
        # above this key a part may have keys that are not read yet
        sure = min((int(source.keys[-1]) for source in sources if not source.ended), default=None)
        pieces = [source.pop(sure) for source in sources]
        keys, rows = (np.concatenate(column) for column in zip(*pieces, strict=True))
        order = np.argsort(keys, kind="stable")
        yield keys[order], rows[order]


class _Ahead:
    """The rows that were read ahead of one part: at least `least`, until the part has `ended`."""

    def __init__(self, part: Iterator[tuple[Keys, Rows]], least: int) -> None:
        self._part, self._least = part, least
        self.keys, self._rows = np.empty(0, np.int64), np.empty((0, 0), np.uint8)
        self.ended = False

    def fill(self) -> bool:
        """Read ahead. Returns whether there are rows left."""
        while not self.ended and len(self.keys) < self._least:
            batch = next(self._part, None)
            if batch is None:
                self.ended = True
            elif len(self.keys):
                self.keys, self._rows = np.concatenate([self.keys, batch[0]]), np.concatenate([self._rows, batch[1]])
            else:
                self.keys, self._rows = batch
        return bool(len(self.keys))

    def pop(self, upto: int | None) -> tuple[Keys, Rows]:
        """Take the rows with keys up to and including `upto`; None: all."""
        at = len(self.keys) if upto is None else int(np.searchsorted(self.keys, upto, "right"))
        popped = self.keys[:at], self._rows[:at]
        self.keys, self._rows = self.keys[at:], self._rows[at:]
        return popped


def _split_at(entries: Changes, end: int) -> tuple[Changes, Changes]:
    """Entries up to and including the key `end`, and the others."""
    keys, deleted, rows = entries
    at = int(np.searchsorted(keys, end, "right"))
    live = at - int(np.count_nonzero(deleted[:at]))
    return (keys[:at], deleted[:at], rows[:live]), (keys[at:], deleted[at:], rows[live:])


def _merge(
    keys: Keys, rows: Rows, changed: Keys, deleted: npt.NDArray[np.bool_], new_rows: Rows
) -> tuple[Keys, Rows, int]:
    """Rows without changed ones, merged by key with the new rows; and how many keys were marked as deleted."""
    if not len(changed):
        return keys, rows, 0
    kept = ~np.isin(keys, changed, assume_unique=True)
    all_keys = np.concatenate([keys[kept], changed[~deleted]])
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], np.concatenate([rows[kept], new_rows])[order], int(np.count_nonzero(deleted))
