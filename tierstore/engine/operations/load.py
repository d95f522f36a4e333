"""Loading a snapshot while others serve: build, ingest, verify, record, and then activate unless the caller declines.

On the caller's thread; the heavy work is in the helper processes of `ingest/`. A crash or a cancelled load leaves a
directory, from which a load of the same snapshot goes on. On other errors it is removed at once. Once the record is
published the version is kept, even if the switch to it fails, unless the snapshot then turns out to be bad.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.operations.golden import check_loaded
from tierstore.engine.placement import Building, LoadTarget
from tierstore.engine.versions.info import GOLDEN, VersionInfo
from tierstore.errors import InvalidInput, LoadCancelled, SnapshotError
from tierstore.formats import files
from tierstore.formats.names import GOLDEN_INDEX, VersionDirectory
from tierstore.formats.snapshot.golden import read_example
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.formats.snapshot.recorded_requests import read_request
from tierstore.ingest.bulkload import BulkLoad, can_go_on
from tierstore.ingest.load_plan import FileSpec, LoadWork
from tierstore.ingest.results import BaseBuild
from tierstore.ingest.side_files import copy_side_files
from tierstore.predict.binding import Bindings
from tierstore.predict.session import DenseCounts
from tierstore.tiers.background import yield_to_requests
from tierstore.types import Partitions, Progress, ProgressFn

log = logging.getLogger(__name__)


def load(
    model: Model,
    snapshot: Snapshot,
    target: LoadTarget,
    *,
    activate: bool,
    aside: bool,
    progress: ProgressFn,
    cancelled: threading.Event | None,
) -> int:
    """Load `snapshot` as a version of `model`. Returns the version. An error never changes what serves.

    With `aside` it leaves half of the processors to what serves.
    """
    manifest, shared = snapshot.manifest, model.state.shared
    number, settings = manifest.version, shared.settings

    def may_go_on() -> None:
        if cancelled is not None and cancelled.is_set():
            raise LoadCancelled("the load was cancelled")

    model.state.room.check_free("a load")
    _check_dense(snapshot, shared, may_go_on)
    identity = snapshot.identity()
    may_go_on()
    with shared.throttle.at_work("load"), model.loads.claim(number, manifest.delta_seq, identity, activate) as note:

        def report(step: Progress) -> None:
            may_go_on()
            model.state.room.check_now_and_then("the load")
            note(step)
            progress(step)

        here = number in model.catalogue  # then it was loaded before, and not switched to
        if not here:
            where = model.catalogue.where(number)
            target.claim(snapshot, identity)
            work = LoadWork(
                settings.load_memory, settings.load_workers, aside, lambda: shared.throttle.share,
                keep=settings.load_retention_s > 0, cancelled=cancelled,
            )  # fmt: skip
            building = partial(_built, where.build, FileSpec(target.base, keep_times=target.keep_times), work)
            try:
                here = _bring(model, snapshot, identity, target, where, building, report)
            except BaseException as error:
                if not can_go_on(error):
                    target.abandon(number, error)
                raise
            files.remove_tree(where.build)  # not before: a crash in between would cost the whole load
            if here:
                model.catalogue.add(VersionInfo(where))
        if activate and here:
            target.activate(number, report)
    if activate and not here:  # this node serves what another one has loaded, once that is not claimed any more
        target.activate(number, progress)
    return number


def _bring(
    model: Model,
    snapshot: Snapshot,
    identity: str,
    target: LoadTarget,
    where: VersionDirectory,
    building: Building,
    progress: ProgressFn,
) -> bool:
    """Bring rows and side files to their places, try the version, and publish it. False if another node has done so."""
    build = target.place(building, where, snapshot, progress)
    if build is None:
        return False
    progress(Progress("side files"))
    copy_side_files(snapshot, where, build.own)
    snapshot.check_unchanged(identity)
    progress(Progress("side files"))
    model.state.live.check_open()
    record = target.record(where, build, snapshot.manifest)
    if (golden := check_loaded(model, VersionInfo(where, record=record), progress)) is not None:
        record[GOLDEN] = golden.document()
    return target.publish(where, snapshot.manifest.version, record)


@contextlib.contextmanager
def _built(
    out_dir: Path,
    spec: FileSpec,
    work: LoadWork,
    snapshot: Snapshot,
    own: Partitions | None,
    *,
    progress: ProgressFn,
    began_s: int | None = None,
) -> Iterator[tuple[BulkLoad, BaseBuild]]:
    """`Building`: the base's files, made in helper processes."""
    spec, work = replace(spec, own=own, began_s=began_s), replace(work, progress=progress)
    with BulkLoad(snapshot, out_dir, spec, work) as bulk:
        build, of = bulk.build(), snapshot.manifest
        if any(build.kept_rows.values()):
            log.info("model %s: version %d goes on: rows not done again: %s", of.model, of.version, build.kept_rows)
        yield bulk, build


def _check_dense(snapshot: Snapshot, shared: Shared, may_go_on: Callable[[], None]) -> None:
    """Refuse dense parts that could not be served, and requests that cannot be read, before rows are built."""
    golden: dict[str, set[str]] = {}  # what is expected, by head
    for entry, path in snapshot.golden_paths():
        may_go_on()
        example = read_example(path, file=entry.path)
        golden.setdefault(entry.head, set()).update(example.expected)
    features = snapshot.manifest.feature_specs()
    for head, names in golden.items():
        if head not in snapshot.manifest.graphs and (scores := names - features.keys()):
            what = f"head {head!r}, which" if head else "a dense part, and the snapshot"
            raise SnapshotError(
                f"golden examples: {min(scores)!r} is no feature, so it would be an output of {what} has none",
                file=GOLDEN_INDEX,
            )
    for head in snapshot.manifest.recorded:
        for name, path in snapshot.request_paths(head):
            may_go_on()
            read_request(path, file=name)
    checked = [
        _check_head(snapshot, head, shared, may_go_on, golden.get(head, set()) - features.keys())
        for head in snapshot.manifest.graphs
    ]
    taken = [bindings.features for bindings in checked if bindings is not None]
    if taken and (unused := [name for name in features if not any(name in of for of in taken)]):
        log.info(
            "model %s: version %d: no input of the dense part takes the features %s",
            snapshot.manifest.model, snapshot.manifest.version, ", ".join(unused),
        )  # fmt: skip


def _check_head(
    snapshot: Snapshot, head: str, shared: Shared, may_go_on: Callable[[], None], expected: set[str]
) -> Bindings | None:
    """Refuse a dense part that could not be served, or that lacks an output that golden examples expect.

    Returns what its inputs take; None where it is not served here.
    """
    model = snapshot.dense_model(head)
    if model is None or shared.dense.missing is not None:
        return None
    name = snapshot.manifest.graphs[head]
    yield_to_requests()
    try:
        session = shared.dense.load(
            model,
            snapshot.manifest.feature_specs(),
            snapshot.manifest.table_specs(),
            DenseCounts(),
            may_go_on=may_go_on,
        )
    except LoadCancelled:
        raise
    except InvalidInput as error:
        raise SnapshotError(str(error), file=name) from error
    if absent := expected - session.bindings.outputs.keys():
        raise SnapshotError(
            f"golden examples: {min(absent)!r} is neither a feature nor an output of {name}, whose outputs are "
            f"{', '.join(session.bindings.outputs)}",
            file=GOLDEN_INDEX,
        )
    return session.bindings
