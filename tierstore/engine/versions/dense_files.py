"""The dense part in a version's directory, which moves on in one step with rows and watermark.

`dense.onnx` is the one that holds. A fold with a newer one writes it next to that as `dense-<seq>.onnx` and records
that seq in the same atomic step as the rows and the watermark; then the file is renamed to `dense.onnx`. So after a
crash rows and graph are both of before or both of after: `finish_dense`, called when the version is opened, finishes
what was cut off. One thread at a time: the one that folds into the version, or opens it.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from tierstore.engine.data.overlay import Overlay
from tierstore.formats import files
from tierstore.formats.names import VersionDirectory
from tierstore.tiers.base import Records

DENSE_SEQ = "dense"  # the delta with the one that holds; none where it is the snapshot's
DENSE_DIGEST = "dense xxh3"  # of what that delta brought, after its seq: an earlier release leaves it as it was
PASSED_OVER = "dense passed over"  # which newer one does not fit the version, and why


def stage_dense(where: VersionDirectory, overlay: Overlay, disk: Records) -> dict[str, bytes]:
    """Write the dense part of an overlay next to the one that holds. Returns the records that go with its rows.

    The one that was loaded gets a second name: a rollback to a delta needs it again.
    """
    records = {}
    if overlay.dense is not None:
        if disk.record(DENSE_SEQ) is None and files.exists(where.dense) and not files.exists(where.dense_loaded):
            files.link_all([(where.dense, where.dense_loaded)])
        files.publish_bytes(where.dense_to_come(overlay.hi), overlay.dense)
        records[DENSE_SEQ] = str(overlay.hi).encode()
        records[DENSE_DIGEST] = f"{overlay.hi} {xxhash.xxh3_64_hexdigest(overlay.dense)}".encode()
    if overlay.says_of_dense:
        records[PASSED_OVER] = (overlay.passed_over or "").encode()
    return records


def finish_dense(where: VersionDirectory, disk: Records) -> str | None:
    """Finish what a crash cut off. Returns what was passed over."""
    recorded = disk.record(DENSE_SEQ)
    for seq, path in where.denses_to_come():
        if recorded == str(seq).encode():
            files.rename(path, where.dense)
        else:
            files.remove_file(path)
    passed_over = disk.record(PASSED_OVER)
    return None if passed_over is None else passed_over.decode(errors="replace")


def loaded_dense(where: VersionDirectory, disk: Records) -> Path | None:
    """The dense part as it was loaded; None if it no longer exists."""
    if files.exists(where.dense_loaded):
        return where.dense_loaded
    return where.dense if disk.record(DENSE_SEQ) is None and files.exists(where.dense) else None


def digest_of_dense(disk: Records, loaded: str | None) -> str | None:
    """XXH3-64 of the dense part that holds, where that of the one that was `loaded` is given; None
    where it was not written down.
    """
    seq = disk.record(DENSE_SEQ)
    if seq is None:
        return loaded
    brought_by, _, digest = (disk.record(DENSE_DIGEST) or b"").partition(b" ")
    return digest.decode(errors="replace") if brought_by == seq else None
