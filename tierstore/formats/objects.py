"""Snapshots in object storage: the objects below a URL, by the part of `pathlib.Path` with which a snapshot is read.

The objects are listed once, so that all of a load works on the same list. An object is read in ranges (`ranges.py`),
and each is requested again until it has come whole (`patience.py`). What speaks to the storage is `buckets.py`.

`ObjectPath` is immutable; any thread may use it. A reader belongs to one thread.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from tierstore.errors import MissingExtra, SnapshotError, StorageError
from tierstore.formats.buckets import EXTRAS, URL, Bucket, ObjectInfo
from tierstore.formats.patience import PATIENCE_S, QUICK_PATIENCE_S, until_done
from tierstore.formats.ranges import Fetch, Ranges, Seen


def is_url(source: str) -> bool:
    """Whether a source is in object storage."""
    match = URL.match(source)
    return match is not None and match[1].lower() in EXTRAS


@dataclass(frozen=True)
class _Tree:
    """Objects by name, relative to `url`. What is needed of them is tried for `patience_s`."""

    url: str
    objects: Mapping[str, ObjectInfo]
    patience_s: float
    held: dict[str, Ranges] = field(default_factory=dict)  # objects whose readers share their ranges

    @cached_property
    def folders(self) -> frozenset[str]:
        return frozenset(parent.as_posix() for name in self.objects for parent in PurePosixPath(name).parents)

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(self.url)


class ObjectPath:
    """An object, or what has objects below it."""

    __slots__ = ("_name", "_tree")

    def __init__(self, tree: _Tree, name: str = ".") -> None:
        self._tree, self._name = tree, name

    @classmethod
    def listed(cls, url: str, *, if_any: Sequence[str] = (), patience_s: float | None = None) -> ObjectPath:
        """The root of the objects below `url`, which are listed now. MissingExtra, SnapshotError, StorageError.

        With `if_any` only if one of these is there: to list what is no snapshot could take hours.
        """
        url = url.rstrip("/")
        with _reading(url):
            bucket = Bucket(url)

            def find(_: float) -> dict[str, ObjectInfo]:
                if if_any and not any(bucket.exists(bucket.key_of(name)) for name in if_any):
                    raise SnapshotError(
                        f"{url} has no {' and no '.join(if_any)}: not a snapshot, or one that was not finished"
                    )
                return bucket.find()

            objects = until_done(
                f"{url} cannot be listed", find, patience_s=QUICK_PATIENCE_S if patience_s is None else patience_s
            )
        return cls(_Tree(url, objects, PATIENCE_S))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ObjectPath:
        """What `document` has made."""
        objects = {name: ObjectInfo(*info) for name, info in document["objects"].items()}
        return cls(_Tree(document["url"], objects, document["patience_s"]))

    def document(self) -> dict[str, Any]:
        """The root with its list, as JSON values, for another process."""
        objects = {name: (info.size, info.revision) for name, info in self._tree.objects.items()}
        return {"url": self._tree.url, "objects": objects, "patience_s": self._tree.patience_s}

    def listed_again(self) -> ObjectPath:
        """The same place in object storage, with its objects listed now."""
        tree = self._tree
        return ObjectPath(ObjectPath.listed(tree.url, patience_s=tree.patience_s)._tree, self._name)

    # --- as pathlib.Path has them

    @property
    def name(self) -> str:
        return posixpath.basename(self._tree.url if self._name == "." else self._name)

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self._tree, posixpath.dirname(self._name) or ".")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self._tree, posixpath.normpath(posixpath.join(self._name, name)))

    def resolve(self) -> ObjectPath:
        return self

    def is_dir(self) -> bool:
        return self._name in self._tree.folders

    def is_file(self) -> bool:
        return self._name in self._tree.objects

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and (self._tree.url, self._name) == (other._tree.url, other._name)

    def __hash__(self) -> int:
        return hash((self._tree.url, self._name))

    def __str__(self) -> str:
        return self._tree.url if self._name == "." else f"{self._tree.url}/{self._name}"

    __repr__ = __str__

    # --- content

    @property
    def is_inside(self) -> bool:
        """Whether it is the root or below it."""
        return self._name.split("/")[0] not in ("..", "")

    def names_below(self) -> list[str]:
        """The names of all objects below, relative to this."""
        below = "" if self._name == "." else self._name + "/"
        return [name.removeprefix(below) for name in self._tree.objects if name.startswith(below)]

    @property
    def info(self) -> ObjectInfo:
        """FileNotFoundError where there is no such object."""
        info = self._tree.objects.get(self._name)
        if info is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        return info

    def open(self) -> io.BufferedReader:
        """A reader of the object, which may seek.

        Its errors are OSError: StorageError where the object does not come.
        """
        held = self._tree.held.get(self._name)
        return (self._ranges() if held is None else held).reader(closes=held is None)

    @contextlib.contextmanager
    def held(self, seen: Seen) -> Iterator[Ranges]:
        """Within the block, all readers of the object share its ranges; `seen` gets each that came.

        One thread at a time.
        """
        ranges = self._tree.held[self._name] = self._ranges(seen)
        try:
            yield ranges
        finally:
            del self._tree.held[self._name]
            ranges.close()

    def _ranges(self, *seen: Seen) -> Ranges:
        tree, info = self._tree, self.info
        fetch = _fetch(tree.bucket, tree.bucket.key_of(self._name), str(self), info.size, tree.patience_s)
        return Ranges(fetch, info.size, *seen)


Location: TypeAlias = Path | ObjectPath


def entries(url: str) -> tuple[list[str], dict[str, ObjectInfo]] | None:
    """(names of folders, objects by name) right below a URL, listed now; None where nothing is.

    SnapshotError, StorageError.
    """
    with _reading(url):
        bucket = Bucket(url)
        try:
            found = until_done(f"{url} cannot be listed", lambda _: bucket.entries(), patience_s=QUICK_PATIENCE_S)
        except FileNotFoundError:
            return None
    return found if any(found) else None


def read_object(url: str, info: ObjectInfo) -> bytes:
    """All of an object that was listed.

    OSError where it does not come soon, SnapshotError where it is another one by now.
    """
    bucket = Bucket(url)
    with Ranges(_fetch(bucket, bucket.key, url, info.size, QUICK_PATIENCE_S), info.size).reader(closes=True) as reader:
        return reader.read()


def is_inside(path: Location, root: Location) -> bool:
    """Whether a path is that of `root` or lies below it; of files both are resolved."""
    if isinstance(path, ObjectPath):
        return path.is_inside
    return isinstance(root, Path) and path.is_relative_to(root)


def names_below(path: Location) -> list[PurePosixPath]:
    """The paths of all files below, relative to `path`; directories are none."""
    if isinstance(path, ObjectPath):
        return [PurePosixPath(name) for name in path.names_below()]
    return [PurePosixPath(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()]


def revision_of(path: Location) -> tuple[int, int | str]:
    """(bytes, what differs between two contents) of a file or an object."""
    if isinstance(path, ObjectPath):
        return path.info.size, path.info.revision
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def size_of(path: Location) -> int:
    """Bytes of a file or an object."""
    return path.info.size if isinstance(path, ObjectPath) else path.stat().st_size


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """What is final becomes a SnapshotError."""
    try:
        yield
    except (MissingExtra, SnapshotError, StorageError):
        raise
    except Exception as error:
        raise SnapshotError(f"{url} cannot be read: {str(error) or type(error).__name__}") from error


def _fetch(bucket: Bucket, key: str, name: str, size: int, patience_s: float) -> Fetch:
    """Gets ranges of an object of `size` bytes. SnapshotError where it is known not to be the one that was listed."""

    def check_size() -> None:
        try:
            found = bucket.size(key)
        except (FileNotFoundError, SnapshotError):
            raise
        except OSError:  # the range is tried again
            return
        if found != size:
            raise SnapshotError(f"{name} had {size:,} bytes and has {found:,}: it changed while it was read")

    def fetch(begin: int, end: int, ended: threading.Event) -> Any:
        def attempt(_: float) -> Any:
            try:
                data = bucket.read(key, begin, end)
                if len(data) != end - begin:
                    raise OSError(f"got {len(data)} bytes of a range of {end - begin}")
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                check_size()
                raise
            return data

        return until_done(
            f"{name}: bytes {begin} to {end} could not be had", attempt, patience_s=patience_s, ended=ended
        )

    return fetch
