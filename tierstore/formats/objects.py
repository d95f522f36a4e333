"""Snapshots in object storage: the objects below a URL, by the part of `pathlib.Path` with which a snapshot is read.

The objects are listed once, so that all of a load works on the same list. An object is read in ranges (`ranges.py`), and each
is requested again until it has come whole. The libraries are fsspec and the one for the storage (extras `s3`, `gcs`,
`azure`); they find credentials, region and endpoint in their own ways (environment, profile, instance). They try once: how
often, and for how long, is said in `patience.py` alone.

`ObjectPath` is immutable; any thread may use it. A reader belongs to one thread.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from tierstore.errors import MissingExtra, SnapshotError, StorageError
from tierstore.formats.patience import PATIENCE_S, QUICK_PATIENCE_S, until_done
from tierstore.formats.ranges import Fetch, Ranges, Seen

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}  # of each scheme
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`revision` differs between two contents of one name: the ETag, or when it was written."""

    size: int
    revision: str


def is_url(source: str) -> bool:
    """Whether a source is in object storage."""
    match = _SCHEME.match(source)
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
    def file_system(self) -> Any:
        return file_system_of(self.url)

    @cached_property
    def key(self) -> str:
        """The URL as the library names it."""
        key: str = self.file_system._strip_protocol(self.url)
        return key


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
        file_system = file_system_of(url)
        key = file_system._strip_protocol(url)

        def find(remaining_s: float) -> dict[str, dict[str, Any]]:
            file_system.invalidate_cache()
            if if_any and not any(file_system.exists(f"{key}/{name}", timeout=remaining_s) for name in if_any):
                raise SnapshotError(
                    f"{url} has no {' and no '.join(if_any)}: not a snapshot, or one that was not finished"
                )
            found: dict[str, dict[str, Any]] = file_system.find(key, detail=True, timeout=remaining_s)
            return found

        with _reading(url):
            found = until_done(
                f"{url} cannot be listed", find, patience_s=QUICK_PATIENCE_S if patience_s is None else patience_s
            )
        objects = {name.removeprefix(key).lstrip("/"): _info(entry) for name, entry in found.items()}
        objects.pop("", None)
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
        """The same, listed now."""
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
        """A reader of the object, which may seek. Its errors are OSError: StorageError where the object does not come."""
        held = self._tree.held.get(self._name)
        return (self._ranges() if held is None else held).reader(closes=held is None)

    @contextlib.contextmanager
    def held(self, seen: Seen) -> Iterator[Ranges]:
        """Within the block, all readers of the object share its ranges; `seen` gets each that came. One thread at a time."""
        ranges = self._tree.held[self._name] = self._ranges(seen)
        try:
            yield ranges
        finally:
            del self._tree.held[self._name]
            ranges.close()

    def _ranges(self, *seen: Seen) -> Ranges:
        tree, info = self._tree, self.info
        fetch = _fetch(tree.file_system, f"{tree.key}/{self._name}", str(self), info.size, tree.patience_s)
        return Ranges(fetch, info.size, *seen)


Location: TypeAlias = Path | ObjectPath


def entries(url: str) -> tuple[list[str], dict[str, ObjectInfo]] | None:
    """(names of folders, objects by name) right below a URL, listed now; None where nothing is. SnapshotError, StorageError."""
    file_system = file_system_of(url)
    key = file_system._strip_protocol(url.rstrip("/"))

    def list_(remaining_s: float) -> list[dict[str, Any]]:
        file_system.invalidate_cache()
        found: list[dict[str, Any]] = file_system.ls(key, detail=True, timeout=remaining_s)
        return found

    with _reading(url):
        try:
            found = until_done(f"{url} cannot be listed", list_, patience_s=QUICK_PATIENCE_S)
        except FileNotFoundError:
            return None
    named = [
        (posixpath.basename(entry["name"].rstrip("/")), entry) for entry in found if entry["name"].rstrip("/") != key
    ]
    folders = [name for name, entry in named if entry["type"] == "directory"]
    return folders, {name: _info(entry) for name, entry in named if entry["type"] == "file"}


def read_object(url: str, info: ObjectInfo) -> bytes:
    """All of an object that was listed. OSError where it does not come soon, SnapshotError where it is another one by now."""
    file_system = file_system_of(url)
    fetch = _fetch(file_system, file_system._strip_protocol(url), url, info.size, QUICK_PATIENCE_S)
    with Ranges(fetch, info.size).reader(closes=True) as reader:
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


def file_system_of(url: str, *, tries: int = 1) -> Any:
    """The library for the storage of `url`. MissingExtra where it is not installed.

    It tries each request so often; those of storages other than S3 as often as they like, within the time that a call is given.
    """
    scheme = url.partition("://")[0].lower()
    try:
        import fsspec
        from fsspec.config import conf

        if EXTRAS[scheme] != "s3":
            return fsspec.filesystem(scheme)
        chosen = conf.get(scheme, {}).get("config_kwargs", {})
        file_system = fsspec.filesystem(
            scheme, config_kwargs={"retries": {"mode": "standard", "total_max_attempts": tries}, **chosen}
        )
        file_system.retries = 1  # around those
        return file_system
    except (ImportError, ValueError) as error:
        extra = EXTRAS[scheme]
        raise MissingExtra(f"{url}: the extra `{extra}` is not installed: pip install 'tierstore[{extra}]'") from error


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """What is final becomes a SnapshotError."""
    try:
        yield
    except (SnapshotError, StorageError):
        raise
    except Exception as error:
        raise SnapshotError(f"{url} cannot be read: {str(error) or type(error).__name__}") from error


def _info(entry: Mapping[str, Any]) -> ObjectInfo:
    revision = next(
        (entry[name] for name in ("ETag", "etag", "md5Hash", "LastModified", "mtime") if entry.get(name)), ""
    )
    return ObjectInfo(int(entry["size"] or 0), str(revision))


def _fetch(file_system: Any, key: str, name: str, size: int, patience_s: float) -> Fetch:
    """Gets ranges of an object of `size` bytes. SnapshotError where it is known not to be the one that was listed."""

    def check_size(remaining_s: float) -> None:
        try:
            file_system.invalidate_cache()
            found = file_system.info(key, timeout=remaining_s)["size"]
        except FileNotFoundError:
            raise
        except Exception:  # noqa: BLE001 - a library of any storage; the range is tried again
            return
        if found != size:
            raise SnapshotError(f"{name} had {size:,} bytes and has {found:,}: it changed while it was read")

    def fetch(begin: int, end: int, ended: threading.Event) -> bytes:
        def attempt(remaining_s: float) -> bytes:
            try:
                data: bytes = file_system.cat_file(key, start=begin, end=end, timeout=remaining_s)
                if len(data) != end - begin:
                    raise OSError(f"got {len(data)} bytes of a range of {end - begin}")
            except (FileNotFoundError, PermissionError):
                raise
            except Exception:
                check_size(remaining_s)
                raise
            return data

        return until_done(
            f"{name}: bytes {begin} to {end} could not be had", attempt, patience_s=patience_s, ended=ended
        )

    return fetch
