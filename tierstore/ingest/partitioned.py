"""A built version that many machines make: each task sorts a partition of a table, and `commit` makes one version of them.

    <out>/_build.json                            what is built; written by `begin_build`
    <out>/partition-0007/base-item-…             finished files, each attempt of a task under names of its own
    <out>/partition-0007/strings/item/…          the strings of its keys, likewise
    <out>/partition-0007/_item.json              the receipt of (item, 7): which of these files count; written after them
    <out>/partition-0007/built.json, built.json  by `commit`, the one above the folders last; then the rest is removed

`out` is a directory that all machines see, or a URL. A task that dies leaves files that nothing names; of two attempts of one
task the last receipt counts, and either is whole. Nothing accepts `out` before its `built.json` is there.

`PartitionedBuild` is immutable and can be pickled; any thread or process may use it.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tierstore import kernels
from tierstore.errors import Conflict, InvalidInput, SnapshotError, WrongPartition
from tierstore.formats import files
from tierstore.formats.keys import as_codes, partition_of
from tierstore.formats.names import BUILT_MANIFEST, STRINGS_SUFFIX, built_strings
from tierstore.formats.snapshot.built import BuiltFile, BuiltTable, OtherFile, other_file, write_partitions
from tierstore.formats.snapshot.checksum import checksum
from tierstore.formats.snapshot.golden import digest_parts
from tierstore.formats.snapshot.manifest import Manifest, TableEntry
from tierstore.formats.snapshot.reader import Snapshot, open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.formats.targets import Target, target_at
from tierstore.formats.uploads import scratch_directory
from tierstore.imports.columns import converted
from tierstore.imports.row_sources import Wanted, blocks
from tierstore.ingest.build import built_file, finish_folder
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.journal import Journal
from tierstore.ingest.load_plan import FileSpec, plan_load
from tierstore.ingest.load_tasks import RUNS, LoadTasks
from tierstore.ingest.receipts import (
    BUILD_RECORD,
    BuildRecord,
    Receipt,
    build_record,
    folder_of,
    receipt_name,
    receipt_of,
)
from tierstore.ingest.tasks import SortedStrings, SortStrings
from tierstore.kernels import ahead
from tierstore.types import MAX_PARTITIONS, KeyType, Partitions

log = logging.getLogger(__name__)

_SCRATCH = "tierstore-build-"
_ANY_SIZE = 1 << 62  # a load bounds what it takes of them


@dataclass(frozen=True, slots=True)
class PartitionedBuild:
    """A build in `partitions` parts, made by `begin_build`. It can be sent to other machines."""

    out: str
    template: str
    partitions: int
    began_s: int
    manifest_json: str
    string_keys: bool = True

    def partition_of(self, table: str, keys: Any) -> npt.NDArray[np.int64]:
        """The partition of each key of an Arrow column, an array or a sequence: int64 [n]. Rows go to the task of theirs. InvalidInput."""
        key_type = self._entry(table).key
        if isinstance(keys, (pa.Array, pa.ChunkedArray)):
            keys = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
            keys = converted(keys, key_type, "key")
        return partition_of(as_codes(keys, key_type), self.partitions)

    def pending(self, table: str) -> list[int]:
        """The partitions of a table that no task has finished yet. StorageError."""
        self._entry(table)
        names = set(self._target().names())
        return [number for number in range(self.partitions) if receipt_name(number, table) not in names]

    def write(
        self,
        table: str,
        partition: int,
        batches: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch],
        *,
        key: str = "key",
        vector: str = "vector",
        time_column: str | None = None,
        scratch: str | Path | None = None,
        memory_bytes: int = 512 << 20,
    ) -> int:
        """Make the files of a partition of a table from all of its rows, in any order, and return how many rows they hold.

        batches: Arrow data with the columns `key` and `vector`, and `time_column` where the table has one, of the kinds that
        `import_table` takes. Rows go through `scratch`, by default where temporary files are, where they take about three times
        their bytes; `memory_bytes` bounds what is sorted at a time. A partition that is finished is not made again, and `batches`
        are not read. Raises InvalidInput for a table or partition that there is not, WrongPartition for a key of another one,
        SnapshotError for rows that may not be loaded, and StorageError.
        """
        entry = self._entry(table)
        if not 0 <= partition < self.partitions:
            raise InvalidInput(f"partition: expected 0 to {self.partitions - 1}, got {partition}")
        target = self._target()
        done = receipt_of(target, partition, table)
        if done is not None:
            return done.rows
        if not kernels.is_complete(kernels.SOON):
            ahead.prepare(until=kernels.SOON)
        wanted = Wanted(key, vector, entry.key, time_column, dim=entry.dim)
        with scratch_directory(scratch, _SCRATCH) as where:
            try:
                snapshot = self._spool(where / "rows", entry, partition, batches, wanted)
                receipt = self._sorted(where, snapshot, table, partition, memory_bytes)
            except SnapshotError as error:
                reason = error.reason.partition(": it is also in")[0]
                raise SnapshotError(f"table {table!r}, partition {partition}: {reason}", row=error.row) from error
            files.remove_tree(where / "rows")
            name = receipt_name(partition, table)
            files.publish_json(where / "out" / name, receipt.model_dump(mode="json"))
            target.move_in(where / "out", last=name)
        return receipt.rows

    def commit(self, rows: Mapping[str, int] | None = None) -> int:
        """Make one version of all partitions, and return its number. Called once, when every task is over.

        rows: how many each table has, those that have expired among them: others are refused, and a partition that no task was
        given has no rows. Without it every partition of every table must have been written. InvalidInput, Conflict where it is
        committed already, SnapshotError where the template has changed, StorageError.
        """
        target = self._target()
        names = set(target.names())
        if BUILT_MANIFEST in names:
            raise Conflict(f"{self.out} is committed already")
        receipts = self._receipts(target, names, rows or {})
        template = open_snapshot(self.template)
        if _template_digest(template) != build_record(target, self.out).template:
            raise SnapshotError(f"{self.template} is another template than the build was begun with")
        with scratch_directory(None, _SCRATCH) as where:
            manifest = self._committed_manifest(receipts)
            folders = [folder_of(number) for number in range(self.partitions)]
            for number, folder in enumerate(folders):
                self._finish(files.make_dir(where / folder), template, manifest, receipts, number)
            write_partitions(where, folders, manifest)
            kept = {path.relative_to(where).as_posix() for path in where.rglob("*")}
            target.move_in(where, last=BUILT_MANIFEST)
        for (number, _), of in receipts.items():
            names_there = [file.name for file in of.files] + [file.name for file in of.strings or ()]
            kept |= {f"{folder_of(number)}/{name}" for name in names_there}
        for name in names - kept:
            target.remove(name)
        return manifest.version

    # --- a task

    def _spool(self, where: Path, entry: TableEntry, partition: int, batches: Any, wanted: Wanted) -> Snapshot:
        """The rows as a snapshot of their own, in which the other tables are empty."""
        manifest = self._manifest()
        with SnapshotWriter(
            where, model=manifest.model, version=manifest.version, created_at=manifest.created_at
        ) as writer:
            tables = {
                of.name: writer.table(
                    of.name, dim=of.dim, dtype=of.dtype, key=of.key, ttl_s=of.ttl_s, time_column=of.time_column
                )
                for of in manifest.tables
            }
            for block in (of for batch in _record_batches(batches) for of in blocks(batch, wanted)):
                theirs = partition_of(as_codes(block.keys, entry.key), self.partitions)
                if (theirs != partition).any():
                    other = theirs[theirs != partition][0]
                    raise WrongPartition(
                        f"table {entry.name!r}: the task of partition {partition} got a row of partition {other}: rows have to "
                        f"go where partition_of({entry.name!r}, keys) says"
                    )
                tables[entry.name].write(block.keys, block.vectors, block.times)
        return open_snapshot(where)

    def _sorted(self, where: Path, snapshot: Snapshot, table: str, partition: int, memory_bytes: int) -> Receipt:
        """Sort the rows as a load would, on this thread, into `out` with the names that they will have."""
        tables, build = snapshot.manifest.tables, files.make_dir(where / "build")
        plan = plan_load(tables, base="sealed", memory_bytes=memory_bytes, workers=1)
        of = next(one for one in plan.tables if one.table == table)
        files.make_dir(build / RUNS)
        out = files.make_dir(files.make_dir(where / "out") / folder_of(partition))
        attempt = secrets.token_hex(4)
        strings: tuple[OtherFile, ...] | None = None
        with ExitStack() as stack:
            journal = Journal(build / "journal", {})
            stack.callback(journal.close)
            spec = FileSpec(own=Partitions.of(self.partitions, [partition]))
            oldest_s = {one.name: max(0, self.began_s - one.ttl_s) for one in tables if one.ttl_s is not None}
            tasks = LoadTasks(plan, build, journal, spec, oldest_s)
            here = stack.enter_context(Helpers(snapshot, 0, build))
            read = here.run(tasks.reads(of), _unheard)
            runs = [tuple(run) for result in read for run in result.runs]
            runs = [tuple(result.run) for result in here.run(tasks.joins(of, runs), _unheard)] or runs
            merges = tasks.merges(of, runs)
            done = zip(merges, here.run(merges, _unheard), strict=True)
            made = [(task, result) for task, result in done if result.xxh3 is not None]
            if self.string_keys and self._entry(table).key is KeyType.STRING:
                folder, shards = files.make_dir(where / "strings"), len(snapshot.manifest.table(table).shards)
                task = SortStrings(table, 0, list(range(shards)), str(folder), memory_bytes // 3, _ANY_SIZE)
                (found,) = here.run([task], _unheard)
                if found.missing is not None:
                    log.warning(
                        "%s: table %s, partition %d: its string keys are not kept: %s has no room for them",
                        self.out, table, partition, where,
                    )  # fmt: skip
                strings = None if found.missing is not None else _named(folder, found, out, table, attempt)
        built: list[BuiltFile] = []
        for task, result in made:
            number = sum(of.table == task.table for of in built)
            name = f"base-{task.table}-{partition:04}-{number:04}-{attempt}.sealed"
            files.rename(task.out, out / name)
            built.append(built_file(task.table, name, result))
        mine = [result for task, result in made if task.table == table]
        sums = np.sum([shard for result in read for shard in result.sums] or [np.zeros(self._entry(table).dim)], axis=0)
        return Receipt(
            rows=sum(result.rows for result in mine),
            expired=sum(result.expired for result in read),
            sums=tuple(sums.tolist()),
            digest=sum(result.digest for result in mine) % 2**64,
            colliding=tuple((text, code) for result in mine for text, code in result.colliding),
            files=tuple(built),
            strings=strings,
        )

    # --- the commit

    def _receipts(self, target: Target, names: set[str], rows: Mapping[str, int]) -> dict[tuple[int, str], Receipt]:
        """What each partition has, by (partition, table). InvalidInput where one is missing, or rows are."""
        for table in rows:
            self._entry(table)
        receipts: dict[tuple[int, str], Receipt] = {}
        for entry in self._manifest().tables:
            missing = []
            for number in range(self.partitions):
                there = receipt_name(number, entry.name) in names
                found = receipt_of(target, number, entry.name) if there else None
                if found is None:
                    missing.append(number)
                else:
                    receipts[number, entry.name] = found
            mine = [key for key in receipts if key[1] == entry.name]
            if without := [number for number, table in mine if receipts[number, table].strings is None]:
                # a table keeps all of them or none
                if self.string_keys and entry.key is KeyType.STRING:
                    log.warning(
                        "%s: table %s: its string keys are not kept: these partitions came without them: %s",
                        self.out, entry.name, ", ".join(map(str, without[:10])),
                    )  # fmt: skip
                receipts |= {key: receipts[key].model_copy(update={"strings": None}) for key in mine}
            total = sum(of.rows + of.expired for (_, name), of in receipts.items() if name == entry.name)
            shown = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
            absent = f"; no task has written the partitions {shown}" if missing else ""
            if entry.name in rows and rows[entry.name] != total:
                raise InvalidInput(f"table {entry.name!r}: expected {rows[entry.name]} rows, got {total}{absent}")
            if missing and entry.name not in rows:
                raise InvalidInput(
                    f"table {entry.name!r}: no task has written the partitions {shown}: write them, or say in `rows` how many rows "
                    "the table has, if these partitions have none"
                )
        return receipts

    def _committed_manifest(self, receipts: Mapping[tuple[int, str], Receipt]) -> Manifest:
        """The manifest with the rows that have come; where a snapshot has shards are the folders that they came in."""
        document = self._manifest().to_document()
        for entry in document["tables"]:
            mine = {number: of for (number, name), of in receipts.items() if name == entry["name"]}
            shards = [
                {"path": f"{entry['name']}/{folder_of(n)}", "rows": of.rows + of.expired} for n, of in mine.items()
            ]
            entry["shards"] = [shard for shard in shards if shard["rows"]]
            entry["rows"] = sum(of.rows + of.expired for of in mine.values())
        return Manifest.parse(json.dumps(document), file=BUILT_MANIFEST)

    def _finish(
        self,
        root: Path,
        template: Snapshot,
        manifest: Manifest,
        receipts: Mapping[tuple[int, str], Receipt],
        number: int,
    ) -> None:
        """The side files and the `built.json` of a partition."""
        tables: list[BuiltTable] = []
        built: list[BuiltFile] = []
        strings: list[OtherFile] = []
        for entry in manifest.tables:
            every = [receipts[n, entry.name] for n in range(self.partitions) if (n, entry.name) in receipts]
            expired = sum(of.expired for of in every)
            nothing = Receipt.of_nothing(entry.dim)
            sums = np.sum([of.sums for of in every or [nothing]], axis=0)
            mean = (sums / max(1, entry.rows - expired)).astype(np.float32)
            mine = receipts.get((number, entry.name), nothing)
            tables.append(
                BuiltTable(
                    name=entry.name,
                    rows=mine.rows,
                    mean=tuple(mean.tolist()),
                    digest=f"{mine.digest:016x}",
                    colliding=mine.colliding,
                    expired=expired,
                )
            )
            built += mine.files
            strings += mine.strings or ()
        finish_folder(root, template, manifest, tables, built, (number, self.partitions), strings)

    def _target(self) -> Target:
        return target_at(self.out)

    def _manifest(self) -> Manifest:
        return _parsed(self.manifest_json)

    def _entry(self, table: str) -> TableEntry:
        manifest = self._manifest()
        try:
            return manifest.table(table)
        except KeyError:
            names = ", ".join(repr(of.name) for of in manifest.tables) or "none"
            raise InvalidInput(f"expected a table of the template, {names}; got {table!r}") from None


@lru_cache(maxsize=16)
def _parsed(manifest_json: str) -> Manifest:
    """The manifest of a build, parsed once a process: tasks need it for each of their batches."""
    return Manifest.parse(manifest_json)


def begin_build(
    template: str | Path, out: str | Path, *, partitions: int, string_keys: bool = True
) -> PartitionedBuild:
    """Begin a build in `partitions` parts that tasks on any machines make, or go on with the one that was begun there.

    template: a snapshot whose tables have no rows, by path or URL: tables, features, dense part and warm-up keys of the version.
    out: a directory that every task sees, or a URL of object storage; empty, or with a build that was begun with an equal
    template and as many partitions. `string_keys`: whether tasks keep the strings of string keys, for exports of what is
    loaded. Raises InvalidInput, Conflict, SnapshotError and StorageError.
    """
    if not 2 <= partitions <= MAX_PARTITIONS:
        raise InvalidInput(f"partitions: expected 2 to {MAX_PARTITIONS}, got {partitions}")
    snapshot = open_snapshot(template)
    filled = [table for table in snapshot.manifest.tables if table.rows]
    if filled:
        raise InvalidInput(
            f"template: expected tables without rows, which come from tasks; {filled[0].name!r} has {filled[0].rows}"
        )
    target, wanted = target_at(str(out)), _template_digest(snapshot)
    names = target.names()
    if BUILT_MANIFEST in names:
        raise Conflict(f"{out} holds a built version already; give another place")
    if BUILD_RECORD not in names:
        if names:
            raise InvalidInput(f"{out} is not empty, it has {names[0]}: give a place with nothing in it")
        manifest = snapshot.manifest.to_document()
        record = BuildRecord(partitions=partitions, began_s=int(time.time()), template=wanted, manifest=manifest)
        with scratch_directory(None, _SCRATCH) as where:
            files.publish_json(where / BUILD_RECORD, record.model_dump(mode="json"))
            target.move_in(where, last=BUILD_RECORD)
    record = build_record(target, str(out))
    if record.partitions != partitions or record.template != wanted:
        what = f"{record.partitions} partitions" if record.partitions != partitions else "another template"
        raise Conflict(f"{out} has a build that was begun with {what}: go on with the same, or give another place")
    return PartitionedBuild(
        str(out), str(template), partitions, record.began_s, json.dumps(record.manifest), string_keys
    )


def _named(folder: Path, found: SortedStrings, out: Path, table: str, attempt: str) -> tuple[OtherFile, ...]:
    """Move strings of keys to `out`, under the names that they will have."""
    paths = []
    for number, (name, *_) in enumerate(found.files):
        paths.append(out / built_strings(table, f"{number:04}-{attempt}{STRINGS_SUFFIX}"))
        files.make_dir(paths[-1].parent)
        files.rename(folder / name, paths[-1])
    return tuple(other_file(out, path) for path in paths)


def _unheard(rows: int) -> None:
    """Nobody follows how many rows a task has done."""


def _record_batches(batches: Any) -> Iterator[pa.RecordBatch]:
    for batch in batches.to_batches() if isinstance(batches, pa.Table) else batches:
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidInput(f"batches: expected Arrow record batches, got {type(batch).__name__}")
        yield batch


def _template_digest(snapshot: Snapshot) -> str:
    """Equal for templates that are written anew with the same content."""
    document = snapshot.manifest.to_document()
    document.pop("created_at", None)
    of = snapshot.manifest
    # in this order, which builds that are under way have recorded; that of `side_files` is another
    names = [*of.warmup.values(), *chain.from_iterable(of.recorded.values()), *of.graphs.values()]
    parts: list[Any] = [document, [checksum(snapshot.file(name)) for name in names]]
    parts += digest_parts(snapshot.golden_index(), [checksum(path) for _, path in snapshot.golden_paths()])
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
