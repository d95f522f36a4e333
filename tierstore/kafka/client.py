"""librdkafka, by confluent-kafka: the extra `kafka`, the options of a user, and the errors
in the words of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, MissingExtra, TierstoreError, Unreachable

MISSING = "the extra `kafka` is not installed: pip install 'tierstore[kafka]'"
# What exactly-once depends on; a user's options may not change it.
_OURS = frozenset(
    [
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "auto.offset.reset",
        "enable.partition.eof",
        "enable.idempotence",
        "acks",
        "allow.auto.create.topics",
    ]
)
_COMMITTED = "read_committed"


def confluent_kafka() -> Any:
    """The module, with its `admin`. MissingExtra where it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(f"kafka: {MISSING}") from error
    return confluent_kafka


def read_options(path: str | Path | None) -> dict[str, str]:
    """librdkafka's properties from a file of lines `name=value`; lines that begin with # are comments. ConfigError."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kafka_config: cannot read {path}: {error}") from error
    options = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(f"kafka_config: {path}, line {number}: expected name=value")
        options[name.strip()] = value.strip()
    return options


def merged(ours: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Our properties and a user's. ConfigError where the user's would replace one that delivery depends on."""
    if refused := sorted(_OURS & options.keys()):
        raise ConfigError(f"kafka: {', '.join(refused)} cannot be set: tierstore sets it itself")
    if (level := options.get("isolation.level", _COMMITTED)) != _COMMITTED:
        raise ConfigError(
            f"kafka: isolation.level: expected {_COMMITTED}, got {level!r}: aborted transactions never count"
        )
    return {**ours, **options}


def make(kind: str, properties: Mapping[str, Any]) -> Any:
    """A Consumer, Producer or AdminClient. ConfigError for properties that librdkafka refuses."""
    module = confluent_kafka()
    try:
        return getattr(module if hasattr(module, kind) else module.admin, kind)(dict(properties))
    except (module.KafkaException, ValueError, TypeError) as error:
        raise ConfigError(f"kafka: {text_of(error)}") from error


def text_of(error: Any) -> str:
    """What went wrong, without the wrapping of the library."""
    inner = error.args[0] if isinstance(error, Exception) and error.args else error
    return str(inner.str()) if hasattr(inner, "str") else str(inner)


def unreachable(brokers: str, error: Any) -> TierstoreError:
    return Unreachable(f"kafka: no broker of {brokers} answers: {text_of(error)}")
