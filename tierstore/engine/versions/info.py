"""The record of a version, known without opening it: its `version.json`, and the records in its disk tier.

Folds and opening the version change it, one thread at a time (the model ensures that); any thread may read.

After a crash the directory is whole if its record (`version.json`, written last) is there, and a leftover otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import xxhash

from tierstore.engine.data import row_count as rowcount
from tierstore.engine.data.dense_head import GONE, passed_over_after
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.data.row_count import RowCount
from tierstore.engine.versions import left_out
from tierstore.engine.versions.dense_files import finish_dense, heads_there, passed_over
from tierstore.engine.versions.identity import CONTENT, check_identity, content_digest, identity_record
from tierstore.errors import Corruption
from tierstore.formats import colliding, files
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.names import VersionDirectory
from tierstore.formats.release import of_another_release
from tierstore.formats.snapshot.checksum import checksum
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.times import format_time
from tierstore.ingest.results import BaseBuild
from tierstore.tiers.base import Records, RowStore
from tierstore.tiers.disk.sst import MAX_TABLE_ID, strings_id, times_id
from tierstore.tiers.disk.strings_file import KeptStrings
from tierstore.tiers.disk.tier import WATERMARK
from tierstore.tiers.host.table_layout import ALL_ROWS, least_budget
from tierstore.types import BaseKind, FeatureSpec, Partitions, TableSpec

log = logging.getLogger(__name__)

RECORD_FORMATS: dict[int, BaseKind | Literal["remote"]] = {
    1: "rocksdb",
    2: "sealed",
    3: "remote",
}  # an older release must not take one for the other
_IN_PARTITIONS = 4  # for either base; without its record `partitions`, absent keys would look like other nodes'
MIN_TABLE_BUDGET = 128 << 10
GOLDEN = "golden"  # the field of `version.json`
EXPIRED = "expired"  # the record of how many rows have expired since the load, by table
# the record of the time, by table, before which a row must have been written for a check to find it expired, with a
# clock that was taken to be right
EXPIRED_BEFORE = "expired_before"


def watermark_record(seq: int) -> dict[str, bytes]:
    """The store's record of a version's watermark."""
    return {WATERMARK: str(seq).encode()}


def first_records(where: VersionDirectory, manifest: Manifest, build: BaseBuild) -> dict[str, bytes]:
    """The store's records of a version as it is loaded."""
    tables = {name: CollidingKeys(table.colliding) for name, table in build.tables.items()}
    identity = identity_record(where, manifest, content_digest(manifest, build), build.own)
    return watermark_record(manifest.delta_seq) | colliding.to_record(tables) | identity


def default_vector(spec: TableSpec, mean: np.ndarray) -> np.ndarray:
    """The float32[dim] answered for keys that the table does not hold."""
    if spec.default == "zeros":
        return np.zeros(spec.dim, np.float32)
    return np.asarray(mean if spec.default == "mean" else spec.default, np.float32)


def make_record(
    where: VersionDirectory, manifest: Manifest, build: BaseBuild, tags: Sequence[bytes] | None = None
) -> dict[str, Any]:
    """The content of `version.json`. `tags`: the hash tags of a version whose rows are in a cluster."""
    base = build.base if tags is None else "remote"
    tables = {
        spec.name: {
            "id": number,
            "rows": build.tables[spec.name].rows,
            "default": default_vector(spec, build.tables[spec.name].mean).tolist(),
            "digest": f"{build.tables[spec.name].digest:016x}",
            "colliding": build.tables[spec.name].colliding,
            **_strings_document(build.tables[spec.name].strings if tags is None else None),
            **({} if spec.ttl_s is None else {"expired": build.tables[spec.name].expired, "times": tags is None}),
        }
        for number, spec in enumerate(manifest.table_specs().values(), 1)
    }
    own = build.own if tags is None else None
    record = {
        "format": next(form for form, other in RECORD_FORMATS.items() if other == base)
        if own is None
        else _IN_PARTITIONS,
        "base": base,
        "loaded_at_s": time.time(),
        **digests_record({head: checksum(where.dense(head)) for head in manifest.graphs}),
        "manifest": manifest.to_document(),
        CONTENT: content_digest(manifest, build),
        "tables": tables,
    }
    if own is not None:
        record["partitions"] = own.document()
    return record if tags is None else record | {"tags": [tag.decode() for tag in tags]}


