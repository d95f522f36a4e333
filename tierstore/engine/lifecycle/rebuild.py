"""Building a version again from its base, as a new line, so that the log can be replayed without undone deltas.

The base's sealed files never change after a load, so the new line has hard links to them; only its RocksDB, which
holds what deltas changed, begins empty. For the thread that holds the switch lock; what serves goes on.

After a crash: the line does not count until the document names it (`serving/undone.py`), and is removed at the
next start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.versions.dense_files import loaded_dense
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Conflict, StorageError
from tierstore.formats import files
from tierstore.formats.names import VersionDirectory
from tierstore.tiers.disk.sealed import BASE, SealedTier
from tierstore.tiers.disk.sst import write_sst
from tierstore.tiers.disk.tier import DiskTier, open_records
from tierstore.types import Progress

_BLOCK_CACHE_BYTES = 1 << 20


class Rebuilder:
    """Builds versions of one model again, without undone deltas."""

    def __init__(self, state: ModelState, opener: Opener) -> None:
        self._state, self._opener = state, opener
        self._live, self._catalogue = state.live, state.catalogue

    def check(self, info: VersionInfo) -> None:
        """Conflict if the version cannot be built again."""
        name, start, base_seq = self._state.name, self._state.log.start, info.manifest.delta_seq
        what = f"version {info.number} of {name!r} cannot be built again from its base"
        if info.base != "sealed":
            raise Conflict(
                f"{what}: it was loaded with base={info.base}, which does not keep rows as loaded apart from those of "
                "deltas; load its snapshot again, with base=sealed"
            )
        if start is not None and start > base_seq:
            raise Conflict(
                f"{what}: its snapshot holds deltas up to {base_seq}, and the log begins after {start}, so deltas "
                f"{base_seq + 1} to {start} are gone; load a snapshot whose delta_seq is {start} or larger. "
                f"log_retention_s, now {self._state.shared.settings.log_kept_s:g}, says how long the log keeps deltas"
            )
        if (lost := self._state.log.lost_above(base_seq)) is not None:
            raise Conflict(f"{what}: {lost}")

    @contextlib.contextmanager
    def built(self, info: VersionInfo) -> Iterator[VersionInfo]:
        """A new line of a version, with its snapshot's rows alone. It is removed if the block fails. Conflict,
        StorageError.

        During the block the log keeps what the line needs.
        """
        state, number = self._state, info.number
        state.room.check_free("a rollback to a delta")
        with self._reserved(info):
            self.check(info)
            state.file.repair()  # or the last line that failed might be the one on record
            where = state.where.version(number, state.log.undone.line(number) + 1)
            try:
                self._build(info, where)
                yield VersionInfo(where)
            except BaseException:
                counts = state.where.version(number, state.log.undone.line(number)).root == where.root
                if not counts and not state.file.in_doubt:  # or the next start may need it
                    with contextlib.suppress(StorageError):
                        files.remove_tree(where.root)
                raise

    @contextlib.contextmanager
    def _reserved(self, info: VersionInfo) -> Iterator[None]:
        """Keep others from dropping the version, or from pruning the log above its snapshot."""
        loading, number = self._catalogue.loading, info.number
        with self._live.write:
            before = loading.get(number)  # of a load that only switches now
            loading[number] = info.manifest.delta_seq, Progress("rebuild")
        try:
            yield
        finally:
            with self._live.write:
                if before is None:
                    del loading[number]
                else:
                    loading[number] = before

    def _build(self, info: VersionInfo, where: VersionDirectory) -> None:
        files.remove_tree(where.root)  # of a line that could not be removed
        files.make_dir(where.root)
        view = self._live.served.numbered(info.number)
        if view is not None and view.open_version.info is info:
            self._fill(info, where, view.open_version.disk)
            return
        with contextlib.closing(open_records(info.where.db, self._state.shared.readers)) as disk:
            self._fill(info, where, disk)

    def _fill(self, info: VersionInfo, where: VersionDirectory, disk: DiskTier) -> None:
        info.check_identity(disk)
        records, base = info.loaded_records(), disk.record(BASE)
        if records is None or base is None:
            raise Conflict(
                f"version {info.number} of {self._state.name!r} cannot be built again: an earlier release did not "
                "keep which string keys collided when it was loaded; load its snapshot again"
            )
        pairs = _in_folder(info.where.db / BASE, where.db / BASE)
        pairs += _in_folder(info.where.strings, where.strings)
        pairs += _in_folder(info.where.root / "warmup", where.root / "warmup")
        pairs += _in_folder(info.where.requests(), where.requests())
        for head in info.manifest.graphs:
            if head:
                pairs += _in_folder(info.where.requests(head), where.requests(head))
            dense = loaded_dense(info.where, disk, head)
            if dense is None:
                raise Conflict(
                    f"version {info.number} of {self._state.name!r} cannot be built again: a delta brought another "
                    "dense part before a release that keeps the loaded one; load its snapshot again"
                )
            pairs.append((dense, where.dense(head)))
        for folder in dict.fromkeys(new.parent for _, new in pairs):
            files.make_dir(folder)
        files.link_all(pairs)
        records |= info.identity_record(where) | info.expired_before_record() | {BASE: base}
        self._begin_disk(where, records)
        files.link_all([(info.where.record, where.record)])

    def _begin_disk(self, where: VersionDirectory, records: dict[str, bytes]) -> None:
        files.make_dir(where.db)
        first = write_sst(files.make_dir(where.build) / "records", records=records, delta=True)
        disk = SealedTier.create(where.db, block_cache_bytes=_BLOCK_CACHE_BYTES, reader=self._state.shared.readers)
        try:
            disk.ingest([first])
        finally:
            disk.close()
        files.remove_tree(where.build)


def _in_folder(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """(file, its hard link) of each file directly in a folder; none if there is no folder."""
    if not old.is_dir():
        return []
    return [(path, new / path.name) for path in sorted(old.iterdir()) if path.is_file()]
