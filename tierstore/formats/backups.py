"""Backups of models in a directory or in object storage: which files there are, and how they are written and read.

    <place>/<model>/files/<xxh3>-<bytes>    the content of files, each content once
    <place>/<model>/<number>-<time>.json    one backup: which files a model's directory consists of; written last

So a backup counts once all that it names is there, and what a crash has left is used by the next one, or removed by it.
`schema/backup.md` has the format. One writer of a model at a time, see `only_backup`; any number may read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.objects import Location, ObjectPath, is_url, names_below, size_of
from tierstore.formats.one_writer import StillAlone, only_writer
from tierstore.formats.regular import open_regular
from tierstore.formats.release import WRITER, of_another_release
from tierstore.formats.snapshot.manifest import RelativePath
from tierstore.formats.snapshot.reader import local_path
from tierstore.formats.uploads import Uploads

FORMAT: Literal[2] = 2  # 1: of models from before there was one document a model
FILES = "files"
_RECORD = re.compile(r"([0-9]{6,18})-[0-9]{8}T[0-9]{6}Z\.json")
_CONTENT = re.compile(FILES + r"/[0-9a-f]{16}-[0-9]+")
_BLOCK = 4 << 20


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BackupFile(_Entry):
    """One file of a model's directory: its path there, its content, and when it was changed, in ns since 1970."""

    path: RelativePath
    bytes: int = Field(ge=0)
    xxh3: str = Field(pattern=r"^[0-9a-f]{16}$")
    changed_ns: int

    @property
    def content(self) -> str:
        """The name of its content within the backups of the model."""
        return f"{FILES}/{self.xxh3}-{self.bytes}"


class Backup(_Entry):
    """What one backup consists of: version `version` was active, `seq` is the newest delta of the log."""

    format: Literal[1, 2] = FORMAT
    model: str
    version: int | None
    seq: int = Field(ge=0)
    files: tuple[BackupFile, ...]


def content_of(path: Location, copy: Path | None = None) -> tuple[str, int]:
    """(XXH3-64, bytes) of a file, which is copied to the new file `copy` while it is read. OSError, StorageError."""
    digest, size = xxhash.xxh3_64(), 0
    with open_regular(path) as source, files.publish(copy) if copy is not None else contextlib.nullcontext() as to:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
            if to is not None:
                to.write(block)
    return digest.hexdigest(), size


def _place(place: str | Path) -> str | Path:
    return place if isinstance(place, str) and is_url(place) else local_path(place).absolute()


def only_backup(place: str | Path, model: str) -> AbstractContextManager[StillAlone]:
    """Be the only writer of a model's backups at a place: `only_writer`. Before its backups are listed."""
    where, what = _place(place), f"the backup of {model!r} into {place}"
    return only_writer(where / model if isinstance(where, Path) else f"{where.rstrip('/')}/{model}", what)


class Backups:
    """The backups at a place, as they are listed now. StorageError, SnapshotError, MissingExtra."""

    def __init__(self, place: str | Path) -> None:
        self.place = _place(place)
        self._root: Location = ObjectPath.listed(self.place) if isinstance(self.place, str) else self.place
        self._sizes = {name.as_posix(): size_of(self._root / name.as_posix()) for name in names_below(self._root)}

    def models(self) -> list[str]:
        """The models that have a backup, sorted."""
        named = (name.split("/") for name in self._sizes)
        return sorted({parts[0] for parts in named if len(parts) == 2 and _RECORD.fullmatch(parts[1])})

    def numbers(self, model: str) -> dict[int, str]:
        """The backups of a model: number → name, ascending."""
        matches = (_RECORD.fullmatch(name.removeprefix(f"{model}/")) for name in self._sizes)
        return dict(sorted((int(match[1]), match[0]) for match in matches if match is not None))

    def contents(self, model: str) -> set[str]:
        """The names of the contents that are there whole."""
        own = {name.removeprefix(f"{model}/"): size for name, size in self._sizes.items()}
        return {name for name, size in own.items() if _CONTENT.fullmatch(name) and name.endswith(f"-{size}")}

    def read(self, model: str, number: int | None, scratch: Path) -> Backup | None:
        """A backup of a model, by default the newest; None where there is none.

        Corruption for a damaged one, NotFound.
        """
        there = self.numbers(model)
        if number is None and not there:
            return None
        name = there.get(max(there) if number is None else number)
        if name is None:
            raise NotFound(
                f"{self.place} has no backup {number} of {model!r}; it has {', '.join(map(str, there)) or 'none'}"
            )
        copy = scratch / name
        self._copy(f"{model}/{name}", copy)
        document = files.read_json(copy)
        if document.get("format") not in (1, FORMAT):
            raise of_another_release(f"{self.place}/{model}/{name}", document.get("format"), f"1 or {FORMAT}", document)
        document.pop(WRITER, None)
        document["files"] = tuple(document.get("files") or ())
        try:
            return Backup.model_validate(document)
        except ValidationError as error:
            raise Corruption(f"{self.place}/{model}/{name} is invalid: {error}") from error

    def fetch(self, model: str, file: BackupFile, to: Path) -> None:
        """Make a file of a backup, whose content must be what was backed up. Corruption, StorageError."""
        where = f"{self.place}/{model}/{file.content}"
        found = self._copy(f"{model}/{file.content}", to)
        if found != (file.xxh3, file.bytes):
            raise Corruption(
                f"{where} is damaged: expected {file.bytes} bytes with xxh3 {file.xxh3}, found {found[1]} with "
                f"{found[0]}; it is {file.path} of model {model!r}. Restore another backup, or make one again after "
                "removing that file"
            )

    def _copy(self, name: str, to: Path) -> tuple[str, int]:
        try:
            return content_of(self._root / name, to)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {self.place}/{name}: {error.strerror or error}") from error


class Sender(Protocol):
    """What brings files of a directory to a place under the same names; see `Uploads`."""

    def add(self, path: Path) -> None: ...

    def finish_with(self, path: Path) -> None: ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...

    def stop(self) -> None: ...


class _Links:
    """The counterpart of `Uploads` for a directory.

    Files are brought there by hard links on the same file system, else by copies.
    """

    def __init__(self, to: Path, directory: Path) -> None:
        self._to, self._directory = to, directory
        files.make_dir(to / FILES)

    def add(self, path: Path) -> None:
        files.link_all([(path, self._to / path.relative_to(self._directory))])
        path.unlink()

    finish_with = add

    def remove(self, name: str) -> None:
        files.remove_file(self._to / name)

    def close(self) -> None:
        """End the sending; nothing waits here."""

    stop = close


def sender(backups: Backups, model: str, directory: Path) -> Sender:
    """What sends files of `directory` to the backups of a model. `close` it, or `stop` it: then what was sent stays."""
    place = backups.place
    return _Links(place / model, directory) if isinstance(place, Path) else Uploads(f"{place}/{model}", directory)


def record_name(before: Collection[int]) -> str:
    """The name of the next backup after those."""
    return f"{max(before, default=0) + 1:06d}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
