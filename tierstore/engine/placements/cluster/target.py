"""The target of a load in a cluster: rows are written part by part, each from its built files, to all tags at a time.

On the thread of the load. A part is a partition of the keys: its files are built or fetched, written, counted, compared
and removed before the next one is begun, so that a node needs the disk space of one part only. Nodes that load the same
snapshot share the parts. After a crash, or if a load was cancelled, a load of the same snapshot goes on: the part's
built files are kept on this machine (`build/`), and the cluster knows which parts, and how many rows of each file, were
written. A server may have lost rows, so the rows of each tag are counted again before the load ends. Nobody sees the
version before its record says that it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tierstore.config import Settings
from tierstore.engine.data.disk_room import free_beyond
from tierstore.engine.placement import Building
from tierstore.engine.placements.cluster.shared_load import BEGIN, FINISH, LoadState, PartTable, SharedLoad
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.versions.info import make_record
from tierstore.errors import Conflict, Corruption, DiskFull, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.keys import partition_of
from tierstore.formats.names import BUILT_MANIFEST, VersionDirectory, head_of_file
from tierstore.formats.snapshot.built import BuiltSnapshot
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.bulkload import disk_needed
from tierstore.ingest.results import BaseBuild, TableBuild
from tierstore.sizes import size_text
from tierstore.tiers.background import Pace
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.disk.sealed_file import SealedFile, open_sealed, read_blocks
from tierstore.types import BaseKind, Keys, Partitions, Progress, ProgressFn, Rows

log = logging.getLogger(__name__)

BATCH_ROWS = 16384
SAMPLE_ROWS = 512  # of each file's first and last part, read back and compared
MOST_PARTS = 1024  # into which a node cuts a load: all shards are read for each
LOADING, READY, DROPPING = "loading", "ready", "dropping"
_CLAIM_AGAIN_S = 3.0
_PAUSE_S = 0.2  # between two looks at what other nodes have done
_BEGIN_S = 60.0  # how long a load waits for the node that begins it


class _Overtaken(Exception):
    """Another node has begun the load meanwhile."""


class Writers(Protocol):
    """Opens a writer: model, version, bytes a row by table, tags; the others as for `Writer`."""

    def __call__(
        self,
        name: str,
        number: int,
        row_bytes: dict[str, int],
        tags: Sequence[bytes],
        *,
        line: int = 0,
        load: str = "",
        is_on: Callable[[], bool] = ...,
    ) -> Writer: ...


class ClusterTarget:
    """A version's rows under its tags in the cluster. For one load. `activate` makes the switch."""

    base: BaseKind = "sealed"
    keep_times = False  # rows in a cluster expire only by a load

    def __init__(
        self,
        shared: SharedModel,
        open_load: Callable[[int], SharedLoad],
        settings: Settings,
        choose_tags: Callable[[], list[bytes]],
        writers: Writers,
        share: Callable[[], float],
        activate: Callable[[int, ProgressFn], None],
    ) -> None:
        self._shared, self._open_load, self._settings = shared, open_load, settings
        self._choose_tags, self._writers, self._activate = choose_tags, writers, activate
        self._share = share
        self._record: dict[str, Any] = {}
        self._claimed_s = 0.0

    # --- the claim

    def claim(self, snapshot: Snapshot, identity: str) -> None:
        """Begin the load in the cluster, or join the load of the same snapshot that nodes have begun."""
        manifest, shared = snapshot.manifest, self._shared
        _check_built(snapshot)
        self._load = self._open_load(manifest.version)
        until_s = time.monotonic() + _BEGIN_S
        while True:
            before = shared.versions().get(manifest.version)
            if before is not None and before["state"] != LOADING:
                do = "activate it, or drop it first" if before["state"] == READY else "try again once its rows are gone"
                raise Conflict(
                    f"version {manifest.version} of {shared.name!r} is in the cluster already ({before['state']}); "
                    f"{do}, or give the snapshot a new version"
                )
            self._check_log(manifest)
            same = before is not None and before["identity"] == identity and "token" in before
            if self._join(manifest, before) if before and same else self._begin(snapshot, identity, before):
                shared.forget_order(manifest.version)
                return
            if (before is not None and not same) or time.monotonic() > until_s:
                raise self._of_others(manifest.version)
            time.sleep(_PAUSE_S)

    def _of_others(self, number: int) -> Conflict:
        return Conflict(f"version {number} of {self._shared.name!r} is being loaded by another node")

    def _was_dropped(self, number: int) -> Conflict:
        return Conflict(f"version {number} of {self._shared.name!r} was dropped while it was loaded")

    def _join(self, manifest: Manifest, before: dict[str, Any]) -> bool:
        """Go on with a load, beside the other nodes that do so. False if that is impossible at the moment."""
        record = {**before, "since_s": round(time.time())}
        if not self._load.claim(before["token"]):
            return False
        if "earlier" in before and not self._load.claim_part(BEGIN):
            return False
        if not self._shared.record(manifest.version, before, record):
            return False
        self._record = record
        return "earlier" not in before or self._clear(manifest)

    def _begin(self, snapshot: Snapshot, identity: str, before: dict[str, Any] | None) -> bool:
        """Begin a load. False if another node is faster, or loads another snapshot."""
        manifest, token = snapshot.manifest, secrets.token_hex(8)
        record = {
            "state": LOADING,
            "identity": identity,
            "token": token,
            "tags": [tag.decode() for tag in self._choose_tags()],
            "tables": {name: spec.row_bytes for name, spec in manifest.table_specs().items()},
            "parts": self._choose_parts(snapshot),
            "began_s": round(time.time()),  # rows that are too old by then are not loaded
            "delta_seq": manifest.delta_seq,  # the log keeps later deltas
            "since_s": round(time.time()),
            # what is removed first
            "earlier": None if before is None else {"tags": before["tags"], "tables": before["tables"]},
        }
        if not self._load.claim(token):
            return False
        if not (self._load.claim_part(BEGIN) and self._shared.record(manifest.version, before, record)):
            self._load.release()
            return False
        self._record = record
        return self._clear(manifest)

    def _clear(self, manifest: Manifest) -> bool:
        """Remove what an earlier load has left, and let this one write. False if the record has changed meanwhile."""
        number, before = manifest.version, self._record

        def check() -> None:
            if self._shared.versions().get(number) != before:
                raise _Overtaken

        if not self._shared.remove_files(number, before):
            return False
        try:
            if (earlier := before["earlier"]) is not None:
                tables, tags = earlier["tables"], _encoded(earlier["tags"])
                with self._writers(self._shared.name, number, tables, tags, load=before["token"]) as writer:
                    writer.begin(check, remove_only=True)
            with self._writer(number) as writer:
                writer.begin(check)
        except _Overtaken:
            return False
        self._record = {name: value for name, value in before.items() if name != "earlier"}
        if not self._shared.record(number, before, self._record):
            return False
        self._load.release_part(BEGIN)
        return True

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

    def _writer(self, number: int) -> Writer:
        token = self._record["token"]

        def is_on() -> bool:
            there = self._shared.versions().get(number)
            return there is not None and there["state"] == LOADING and there.get("token") == token

        tables, tags = self._record["tables"], _encoded(self._record["tags"])
        return self._writers(self._shared.name, number, tables, tags, load=token, is_on=is_on)

    # --- parts

    @property
    def _room(self) -> int:
        """Bytes that a part may take on this node's disk."""
        free = free_beyond(self._settings.data, self._settings.disk_reserve)
        most = self._settings.load_disk
        return min(bound for bound in (free, most) if bound is not None) if (free, most) != (None, None) else 1 << 62

    def _needed(self, snapshot: Snapshot, own: Partitions | None) -> int:
        settings = self._settings
        return disk_needed(snapshot, own, memory_bytes=settings.load_memory, workers=settings.load_workers)

    def _choose_parts(self, snapshot: Snapshot) -> int:
        """The number of parts: as it was built, or as many as make one fit on this node's disk."""
        if isinstance(snapshot, BuiltSnapshot) and snapshot.held is not None:
            return snapshot.held.count
        room, parts = self._room, 1
        while (needed := self._needed(snapshot, _part_of(0, parts))) > room:
            if parts == MOST_PARTS:
                raise StorageError(
                    f"a load into a cluster needs {size_text(needed)} of this node's disk, even in {MOST_PARTS} parts, "
                    f"and may take {size_text(room)} (load_disk, and what is free beyond disk_reserve)"
                )
            parts *= 2
        return parts

    def _part(self, snapshot: Snapshot, part: int) -> tuple[Snapshot, Partitions | None]:
        """What is built for a part: of which snapshot, which partitions."""
        own = _part_of(part, self._record["parts"])
        if own is not None and isinstance(snapshot, BuiltSnapshot) and snapshot.held is not None:
            return snapshot.only(part), None
        return snapshot, own

    def place(
        self, build: Building, where: VersionDirectory, snapshot: Snapshot, progress: ProgressFn
    ) -> BaseBuild | None:
        """Write the parts that no other node writes, until all are there. None if another node ends the load."""
        number, count, load = snapshot.manifest.version, int(self._record["parts"]), self._load
        with self._writer(number) as writer:
            while True:
                if self._is_ended(number):
                    return None
                self._keep(number, None, at_once=True)
                done = load.state()
                missing: list[int | str] = [part for part in range(count) if part not in done.parts]
                mine = next((part for part in missing or [FINISH] if load.claim_part(part)), None)
                if isinstance(mine, int):
                    if mine in load.state().parts:  # since it was missing, another node has written it
                        load.release_part(mine)
                        continue
                    try:
                        self._write_part(writer, mine, build, where, snapshot, progress)
                    except Conflict:
                        # its claim was over, and another node has written the part, and perhaps ended the load
                        if not self._is_ended(number) and mine not in load.state().parts:
                            raise
                elif mine is not None and (short := self._short(writer, done)):
                    log.warning(
                        "model %s: version %d: a server has lost rows that were written; what it lacks is written "
                        "again", self._shared.name, number,
                    )  # fmt: skip
                    load.begin_again(done, short)
                    load.release_part(FINISH)
                elif mine is not None:
                    writer.finish(seq=snapshot.manifest.delta_seq)
                    return _summed(done, snapshot)
                else:
                    progress(Progress("await other nodes", count - len(missing), count))
                    time.sleep(_PAUSE_S)

    def _is_ended(self, number: int) -> bool:
        """Whether another node has ended this load. Conflict if the version is another load's, or was dropped."""
        there = self._shared.versions().get(number)
        if there is None or there["state"] == DROPPING:
            raise self._was_dropped(number)
        if there.get("token") != self._record["token"]:
            raise self._of_others(number)
        return bool(there["state"] == READY)

    def _keep(self, number: int, part: int | str | None, *, at_once: bool = False) -> None:
        """Keep the claims. Conflict if another load has the version by now."""
        if not at_once and time.monotonic() - self._claimed_s < _CLAIM_AGAIN_S:
            return
        if not self._load.claim(self._record["token"]):
            raise self._of_others(number)
        if part is not None:
            self._load.claim_part(part)  # if another node has it by now, both write the same rows
        self._claimed_s = time.monotonic()

    def _write_part(
        self,
        writer: Writer,
        part: int,
        build: Building,
        where: VersionDirectory,
        snapshot: Snapshot,
        progress: ProgressFn,
    ) -> None:
        number = snapshot.manifest.version

        def report(step: Progress) -> None:
            progress(step)
            self._keep(number, part)

        try:
            source, own = self._part(snapshot, part)
            self._check_room(source, own, number, files.tree_bytes(where.build))
            with build(source, own, progress=report, began_s=self._record["began_s"]) as (_, built):
                _check_colliding(built)
                self._upload(writer, part, built, snapshot, report)
            files.remove_tree(where.build)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._load.release_part(part)
            raise

    def _check_room(self, snapshot: Snapshot, own: Partitions | None, number: int, there: int) -> None:
        """StorageError if a part does not fit on this node's disk; `there`: bytes of it that are built already."""
        if (needed := self._needed(snapshot, own)) > (room := self._room + there):
            raise StorageError(
                f"version {number} of {self._shared.name!r}: a part of this load needs {size_text(needed)} of this "
                f"node's disk, and may take {size_text(room)} (load_disk, and what is free beyond disk_reserve): free "
                "some space, or load it on a node with more"
            )

    def _upload(self, writer: Writer, part: int, build: BaseBuild, snapshot: Snapshot, progress: ProgressFn) -> None:
        """Write the rows of a part that the cluster lacks, count its rows, and compare some rows of each file."""
        manifest, load = snapshot.manifest, self._load
        names = dict(enumerate(manifest.table_specs(), 1))
        built = [file for file in build.files if isinstance(file, SealedFile)]
        done, tags = load.state(), len(self._record["tags"])
        total, written = sum(table.rows for table in manifest.tables), _rows_in(done)
        samples: dict[str, list[tuple[Keys, Rows]]] = {name: [] for name in names.values()}
        per_tag = {name: np.zeros(tags, np.int64) for name in names.values()}
        pace = Pace(self._share)
        for file in built:
            name = f"{done.round}:{file.xxh3}"
            for of in _pieces(file, names):
                if of.is_sample:
                    samples[of.table].append((of.keys[-SAMPLE_ROWS:].copy(), of.rows[-SAMPLE_ROWS:].copy()))
                per_tag[of.table] += np.bincount(partition_of(of.keys, tags), minlength=tags)
                if of.upto > done.checkpoints.get(name, 0):
                    _write(writer, of, done.short, tags)
                    load.checkpoint(name, of.upto)
                progress(Progress("upload", written + of.upto, total))
                pace.sleep()
            written += file.entries
        self._write_missing(writer, names, built, per_tag, progress)
        for table, parts in samples.items():
            for keys, rows in parts:
                progress(Progress("verify", 0, total))
                writer.verify(table, keys, rows)
        tables = {
            name: PartTable(of.rows, of.digest, of.mean.tolist(), of.expired, per_tag[name].tolist())
            for name, of in build.tables.items()
        }
        load.finish_part(part, tables, [f"{done.round}:{file.xxh3}" for file in built])

    def _write_missing(
        self,
        writer: Writer,
        names: dict[int, str],
        built: list[SealedFile],
        per_tag: Mapping[str, Keys],
        progress: ProgressFn,
    ) -> None:
        """Count, and write rows of this part again that a server has lost since, in a failover, whatever the
        checkpoints say.
        """
        tags = len(self._record["tags"])
        others = _per_tag(self._load.state(), tags)
        short = {
            table: np.flatnonzero(np.array(writer.counts(table)) < count + others.get(table, 0)).tolist()
            for table, count in per_tag.items()
        }
        for table, missing in short.items():
            if missing:
                log.warning(
                    "model %s: %d of %d tags of version %s lack rows of table %s that were written; they are written "
                    "again",
                    self._shared.name, len(missing), tags, writer.version, table,
                )  # fmt: skip
        if any(short.values()):
            pace = Pace(self._share)
            for file in built:
                for of in _pieces(file, names):
                    _write(writer, of, short, tags)
                    progress(Progress("upload", of.upto, file.entries))
                    pace.sleep()

    def _short(self, writer: Writer, done: LoadState) -> dict[str, list[int]]:
        """By table, the tags that have fewer rows than all parts together. Corruption if one has more."""
        short, version = dict[str, list[int]](), int(writer.version)
        for table, count in _per_tag(done, len(self._record["tags"])).items():
            found = np.array(writer.counts(table))
            if (found > count).any():
                raise Corruption(
                    f"{self._shared.name}, version {version}: table {table} has {found.sum()} rows in the cluster, "
                    f"expected {count.sum()}"
                )
            if (found < count).any():
                short[table] = np.flatnonzero(found < count).tolist()
        return short

    # --- the end

    def record(self, where: VersionDirectory, build: BaseBuild, manifest: Manifest) -> dict[str, Any]:
        return make_record(where, manifest, build, _encoded(self._record["tags"]))

    def publish(self, where: VersionDirectory, number: int, record: dict[str, Any]) -> bool:
        """Put the side files and the record into the cluster: from here on the version is there. False if another node
        has done so.
        """
        shared = self._shared
        for path in sorted(path for path in where.root.rglob("*") if path.is_file() and _is_side_file(path, where)):
            shared.put_file(number, self._record["token"], path.relative_to(where.root).as_posix(), path.read_bytes())
        while (there := shared.versions().get(number)) is not None and there.get("token") == self._record["token"]:
            if there["state"] == READY:
                return False
            if there["state"] == LOADING and shared.record(number, there, {**there, "state": READY, "record": record}):
                files.publish_record(where.record, record)
                self._load.end()
                return True
            if there["state"] != LOADING:
                break
        raise self._was_dropped(number)

    def abandon(self, number: int, error: BaseException) -> None:
        """Remove everything of the load from the cluster, and the model, if this would have been its first version.

        Nothing if other nodes, or this one with more space, can go on with the other parts.
        """
        shared, record = self._shared, self._record
        if isinstance(error, DiskFull) and record["parts"] > 1:
            return
        try:
            there = shared.versions().get(number)
            if there is None or there["state"] != LOADING or there.get("token") != record["token"]:
                return
            dropping = {**there, "state": DROPPING}
            if not shared.record(number, there, dropping):  # from here on no node writes or publishes it
                return
            tables, tags = record["tables"], _encoded(record["tags"])
            with self._writers(shared.name, number, tables, tags, load=record["token"]) as writer:
                writer.drop(pause_s=0.01)
            if shared.remove_files(number, dropping):
                self._load.end()
                shared.record(number, dropping, None)
            shared.forget_model()
        except (StorageError, Conflict) as failed:  # the ingester removes them
            log.warning("leftovers of a failed load stay in the cluster for now: %s", failed)

    def activate(self, number: int, progress: ProgressFn) -> None:
        self._activate(number, progress)


