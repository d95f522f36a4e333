"""`export`: write what a model serves now, base plus deltas at one seq, as a snapshot.

On a thread of low priority while the model serves; it only reads, in one `full_scan`. To a URL, shards are uploaded as
they are finished. A built version is built from a snapshot, which is then removed.

After a crash there is no `snapshot.json` or `built.json`, so nothing accepts the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore.engine.deltas.dense_parts import recorded
from tierstore.engine.model import Model
from tierstore.engine.operations.full_scan import FullScan, check_goes_on, full_scan
from tierstore.engine.operations.golden import examples_of, index_of
from tierstore.engine.operations.low_priority import low_priority
from tierstore.engine.reads.view import View
from tierstore.engine.versions.hot_keys import load_keys
from tierstore.engine.versions.kept_strings import why_missing, with_strings
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict, InvalidInput, StorageError
from tierstore.formats import files
from tierstore.formats.colliding import NONE
from tierstore.formats.keys import from_codes
from tierstore.formats.names import BUILT_MANIFEST, TEMPORARY, DataDirectory
from tierstore.formats.objects import is_url
from tierstore.formats.row_times import TIME, Times
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.reader import local_path
from tierstore.formats.snapshot.recorded_requests import ragged, read_request
from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
from tierstore.formats.uploads import check_nothing_at, scratch_directory, upload_tree
from tierstore.ingest.build import build_version
from tierstore.ingest.load_plan import LoadWork
from tierstore.kernels import codec
from tierstore.tiers.background import Pace
from tierstore.types import ExportReport, Keys, KeyType, Progress, ProgressFn, Rows, StorageDtype, TableSpec, Vectors

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 20  # that all tables together may read ahead
SCRATCH = f"{TEMPORARY}export-"  # prefix of directories that a crash may leave
_LEAST_ROWS, _MOST_ROWS = 2048, 65536  # of a batch


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """`version` and `as_version` as for `Store.export`; `partitions` of a built version, None for a snapshot."""

    version: int | str | None = None
    as_version: int | None = None
    partitions: int | None = None


def export(
    model: Model,
    target: Path | str,
    options: ExportOptions,
    scratch: Path,
    progress: ProgressFn,
    cancelled: threading.Event | None,
) -> ExportReport:
    """See `Store.export`; `target` was checked by `new_target`; `scratch` holds files on their way to a URL."""
    work = _export if options.partitions is None else _export_built
    with _made(target) if isinstance(target, Path) else contextlib.nullcontext():
        return low_priority(
            model.state.shared.throttle,
            "export",
            lambda stops: work(model, target, options, scratch, progress, stops),
            cancelled,
        )


def new_target(target: str | Path, *, outside: Path, empty: bool = True) -> Path | str:
    """The absolute path, or the URL; an `empty` URL must have nothing below it.

    InvalidInput for a path in the data directory `outside`, except in its `exports`.
    """
    if isinstance(target, str) and is_url(target):
        if empty:
            check_nothing_at(target)
        return target
    path = local_path(target).absolute()
    resolved, exports = path.resolve(), DataDirectory(outside).exports.resolve()
    if resolved.is_relative_to(outside.resolve()) and not (resolved != exports and resolved.is_relative_to(exports)):
        raise InvalidInput(f"{path} is in the data directory; expected a directory outside of it")
    return path


def _export_built(
    model: Model,
    target: Path | str,
    options: ExportOptions,
    scratch: Path,
    progress: ProgressFn,
    stops: Callable[[], bool],
) -> ExportReport:
    """Export a snapshot beside the target, and build a version of it there."""
    shared = model.state.shared

    def checked(step: Progress) -> None:
        check_goes_on("export", model, None, stops)
        progress(step)

    with scratch_directory(target.parent if isinstance(target, Path) else scratch, SCRATCH) as beside:
        report = _export(model, beside / "snapshot", options, scratch, progress, stops)
        out = target if isinstance(target, Path) else beside / "built"
        settings, share = shared.settings, lambda: shared.throttle.share
        work = LoadWork(settings.load_memory, settings.load_workers, aside=True, share=share, progress=checked)
        build_version(open_source(beside / "snapshot"), out, options.partitions or 1, work, settings.string_keys_size)
        if isinstance(target, str):
            upload_tree(out, target, BUILT_MANIFEST)
    log.info("model %s: version %d is built in %s", model.name, report.version, target)
    return report


def _export(
    model: Model,
    target: Path | str,
    options: ExportOptions,
    scratch: Path,
    progress: ProgressFn,
    stops: Callable[[], bool],
) -> ExportReport:
    throttle = model.state.shared.throttle
    pace = Pace(lambda: throttle.share)

    def check(view: View) -> None:
        model.state.shared.placement.refusals.check("export", model=model.name, number=view.version)
        _check_keys(model.name, view)

    with full_scan(model, options.version, check, with_strings=True) as scan:
        info = scan.version.info
        number = info.number if options.as_version is None else options.as_version
        rows, total = 0, sum(count.rows for count in info.counts.values())
        with SnapshotWriter(target, model=model.name, version=number, delta_seq=scan.seq, scratch=scratch) as writer:
            tables: dict[str, TableWriter] = {}
            warm: dict[str, Any] = {}
            for name, batches in scan.tables.items():
                spec = info.specs[name]
                table = tables[name] = writer.table(
                    name,
                    dim=spec.dim,
                    dtype=spec.dtype.value,
                    key=spec.key.value,
                    default=_default(scan.version, spec),
                    ttl_s=spec.ttl_s,
                    time_column=TIME if name in info.times_ids else None,
                )
                of_table = _Warm(load_keys(info.where.warmup(name)))
                for codes, keys, stored, times in _keyed(scan, name, batches):
                    table.write(keys, _vectors(stored, spec), times)
                    of_table.note(codes, keys)
                    rows += len(codes)
                    progress(Progress("export", rows, max(rows, total)))
                    pace.sleep()
                    check_goes_on("export", model, info.number, stops)
                warm[name] = of_table.keys(spec)
            _write_remaining(writer, scan, tables, warm)
    log.info("model %s: version %d at seq %d is exported to %s", model.name, info.number, scan.seq, target)
    return ExportReport(model.name, number, scan.seq, rows)


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """A directory made for the block; removed with its contents if the block fails."""
    files.make_dir(directory.parent)
    try:
        os.mkdir(directory)
    except FileExistsError:
        raise Conflict(f"{directory} exists already; expected a directory that does not") from None
    except OSError as error:
        raise StorageError(f"cannot make {directory}: {error.strerror or error}") from error
    try:
        files.fsync_dir(directory.parent)
        yield
    except BaseException:
        with contextlib.suppress(StorageError):
            files.remove_tree(directory)
        raise


def _check_keys(model: str, view: View) -> None:
    for name in view.open_version.specs:
        if (why := why_missing(view.open_version.info, name)) is not None:
            raise InvalidInput(
                f"version {view.version} of {model!r} cannot be exported: table {name!r} has string keys, and {why}"
            )


def _keyed(
    scan: FullScan, table: str, batches: Iterator[tuple[Keys, Rows, Times | None]]
) -> Iterator[tuple[Keys, Any, Rows, Times | None]]:
    """Codes, keys, rows and times of a table's rows."""
    if table in scan.strings:
        return with_strings(table, batches, scan.strings[table], scan.colliding.get(table, NONE))
    kind = scan.version.specs[table].key
    return ((codes, from_codes(codes, kind), rows, times) for codes, rows, times in batches)


