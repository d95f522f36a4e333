"""A bulk load of small snapshots without helper processes, for tests of the engine that load many of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.engine import loading
from tierstore.formats import files
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest import tasks
from tierstore.ingest.bulkload import BaseBuild, TableBuild
from tierstore.kernels import codec
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk import write_sst
from tierstore.tiers.sealed_file import write_sealed
from tierstore.types import BaseKind, Progress


class QuickLoad:
    """What `BulkLoad` does but for reading back, with all rows in memory and on the caller's thread."""

    def __init__(self, snapshot: Snapshot, out_dir: Path, *, base: BaseKind, progress: Any = None, **_: Any) -> None:
        self._out_dir, self._progress = out_dir, progress
        self._build = lambda: build(snapshot, out_dir, base, progress)

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
        tasks.ingest(tasks.Ingest(str(db), build.base, files_, texts, str(self._out_dir / "records.sst")))

    def read_back(self, db: Path) -> None:
        pass


def build(snapshot: Snapshot, out_dir: Path, base: BaseKind, progress: Any) -> BaseBuild:
    files.make_dir(out_dir)
    built: list[Any] = []
    tables = {}
    for number, table in enumerate(snapshot.manifest.tables, 1):
        batches = [batch for shard in range(len(table.shards)) for batch in snapshot.batches(table.name, shard)]
        keys = np.concatenate([batch.keys for batch in batches])
        vectors = np.ascontiguousarray(np.concatenate([batch.vectors for batch in batches]))
        order = np.argsort(keys)
        keys, rows = keys[order], codec.encode(vectors, table.dtype)[order]
        name = out_dir / f"base-{table.name}"
        if base == "sealed":
            built.append(write_sealed(name, number, keys, rows))
        else:
            built.append(write_sst(name, tables=[(number, keys, rows, None)], delta=False))
        tables[table.name] = TableBuild(
            len(keys), vectors.mean(0, np.float64).astype(np.float32), digest_rows(keys, rows)
        )
        progress(Progress("write", number, len(snapshot.manifest.tables)))
    return BaseBuild(built, tables, base)


@contextmanager
def in_process() -> Iterator[None]:
    """Within the block, loads build in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "BulkLoad", QuickLoad)
        yield
