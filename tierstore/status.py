"""The types of the status document, as `Store.status()` returns it and `GET /admin/models` carries it.

Types, which at run time are plain dicts, and what reads a document. Sizes are in bytes, ages and times in seconds,
shares between 0 and 1, and moments are ISO 8601 in UTC. A key that says `NotRequired` is there only where its comment
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict


class Used(TypedDict):
    """A budget: how much of it is used."""

    used: int
    total: int


class WarmUpProgress(TypedDict):
    """How far a warm-up is, in keys."""

    done: int
    total: int


class ThrottleStatus(TypedDict):
    """How fast background work (loads, verification, warm-up) may go while look-ups are served."""

    share: float  # of the time
    work: list[str]  # what is at work now
    p99_s: float | None  # of look-ups; None where too few were asked
    quiet_p99_s: float | None
    p99_ratio: float  # of the two, the most that is allowed; 0: no bound


class DiskStatus(TypedDict):
    """The file system of the data directory."""

    free: int | None
    reserve: int
    problem: str | None


class AuditStatus(TypedDict):
    problem: str | None


class ProblemStatus(TypedDict):
    """Something that is wrong, and what to do."""

    model: str
    kind: str  # as in the metric tierstore_problem
    text: str


class LogStatus(TypedDict):
    """A model's log of deltas, by their seqs."""

    start: int | None
    last: int | None
    entries: int


class PartitionsStatus(TypedDict):
    """Which partitions of the keys a version has, and of how many there are."""

    count: int
    own: list[list[int]]  # the first and the last of each range


class HostBytes(TypedDict):
    """What a version's caches in CPU memory may use, and would need to hold every row."""

    budget: int
    need: int


class GoldenStatus(TypedDict):
    """The golden examples of a version: how many there were at its load, and what became of them."""

    examples: int
    held: int
    left_out: int
    not_run: int
    largest_difference: float
    why: str | None


class VersionStatus(TypedDict):
    """A version of a model.

    While it loads it has only its number, `state`, `watermark`, `phase`, `done` and `total`.
    """

    version: int
    state: Literal["active", "canary", "kept", "stale", "outdated", "loading"]
    watermark: int | None  # the newest delta that it has
    share: NotRequired[float | None]  # of the requests that name no version; None: it is not served
    labels: NotRequired[list[str]]
    left: NotRequired[str | None]  # why it was left when it served last; None: it never served, or serves
    delta_seq: NotRequired[int]  # the newest delta that its snapshot had
    partitions: NotRequired[PartitionsStatus | None]
    created_at: NotRequired[str | None]
    golden: NotRequired[GoldenStatus | None]
    hashes_only: NotRequired[dict[str, str]]  # why it does not keep the strings of string keys, by table
    mixes_rows: NotRequired[list[str]]  # heads whose requests are not joined, as rows of a batch change each other
    misapplied_transforms: NotRequired[list[str]]  # heads with a post-transform that ONNX Runtime applies otherwise
    unused_features: NotRequired[list[str]]  # that no input of its dense parts takes; empty where it serves none
    dense: NotRequired[str | None]  # what becomes of its dense part without a name; None: it has none
    heads: NotRequired[dict[str, str]]  # the same of those with names
    dense_passed_over: NotRequired[str | None]
    problem: NotRequired[str | None]
    warming: NotRequired[WarmUpProgress | None]
    host_bytes: NotRequired[HostBytes | None]
    phase: NotRequired[str]
    done: NotRequired[int]
    total: NotRequired[int]


class HashStatus(TypedDict):
    """How keys of requests become row numbers."""

    mod: int
    seed: int | None
    key: str


class FeatureStatus(TypedDict):
    table: str
    combiner: str | None
    hash: NotRequired[HashStatus]


class TtlStatus(TypedDict):
    """Rows of a table that have expired."""

    ttl_s: int
    expired_at_load: int
    expired_since: int
    checked_at: str | None


class LookupKeys(TypedDict):
    """Keys that were looked up, by where they were answered; `absent` ones had no row."""

    device: int
    host: int
    disk: int
    remote: int
    overlay: int
    absent: int


class CurvePoint(TypedDict):
    """What the cache would do if it were `scale` times as large."""

    scale: float
    rows: int
    hit_rate: float | None  # of the look-ups that reach it; None while that is not known yet


class CacheStatus(TypedDict):
    """A table's cache in CPU memory, as far as it was measured."""

    rows: int  # that it holds at most
    hit_rate: float | None  # of late; None where nothing was looked up
    curve: list[CurvePoint]
    bytes: int  # that knowing it takes


