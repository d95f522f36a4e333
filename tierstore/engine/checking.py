"""`verify`: read back everything that is stored and say what is wrong with it.

Runs on the caller's thread beside serving; it only reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.engine.dense import check_dense
from tierstore.engine.model import Model
from tierstore.engine.version import Version, VersionInfo
from tierstore.errors import StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.regular import read_regular
from tierstore.types import Progress, ProgressFn, VerifyReport


def verify_store(models: Sequence[Model], progress: ProgressFn) -> VerifyReport:
    """Check every block of every version against its checksum, row lengths and row counts, and every logged delta."""
    versions = rows = nbytes = deltas = 0
    problems: list[str] = []
    for model in models:
        problems += [f"{model.name} version {number}: {why}" for number, why in sorted(model.damaged.items())]
        for number in model.versions:
            try:
                with model.opened(number) as version:
                    _check_files(version.info)
                    rows += _check_version(model.name, version, progress, problems)
                    nbytes += version.disk.bytes_on_disk()
            except TierstoreError as error:
                if number not in model.versions:
                    continue  # dropped meanwhile
                problems.append(f"{model.name} version {number}: {error}")
            versions += 1
        read, wrong = model.check_log()
        deltas += read
        problems += wrong
    return VerifyReport(versions, rows, nbytes, deltas, tuple(problems))


def _check_files(info: VersionInfo) -> None:
    """Corruption where the record or the dense part is not what was written."""
    files.read_json(info.where.record)
    while info.has_dense:
        expected = info.dense_digest
        try:
            check_dense(info, read_regular(info.where.dense))
        except OSError as error:
            if expected != info.dense_digest:  # a newer one took its place meanwhile
                continue
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot read {info.where.dense}: {error.strerror or error}") from error
        return


def _check_version(model: str, version: Version, progress: ProgressFn, problems: list[str]) -> int:
    total = sum(table.rows for table in version.tables.values())
    phase = f"verify {model} {version.number}"
    lengths = {table.table_id: table.spec.row_bytes for table in version.tables.values()}
    content = version.disk.verify(lengths, lambda done: progress(Progress(phase, done, max(done, total))))
    for name, table in version.tables.items():
        got = content[table.table_id]
        # of the disk, which moves with the rows; that of the version moves a little later
        untouched = version.disk.watermark() == version.info.manifest.delta_seq
        if untouched and (got.rows != table.rows or f"{got.digest:016x}" != version.info.tables[name]["digest"]):
            problems.append(
                f"{model} version {version.number}: table {name!r} reads back as {got.rows} rows, {table.rows} were loaded"
            )
    return sum(table.rows for table in content.values())
