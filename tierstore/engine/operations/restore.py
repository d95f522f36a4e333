"""`restore`: models of a backup into a data directory that no process has open, each whole or not at all.

On the caller's thread. Everything is read, checked and made durable beside the models, and put in place at the end by
one rename for each model; the next start removes what a crash leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tierstore.access.audit import Audit
from tierstore.engine.events.changes import requester
from tierstore.engine.lifecycle import directory_format, earlier_form
from tierstore.engine.lifecycle.directory_lock import lock, unlock
from tierstore.engine.lifecycle.state import ignore
from tierstore.engine.operations import export
from tierstore.engine.operations.backup import SCRATCH
from tierstore.errors import Conflict, Corruption, NotFound
from tierstore.formats import files
from tierstore.formats.backups import Backup, BackupFile, Backups
from tierstore.formats.names import TRASH, DataDirectory, ModelDirectory
from tierstore.formats.uploads import scratch_directory
from tierstore.types import BackupReport, Progress, ProgressFn


def restore(
    source: str | Path,
    data: str | Path,
    models: Sequence[str] = (),
    *,
    number: int | None = None,
    progress: ProgressFn | None = None,
) -> list[BackupReport]:
    """Bring models, by default all, from backups in `source` (a directory or a URL) into the data directory `data`.

    `number` is that of the backup, by default the newest. Every file is compared with its checksum. Conflict for a
    model that `data` has already, NotFound for one that has no such backup, Corruption for a damaged file, Locked if a
    process has `data` open; then nothing is restored.
    """
    root = DataDirectory(Path(data).absolute())
    with _own(root):
        if files.exists(root.format):
            directory_format.check(root)  # or an earlier release could open what is restored
        for path in leftovers_of(root.root):
            files.remove_leftover(path)
        backups = Backups(source)
        wanted = list(dict.fromkeys(models)) or backups.models()
        if not wanted:
            raise NotFound(f"{source} has no backup; expected the directory or URL that `tierstore backup` was given")
        for model in wanted:
            if files.exists(root.model(model).root):
                raise Conflict(
                    f"{root.model(model).root} exists already, and a restore overwrites nothing: move it away, "
                    "restore into another directory with --data, or name the models to restore"
                )
        with scratch_directory(root.root, SCRATCH) as scratch:
            found = {model: _found(backups, model, number, scratch) for model in wanted}
            total, done = sum(file.bytes for each in found.values() for file in each.files), 0
            for model, backup in found.items():
                done = fetch_files(backups, backup, scratch / model, done, total, progress or ignore)
            for model in wanted:
                earlier_form.convert(ModelDirectory(scratch / model), model)  # of a backup of an earlier release
            for model in wanted:
                files.rename(scratch / model, root.model(model).root)
    audit = Audit(root.root)
    reports = []
    for model, backup in found.items():
        nbytes = sum(file.bytes for file in backup.files)
        reports.append(BackupReport(model, backup.version, backup.seq, len(backup.files), nbytes, nbytes))
        audit.change("restore", requester(), "done", model=model, source=str(source), seq=backup.seq)
    return reports


@contextlib.contextmanager
def _own(root: DataDirectory) -> Iterator[None]:
    """Lock a data directory for the block, creating it if needed; if the block fails, a new directory is removed."""
    with files.new_dirs(root.models) as made:
        held = lock(root.lock)
        try:
            yield
        except BaseException:
            if root.root in made:
                with contextlib.suppress(OSError):
                    root.lock.unlink()
            raise
        finally:
            unlock(held)


def leftovers_of(root: Path) -> list[Path]:
    """Leftovers of killed exports and restores in a data directory. For the process that has it open."""
    return [path for begin in (export.SCRATCH, SCRATCH, TRASH) for path in root.glob(f"{begin}*")]


def _found(backups: Backups, model: str, number: int | None, scratch: Path) -> Backup:
    records = files.make_dir(scratch / f"records-{model}")
    backup = backups.read(model, number, records)
    if backup is None:
        raise NotFound(
            f"{backups.place} has no backup of model {model!r}; it has {', '.join(backups.models()) or 'none'}"
        )
    if backup.model != model:
        raise Corruption(f"{backups.place}/{model} has a backup of model {backup.model!r}")
    return backup


class Contents(Protocol):
    """The source of a backup's files."""

    def fetch(self, model: str, file: BackupFile, to: Path) -> None:
        """Make a file, whose content must be what was backed up."""


def fetch_files(contents: Contents, backup: Backup, to: Path, done: int, total: int, progress: ProgressFn) -> int:
    """Make the directory of a model. Returns the bytes done so far."""
    for file in backup.files:
        path = to / file.path
        files.make_dir(path.parent)
        contents.fetch(backup.model, file, path)
        done += file.bytes
        progress(Progress("restore", done, total))
    files.make_dir(to / "log")
    return done
