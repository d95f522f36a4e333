"""The tasks of a bulk load's helpers and their results: what travels as JSON between a load and `worker.py`.

    shards --SortShards--> runs --(JoinRuns)--> fewer runs
           --MergeRuns--> base-<table>-<nnnn>.<kind> --Ingest--> disk tier --ReadFile, ReadBack--> digest

           --SortStrings, CopyStrings--> strings/<table>-<nnnn>-<nnnn>.strings, beside the disk tier

A run is a scratch file of rows that fit in memory, sorted (`runs.py`). `sort.py`, `strings.py`, `merge.py` and
`finished_files.py` do the tasks. Immutable values; any thread may use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.ingest.runs import Run
from tierstore.tiers.disk.tier import TableContent
from tierstore.types import BaseKind


@dataclass(frozen=True, slots=True)
class SortShards:
    """Read these shards of a table and leave sorted runs `<prefix>.<n>`, without the rows that were written before `oldest_s`."""

    table: str
    shards: list[int]
    prefix: str
    run_bytes: int
    batch_bytes: int
    partitions: int = 1
    own: str | None = None  # only rows of these partitions; see `Partitions.parse`
    oldest_s: int = 0

    @property
    def key(self) -> str:
        """The task's key in the journal. All tasks that make files have one."""
        return Path(self.prefix).name


@dataclass(frozen=True, slots=True)
class JoinRuns:
    """Make one run `out` of these, which may be removed then."""

    table: str
    runs: list[Run]
    out: str
    step_bytes: int
    partitions: int = 1

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class MergeRuns:
    """Take a partition's keys in [low, high) (None: no limit) out of every run into the file `out`.

    `table` may name the times of a table (`times_of`): then the file has these, and else its rows. `oldest_s` as of the runs.
    """

    table: str
    table_id: int
    runs: str  # a file that lists them, as JSON
    low: int | None
    high: int | None
    out: str
    base: BaseKind
    step_bytes: int
    partition: int = 0
    partitions: int = 1
    hash_partitions: int = 1  # a key that collides gets a code in the same one of so many as its hash
    oldest_s: int = 0

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class CopyFile:
    """Copy a finished file of a built version, by its name there, to `out`, or the rows of some partitions of it; see `Merged`."""

    table: str
    source: str
    out: str
    rows: int
    digest: int
    xxh3: str
    bytes: int
    base: BaseKind = "sealed"
    own: str | None = None  # as in `SortShards`

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class Ingest:
    """Make the disk tier `db` of these finished files (path, xxh3, bytes, entries) and of the store's own records.

    parts: of how many partitions sealed files are, where each has keys of one.
    """

    db: str
    base: BaseKind
    files: list[tuple[str, str, int, int]]
    records: dict[str, str]
    scratch: str  # a directory that is made and removed
    parts: int = 1


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Sum up a sealed file."""

    path: str
    xxh3: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Sum up the keys in [low, high) of a table in the disk tier `db`, all of it in RocksDB; nobody may write it."""

    db: str
    table_id: int
    row_bytes: int
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class SortStrings:
    """Read the keys of these shards of a table with string keys, and leave them in sorted files in a folder.

    number: of the task among those of its table. `most_bytes`: of all files in the folder. `keep_free`: bytes of the file
    system that must stay free. Where that cannot be had it leaves no files. Of several `partitions` each has files of its
    own, in a folder of its own.
    """

    table: str
    number: int
    shards: list[int]
    folder: str
    run_bytes: int
    most_bytes: int
    keep_free: int = 0
    own: str | None = None  # as in `SortShards`
    partitions: int = 1


@dataclass(frozen=True, slots=True)
class CopyStrings:
    """Copy strings of a table's keys from a built version, (name, bytes, xxh3) of each file; else as `SortStrings`."""

    table: str
    number: int
    sources: list[tuple[str, int, str]]
    folder: str
    keep_free: int
    own: str | None = None


@dataclass(frozen=True, slots=True)
class CheckRun:
    """Check a run of a load that was broken off."""

    path: str
    rows: int
    row_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckFile:
    """Check a finished file of a load that was broken off; see `Merged`."""

    path: str
    base: BaseKind
    rows: int
    digest: int
    xxh3: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether the file is as it was when it was finished."""

    whole: bool


@dataclass(frozen=True, slots=True)
class Sorted:
    """What SortShards made. `sums`: the sums of the vectors, one list a shard. `expired` rows are in no run."""

    runs: list[Run]
    sums: list[list[float]]
    digests: list[str]  # of the runs
    expired: int = 0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)


@dataclass(frozen=True, slots=True)
class SortedStrings:
    """What SortStrings or CopyStrings made: (name, xxh3, bytes, strings) of each file; see `StringsFile`.

    The name of a partition's file is that below the folder. `missing`: why there are none, see `MissingStrings`.
    """

    files: list[tuple[str, str, int, int]]
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """What JoinRuns made."""

    run: Run
    digest: str

    @property
    def rows(self) -> int:
        return self.run[1]


@dataclass(frozen=True, slots=True)
class Merged:
    """What MergeRuns made; `xxh3` is None if no key fell into the range and there is no file.

    `colliding`: (string, code) of the keys that are not under their hash.
    """

    rows: int
    digest: int
    xxh3: str | None
    bytes: int
    entries: int
    colliding: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ingested:
    """What Ingest made."""

    files: int


Making = SortShards | JoinRuns | MergeRuns | CopyFile  # tasks whose results another load can use
Task = Making | SortStrings | CopyStrings | CheckRun | CheckFile | Ingest | ReadFile | ReadBack
Result = Sorted | SortedStrings | Joined | Merged | Checked | Ingested | TableContent
TASKS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        SortShards,
        SortStrings,
        CopyStrings,
        JoinRuns,
        MergeRuns,
        CopyFile,
        CheckRun,
        CheckFile,
        Ingest,
        ReadFile,
        ReadBack,
    )
}
RESULTS: dict[str, Any] = {
    "SortShards": Sorted,
    "SortStrings": SortedStrings,
    "CopyStrings": SortedStrings,
    "JoinRuns": Joined,
    "MergeRuns": Merged,
    "CopyFile": Merged,
    "CheckRun": Checked,
    "CheckFile": Checked,
    "Ingest": Ingested,
    "ReadFile": TableContent,
    "ReadBack": TableContent,
}
