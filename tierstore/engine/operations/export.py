"""`export`: write what a model serves now, base plus deltas at one seq, as a snapshot.

Runs on a thread of low priority while the model serves; it only reads. A view is held until every table has an iterator
of that moment, a fraction of a second: until then no delta that comes later is folded. From then on deltas, folds and
switches go on as ever. The version that is read stays open until the export ends, also where another one is switched
to; but a switch back to it, or its drop, ends the export.

To a URL, shards are uploaded as they are finished. A built version is built of a snapshot that is removed then.

After a crash there is no `snapshot.json` or `built.json`, so nothing accepts what is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import chain
from pathlib import Path

import numpy as np

from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.deltas.dense import check_dense, recorded
from tierstore.engine.model import Model
from tierstore.engine.operations.aside import aside
from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import STABLE
from tierstore.engine.versions.hot_keys import load_keys
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, Conflict, Corruption, InvalidInput, StorageError
from tierstore.formats import files
from tierstore.formats.keys import from_codes
from tierstore.formats.names import BUILT_MANIFEST, TEMPORARY
from tierstore.formats.objects import is_url
from tierstore.formats.regular import read_regular
from tierstore.formats.row_times import TIME, TIME_BYTES, Times, as_rows, from_rows
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.reader import local_path
from tierstore.formats.snapshot.requests import ragged, read_request
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.formats.uploads import check_nothing_at, scratch_directory, upload_tree
from tierstore.ingest.build import build_version
from tierstore.kernels import codec
from tierstore.tiers.background import Pace
from tierstore.tiers.disk.merge import Changes, merged_blocks
from tierstore.types import ExportReport, Keys, KeyType, Progress, ProgressFn, Rows, StorageDtype, TableSpec, Vectors

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 20  # that all tables together may have read ahead
SCRATCH = f"{TEMPORARY}export-"  # begins the names of directories that a crash may leave
_LEAST_ROWS, _MOST_ROWS = 2048, 65536  # of a batch


@dataclass(frozen=True, slots=True)
class _Moment:
    """A version at one seq. `tables` has the rows of each by ascending code, of that moment, each to be read once.

    With each batch are the times of its rows, where the table has some.
    """

    version: Version
    seq: int
    dense: bytes | None
    tables: dict[str, Iterator[tuple[Keys, Rows, Times | None]]]


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
    """See `Store.export`; `target` is one that `new_target` has checked, `scratch` is where
    files are on the way to a URL.
    """
    work = _export if options.partitions is None else _export_built
    with _made(target) if isinstance(target, Path) else contextlib.nullcontext():
        return aside(
            model.state.shared.throttle,
            "export",
            lambda stops: work(model, target, options, scratch, progress, stops),
            cancelled,
        )


def new_target(target: str | Path, *, outside: Path, empty: bool = True) -> Path | str:
    """The path, absolute; or the URL, below which, if it is to be `empty`, there is nothing.

    InvalidInput for a path in the data directory `outside`.
    """
    if isinstance(target, str) and is_url(target):
        if empty:
            check_nothing_at(target)
        return target
    path = local_path(target).absolute()
    if path.resolve().is_relative_to(outside.resolve()):
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
    """Export a snapshot beside the target, and build that."""
    shared = model.state.shared

    def checked(step: Progress) -> None:
        _check_goes_on(model, None, stops)
        progress(step)

    with scratch_directory(target.parent if isinstance(target, Path) else scratch, SCRATCH) as beside:
        report = _export(model, beside / "snapshot", options, scratch, progress, stops)
        out = target if isinstance(target, Path) else beside / "built"
        build_version(
            open_source(beside / "snapshot"),
            out,
            partitions=options.partitions or 1,
            settings=shared.settings,
            aside=True,
            share=lambda: shared.throttle.share,
            progress=checked,
        )
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
    with _moment(model, options.version) as moment:
        info = moment.version.info
        number = info.number if options.as_version is None else options.as_version
        rows, total = 0, sum(count.rows for count in info.counts.values())
        with SnapshotWriter(target, model=model.name, version=number, delta_seq=moment.seq, scratch=scratch) as writer:
            for name, batches in moment.tables.items():
                spec = info.specs[name]
                table = writer.table(
                    name,
                    dim=spec.dim,
                    dtype=spec.dtype.value,
                    key=spec.key.value,
                    default=_default(moment.version, spec),
                    ttl_s=spec.ttl_s,
                    time_column=TIME if name in info.times_ids else None,
                )
                for keys, stored, times in batches:
                    table.write(from_codes(keys, spec.key), _vectors(stored, spec), times)
                    rows += len(keys)
                    progress(Progress("export", rows, max(rows, total)))
                    pace.sleep()
                    _check_goes_on(model, info.number, stops)
            _write_remaining(writer, moment)
    log.info("model %s: version %d at seq %d is exported to %s", model.name, info.number, moment.seq, target)
    return ExportReport(model.name, number, moment.seq, rows)


def _check_goes_on(model: Model, number: int | None, stops: Callable[[], bool]) -> None:
    """Closed where the export is to end, or version `number`, which it still reads, is needed otherwise."""
    model.state.live.check_open()
    if stops():
        raise Closed(f"the export of {model.name!r} was cancelled")
    if number is not None and model.state.retiring.is_awaited(number):
        raise Closed(
            f"the export of {model.name!r} ended: version {number} is being switched to or dropped; export again"
        )


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """A directory made for the block; removed with all that is in it if the block fails."""
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


@contextlib.contextmanager
def _moment(model: Model, wanted: int | str | None) -> Iterator[_Moment]:
    """What is served now. Its version stays open until the end of the block."""
    publisher = model.publisher
    if isinstance(wanted, int):
        model.catalogue.info(wanted)
    with contextlib.ExitStack() as stack:
        moment = None
        while moment is None:
            with publisher.hold_all() as served, contextlib.ExitStack() as pin:
                view = served.choose(model.name, STABLE if wanted is None else wanted, None)
                _check_keys(model.name, view)
                model.state.shared.placement.refusals.check("export", model=model.name, number=view.version)
                if pin.enter_context(publisher.pinned(view.version)) is view.open_version:  # not switched meanwhile
                    moment = _read(view, stack)
                    stack.push(pin.pop_all())
        yield moment


def _check_keys(model: str, view: View) -> None:
    for name, spec in view.open_version.specs.items():
        if spec.key is KeyType.STRING:
            raise InvalidInput(
                f"model {model!r} cannot be exported: table {name!r} has string keys, and the store has only their "
                "hashes. Keep the snapshot and the deltas that it was loaded from, or use integer keys"
            )


def _read(view: View, stack: contextlib.ExitStack) -> _Moment:
    """The moment of a view that is held. When this returns, all iterators stand, and the view may be released."""
    version = view.open_version
    row_bytes = sum(8 + spec.row_bytes for spec in version.specs.values())
    batch = max(_LEAST_ROWS, min(_MOST_ROWS, _READ_BYTES // max(1, row_bytes)))

    def standing(table_id: int, row_bytes: int) -> Iterator[tuple[Keys, Rows]]:
        stored = version.disk.scan(table_id, row_bytes, batch)
        stack.callback(stored.close)  # type: ignore[attr-defined]
        first = next(stored, None)  # only now its iterator stands
        return chain(() if first is None else (first,), stored)

    tables: dict[str, Iterator[tuple[Keys, Rows, Times | None]]] = {}
    with version.writing:  # else rows might expire between two of them
        for name, table in version.tables.items():
            overlays = view.overlays_of(name)
            changed = reduce(OverlayTable.merged, reversed(overlays)) if overlays else None
            rows = _with_changes(standing(table.table_id, table.spec.row_bytes), changed, None, batch)
            number = version.info.times_ids.get(name)
            if number is None:
                tables[name] = ((keys, stored, None) for keys, stored in rows)
            else:
                of_overlays = None if changed is None or changed.times is None else as_rows(changed.times)
                times = _with_changes(standing(number, TIME_BYTES), changed, of_overlays, batch)
                tables[name] = _in_step(name, rows, times)
    return _Moment(version, view.seq, _dense(view), tables)


def _with_changes(
    stored: Iterator[tuple[Keys, Rows]], changed: OverlayTable | None, rows: Rows | None, batch: int
) -> Iterator[tuple[Keys, Rows]]:
    """What is stored, as overlays have changed it; `rows` in place of those of the overlays."""
    if changed is None:
        yield from stored
        return
    for keys, merged, _ in merged_blocks(
        stored, _changes(changed, changed.rows if rows is None else rows, batch), batch
    ):
        if len(keys):
            yield keys, merged


def _changes(changed: OverlayTable, rows: Rows, batch: int) -> Iterator[Changes]:
    """What an overlay changes, by ascending code."""
    for start in range(0, len(changed.keys), batch):
        part = slice(start, start + batch)
        deleted = changed.deleted[part].astype(np.bool_)
        yield changed.keys[part], deleted, rows[part][~deleted]


def _in_step(
    table: str, rows: Iterator[tuple[Keys, Rows]], times: Iterator[tuple[Keys, Rows]]
) -> Iterator[tuple[Keys, Rows, Times | None]]:
    """Rows with the times of the same keys, in batches as the rows come. Corruption where the keys are not the same."""
    ahead, ahead_times = np.empty(0, np.int64), np.empty((0, TIME_BYTES), np.uint8)
    for keys, stored in rows:
        n = len(keys)
        while len(ahead) < n and (more := next(times, None)) is not None:
            ahead, ahead_times = np.concatenate([ahead, more[0]]), np.concatenate([ahead_times, more[1]])
        if not np.array_equal(ahead[:n], keys):
            raise Corruption(f"table {table!r}: its rows and the times of its rows are not of the same keys")
        yield keys, stored, from_rows(ahead_times[:n])
        ahead, ahead_times = ahead[n:], ahead_times[n:]


def _dense(view: View) -> bytes | None:
    """The ONNX file that the view serves, or would serve where the extra is installed.

    No fold replaces it while the view is held.
    """
    newest = next((overlay.dense for overlay in view.overlays if overlay.dense is not None), None)
    info = view.open_version.info
    if newest is not None or not info.has_dense:
        return newest
    try:
        content = read_regular(info.where.dense)
    except OSError as error:
        raise StorageError(f"cannot read {info.where.dense}: {error.strerror or error}") from error
    check_dense(info, content)
    return content


def _default(version: Version, spec: TableSpec) -> str | list[float]:
    """The default row of a table as it is answered: a mean stays the one of the load, whatever deltas changed since."""
    vector: list[float] = version.tables[spec.name].default.tolist()
    return "zeros" if spec.default == "zeros" else vector


def _vectors(rows: Rows, spec: TableSpec) -> Vectors:
    """The vectors that are stored as `rows`: of their own dtype if NumPy has it, else float32, from
    which a load makes those rows.
    """
    shape = len(rows), spec.dim
    half = spec.dtype is StorageDtype.FLOAT16
    vectors: Vectors = np.empty(shape, np.float16) if half else np.empty(shape, np.float32)
    codec.decode(np.ascontiguousarray(rows), spec.dtype, vectors)
    return vectors


def _write_remaining(writer: SnapshotWriter, moment: _Moment) -> None:
    """All but the rows: features, warm-up keys, the dense part and its recorded requests."""
    info = moment.version.info
    for feature in info.features.values():
        how = None if feature.hash is None else asdict(feature.hash)
        writer.feature(
            feature.name, table=feature.table, combiner=feature.combiner, padding_key=feature.padding_key, hash=how
        )
    for name, spec in info.specs.items():
        for keys in load_keys(info.where.warmup(name)):
            writer.warmup(name, from_codes(np.asarray(keys), spec.key))
    for path in recorded(info):
        writer.request(ragged(read_request(path, file=path.name)))
    if moment.dense is not None:
        writer.dense(moment.dense)
