"""What `docs/consistency.md` promises of a model, as a history by content: what was acknowledged, and what was undone.

It is written from the promises, and imports nothing of tierstore, so that a rule that the engine has wrong is not here too. What it
does not foretell is how far a version was folded, and so when the log is pruned: that is asked of the store, as `holes`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

Rows = dict[str, dict[int, np.ndarray]]  # by table, by key


@dataclass(frozen=True)
class Delta:
    """A delta that was acknowledged. None as a row: the key is deleted. dense: whether it brought a dense part."""

    data: bytes
    changes: dict[str, dict[int, np.ndarray | None]]
    base_version: int | None = None
    dense: bool = False


@dataclass
class Snapshot:
    """A version as its trainer wrote it. holes: ranges of seqs (after, up to) that it was forced to do without."""

    delta_seq: int
    rows: Rows
    holes: list[tuple[int, int]] = field(default_factory=list)


class History:
    """Of one model. Each method is called for what was acknowledged, in that order."""

    def __init__(self) -> None:
        self.versions: dict[int, Snapshot] = {}
        self.active: int | None = None
        self.canary: int | None = None
        self.before: list[int] = []  # versions that were active and not left by a rollback, in that order
        self.last: int | None = None  # the newest seq
        self.deltas: dict[int, Delta] = {}
        self.undone: frozenset[int] = frozenset()
        self._undone_after: dict[int, frozenset[int]] = {}  # by seq: what was undone right after that delta was applied

    def copy(self) -> History:
        return copy.deepcopy(self)

    def loaded(self, number: int, delta_seq: int, rows: Rows, *, activate: bool) -> None:
        self.versions[number] = Snapshot(delta_seq, rows)
        self._forget(number)
        if activate:
            self.activated(number)

    @property
    def served_last(self) -> int | None:
        """What a rollback serves; None: it is refused."""
        return None if self.active is None or not self.before else self.before[-1]

    def _forget(self, number: int | None) -> None:
        self.before = [other for other in self.before if other != number]

    def dropped(self, number: int) -> None:
        del self.versions[number]
        self._forget(number)

    def deactivated(self) -> None:
        assert self.active is not None
        self.before.append(self.active)
        self.active = self.canary = None

    def activated(self, number: int, *, by_rollback: bool = False) -> None:
        """Also by a rollback to it, or as the canary that is promoted: a canary stands beside one active version."""
        if number == self.active:
            return
        if self.active is not None and not by_rollback:
            self.before.append(self.active)
        self._forget(number)
        self.active, self.canary = number, None
        if self.last is None or self.versions[number].delta_seq > self.last:
            self._moved_on(self.versions[number].delta_seq)

    def acknowledged(self, seq: int, delta: Delta) -> None:
        self.deltas[seq] = delta
        self._moved_on(seq)

    def _moved_on(self, last: int) -> None:
        self.last = last
        self._undone_after[last] = self.undone

    def undone_by(self, seq: int) -> frozenset[int]:
        """What is undone after a rollback to a delta: what was right after it was applied, and all that came since."""
        assert self.last is not None
        # a snapshot may have gone on beyond the seq, or the log have begun after it
        then = max((held for held in self._undone_after if held <= seq), default=0)
        return self._undone_after.get(then, frozenset()) | {*range(seq + 1, self.last + 1)}

    def rolled_back_to(self, seq: int) -> None:
        undone = self.undone_by(seq)
        if undone != self.undone:
            self.undone, self.canary = undone, None

    def held_by(self, number: int) -> dict[int, Delta]:
        """The deltas that a version holds, ascending: above its snapshot, meant for it, not undone."""
        version = self.versions[number]
        return {
            seq: delta
            for seq, delta in sorted(self.deltas.items())
            if version.delta_seq < seq
            and seq not in self.undone
            and delta.base_version in (None, number)
            and not any(after < seq <= upto for after, upto in version.holes)
        }

    def dense_of(self, number: int) -> int | None:
        """The delta that brought a version's dense part; snapshots bring none."""
        return max((seq for seq, delta in self.held_by(number).items() if delta.dense), default=None)

    def rows_of(self, number: int) -> Rows:
        rows = {table: dict(of) for table, of in self.versions[number].rows.items()}
        for delta in self.held_by(number).values():
            for table, changes in delta.changes.items():
                for key, new in changes.items():
                    if new is None:
                        rows[table].pop(key, None)
                    else:
                        rows[table][key] = new
        return rows
