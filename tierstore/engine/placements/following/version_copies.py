"""Copies of the cluster's version records and side files on this node's disk, so that versions can be opened.

For the thread that follows the model. A copy without its record is left by a crash, and made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import xxhash

from tierstore.engine.model import Model
from tierstore.engine.placements.following.followed import Followed, Pointer
from tierstore.engine.versions.info import VersionInfo, digests_record
from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.formats.names import WARMUP, VersionDirectory, head_of_file
from tierstore.formats.regular import read_regular
from tierstore.formats.snapshot.checksum import checksum

READY = "ready"


class VersionCopies:
    """This node's copies of one model's versions in the cluster."""

    def __init__(self, model: Model, shared: Followed) -> None:
        self._model, self._shared = model, shared
        self.fetched: set[int] = set()  # by the last `update`
        self._fresh: set[int] = set()  # made by this process: side files of an earlier one may be older than the rows

    def update(self, records: Mapping[int, Mapping[str, Any]], pointer: Pointer) -> Pointer:
        """Keep a copy of every version that is ready, and of no other except those that are still served. None of
        them is being opened, unless it is of the same load.

        Returns the pointer by which new copies may be opened: dense parts may be of deltas that came since `pointer`
        was read.
        """
        self.fetched = set()
        model, catalogue = self._model, self._model.catalogue
        ready = {number: record["record"] for number, record in records.items() if record["state"] == READY}
        for number, record in ready.items():
            is_this = self._is_copy_of(record, number)
            if number in catalogue.loading or (is_this and number in self._fresh):
                continue
            if number in model.state.live.served.versions or number in model.state.retiring:
                continue  # if it was loaded again under its number, it is replaced once it is closed
            self._fetch(number, record, pointer)
            self._fresh.add(number)
            self.fetched.add(number)
        for info in catalogue.infos():
            served = info.number in model.state.live.served.versions or info.number in model.state.retiring
            if info.number not in ready and not served and info.number not in catalogue.loading:
                catalogue.forget(info.number)
                files.remove_tree(info.where.root)
        for number in sorted(self.fetched):
            pointer = self.update_dense(number)
        return pointer

    def differs(self, number: int | None, records: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether a version is another one by now than its copy, or is not there any more."""
        if number is None:
            return False
        record = records.get(number)
        return record is None or record["state"] != READY or not self._is_copy_of(record["record"], number)

    def _is_copy_of(self, record: Mapping[str, Any], number: int) -> bool:
        info = self._model.catalogue.get(number)
        return info is not None and info.loaded_at_s == record["loaded_at_s"]

    def lacks(self, pointer: Pointer) -> bool:
        """Whether a version that should be served is not here: its record may have been lost for a while."""
        named = {pointer.current, pointer.canary, pointer.wanted} - {None}
        return not named <= set(self._model.catalogue.numbers)

    def renew(self, number: int, pointer: Pointer) -> Pointer:
        """`update_dense` for a version that is to be opened anew, with its new record if it has another content by
        now: rows, features, defaults and dtypes are of one load.
        """
        records = self._shared.versions()
        if self.differs(number, records):
            if number not in records or records[number]["state"] != READY:
                raise StorageError(f"version {number} of {self._model.name!r} is not there any more, or not yet again")
            self._fetch(number, records[number]["record"], pointer)
            self._fresh.add(number)
        return self.update_dense(number)

    def update_dense(self, number: int) -> Pointer:
        """Fetch the dense parts of a version from the other machines. Returns the pointer as of then.

        A delta's dense parts are there before its rows are, and its seq is in the log before. So with all deltas of
        that pointer there are no rows of a delta whose dense part is missing, and no dense part whose rows are.
        """
        info = self._model.catalogue.info(number)
        graphs = {head: bytes(read_regular(info.where.dense(head))) for head in info.where.denses()}
        while True:
            pointer, there = self._shared.pointer_from_now(), self._shared.files(number, info.loaded_at_s)
            now = {head: graph for name, graph in there.items() if (head := head_of_file(name)) is not None}
            if now == graphs:
                break
            for head, graph in now.items():
                files.publish_bytes(info.where.dense(head), graph)
            for head in graphs.keys() - now.keys():  # of a delta that was undone
                files.remove_file(info.where.dense(head))
            graphs = now
        info.loaded_digests = {head: xxhash.xxh3_64_hexdigest(graph) for head, graph in graphs.items() if graph}
        info.heads = dict(info.loaded_digests)
        return pointer

    def _fetch(self, number: int, record: Mapping[str, Any], pointer: Pointer) -> None:
        where = self._model.where.version(number)
        old = files.read_json(where.record) if files.exists(where.record) else None
        if old is not None and old.get("loaded_at_s") != record["loaded_at_s"]:
            files.remove_tree(where.root)
        files.make_dir(where.root)
        for name, data in self._shared.files(number, float(record["loaded_at_s"])).items():
            path = _within(where, name)
            files.make_dir(path.parent)
            files.publish_bytes(path, data)
        digests = digests_record({head: checksum(where.dense(head)) for head in where.denses()})
        others = {name: value for name, value in record.items() if name != "heads"}  # of which some may be gone
        files.publish_record(where.record, {**others, **digests})
        info = VersionInfo(where)
        if info.base != "remote":
            raise Corruption(f"version {number} of {self._model.name!r} in the cluster has a record of another kind")
        info.watermark = max(info.watermark, pointer.marks.get(number, 0))
        self._model.catalogue.add(info)


def _within(where: VersionDirectory, name: str) -> Any:
    """The path of a side file. Corruption for a name that leads out of the version's directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or (head_of_file(name) is None and path.parts[:1] != (WARMUP,)):
        raise Corruption(
            f"a side file of the cluster has the name {name!r}: expected one within the version's directory"
        )
    return where.root / path
