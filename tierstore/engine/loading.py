"""Loading a snapshot beside what serves: build, ingest, verify, record, and then, if asked, activate.

Runs on the caller's thread; the heavy work is in the helper processes of `ingest/`. Until the record is published
a crash leaves a directory that the next start removes; on an error it is removed at once. From then on the version is kept,
whether or not it comes to serve; but for a snapshot that turns out to be bad when it is to serve.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np

from tierstore.engine.model import Model
from tierstore.engine.switching import Shared
from tierstore.engine.version import VersionInfo, watermark_record, write_record
from tierstore.errors import InvalidInput, LoadCancelled, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.names import REQUEST_SUFFIX, VersionDirectory
from tierstore.formats.requests import read_request
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.predict.session import DenseCounts
from tierstore.tiers.background import hand_over
from tierstore.types import Progress, ProgressFn


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
    _check_dense(snapshot, shared)
    throttle = shared.throttle
    with throttle.at_work("load"), model.loading(number, manifest.delta_seq) as note:

        def tell(step: Progress) -> None:
            if cancelled is not None and cancelled.is_set():
                raise LoadCancelled("the load was cancelled")
            note(step)
            progress(step)

        where = model.where.version(number)
        settings = shared.settings
        with BulkLoad(
            snapshot,
            where.build,
            memory_bytes=settings.load_memory,
            workers=settings.load_workers,
            base=settings.base,
            aside=aside,
            share=lambda: throttle.share,
            progress=tell,
            cancelled=cancelled,
        ) as bulk:
            build = bulk.build()
            bulk.ingest(build, where.db, watermark_record(manifest.delta_seq))
            bulk.read_back(where.db)
        _keep_the_rest(snapshot, where)
        files.remove_tree(where.build)
        model.check_open()
        write_record(where, manifest, build)
        model.adopt(VersionInfo(where), activate=activate, progress=tell)
    return number


def _check_dense(snapshot: Snapshot, shared: Shared) -> None:
    """Refuse a dense part that could not be served, and requests that cannot be read, before any row is."""
    for name, path in snapshot.request_paths():
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


def _keep_the_rest(snapshot: Snapshot, where: VersionDirectory) -> None:
    dense = snapshot.dense_model()
    if dense is not None:
        hand_over()
        files.publish_bytes(where.dense, dense)
    for name in snapshot.manifest.warmup:
        keys = snapshot.warmup_keys(name)
        if keys is not None:
            hand_over()
            files.make_dir(where.warmup(name).parent)
            with files.publish(where.warmup(name)) as file:
                np.save(file, keys, allow_pickle=False)
    requests = snapshot.request_paths()
    if requests:
        files.make_dir(where.requests)
    for i, (_, path) in enumerate(requests):
        _copy(path, where.requests / f"{i:05d}{REQUEST_SUFFIX}")


def _copy(source: Path, target: Path) -> None:
    hand_over()
    try:
        with open(source, "rb") as read, files.publish(target) as write:
            shutil.copyfileobj(read, write)
    except StorageError:
        raise
    except OSError as error:
        raise SnapshotError(f"cannot be read: {error.strerror or error}", file=source.name) from error
