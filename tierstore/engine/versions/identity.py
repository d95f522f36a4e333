"""The identity of a version's content: a directory, its RocksDB and its record must come from the same load.

The record (`version.json`) has the digest of the loaded content; RocksDB has that digest too, with model, version and
line. So files that came under another version's name, by a manual restore or a `mv`, are refused when they are opened.
Fronts compare the digest of their nodes as well: under one number they read rows of one content only.

Versions that an earlier release has loaded, or built again, have no digest, and are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from tierstore.errors import Corruption
from tierstore.formats.names import VersionDirectory
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.ingest.results import BaseBuild
from tierstore.tiers.base import Records
from tierstore.tiers.disk.tier import IDENTITY
from tierstore.types import Partitions

CONTENT = "content"  # the field of `version.json`


def content_digest(manifest: Manifest, build: BaseBuild) -> str:
    """32 hex digits that are equal on every node that loads the same snapshot.

    They do not depend on which of its partitions it loads, or how they were built. They are a digest of the manifest,
    with the checksums of its shards. If a shard has none, its name and the time of the snapshot count too, and the
    digests of the rows, as far as every node has the same ones.
    """
    document = manifest.to_document()
    for name in ("dense", "heads", "warmup", "requests"):  # their names differ from build to build
        document.pop(name, None)
    shards = [shard for table in document["tables"] for shard in table["shards"]]
    parts: list[Any] = [document]
    if all("xxh3" in shard for shard in shards):
        if all(table.ttl_s is None or table.time_column is not None for table in manifest.tables):
            document.pop("created_at", None)  # no row depends on it
        for shard in shards:
            del shard["path"]
    elif build.own is None:
        parts += [f"{build.tables[table.name].digest:016x}" for table in manifest.tables if table.ttl_s is None]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def identity_record(
    where: VersionDirectory, manifest: Manifest, content: str | None, partitions: Partitions | None
) -> dict[str, bytes]:
    """The identity record for RocksDB in a version's directory; none if the content is unknown."""
    if content is None:
        return {}
    document = {
        "model": manifest.model,
        "version": manifest.version,
        "line": where.line,
        CONTENT: content,
        "partitions": None if partitions is None else partitions.document(),
    }
    return {IDENTITY: json.dumps(document).encode()}


def check_identity(where: VersionDirectory, expected: Mapping[str, bytes], disk: Records) -> None:
    """Corruption if a RocksDB has another identity than `identity_record` expects of this directory."""
    found = disk.record(IDENTITY)
    if found is None or found == expected.get(IDENTITY):
        return
    raise Corruption(
        f"{where.db} is not of the version in {where.root}: expected "
        f"{_shown(expected.get(IDENTITY))}, found {_shown(found)}. "
        "Put back the files that belong together, restore a backup, or drop the version and load it again"
    )


def _shown(record: bytes | None) -> str:
    if record is None:
        return "one without an identity, as earlier releases have loaded it"
    try:
        of = json.loads(record)
        line = f", line {of['line']}" if of["line"] else ""
        return f"version {of['version']} of {of['model']!r}{line} with the content {of[CONTENT][:8]}"
    except (ValueError, LookupError, TypeError):
        return repr(record[:80])
