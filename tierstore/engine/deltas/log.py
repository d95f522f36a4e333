"""The delta log of a model: one file a delta, the source of truth for acknowledged deltas.

One writer (the model's write lock). `read` and the properties: any thread that holds that lock, or that can handle an
entry that was pruned meanwhile (NotFound).

After a crash: an entry is there whole, under a name that has its sequence number and its digest, or not at all.
The model's document (`serving/document.py`) says where the log begins: entries at or below that seq do not count,
whether or not their files are gone already.

A damaged log opens all the same, and reports it by `damage`. Lost entries cannot be read, so a version that lacks some
of them is not served; a version that lacks none can be. If the directory or the document cannot be read, nothing of the
model is served or changed.

`log.end`, next to the log's directory, names the newest entry: if the log ends before it, the entries between are
lost. It is written once an entry is durable, in place and without a flush of its own. So it never names an entry that
is not durable, and after a power failure it may name an earlier one. If the log begins again earlier, it is made
durable first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import xxhash

from tierstore.engine.deltas import origin as origins
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.serving.state_file import StateFile
from tierstore.engine.serving.undone import Age, Undone
from tierstore.errors import Corruption, DeltaError, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.delta.metadata import read_event_time
from tierstore.formats.names import MAX_ORDINAL, ModelDirectory
from tierstore.formats.regular import read_regular

logger = logging.getLogger(__name__)

END_DIGITS = 20  # in `log.end`, as in the names of entries


@dataclass(frozen=True, slots=True)
class Lost:
    """Deltas `first` to `last`, acknowledged, whose content the log does not have. `why` also says what to do."""

    first: int
    last: int
    why: str


class NewEntry(NamedTuple):
    """What is logged of a delta: its bytes, their digest, and where they came from."""

    seq: int
    data: bytes | memoryview
    digest: str
    origin: Origin | None = None


class DeltaLog:
    """Entries `start + 1 … last`, contiguous except for lost ones.

    `start` is None until the log begins for the first time: no delta fits yet.
    """

    def __init__(self, where: ModelDirectory, file: StateFile) -> None:
        self._where, self._file = where, file
        self.start: int | None = None
        self.last: int | None = None  # the newest seq held, or None where the log has not begun
        self._undone_noted: Age = (0, 0)  # in the newest entry of this process that says so
        self._entries: dict[int, str] = {}  # seq → digest, ascending
        self._lost: list[Lost] = []  # ascending
        self._end = 0  # the number in that file; 0 without one
        self._in_doubt: list[tuple[int, Path]] = []  # entries that may have their names although they do not count
        self.unreadable: StorageError | None = file.unreadable  # why it is unknown what its entries mean
        found: list[tuple[int, str, Path]] = []
        try:
            files.make_dir(where.log)
            found = where.log_on_disk()
        except OSError as error:
            self.unreadable = StorageError(f"delta log {where.log} cannot be used: {error}; mend that and start again")
        with contextlib.suppress(StorageError):  # files that cannot be removed do no harm
            files.sweep(where.log)
        self._end, self.start = _read_end(where), file.document.log_start
        if self.unreadable is not None:  # sources go on from there, once it is mended
            self._entries = {seq: digest for seq, digest, _ in found}
            self.start, self.last = None, max(self._entries, default=self._end)
        elif self.start is not None:
            self._add_entries(self.start, found)

    def _add_entries(self, start: int, found: list[tuple[int, str, Path]]) -> None:
        paths: dict[int, list[Path]] = {}
        for seq, digest, path in found:
            if seq <= start:
                _remove(path)  # below a restart or a prune that was interrupted
            else:
                paths.setdefault(seq, []).append(path)
                self._entries[seq] = digest
        self._drop_end_of_run(start, paths)
        log = self._where.log
        for before, seq in pairwise([start, *paths]):
            path = paths[seq][0]
            if seq != before + 1:
                missing = f"delta {before + 1} is" if seq == before + 2 else f"deltas {before + 1} to {seq - 1} are"
                why = f"delta log {log}: {missing} missing, before {path.name}; restore what is missing and start again"
                self._lose(before + 1, seq - 1, why)
            if len(paths[seq]) > 1:
                names = " and ".join(path.name for path in paths[seq])
                why = (
                    f"delta log {log}: {names} have the same seq; remove the one that was not acknowledged and "
                    "start again"
                )
                self._lose(seq, seq, why)
        self.last = max(self._entries, default=start)
        if self.last < self._end:
            missing = (
                f"delta {self._end} is" if self._end == self.last + 1 else f"deltas {self.last + 1} to {self._end} are"
            )
            why = f"delta log {log}: {missing} missing, at its end; restore what is missing and start again"
            self._lose(self.last + 1, self._end, why)
            self.last = self._end

    def _drop_end_of_run(self, start: int, paths: dict[int, list[Path]]) -> None:
        """Drop what comes after a gap within a run of entries, of which the power has failed before they counted."""
        gap = next((before + 1 for before, seq in pairwise([start, *paths]) if seq != before + 1), None)
        if gap is None or gap <= self._end:
            return
        rest = [(seq, path) for seq in paths if seq > gap for path in paths[seq]]
        try:
            firsts = [origins.run_in(origins.read(path), seq) for seq, path in rest]
            if max(firsts) > gap:
                return
            if not self._end and min(firsts) > start + 1:  # not the log's first run, and where it ends is not known
                return
        except (OSError, Corruption, ValueError):
            return  # `read` reports it
        logger.warning(
            "delta log %s: deltas from %d on were not acknowledged before the power failed", self._where.log, gap
        )
        for seq in {seq for seq, _ in rest}:
            del paths[seq], self._entries[seq]
        self._in_doubt += rest
        with contextlib.suppress(StorageError):  # the next delta tries again
            self.last = gap - 1
            self._resolve_doubts()

    def _lose(self, first: int, last: int, why: str) -> None:
        self._lost.append(Lost(first, last, f"{why}, or load a snapshot whose delta_seq is {last} or larger"))

    @property
    def damage(self) -> list[str]:
        """Faults of the log, and what to do."""
        return [lost.why for lost in self._lost] if self.unreadable is None else [str(self.unreadable)]

    def status(self) -> dict[str, int | None]:
        """`start`, `last` (None if unknown), and how many `entries` there are."""
        return {"start": self.start, "last": self.last, "entries": self.entries}

    def check(self) -> None:
        """Check the file that says where the log ends. StorageError if it cannot be read or is damaged."""
        files.read_number(self._where.log_end)

    def held(self) -> list[int]:
        """The seqs that can be read, ascending."""
        return [seq for seq in list(self._entries) if self.why_lost(seq) is None]

    def lost_above(self, seq: int) -> str | None:
        """Why a version with the deltas up to `seq` cannot get the later ones; None if it can."""
        return next((lost.why for lost in self._lost if lost.last > seq), None)

    def why_lost(self, seq: int) -> str | None:
        """Why it is unknown what was acknowledged as delta `seq`; None if it is known."""
        if self.unreadable is not None:
            return str(self.unreadable)
        return next((lost.why for lost in self._lost if lost.first <= seq <= lost.last), None)

    @property
    def undone(self) -> Undone:
        """Which entries no version is to have."""
        return self._file.document.undone

    @property
    def _start(self) -> int:
        if self.start is None:
            raise NotFound(f"delta log {self._where.log} has not begun: no version was active yet")
        return self.start

    @property
    def entries(self) -> int:
        return len(self._entries)

    def digest(self, seq: int) -> str | None:
        """The digest of an entry, or None if it is not held (any more)."""
        return self._entries.get(seq)

    def digest_of(self, after: int, upto: int) -> str | None:
        """One digest of the digests of entries `after + 1` to `upto`; None if one of them is not held."""
        if after < (self.start or 0) or upto > (self.last or 0):
            return None
        held = [digest for seq in range(after + 1, upto + 1) if (digest := self._entries.get(seq)) is not None]
        return xxhash.xxh3_64_hexdigest("".join(held).encode()) if len(held) == upto - after else None

    def received_s(self, seq: int) -> float | None:
        """When an entry was written here, seconds since 1970; None if it is not held (any more)."""
        digest = self._entries.get(seq)
        return None if digest is None else _changed_s(self._where.log_entry(seq, digest)) or None

    def append(self, *run: NewEntry) -> None:
        """Make entries durable, with their origins, all or none. Their seqs must go on from `last`; on return all
        survive a crash.

        Their files are flushed before the first has its name, and their directory once. Power that fails before that
        may leave any of the names; what comes after a gap of a run was not acknowledged, and the next start drops it.
        """
        first, age = run[0].seq, self.undone.age
        if self.last is None or [entry.seq for entry in run] != list(range(self.last + 1, self.last + 1 + len(run))):
            raise AssertionError(f"append of {[entry.seq for entry in run]} after {self.last}")
        self._file.repair()  # or the next start might serve another version, without these deltas
        self._resolve_doubts()
        contents: list[tuple[Path, list[bytes | memoryview]]] = []
        for entry in run:
            origin = entry.origin
            if entry.seq > first:
                origin = origins.with_run(origin, first)
            elif age != self._undone_noted:
                origin = origins.with_undone(origin, age)
            behind = [] if origin is None else [origins.encode(origin)]
            contents.append((self._where.log_entry(entry.seq, entry.digest), [entry.data, *behind]))
        self._in_doubt += [(entry.seq, path) for entry, (path, _) in zip(run, contents, strict=True)]
        try:
            files.publish_all(contents)
            for entry in run:
                self._entries[entry.seq] = entry.digest
            self.last = run[-1].seq  # from here on they count
            self._undone_noted = age
        except BaseException:
            # they are not acknowledged, so the next start must not find one next to another delta of that seq
            with contextlib.suppress(StorageError):
                self._resolve_doubts()
            raise
        self._note_end(run[-1].seq)

    def _note_end(self, seq: int) -> None:
        try:
            _write_end(self._where, seq)
            self._end = seq
        except OSError as error:  # the file only says less than it could
            logger.warning("%s cannot be written: %s", self._where.log_end, error)

    def _resolve_doubts(self) -> None:
        while self._in_doubt:
            seq, path = self._in_doubt[-1]
            if self.last is None or seq > self.last:
                self._entries.pop(seq, None)
                files.remove_file(path)
            self._in_doubt.pop()

    def read(self, seq: int) -> bytes:
        """The bytes of an entry, checked against their digest."""
        if (lost := self.why_lost(seq)) is not None:
            raise Corruption(lost)
        digest = self._entries.get(seq)
        if digest is None:
            raise NotFound(f"delta {seq} is not in the log, which holds {self._start + 1} to {self.last}")
        path = self._where.log_entry(seq, digest)
        try:
            data, _ = origins.split(read_regular(path), path)
        except Corruption:
            raise
        except OSError as error:
            if seq not in self._entries:
                raise NotFound(f"delta {seq} was pruned from the log") from error
            raise StorageError(f"cannot read delta {seq} from {path}: {error}") from error
        if xxhash.xxh3_64_hexdigest(data) != digest:
            raise Corruption(
                f"delta {seq} in {path} does not match its digest; restore the file or load a newer snapshot"
            )
        return data

    def newest_origin(self, source: str) -> Origin | None:
        """The origin of the newest entry that came from `source`, the origin's field of that name."""
        for seq in sorted(self._entries, reverse=True):
            try:
                origin = origins.read(self._where.log_entry(seq, self._entries[seq]))
            except OSError as error:  # `read` reports it when the delta is needed
                logger.warning("the origin of delta %d cannot be read: %s", seq, error)
                continue
            if origin is not None and origin.get("source") == source:
                return origin
        return None

    def check_undone(self) -> None:
        """Corruption where the document is of an earlier or of a later moment than the entries, as a copy's may be."""
        undone, last = self.undone, self.last or 0
        if undone.newest > last:
            raise Corruption(
                f"{self._where.state} is of a later moment than delta log {self._where.log}: "
                f"delta {undone.newest} had come then, and the log ends with {last}"
            )
        for seq, digest in self._entries.items():
            try:
                age = origins.undone_in(origins.read(self._where.log_entry(seq, digest)))
            except (OSError, ValueError):  # `read` reports it where the delta is needed
                continue
            if age > undone.age:
                raise Corruption(
                    f"{self._where.state} is of an earlier moment than delta {seq} in {self._where.log}, which came "
                    "after a rollback that is not in it"
                )

    def is_passed_over(self, seq: int, version: int) -> bool:
        """Whether a version did not accept the dense part of an entry that was applied all the same."""
        digest = self._entries.get(seq)
        try:
            origin = None if digest is None else origins.read(self._where.log_entry(seq, digest))
        except OSError:  # `read` reports it
            return False
        return version in origins.passed_over_by(origin)

    def event_time(self, seq: int) -> datetime | None:
        """The event time of an entry, from its first message alone; None if it is not held, or is damaged."""
        digest = self._entries.get(seq)
        try:
            return None if digest is None else read_event_time(self._where.log_entry(seq, digest))
        except DeltaError:  # pruned meanwhile, or `read` reports it
            return None

    def restart(self, seq: int) -> None:
        """Begin again after `seq`; all entries are forgotten."""
        self.prepare_restart(seq)
        self._file.publish(replace(self._file.document, log_start=seq))
        self.restarted(seq)

    def prepare_restart(self, seq: int) -> None:
        """Before a document says that the log begins after `seq`: or a crash after it would look like a loss."""
        if seq < self._end:
            files.publish_bytes(self._where.log_end, files.checked_number(seq, digits=END_DIGITS))
            self._end = seq

    def restarted(self, seq: int) -> None:
        """After a document said so: all entries are forgotten. May be done twice."""
        # the next start would take these for later entries
        self._in_doubt += [(n, self._where.log_entry(n, digest)) for n, digest in self._entries.items() if n > seq]
        self._forget_to(seq, list(self._entries))
        self.last = seq
        self._note_end(seq)
        with contextlib.suppress(StorageError):
            self._resolve_doubts()

    def ages(self) -> Iterator[tuple[int, float]]:
        """(seq, when it was written, in seconds since 1970) of each entry, ascending."""
        return ((seq, _changed_s(self._where.log_entry(seq, digest))) for seq, digest in self._entries.items())

    def prune(self, upto: int) -> int:
        """Forget entries up to `upto`. Returns how many."""
        drop = [seq for seq in self._entries if seq <= upto]
        if drop:
            # the document first: a crash in between leaves files that the next start removes, never a gap
            self._file.publish(replace(self._file.document, log_start=drop[-1]))
            self._forget_to(drop[-1], drop)
        return len(drop)

    def _forget_to(self, start: int, drop: list[int]) -> None:
        self.start = start
        self._lost = [lost for lost in self._lost if lost.last > start]
        for path in [self._where.log_entry(seq, self._entries.pop(seq)) for seq in drop]:
            _remove(path)


def _read_end(where: ModelDirectory) -> int:
    """The number in `log.end`; 0 without one (an earlier release), or if its content is damaged."""
    try:
        text = files.read_number(where.log_end)
    except StorageError as error:
        logger.warning("%s; it is not known whether the log ends where it should", error)
        return 0
    return int(text) if text is not None and text.isdigit() and int(text) <= MAX_ORDINAL else 0


def _write_end(where: ModelDirectory, seq: int) -> None:
    """Write in place, always the same length: a sector has the old number or the new one, wherever the power fails."""
    fd = os.open(where.log_end, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        content = files.checked_number(seq, digits=END_DIGITS)
        os.pwrite(fd, content, 0)
        if os.fstat(fd).st_size != len(content):  # of an earlier release
            os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def _changed_s(path: Path) -> float:
    """When a file was last written, seconds since 1970; 0 for a file that was removed and is not needed any more."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(path: Path) -> None:
    # files left behind are removed at the next start
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
