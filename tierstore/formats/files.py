"""Publishing files: the one module that makes, replaces and removes files and directories.

A file is written under a temporary name in its directory, flushed, fsynced and renamed, and the directory is fsynced.
So after a crash the name holds the old content or the new one, never a part. A tree is renamed before it is removed.

Any thread may call these; of two threads that publish one name, the last rename wins. What a call has returned from
survives power loss. Names that a crash leaves behind begin with `.tmp-` or `.trash-`; `sweep` removes them.

Everything goes through `FileSystem`, so that a test can put its own in (`use`): one that fails, or forgets.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from tierstore.errors import Corruption, DiskFull, NotFound, StorageError, TierstoreError
from tierstore.formats.names import TEMPORARY, TRASH, is_scratch
from tierstore.formats.private import make_private
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular
from tierstore.formats.release import WRITER, __version__

_CHECKSUM, _NO_CHECKSUM = "xxh3", "0" * 16
_DIGEST = re.compile("[0-9a-f]{16}")


class FileSystem:
    """The operations that change the disk. Each raises OSError."""

    def create(self, path: Path) -> BinaryIO:
        """A new file, open for writing; it must not exist."""
        return open(path, "xb")

    def fsync(self, file: BinaryIO) -> None:
        """The content of `file` survives power loss from here on; its name does not yet."""
        file.flush()
        os.fsync(file.fileno())

    def fsync_dir(self, path: Path) -> None:
        """The names in `path` survive power loss from here on."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic, within one file system; a file at `new` is replaced."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmtree(self, path: Path) -> None:
        shutil.rmtree(path)


_file_system = FileSystem()


@contextlib.contextmanager
def use(file_system: FileSystem) -> Iterator[None]:
    """Within the block, every call of this module in the process goes through `file_system`."""
    global _file_system
    before, _file_system = _file_system, file_system
    try:
        yield
    finally:
        _file_system = before


