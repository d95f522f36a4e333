"""A version: one snapshot on disk and what of it is in memory.

Look-ups come from any thread through a view; `fold`, `attach_host` and `close` come from one thread at a time
(the model sees to that). After a crash the directory is whole if its record (`version.json`, written last) is
there, and a leftover otherwise; RocksDB holds the watermark in the same atomic step as the rows of a delta.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tierstore.config import Settings
from tierstore.engine import rowcount
from tierstore.engine.budget import Holder, deal
from tierstore.engine.dense_files import dense_to_come, digest_of_dense, settle_dense
from tierstore.engine.hot_keys import load_keys, save_keys
from tierstore.engine.overlay import Overlay
from tierstore.engine.rowcount import RowCount
from tierstore.engine.table import LookupCounts, Table
from tierstore.errors import Closed, Corruption
from tierstore.formats import colliding, files
from tierstore.formats.checksum import checksum
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.keys import as_codes
from tierstore.formats.manifest import Manifest
from tierstore.formats.names import VersionDirectory
from tierstore.ingest.bulkload import BaseBuild
from tierstore.predict.session import DenseSession
from tierstore.tiers.background import hand_over, rest
from tierstore.tiers.device_set import DeviceSet
from tierstore.tiers.disk import DiskTier, ReaderPool, Resting, write_sst
from tierstore.tiers.host import HostTable, least_budget
from tierstore.tiers.sealed import BASES
from tierstore.tiers.sst import MAX_TABLE_ID
from tierstore.types import BaseKind, FeatureSpec, Keys, TableSpec

log = logging.getLogger(__name__)

RECORD_FORMATS: dict[int, BaseKind] = {1: "rocksdb", 2: "sealed"}  # an older release must not take one for the other
WATERMARK = "watermark"
MIN_TABLE_BUDGET = 128 << 10
_STEP = 8192  # keys: half a millisecond
_NONE = np.empty(0, np.int64)


def watermark_record(seq: int) -> dict[str, bytes]:
    """The store's own record by which a version knows its watermark."""
    return {WATERMARK: str(seq).encode()}


def first_records(manifest: Manifest, build: BaseBuild) -> dict[str, bytes]:
    """The store's own records of a version as it is loaded."""
    tables = {name: CollidingKeys(table.colliding) for name, table in build.tables.items()}
    return watermark_record(manifest.delta_seq) | colliding.to_record(tables)


def default_vector(spec: TableSpec, mean: np.ndarray) -> np.ndarray:
    """The float32[dim] answered for keys that the table does not hold."""
    if spec.default == "zeros":
        return np.zeros(spec.dim, np.float32)
    return np.asarray(mean if spec.default == "mean" else spec.default, np.float32)


def write_record(where: VersionDirectory, manifest: Manifest, build: BaseBuild) -> None:
    """Publish `version.json`: from here on the directory counts as a version."""
    tables = {
        spec.name: {
            "id": number,
            "rows": build.tables[spec.name].rows,
            "default": default_vector(spec, build.tables[spec.name].mean).tolist(),
            "digest": f"{build.tables[spec.name].digest:016x}",
        }
        for number, spec in enumerate(manifest.table_specs().values(), 1)
    }
    files.publish_record(
        where.record,
        {
            "format": next(form for form, base in RECORD_FORMATS.items() if base == build.base),
            "base": build.base,
            "loaded_at_s": time.time(),
            "dense": checksum(where.dense) if manifest.dense is not None else None,
            "manifest": manifest.to_document(),
            "tables": tables,
        },
    )


def _check_table(table: Mapping[str, Any], spec: TableSpec) -> None:
    """ValueError, TypeError or KeyError where a table's entry is not as `write_record` makes it."""
    if len(table["default"]) != spec.dim or not np.isfinite(np.asarray(table["default"], np.float32)).all():
        raise ValueError(f"table {spec.name!r}: expected a default of {spec.dim} numbers")
    if not 1 <= int(table["id"]) <= MAX_TABLE_ID or int(table["rows"]) < 0:
        raise ValueError(f"table {spec.name!r}: expected an id and a number of rows")
    int(table["digest"], 16)


