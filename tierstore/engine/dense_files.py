"""The dense part in a version's directory, which moves on in one step with rows and watermark.

`dense.onnx` is the one that holds. A fold that brings another one writes it beside as `dense-<seq>.onnx` and has that
seq recorded in the same atomic step as the rows and the watermark; then the file takes its name. So after a crash rows
and graph are both of before or both of after: `settle_dense`, called when the version is opened, ends what was
cut off. For whoever may fold into the version or open it, one thread at a time.
"""

from __future__ import annotations

import xxhash

from tierstore.engine.overlay import Overlay
from tierstore.formats import files
from tierstore.formats.names import VersionDirectory
from tierstore.tiers.disk import DiskTier

DENSE_SEQ = "dense"  # the delta that brought what holds; none where it is the snapshot's
DENSE_DIGEST = "dense xxh3"  # of what that delta brought, after its seq: an earlier release leaves it as it was
PASSED_OVER = "dense passed over"  # which newer one does not fit the version, and why


def dense_to_come(where: VersionDirectory, overlay: Overlay) -> dict[str, bytes]:
    """Write what an overlay brings beside what holds. Returns the records that go with its rows."""
    records = {}
    if overlay.dense is not None:
        files.publish_bytes(where.dense_to_come(overlay.hi), overlay.dense)
        records[DENSE_SEQ] = str(overlay.hi).encode()
        records[DENSE_DIGEST] = f"{overlay.hi} {xxhash.xxh3_64_hexdigest(overlay.dense)}".encode()
    if overlay.dense is not None or overlay.passed_over is not None:
        records[PASSED_OVER] = (overlay.passed_over or "").encode()
    return records


def settle_dense(where: VersionDirectory, disk: DiskTier) -> str | None:
    """End what a crash cut off. Returns what was passed over."""
    recorded = disk.record(DENSE_SEQ)
    for seq, path in where.denses_to_come():
        if recorded == str(seq).encode():
            files.rename(path, where.dense)
        else:
            files.remove_file(path)
    passed_over = disk.record(PASSED_OVER)
    return None if passed_over is None else passed_over.decode(errors="replace")


def digest_of_dense(disk: DiskTier, loaded: str | None) -> str | None:
    """XXH3-64 of the dense part that holds, where that of the one that was `loaded` is given; None where nobody wrote it down."""
    seq = disk.record(DENSE_SEQ)
    if seq is None:
        return loaded
    of, _, digest = (disk.record(DENSE_DIGEST) or b"").partition(b" ")
    return digest.decode(errors="replace") if of == seq else None
