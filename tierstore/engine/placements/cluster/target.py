"""The target of a load in a cluster: rows are uploaded from the built files, one after another, to all tags at a time.

On the thread of the load. After a crash, or if the load was cancelled, a load of the same snapshot goes on: the built
files are kept on this machine (`ingest/`), and the cluster knows how many rows of each were written. Rows that are
written twice do no harm. A server may have lost rows, so the rows of each tag are counted before the load ends. Nobody
sees the version before its record says that it is ready.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tierstore.config import Settings
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.versions.info import make_record
from tierstore.errors import Conflict, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.keys import partition_of
from tierstore.formats.names import VersionDirectory, head_of_file
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.results import BaseBuild
from tierstore.tiers.background import Pace
from tierstore.tiers.disk.sealed_file import SealedFile, open_sealed, read_blocks
from tierstore.tiers.remote.write import Writer
from tierstore.types import BaseKind, Keys, Progress, ProgressFn, Rows

log = logging.getLogger(__name__)

BATCH_ROWS = 16384
SAMPLE_ROWS = 512  # of each file's first and last part, read back and compared
CLAIM_S = 30.0
LOADING, READY = "loading", "ready"

Writers = Callable[[str, int, dict[str, int], list[bytes]], Writer]  # model, version, bytes a row by table, tags


class ClusterTarget:
    """A version's rows under its tags in the cluster. For one load. `activate` makes the switch."""

    base: BaseKind = "sealed"
    keep_times = False  # rows in a cluster expire only by a load

    def __init__(
        self,
        shared: SharedModel,
        node: str,
        settings: Settings,
        choose_tags: Callable[[], list[bytes]],
        writers: Writers,
        share: Callable[[], float],
        activate: Callable[[int, ProgressFn], None],
    ) -> None:
        self._shared, self._node, self._settings = shared, node, settings
        self._choose_tags, self._writers, self._activate = choose_tags, writers, activate
        self._share = share
        self._record: dict[str, Any] = {}

    def claim(self, snapshot: Snapshot, identity: str) -> None:
        """Announce the load in the cluster: only one node at a time may do it."""
        manifest, shared = snapshot.manifest, self._shared
        before = shared.versions().get(manifest.version)
        if before is not None and before["state"] != LOADING:
            do = "activate it, or drop it first" if before["state"] == READY else "try again once its rows are gone"
            raise Conflict(
                f"version {manifest.version} of {shared.name!r} is in the cluster already ({before['state']}); {do}, "
                "or give the snapshot a new version"
            )
        if not shared.claim_load(manifest.version, self._node, CLAIM_S):
            raise Conflict(f"version {manifest.version} of {shared.name!r} is being loaded by another node")
        self._check_log(manifest)
        now_s = round(time.time())
        if before is not None and before["identity"] == identity:
            self._begin_record(manifest, before, {**before, "since_s": now_s})
            return
        if before is not None:
            with self._writer(manifest, before) as writer:
                writer.drop()
            shared.remove_files(manifest.version)
        tags = [tag.decode() for tag in self._choose_tags()]
        row_bytes = {name: spec.row_bytes for name, spec in manifest.table_specs().items()}
        record = {
            "state": LOADING,
            "identity": identity,
            "tags": tags,
            "tables": row_bytes,
            "delta_seq": manifest.delta_seq,  # the log keeps later deltas
            "since_s": now_s,
        }
        self._begin_record(manifest, before, record)

    def _begin_record(self, manifest: Manifest, before: dict[str, Any] | None, record: dict[str, Any]) -> None:
        self._shared.forget_order(manifest.version)
        if not self._shared.record(manifest.version, before, record):
            raise Conflict(f"version {manifest.version} of {self._shared.name!r} is being loaded by another node")
        self._record = record

    def _check_log(self, manifest: Manifest) -> None:
        """SnapshotError if deltas that the snapshot lacks are gone from the log."""
        newest = self._shared.pointer().seq
        if newest is None or manifest.delta_seq >= newest:
            return
        entries = self._shared.read(manifest.delta_seq, 1)
        if not entries or entries[0].seq != manifest.delta_seq + 1:
            begins = entries[0].seq - 1 if entries else newest
            raise SnapshotError(
                f"delta_seq is {manifest.delta_seq}, but the cluster's log begins after {begins}, so what came "
                f"between is gone; export a snapshot with delta_seq {begins} or later",
                file="snapshot.json",
            )

    def _writer(self, manifest: Manifest, record: dict[str, Any]) -> Writer:
        return self._writers(
            self._shared.name, manifest.version, record["tables"], [tag.encode() for tag in record["tags"]]
        )

    def place(
        self,
        bulk: BulkLoad,
        build: BaseBuild,
        where: VersionDirectory,
        snapshot: Snapshot,
        progress: ProgressFn,
    ) -> None:
        """Write every row, then count the cluster's rows, and compare some rows of each file."""
        manifest = snapshot.manifest
        for name, table in build.tables.items():
            if table.colliding:
                raise SnapshotError(
                    f"table {name!r}: the key {table.colliding[0][0]!r} has the hash of another key, and a model in a "
                    "cluster cannot keep such keys apart: rename one of them"
                )
        names = dict(enumerate(manifest.table_specs(), 1))
        built = [file for file in build.files if isinstance(file, SealedFile)]
        with self._writer(manifest, self._record) as writer:
            samples, per_tag = self._upload(writer, manifest, names, built, progress)
            self._write_missing(writer, names, built, per_tag)
            writer.finish(seq=manifest.delta_seq)
            for name, table in build.tables.items():
                keys = np.concatenate([keys for keys, _ in samples[name]] or [np.empty(0, np.int64)])
                row_bytes = manifest.table_specs()[name].row_bytes
                rows = np.concatenate([rows for _, rows in samples[name]] or [np.empty((0, row_bytes), np.uint8)])
                order = np.argsort(keys)
                progress(Progress("verify", 0, table.rows))
                writer.verify(name, table.rows, keys[order], rows[order])

    def _upload(
        self, writer: Writer, manifest: Manifest, names: dict[int, str], built: list[SealedFile], progress: ProgressFn
    ) -> tuple[dict[str, list[tuple[Keys, Rows]]], dict[str, Keys]]:
        """Write rows that the cluster lacks.

        Returns by table some rows of each file, and the number of rows of each tag.
        """
        shared, number, total = self._shared, manifest.version, sum(table.rows for table in manifest.tables)
        kept = shared.checkpoints(number)
        done, pace = 0, Pace(self._share)
        samples: dict[str, list[tuple[Keys, Rows]]] = {name: [] for name in names.values()}
        tags = len(self._record["tags"])
        per_tag = {name: np.zeros(tags, np.int64) for name in names.values()}
        for file in built:
            for part in _parts(file, names):
                if part.is_sample:
                    samples[part.table].append((part.keys[-SAMPLE_ROWS:].copy(), part.rows[-SAMPLE_ROWS:].copy()))
                per_tag[part.table] += np.bincount(partition_of(part.keys, tags), minlength=tags)
                if part.upto > kept.get(file.xxh3, 0):
                    writer.write_rows(part.table, part.keys, part.rows)
                    shared.checkpoint(number, file.xxh3, part.upto)
                progress(Progress("upload", done + part.upto, total))
                self._keep_claim(number)
                pace.sleep()
            done += file.entries
        return samples, per_tag

    def _keep_claim(self, number: int) -> None:
        if not self._shared.claim_load(number, self._node, CLAIM_S):
            raise Conflict(f"version {number} of {self._shared.name!r} is being loaded by another node by now")

    def _write_missing(
        self, writer: Writer, names: dict[int, str], built: list[SealedFile], per_tag: Mapping[str, Keys]
    ) -> None:
        """Write again rows that a server has lost since, in a failover: they are counted, whatever the checkpoints
        say.
        """
        number, pace, tags = int(writer.version), Pace(self._share), len(self._record["tags"])
        short = {table: np.flatnonzero(np.array(writer.counts(table)) != count) for table, count in per_tag.items()}
        for table, missing in short.items():
            if len(missing):
                log.warning(
                    "model %s: %d of %d tags of version %d lack rows of table %s that were written; they are written "
                    "again",
                    self._shared.name, len(missing), tags, number, table,
                )  # fmt: skip
        for file in built:
            for part in _parts(file, names, [table for table, missing in short.items() if len(missing)]):
                again = np.flatnonzero(np.isin(partition_of(part.keys, tags), short[part.table]))
                if len(again):
                    writer.write_rows(part.table, part.keys[again], part.rows[again])
                self._keep_claim(number)
                pace.sleep()

    def record(self, where: VersionDirectory, build: BaseBuild, manifest: Manifest) -> dict[str, Any]:
        return make_record(where, manifest, build, [tag.encode() for tag in self._record["tags"]])

    def publish(self, where: VersionDirectory, number: int, record: dict[str, Any]) -> None:
        """Put the side files and the record into the cluster: from here on the version is there."""
        shared = self._shared
        for path in sorted(path for path in where.root.rglob("*") if path.is_file() and _is_side_file(path, where)):
            shared.put_file(number, path.relative_to(where.root).as_posix(), path.read_bytes())
        ready = {**self._record, "state": READY, "record": record}
        if not shared.record(number, self._record, ready):
            raise Conflict(f"version {number} of {shared.name!r} was dropped while it was loaded")
        files.publish_record(where.record, record)
        shared.end_load(number)

    def abandon(self, number: int) -> None:
        """Remove everything of the load from the cluster, and the model, if this would have been its first version."""
        shared, record = self._shared, self._record
        try:
            tags = [tag.encode() for tag in record["tags"]]
            with self._writers(shared.name, number, record["tables"], tags) as writer:
                writer.drop(pause_s=0.01)
            shared.remove_files(number)
            shared.end_load(number)
            shared.record(number, record, None)
            shared.forget_model()
        except StorageError as error:  # it is removed after `load_retention_s`
            log.warning("leftovers of a failed load stay in the cluster for now: %s", error)

    def activate(self, number: int, progress: ProgressFn) -> None:
        self._activate(number, progress)


