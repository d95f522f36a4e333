"""`verify`: read back everything that is stored and say what is wrong with it.

Runs on the caller's thread beside serving; it only reads. Nobody waits for it: a version that is switched to or away from
meanwhile is read again from its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tierstore.engine.dense import check_dense
from tierstore.engine.model import Model
from tierstore.engine.version import VersionInfo
from tierstore.errors import Closed, NotFound, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.regular import read_regular
from tierstore.tiers.background import Pace
from tierstore.tiers.disk import DiskTier
from tierstore.types import Progress, ProgressFn, VerifyReport

_PAUSE_S = 0.01


def verify_store(models: Sequence[Model], progress: ProgressFn, share: Callable[[], float]) -> VerifyReport:
    """Check every block of every version against its checksum, row lengths and row counts, and every logged delta.

    `share` says how much of the time it may be at work.
    """
    pace = Pace(share)

    def tell(step: Progress) -> None:
        progress(step)
        pace.rest()

    versions = rows = nbytes = deltas = 0
    problems: list[str] = []
    for model in models:
        problems += [f"{model.name} version {number}: {why}" for number, why in sorted(model.damaged.items())]
        for info in model.infos():
            try:
                more_rows, more_bytes, wrong = _check_version(model, info, tell)
            except TierstoreError as error:
                model.check_open()
                if info not in model.infos():
                    continue  # dropped meanwhile
                more_rows, more_bytes, wrong = 0, 0, [f"{model.name} version {info.number}: {error}"]
            rows, nbytes, versions = rows + more_rows, nbytes + more_bytes, versions + 1
            problems += wrong
        read, wrong = model.check_log()
        deltas += read
        problems += wrong
    return VerifyReport(versions, rows, nbytes, deltas, tuple(problems))


def _check_version(model: Model, info: VersionInfo, progress: ProgressFn) -> tuple[int, int, list[str]]:
    """(rows, bytes, what is wrong) of one version."""
    while True:
        try:
            with model.reading(info.number) as disk:
                _check_beside(info)
                found = _check_rows(model.name, info, disk, progress)
            if info in model.infos():
                return found
            raise NotFound(f"version {info.number} of {model.name!r} was dropped")
        except Closed:  # somebody needed it otherwise
            model.check_open()
            time.sleep(_PAUSE_S)


def _check_beside(info: VersionInfo) -> None:
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


def _check_rows(model: str, info: VersionInfo, disk: DiskTier, progress: ProgressFn) -> tuple[int, int, list[str]]:
    nbytes, total = disk.bytes_on_disk(), sum(table["rows"] for table in info.tables.values())
    phase = f"verify {model} {info.number}"
    watermark = disk.watermark()
    lengths = {info.tables[name]["id"]: spec.row_bytes for name, spec in info.specs.items()}
    content = disk.verify(lengths, lambda done: progress(Progress(phase, done, max(done, total))))
    # of the disk, which moves with the rows; that of the version moves a little later
    untouched = disk.watermark() == info.manifest.delta_seq
    if watermark is not None and disk.watermark() == watermark:
        info.recounted({name: content[table["id"]].rows for name, table in info.tables.items()}, watermark)
    problems = []
    for name, table in info.tables.items():
        got = content[table["id"]]
        if untouched and (got.rows != table["rows"] or f"{got.digest:016x}" != table["digest"]):
            problems.append(
                f"{model} version {info.number}: table {name!r} reads back as {got.rows} rows, {table['rows']} were loaded"
            )
    return sum(table.rows for table in content.values()), nbytes, problems
