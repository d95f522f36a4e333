"""The target of a load on this machine's disk: a directory of the version, which the load has claimed.

On the thread of the load. A crash leaves the directory without its record; a load of the same snapshot goes on from
there.
"""

from __future__ import annotations

from typing import Any

from tierstore.engine.data.disk_room import floor_of
from tierstore.engine.model import Model
from tierstore.engine.placement import Building
from tierstore.engine.versions.info import first_records, make_record
from tierstore.formats import files
from tierstore.formats.names import VersionDirectory
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.results import BaseBuild
from tierstore.types import BaseKind, Partitions, ProgressFn


class LocalTarget:
    """This machine's disk as the `LoadTarget` of a load."""

    keep_times = True

    def __init__(self, model: Model, base: BaseKind, own: Partitions | None) -> None:
        self._model, self.base, self._own = model, base, own

    def claim(self, snapshot: Snapshot, identity: str) -> None:
        """Nothing: the directory is claimed by every load."""

    def place(self, build: Building, where: VersionDirectory, snapshot: Snapshot, progress: ProgressFn) -> BaseBuild:
        """Build the files, move them in, read everything back, and keep the strings of keys."""
        with build(snapshot, self._own, progress=progress) as (bulk, built):
            bulk.ingest(built, where.db, first_records(where, snapshot.manifest, built))
            bulk.read_back(where.db)
            settings = self._model.state.shared.settings
            keep_free = floor_of(where.root, settings.disk_reserve)
            return bulk.keep_strings(built, where.strings, settings.string_keys_size, keep_free)

    def record(self, where: VersionDirectory, build: BaseBuild, manifest: Manifest) -> dict[str, Any]:
        return make_record(where, manifest, build)

    def publish(self, where: VersionDirectory, number: int, record: dict[str, Any]) -> bool:
        files.publish_record(where.record, record)
        return True

    def abandon(self, number: int, error: BaseException) -> None:
        """Nothing: the claim's end removes the directory."""

    def activate(self, number: int, progress: ProgressFn) -> None:
        self._model.switcher.activate(number, progress=progress)
