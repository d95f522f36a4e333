"""A built version: the finished files of a snapshot's rows, made once, in a directory that every store only copies.

`BuiltSnapshot` is a snapshot whose rows come ready. It is immutable; any thread may use it. `schema/built.md` has the
format: `built.json` names every other file with its length and digest, and is written last.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import SnapshotError
from tierstore.formats.checksum import checksum
from tierstore.formats.files import publish_json
from tierstore.formats.manifest import Manifest, RelativePath
from tierstore.formats.names import BUILT_MANIFEST
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular
from tierstore.formats.snapshot import Snapshot, inside, local_path, naming, open_snapshot
from tierstore.types import Keys

FORMAT: Literal[1] = 1
Digest = Field(pattern=r"^[0-9a-f]{16}$")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BuiltFile(_Entry):
    """One sealed file: `xxh3` as in its trailer, `digest` of its rows."""

    name: RelativePath
    table: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    xxh3: str = Digest
    digest: str = Digest


class BuiltTable(_Entry):
    """A table as it was loaded: `mean` of the vectors of all partitions, the others of this one.

    `colliding`: (string, code) of the keys that are not under their hash.
    """

    name: str
    rows: int = Field(ge=0)
    mean: tuple[float, ...]
    digest: str = Digest
    colliding: tuple[tuple[str, int], ...]


class OtherFile(_Entry):
    """A file beside the rows: `xxh3` of all of its bytes."""

    name: RelativePath
    bytes: int = Field(ge=0)
    xxh3: str = Digest


class BuiltManifest(_Entry):
    """`built.json`, but for the snapshot's own manifest."""

    format: Literal[1] = FORMAT
    sealed_format: int
    partition: int = Field(ge=0)
    partitions: int = Field(ge=1)
    tables: tuple[BuiltTable, ...]
    files: tuple[BuiltFile, ...]
    others: tuple[OtherFile, ...]


def write_built(root: Path, built: BuiltManifest, manifest: Manifest) -> None:
    """Publish `built.json`: from here on the directory is a built version."""
    publish_json(root / BUILT_MANIFEST, {**built.model_dump(mode="json"), "manifest": manifest.to_document()})


def write_partitions(root: Path, folders: list[str]) -> None:
    """Publish the `built.json` of a directory of partitions, each a built version of its own."""
    publish_json(root / BUILT_MANIFEST, {"format": FORMAT, "partitions": len(folders), "folders": folders})


def open_source(source: str | Path) -> Snapshot:
    """Open what may be loaded: a snapshot, or a built version. Raises SnapshotError."""
    root = local_path(source)
    if "\0" in str(root):
        raise SnapshotError("a path cannot hold a NUL character")
    if root.name == BUILT_MANIFEST and root.is_file():
        root = root.parent
    return open_built(root) if os.path.lexists(root / BUILT_MANIFEST) else open_snapshot(source)


def open_built(root: Path) -> BuiltSnapshot:
    """Open a built version; whether its files are there, and as long as they should be, is checked, their rows are not."""
    inside(root, BUILT_MANIFEST)
    try:
        content = read_regular(root / BUILT_MANIFEST, MAX_DOCUMENT_BYTES)
        manifest, built = _parse(content, root)
    except SnapshotError:
        raise
    except OSError as error:
        raise SnapshotError(f"cannot be read: {error.strerror or error}", file=BUILT_MANIFEST) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise SnapshotError(f"cannot be read: {error}", file=BUILT_MANIFEST) from error
    snapshot = BuiltSnapshot(root.resolve(), manifest, built, xxhash.xxh3_128_hexdigest(content))
    snapshot.check_files()
    return snapshot


def _parse(content: bytes, root: Path) -> tuple[Manifest, BuiltManifest]:
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, came {type(document).__name__}")
    if document.get("format") != FORMAT:
        raise SnapshotError(
            f"expected format {FORMAT}, came {document.get('format')!r}: it was built by another release; build it again with this one",
            file=BUILT_MANIFEST,
        )
    if "folders" in document:
        folders = document["folders"]
        raise SnapshotError(
            f"it was built in {len(folders)} partitions, and to load several of them into one store does not work yet: "
            f"load one, such as {root / str(folders[0])}, or build it without partitions",
            file=BUILT_MANIFEST,
        )
    manifest = Manifest.parse(json.dumps(document.pop("manifest", None)), file=BUILT_MANIFEST)
    try:
        return manifest, BuiltManifest.model_validate_json(json.dumps(document))
    except ValidationError as error:
        shown = "; ".join(f"{'.'.join(map(str, of['loc']))}: {of['msg']}" for of in error.errors()[:3])
        raise SnapshotError(shown, file=BUILT_MANIFEST) from error


@dataclass(frozen=True, slots=True)
class BuiltSnapshot(Snapshot):
    """A snapshot whose rows are in finished files. What its manifest says of shards is of where they came from."""

    built: BuiltManifest
    digest: str  # of `built.json`, and so of everything

    def check_files(self) -> None:
        """Raise SnapshotError unless every file is there, of its length, and what lies beside the rows unchanged."""
        self._check_sums()
        listed = [(of.name, of.bytes) for of in self.built.files] + [(of.name, of.bytes) for of in self.built.others]
        for name, expected in listed:
            size = self._resolve(name, file_only=True).stat().st_size
            if size != expected:
                raise SnapshotError(f"expected {expected} bytes, found {size}; copy or build it again", file=name)
        for other in self.built.others:
            came = checksum(self._resolve(other.name))
            if came != other.xxh3:
                raise SnapshotError(f"expected xxh3 {other.xxh3}, came {came}; copy or build it again", file=other.name)

    def _check_sums(self) -> None:
        if [table.name for table in self.built.tables] != [table.name for table in self.manifest.tables]:
            raise SnapshotError("tables: expected those of the manifest, in its order", file=BUILT_MANIFEST)
        for table, entry in zip(self.built.tables, self.manifest.tables, strict=True):
            mine = [file for file in self.built.files if file.table == table.name]
            rows, digest = sum(file.rows for file in mine), sum(int(file.digest, 16) for file in mine) % 2**64
            if (rows, f"{digest:016x}", entry.dim) != (table.rows, table.digest, len(table.mean)):
                raise SnapshotError(
                    f"tables.{table.name}: its files hold {rows} rows with digest {digest:016x}, expected {table.rows} with {table.digest}",
                    file=BUILT_MANIFEST,
                )

    def identity(self) -> str:
        """As Snapshot.identity."""
        return self.digest

    def warmup_keys(self, table: str) -> Keys | None:
        """As Snapshot.warmup_keys; here they are codes already."""
        name = self.manifest.warmup.get(table)
        if name is None:
            return None
        with naming(name):
            keys: Keys = np.load(self.path(name), allow_pickle=False)
            return keys

    def path(self, name: str) -> Path:
        """The file behind a name in `built.json`. Raises SnapshotError."""
        return self._resolve(name, file_only=True)


def other_file(root: Path, path: Path) -> OtherFile:
    """The entry of a file beside the rows."""
    return OtherFile(name=path.relative_to(root).as_posix(), bytes=path.stat().st_size, xxh3=checksum(path))
