"""The audit: who changed what, when, with which outcome, and what was before and after.

Lines of JSON, to which is only added.

    audit/audit.jsonl      the newest lines; audit.jsonl.1 the file before it, and so on
    audit/deltas.jsonl     those of deltas: they are by far the most, and must not push the others out

A line of a change is written before the change is answered, and flushed to the drive, except those of deltas: the delta
log holds them anyway, so they are flushed once a second. Where the disk is full, or fails, changes go on: lines wait in
memory, at most `MOST_WAITING`, and are written with the next line that can be; how many were lost is said then. What
looks like a secret is cut out of every line.

Any thread; several processes may add to one file, each with a whole line at once. After a crash the last line may be
cut: the next one begins on a line of its own, and `read` passes over the piece.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tierstore.errors import StorageError, explained
from tierstore.formats import files
from tierstore.formats.names import AUDIT, AUDIT_FILE, DELTAS_FILE
from tierstore.log_limits import LineLimit
from tierstore.logs import without_secrets

log = logging.getLogger(__name__)

SIZE, KEPT = 16 << 20, 8  # bytes of a file; files before the newest
MOST_WAITING = 10_000  # lines in memory while they cannot be written
_FLUSH_S = 1.0
_REFUSED_BURST, _REFUSED_EVERY_S = 100, 1.0
_AS_JSON = json.JSONEncoder(default=str).encode
_LONGEST = 2000  # characters of a text in a line
# of `who`: the principal, whose lines are limited for themselves; all others, whose `who`
# begins with an address, are one
_PRINCIPAL = re.compile(r"(?:job \w+ of )?((?:token|certificate) .*?) at ")


class AuditedChange:
    """A request to change something, for as long as it is worked on: whether it has a line, or
    was left out for their number.
    """

    has_line = False


ATTEMPT: ContextVar[AuditedChange | None] = ContextVar(
    "ATTEMPT", default=None
)  # the one that this thread or task works on


class Audit:
    """The audit of a directory. `size` is where a file is put aside, `kept` how many of those are kept."""

    def __init__(self, directory: Path, *, size: int = SIZE, kept: int = KEPT) -> None:
        self.path = directory / AUDIT / AUDIT_FILE
        self._changes = _Lines(self.path, size, kept)
        self._deltas = _Lines(directory / AUDIT / DELTAS_FILE, size, kept)
        self._limit = LineLimit(_REFUSED_BURST, _REFUSED_EVERY_S)

    @property
    def problem(self) -> str | None:
        """Why lines wait."""
        return self._changes.problem or self._deltas.problem

    def change(self, what: str, who: str, outcome: str, *, flush: bool = True, **fields: Any) -> None:
        """Add a line: `outcome` is `done`, or `failed` with the error in `fields`.

        Fields that are None are left out. Never raises.
        """
        if (attempt := ATTEMPT.get()) is not None:
            attempt.has_line = True
        if outcome == "done" or self._admitted(outcome, who, fields):
            lines = self._deltas if what == "delta" else self._changes
            lines.add({"who": who, "what": what, "outcome": outcome, **fields}, flush=flush)

    def refused(self, what: str, who: str, error: Exception) -> None:
        """Add a line about an attempt to change something by a caller that may not. Limited in rate."""
        self.change(what, who, "refused", flush=False, error=explained(error))

    def _admitted(self, kind: str, who: str, fields: dict[str, Any]) -> bool:
        """Whether one more line of the kind may be written: clients must not fill a disk. Notes how many were not."""
        principal = _PRINCIPAL.match(who)
        left_out = self._limit.admit((kind, "" if principal is None else principal[1]))
        if left_out:
            fields["left_out"] = left_out
        return left_out is not None

    def latest(self, since_s: float, nbytes: int = 256 << 10) -> list[dict[str, Any]]:
        """The lines since a time, in seconds since 1970, but for those of deltas, oldest first,
        each with its time as `at_s`.

        As many of them as fit in the last `nbytes` of the newest file, and those that wait.
        Empty where that cannot be read.
        """
        found = []
        for line in self._changes.last(nbytes):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a piece of a line
                document = json.loads(line)
                at_s = datetime.fromisoformat(document["time"]).timestamp()
                if at_s >= since_s:
                    found.append({"at_s": at_s, **document})
        return found

    def close(self) -> None:
        """Flush and close the files; the next line opens its own again."""
        for lines in (self._changes, self._deltas):
            lines.close()


class _Lines:
    """A file of lines, and those that were put aside."""

    def __init__(self, path: Path, size: int, kept: int) -> None:
        self._path, self._size, self._kept = path, size, kept
        self._lock = threading.Lock()
        # guarded by _lock
        self._fd = -1
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._torn = False  # the file ends within a line
        self._flushed_s = 0.0
        self.problem: str | None = None  # why lines wait

    def add(self, document: Mapping[str, Any], *, flush: bool) -> None:
        line = _line(document)
        with self._lock:
            self._waiting.append(line)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            try:
                self._write_waiting(flush=flush)
            except (OSError, StorageError) as error:
                if self.problem is None:
                    log.error("the audit cannot be written to %s, its lines wait: %s", self._path, error)
                self.problem = f"the audit is not written: {error}"
                self._close()

    def _write_waiting(self, *, flush: bool) -> None:
        self._open()
        if self._lost:
            self._write(_line({"who": "tierstore", "what": "audit", "outcome": "failed", "lost_lines": self._lost}))
            self._lost = 0
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()
        now_s = time.monotonic()
        if flush or now_s - self._flushed_s >= _FLUSH_S:
            os.fsync(self._fd)
            self._flushed_s = now_s
        self.problem = None

    def _write(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._torn = written != len(data)
        if self._torn:
            raise StorageError(f"only {written} of {len(data)} bytes could be written: the disk is full")

    def _open(self) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_size >= self._size:
            self._close()
            self._put_aside()
        if self._fd < 0:
            files.make_dir(self._path.parent)
            with contextlib.suppress(OSError):
                os.chmod(self._path.parent, 0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _put_aside(self) -> None:
        for number in range(self._kept, 0, -1):
            older = self._path if number == 1 else _numbered(self._path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, _numbered(self._path, number))
        if not self._kept:
            self._path.unlink(missing_ok=True)
        files.fsync_dir(self._path.parent)

    def last(self, nbytes: int) -> list[bytes]:
        """Lines, or pieces of them, in the last bytes of the file, and those that wait."""
        data = b""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
            data = file.read()
        with self._lock:
            return [*data.splitlines(), *self._waiting]

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0:
                os.fsync(self._fd)
            self._close()


def read(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines in a directory's audit, oldest first; pieces of lines that a crash has cut are passed over."""
    changes, deltas = (_read(directory / AUDIT / name) for name in (AUDIT_FILE, DELTAS_FILE))
    return heapq.merge(changes, deltas, key=lambda line: str(line.get("time", "")))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    numbers = sorted(
        (int(end) for other in path.parent.glob(f"{path.name}.*") if (end := other.name.rpartition(".")[2]).isdigit()),
        reverse=True,
    )  # fmt: skip
    for one in [*(_numbered(path, number) for number in numbers), path]:
        try:
            with open(one, "rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        document = json.loads(line)
                        if isinstance(document, dict):
                            yield document
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"cannot read {one}: {error.strerror or error}") from error


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _line(document: Mapping[str, Any]) -> bytes:
    stamped = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), **document}
    clean = {name: _clean(value) for name, value in stamped.items() if value is not None}
    return (_AS_JSON(clean) + "\n").encode()


def _clean(value: Any) -> Any:
    """A value without what looks like a secret, and of bounded length."""
    if value is None or isinstance(value, (int, float)):  # most are
        return value
    if isinstance(value, Mapping):
        return {str(name): _clean(one) for name, one in value.items()}
    if not isinstance(value, (str, Path)):
        return value
    text = without_secrets(str(value))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
