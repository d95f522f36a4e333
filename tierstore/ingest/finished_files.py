"""Finished files of a bulk load: copied, checked, ingested and read back. See `tasks.py`.

In a helper process, one task at a time, on its main thread. What a crash leaves lies in the load's own directory; the
tasks `CheckRun` and `CheckFile` find out whether it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from tierstore.errors import Corruption, SnapshotError
from tierstore.formats.files import drop_from_cache, make_dir, publish
from tierstore.formats.keys import are_own
from tierstore.formats.objects import ObjectPath
from tierstore.formats.regular import open_regular
from tierstore.formats.snapshot.reader import Snapshot, naming
from tierstore.ingest.runs import ReportRows
from tierstore.ingest.tasks import Checked, CheckFile, CopyFile, Ingest, Ingested, Merged, ReadBack, ReadFile
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import BASES, base_record
from tierstore.tiers.disk.sealed_blocks import HEADER_BYTES
from tierstore.tiers.disk.sealed_file import Opened, SealedFile, open_sealed, read_blocks, write_sealed_parts
from tierstore.tiers.disk.sst import SstFile, file_xxh3, write_sst
from tierstore.tiers.disk.tier import DiskTier, TableContent
from tierstore.types import Keys, Partitions, Rows

_BLOCK_CACHE_BYTES = 8 << 20
_READ_BYTES = 4 << 20
_COPY_BYTES = 8 << 20


def ingest(task: Ingest) -> Ingested:
    """Make the disk tier and ingest all files in one step. In a helper, because RocksDB would block requests meanwhile."""
    kind = SealedFile if task.base == "sealed" else SstFile
    scratch = make_dir(task.scratch)
    files = [kind(_linked(Path(path), scratch), xxh3, size, entries) for path, xxh3, size, entries in task.files]
    records = {name: value.encode() for name, value in task.records.items()}
    if task.base == "sealed":
        records |= base_record(files, task.parts)
    last = write_sst(scratch / "records", records=records, delta=True)
    reader = ReaderPool(1)
    disk = BASES[task.base].create(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader)
    try:
        disk.ingest([*files, last])
    finally:
        disk.close()
        reader.close()
    scratch.rmdir()
    return Ingested(len(files))


def _linked(path: Path, folder: Path) -> Path:
    """A hard link to a file, for the disk tier to move in. The original name stays until the load is over.

    Where the file system has no links, the file itself is moved, and a load that is broken off after that begins again.
    """
    with contextlib.suppress(OSError):
        os.link(path, folder / path.name)
        return folder / path.name
    return path


def copy_file(snapshot: Snapshot, task: CopyFile, report: ReportRows) -> Merged:
    """Copy a file durably, by system calls that may share its blocks, and read it back from the drive."""
    if task.own is not None:
        return _copy_own(snapshot, task, Partitions.parse(task.own), report)
    check = CheckFile(task.out, task.base, task.rows, task.digest, task.xxh3, task.bytes)

    def is_whole(path: Path) -> bool:
        return check_file(replace(check, path=str(path)), report).whole

    copy_whole(snapshot, task.source, task.bytes, Path(task.out), is_whole)
    return Merged(task.rows, task.digest, task.xxh3, task.bytes, task.rows)


def copy_whole(snapshot: Snapshot, name: str, size: int, out: Path, is_whole: Callable[[Path], bool]) -> None:
    """Copy a file durably, and read it back from the drive, by `is_whole`. SnapshotError if it is damaged, Corruption if
    only the copy is.
    """
    with publish(out) as file:
        copy_bytes(snapshot, name, size, file)
    if is_whole(out):
        return
    path = snapshot.file(name)
    if isinstance(path, ObjectPath) or not is_whole(path):
        raise SnapshotError("is damaged; copy or build it again", file=name)
    raise Corruption(f"{out}: what was read back differs from what was copied: do not trust this disk")


def _copy_own(snapshot: Snapshot, task: CopyFile, own: Partitions, report: ReportRows) -> Merged:
    """Copy a file, and then write the rows of some partitions of it; both are read back from the drive."""
    out, whole = Path(task.out), replace(task, out=f"{task.out}.whole", own=None)
    copy_file(snapshot, whole, report)
    count = digest = 0
    source = open_sealed(Path(whole.out), xxh3=task.xxh3, size=task.bytes)

    def parts() -> Iterator[tuple[Keys, Rows]]:
        nonlocal count, digest
        for keys, rows in _blocks(source):
            mine = are_own(keys, own)
            keys, rows = keys[mine], rows[mine]
            count, digest = count + len(keys), (digest + digest_rows(keys, rows)) % 2**64
            if len(keys):
                yield keys, rows

    try:
        own_rows = parts()
        first = next(own_rows, None)
        if first is None:
            return Merged(0, 0, None, 0, 0)
        made = write_sealed_parts(out, source.table_id, source.row_bytes, chain((first,), own_rows))
    finally:
        os.close(source.fd)
        os.unlink(whole.out)
    if not check_file(CheckFile(task.out, "sealed", count, digest, made.xxh3, made.bytes), lambda _: None).whole:
        raise Corruption(f"{out}: what was read back differs from what was written: do not trust this disk")
    return Merged(count, digest, made.xxh3, made.bytes, made.entries)


def copy_bytes(snapshot: Snapshot, name: str, size: int, out: BinaryIO) -> None:
    """Copy a file of so many bytes, by system calls that may share its blocks. SnapshotError where it is shorter."""
    with naming(name):
        opened = open_regular(snapshot.file(name))
    with opened as source:
        _copy(source, out, name, size)


def _copy(source: BinaryIO, out: BinaryIO, name: str, remaining: int) -> None:
    copy: Callable[[BinaryIO, BinaryIO, int], int] = _copy_range
    while remaining:
        try:
            copied = copy(source, out, min(_COPY_BYTES, remaining))
        except io.UnsupportedOperation:  # an object
            copy = partial(_write, name)
            continue
        except OSError as error:
            if copy is _send or error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            copy = _send  # between two kinds of file systems
            continue
        if not copied:
            raise SnapshotError("is damaged: it ends too early; copy or build it again", file=name)
        remaining -= copied


def _copy_range(source: BinaryIO, out: BinaryIO, size: int) -> int:
    return os.copy_file_range(source.fileno(), out.fileno(), size)


def _send(source: BinaryIO, out: BinaryIO, size: int) -> int:
    return os.sendfile(out.fileno(), source.fileno(), None, size)


def _write(name: str, source: BinaryIO, out: BinaryIO, size: int) -> int:
    with naming(name):
        data = source.read(size)
    return out.write(data)


def check_file(task: CheckFile, report: ReportRows) -> Checked:
    """Read a whole finished file from the drive, and compare it with its size, digest and checksum when it was made."""
    path = Path(task.path)
    try:
        if path.stat().st_size != task.bytes:
            return Checked(False)
        drop_from_cache(path)
        if task.base == "sealed":
            content = read_file(ReadFile(task.path, task.xxh3, task.bytes), report)
            return Checked((content.rows, content.digest) == (task.rows, task.digest))
        whole = file_xxh3(path) == task.xxh3
    except (Corruption, FileNotFoundError):
        return Checked(False)
    report(task.rows)
    return Checked(whole)


def read_file(task: ReadFile, report: ReportRows) -> TableContent:
    """Read one file of what was ingested, every block against its checksum."""
    file = open_sealed(Path(task.path), xxh3=task.xxh3, size=task.bytes)
    try:
        count = digest = 0
        for keys, rows in _blocks(file):
            count, digest = count + len(keys), (digest + digest_rows(keys, rows)) % 2**64
            report(len(keys))
        return TableContent(count, 0, digest)
    finally:
        os.close(file.fd)


def _blocks(file: Opened) -> Iterator[tuple[Keys, Rows]]:
    """Keys and rows of all of a file, some blocks at a time."""
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at_once, floor = max(1, _READ_BYTES // file.block_bytes), None
    for block in range(0, len(file.first_keys), at_once):
        ahead = HEADER_BYTES + (block + at_once) * file.block_bytes  # the drive reads on while this block is checked
        os.posix_fadvise(file.fd, ahead, _READ_BYTES, os.POSIX_FADV_WILLNEED)
        keys, rows = read_blocks(file, block, min(block + at_once, len(file.first_keys)), floor)
        floor = int(keys[-1])
        yield keys, rows


def read_back(task: ReadBack, report: ReportRows) -> TableContent:
    """Read a range of what was ingested, every block against its checksum."""
    reader = ReaderPool(1)
    disk = DiskTier.open(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader, read_only=True)
    try:
        return disk.sum_up(task.table_id, task.row_bytes, task.low, task.high, report=report)
    finally:
        disk.close()
        reader.close()
