"""The graphs in a version's directory, which change in one step with rows and watermark.

`dense.onnx` is the valid graph, for a head `dense.<head>.onnx`; it is empty if a delta removed the head. A fold with a
newer graph writes it next to that as `dense-<seq>….onnx` and records its seq in the same atomic step as the rows and
the watermark; then the file is renamed. So after a crash rows and graphs are both old or both new: `finish_dense`,
called when the version is opened, finishes what was interrupted. One thread at a time: the one that folds into the
version, or opens it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from tierstore.engine.data.dense_head import GONE, passed_over_after
from tierstore.engine.data.overlay import Overlay
from tierstore.errors import Corruption
from tierstore.formats import files
from tierstore.formats.names import VersionDirectory
from tierstore.tiers.base import Records

_OF_NONE = xxhash.xxh3_64_hexdigest(GONE)
_SEQ_RECORD = re.compile(r"dense(?:\.([^ ]+))?")
PASSED_OVER = "dense passed over"  # which newer ones do not fit the version, and why


def seq_record(head: str) -> str:
    """The record with the delta of the valid graph; none if it is the snapshot's."""
    return f"dense.{head}" if head else "dense"


def _head_of_record(record: str) -> str | None:
    """The head whose `seq_record` that is; None for another record."""
    found = _SEQ_RECORD.fullmatch(record)
    return None if found is None else found[1] or ""


def digest_record(head: str) -> str:
    """The record with the digest of that delta's graph, after its seq: earlier releases leave it as it was."""
    return f"{seq_record(head)} xxh3"


def stage_dense(where: VersionDirectory, overlay: Overlay, disk: Records) -> dict[str, bytes]:
    """Write the graphs of an overlay next to the valid ones. Returns the records that go with its rows.

    Loaded graphs get hard links: a rollback to a delta needs them again.
    """
    records = {}
    for head, brought in overlay.heads.items():
        assert brought.graph is not None
        dense, loaded = where.dense(head), where.dense_loaded(head)
        if disk.record(seq_record(head)) is None and files.exists(dense) and not files.exists(loaded):
            files.link_all([(dense, loaded)])
        files.publish_bytes(where.dense_to_come(overlay.hi, head), brought.graph)
        records[seq_record(head)] = str(overlay.hi).encode()
        records[digest_record(head)] = f"{overlay.hi} {xxhash.xxh3_64_hexdigest(brought.graph)}".encode()
    if overlay.says_of_dense:
        records[PASSED_OVER] = _encode(passed_over_after(passed_over(disk), overlay.heads, overlay.passed_over))
    return records


def show_staged(where: VersionDirectory, overlay: Overlay) -> None:
    """Make the graphs of an overlay valid, once its rows are in."""
    for head in overlay.heads:
        files.rename(where.dense_to_come(overlay.hi, head), where.dense(head))


def finish_dense(where: VersionDirectory, disk: Records) -> None:
    """Finish what a crash interrupted."""
    for seq, head, path in where.denses_to_come():
        if disk.record(seq_record(head)) == str(seq).encode():
            files.rename(path, where.dense(head))
        else:
            files.remove_file(path)


def passed_over(disk: Records) -> dict[str, str]:
    """Which newest graphs did not fit, and why, by head."""
    text = (disk.record(PASSED_OVER) or b"").decode(errors="replace")
    if not text.startswith("{"):  # only of the one without a name
        return {"": text} if text else {}
    try:
        return {str(head): str(why) for head, why in json.loads(text).items()}
    except ValueError as error:
        raise Corruption(f"the record {PASSED_OVER!r} is invalid ({error}): {text[:80]!r}") from error


def _encode(passed_over: Mapping[str, str]) -> bytes:
    return (json.dumps(passed_over) if passed_over.keys() - {""} else passed_over.get("", "")).encode()


def loaded_dense(where: VersionDirectory, disk: Records, head: str) -> Path | None:
    """A head's graph as it was loaded; None if it is gone."""
    if files.exists(where.dense_loaded(head)):
        return where.dense_loaded(head)
    return where.dense(head) if disk.record(seq_record(head)) is None and files.exists(where.dense(head)) else None


def heads_there(
    where: VersionDirectory, disk: Records | None, graphs: Iterable[str], loaded: Mapping[str, str]
) -> dict[str, str | None]:
    """The heads of a version, with the XXH3-64 of their graphs; None if it was not recorded. Corruption where the file
    of one is missing, of those that were loaded (`graphs`) and of those that deltas brought.

    `loaded` are the digests of loaded graphs; `disk` None: no delta has brought any. An empty file is a removed head
    only if that was recorded: it may have been cut off.
    """
    brought = map(_head_of_record, disk.records()) if disk is not None else ()
    if missing := sorted({*graphs, *brought} - {None, *where.denses()}):
        raise Corruption(
            f"{where.dense(missing[0])} is missing, a dense part of the version: restore it, or drop the version "
            "and load it again"
        )
    digests = {
        head: loaded.get(head) if disk is None else _digest(disk, head, loaded.get(head)) for head in where.denses()
    }
    return {
        head: digest
        for head, digest in digests.items()
        if digest != _OF_NONE and ((disk is not None and digest is not None) or where.dense(head).stat().st_size)
    }


def _digest(disk: Records, head: str, loaded: str | None) -> str | None:
    seq = disk.record(seq_record(head))
    if seq is None:
        return loaded
    brought_by, _, digest = (disk.record(digest_record(head)) or b"").partition(b" ")
    return digest.decode(errors="replace") if brought_by == seq else None
