"""Settings of where snapshots and deltas come from, and where exports go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
    split_commas,
    split_roots,
)

RowFormat = Literal["json", "avro", "protobuf", "avro-raw", "protobuf-raw"]
KeyFormat = Literal["text", "int64", "json", "avro", "protobuf"]


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
        None, description="directory of files `<model>/<seq>.arrow`; each is applied when it appears"
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
        description="consumer group under which positions are reported to the brokers, for their tools alone; default: `tierstore-<host name>`",
    )
    kafka_rewind_s: Annotated[Seconds | None, Field(gt=0)] = Field(
        None,
        description="how far back the topic is read for a model that is new here: `2h`, `30min` or seconds; default: from its beginning",
    )
    kafka_rows: Annotated[list[str], NoDecode, BeforeValidator(split_commas)] = Field(
        default_factory=list,
        description="topics of rows, one row a message, `TOPIC=MODEL/TABLE`, or `TOPIC` where headers `model` and `table` say it; separated by ','",
    )
    kafka_rows_format: RowFormat = Field(
        "json",
        description="how their values are written: `json`, `avro`, `protobuf` (Confluent's wire format; JSON with or without it), `avro-raw`, `protobuf-raw`",
    )
    kafka_rows_key_format: KeyFormat = Field(
        "text",
        description="how the messages' own keys are written: `text`, `int64` (8 bytes), `json`, `avro`, `protobuf`",
    )
    kafka_rows_registry: str | None = Field(
        None,
        description="URL of the schema registry; default: `schema.registry.url` of kafka_config, which may also hold `schema.registry.basic.auth.user.info` and `schema.registry.ssl.ca.location`",
    )
    kafka_rows_schema: str | None = Field(
        None,
        description="file with the schema of the values instead: JSON of Avro, or a descriptor set of Protobuf, `FILE#package.Message` for other than its first message type",
    )
    kafka_rows_fields: dict[str, str] = Field(
        default_factory=dict,
        description="by `key`, `vector` and `event_time`, the names of the fields that are called otherwise; in the environment as JSON",
    )
    kafka_rows_gather_s: float = Field(
        1.0, ge=0.01, le=3600, description="seconds for which rows are gathered into one delta"
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
