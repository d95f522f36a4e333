"""Loading a snapshot beside what serves: build, ingest, verify, record, and then, if asked, activate.

Runs on the caller's thread; the heavy work is in the helper processes of `ingest/`. A crash leaves a directory, and so does a
load that is cancelled: one of the same snapshot goes on from there. On other errors it is removed at once. Once the record is
published the version is kept, whether or not it comes to serve; but for a snapshot that turns out to be bad when it is to serve.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tierstore.engine.model import Model
from tierstore.engine.switching import Shared
from tierstore.engine.version import VersionInfo, first_records, write_record
from tierstore.errors import InvalidInput, LoadCancelled, SnapshotError
from tierstore.formats import files
from tierstore.formats.requests import read_request
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.beside import keep_beside
from tierstore.ingest.bulkload import BulkLoad
from tierstore.predict.session import DenseCounts
from tierstore.tiers.background import hand_over
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)


def load(
    model: Model,
    snapshot: Snapshot,
    shared: Shared,
    *,
    activate: bool,
    aside: bool,
    progress: ProgressFn,
    cancelled: threading.Event | None,
) -> int:
    """Load `snapshot` as a version of `model`. Returns the version. Whatever fails, nothing that served changes.

    With `aside` it leaves half of the processors to what serves.
    """
    manifest = snapshot.manifest
    number = manifest.version

    def may_go_on() -> None:
        if cancelled is not None and cancelled.is_set():
            raise LoadCancelled("the load was cancelled")

    _check_dense(snapshot, shared, may_go_on)
    identity = snapshot.identity()
    may_go_on()
    throttle = shared.throttle
    with throttle.at_work("load"), model.loading(number, manifest.delta_seq, identity) as note:

        def tell(step: Progress) -> None:
            may_go_on()
            note(step)
            progress(step)

        if number in model.versions:  # but for the switch it was loaded before
            if activate:
                model.activate(number, progress=tell)
            return number
        where = model.where.version(number)
        settings = shared.settings
        with BulkLoad(
            snapshot,
            where.build,
            memory_bytes=settings.load_memory,
            workers=settings.load_workers,
            base=settings.base,
            aside=aside,
            keep=settings.load_retention_s > 0,
            share=lambda: throttle.share,
            progress=tell,
            cancelled=cancelled,
        ) as bulk:
            build = bulk.build()
            if any(build.kept_rows.values()):
                log.info("model %s: version %d goes on: rows not done again: %s", model.name, number, build.kept_rows)
            bulk.ingest(build, where.db, first_records(manifest, build))
            bulk.read_back(where.db)
        may_go_on()
        keep_beside(snapshot, where)
        may_go_on()
        model.check_open()
        write_record(where, manifest, build)
        files.remove_tree(where.build)  # not before: else a crash in between would cost the whole load
        model.adopt(VersionInfo(where), activate=activate, progress=tell)
    return number


def _check_dense(snapshot: Snapshot, shared: Shared, may_go_on: Callable[[], None]) -> None:
    """Refuse a dense part that could not be served, and requests that cannot be read, before any row is."""
    for name, path in snapshot.request_paths():
        may_go_on()
        read_request(path, file=name)
    model = snapshot.dense_model()
    if model is None or snapshot.manifest.dense is None or shared.dense.missing is not None:
        return
    name = snapshot.manifest.dense.path
    hand_over()
    try:
        shared.dense.load(model, snapshot.manifest.feature_specs(), snapshot.manifest.table_specs(), DenseCounts())
    except InvalidInput as error:
        raise SnapshotError(str(error), file=name) from error
