"""Topics of rows: whose rows they have and how they are encoded, by the settings `kafka_rows…`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierstore.config import Settings
from tierstore.errors import ConfigError, DeltaError
from tierstore.kafka.client import read_options
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.row_formats import decoder, registry_of
from tierstore.kafka.row_messages import RowReader, field_names
from tierstore.types import NAME

_ROUTE = re.compile(r"([A-Za-z0-9._-]{1,249})(?:=([^/]+)/([^/]+))?")


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """A topic and the table of its rows; None if headers of each message name it."""

    topic: str
    model: str | None = None
    table: str | None = None

    @classmethod
    def parse(cls, text: str) -> TopicRoute:
        """`TOPIC=MODEL/TABLE` or `TOPIC`. ConfigError."""
        match = _ROUTE.fullmatch(text)
        if match is None or any(name is not None and NAME.fullmatch(name) is None for name in match.groups()[1:]):
            raise ConfigError(f"kafka_rows: expected TOPIC=MODEL/TABLE, or TOPIC, got {text!r}")
        return cls(*match.groups())

    def place(self, message: KafkaMessage) -> tuple[str, str]:
        """(model, table) of a message. DeltaError if it does not name them."""
        if self.model is not None and self.table is not None:
            return self.model, self.table
        headers = dict(message.headers)
        try:
            model, table = ((headers.get(name) or b"").decode() for name in ("model", "table"))
        except UnicodeDecodeError:
            raise DeltaError("headers `model` and `table`: expected UTF-8") from None
        if NAME.fullmatch(model) is None or NAME.fullmatch(table) is None:
            raise DeltaError(f"expected headers `model` and `table`, got {model[:64]!r} and {table[:64]!r}")
        return model, table


def make_row_reader(settings: Settings) -> RowReader:
    """The reader of rows for these settings. ConfigError, MissingExtra."""
    names = field_names(settings.kafka_rows_fields)
    registry = registry_of(read_options(settings.kafka_config))
    value = decoder(settings.kafka_rows_format, names, registry=registry, schema=settings.kafka_rows_schema)
    key = decoder(settings.kafka_rows_key_format, names[:1], registry=registry, schema=None)
    return RowReader(value, key, settings.kafka_rows_fields, settings.kafka_rows_envelope)


def check_row_topics(settings: Settings) -> None:
    """ConfigError or MissingExtra for settings of rows that cannot be used."""
    topics = [TopicRoute.parse(text).topic for text in settings.kafka_rows]
    if len(set(topics)) < len(topics):
        raise ConfigError("kafka_rows: expected each topic once")
    if settings.kafka_topic in topics:
        raise ConfigError(f"kafka_rows and kafka_topic: {settings.kafka_topic} has deltas or rows, not both")
    if settings.remote is not None:
        raise ConfigError(
            "kafka_rows and remote: a cluster's log does not keep the positions of the topic, so that rows would be "
            "lost or repeated; write deltas to a topic (kafka_topic), or follow the rows on machines that have them"
        )
    if settings.kafka_rows_envelope != "none" and settings.kafka_rows_format.startswith("protobuf"):
        raise ConfigError(
            f"kafka_rows_envelope and kafka_rows_format: {settings.kafka_rows_format} rows have no envelope; have the "
            "connector write the row alone (Debezium: the transform ExtractNewRecordState)"
        )
    make_row_reader(settings)
