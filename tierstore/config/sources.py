"""Settings of where snapshots and deltas come from, and where exports go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from tierstore.config.values import (
    ANY_MODEL,
    Seconds,
    Size,
    SizeOrZero,
    SnapshotPolicy,
    path_or_url,
    split_commas,
    split_roots,
)

RowFormat = Literal["json", "avro", "protobuf", "avro-raw", "protobuf-raw"]
KeyFormat = Literal["text", "int64", "json", "avro", "protobuf"]
Envelope = Literal["none", "connect", "debezium"]


class SourceSettings(BaseModel):
    """Fields of `Settings`."""

    source_root: Annotated[list[Path | str], NoDecode, BeforeValidator(split_roots)] = Field(
        default_factory=lambda: list[Path | str]([Path.cwd()]),
        description="snapshots are read only from under these: directories, and URLs such as `s3://bucket/models`; "
        "separated by ':' in the environment",
    )
    export_root: Annotated[Path | str | None, BeforeValidator(path_or_url)] = Field(
        None,
        description="exports and backups that are requested over HTTP are written only under this directory or URL; "
        "default: `exports` in the data directory",
    )
    spool_budget: SizeOrZero | None = Field(
        None,
        ge=0,
        description="bytes of snapshots that clients send over HTTP, all together, until they are loaded; 0: none are "
        "taken; default: what `disk_reserve` leaves",
    )
    max_delta: Size = Field(ByteSize(256 << 20), description="largest body of a delta")
    watch: Path | None = Field(
        None, description="directory of files `<model>/<seq>.arrow`; each is applied when it appears"
    )
    kafka: str | None = Field(
        None,
        description="brokers of a Kafka cluster, `host:port,host:port` (extra `kafka`); deltas are read from "
        "kafka_topic",
    )
    kafka_topic: str | None = Field(None, description="topic of deltas, of any number of models")
    kafka_config: Path | None = Field(
        None,
        description="file with properties of librdkafka, one `name=value` a line, such as those for TLS and SASL; "
        "`group.id` is the consumer group under which positions are reported to the brokers, for their tools "
        "alone (default: `tierstore-<host name>`); `schema.registry.url` is the registry of schemas of "
        "kafka_rows, beside which `schema.registry.basic.auth.user.info` and `schema.registry.ssl.ca.location` "
        "may stand; it may hold secrets",
    )
    kafka_rewind_s: Annotated[Seconds | None, Field(gt=0)] = Field(
        None,
        description="how far back the topic is read for a model that is new here: `2h`, `30min` or seconds; default: "
        "from its beginning",
    )
    kafka_rows: Annotated[list[str], NoDecode, BeforeValidator(split_commas)] = Field(
        default_factory=list,
        description="topics of rows, one row a message, `TOPIC=MODEL/TABLE`, or `TOPIC` where headers `model` and "
        "`table` say it; separated by ','",
    )
    kafka_rows_format: RowFormat = Field(
        "json",
        description="how their values are written: `json`, `avro`, `protobuf` (Confluent's wire format; JSON with or "
        "without it), `avro-raw`, `protobuf-raw`",
    )
    kafka_rows_key_format: KeyFormat = Field(
        "text",
        description="how the messages' own keys are written: `text`, `int64` (8 bytes), `json`, `avro`, `protobuf`",
    )
    kafka_rows_schema: str | None = Field(
        None,
        description="file with the schema of the values instead: JSON of Avro, or a descriptor set of Protobuf, "
        "`FILE#package.Message` for other than its first message type",
    )
    kafka_rows_fields: dict[str, str] = Field(
        default_factory=dict,
        description="by `key`, `vector` and `event_time`, the names of the fields that are called otherwise; in the "
        "environment as JSON",
    )
    kafka_rows_envelope: Envelope = Field(
        "none",
        description="what lies around rows and keys: `connect`, the `{schema, payload}` of Kafka Connect's "
        "JsonConverter; `debezium`, a change event with `before`, `after` and `op`, in `{schema, payload}` or not",
    )
    kafka_rows_gather_s: float = Field(
        0.5, ge=0.01, le=3600, description="seconds for which rows are gathered into one delta"
    )
    watch_snapshots: Annotated[list[Path | str], NoDecode, BeforeValidator(split_roots)] = Field(
        default_factory=list,
        description="directories and URLs of snapshots, `<model>/<version>/` or `<version>/` below each; the newest "
        "of a model is loaded when it is complete; separated by ':' in the environment",
    )
    watch_snapshots_s: float = Field(
        30.0, gt=0, le=86400, description="seconds between two looks at each location of watch_snapshots"
    )
    snapshot_policies: dict[str, SnapshotPolicy] = Field(
        default_factory=dict,
        description="what a snapshot of watch_snapshots becomes once it is loaded, by name of the model, `*` for all "
        "others: `watch_activate` is `now` (active), `hold` (kept only) or `canary` (first the canary, and then "
        "active); `canary_share`, 0.05, of the requests is what such a canary gets, and after `canary_minutes`, "
        "15, without more failed requests than the active version has it is promoted; in the environment as JSON",
    )

    def snapshot_policy(self, model: str) -> SnapshotPolicy:
        """What becomes of the snapshots of a model."""
        return self.snapshot_policies.get(model) or self.snapshot_policies.get(ANY_MODEL) or SnapshotPolicy()
