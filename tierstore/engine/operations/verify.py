"""`verify`: read back everything that is stored and report its faults.

On the caller's thread while the models serve; it only reads. Nothing waits for it: a version that is switched to or
away from meanwhile is read again from its beginning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tierstore.engine.deltas.dense_parts import check_dense
from tierstore.engine.lifecycle.throttle import Throttle
from tierstore.engine.model import Model
from tierstore.engine.operations.golden import GoldenReport, check_kept
from tierstore.engine.versions.info import EXPIRED, VersionInfo
from tierstore.engine.versions.kept_strings import standing_strings, with_strings
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, Corruption, NotFound, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.colliding import NONE
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.regular import read_regular
from tierstore.formats.row_times import TIME_BYTES
from tierstore.formats.snapshot.checksum import checksum
from tierstore.status import golden_text
from tierstore.tiers.background import Pace
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Progress, ProgressFn, VerifyReport

_PAUSE_S = 0.01


def verify_store(models: Sequence[Model], where: Path, progress: ProgressFn, throttle: Throttle) -> VerifyReport:
    """Check every block of every version against its checksum, row lengths and row counts, and every logged delta.

    If the data directory `where` has no version, that is a problem: nothing was checked.
    """
    with throttle.at_work("verify"):
        report = _verify(models, progress, Pace(lambda: throttle.share))
    elsewhere = any(not model.state.shared.placement.refusals.allow("verify_rows") for model in models)
    if report.versions or report.problems or elsewhere:
        return report
    return replace(report, problems=(f"nothing was verified: {where} has no complete version of any model",))


def _verify(models: Sequence[Model], progress: ProgressFn, pace: Pace) -> VerifyReport:

    def report(step: Progress) -> None:
        progress(step)
        pace.sleep()

    versions = rows = nbytes = deltas = 0
    problems: list[str] = []
    golden: list[str] = []
    for model in models:
        problems += [f"{model.name} version {number}: {why}" for number, why in sorted(model.catalogue.damaged.items())]
        is_here = model.state.shared.placement.refusals.allow("verify_rows")
        for info in model.catalogue.infos() if is_here else ():
            try:
                more_rows, more_bytes, wrong, examples = _check_version(model, info, report)
            except TierstoreError as error:
                model.state.live.check_open()
                if info not in model.catalogue.infos():
                    continue  # dropped meanwhile
                more_rows, more_bytes, examples = 0, 0, None
                wrong = [f"{model.name} version {info.number}: {error}"]
            rows, nbytes, versions = rows + more_rows, nbytes + more_bytes, versions + 1
            problems += wrong
            if examples is not None:
                golden.append(f"{model.name} version {info.number}: {examples}")
        read, wrong = _check_log(model)
        deltas += read
        problems += wrong
    return VerifyReport(versions, rows, nbytes, deltas, tuple(problems), tuple(golden))


def _check_version(model: Model, info: VersionInfo, progress: ProgressFn) -> tuple[int, int, list[str], str | None]:
    """(rows, bytes, faults, golden examples) of one version."""
    while True:
        try:
            with model.opener.reading_version(info.number) as version:
                _check_files(model, info)
                rows, nbytes, problems = _check_rows(model.name, info, version.disk, progress)
                problems += _check_strings(model.name, version, progress)
                found = rows, nbytes, problems
                examples = check_kept(model, info, version, progress)
            if info in model.catalogue.infos():
                return *found, _examples_text(examples)
            raise NotFound(f"version {info.number} of {model.name!r} was dropped")
        except Closed:  # a switch or a drop needed it
            model.state.live.check_open()
            time.sleep(_PAUSE_S)


def _examples_text(examples: GoldenReport | int | None) -> str | None:
    if examples is None:
        return None
    return f"not run, at seq {examples}" if isinstance(examples, int) else golden_text(examples.document())


def _check_files(model: Model, info: VersionInfo) -> None:
    """Corruption if the record or a dense part is not what was written."""
    files.read_json(info.where.record)
    for head, expected in info.loaded_digests.items():
        _check_loaded_dense(info.where.dense_loaded(head), expected)
    for head in list(info.heads):
        try:
            _check_dense(info, head)
        except StorageError:  # or a fold is replacing it, in two steps
            with model.publisher.pinned(info.number) as version, nullcontext() if version is None else version.writing:
                _check_dense(info, head)


def _check_dense(info: VersionInfo, head: str) -> None:
    path = info.where.dense(head)
    try:
        if head in info.heads:
            check_dense(info, head, read_regular(path))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _check_loaded_dense(path: Path, expected: str) -> None:
    """The same for a dense part as it was loaded, once a delta has brought another one."""
    if not files.exists(path):
        return
    try:
        digest = checksum(path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    if digest != expected:
        raise Corruption(
            f"{path} does not match its checksum, and a rollback to a delta needs it: load the version again for that"
        )


def _check_log(model: Model) -> tuple[int, list[str]]:
    """(entries read, faults) of the log, and of the records that the next start reads."""
    log, state_file = model.state.log, model.state.file
    problems, count = [f"{model.name}: {why}" for why in log.damage], 0
    for check in (state_file.check, log.check):
        try:
            with model.state.live.write:
                check()
        except TierstoreError as error:
            problems.append(f"{model.name}: {error}")
    for seq in log.held():
        try:
            read_delta(log.read(seq))
            count += 1
        except NotFound:
            continue  # pruned meanwhile
        except TierstoreError as error:
            problems.append(f"{model.name}: {error}")
    return count, problems


def _check_strings(model: str, version: Version, progress: ProgressFn) -> list[str]:
    """The faults of kept strings: each row must have its own, and each block must be as it was written."""
    info, problems = version.info, []
    phase, done = f"verify strings of {model} {info.number}", 0
    for name in info.strings_ids:
        with contextlib.ExitStack() as stack:
            try:
                with version.writing:
                    rows = version.disk.scan(info.tables[name]["id"], info.specs[name].row_bytes)
                    stack.callback(rows.close)  # type: ignore[attr-defined]
                    first = next(rows, None)  # only now its iterator is positioned
                    strings = standing_strings(info, version.disk, name, None, stack)
                    colliding = version.colliding.get(name, NONE)
                batches = ((keys, stored, None) for keys, stored in chain(() if first is None else (first,), rows))
                for keys, *_ in with_strings(name, batches, strings, colliding):
                    done += len(keys)
                    progress(Progress(phase, done, max(done, sum(count.rows for count in info.counts.values()))))
                for _ in strings:  # those without a row
                    progress(Progress(phase, done, done))
            except Corruption as error:
                problems.append(f"{model} version {info.number}: {error}")
    return problems


def _check_rows(model: str, info: VersionInfo, disk: DiskTier, progress: ProgressFn) -> tuple[int, int, list[str]]:
    nbytes, total = disk.bytes_on_disk(), sum(table["rows"] for table in info.tables.values())
    phase = f"verify {model} {info.number}"
    watermark, expired = disk.watermark(), disk.record(EXPIRED)
    lengths = {info.tables[name]["id"]: spec.row_bytes for name, spec in info.specs.items()}
    lengths |= dict.fromkeys(info.times_ids.values(), TIME_BYTES)
    content = disk.verify(lengths, lambda done: progress(Progress(phase, done, max(done, total))))
    # the disk's watermark, which moves with the rows; the version's moves a little later
    untouched = disk.watermark() == info.manifest.delta_seq and disk.record(EXPIRED) is None
    still = disk.watermark() == watermark and disk.record(EXPIRED) == expired
    if watermark is not None and still:
        info.recounted({name: content[table["id"]].rows for name, table in info.tables.items()}, watermark)
    problems = []
    for name, table in info.tables.items():
        got = content[table["id"]]
        if untouched and (got.rows != table["rows"] or f"{got.digest:016x}" != table["digest"]):
            problems.append(
                f"{model} version {info.number}: table {name!r} reads back as {got.rows} rows, {table['rows']} were "
                "loaded"
            )
        if still and name in info.times_ids and content[info.times_ids[name]].rows != got.rows:
            problems.append(
                f"{model} version {info.number}: table {name!r} has {got.rows} rows and "
                f"{content[info.times_ids[name]].rows} times of rows"
            )
    return sum(content[table["id"]].rows for table in info.tables.values()), nbytes, problems
