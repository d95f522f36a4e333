"""Finding snapshots below a directory or URL: `<model>/<version>/` or `<version>/`, each with a
manifest once it is complete.

A folder without `snapshot.json` and without `built.json` is not there yet. A `Finder` belongs
to one thread; it only reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tierstore.errors import SnapshotError
from tierstore.formats.buckets import ObjectInfo
from tierstore.formats.names import BUILT_MANIFEST, MAX_ORDINAL, SNAPSHOT_MANIFEST
from tierstore.formats.objects import ObjectPath, entries, names_below, read_object, revision_of
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular
from tierstore.types import NAME

_MANIFESTS = (BUILT_MANIFEST, SNAPSHOT_MANIFEST)  # a folder with both is a built version
_MOST_DIGITS = len(str(MAX_ORDINAL))


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A folder that has a manifest, and what that says."""

    source: Path | str
    model: str
    version: int


class Finder:
    """Finds the snapshots below one location. `problems`: what is wrong with each folder that could not be read."""

    def __init__(self, location: Path | str) -> None:
        self.location = location if isinstance(location, Path) else location.rstrip("/")
        self.problems: dict[str, str] = {}
        self._noted: dict[str, str] = {}  # by the look that is under way
        self._read: dict[str, FoundSnapshot] = {}  # manifests are read once

    def find(self, seen: Callable[[str], int]) -> list[FoundSnapshot]:
        """All complete ones but those that are named by a number up to `seen` of their model.

        FileNotFoundError where there is nothing at the location, SnapshotError where it cannot be read.
        """
        self._noted = {}
        found: list[FoundSnapshot] = []
        for name in _names(self.location):
            place = _below(self.location, name)
            snapshot, folders = self._look(place)
            if snapshot is not None:
                found.append(snapshot)
            elif NAME.fullmatch(name):
                found += self._versions_of(name, place, folders, seen(name))
        there = {str(snapshot.source) for snapshot in found}
        self.problems = self._noted
        self._read = {source: snapshot for source, snapshot in self._read.items() if source in there}
        return found

    def forget(self, source: Path | str) -> None:
        """Read that manifest again: the folder may have been written again."""
        self._read.pop(str(source), None)

    def _versions_of(self, model: str, place: Path | str, folders: list[str], seen: int) -> list[FoundSnapshot]:
        found = []
        for name in folders:
            if name.isdecimal() and (len(name) > _MOST_DIGITS or int(name) <= seen):
                continue
            source = _below(place, name)
            snapshot, _ = self._look(source)
            if snapshot is None:
                continue
            if snapshot.model != model:
                self._noted[str(source)] = f"expected a snapshot of model {model!r}, got one of {snapshot.model!r}"
            else:
                found.append(snapshot)
        return found

    def _look(self, place: Path | str) -> tuple[FoundSnapshot | None, list[str]]:
        """The snapshot in a folder, if it is complete, and else the names of folders in it."""
        if (before := self._read.get(str(place))) is not None:
            return before, []
        try:
            folders, files = _entries(place)
            manifest = next((name for name in _MANIFESTS if name in files), None)
            if manifest is None:
                return None, folders
            snapshot = self._read[str(place)] = _parsed(place, _content(_below(place, manifest), files[manifest]))
        except FileNotFoundError:  # removed meanwhile
            return None, []
        except (OSError, SnapshotError) as error:
            self._noted[str(place)] = str(error)
            return None, []
        return snapshot, []


def fingerprint(source: Path | str) -> str:
    """Differs where any file below `source` was written again. SnapshotError or OSError where it cannot be read."""
    if isinstance(source, Path):
        files = sorted((name.as_posix(), *revision_of(source / name)) for name in names_below(source))
        return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
    return xxhash.xxh3_128_hexdigest(json.dumps(ObjectPath.listed(source).document(), sort_keys=True).encode())


def _below(place: Path | str, name: str) -> Path | str:
    return place / name if isinstance(place, Path) else f"{place}/{name}"


def _names(place: Path | str) -> list[str]:
    """Folders at the location that may hold snapshots."""
    return [name for name in _entries(place)[0] if not name.startswith(("_", "."))]


def _entries(place: Path | str) -> tuple[list[str], dict[str, ObjectInfo | None]]:
    if isinstance(place, str):
        found = entries(place)
        if found is None:
            raise FileNotFoundError(2, "there is nothing", place)
        folders, objects = found
        return sorted(folders), {**objects}
    try:
        below = sorted(place.iterdir())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SnapshotError(f"{place} cannot be read: {error.strerror or error}") from error
    return [path.name for path in below if path.is_dir()], {path.name: None for path in below if path.is_file()}


def _content(manifest: Path | str, info: ObjectInfo | None) -> bytes:
    if isinstance(manifest, Path):
        return read_regular(manifest, MAX_DOCUMENT_BYTES)
    assert info is not None
    if info.size > MAX_DOCUMENT_BYTES:
        raise SnapshotError(f"{manifest} has {info.size:,} bytes, at most {MAX_DOCUMENT_BYTES:,} are read")
    return read_object(manifest, info)


def _parsed(place: Path | str, content: bytes) -> FoundSnapshot:
    """Model and version of a manifest; all else is checked at the load."""
    try:
        document = json.loads(content)
        head = document.get("manifest", document)
        if "folders" in document and "model" not in document:
            raise SnapshotError("an earlier release built it in partitions: build it again, or load it by its path")
        model, version = head["model"], head["version"]
        if not isinstance(model, str) or NAME.fullmatch(model) is None:
            raise SnapshotError(f"model: expected a name, got {model!r}")
        if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= MAX_ORDINAL:
            raise SnapshotError(f"version: expected a number from 1, got {version!r}")
    except SnapshotError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"its manifest is invalid: {error!r}") from error
    return FoundSnapshot(place, model, version)
