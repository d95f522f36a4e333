"""The record of snapshots from watched locations, by model: `watch_snapshots.json` in the data directory.

Any thread, under `lock`. A change is durable when `save` has returned. It is recorded before the step that it
announces: after a crash a `pending` version is continued.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import Corruption, NotFound
from tierstore.formats import files

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(slots=True)
class ModelRecord:
    """The record of one model's snapshots: versions up to `seen` are not loaded any more, as they were loaded, or
    newer ones were active.
    """

    seen: int = 0
    pending: int | None = None  # being loaded, or loaded and not yet what the policy requires
    canary: int | None = None  # it is the canary, and promoted or withdrawn automatically
    beside: int | None = None  # the active version when `pending` or `canary` was set
    last: str | None = None  # the last event, for a person
    problem: str | None = None  # why the canary was withdrawn; until a newer version comes


class LocationRecords:
    """The records of all models."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self._path = path
        self._models: dict[str, ModelRecord] = {}
        self._saved: dict[str, ModelRecord] = {}
        try:
            document = files.read_json(path)
            if document["format"] != FORMAT:
                raise Corruption(f"expected format {FORMAT}, got {document['format']!r}")
            self._models = {model: ModelRecord(**record) for model, record in document["models"].items()}
        except NotFound:
            pass
        except (Corruption, KeyError, TypeError, AttributeError) as error:
            # active and kept versions are still not loaded again
            log.warning("%s cannot be used and is begun anew: %s", path, error)

    def of(self, model: str) -> ModelRecord:
        """The record of a model; made if there is none. Hold `lock` to change it."""
        with self.lock:
            return self._models.setdefault(model, ModelRecord())

    def models(self) -> dict[str, ModelRecord]:
        """All records, by model."""
        with self.lock:
            return dict(self._models)

    def save(self) -> None:
        """Publish the changes. StorageError."""
        with self.lock:
            models = {model: asdict(record) for model, record in sorted(self._models.items())}
            if models != {model: asdict(record) for model, record in self._saved.items()}:
                files.publish_record(self._path, {"format": FORMAT, "models": models})
                self._saved = {model: ModelRecord(**record) for model, record in models.items()}
