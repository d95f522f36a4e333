"""What of a store other processes on this machine may see: which change it is at, versions, and overlays.

The owner describes a version or an overlay by a document (JSON) and file descriptors of shared memory; a mirror makes
it again from both. Documents are exchanged between processes of one release and are never kept. Any thread may call
anything; shared memory is gone with the last process that has it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tierstore.engine.overlay import Overlay, OverlayTable
from tierstore.engine.table import LookupCounts, Table
from tierstore.engine.version import Version
from tierstore.formats.keys import as_codes
from tierstore.formats.manifest import Manifest
from tierstore.tiers.base import RowStore
from tierstore.tiers.host import HostTable
from tierstore.tiers.host_window import HostWindow
from tierstore.types import TableSpec

_LINE = 64  # what parts of an overlay are aligned to


class Changes:
    """A counter in shared memory that the owner moves on at every publication, before anybody is told of it.

    One aligned word, stored and loaded whole. Who was told of a publication (a request that starts after a delta was
    acknowledged) was so through the kernel, which orders the store before the load.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Make a counter, or map that of another process, given its `fd`."""
        self._lock = threading.Lock()
        if fd is None:
            fd = os.memfd_create("tierstore-changes")
            os.ftruncate(fd, mmap.PAGESIZE)
        self.fd = fd
        self._word = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @property
    def value(self) -> int:
        return self._word[0]

    def bump(self) -> None:
        """Of the owner alone."""
        with self._lock:
            self._word[0] += 1

    def close(self) -> None:
        """Close the descriptor; the counter stays readable."""
        os.close(self.fd)


def describe_version(version: Version) -> tuple[dict[str, Any], list[int]]:
    """(document, descriptors) of an open version; the descriptors stay the version's own and open while it is."""
    tables, fds = {}, []
    for name, table in version.tables.items():
        fd = getattr(table.host, "fd", None)
        tables[name] = {
            "id": table.table_id,
            "rows": table.rows,
            "default": table.default.tolist(),
            "host": None if table.host is None or fd is None else table.host.budget_bytes,
        }
        if fd is not None:
            fds.append(fd)
    document = {
        "number": version.number,
        "manifest": version.info.manifest.to_document(),
        "dense": version.info.has_dense,
        "tables": tables,
    }
    return document, fds


class MirrorVersion:
    """A version that another process owns, with what `View` needs of one. `serial` is the owner's name for it."""

    def __init__(
        self,
        serial: int,
        document: dict[str, Any],
        fds: list[int],
        rows: RowStore,
        counts: Callable[[str], LookupCounts],
    ) -> None:
        """Takes the descriptors over. `rows` reads what is not in memory; `counts` gives a table's counts."""
        manifest = Manifest.parse(json.dumps(document["manifest"]), file="the owner's version")
        self.serial, self.number = serial, int(document["number"])
        self.specs, self.features = manifest.table_specs(), manifest.feature_specs()
        self.info = SimpleNamespace(has_dense=document["dense"])
        self.predictor = None  # the owner runs it
        self.unserved = None
        self.tables: dict[str, Table] = {}
        left = list(fds)
        try:
            for name, entry in document["tables"].items():
                spec = self.specs[name]
                default = np.asarray(entry["default"], np.float32)
                table = self.tables[name] = Table(spec, entry["id"], default, entry["rows"], rows, counts(name))
                if entry["host"] is not None:
                    # of a cache, what a look-up calls: nobody folds into a mirror, warms or resizes it
                    window = HostWindow(spec, entry["host"], left.pop(0), default_vector=default)
                    table.host = cast(HostTable, window)
        finally:
            for fd in left:
                os.close(fd)
        self.padding: dict[str, int] = {
            name: int(as_codes([feature.padding_key], self.specs[feature.table].key)[0])
            for name, feature in self.features.items()
            if feature.padding_key is not None
        }


class SharedOverlay:
    """An overlay copied to shared memory: `document` and `fd` say all of it. Of the owner; `close` it once nobody is to get it."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self._size = 0
        tables: dict[str, dict[str, Any]] = {
            name: {
                "n": len(table.keys),
                "slots": len(table.index),
                "at": [self._place(part.nbytes) for part in _parts(table)],
            }
            for name, table in overlay.tables.items()
        }
        self.document = {"lo": overlay.lo, "hi": overlay.hi, "tables": tables}
        self.fd = os.memfd_create("tierstore-overlay")
        try:
            os.ftruncate(self.fd, max(1, self._size))
            whole = np.frombuffer(mmap.mmap(self.fd, max(1, self._size)), np.uint8)
            for name, table in overlay.tables.items():
                for at, part in zip(tables[name]["at"], _parts(table), strict=True):
                    whole[at : at + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        except BaseException:
            self.close()
            raise

    def _place(self, nbytes: int) -> int:
        at = self._size
        self._size += -(-nbytes // _LINE) * _LINE
        return at

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _parts(table: OverlayTable) -> tuple[np.ndarray, ...]:
    return table.keys, table.index, table.rows, table.deleted


def mirror_overlay(document: dict[str, Any], fd: int, specs: dict[str, TableSpec]) -> Overlay:
    """The overlay of another process, read in its shared memory. Takes the descriptor over."""
    try:
        whole = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
    tables = {}
    for name, entry in document["tables"].items():
        spec, n = specs[name], entry["n"]
        sizes = n * 8, entry["slots"] * 8, n * spec.row_bytes, n
        keys, index, rows, deleted = (whole[at : at + size] for at, size in zip(entry["at"], sizes, strict=True))
        tables[name] = OverlayTable.of_parts(
            spec,
            keys.view(np.int64),
            index.view(np.uint64),
            rows.reshape(n, spec.row_bytes),
            deleted.view(np.bool_),
        )
    return Overlay(document["lo"], document["hi"], tables)
