"""Every file and directory name on disk: in a data directory, in a snapshot, in a directory of deltas.

Pure functions and immutable values; any thread may use them. Nothing here touches the disk except
the `…_on_disk` listings, which read directories and skip names that are not ours.

    <data>/LOCK                                   held by the one process that has the store open
    <data>/format.json                            the format of the directory, read before all else
        (`lifecycle/directory_format.py`)
    <data>/tokens.json                            who may use a service, without the secrets (`access/tokens.py`)
    <data>/audit/audit.jsonl                      who changed what; audit.jsonl.1 and on are older (`access/audit.py`)
    <data>/audit/deltas.jsonl                     who sent which delta, likewise
    <data>/kafka/positions.json                   how far a topic was read, at least
        (`service/sources/kafka_positions.py`)
    <data>/kafka/rows/<topic>/<model>.json        the same of a topic of rows, for each model
    <data>/kafka/parked/<id>.parked               a message that cannot be applied (`kafka/parked.py`)
    <data>/exports/                               exports and backups asked for over HTTP, where no `export_root` is set
    <data>/uploads/<id>/                          a snapshot that a client sends in pieces (`service/spool.py`)
    <data>/kernels/                               compiled kernels, where they can be kept nowhere else (`kernels/`)
    <data>/.tmp-copy-<model>/                     a model that is being copied from a peer; with
        peers a start goes on with it
    <data>/models/<model>/state.json              what is active, and what else the directory means
        (`serving/document.py`)
    <data>/models/<model>/<version>/              one version; a leftover unless version.json is there
    <data>/models/<model>/<version>.<line>/       the same, built again by a rollback to a delta: its line 1 and on
        version.json  db/  dense.onnx  dense-<seq>.onnx  dense-loaded.onnx  warmup/<table>.npy
        warmup/requests/<number>.npz  hot/<table>.npy  hot-device/<table>.npy  build/
        warmup/golden/index.json  warmup/golden/<number>.npz  strings/<table>-<task>-<number>.strings
        of a head: dense.<head>.onnx  dense-<seq>.<head>.onnx  dense-loaded.<head>.onnx  warmup/requests/<head>/
    <data>/models/<model>/log.end                 where the delta log ends
    <data>/models/<model>/log/<seq>-<xxh3>.arrow  one delta: 20 digits, 16 hex digits of its content

A name that begins with `.tmp-` is being written and one that begins with `.trash-` is being deleted;
after a crash both can be removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tierstore.arguments import check_name
from tierstore.types import NAME, Tier

# a data directory
LOCK = "LOCK"
DIRECTORY_FORMAT = "format.json"
TOKENS = "tokens.json"
WATCHED = "watch_snapshots.json"
AUDIT = "audit"
AUDIT_FILE, DELTAS_FILE = "audit.jsonl", "deltas.jsonl"
KAFKA = "kafka"
KAFKA_POSITIONS = "positions.json"
ROWS = "rows"
PARKED = "parked"
EXPORTS = "exports"
UPLOADS = "uploads"
MODELS = "models"
STATE = "state.json"
LOG = "log"
LOG_END = "log.end"
VERSION_RECORD = "version.json"
DB = "db"
WARMUP = "warmup"
REQUESTS = "requests"  # within WARMUP
GOLDEN = "golden"  # within WARMUP, where an earlier release does not look
GOLDEN_INDEX = f"{WARMUP}/{GOLDEN}/index.json"  # of a snapshot, a built version and a version alike
HOT, HOT_ON_DEVICE = "hot", "hot-device"
STRINGS = "strings"
STRINGS_SUFFIX = ".strings"
BUILD = "build"
JOURNAL = "journal"  # within BUILD
KEYS_SUFFIX = ".npy"
REQUEST_SUFFIX = ".npz"

# a snapshot
SNAPSHOT_MANIFEST = "snapshot.json"
BUILT_MANIFEST = "built.json"
HUGECTR_KEYS = "key"
HUGECTR_VECTORS = "emb_vector"

# a delta
DELTA_SUFFIX = ".arrow"
DENSE_TABLE = "__dense__"

TEMPORARY = ".tmp-"
TRASH = ".trash-"

MAX_ORDINAL = (1 << 63) - 1  # of versions and of seqs

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_LINE = re.compile(r"([1-9][0-9]{0,18})(?:\.([1-9][0-9]{0,18}))?")
_LOG_ENTRY = re.compile(r"([0-9]{20})-([0-9a-f]{16})\.arrow")
_DENSE = re.compile(rf"dense(?:-(?P<seq>[0-9]{{1,19}}|loaded))?(?:\.(?P<head>{NAME.pattern}))?\.onnx")
_DELTA_FILE = re.compile(r"([0-9]{1,20})\.(?:arrow|parquet|feather|ipc)")


def is_scratch(name: str) -> bool:
    """Whether `name` belongs to a file or directory that was being written or deleted."""
    return name.startswith((TEMPORARY, TRASH))


def format_version(version: int) -> str:
    """The directory name of a version."""
    if not 1 <= version <= MAX_ORDINAL:
        raise ValueError(f"version {version} is out of range: expected 1 to {MAX_ORDINAL}")
    return str(version)


def parse_version(name: str) -> int | None:
    """The version that a directory is named for, or None: `007` and `0` are no versions."""
    if _DECIMAL.fullmatch(name) is None:
        return None
    version = int(name)
    return version if 1 <= version <= MAX_ORDINAL else None


def format_log_entry(seq: int, digest: str) -> str:
    """The file name of a logged delta; `digest` is 16 lower-case hex digits. Names sort by seq."""
    name = f"{seq:020d}-{digest}{DELTA_SUFFIX}"
    if not 0 <= seq <= MAX_ORDINAL or _LOG_ENTRY.fullmatch(name) is None:
        raise ValueError(f"no log entry may be named for seq {seq} and digest {digest!r}")
    return name


def strings_file(table: str, task: int, number: int) -> str:
    """The name of a file with strings of a table's keys; one of a load's tasks makes several if they are many."""
    return f"{check_name('table', table)}-{task:04d}-{number:04d}{STRINGS_SUFFIX}"


def built_strings(table: str, name: str) -> str:
    """Where a built version has a file with strings of a table's keys."""
    return f"{STRINGS}/{check_name('table', table)}/{name}"


