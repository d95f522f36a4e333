"""Settings of the data directory, memory, threads, loads, versions and deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, model_validator
from pydantic_settings import NoDecode

from tierstore.config.memory import (
    default_host_budget,
    default_load_memory,
    default_load_workers,
    default_overlay_budget,
)
from tierstore.config.values import (
    ANY_MODEL,
    ModelQuota,
    PartitionsText,
    Size,
    SizeOrZero,
    local_directory,
    split_commas,
)
from tierstore.types import BaseKind, Partitions


class StoreSettings(BaseModel):
    """Fields of `Settings`."""

    # Constants, that are read like settings; nobody has a reason to set them
    hot_keys_every_s: ClassVar[float] = 600.0  # between two saves of the hot keys
    audit_size: ClassVar[int] = 16 << 20  # bytes of the audit's file, after which a new one is begun

    data: Annotated[Path, BeforeValidator(local_directory)] = Field(Path("data"), description="the data directory")
    strict_environment: bool = Field(
        False,
        description="refuse a variable `TIERSTORE_…` that this release does not know; else it is a warning, as it may "
        "be a newer release's",
    )
    host_budget: Size = Field(
        default_factory=default_host_budget,
        description="bytes of CPU memory for cached rows, keys and bookkeeping, all models together",
    )
    device_budget: SizeOrZero = Field(
        ByteSize(0),
        ge=0,
        description="bytes of a GPU's memory for cached rows, keys, bookkeeping and staging, all models together; 0 "
        "for no device tier (extra `gpu`)",
    )
    overlay_budget: Size = Field(
        default_factory=default_overlay_budget,
        description="bytes of deltas that are visible but not folded yet; above it producers get 429, and 413 for one "
        "that could never fit",
    )
    base: BaseKind = Field(
        "sealed",
        description="what stores the rows of versions that are loaded from now on: sealed files (`sealed`), or "
        "RocksDB alone (`rocksdb`)",
    )
    string_keys_size: SizeOrZero = Field(
        ByteSize(8 << 30),
        ge=0,
        description="most bytes on disk of the strings of a version's string keys, as they are loaded; where they "
        "would take more, the version keeps their hashes alone, and cannot be exported; 0: no version keeps them",
    )
    partition: PartitionsText | None = Field(
        None,
        description="which partitions of the keys versions that are loaded from now on have here, and of how many: "
        "`0-15/64` or `0-15,40/64`; by default all keys; look-ups of other keys are refused",
    )
    load_memory: Size = Field(
        default_factory=default_load_memory,
        description="bytes of memory a bulk load may use before it spills to disk, all its helpers together, beside "
        "about 150 MiB that each takes to run at all",
    )
    load_disk: Size | None = Field(
        None,
        description="bytes of this node's disk that a load into a cluster may take: a larger snapshot is loaded in "
        "parts, one after another; by default what is free beyond `disk_reserve`",
    )
    load_retention_s: float = Field(
        86400.0,
        ge=0,
        description="seconds to keep the finished work of a load that was broken off, so that another load of the "
        "same snapshot can go on from it; 0: do not keep it",
    )
    load_p99_ratio: float = Field(
        1.3,
        ge=0,
        description="p99 of look-ups during a load, verification or warming, as a multiple of their p99 without it; "
        "above it such work slows down; 0: it never slows down",
    )
    load_workers: int = Field(default_factory=default_load_workers, ge=1, description="helper processes of a bulk load")
    warm_rate: int = Field(
        200_000,
        gt=0,
        description="most rows a second to read into memory after a start, while requests are served, all models "
        "together",
    )
    ready_warm_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of these rows that must be in memory before the service reports ready; it answers requests "
        "before that",
    )
    ready_unserved: bool = Field(
        False, description="report ready although a model that is on record could not be served at the start"
    )
    disk_threads: int = Field(8, ge=1, description="threads that read misses from disk, all models together")
    keep_versions: int = Field(1, ge=0, description="versions kept beside the active one for rollback")
    ttl_check_s: float = Field(
        86400.0,
        ge=0,
        description="seconds between two searches for rows that are older than the `ttl_s` of their table, in "
        "versions that serve; there is one soon after a version begins to; 0: none, rows then expire only when a "
        "snapshot is loaded",
    )
    ttl_most_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a table's rows that one search may delete for their age; where it finds more it deletes "
        "none and says so in `problems`, since the machine's clock may be wrong; 1: whatever it finds is deleted",
    )
    fold_grace_s: float = Field(
        0.05, ge=0, description="least seconds a delta stays in its overlay, so that small deltas are folded together"
    )
    log_retention_s: float | None = Field(
        None,
        ge=0,
        description="least seconds that a delta stays in the log once all rows have it, for older snapshots and for "
        "nodes that were away; default: three days, an hour where the log is a cluster's (`remote`) or rows are "
        "on nodes (`upstream`)",
    )
    remote: str | None = Field(
        None,
        description="a cluster that has the rows, `redis://host1:6379,host2:6379` (or `rediss://`, extra `redis`): "
        "the store serves the models that it has, and keeps only caches in the data directory",
    )
    remote_tags: int = Field(
        2,
        ge=1,
        le=64,
        description="parts into which a load cuts the rows for each master of the cluster; a look-up sends one "
        "command a part",
    )
    remote_on_failure: Literal["refuse", "default"] = Field(
        "refuse",
        description="keys that are not in memory while their part of the cluster, or the node upstream that owns "
        "them, cannot be read: refuse the request (`refuse`), or answer the table's default with found = false "
        "(`default`)",
    )
    remote_timeout_s: float = Field(
        1.0,
        gt=0,
        description="most seconds that a look-up waits for the cluster, or for nodes upstream, retries included",
    )
    remote_lease_s: float = Field(
        5.0,
        gt=0,
        description="seconds after which another node may bring deltas into the cluster's rows where the one that "
        "does has gone silent",
    )
    upstream: str | None = Field(
        None,
        description="nodes that have the rows, `http://host1:8000,http://host2:8000`: the store is a cache in front "
        "of them, serves the models that they serve, and keeps only caches in the data directory",
    )
    upstream_token: str | None = Field(
        None,
        repr=False,
        description="token (role `front`) for these nodes, or for peers; better in the environment, which keeps it "
        "out of lists of processes",
    )
    upstream_allow_insecure_token: bool = Field(
        False,
        description="send `upstream_token` to other machines without TLS, where something else encrypts, such as a "
        "mesh",
    )
    upstream_ca: Path | None = Field(
        None,
        description="file with authorities (PEM) for the certificates of these nodes, or of peers; default: those of "
        "the system",
    )
    peer: Annotated[list[str], NoDecode, BeforeValidator(split_commas)] = Field(
        default_factory=list,
        description="nodes that serve the same models, `http://host1:8000`, separated by ',': what this node lacks is "
        "fetched from them, models as it starts and deltas from then on; it is ready once it has caught up",
    )
    ssd_cache: SizeOrZero = Field(
        ByteSize(0),
        ge=0,
        le=4 << 40,
        description="bytes on the disk of the data directory for rows that were read from a cluster (`remote`) or "
        "from nodes (`upstream`), all models together; 0 for none",
    )
    quotas: dict[str, ModelQuota] = Field(
        default_factory=dict,
        description="limits of models by name, `*` for all others: `requests_per_second`, `keys_per_second`, "
        "`bytes_per_second`, `log_bytes`, `versions`, `loads`; and `freshness_max_s`, the most seconds since the "
        "event time of the newest delta, above which `problem` of the model says so; in the environment as JSON",
    )
    disk_reserve: SizeOrZero = Field(
        ByteSize(256 << 20),
        ge=0,
        description="bytes to keep free on the file system of the data directory, at most 2% of it: with less, deltas "
        "and loads are refused",
    )
    audit_keep: int = Field(
        8, ge=0, le=1000, description="files of the audit, of 16 MiB each, that are kept beside the newest"
    )

    @model_validator(mode="after")
    def _check_partition(self) -> Self:
        if self.partition is not None and self.remote is not None:
            raise ValueError("partition: rows in a cluster (remote) are everywhere; set one of the two")
        if self.partition is not None and self.upstream is not None:
            raise ValueError(
                "partition and upstream: the nodes upstream say which partitions they have; set it on them"
            )
        return self

    @model_validator(mode="after")
    def _check_peer(self) -> Self:
        if self.peer and (self.remote is not None or self.upstream is not None):
            raise ValueError(
                "peer: this node's rows are on other machines (remote, upstream), and it has nothing to catch up"
            )
        return self

    @model_validator(mode="after")
    def _check_ssd_cache(self) -> Self:
        if self.ssd_cache and self.remote is None and self.upstream is None:
            raise ValueError(
                "ssd_cache: expected remote or upstream beside it, got neither: this node's rows are on its own disk"
            )
        if 0 < self.ssd_cache < 1 << 20:
            raise ValueError(f"ssd_cache: expected 0 or at least 1MiB, got {self.ssd_cache} bytes")
        return self

    @property
    def own(self) -> Partitions | None:
        """`partition`; None for every key."""
        return None if self.partition is None else Partitions.parse(self.partition)

    @property
    def log_kept_s(self) -> float:
        """`log_retention_s`, or its default."""
        if self.log_retention_s is not None:
            return self.log_retention_s
        return 3 * 86400.0 if self.remote is None and self.upstream is None else 3600.0

    def quota_of(self, model: str) -> ModelQuota:
        """The quota of a model; one without limits where none is set."""
        return self.quotas.get(model) or self.quotas.get(ANY_MODEL) or ModelQuota()
