"""`backup`: a model as it is at one moment, in a directory or in object storage, file by file, while it serves.

First an image of the model's directory is made beside it, of hard links: files are written once and never changed.
Only this makes others wait: switches, drops and folds until it is made, deltas during its last step. Then the image is
read, contents that the target lacks are sent there, and the image is removed.

On a thread of low priority. A crash leaves an image, which the next start removes, and contents at the target, which
the next backup uses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierstore.arguments import whole_number
from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.model import Model
from tierstore.engine.operations.low_priority import low_priority
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Closed, Conflict, Corruption, StorageError
from tierstore.formats import files
from tierstore.formats.backups import Backup, BackupFile, Backups, content_of, only_backup, record_name, sender
from tierstore.formats.names import BUILD, DB, DELTA_SUFFIX, STRINGS_SUFFIX, TEMPORARY, ModelDirectory, is_scratch
from tierstore.formats.one_writer import StillAlone
from tierstore.formats.uploads import scratch_directory
from tierstore.tiers.background import Pace
from tierstore.tiers.disk.sealed import BASE
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import BackupReport, Progress, ProgressFn

log = logging.getLogger(__name__)

SCRATCH = f"{TEMPORARY}backup-"
MOST_KEPT = 10_000  # backups of a model in one place
_PAUSE_S = 0.01


def backup(
    model: Model, target: Path | str, keep: int, progress: ProgressFn, cancelled: threading.Event | None
) -> BackupReport:
    """See `Store.backup`; `target` was checked by `new_target`."""
    _check(model, keep)
    throttle = model.state.shared.throttle
    return low_priority(throttle, "backup", lambda stops: _backup(model, target, keep, progress, stops), cancelled)


def _check(model: Model, keep: int) -> None:
    """Conflict for a model whose rows are on other machines, or that has none."""
    whole_number("keep", keep, 1, MOST_KEPT)
    model.state.shared.placement.refusals.check("backup", model=model.name)
    if not model.catalogue.numbers:
        raise Conflict(f"model {model.name!r} has no version to back up")


def _backup(
    model: Model, target: Path | str, keep: int, progress: ProgressFn, stops: Callable[[], bool]
) -> BackupReport:
    throttle = model.state.shared.throttle
    pace = Pace(lambda: throttle.share)

    def goes_on(step: Progress) -> None:
        model.state.live.check_open()
        if stops():
            raise Closed(f"the backup of {model.name!r} was cancelled")
        still_alone(False)
        progress(step)
        pace.sleep()

    with (
        only_backup(target, model.name) as still_alone,
        scratch_directory(model.where.root, SCRATCH) as scratch,
    ):
        goes_on(Progress("image"))
        image = ModelDirectory(scratch / "image")
        active, seq = make_image(model, image)
        work = _Sending(Backups(target), model.name, scratch, goes_on, still_alone)
        report = work.send(image.root, active, seq, keep)
    log.info(
        "model %s: backed up at seq %d in %s: %d of %d bytes were new",
        *(model.name, seq, target, report.new_bytes, report.bytes),
    )
    return report


# --- the image


def make_image(model: Model, to: ModelDirectory) -> tuple[int | None, int]:
    """Make the image of a moment in a new directory. Returns the active version, and the newest delta of the log.

    Corruption, StorageError.
    """
    while True:
        try:
            return _try_image(model, to)
        except Closed:  # a version that no longer served was closed meanwhile
            model.state.live.check_open()
            files.remove_tree(to.root)
            time.sleep(_PAUSE_S)


def _try_image(model: Model, to: ModelDirectory) -> tuple[int | None, int]:
    state = model.state
    files.make_dir(to.log)
    with contextlib.ExitStack() as stack:
        stack.enter_context(state.switch)  # so no version comes, goes, or changes its line
        versions: list[tuple[VersionInfo, DiskTier]] = []
        for info in state.catalogue.infos():
            disk = stack.enter_context(model.opener.reading(info.number))
            versions.append((info, disk))
            _link(files_of(info.where.db / BASE), info.where.db / BASE, to.root / info.where.root.name / BASE)
        with contextlib.suppress(StorageError):  # a pruned entry is not needed
            _link_log(state.log, model.where, to)
        served = [view.open_version for view in state.live.served.views]
        for version in [*served, *state.retiring.all()]:
            stack.enter_context(version.writing)  # rows and dense part change in two steps
        with state.live.write:
            state.live.check_open()
            state.file.repair()
            if state.log.damage or state.catalogue.damaged:
                why = [*state.log.damage, *state.catalogue.damaged.values()]
                raise Corruption(f"model {model.name!r} is not whole, and is not backed up: {'; '.join(why[:3])}")
            for info, disk in versions:
                _version(info, disk, to.root / info.where.root.name)
            _link_log(state.log, model.where, to)
            _link([model.where.state], model.where.root, to.root)
            if (end := files.read_bytes(model.where.log_end)) is not None:  # the one file that is written in place
                files.publish_bytes(to.log_end, end)
            return state.live.active_version, state.log.last or 0


def _version(info: VersionInfo, disk: DiskTier, to: Path) -> None:
    """Put a version into the image: RocksDB's files as they are now, and all others except files that are being
    written or can be made again.
    """
    files.make_dir(to)
    disk.checkpoint(to / DB)
    if (to / BASE).is_dir():
        files.rename(to / BASE, to / DB / BASE)
    root, golden = info.where.root, info.where.golden
    moved = disk.watermark() != info.manifest.delta_seq  # its answers are no more those of the golden examples
    there = [path for path in files_of(root) if path.relative_to(root).parts[0] not in (DB, BUILD)]
    _link([path for path in there if not (moved and path.is_relative_to(golden))], root, to)


def _link_log(entries: DeltaLog, where: ModelDirectory, to: ModelDirectory) -> None:
    """Put the log's entries into the image, and nothing else."""
    counted = {where.log_entry(seq, digest).name for seq in entries.held() if (digest := entries.digest(seq))}
    there = set(os.listdir(to.log))
    for name in there - counted:
        files.remove_file(to.log / name)
    files.link_all([(where.log / name, to.log / name) for name in sorted(counted - there)])