def _strings_document(kept: KeptStrings | None) -> dict[str, Any]:
    return {} if kept is None else {"strings": kept.document()}


def digests_record(digests: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `version.json` for the loaded graphs; `_loaded_digests` reads them."""
    named = {head: digest for head, digest in digests.items() if head}
    return {"dense": digests.get("")} | ({"heads": named} if named else {})


def _loaded_digests(record: Mapping[str, Any]) -> dict[str, str]:
    digests = {"": record.get("dense"), **record.get("heads", {})}
    return {head: str(digest) for head, digest in digests.items() if digest is not None}


def _local_base(name: object) -> BaseKind:
    if name == "sealed" or name == "rocksdb":
        return name
    raise ValueError(f"base: expected sealed or rocksdb, got {name!r}")


def _check_table(table: Mapping[str, Any], spec: TableSpec) -> None:
    """ValueError, TypeError or KeyError if a table's entry is not as `write_record` makes it."""
    if len(table["default"]) != spec.dim or not np.isfinite(np.asarray(table["default"], np.float32)).all():
        raise ValueError(f"table {spec.name!r}: expected a default of {spec.dim} numbers")
    if not 1 <= int(table["id"]) <= MAX_TABLE_ID or int(table["rows"]) < 0:
        raise ValueError(f"table {spec.name!r}: expected an id and a number of rows")
    int(table["digest"], 16)
    CollidingKeys((str(text), int(code)) for text, code in table.get("colliding", ()))
    if "strings" in table:
        KeptStrings.parse(table["strings"])


def _numbers_by_table(disk: Records, record: str) -> dict[str, int]:
    """The numbers in `EXPIRED` or `EXPIRED_BEFORE`, by table.

    No row depends on them, so a bad record is no reason not to serve.
    """
    try:
        return {str(name): int(number) for name, number in json.loads(disk.record(record) or b"{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


class VersionInfo:
    """One version on disk.

    `number`, `specs` and `features` are constant; the watermark and what depends on it change.
    """

    def __init__(
        self, where: VersionDirectory, dense_accepted_upto: int = 0, record: dict[str, Any] | None = None
    ) -> None:
        """`record`: the content of `version.json` where that is not published yet."""
        record = files.read_json(where.record) if record is None else record
        formats = *RECORD_FORMATS, _IN_PARTITIONS
        if (form := record.get("format")) not in formats:
            raise of_another_release(where.record, form, " or ".join(map(str, formats)), record)
        self.where = where
        self.loaded_at_s: float = record.get("loaded_at_s", 0.0)  # distinguishes two loads of one number
        self.partitions: Partitions | None = None  # of its keys; None: it has all keys, without partitions
        try:
            if form == _IN_PARTITIONS:
                self.partitions = Partitions.of_document(record["partitions"])
            self.base = RECORD_FORMATS[form] if self.partitions is None else _local_base(record["base"])
            document, self.tables = record["manifest"], dict[str, dict[str, Any]](record["tables"])
            self.loaded_digests = _loaded_digests(record)  # of graphs, by head
            self.golden: dict[str, Any] | None = record.get(GOLDEN)  # what became of its golden examples at the load
            self.content: str | None = record.get(CONTENT)  # None if an earlier release has loaded it
            self.tags = [
                str(tag).encode() for tag in record.get("tags", ())
            ]  # of a version whose rows are in a cluster
            self.manifest = Manifest.parse(json.dumps(document), file=str(where.record))
            for spec in self.manifest.table_specs().values():
                _check_table(self.tables[spec.name], spec)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Corruption(f"{where.record} is invalid ({error!r}); drop the version and load it again") from error
        # tables whose rows have times here
        self.times_ids = {name: times_id(int(of["id"])) for name, of in self.tables.items() if of.get("times")}
        # what it keeps of the strings of keys, by table; of none that an earlier release has loaded
        self.strings = {name: KeptStrings.parse(of["strings"]) for name, of in self.tables.items() if "strings" in of}
        # tables whose deltas' strings are kept in the disk tier
        self.strings_ids = {
            name: strings_id(int(self.tables[name]["id"])) for name, kept in self.strings.items() if not kept.missing
        }
        self.expired: dict[str, int] = {}  # rows by table, since the load; replaced as a whole
        self.expired_before: dict[str, int] = {}  # in seconds since 1970, by table; replaced as a whole
        self.expiry_checked_s: float | None = None  # the last check since it was opened
        self.number = self.manifest.version
        self.specs: dict[str, TableSpec] = self.manifest.table_specs()
        self.features: dict[str, FeatureSpec] = self.manifest.feature_specs()
        self.watermark = self.manifest.delta_seq  # the owner changes it
        self.colliding: Mapping[str, CollidingKeys] = {}  # as of the watermark; replaced as a whole
        # the heads in its files, with their digests, None if an earlier release wrote them; replaced as a whole
        self.heads = heads_there(where, None, self.manifest.graphs, self.loaded_digests)
        self.left_out: bytes | None = None  # the record of undone deltas, as it was opened
        self.problem: str | None = None  # why it could not be opened when that was tried last
        self.passed_over: dict[str, str] = {}  # by head the newest that a delta brought and that does not fit
        # dense parts of deltas above the watermark and up to this one were accepted by the version while it served
        self.dense_accepted_upto = dense_accepted_upto
        self._counting = threading.Lock()
        # guarded by _counting; the counts are replaced as a whole, so that readers need no lock
        self.counts = {name: RowCount(int(table["rows"]), exact=True) for name, table in self.tables.items()}
        self._counts_at = self.watermark
        # by table, since the load or the start: memory is divided by it, and should not follow rows that come and go
        self.most_rows = {name: count.rows for name, count in self.counts.items()}

    def loaded_records(self) -> dict[str, bytes] | None:
        """`first_records` again, without the identity, for a version that deltas have changed since; None if an
        earlier release did not keep them.
        """
        if self.colliding and any("colliding" not in table for table in self.tables.values()):
            return None
        tables = {name: CollidingKeys(map(tuple, table.get("colliding", ()))) for name, table in self.tables.items()}
        return watermark_record(self.manifest.delta_seq) | colliding.to_record(tables)

    def identity_record(self, where: VersionDirectory) -> dict[str, bytes]:
        """The identity record for RocksDB in the directory `where`, of this version or of a line of it."""
        return identity_record(where, self.manifest, self.content, self.partitions)

    def check_identity(self, disk: Records) -> None:
        """Corruption if a RocksDB has another identity than this directory."""
        check_identity(self.where, self.identity_record(self.where), disk)

    @property
    def own(self) -> Partitions | None:
        """The partitions that it has, if not all."""
        return None if self.partitions is None or self.partitions.are_all else self.partitions

    def learn(self, disk: Records) -> None:
        """Take over the records in its disk tier. Corruption if they make no sense, or are of another version."""
        self.check_identity(disk)
        watermark = disk.watermark()
        if watermark is None:
            raise Corruption(
                f"version {self.number}: {self.where.db} has no watermark; drop the version and load its snapshot again"
            )
        try:
            self.colliding = colliding.from_record(disk.record(colliding.RECORD))
        except ValueError as error:
            raise Corruption(
                f"version {self.number}: {self.where.db}: {error}; drop the version and load its snapshot again"
            ) from error
        self.watermark = watermark
        self.left_out = disk.record(left_out.RECORD)
        before, self.expired = self.expired, _numbers_by_table(disk, EXPIRED)
        for name, oldest_s in _numbers_by_table(disk, EXPIRED_BEFORE).items():
            self.note_expired_before(name, oldest_s)
        with self._counting:
            if watermark != self._counts_at or self.expired != before:
                delta_seq = self.manifest.delta_seq
                loaded = {name: RowCount(int(table["rows"]), exact=True) for name, table in self.tables.items()}
                self._count(rowcount.recorded(disk, watermark, loaded, delta_seq), watermark)
        finish_dense(self.where, disk)
        self.passed_over = passed_over(disk)
        self.heads = heads_there(self.where, disk, self.manifest.graphs, self.loaded_digests)

    def note_expired_before(self, table: str, oldest_s: int) -> None:
        """Note that a check has found the rows of a table expired that were written before `oldest_s`."""
        self.expired_before = {**self.expired_before, table: max(oldest_s, self.expired_before.get(table, 0))}

    def expired_before_record(self) -> dict[str, bytes]:
        """The record of `expired_before`, also for a line that is built again: it has such rows once more."""
        return {EXPIRED_BEFORE: json.dumps(self.expired_before).encode()} if self.expired_before else {}

    def fold_heads(self, overlay: Overlay) -> None:
        """Note that the graphs of an overlay are valid now, or passed over; the owner has moved the files."""
        graphs = {name: head.graph for name, head in overlay.heads.items() if head.graph is not None}
        brought = {name: xxhash.xxh3_64_hexdigest(graph) for name, graph in graphs.items() if graph != GONE}
        self.heads = {**{name: digest for name, digest in self.heads.items() if name not in graphs}, **brought}
        self.passed_over = passed_over_after(self.passed_over, overlay.heads, overlay.passed_over)

    def ttl_status(self, table: TableSpec) -> dict[str, Any] | None:
        """The status of a table with a ttl: rows that have expired, at the load and since, and the time of the last
        check; else None.
        """
        checked_s = self.expiry_checked_s
        if table.ttl_s is None:
            return None
        return {
            "ttl_s": table.ttl_s,
            "expired_at_load": int(self.tables[table.name].get("expired", 0)),
            "expired_since": self.expired.get(table.name, 0),
            "checked_at": None if checked_s is None else format_time(datetime.fromtimestamp(int(checked_s), UTC)),
        }

    def counts_with(self, overlay: Overlay, disk: RowStore) -> dict[str, RowCount]:
        """The counts after `overlay` is folded into `disk`; for the thread that folds."""
        with self._counting:
            if self._counts_at >= overlay.hi:  # a fold that failed later
                return self.counts
        changes = {
            name: rowcount.change(disk, self.tables[name]["id"], table, overlay.hi)
            for name, table in overlay.tables.items()
        }
        with self._counting:
            counts = self.counts
        return {name: count.plus(changes[name]) if name in changes else count for name, count in counts.items()}

    def set_counts(self, counts: Mapping[str, RowCount], watermark: int) -> None:
        """Use these counts from now on: a fold has brought the disk tier to `watermark`."""
        with self._counting:
            self._count(counts, watermark)

    def _count(self, counts: Mapping[str, RowCount], watermark: int) -> None:
        self.counts, self._counts_at = dict(counts), watermark
        self.most_rows = {name: max(rows, counts[name].rows) for name, rows in self.most_rows.items()}

    def recounted(self, rows: Mapping[str, int], watermark: int) -> None:
        """Use counts of all rows in a disk tier of that watermark, unless it has changed since."""
        with self._counting:
            if self._counts_at == watermark:
                self.counts = {name: RowCount(count, exact=True) for name, count in rows.items()}

    def host_needs(self) -> list[int]:
        """Bytes of the host tier with which every row would be resident, by table."""
        rows = self.most_rows
        # 16 bytes of bookkeeping a row at most
        return [
            max(
                MIN_TABLE_BUDGET,
                least_budget(spec),  # few wide rows are less than a set
                int(rows[name] * (spec.row_bytes + 16) * ALL_ROWS),
            )
            for name, spec in self.specs.items()
        ]