class _Part(NamedTuple):
    """Consecutive rows of a built file, up to its row `upto` - 1.

    `is_sample`: the first or the last part.
    """

    table: str
    keys: Keys
    rows: Rows
    upto: int
    is_sample: bool


def _parts(file: SealedFile, names: Mapping[int, str], tables: Container[str] | None = None) -> Iterator[_Part]:
    """All rows of a built file, in order; none if it is not of one of `tables`."""
    opened = open_sealed(file.path, xxh3=file.xxh3, size=file.bytes)
    try:
        table, at_once, blocks = names[opened.table_id], max(1, BATCH_ROWS // opened.per_block), len(opened.first_keys)
        for block in range(0, blocks if tables is None or table in tables else 0, at_once):
            upto = min(file.entries, (block + at_once) * opened.per_block)
            keys, rows = read_blocks(opened, block, min(block + at_once, blocks), None)
            yield _Part(table, keys, rows, upto, block == 0 or block + at_once >= blocks)
    finally:
        os.close(opened.fd)


def _is_side_file(path: Any, where: VersionDirectory) -> bool:
    """Whether the other nodes need it; golden examples were run, and are for the node that loads."""
    if path.is_relative_to(where.golden):
        return False
    first = path.relative_to(where.root).parts[0]
    return head_of_file(first) is not None or first == where.requests().parent.name
