"""A rollback to a delta in a cluster: rows are put back in place, and each version goes on under another line.

Before the ingester changes rows for a delta it keeps those that the delta replaces, under the same tag. A rollback
takes the newest deltas off, one after another, by what they replaced, and applies again those of an earlier rollback
that are undone no more. Meanwhile nobody reads the rows: the line's watermarks say that it was replaced, so reads are
refused, and those of the next line are not there. Once all rows are right the pointer says in one step that the next
line counts and which deltas are undone; every node then opens the version anew, with empty caches.

For the thread of the ingester. After a crash the next one begins again: each step may be done twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstore.engine.data.dense_head import GONE
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.placements.following.followed import LogEntry, Pointer
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.info import VersionInfo
from tierstore.formats.names import MAX_ORDINAL
from tierstore.tiers.cluster.write import Change, Writer

log = logging.getLogger(__name__)

Encode = Callable[[VersionInfo, LogEntry], Overlay]


class Undo:
    """Rolls one model back. `open_writer` opens a writer for the line that counts."""

    def __init__(self, shared: SharedModel, open_writer: Callable[[VersionInfo], Writer], encode: Encode) -> None:
        self._shared, self._open_writer, self._encode = shared, open_writer, encode

    def roll_back(
        self, pointer: Pointer, infos: Sequence[VersionInfo], epoch: int, keep_lease: Callable[[], None]
    ) -> None:
        """Do the rollback that the pointer wants; or say in the pointer why it is impossible."""
        to, current = pointer.rollback, pointer.current
        assert to is not None
        undos, outdated = [], set[int]()
        for info in infos:
            undo = _VersionUndo(self._shared, info, pointer, to, self._open_writer(info))
            if undo.problem is None:
                undos.append(undo)
                continue
            undo.writer.close()
            if info.number == current:
                for other in undos:
                    other.writer.close()
                self._refuse(
                    to,
                    f"version {current} of {self._shared.name!r} cannot be rolled back to delta {to}: {undo.problem}",
                )
                return
            outdated.add(info.number)
        try:
            self._do(pointer, to, undos, outdated, epoch, keep_lease)
        finally:
            for undo in undos:
                undo.writer.close()

    def _refuse(self, to: int, why: str) -> None:
        self._shared.update(lambda p: {"rollback": None, "refused": why} if p.rollback == to else {})

    def _do(
        self,
        pointer: Pointer,
        to: int,
        undos: list[_VersionUndo],
        outdated: set[int],
        epoch: int,
        keep_lease: Callable[[], None],
    ) -> None:
        upto = max((undo.undone for undo in undos if undo.undone is not None), default=pointer.seq or 0)
        digest = next((entry.digest for entry in self._shared.read(upto - 1, 1) if entry.seq == upto), "")
        for undo in undos:
            keep_lease()
            with undo.writer.replace_line(epoch, to) as later:
                self._put(undo, later, epoch, keep_lease)
                later.end_line(epoch, upto, digest, undo.tags)
        lines = {undo.info.number: undo.writer.line + 1 for undo in undos}

        def done(now: Pointer) -> Mapping[str, Any]:
            if now.rollback != to or now.undone != pointer.undone:
                return {}
            undone = now.undone.as_of(to, upto)
            for number, line in lines.items():
                undone = undone.with_line(number, line)
            kept = Undone(undone.rollbacks, undone.lines, undone.outdated | outdated)
            marks = {f"mark:{number}": upto for number in lines}
            return {"rollback": None, "refused": None, "undone": json.dumps(kept.document()), **marks}

        self._shared.update(done)
        log.warning("model %s: rolled back to delta %d: deltas up to %d are undone", self._shared.name, to, upto)

    def _put(self, undo: _VersionUndo, later: Writer, epoch: int, keep_lease: Callable[[], None]) -> None:
        number, tags = undo.info.number, undo.tags
        if undo.same is not None:
            self._shared.put_heads_back(epoch, number, undo.same)
        for seq in reversed(undo.pops):
            keep_lease()
            undo.writer.put_before(epoch, seq, tags)
        for entry in undo.pushes:
            keep_lease()
            overlay = self._encode(undo.info, entry)
            changes = changes_of(overlay)
            later.keep_before(epoch, overlay.hi, changes, entry.digest)
            self._shared.put_heads(epoch, number, entry.seq, entry.digest, graphs_of(overlay))
            later.put_rows(epoch, changes, tags)


class _VersionUndo:
    """What is to be done with one version: `pops` are taken off, the last one first, then `pushes` applied.

    `tags` are those whose rows this is not done with. The others have it, as the cluster has lost the end of a rollback
    with which delta `undone` was the newest; they may have later deltas. `same`: the newest delta that stays; None if
    the dense parts stay as they are.
    """

    def __init__(self, shared: SharedModel, info: VersionInfo, pointer: Pointer, to: int, writer: Writer) -> None:
        self.info, self.writer = info, writer
        reached = writer.reached()
        newest, self.undone, self.tags = reached.newest, reached.undone, reached.left
        self.pops: list[int] = []
        self.pushes: list[LogEntry] = []
        self.same: int | None = None
        self.problem: str | None = None
        if others := reached.begun - {to}:
            self.problem = f"a rollback to delta {min(others)} has begun; send that one again first"
        elif reached.lowest is None:
            self.problem = "some of its tags are gone from the cluster: load the snapshot again under a new version"
        if self.problem is not None:
            return
        # a tag that lacks deltas which the others have, since its server was lost, gets them from the log
        lowest = reached.lowest or 0
        base, now, then = info.manifest.delta_seq, pointer.undone, pointer.undone.as_of(to, MAX_ORDINAL)
        changed = set(now.ranges) ^ {(first, min(last, pointer.seq or 0)) for first, last in then.ranges}
        low = max(base, min([to, lowest, *(first - 1 for first, _ in changed)]))
        high = max(newest, to)
        has = [seq for seq in range(low + 1, newest + 1) if now.range_of(seq) is None]
        wanted = [seq for seq in range(low + 1, high + 1) if then.range_of(seq) is None]
        same = next((at for at, (one, two) in enumerate(zip(has, wanted, strict=False)) if one != two), None)
        same = min(len(has), len(wanted)) if same is None else same
        same = min(same, sum(seq <= lowest for seq in has))
        self.pops, pushes = has[same:], wanted[same:]
        self.same = has[same - 1] if same else low
        if lacking := writer.lack_before(self.pops, self.tags):
            self.problem = (
                f"what delta {lacking[0]} replaced is not kept any more; log_retention_s says how long it is. Send the "
                "rows that are right as a delta, or load a snapshot whose delta_seq is beyond the deltas that are wrong"
            )
        for seq in pushes:
            entries = shared.read(seq - 1, 1)
            if not entries or entries[0].seq != seq:
                self.same = None  # the dense parts stay as they are
                self.pushes.clear()
                if self.tags:
                    self.problem = f"delta {seq}, which it lacks, is not in the log any more"
                break
            self.pushes.append(entries[0])


def graphs_of(overlay: Overlay) -> dict[str, bytes]:
    """An overlay's dense parts by head, as the cluster has them."""
    return {name: head.graph or GONE for name, head in overlay.heads.items()}


def changes_of(overlay: Overlay) -> list[Change]:
    """An overlay's rows, for a writer."""
    return [Change(name, rows.keys, rows.rows, rows.deleted) for name, rows in sorted(overlay.tables.items())]