def _read_asked(path: Path) -> int:
    """The seq in a file, or 0: without it dense parts are checked once more, so a bad file is no reason not to serve."""
    try:
        text = files.read_number(path)
    except Corruption as error:
        log.warning("%s is passed over: %s", path, error)
        return 0
    if text is not None and not text.isdigit():
        log.warning("%s is passed over: expected a seq, came %r", path, text[:40])
    return int(text) if text is not None and text.isdigit() else 0


def _distinct(sources: Sequence[Keys], limit: int) -> Keys:
    """The first `limit` distinct keys of all sources, in their order, found in short steps where requests are served beside."""
    kept = _NONE
    for keys in sources:
        if len(kept) >= limit:
            break
        known = np.sort(kept)
        new = []
        for begin in range(0, len(keys), _STEP):
            part = keys[begin : begin + _STEP]
            if len(known):
                part = part[known[np.minimum(np.searchsorted(known, part), len(known) - 1)] != part]
            new.append(part)
            rest()
        fresh = np.concatenate([_NONE, *new])
        if not np.all(np.diff(np.sort(fresh))):  # a file may name a key twice
            fresh = fresh[np.sort(np.unique(fresh, return_index=True)[1])]
        kept = np.concatenate([kept, fresh])
    return kept[:limit]


class VersionInfo:
    """What is known of a version without opening it."""

    def __init__(self, where: VersionDirectory) -> None:
        record = files.read_json(where.record)
        if record.get("format") not in RECORD_FORMATS:
            raise Corruption(
                f"{where.record}: expected format {' or '.join(map(str, RECORD_FORMATS))}, came {record.get('format')!r}; it was written by another release"
            )
        self.where = where
        self.base = RECORD_FORMATS[record["format"]]
        try:
            document, self.tables = record["manifest"], dict[str, dict[str, Any]](record["tables"])
            self._loaded_dense: str | None = record.get("dense")
            self.manifest = Manifest.parse(json.dumps(document), file=str(where.record))
            for spec in self.manifest.table_specs().values():
                _check_table(self.tables[spec.name], spec)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Corruption(
                f"{where.record} makes no sense ({error!r}); drop the version and load it again"
            ) from error
        self.number = self.manifest.version
        self.specs: dict[str, TableSpec] = self.manifest.table_specs()
        self.features: dict[str, FeatureSpec] = self.manifest.feature_specs()
        self.watermark = self.manifest.delta_seq  # the owner moves it on
        self.colliding: Mapping[str, CollidingKeys] = {}  # as of the watermark; replaced whole
        self.has_dense = where.dense.exists()
        self.dense_digest = self._loaded_dense  # of dense.onnx; None where an earlier release wrote it
        self.problem: str | None = None  # why it could not be opened when that was tried last
        self.passed_over: str | None = None  # the newest dense part that a delta brought and that does not fit
        # dense parts of deltas above the watermark and up to this one were accepted by the version while it served
        self.asked_upto = self._asked_kept = _read_asked(where.asked)
        self._counting = threading.Lock()
        # guarded by _counting; the counts are replaced whole, so that readers need no lock
        self.counts = {name: RowCount(int(table["rows"]), exact=True) for name, table in self.tables.items()}
        self._counts_at = self.watermark

    def learn(self, disk: DiskTier) -> None:
        """Take over what the records in its disk tier say. Corruption if they make no sense."""
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
        with self._counting:
            if watermark != self._counts_at:
                delta_seq = self.manifest.delta_seq
                loaded = {name: RowCount(int(table["rows"]), exact=True) for name, table in self.tables.items()}
                self.counts = rowcount.recorded(disk, watermark, loaded, delta_seq)
                self._counts_at = watermark
        self.passed_over = settle_dense(self.where, disk)
        self.dense_digest = digest_of_dense(disk, self._loaded_dense)
        self.has_dense = self.where.dense.exists()

    def counts_with(self, overlay: Overlay, disk: DiskTier) -> dict[str, RowCount]:
        """The counts that hold once `overlay` is folded into `disk`; for who folds."""
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
        """From now on these hold: a fold has brought the disk tier to `watermark`."""
        with self._counting:
            self.counts, self._counts_at = dict(counts), watermark

    def recounted(self, rows: Mapping[str, int], watermark: int) -> None:
        """All rows were counted, in a disk tier of that watermark; of no use if it has moved on since."""
        with self._counting:
            if self._counts_at == watermark:
                self.counts = {name: RowCount(count, exact=True) for name, count in rows.items()}

    def host_needs(self) -> list[int]:
        """Bytes of the host tier with which every row would be resident, table by table."""
        # 16 bytes of bookkeeping a row at most, and a quarter of slack so that sets seldom overflow
        return [
            max(
                MIN_TABLE_BUDGET,
                least_budget(spec),  # few wide rows are less than a set
                int(self.tables[name]["rows"] * (spec.row_bytes + 16) * 1.25),
            )
            for name, spec in self.specs.items()
        ]

    def keep_asked(self) -> None:
        """Have `asked_upto` be known after a restart, for a version that is to serve no more; mostly nothing to do."""
        if self.asked_upto > max(self.watermark, self._asked_kept):
            files.publish_bytes(self.where.asked, files.checked_number(self.asked_upto))
            self._asked_kept = self.asked_upto


