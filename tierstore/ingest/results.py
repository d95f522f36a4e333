"""Results of a bulk load. Immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import StorageError
from tierstore.formats.snapshot.manifest import TableEntry
from tierstore.ingest.tasks import Merged, Sorted
from tierstore.tiers.disk.sealed_file import SealedFile
from tierstore.tiers.disk.sst import SstFile
from tierstore.tiers.disk.strings_file import KeptStrings
from tierstore.types import BaseKind, Partitions

Written = tuple[Any, Merged]  # a MergeRuns or CopyFile, and what it made


@dataclass(frozen=True, slots=True)
class TableBuild:
    """A built table. `mean` float32 [dim] of its vectors (zeros if it is empty); `digest` see `kernels/digest.py`.

    `colliding`: (string, code) of the keys that are not under their hash. `expired` rows of the snapshot are not in it.
    `strings`: what is kept of those of its keys, None where that was not asked for.
    """

    rows: int
    mean: npt.NDArray[np.float32]
    digest: int
    colliding: list[tuple[str, int]] = field(default_factory=list)
    expired: int = 0
    strings: KeptStrings | None = None


@dataclass(frozen=True, slots=True)
class BaseBuild:
    """Files of the kind `base` that share no key, ready to ingest. Table ids count from 1 in the order of the manifest.

    `seconds` by phase and `helper_peak_bytes` (the most memory of one helper) are for benchmarks. `kept_rows` by phase
    were not done again, because an earlier load had done them. `own`: the partitions that the keys are in, None where they are all
    keys and in no partitions. `parts`: of how many partitions the files are, where each has keys of one.
    """

    files: list[SstFile | SealedFile]
    tables: dict[str, TableBuild]
    base: BaseKind
    seconds: dict[str, float] = field(default_factory=dict)
    helper_peak_bytes: int = 0
    kept_rows: dict[str, int] = field(default_factory=dict)
    own: Partitions | None = None
    parts: int = 1


def sum_up(table: TableEntry, read: Sorted, written: Sequence[Written], where: Path) -> TableBuild:
    """A table of its finished files, and of what was read of its shards; `where` they are. StorageError where rows are missing."""
    mine = [merged for task, merged in written if task.table == table.name]
    rows = sum(part.rows for part in mine)
    if rows != read.rows:
        raise StorageError(
            f"table {table.name}: {read.rows} rows were read but {rows} written: the disk under {where} is not to be trusted"
        )
    mean = np.zeros(table.dim, np.float64)
    for shard in read.sums:  # in the order of the manifest, so that a load gives the same mean each time
        mean += np.asarray(shard, np.float64)
    return TableBuild(
        rows,
        (mean / max(1, table.rows - read.expired)).astype(np.float32),
        sum(part.digest for part in mine) % 2**64,
        [(text, code) for part in mine for text, code in part.colliding],
        read.expired,
    )
