"""Settings of where snapshots and deltas come from, and where exports go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from tierstore.config.values import (
    Minutes,
    Seconds,
    Share,
    Size,
    SnapshotPolicy,
    WhenLoaded,
    path_or_url,
    split_roots,
)


class SourceSettings(BaseModel):
    """Fields of `Settings`."""

    source_root: Annotated[list[Path | str], NoDecode, BeforeValidator(split_roots)] = Field(
        default_factory=lambda: list[Path | str]([Path.cwd()]),
        description="snapshots are read only from under these: directories, and URLs such as `s3://bucket/models`; separated by ':' in the environment",
    )
    export_root: Annotated[Path | str | None, BeforeValidator(path_or_url)] = Field(
        None,
        description="exports and backups that are requested over HTTP are written only under this directory or URL; default: none, and they are refused",
    )
    max_delta: Size = Field(ByteSize(256 << 20), description="largest body of a delta")
    watch: Path | None = Field(
        None, description="directory of <model>/<seq>.arrow files; each is applied when it appears"
    )
    kafka: str | None = Field(
        None,
        description="brokers of a Kafka cluster, `host:port,host:port` (extra `kafka`); deltas are read from kafka_topic",
    )
    kafka_topic: str | None = Field(None, description="topic of deltas, of any number of models")
    kafka_config: Path | None = Field(
        None,
        description="file with properties of librdkafka, one `name=value` a line, such as those for TLS and SASL; it may hold secrets",
    )
    kafka_group: str | None = Field(
        None,
        description="consumer group under which positions are reported to the brokers, for their tools alone; default: tierstore-<host name>",
    )
    kafka_rewind_s: Annotated[Seconds | None, Field(gt=0)] = Field(
        None,
        description="how far back the topic is read for a model that is new here: `2h`, `30min` or seconds; default: from its beginning",
    )
    watch_snapshots: Annotated[list[Path | str], NoDecode, BeforeValidator(split_roots)] = Field(
        default_factory=list,
        description="directories and URLs of snapshots, `<model>/<version>/` or `<version>/` below each; the newest of a model is loaded when it is complete; separated by ':' in the environment",
    )
    watch_snapshots_s: float = Field(
        30.0, gt=0, le=86400, description="seconds between two looks at each location of watch_snapshots"
    )
    watch_activate: WhenLoaded = Field(
        "now",
        description="what a snapshot of watch_snapshots becomes once it is loaded: `now` active, `hold` kept only, `canary` first the canary and then active",
    )
    canary_share: Share = Field(
        0.05, description="share of the requests, 0 to 1, that such a canary gets; where watch_activate is `canary`"
    )
    canary_minutes: Minutes = Field(
        15.0, description="minutes without more failed requests than the active version has, after which it is promoted"
    )
    snapshot_policies: dict[str, SnapshotPolicy] = Field(
        default_factory=dict,
        description="by name of the model, its own `watch_activate`, `canary_share`, `canary_minutes`; in the environment as JSON",
    )

    def snapshot_policy(self, model: str) -> tuple[WhenLoaded, float, float]:
        """(what a snapshot of the model becomes, the canary's share, its minutes)."""
        own = self.snapshot_policies.get(model) or SnapshotPolicy()
        return (
            own.watch_activate or self.watch_activate,
            self.canary_share if own.canary_share is None else own.canary_share,
            self.canary_minutes if own.canary_minutes is None else own.canary_minutes,
        )