def _link(paths: list[Path], root: Path, to: Path) -> None:
    """Hard-link files below `root` into `to`."""
    pairs = [(path, to / path.relative_to(root)) for path in paths]
    for folder in dict.fromkeys(new.parent for _, new in pairs):
        files.make_dir(folder)
    files.link_all(pairs)


def files_of(folder: Path) -> list[Path]:
    """All files below a folder, except those that are being written."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not is_scratch(path.name)]


def entry_of(path: Path, name: str) -> BackupFile:
    """A file's entry in a backup, under the name `name`; the file is read whole. StorageError."""
    try:
        digest, size = content_of(path)
        return BackupFile(path=name, bytes=size, xxh3=digest, changed_ns=path.stat().st_mtime_ns)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


# --- sending


@dataclass
class _Sending:
    """An image that is being sent to a target."""

    backups: Backups
    model: str
    scratch: Path
    goes_on: Callable[[Progress], None]
    still_alone: StillAlone

    def send(self, image: Path, active: int | None, seq: int, keep: int) -> BackupReport:
        """Send the contents that the target lacks, then the backup, and remove backups that are not kept."""
        before = self.backups.read(self.model, None, self.scratch)
        earlier = {} if before is None else {file.path: file for file in before.files}
        there = self.backups.contents(self.model)
        to = sender(self.backups, self.model, self.scratch)
        files.make_dir(self.scratch / "files")
        total = files.tree_bytes(image)
        try:
            entries: list[BackupFile] = []
            done = new = 0
            for path in files_of(image):
                entry = self._entry(path, path.relative_to(image).as_posix(), earlier, there)
                entries.append(entry)
                if entry.content not in there:
                    os.replace(path, self.scratch / entry.content)
                    to.add(self.scratch / entry.content)
                    there.add(entry.content)
                    new += entry.bytes
                done += entry.bytes
                self.goes_on(Progress("backup", done, total))
            made = Backup(model=self.model, version=active, seq=seq, files=tuple(entries))
            record = self.scratch / record_name(self.backups.numbers(self.model))
            files.publish_record(record, made.model_dump(mode="json"))
            self.still_alone(True)
            to.finish_with(record)
            self._remove_older(made, keep, to.remove)
        except BaseException:
            to.stop()
            raise
        to.close()
        return BackupReport(self.model, active, seq, len(entries), done, new)

    def _entry(self, path: Path, name: str, earlier: dict[str, BackupFile], there: set[str]) -> BackupFile:
        """A file's entry in the backup; a file of the last backup whose content is there is not read again."""
        found = path.stat()
        before = earlier.get(name)
        if (
            before is not None
            and (
                path.parent.name == BASE or path.suffix in (".sst", STRINGS_SUFFIX, DELTA_SUFFIX)
            )  # they keep their content with their name
            and (before.bytes, before.changed_ns) == (found.st_size, found.st_mtime_ns)
            and before.content in there
        ):
            return before
        return entry_of(path, name)

    def _remove_older(self, made: Backup, keep: int, remove: Callable[[str], None]) -> None:
        """Remove all backups but the newest `keep`, and then the contents that none of these has."""
        numbers = self.backups.numbers(self.model)  # without the new one
        kept = list(numbers)[len(numbers) - (keep - 1) :] if keep > 1 else []
        wanted = {file.content for file in made.files}
        for number in kept:
            older = self.backups.read(self.model, number, self.scratch)
            wanted |= {file.content for file in older.files} if older is not None else set()
        for number, name in numbers.items():
            if number not in kept:
                remove(name)
        for content in sorted(self.backups.contents(self.model) - wanted):
            remove(content)