class Version:
    """An open version."""

    def __init__(self, info: VersionInfo, disk: DiskTier, counts: Callable[[str], LookupCounts]) -> None:
        self.info, self.disk = info, disk
        self.number = info.number
        self.specs, self.features = info.specs, info.features
        self.tables = {
            name: Table(
                spec,
                info.tables[name]["id"],
                np.asarray(info.tables[name]["default"], np.float32),
                info.tables[name]["rows"],
                disk,
                counts(name),
            )
            for name, spec in info.specs.items()
        }
        self.padding: dict[str, int] = {
            name: int(as_codes([feature.padding_key], info.specs[feature.table].key)[0])
            for name, feature in info.features.items()
            if feature.padding_key is not None
        }
        info.learn(disk)
        self.watermark = info.watermark
        # what the host tier may have, and by what it is dealt to the tables
        self.host_budget_bytes = 0
        self._host_weights: list[float] = []
        # the dense part as of the watermark, ready to run; `unserved` says why one that is kept is not
        self.predictor: DenseSession | None = None
        self.unserved: str | None = None
        self.devices: DeviceSet | None = None  # set once its device tables are attached

    @classmethod
    def open(
        cls,
        info: VersionInfo,
        settings: Settings,
        readers: ReaderPool,
        counts: Callable[[str], LookupCounts],
        resting: Resting | None,
    ) -> Version:
        """Open the disk tier, or wake what rests of it; host tables come by `attach_host`. `counts` gives the model's counts for a table."""
        cache = settings.block_cache
        if resting is None:
            disk = BASES[info.base].open(info.where.db, block_cache_bytes=cache, reader=readers)
        else:
            disk = resting.wake(block_cache_bytes=cache, reader=readers)
        try:
            return cls(info, disk, counts)
        except BaseException:
            disk.close()
            raise

    @property
    def colliding(self) -> Mapping[str, CollidingKeys]:
        """The keys that collide as of the watermark, by table, where there are some."""
        return self.info.colliding

    # host tier

    @property
    def host_need_bytes(self) -> int:
        """Bytes with which every row of every table would be resident."""
        return sum(self.info.host_needs())

    @property
    def host_reserved_bytes(self) -> int:
        # a table of few, large sets cannot always be made as small as is asked
        used = sum(host.bytes_in_use for table in self.tables.values() if (host := table.host) is not None)
        return max(used, self.host_budget_bytes)

    def weights(self, needs: Sequence[int], like: Version | None) -> list[float]:
        """What a budget is dealt to the tables by: the traffic on the version `like` where there is some, else size."""
        asked = [
            like.tables[name].counts.total * table.spec.row_bytes if like is not None and name in like.tables else 0
            for name, table in self.tables.items()
        ]
        if sum(asked) <= 100_000:
            return [float(need) for need in needs]
        return [max(float(a), need / sum(needs) * sum(asked) * 0.05) for a, need in zip(asked, needs, strict=True)]

    def attach_host(self, budget_bytes: int, limit_bytes: int, like: Holder | None) -> None:
        """Give every table its host tier, dealt by traffic on the version `like` where there is one, else by size.

        Each reserves addresses for what it could use of `limit_bytes`, and may use its part of `budget_bytes`.
        """
        needs = self.info.host_needs()
        self._host_weights = self.weights(needs, like if isinstance(like, Version) else None)
        for table, need, share in zip(self.tables.values(), needs, self._host_shares(budget_bytes), strict=True):
            if share >= MIN_TABLE_BUDGET / 2:
                limit = min(need, limit_bytes)
                host = HostTable(table.spec, limit, default_vector=table.default, fraction=share / limit)
                if host.bytes_in_use > share:  # of sets so large that they cannot be so few
                    host.close()
                    host = HostTable(table.spec, share, default_vector=table.default)
                if not host.capacity_rows:
                    host.close()
                    continue
                host.raise_floor(self.watermark)
                table.host = host
        self.host_budget_bytes = budget_bytes

    def _host_shares(self, budget_bytes: int) -> list[int]:
        return deal(budget_bytes, self.info.host_needs(), self._host_weights)

    def resize_host(self, budget_bytes: int) -> None:
        """Make do with so much, or use it, in place."""
        self.host_budget_bytes = max(self.host_budget_bytes, budget_bytes)
        for table, share in zip(self.tables.values(), self._host_shares(budget_bytes), strict=True):
            if (host := table.host) is not None:  # another thread may be freeing the version
                host.resize(min(1.0, share / host.budget_bytes))
        self.host_budget_bytes = budget_bytes

    def warm(self, like: Version | None, progress: Callable[[int, int], None]) -> None:
        """Fill the caches: with what is hot in `like`, else with the keys saved when last served, then the snapshot's own."""
        plans: list[tuple[Table, Keys]] = []
        for name, table in self.tables.items():
            if not table.caches:
                continue
            sources = []
            if like is not None and name in like.tables and like.specs[name].key == table.spec.key:
                sources.append(like.tables[name].hot_keys(table.capacity_rows))
            sources += self.kept_hot_keys(name)
            if sources:
                plans.append((table, _distinct(sources, table.capacity_rows)))
        total, done = sum(len(keys) for _, keys in plans), 0
        for table, keys in plans:
            table.warm(keys, lambda n, base=done: progress(base + n, total))  # type: ignore[misc]
            done += len(keys)

    def kept_hot_keys(self, table: str) -> list[Keys]:
        """What to warm a table with, best first: the keys that were hot when last served, then the snapshot's own."""
        return [*load_keys(self.info.where.hot(table)), *load_keys(self.info.where.warmup(table))]

    def save_hot_keys(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Remember what is resident, hottest first, for the next start; beside look-ups and folds. StorageError.

        `give_up` is asked again and again; once it is true, Closed.
        """

        def parts(table: Table) -> Iterator[list[Keys]]:
            for part in table.hot_keys_by_part():
                if give_up():
                    raise Closed("hot keys are not saved: the store is being closed")
                yield part

        for name, table in self.tables.items():
            if any(cache.rows_resident for cache in table.caches):
                save_keys(self.info.where.hot(name), parts(table))

    # deltas

    def fold(self, overlay: Overlay) -> None:
        """Move an overlay into the tiers: disk first, in one atomic step with the watermark, then resident rows.

        No request may be at work on a view older than `overlay.hi`. From `raise_floor` on, a row that was read
        before cannot be promoted any more, so nothing that this replaces comes back.
        """
        for name in overlay.tables:
            self.tables[name].raise_floor(overlay.hi)
        if overlay.dense is not None:
            settle_dense(self.info.where, self.disk)  # a fold that failed may have had another name
        counts = self.info.counts_with(overlay, self.disk)
        hand_over()
        records = watermark_record(overlay.hi) | rowcount.record(overlay.hi, counts)
        records |= dense_to_come(self.info.where, overlay)
        now_colliding = {**self.colliding, **overlay.colliding}
        if overlay.colliding:
            records |= colliding.to_record(now_colliding)
        files.make_dir(self.info.where.build)
        parts = sorted((self.tables[name].table_id, name) for name in overlay.tables)
        sst = write_sst(
            self.info.where.build / f"delta-{overlay.hi}.sst",
            records=records,
            tables=[(number, t.keys, t.rows, t.deleted) for number, name in parts for t in (overlay.tables[name],)],
            delta=True,
        )
        hand_over()
        try:
            self.disk.ingest([sst])
        except BaseException:
            sst.path.unlink(missing_ok=True)  # the next try may have another name
            raise
        self.info.colliding = now_colliding
        self.info.set_counts(counts, overlay.hi)
        if overlay.dense is not None:
            files.rename(self.info.where.dense_to_come(overlay.hi), self.info.where.dense)
            self.info.has_dense, self.info.dense_digest = True, xxhash.xxh3_64_hexdigest(overlay.dense)
            self.predictor, self.unserved = overlay.predictor, None
        if overlay.dense is not None or overlay.passed_over is not None:
            self.info.passed_over = overlay.passed_over
        for name, rows in overlay.tables.items():
            hand_over()
            self.tables[name].update_caches(rows.keys, rows.rows, rows.deleted)
        self.watermark = self.info.watermark = overlay.hi

    # the rest

    def drop_caches(self) -> None:
        """Free the host and device tables. No look-up may be running."""
        for table in self.tables.values():
            caches, table.host, table.device, table.offer = table.caches, None, None, None
            for cache in caches:
                cache.close()
        self.host_budget_bytes = 0

    def close(self) -> None:
        """Free all memory and close the files. No look-up may be running."""
        self._drop_memory()
        self.disk.close()

    def rest(self) -> Resting | None:
        """As `close`, but for what rests of the disk tier."""
        self._drop_memory()
        return self.disk.rest()

    def _drop_memory(self) -> None:
        self.predictor = None
        self.drop_caches()

    def status(self, colliding: Mapping[str, CollidingKeys]) -> dict[str, Any]:
        """Per table: rows as of the folded watermark, keys that collide, where keys were answered, bytes a tier holds and may hold."""
        tables = {}
        on_disk = self.disk.bytes_on_disk()
        all_rows = sum(t.rows * t.spec.row_bytes for t in self.tables.values()) or 1
        for name, table in self.tables.items():
            host, device = table.host, table.device
            tables[name] = {
                "key": table.spec.key.value,
                "dim": table.spec.dim,
                "dtype": table.spec.dtype.value,
                "rows": self.info.counts[name].rows,
                "rows_exact": self.info.counts[name].exact,
                "colliding_keys": len(colliding.get(name, ())),
                "lookup_keys": table.counts.as_dict(),
                "tier_bytes": {
                    "device": device.bytes_in_use if device else 0,
                    "host": host.bytes_in_use if host else 0,
                    "disk": int(on_disk * table.rows * table.spec.row_bytes / all_rows),
                },
                "tier_budget_bytes": {
                    "device": device.allowed_bytes if device else 0,
                    "host": host.allowed_bytes if host else 0,
                },
                "host": host.stats() if host else {},
                "device": device.stats() if device else {},
            }
        return tables
