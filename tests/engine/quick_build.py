"""A bulk load of small snapshots without helper processes, for tests of the engine that load many of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.engine.operations import load as loading
from tierstore.formats import files
from tierstore.formats.row_times import as_rows, times_of
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest import finished_files
from tierstore.ingest.results import BaseBuild, TableBuild
from tierstore.ingest.tasks import Ingest
from tierstore.kernels import codec
from tierstore.kernels.digest import digest_rows
from tierstore.predict import trials
from tierstore.tiers.disk.sealed_file import write_sealed
from tierstore.tiers.disk.sst import times_id, write_sst
from tierstore.types import BaseKind, Progress


class QuickLoad:
    """What `BulkLoad` does but for reading back, with all rows in memory and on the caller's thread."""

    def __init__(
        self, snapshot: Snapshot, out_dir: Path, *, base: BaseKind, keep_times: bool, progress: Any = None, **_: Any
    ) -> None:
        self._out_dir, self._progress = out_dir, progress
        self._build = lambda: build(snapshot, out_dir, base, progress, keep_times=keep_times)

    def __enter__(self) -> QuickLoad:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def build(self) -> BaseBuild:
        return self._build()

    def ingest(self, build: BaseBuild, db: Path, records: Mapping[str, bytes]) -> None:
        self._progress(Progress("ingest"))
        files_ = [(str(file.path), file.xxh3, file.bytes, file.entries) for file in build.files]
        texts = {name: value.decode() for name, value in records.items()}
        finished_files.ingest(Ingest(str(db), build.base, files_, texts, str(self._out_dir / "records.sst")))

    def read_back(self, db: Path) -> None:
        pass


def build(snapshot: Snapshot, out_dir: Path, base: BaseKind, progress: Any, *, keep_times: bool = True) -> BaseBuild:
    files.make_dir(out_dir)
    built: list[Any] = []
    tables = {}
    for number, table in enumerate(snapshot.manifest.tables, 1):
        batches = [batch for shard in range(len(table.shards)) for batch in snapshot.batches(table.name, shard)]
        keys = np.concatenate([np.empty(0, np.int64), *(batch.keys for batch in batches)])
        vectors = np.concatenate([np.empty((0, table.dim), np.float32), *(batch.vectors for batch in batches)])
        live, times = np.ones(len(keys), np.bool_), None
        if table.ttl_s is not None:
            times = np.concatenate([np.empty(0, np.int64), *(batch.times for batch in batches)])
            live = times >= int(time.time()) - table.ttl_s
        order = np.argsort(keys)
        order = order[live[order]]
        keys, rows = keys[order], codec.encode(vectors, table.dtype)[order]
        parts = [(table.name, number, rows)]
        if times is not None and keep_times:
            parts.append((times_of(table.name), times_id(number), as_rows(times[order])))
        for name, table_id, part in parts if len(keys) else []:
            if base == "sealed":
                built.append(write_sealed(out_dir / f"base-{name}", table_id, keys, part))
            else:
                built.append(write_sst(out_dir / f"base-{name}", tables=[(table_id, keys, part, None)], delta=False))
        mean = vectors[live].mean(0, np.float64).astype(np.float32) if len(keys) else np.zeros(table.dim, np.float32)
        tables[table.name] = TableBuild(len(keys), mean, digest_rows(keys, rows), expired=int(np.count_nonzero(~live)))
        progress(Progress("write", number, len(snapshot.manifest.tables)))
    return BaseBuild(built, tables, base)


@contextmanager
def in_process() -> Iterator[None]:
    """Within the block, loads build in this process, and graphs are not tried in one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "BulkLoad", QuickLoad)
        patch.setattr(trials, "try_graph", lambda *_: None)
        yield
