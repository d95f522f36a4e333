"""A built version: a directory with the finished files of a snapshot's rows, made once, which every store only copies.

`BuiltSnapshot` is a snapshot whose rows are in such files. It is immutable; any thread may use it. `schema/built.md`
has the format: `built.json` names every other file with its length and digest, and is written last.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import SnapshotError, StorageError
from tierstore.formats.files import publish_json
from tierstore.formats.names import BUILT_MANIFEST, GOLDEN_INDEX, table_of_strings
from tierstore.formats.objects import Location, ObjectPath, size_of
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, open_regular, read_regular
from tierstore.formats.snapshot.checksum import checksum
from tierstore.formats.snapshot.manifest import Manifest, RelativePath
from tierstore.formats.snapshot.reader import Snapshot, inside, location, naming
from tierstore.types import MAX_PARTITIONS, Keys, Partitions

FORMAT: Literal[1] = 1
Digest = Field(pattern=r"^[0-9a-f]{16}$")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BuiltFile(_Entry):
    """One sealed file: `xxh3` as in its trailer, `digest` of its rows; `table` may name
    the times of one (`times_of`).
    """

    name: RelativePath
    table: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    xxh3: str = Digest
    digest: str = Digest


class BuiltTable(_Entry):
    """A built table: `mean` and `expired` are of all partitions, the other fields are of this one.

    `colliding`: (string, code) of the keys that are not under their hash. `expired` rows
    were older than the table's ttl.
    """

    name: str
    rows: int = Field(ge=0)
    mean: tuple[float, ...]
    digest: str = Digest
    colliding: tuple[tuple[str, int], ...]
    expired: int = Field(0, ge=0)


class OtherFile(_Entry):
    """A file beside the rows (dense part, warm-up keys, requests, strings of keys): `xxh3` of all its bytes."""

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


class _Partitioned(_Entry):
    """The `built.json` of a directory of partitions."""

    format: Literal[1]
    model: str | None = None  # earlier releases wrote neither
    version: int | None = None
    partitions: int = Field(ge=2, le=MAX_PARTITIONS)
    folders: tuple[RelativePath, ...]


_File = TypeVar("_File", BuiltFile, OtherFile)
_Document = TypeVar("_Document", BuiltManifest, _Partitioned)


def write_built(root: Path, built: BuiltManifest, manifest: Manifest) -> None:
    """Publish `built.json`, which makes the directory a built version."""
    document = built.model_dump(mode="json")
    for table in document["tables"]:
        if not table["expired"]:  # earlier releases refuse it
            del table["expired"]
    publish_json(root / BUILT_MANIFEST, {**document, "manifest": manifest.to_document()})


def write_partitions(root: Path, folders: list[str], manifest: Manifest) -> None:
    """Publish the `built.json` of a directory of partitions, each a built version of its own."""
    head = {"format": FORMAT, "model": manifest.model, "version": manifest.version}
    publish_json(root / BUILT_MANIFEST, {**head, "partitions": len(folders), "folders": folders})


def open_source(source: str | Path, own: Partitions | None = None) -> Snapshot:
    """Open a snapshot or a built version; of one that was built in partitions only `own`, or all.

    Raises SnapshotError.
    """
    root = location(source)
    manifest = root / BUILT_MANIFEST
    is_built = manifest.is_file() if isinstance(manifest, ObjectPath) else os.path.lexists(manifest)
    return _open_built(root, own) if is_built else Snapshot.open(root)


def _open_built(root: Location, own: Partitions | None) -> BuiltSnapshot:
    """Checks that its files exist with the right length; their rows are not read."""
    content, document = _read(root, BUILT_MANIFEST)
    if "folders" in document:
        snapshot = _joined(root, content, _partitioned(document, own), own)
    else:
        snapshot = _opened(root, BUILT_MANIFEST, content, document)
        if own is not None and snapshot.held not in (None, own):
            raise SnapshotError(
                f"it is partition {snapshot.held} alone, and the setting partition is {own}: load the directory above "
                "it",
                file=BUILT_MANIFEST,
            )
    snapshot.check_files()
    return snapshot


def _read(root: Location, name: str) -> tuple[bytes, dict[str, Any]]:
    """A `built.json`: its bytes, and the object in it, of a format that is known."""
    inside(root, name)
    with naming(name):
        try:
            content = read_regular(root / name, MAX_DOCUMENT_BYTES)
        except StorageError:
            raise
        except OSError as error:
            raise SnapshotError(f"cannot be read: {error.strerror or error}", file=name) from error
        document = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError(f"expected an object, got {type(document).__name__}")
        if document.get("format") != FORMAT:
            raise SnapshotError(
                f"expected format {FORMAT}, got {document.get('format')!r}: it was built by another release; build it "
                "again with this one",
                file=name,
            )
    return content, document


def _opened(root: Location, name: str, content: bytes, document: dict[str, Any]) -> BuiltSnapshot:
    """A built version, of all keys or of one partition, whose files are not looked for yet."""
    with naming(name):
        manifest = Manifest.parse(json.dumps(document.pop("manifest", None)), file=name)
        built = _parsed(BuiltManifest, document, name)
        held = None if built.partitions == 1 else Partitions.of(built.partitions, [built.partition])
    snapshot = BuiltSnapshot(root.resolve(), manifest, built, xxhash.xxh3_128_hexdigest(content), held)
    snapshot.check_sums(name)
    return snapshot


def _partitioned(document: dict[str, Any], own: Partitions | None) -> _Partitioned:
    whole = _parsed(_Partitioned, document, BUILT_MANIFEST)
    if len(whole.folders) != whole.partitions:
        raise SnapshotError(
            f"expected {whole.partitions} folders, got {len(whole.folders)}; build it again", file=BUILT_MANIFEST
        )
    if own is not None and own.count != whole.partitions:
        raise SnapshotError(
            f"it was built in {whole.partitions} partitions, and the setting partition is {own}: build it with "
            f"--partitions {own.count}, or load the snapshot itself",
            file=BUILT_MANIFEST,
        )
    return whole


def _joined(root: Location, content: bytes, whole: _Partitioned, own: Partitions | None) -> BuiltSnapshot:
    """Some or all partitions of a build as one built version: its files, and its strings of keys, are those in their
    folders, side files those of the first.
    """
    held = own or Partitions.of(whole.partitions, range(whole.partitions))
    opened: list[tuple[str, BuiltSnapshot]] = []
    for number in held.numbers:
        folder = whole.folders[number]
        name = f"{folder}/{BUILT_MANIFEST}"
        part = _opened(root, name, *_read(root, name))
        first = opened[0][1] if opened else part
        if (part.built.partition, part.built.partitions) != (number, whole.partitions) or _of_all(part) != _of_all(
            first
        ):
            raise SnapshotError(
                f"expected partition {number} of {whole.partitions} of the same build; build it again", file=name
            )
        opened.append((folder, part))
    digest = xxhash.xxh3_128_hexdigest(b"".join([content, *(part.digest.encode() for _, part in opened)]))
    return _of_folders(root.resolve(), opened, digest, held)


def _of_folders(
    root: Location, opened: list[tuple[str, BuiltSnapshot]], digest: str, held: Partitions
) -> BuiltSnapshot:
    folder, first = opened[0]
    tables = []
    for i, table in enumerate(first.built.tables):
        parts = [part.built.tables[i] for _, part in opened]
        update: dict[str, Any] = {
            "rows": sum(part.rows for part in parts),
            "digest": f"{sum(int(part.digest, 16) for part in parts) % 2**64:016x}",
            "colliding": tuple(entry for part in parts for entry in part.colliding),
        }
        tables.append(table.model_copy(update=update))
    files = [_below(folder, file) for folder, part in opened for file in part.built.files]
    others = tuple(
        _below(name, other)
        for name, part in opened
        for other in part.built.others
        if part is first or table_of_strings(other.name) is not None
    )
    update = {"tables": tuple(tables), "files": tuple(files), "others": others}
    manifest = _manifest_below(folder, first.manifest)
    return BuiltSnapshot(root, manifest, first.built.model_copy(update=update), digest, held, tuple(opened))


def _of_all(part: BuiltSnapshot) -> tuple[Any, ...]:
    """What all partitions of a build have in common."""
    built = part.built
    return built.sealed_format, [(table.name, table.mean) for table in built.tables], part.manifest.to_document()


def _below(folder: str, entry: _File) -> _File:
    return entry.model_copy(update={"name": f"{folder}/{entry.name}"})


def _manifest_below(folder: str, manifest: Manifest) -> Manifest:
    """A manifest with the names of side files as they are seen from above their folder."""
    return manifest.with_side_files(lambda name: f"{folder}/{name}")


def _parsed(kind: type[_Document], document: dict[str, Any], name: str) -> _Document:
    with naming(name):
        try:
            return kind.model_validate_json(json.dumps(document))
        except ValidationError as error:
            shown = "; ".join(f"{'.'.join(map(str, of['loc']))}: {of['msg']}" for of in error.errors()[:3])
            raise SnapshotError(shown, file=name) from error


@dataclass(frozen=True, slots=True)
class BuiltSnapshot(Snapshot):
    """A snapshot whose rows are in finished files. The shards in its manifest are those that it was built from.

    held: the partitions that its rows are in, each file in one; None where it was not built in partitions.
    """

    built: BuiltManifest
    digest: str  # of every `built.json`, and so of everything
    held: Partitions | None
    folders: tuple[tuple[str, BuiltSnapshot], ...] = ()  # by name, those of `held`, if it is of several

    def only(self, partition: int) -> BuiltSnapshot:
        """One of its partitions."""
        if not self.folders:
            return self
        mine = [entry for entry in self.folders if entry[1].built.partition == partition]
        digest = xxhash.xxh3_128_hexdigest(f"{self.digest} {partition}".encode())
        return _of_folders(self.root, mine, digest, Partitions.of(self.built.partitions, [partition]))

    def check_files(self) -> None:
        """Raise SnapshotError unless every file is there with its length, and the side files are unchanged.

        Strings of keys are compared when they are copied, like rows: there may be gigabytes of them.
        """
        listed = [(of.name, of.bytes) for of in self.built.files] + [(of.name, of.bytes) for of in self.built.others]
        for name, expected in listed:
            size = size_of(self.file(name))
            if size != expected:
                raise SnapshotError(f"expected {expected} bytes, found {size}; copy or build it again", file=name)
        for other in self.built.others:
            if table_of_strings(other.name) is not None:
                continue
            got = checksum(self._resolve(other.name))
            if got != other.xxh3:
                raise SnapshotError(f"expected xxh3 {other.xxh3}, got {got}; copy or build it again", file=other.name)

    def check_sums(self, name: str) -> None:
        """Raise SnapshotError, about the `built.json` of that name, where its tables are
        not what its files add up to.
        """
        if [table.name for table in self.built.tables] != [table.name for table in self.manifest.tables]:
            raise SnapshotError("tables: expected those of the manifest, in its order", file=name)
        for table, entry in zip(self.built.tables, self.manifest.tables, strict=True):
            mine = [file for file in self.built.files if file.table == table.name]
            rows, digest = sum(file.rows for file in mine), sum(int(file.digest, 16) for file in mine) % 2**64
            if (rows, f"{digest:016x}", entry.dim) != (table.rows, table.digest, len(table.mean)):
                raise SnapshotError(
                    f"tables.{table.name}: its files hold {rows} rows with digest {digest:016x}, expected "
                    f"{table.rows} with {table.digest}",
                    file=name,
                )

    def identity(self) -> str:
        """What tells this built version from another, as `Snapshot.identity`."""
        return self.digest

    def strings(self, table: str) -> list[OtherFile]:
        """The files with the strings of a table's keys; none where it was built without them, or has no such keys."""
        return [other for other in self.built.others if table_of_strings(other.name) == table]

    def warmup_keys(self, table: str) -> Keys | None:
        """The warm-up keys of a table, as `Snapshot.warmup_keys`; here they are codes already."""
        name = self.manifest.warmup.get(table)
        if name is None:
            return None
        with naming(name):
            with open_regular(self.file(name)) as file:
                keys: Keys = np.load(file, allow_pickle=False)
            return keys

    def _golden_folder(self) -> str | None:
        """As `Snapshot._golden_folder`, of the folder whose side files count."""
        indexes = (other.name for other in self.built.others if f"/{other.name}".endswith(f"/{GOLDEN_INDEX}"))
        return next((name.rpartition("/")[0] for name in indexes), None)


def other_file(root: Path, path: Path) -> OtherFile:
    """The entry of a side file."""
    return OtherFile(name=path.relative_to(root).as_posix(), bytes=path.stat().st_size, xxh3=checksum(path))