def owner_of(lock: Path, node: str) -> str:
    """A name of this node that it has again after a restart: of the file that no two processes lock at a time. `node`
    if the system does not name that.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        there = lock.stat()
    except OSError:
        return node
    return f"{boot}-{there.st_dev:x}-{there.st_ino:x}"


def _check_built(snapshot: Snapshot) -> None:
    """SnapshotError for a built version that a cluster cannot take."""
    if not isinstance(snapshot, BuiltSnapshot):
        return
    if snapshot.held is not None and not snapshot.held.are_all:
        raise SnapshotError(
            f"it is partition {snapshot.held} alone, and a cluster has the rows of all keys: load the directory above "
            "it",
            file=BUILT_MANIFEST,
        )
    for table in snapshot.built.tables:
        _refuse_colliding(table.name, table.colliding)


def _check_colliding(build: BaseBuild) -> None:
    for name, table in build.tables.items():
        _refuse_colliding(name, table.colliding)


def _refuse_colliding(table: str, colliding: Sequence[tuple[str, int]]) -> None:
    if colliding:
        raise SnapshotError(
            f"table {table!r}: the key {colliding[0][0]!r} has the hash of another key, and a model in a cluster "
            "cannot keep such keys apart: rename one of them"
        )


def _part_of(part: int, parts: int) -> Partitions | None:
    return None if parts == 1 else Partitions.of(parts, [part])


def _encoded(tags: Sequence[str]) -> list[bytes]:
    return [tag.encode() for tag in tags]


def _per_tag(done: LoadState, tags: int) -> dict[str, Keys]:
    """By table, how many rows each tag has of the parts that are done."""
    sums: dict[str, Keys] = {}
    for tables in done.parts.values():
        for name, of in tables.items():
            sums[name] = sums.get(name, np.zeros(tags, np.int64)) + np.array(of.tags, np.int64)
    return sums


def _rows_in(done: LoadState) -> int:
    return sum(of.rows for tables in done.parts.values() for of in tables.values())


def _summed(done: LoadState, snapshot: Snapshot) -> BaseBuild:
    """What all parts have together; their files are gone."""
    first = done.parts[min(done.parts)]
    tables = {
        name: TableBuild(
            sum(tables[name].rows for tables in done.parts.values()),
            np.array(of.mean, np.float32),
            sum(tables[name].digest for tables in done.parts.values()) % 2**64,
            expired=of.expired,
        )
        for name, of in first.items()
    }
    own = snapshot.held if isinstance(snapshot, BuiltSnapshot) else None
    return replace(BaseBuild([], tables, "sealed"), own=own)


class _Piece(NamedTuple):
    """Consecutive rows of a built file, up to its row `upto` - 1.

    `is_sample`: the first or the last piece.
    """

    table: str
    keys: Keys
    rows: Rows
    upto: int
    is_sample: bool


def _pieces(file: SealedFile, names: Mapping[int, str]) -> Iterator[_Piece]:
    """All rows of a built file, in order."""
    opened = open_sealed(file.path, xxh3=file.xxh3, size=file.bytes)
    try:
        table, at_once, blocks = names[opened.table_id], max(1, BATCH_ROWS // opened.per_block), len(opened.first_keys)
        for block in range(0, blocks, at_once):
            upto = min(file.entries, (block + at_once) * opened.per_block)
            keys, rows = read_blocks(opened, block, min(block + at_once, blocks), None)
            yield _Piece(table, keys, rows, upto, block == 0 or block + at_once >= blocks)
    finally:
        os.close(opened.fd)


def _write(writer: Writer, of: _Piece, short: Mapping[str, Collection[int]] | None, tags: int) -> None:
    """Write rows, those of the tags in `short` alone if it is given."""
    if short is None:
        writer.write_rows(of.table, of.keys, of.rows)
    elif missing := short.get(of.table):
        again = np.flatnonzero(np.isin(partition_of(of.keys, tags), [*missing]))
        if len(again):
            writer.write_rows(of.table, of.keys[again], of.rows[again])


def _is_side_file(path: Any, where: VersionDirectory) -> bool:
    """Whether the other nodes need it; golden examples were run, and are for the node that loads."""
    if path.is_relative_to(where.golden):
        return False
    first = path.relative_to(where.root).parts[0]
    return head_of_file(first) is not None or first == where.requests().parent.name