def table_of_strings(name: str) -> str | None:
    """The table whose strings are in a file of a built version, also below a folder; None for another file."""
    folder, _, file = name.rpartition("/")
    folder, _, table = folder.rpartition("/")
    is_of_strings = folder.rpartition("/")[2] == STRINGS and file.endswith(STRINGS_SUFFIX)
    return table if is_of_strings else None


def parse_log_entry(name: str) -> tuple[int, str] | None:
    """(seq, digest) of a log entry's file name, or None if it is not one."""
    match = _LOG_ENTRY.fullmatch(name)
    if match is None or int(match[1]) > MAX_ORDINAL:
        return None
    return int(match[1]), match[2]


def dense_file(head: str, seq: int | str | None = None) -> str:
    """The file name of a head's graph; with `seq` of the one that this delta brought, or `loaded`."""
    return f"dense{'' if seq is None else f'-{seq}'}{f'.{head}' if head else ''}.onnx"


def head_of_file(name: str) -> str | None:
    """The head whose graph that holds has this file name; None for another file."""
    parsed = parse_dense_file(name)
    return None if parsed is None or parsed[1] is not None else parsed[0]


def parse_dense_file(name: str) -> tuple[str, str | None] | None:
    """(head, seq or `loaded` or None) of a graph's file name, or None if it is not one."""
    match = _DENSE.fullmatch(name)
    return None if match is None else (match["head"] or "", match["seq"])


def dense_table(head: str) -> str:
    """The name under which a delta carries the graph of a head."""
    return f"{DENSE_TABLE}.{head}" if head else DENSE_TABLE


def head_of_table(name: str) -> str | None:
    """The head whose graph a delta carries under a table's name; None for a table. InvalidInput for no head's name."""
    table, dot, head = name.partition(".")
    if table != DENSE_TABLE:
        return None
    return check_name("head", head) if dot else ""


