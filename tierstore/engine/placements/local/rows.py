"""The rows of a version on this machine: its disk tier, and the fold that changes it in one atomic step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore.engine.data import row_count as rowcount
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.versions import left_out
from tierstore.engine.versions.dense_files import finish_dense, show_staged, stage_dense
from tierstore.engine.versions.info import EXPIRED, VersionInfo, watermark_record
from tierstore.engine.versions.rows import Beneath, Place
from tierstore.errors import TierstoreError
from tierstore.formats import colliding, files
from tierstore.formats.row_times import TIME_BYTES, as_rows, from_rows
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.base import Peek
from tierstore.tiers.disk.tier import WATERMARK, DiskTier
from tierstore.types import Keys, Rows, States

_COUNTED = (
    WATERMARK,
    rowcount.RECORD,
    EXPIRED,
)  # records that every change writes, of this release and of earlier ones


class LocalRows:
    """A version's `VersionRows` over its disk tier. Any thread reads, one at a time folds."""

    def __init__(self, disk: DiskTier) -> None:
        self.disk = disk
        self.read_by, self.record, self.watermark = disk.read_by, disk.record, disk.watermark
        self.in_order, self.records = disk.in_order, disk.records
        self.bytes_on_disk, self.stats, self.close = disk.bytes_on_disk, disk.stats, disk.close

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        self.disk.get(table_id, keys, rows, state)

    def get_at(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        """`get`, for any view: folds wait for the views that are read."""
        self.disk.get(table_id, keys, rows, state)

    def raise_floor(self, table_id: int, seq: int) -> None:
        """Nothing: no rows of other machines are kept."""

    def forget(self, table_id: int, keys: Keys) -> None:
        """Nothing: no rows of other machines are kept."""

    def may_fold(self, seq: int) -> bool:
        return True

    def fold(self, info: VersionInfo, overlay: Overlay) -> None:
        """One atomic step of the disk tier: rows, strings of their keys, watermark, and which dense part is valid."""
        disk, where, ids = self.disk, info.where, {name: int(table["id"]) for name, table in info.tables.items()}
        if overlay.heads:
            finish_dense(where, disk)  # a failed fold may have had another name
        counts = info.counts_with(overlay, disk)
        yield_to_requests()
        records = watermark_record(overlay.hi) | rowcount.record(overlay.hi, counts)
        records |= stage_dense(where, overlay, disk) | left_out.record(overlay, info.watermark)
        if info.times_ids:  # by it a change of an earlier release is noticed, which removed expired rows
            records[EXPIRED] = json.dumps(info.expired).encode()
        now_colliding = {**info.colliding, **overlay.colliding}
        if overlay.colliding:
            records |= colliding.to_record(now_colliding)
        files.make_dir(where.build)
        rows = [(ids[name], t.keys, t.rows, t.deleted) for name, t in overlay.tables.items()]
        times = [
            (info.times_ids[name], t.keys, as_rows(t.times), t.deleted)
            for name, t in overlay.tables.items()
            if t.times is not None and name in info.times_ids
        ]
        strings = [
            (info.strings_ids[name], t.keys, t.strings.cast(pa.large_binary()), t.deleted)
            for name, t in overlay.tables.items()
            if t.strings is not None and name in info.strings_ids
        ]
        changed = sorted([*rows, *times], key=itemgetter(0))
        disk.change(where.build / f"delta-{overlay.hi}.sst", records, changed, strings)
        info.colliding = now_colliding
        info.set_counts(counts, overlay.hi)
        show_staged(where, overlay)

    def compaction_due(self) -> bool:
        return self.disk.compaction_due

    def compaction_urgent(self) -> bool:
        return self.disk.compaction_urgent

    def compact(self, info: VersionInfo, give_up: Callable[[], bool]) -> bool:
        records = {name: value for name in _COUNTED if (value := self.disk.record(name)) is not None}
        row_bytes = {int(of["id"]): info.specs[name].row_bytes for name, of in info.tables.items()}
        row_bytes |= dict.fromkeys(info.times_ids.values(), TIME_BYTES)
        return self.disk.compact(files.make_dir(info.where.build) / "patches.sst", records, row_bytes, give_up)

    def places(self, table: str, codes: Keys, seq: int) -> Sequence[Place | None]:
        return [None] * len(codes)

    def beneath(self, info: VersionInfo, table: str, code: int, place: Place | None) -> Beneath:
        """The row that look-ups read from disk, and when it was written."""
        seen, times = Beneath(), info.times_ids.get(table)
        try:
            parts = self.disk.peek(info.tables[table]["id"], info.specs[table].row_bytes, code)
            if times is not None:
                kept = self.disk.peek(times, TIME_BYTES, code)
                row = next((peek.row for peek in kept.values() if peek.row is not None), None)
                seen.time_s = None if row is None else int(from_rows(np.frombuffer(row, np.uint8).reshape(1, -1))[0])
        except TierstoreError as error:
            seen.errors["disk"] = str(error)
            return seen
        seen.tiers = [(name, peek, dict(peek.heat)) for name, peek in parts.items()]
        read = (peek for peek in parts.values() if not peek.heat.get("filtered"))
        seen.answer = next((peek for peek in read if peek.holds != "nothing"), Peek(absent=True))
        return seen

    def tier_bytes(self, table_id: int, table_bytes: int, of_all: int) -> dict[str, int]:
        """A table's part of the shared files, by its size."""
        return {"disk": int(self.disk.bytes_on_disk() * table_bytes / of_all)}

    def cache_stats(self, table_id: int) -> dict[str, Any]:
        return {}
