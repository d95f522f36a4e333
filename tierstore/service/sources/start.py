"""Starting the configured sources: checked before the store opens, started once the service answers, closed before
the store.
"""

from __future__ import annotations

from pathlib import Path

from tierstore.config import Settings
from tierstore.errors import ConfigError
from tierstore.formats.buckets import Bucket
from tierstore.formats.objects import is_url
from tierstore.kafka.client import read_options
from tierstore.kafka.reader import check_kafka_options
from tierstore.service.context import ChangeSource, Service
from tierstore.service.sources.kafka import KafkaSource
from tierstore.service.sources.kafka_routes import check_row_topics
from tierstore.service.sources.kafka_rows import KafkaRows
from tierstore.service.sources.locations import Locations
from tierstore.service.sources.peers import Peers, make_peers


def check_sources(settings: Settings) -> None:
    """Raise ConfigError or MissingExtra for a source that cannot be read."""
    if settings.watch is not None and not settings.watch.is_dir():
        raise ConfigError(f"watch: {settings.watch} is not a directory")
    if (settings.kafka is None) is not (settings.kafka_topic is None and not settings.kafka_rows):
        raise ConfigError("kafka and kafka_topic or kafka_rows: expected both or neither")
    if settings.upstream is not None:
        others = {"kafka": settings.kafka, "watch": settings.watch, "watch_snapshots": settings.watch_snapshots}
        for name, value in others.items():
            if value:
                raise ConfigError(
                    f"{name} and upstream: a node in front changes nothing; set {name} on the nodes upstream, "
                    f"{settings.upstream}"
                )
    if settings.kafka is not None:
        check_row_topics(settings)
        check_kafka_options(settings.kafka, read_options(settings.kafka_config))
    for location in settings.watch_snapshots:
        _check_location(location)
    if settings.peer:
        if settings.kafka_rows:
            raise ConfigError(
                "peer and kafka_rows: each node makes deltas of its own from such rows, so no two have the same; set "
                "one of the two"
            )
        make_peers(settings)


def start_sources(service: Service, settings: Settings) -> dict[str, ChangeSource]:
    """Start each configured source. Returns them by their names in the status."""
    sources: dict[str, ChangeSource] = {}
    if settings.watch is not None:
        from tierstore.service.sources.directory import Watcher  # with readers of files of rows, which take memory

        sources["watch"] = Watcher(service.store, settings.watch, max_delta=settings.max_delta)
    if settings.kafka_topic is not None:
        sources["kafka"] = KafkaSource(service.store, settings, service.traces)
    if settings.kafka_rows:
        sources["kafka_rows"] = KafkaRows(service.store, settings)
    if settings.watch_snapshots:
        sources["watch_snapshots"] = Locations(service.store, service.jobs, service.inference_stats, settings)
    if settings.peer:
        sources["peers"] = Peers(service.store, settings, service.peer_side.node)
    return sources


def _check_location(location: Path | str) -> None:
    if isinstance(location, Path):
        if not location.is_dir():
            raise ConfigError(f"watch_snapshots: {location} is not a directory")
    elif is_url(location) and "::" not in location:
        Bucket(location)
    else:
        raise ConfigError(
            f"watch_snapshots: expected a directory or a URL such as s3://bucket/models, got {location!r}"
        )