def parse_delta_file(name: str) -> int | None:
    """The seq of a file in a watched directory, or None. Leading zeros are allowed: producers pad to sort."""
    match = _DELTA_FILE.fullmatch(name)
    if match is None or int(match[1]) > MAX_ORDINAL:
        return None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class VersionDirectory:
    """Paths within `models/<model>/<version>/`."""

    root: Path

    @property
    def line(self) -> int:
        """Which line of the version it is: 0 as it was loaded."""
        return int(self.root.name.partition(".")[2] or 0)

    @property
    def record(self) -> Path:
        """`version.json`, written last: a directory without it is a leftover of a crash."""
        return self.root / VERSION_RECORD

    @property
    def db(self) -> Path:
        return self.root / DB

    def dense(self, head: str = "") -> Path:
        """The graph of a head; empty where a delta took the head away."""
        return self.root / dense_file(head)

    def dense_loaded(self, head: str = "") -> Path:
        """The graph as it was loaded, once a delta has brought another one."""
        return self.root / dense_file(head, "loaded")

    def dense_to_come(self, seq: int, head: str = "") -> Path:
        """The graph of the delta `seq`; it becomes `dense` once the watermark has reached that seq."""
        return self.root / dense_file(head, seq)

    def denses(self) -> list[str]:
        """The heads that have a `dense`, sorted."""
        return sorted(head for head, seq, _ in self._graphs() if seq is None)

    def denses_to_come(self) -> list[tuple[int, str, Path]]:
        """(seq, head, path) of graphs that have not become `dense` yet."""
        return sorted((int(seq), head, path) for head, seq, path in self._graphs() if seq not in (None, "loaded"))

    def _graphs(self) -> list[tuple[str, str | None, Path]]:
        found = ((parse_dense_file(name), self.root / name) for name in _listing(self.root))
        return [(*parsed, path) for parsed, path in found if parsed is not None]

    @property
    def build(self) -> Path:
        """Scratch of the bulk load."""
        return self.root / BUILD

    @property
    def journal(self) -> Path:
        """What a load has finished. If it exists and `record` does not, the load was broken off and can go on."""
        return self.build / JOURNAL

    def warmup(self, table: str) -> Path:
        """Keys that the snapshot wants in memory before it serves."""
        return self.root / WARMUP / (check_name("table", table) + KEYS_SUFFIX)

    def requests(self, head: str = "") -> Path:
        """Recorded requests that the snapshot wants run before a head serves, `00000.npz` and on."""
        return self.root / WARMUP / REQUESTS / head

    @property
    def strings(self) -> Path:
        """The strings of its keys, as they were loaded (`strings_file`)."""
        return self.root / STRINGS

    @property
    def golden(self) -> Path:
        """Golden examples of the snapshot: `index.json`, and a file for each."""
        return (self.root / GOLDEN_INDEX).parent

    def hot_keys(self, tier: Tier) -> Path:
        return self.root / (HOT_ON_DEVICE if tier is Tier.DEVICE else HOT)

    def hot(self, table: str, tier: Tier = Tier.HOST) -> Path:
        """Keys that the cache of `tier` held when the version was last served."""
        return self.hot_keys(tier) / (check_name("table", table) + KEYS_SUFFIX)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """Paths within `models/<model>/`."""

    root: Path

    @property
    def state(self) -> Path:
        """The model's document."""
        return self.root / STATE

    @property
    def log(self) -> Path:
        return self.root / LOG

    @property
    def log_end(self) -> Path:
        """The seq of the newest acknowledged entry.

        Not in `log`, so that damage to that directory does not affect it.
        """
        return self.root / LOG_END

    def log_entry(self, seq: int, digest: str) -> Path:
        return self.log / format_log_entry(seq, digest)

    def version(self, version: int, line: int = 0) -> VersionDirectory:
        """The directory of a version as it was loaded, or of a later line of it."""
        return VersionDirectory(self.root / (format_version(version) + (f".{line}" if line else "")))

    def versions_on_disk(self) -> list[tuple[int, int]]:
        """(version, line) of each that has a directory, ascending, including leftovers of a crash."""
        found = (
            (parse_version(match[1]), int(match[2] or 0))
            for match in map(_LINE.fullmatch, _directories(self.root))
            if match
        )
        return sorted((version, line) for version, line in found if version is not None and line <= MAX_ORDINAL)

    def log_on_disk(self) -> list[tuple[int, str, Path]]:
        """(seq, digest, path) of every log entry, ascending by seq. No log directory is an empty log."""
        entries = []
        for name in _listing(self.log):
            parsed = parse_log_entry(name)
            if parsed is not None:
                entries.append((*parsed, self.log / name))
        return sorted(entries)


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Paths within a data directory."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / LOCK

    @property
    def format(self) -> Path:
        return self.root / DIRECTORY_FORMAT

    @property
    def exports(self) -> Path:
        """Where a service writes exports and backups that nobody gave another place."""
        return self.root / EXPORTS

    @property
    def uploads(self) -> Path:
        """Snapshots that clients send in pieces."""
        return self.root / UPLOADS

    @property
    def tokens(self) -> Path:
        return self.root / TOKENS

    @property
    def watched(self) -> Path:
        """What was loaded from watched locations."""
        return self.root / WATCHED

    @property
    def models(self) -> Path:
        return self.root / MODELS

    @property
    def kafka_positions(self) -> Path:
        """How far a topic was read, at least: entries of delta logs say the same, and more."""
        return self.root / KAFKA / KAFKA_POSITIONS

    def kafka_rows(self, topic: str, model: str) -> Path:
        """How far a topic of rows was read for a model, likewise."""
        return self.root / KAFKA / ROWS / topic / f"{check_name('model', model)}.json"

    @property
    def parked(self) -> Path:
        return self.root / KAFKA / PARKED

    def model(self, model: str) -> ModelDirectory:
        return ModelDirectory(self.models / check_name("model", model))

    def models_on_disk(self) -> list[str]:
        """Names of models that have a directory, sorted."""
        return sorted(name for name in _directories(self.models) if NAME.fullmatch(name))


def _listing(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _directories(path: Path) -> list[str]:
    return [name for name in _listing(path) if (path / name).is_dir()]
