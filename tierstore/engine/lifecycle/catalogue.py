"""The catalogue of a model's versions on disk: complete, loading, unfinished and damaged ones, and leftovers.

Its fields are replaced as a whole, or changed in one step, under the model's write lock; any thread may read without
it.

After a crash: a version is there if its record is. Leftovers of a load stay for a time, so that a load of the same
snapshot can go on from them; leftovers of a drop or a fold are removed at the next start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.lifecycle.unfinished import Unfinished, find_unfinished
from tierstore.engine.serving.live import LiveViews
from tierstore.engine.serving.state_file import StateFile
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Conflict, Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory, VersionDirectory
from tierstore.types import Progress, TableSpec, Tier

log = logging.getLogger(__name__)


class Catalogue:
    """The versions of one model on disk.

    `keep_loads`: loads that were broken off are kept, for others to go on from. `copied`: the directory was copied
    while a process had it open (`copied.py`).
    """

    def __init__(
        self,
        name: str,
        where: ModelDirectory,
        live: LiveViews,
        log: DeltaLog,
        file: StateFile,
        *,
        keep_loads: bool,
        copied: bool,
    ) -> None:
        self._name, self._where, self._live, self._log, self._file = name, where, live, log, file
        self._keep_loads, self._copied = keep_loads, copied
        # guarded by the write lock
        self._infos: dict[int, VersionInfo] = {}
        self.loading: dict[int, tuple[int, Progress]] = {}  # version → (delta_seq, progress)
        self.unfinished: dict[int, Unfinished] = {}
        # written at start, and by drops and loads of that version
        self.damaged: dict[int, str] = {}  # versions whose record could not be read at start → why
        self.replaced: dict[Path, int] = {}  # directories of lines that no longer count → their version
        # written only at start
        self.unreadable: str | None = None  # why the directory could not be listed
        self.leftovers: list[Path] = []  # left by crashes; nothing needs them

    # --- complete versions

    @property
    def numbers(self) -> list[int]:
        """Complete versions, ascending."""
        return sorted(self._infos)

    def infos(self) -> list[VersionInfo]:
        """The record of each complete version, ascending."""
        infos = self._infos
        return [infos[number] for number in sorted(infos)]

    def where(self, number: int) -> VersionDirectory:
        """The directory of a version: of its line that counts."""
        return self._where.version(number, self._log.undone.line(number))

    def __contains__(self, number: int) -> bool:
        return number in self._infos

    def get(self, number: int) -> VersionInfo | None:
        return self._infos.get(number)

    def info(self, number: int) -> VersionInfo:
        """The record of a version. NotFound names the existing versions; StorageError if there may be others."""
        info = self._infos.get(number)
        if info is None:
            self.check_readable()
            raise NotFound(
                f"model {self._name!r} has no version {number}; it has {', '.join(map(str, self.numbers)) or 'none'}"
            )
        return info

    def specs(self, number: int) -> Mapping[str, TableSpec] | None:
        """The tables of a version; None if it is not here (yet)."""
        info = self._infos.get(number)
        return None if info is None else info.specs

    def add(self, info: VersionInfo) -> None:
        """Add a version whose directory is complete."""
        with self._live.write:
            self._infos = {**self._infos, info.number: info}

    def replace(self, infos: Iterable[VersionInfo]) -> None:
        """Use these lines of versions that were built again. Holds `write`."""
        newer = {info.number: info for info in infos if self._infos[info.number] is not info}
        self.replaced |= {self._infos[number].where.root: number for number in newer}
        self._infos = {**self._infos, **newer}

    def forget(self, number: int) -> None:
        """Remove a version from the catalogue."""
        with self._live.write:
            self._infos = {key: info for key, info in self._infos.items() if key != number}

    def is_stale(self, info: VersionInfo) -> bool:
        """Whether deltas that the version lacks are gone from the log."""
        return self._log.start is not None and info.watermark < self._log.start

    def is_outdated(self, number: int) -> bool:
        """Whether the version holds undone deltas: it must be built again before it serves."""
        return number in self._log.undone.outdated

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep: no version, complete or loading, and no log."""
        present = self._infos or self.damaged or self.loading or self.unfinished
        return not present and self._log.start is None and self.unreadable is None

    def check_readable(self) -> None:
        """StorageError if the directory could not be listed: there may be versions that are not here."""
        if self.unreadable is not None:
            raise StorageError(self.unreadable)

    # --- loads

    def loads(self) -> list[tuple[int, Progress]]:
        """Versions that are being loaded, and their progress."""
        return [
            (number, progress) for number, (_, progress) in sorted(self.loading.items()) if number not in self._infos
        ]

    def keep_unfinished(self, number: int) -> bool:
        """Note an unfinished load if another load can go on from it."""
        found = find_unfinished(self.where(number)) if self._keep_loads else None
        if found is None:
            return False
        with self._live.write:
            self.unfinished = {**self.unfinished, number: found}
        log.info(
            "model %s: the load of version %d was broken off; %d MiB are kept, and loading the same snapshot goes on "
            "from there",
            self._name,
            number,
            found.bytes >> 20,
        )
        return True

    def discard_unfinished(self, number: int) -> Path | None:
        """Forget an unfinished load, and rename its directory. Returns the path that is still to be removed."""
        with self._live.write:
            if number not in self.unfinished:  # a load goes on from it
                return None
            trash = files.discard(self.where(number).root)
            self.unfinished = {other: load for other, load in self.unfinished.items() if other != number}
            return trash

    def discard_unfinished_up_to(self, number: int) -> list[Path]:
        """Discard unfinished loads of older versions, which a load of `number` replaces, and forget that of `number`
        itself.

        Holds `write`.
        """
        older = [other for other in self.unfinished if other < number]
        trash = [files.discard(self.where(other).root) for other in older]
        self.unfinished = {other: load for other, load in self.unfinished.items() if other > number}
        return [path for path in trash if path is not None]

    def discard_damaged(self, number: int) -> Path | None:
        """Forget a damaged version, and rename its directory. Returns the path that is still to be removed."""
        with self._live.write:
            self.check_not_loading(number)
            self.loading[number] = self._log.last or 0, Progress("drop")  # so that no load of it begins meanwhile
        try:
            trash = files.discard(self.where(number).root)
            del self.damaged[number]
            return trash
        finally:
            with self._live.write:
                del self.loading[number]

    def check_not_loading(self, number: int) -> None:
        """Conflict if the version is being loaded."""
        if number in self.loading:
            raise Conflict(f"version {number} of {self._name!r} is being loaded")

    # --- start

    def find(self) -> None:
        """Find the versions on disk, and leftovers of crashes next to them. Before the model starts.

        A fault of one version, or of the directory as a whole, does not hide the others.
        """
        self._find_leftovers(self._where.root)
        infos: dict[int, VersionInfo] = {}
        lines: list[tuple[int, int]] = []
        try:
            lines = self._where.versions_on_disk()
            if self._log.unreadable is not None:
                raise self._log.unreadable
            if self._copied:
                self._log.check_undone()
        except OSError as error:
            self.unreadable = f"{self._where.root} cannot be read: {error.strerror or error}; mend that and start again"
            if isinstance(error, StorageError):  # it is unknown what the directory means
                self.unreadable, lines = str(error), []
        for number, line in lines:
            try:
                if line == self._log.undone.line(number):
                    info = self._find_version(number)
                else:
                    info = None
                    self._discard_replaced(number, line)
            except Exception as error:  # noqa: BLE001 - the others serve
                if os.path.lexists(self._where.version(number, line).root):  # or it lost its name, if nothing more
                    self.damaged[number] = str(error)
                log.error("model %s: version %d is damaged: %s", self._name, number, error)
            else:
                if info is not None:
                    infos[number] = info
        self._infos = infos
        for number in sorted({*self._file.document.versions} - {*infos, *self.damaged, *self.unfinished}):
            if self.unreadable is None:
                log.warning("model %s: version %d was there and is not any more", self._name, number)

    def _discard_replaced(self, number: int, line: int) -> None:
        """Remove a line that does not count, if the line that counts is there."""
        where, counts = self._where.version(number, line), self.where(number)
        if files.exists(where.record) and not files.exists(counts.record):
            raise Corruption(
                f"{where.root} is a whole line of the version, and {counts.root} should be: restore the one that "
                f"{self._where.state} means"
            )
        self._discard(where.root)

    def _find_version(self, number: int) -> VersionInfo | None:
        where = self.where(number)
        if not files.exists(where.record):
            if files.exists(where.db) and number not in self._file.document.loads:  # a load says so before it begins
                raise Corruption(f"{where.record} is missing, and its rows are there: restore it, or drop the version")
            if not self.keep_unfinished(number):
                self._discard(where.root)
            return None
        self._discard(where.build)  # of a load or a fold that was interrupted
        for folder in (where.root, where.hot_keys(Tier.HOST), where.hot_keys(Tier.DEVICE)):
            self._find_leftovers(folder)
        info = VersionInfo(where, self._file.document.accepted.get(number, 0))
        if (info.manifest.model, info.number) != (self._name, number):
            raise Corruption(
                f"{where.record} is of version {info.number} of {info.manifest.model!r}: expected version {number} of "
                f"{self._name!r}; put back what belongs here, or drop the version and load it again"
            )
        return info

    def _find_leftovers(self, folder: Path) -> None:
        try:
            self.leftovers += files.leftovers(folder)
        except StorageError as error:  # the next start tries again
            log.warning("model %s: %s", self._name, error)

    def _discard(self, folder: Path) -> None:
        """Have a folder removed that nothing reads."""
        try:
            trash = files.discard(folder)
        except StorageError as error:  # the next start tries again
            log.warning("model %s: %s", self._name, error)
            return
        if trash is not None:
            self.leftovers.append(trash)