class TableStatus(TypedDict):
    """A table of the active version."""

    key: Literal["int64", "uint64", "string"]
    dim: int
    dtype: str
    rows: int  # as of the folded watermark
    rows_exact: bool
    colliding_keys: int
    ttl: TtlStatus | None
    lookup_keys: LookupKeys
    tier_bytes: dict[str, int]
    tier_budget_bytes: dict[str, int]
    host: dict[str, Any]  # counters of that tier; empty: the table has none
    cache: CacheStatus
    device: dict[str, Any]
    ssd_cache: dict[str, Any]


class CanaryTable(TypedDict):
    rows: int
    rows_exact: bool
    colliding_keys: int
    tier_bytes: dict[str, int]
    tier_budget_bytes: dict[str, int]


class CanaryStatus(TypedDict):
    """The version that gets a share of the requests."""

    version: int
    share: float
    watermark: int
    folded_watermark: int
    overlays: int
    overlay_bytes: int
    tables: dict[str, CanaryTable]


class UnfinishedLoad(TypedDict):
    """Leftovers of an unfinished load, from which another load of the version continues."""

    bytes: int
    age_s: int


class DenseStatus(TypedDict):
    runs: int
    failed: int
    seconds: float
    buffer_bytes: int


class ModelStatus(TypedDict):
    """A model. If no version serves, everything from `folded_watermark` on is left out."""

    model: str
    active_version: int | None
    watermark: int | None  # the newest delta that look-ups see
    canary: CanaryStatus | None
    labels: dict[str, int]
    partitions: PartitionsStatus | None
    problem: str | None
    problems: dict[str, str]
    log: LogStatus
    undone: list[list[int]]  # ranges of seqs, from and to
    versions: list[VersionStatus]
    rollback_to: int | None  # the version that a rollback goes to; None: there is none
    to_drop: list[int]  # once a newer version serves
    damaged: dict[str, str]
    unfinished: dict[str, UnfinishedLoad]
    tables: dict[str, TableStatus]
    folded_watermark: NotRequired[int]
    last_event_time: NotRequired[str | None]
    last_received_time: NotRequired[str | None]
    last_received_from: NotRequired[str | None]  # None: unknown, as it came before this start
    delta_age_s: NotRequired[float | None]
    freshness_max_s: NotRequired[float]
    fresh: NotRequired[bool | None]  # None: there is no limit
    overlays: NotRequired[int]
    overlay_bytes: NotRequired[int]
    features: NotRequired[dict[str, FeatureStatus]]
    dense: NotRequired[DenseStatus]
    heads: NotRequired[dict[str, DenseStatus]]  # of dense parts with names
    disk: NotRequired[dict[str, Any]]
    remote: NotRequired[dict[str, Any]]  # of a node whose rows are in a cluster
    upstream: NotRequired[dict[str, Any]]  # of a front


def dense_notes(version: Mapping[str, Any]) -> list[str]:
    """What a user may not expect of a version's dense parts, for a person: those that are not served first."""
    parts = {"": version.get("dense") or "", **version.get("heads", {})}
    notes = [f"{_part(head)} is {state}" for head, state in parts.items() if "not served" in state]
    notes += [
        f"{_part(head)} has a post_transform that ONNX Runtime applies otherwise than ONNX specifies, so it may answer "
        "margins for probabilities: write it as nodes behind the trees (Sigmoid, Softmax)"
        for head in version.get("misapplied_transforms") or ()
    ]
    notes += [f"{_part(head)} mixes rows, so its requests are not joined" for head in version.get("mixes_rows") or ()]
    if unused := version.get("unused_features"):
        notes.append(f"no input of the dense part takes the features {', '.join(unused)}")
    return notes


def _part(head: str) -> str:
    return f"the dense part {head!r}" if head else "the dense part"


def golden_text(report: Mapping[str, Any]) -> str:
    """A `GoldenStatus` for a person: `64 held, largest difference 3e-07`."""
    parts = [f"{report['held'] or 'none'} held"]
    parts += [f"{report[name]} {name.replace('_', ' ')}" for name in ("left_out", "not_run") if report[name]]
    if report["held"]:
        parts.append(f"largest difference {report['largest_difference']:.2g}")
    return ", ".join(parts) + (f" ({report['why']})" if report["why"] else "")


class StoreStatus(TypedDict):
    """What `Store.status()` returns."""

    models: dict[str, ModelStatus]
    problems: list[ProblemStatus]
    warming: WarmUpProgress | None  # of the warm-up after the start; None where it is over
    throttle: ThrottleStatus
    host_budget: Used
    overlay_budget: Used
    device_budget: Used
    device: dict[str, Any]
    audit: AuditStatus
    disk: DiskStatus
    remote: NotRequired[dict[str, Any]]  # of a node whose rows are in a cluster
    upstream: NotRequired[dict[str, Any]]  # of a front
    ssd_cache: NotRequired[dict[str, Any] | None]  # of both


class ServiceStatus(StoreStatus):
    """What `Client.status()` returns: the store's document, with the limits and figures of the service."""

    service: dict[str, Any]
