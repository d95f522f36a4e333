"""The delta log of a model: one file a delta, the source of truth for what was acknowledged.

One writer (the model's write lock); `read` and the properties may be called from any thread that holds that lock
or tolerates a file that was pruned meanwhile (NotFound).

After a crash: an entry is there whole, under a name that carries its sequence number and its digest, or not at
all. `base.json` holds `start`: entries at or below it do not count, whether or not their files are gone already.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import xxhash

from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory


class DeltaLog:
    """Entries `start + 1 … last`, contiguous. `start` is None until the first restart: no delta fits yet."""

    def __init__(self, where: ModelDirectory) -> None:
        self._where = where
        self.start: int | None = None
        self.last: int | None = None  # the newest seq held, or None where the log has not begun
        self._entries: dict[int, str] = {}  # seq → digest, ascending and contiguous
        self._base_in_doubt = False  # base.json may say something else than `start`
        self._in_doubt: list[Path] = []  # entries that failed, and may have their names all the same
        files.make_dir(where.log)
        files.sweep(where.log)
        if files.exists(where.log_base):
            start = files.read_json(where.log_base).get("start")
            if not isinstance(start, int) or start < 0:
                raise Corruption(
                    f'{where.log_base}: expected {{"start": <the seq before the first entry>}}, came start {start!r}'
                )
            self.start = start
        for seq, digest, path in where.log_on_disk():
            if self.start is None:
                raise Corruption(
                    f"{where.log_base} is missing, which says where the entries in {where.log} begin; restore it, "
                    "or remove them to do without the deltas that no version has"
                )
            if seq <= self.start:
                _remove(path)  # below a restart or a prune that was cut off
            elif seq != self._start + len(self._entries) + 1:
                raise Corruption(
                    f"delta log {where.log}: expected entry {self._start + len(self._entries) + 1}, came {path.name}; restore what is missing"
                )
            else:
                self._entries[seq] = digest
        if self.start is not None:
            self.last = self.start + len(self._entries)

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

    def append(self, seq: int, data: bytes | memoryview, digest: str) -> None:
        """Make an entry durable. `seq` must be `last + 1`; on return it survives a crash."""
        if seq != self._start + len(self._entries) + 1:
            raise AssertionError(f"append of {seq} after {self.last}")
        if self._base_in_doubt:
            self._publish_start(self._start)
        self._settle()
        path = self._where.log_entry(seq, digest)
        try:
            files.publish_bytes(path, data)
        except BaseException:
            # not acknowledged, so it must not come back at the next start beside another delta of that seq
            self._in_doubt.append(path)
            with contextlib.suppress(StorageError):
                self._settle()
            raise
        self._entries[seq] = digest
        self.last = seq

    def _settle(self) -> None:
        while self._in_doubt:
            files.remove_file(self._in_doubt[-1])
            self._in_doubt.pop()

    def read(self, seq: int) -> bytes:
        """The bytes of an entry, checked against their digest."""
        digest = self._entries.get(seq)
        if digest is None:
            raise NotFound(f"delta {seq} is not in the log, which holds {self._start + 1} to {self.last}")
        path = self._where.log_entry(seq, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            if seq not in self._entries:
                raise NotFound(f"delta {seq} was pruned from the log") from error
            raise StorageError(f"cannot read delta {seq} from {path}: {error}") from error
        if xxhash.xxh3_64_hexdigest(data) != digest:
            raise Corruption(
                f"delta {seq} in {path} does not match its digest; restore the file or load a newer snapshot"
            )
        return data

    def restart(self, seq: int) -> None:
        """Begin anew after `seq`; every entry held is forgotten."""
        self._forget_to(seq, list(self._entries))
        self.last = seq

    def prune(self, upto: int, *, min_age_s: float = 0.0) -> int:
        """Forget entries up to `upto` that are at least `min_age_s` old. Returns how many."""
        newest_allowed = time.time() - min_age_s
        drop = []
        for seq, digest in self._entries.items():
            if seq > upto or self._where.log_entry(seq, digest).stat().st_mtime > newest_allowed:
                break
            drop.append(seq)
        if drop:
            self._forget_to(drop[-1], drop)
        return len(drop)

    def _forget_to(self, start: int, drop: list[int]) -> None:
        # base.json first: a crash in between leaves files that the next start removes, never a gap
        try:
            self._publish_start(start)
        except BaseException:
            # it may have its name all the same, and the next start would then drop what is acknowledged
            with contextlib.suppress(StorageError):
                if self.start is None:
                    files.remove_file(self._where.log_base)
                else:
                    self._publish_start(self.start)
            raise
        self.start = start
        for path in [self._where.log_entry(seq, self._entries.pop(seq)) for seq in drop]:
            _remove(path)

    def _publish_start(self, start: int) -> None:
        self._base_in_doubt = True
        files.publish_json(self._where.log_base, {"start": start})
        self._base_in_doubt = False


def _remove(path: Path) -> None:
    # what stays behind is removed at the next start
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