class _Warm:
    """A table's warm-up keys, which the version has as codes. Strings of those that have a row are found."""

    def __init__(self, codes: Sequence[Keys]) -> None:
        self._codes = codes
        self._wanted = np.unique(np.concatenate([np.empty(0, np.int64), *codes]))
        self._found: list[tuple[Keys, pa.Array]] = []

    def note(self, codes: Keys, keys: Any) -> None:
        """Note keys of rows, if they are strings."""
        if not len(self._wanted) or not isinstance(keys, pa.Array):
            return
        there = np.flatnonzero(np.isin(codes, self._wanted))
        if len(there):
            self._found.append((codes[there], keys.take(pa.array(there))))

    def keys(self, spec: TableSpec) -> list[Any]:
        """The keys, in the order of the snapshot."""
        if spec.key is not KeyType.STRING:
            return [from_codes(np.asarray(codes), spec.key) for codes in self._codes]
        if not self._found:
            return []
        there = np.concatenate([codes for codes, _ in self._found])  # ascending, as rows are
        strings = pa.concat_arrays([of for _, of in self._found])
        known = [codes[np.isin(codes, there)] for codes in self._codes]
        return [strings.take(pa.array(np.searchsorted(there, codes))) for codes in known if len(codes)]


def _default(version: Version, spec: TableSpec) -> str | list[float]:
    """A table's default row as it is answered: a mean stays that of the load, whatever deltas changed since."""
    vector: list[float] = version.tables[spec.name].default.tolist()
    return "zeros" if spec.default == "zeros" else vector


def _vectors(rows: Rows, spec: TableSpec) -> Vectors:
    """The vectors that are stored as `rows`, in their own dtype if NumPy has it, else as float32 from which a load
    makes these rows.
    """
    shape = len(rows), spec.dim
    half = spec.dtype is StorageDtype.FLOAT16
    vectors: Vectors = np.empty(shape, np.float16) if half else np.empty(shape, np.float32)
    codec.decode(np.ascontiguousarray(rows), spec.dtype, vectors)
    return vectors


def _write_remaining(
    writer: SnapshotWriter, scan: FullScan, tables: Mapping[str, TableWriter], warm: Mapping[str, list[Any]]
) -> None:
    """Write everything but the rows: features, warm-up keys, the dense parts, their recorded requests and examples."""
    info = scan.version.info
    for feature in info.features.values():
        how = None if feature.hash is None else feature.hash.document()
        writer.feature(
            feature.name, table=feature.table, combiner=feature.combiner, padding_key=feature.padding_key, hash=how
        )
    for name, columns in warm.items():
        for keys in columns:
            writer.warmup(name, keys)
    for head in {"": None, **scan.graphs}:
        for path in recorded(info, head):
            writer.request(ragged(read_request(path, file=path.name)), head=head)
    for head, graph in scan.graphs.items():
        writer.dense(graph, head=head)
    if scan.seq == info.manifest.delta_seq and (index := index_of(info)) is not None:  # else the answers are others
        for entry, example in examples_of(info, index):
            writer.golden(example.inputs, example.expected, rtol=entry.rtol, atol=entry.atol, head=entry.head)
        for name in index.incomplete:
            tables[name].is_incomplete = True
