"""What became of the snapshots of watched locations, by model; it survives a restart as
`watch_snapshots.json` in the data directory.

Any thread, under `lock`. A change is durable when `save` has returned. The record is written before what it announces
is begun: after a crash a version that is `pending` is gone on with.
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
    """What became of one model's snapshots in watched locations: versions up to `seen` are not loaded any more, as
    they were loaded, or as newer ones were active.
    """

    seen: int = 0
    pending: int | None = None  # is being loaded, or is loaded and has not become what the policy says
    canary: int | None = None  # is the canary, and promoted or withdrawn by itself
    beside: int | None = None  # the active version when `pending` or `canary` was set
    last: str | None = None  # what happened last, for a person
    problem: str | None = None  # why the canary was withdrawn; until something newer comes


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
            # what is active and what is kept is not loaded again all the same
            log.warning("%s cannot be used and is begun anew: %s", path, error)

    def of(self, model: str) -> ModelRecord:
        """The record of a model; made where there is none. Hold `lock` to change it."""
        with self.lock:
            return self._models.setdefault(model, ModelRecord())

    def models(self) -> dict[str, ModelRecord]:
        """All records, by name of the model."""
        with self.lock:
            return dict(self._models)

    def save(self) -> None:
        """Publish what has changed. StorageError."""
        with self.lock:
            models = {model: asdict(record) for model, record in sorted(self._models.items())}
            if models != {model: asdict(record) for model, record in self._saved.items()}:
                files.publish_record(self._path, {"format": FORMAT, "models": models})
                self._saved = {model: ModelRecord(**record) for model, record in models.items()}