@contextlib.contextmanager
def _translated(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except TierstoreError:
        raise
    except OSError as error:
        raise storage_error(f"cannot {doing} {path}", error) from error


def storage_error(what: str, error: OSError) -> StorageError:
    """Our error for an OSError of the disk."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{what}: the disk is full; free some space and try again ({why})")
    return StorageError(f"{what}: {why}")


class Publication:
    """A file that is being written: write to `file`, then `commit()`. A `with` block commits unless it raises.

    Without `durable` nothing is flushed to the drive: what power takes from it must be noticed, and be no loss. One
    thread at a time. `path`'s directory must exist. Until `commit` has renamed it, `path` is untouched. Errors of the
    disk are StorageError.
    """

    def __init__(self, path: str | Path, durable: bool = True) -> None:
        self.path, self._durable = Path(path), durable
        self._temporary = self.path.with_name(f"{TEMPORARY}{self.path.name}-{secrets.token_hex(4)}")
        with _translated("create", self.path):
            self.file = _file_system.create(self._temporary)

    def commit(self) -> None:
        """Make the file durable, then visible under its name. On an error the temporary file is removed."""
        try:
            self.flush()
            self.show()
        except BaseException:
            self.abort()
            raise
        if self._durable:
            fsync_dir(self.path.parent)

    def flush(self) -> None:
        """The first half of `commit`: the content is durable, and nothing is visible yet."""
        with _translated("publish", self.path):
            if self._durable:
                _file_system.fsync(self.file)
            self.file.close()

    def show(self) -> None:
        """The second half, after `flush`: the file has its name, which is durable once its directory is."""
        with _translated("publish", self.path):
            _file_system.rename(self._temporary, self.path)

    def abort(self) -> None:
        """Remove the temporary file. Safe to call twice, but not after `commit`."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            _file_system.unlink(self._temporary)

    def __enter__(self) -> BinaryIO:
        return self.file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.commit()
            return
        self.abort()
        if isinstance(error, OSError) and not isinstance(error, TierstoreError):
            raise storage_error(f"cannot write {self.path}", error) from error


def publish(path: str | Path, *, durable: bool = True) -> Publication:
    """`with publish(path) as file: file.write(…)`: the file appears whole, and durable, at the end of the block."""
    return Publication(path, durable)


def scratch(directory: str | Path) -> BinaryIO:
    """A file without a name, for writing and reading back; it is gone when it is closed or the process dies."""
    with _translated("write in", Path(directory)):
        return cast(BinaryIO, tempfile.TemporaryFile(dir=directory))


def create(path: Path) -> BinaryIO:
    """A new file under its own name, for work that syncs it and then moves it."""
    with _translated("create", path):
        return _file_system.create(path)


def publish_bytes(path: str | Path, data: bytes | bytearray | memoryview, *, private: bool = False) -> None:
    """Replace `path` by `data`, atomically and durably; `private`: for its owner alone."""
    with publish(path) as file:
        if private:
            make_private(file.fileno(), Path(path))
        file.write(data)


def publish_all(contents: Sequence[tuple[Path, Sequence[bytes | memoryview]]]) -> None:
    """Publish files of one directory, each of the pieces given, with one flush of the directory.

    All are durable before the first gets its name, and they get their names in their order. An error may leave some of
    the names: the caller removes them.
    """
    publications: list[Publication] = []
    try:
        for path, pieces in contents:
            publications.append(publication := Publication(path))
            with _translated("write", path):
                for piece in pieces:
                    publication.file.write(piece)
        for publication in publications:
            publication.flush()
        for publication in publications:
            publication.show()
    except BaseException:
        for publication in publications:
            publication.abort()
        raise
    for folder in dict.fromkeys(path.parent for path, _ in contents):
        fsync_dir(folder)


def publish_json(path: str | Path, document: Any) -> None:
    """Replace `path` by `document` as indented UTF-8 JSON, atomically and durably."""
    publish_bytes(path, (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def publish_record(path: str | Path, document: Mapping[str, Any], *, private: bool = False) -> None:
    """Publish JSON with the release and, last, `xxh3`, a checksum of all bytes, its own digits as zeros."""
    whole = {**document, WRITER: __version__, _CHECKSUM: _NO_CHECKSUM}
    data = (json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    publish_bytes(path, _checksum_in(data, _xxh3(data)), private=private)


def _checksum_in(data: bytes, digest: str) -> bytes:
    before, name, after = data.rpartition(f'"{_CHECKSUM}": "'.encode())
    return before + name + digest.encode() + after[len(_NO_CHECKSUM) :]


def _xxh3(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _check(path: Path, data: bytes, document: dict[str, Any]) -> None:
    """Raise Corruption where a record's checksum does not match. Records of earlier releases have none."""
    last = next(reversed(document.values()), None)
    digest = document.pop(_CHECKSUM, None)
    if digest is None:  # no other last field looks like a checksum, so this is one whose name is damaged
        damaged = isinstance(last, str) and _DIGEST.fullmatch(last) is not None
    else:
        damaged = digest != _xxh3(_checksum_in(data, _NO_CHECKSUM))
    if damaged:
        raise Corruption(f"{path} does not match its checksum: it was changed since it was written; restore it")


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file of ours. NotFound; Corruption if it is none, or not what its checksum says."""
    path = Path(path)
    try:
        with _translated("read", path):
            data = read_regular(path, MAX_DOCUMENT_BYTES)
        document = json.loads(data)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise NotFound(f"{path} does not exist") from error.__cause__
        raise
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise Corruption(f"{path}: expected a JSON object, got {type(document).__name__}")
    _check(path, data, document)
    return document


def checked_number(number: int, *, digits: int = 1) -> bytes:
    """A number as the content of a file: ASCII decimal with at least so many `digits`, and their checksum."""
    text = f"{number:0{digits}d}"
    return f"{text} {_xxh3(text.encode())}\n".encode()


def read_number(path: str | Path) -> str | None:
    """The digits in a file of `checked_number`, or the text of an earlier release's file; None if there is none.

    Raises Corruption where the checksum does not match.
    """
    content = read_bytes(path)
    if content is None:
        return None
    text, *digest = content.decode(errors="replace").split(" ", 1) or [""]
    if digest and digest[0].strip() != _xxh3(text.encode()):
        raise Corruption(
            f"{path} does not match its checksum: it was changed since it was written; got {content[:60]!r}"
        )
    return text.strip()


def read_bytes(path: str | Path) -> bytes | None:
    """The content of a file, or None if there is none. Raises StorageError."""
    path = Path(path)
    with _translated("read", path):
        try:
            return read_regular(path, MAX_DOCUMENT_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None


def exists(path: str | Path) -> bool:
    """Whether there is a file or directory. Raises StorageError where that cannot be found out."""
    path = Path(path)
    with _translated("look for", path):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def fsync_dir(path: str | Path) -> None:
    """Make the names in a directory durable."""
    path = Path(path)
    with _translated("fsync the directory", path):
        _file_system.fsync_dir(path)


def sync(file: BinaryIO, path: str | Path) -> None:
    """Make what was written to `file`, open at `path`, durable."""
    with _translated("write", Path(path)):
        _file_system.fsync(file)


def drop_from_cache(path: str | Path) -> None:
    """Flush a file and drop it from the system's cache, so that the next reads come from the drive."""
    path = Path(path)
    with _translated("drop from the cache", path), open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rename_all(pairs: Sequence[tuple[Path, Path]]) -> None:
    """`rename` of many files; each directory is made durable once, when all have their new names."""
    for old, new in pairs:
        with _translated(f"rename {old} to", new):
            _file_system.rename(old, new)
    for folder in dict.fromkeys([new.parent for _, new in pairs] + [old.parent for old, _ in pairs]):
        fsync_dir(folder)


def make_dir(path: str | Path) -> Path:
    """Create a directory and its missing parents, durably. It may exist already."""
    path = Path(path)
    missing = []
    level = path
    with _translated("create the directory", path):  # a parent that may not be searched
        while not level.is_dir() and level != level.parent:
            missing.append(level)
            level = level.parent
    for level in reversed(missing):
        with _translated("create the directory", level), contextlib.suppress(FileExistsError):
            _file_system.mkdir(level)
        fsync_dir(level.parent)
    if not path.is_dir():
        raise StorageError(f"cannot create the directory {path}: something else has that name")
    return path


@contextlib.contextmanager
def new_dirs(path: str | Path) -> Iterator[list[Path]]:
    """`make_dir` for the block, which gets those that were missing. If it fails, those that are empty go again."""
    path = Path(path).absolute()
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
    make_dir(path)
    try:
        yield missing
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in missing:
                if exists(folder):
                    folder.rmdir()
        raise


def rename(old: str | Path, new: str | Path) -> None:
    """Move a file or directory within one file system, durably. A file at `new` is replaced."""
    rename_all([(Path(old), Path(new))])


def link_all(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Give each file a second, new name, durably. It becomes a copy where the file system has no such links."""
    for old, new in pairs:
        with _translated(f"link {old} to", new):
            try:
                _file_system.link(old, new)
            except OSError:
                with open(old, "rb") as source, publish(new) as copy:
                    shutil.copyfileobj(source, copy)
    for folder in dict.fromkeys(new.parent for _, new in pairs):
        fsync_dir(folder)


def remove_file(path: str | Path, *, durable: bool = True) -> None:
    """Remove a file, durably, if it exists."""
    path = Path(path)
    with _translated("remove", path), contextlib.suppress(FileNotFoundError):
        _file_system.unlink(path)
    if durable:
        fsync_dir(path.parent)


def remove_tree(path: str | Path) -> None:
    """Remove a directory and everything in it, if it exists.

    It is renamed first, so a crash on the way leaves something for `sweep`, and never half a directory.
    """
    trash = discard(path)
    if trash is not None:
        remove_leftover(trash)


def discard(path: str | Path) -> Path | None:
    """Rename a directory, durably, to a name for `remove_leftover`. Returns its new path; None if there is none."""
    path = Path(path)
    trash = path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}")
    with _translated("remove", path):
        try:
            _file_system.rename(path, trash)
        except FileNotFoundError:
            return None
        _file_system.fsync_dir(path.parent)
    return trash


def leftovers(directory: str | Path) -> list[Path]:
    """What crashes have left in `directory` (not below it).

    Only for the owner of the directory, before anything writes there: files that are being published would count too.
    """
    directory = Path(directory)
    with _translated("look through", directory):
        found = list(os.scandir(directory)) if directory.is_dir() else []
    return [Path(entry.path) for entry in found if is_scratch(entry.name)]


def tree_bytes(path: str | Path) -> int:
    """Bytes of the files below a directory; files that are removed meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def remove_leftover(path: Path) -> None:
    """Remove one of the `leftovers`, a file or a directory, if it exists."""
    with _translated("remove", path), contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            _file_system.rmtree(path)
        else:
            _file_system.unlink(path)


def sweep(directory: str | Path) -> int:
    """Remove the `leftovers` in `directory`. Returns how many."""
    found = leftovers(directory)
    for path in found:
        remove_leftover(path)
    return len(found)
