"""Catching up: replaying the delta log onto a version that does not serve.

For one thread at a time for each version. A crash in between loses nothing: each fold has its watermark.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tierstore.engine.data.dense_head import DenseHead, Heads
from tierstore.engine.data.overlay import Overlay, stack
from tierstore.engine.deltas.dense_parts import DenseParts
from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.reads.view import View
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.version import Version
from tierstore.errors import DeltaError, TooLarge
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.delta.reader import Delta, read_delta
from tierstore.tiers.background import without_yielding, yield_to_requests
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

FOLD_BYTES = 64 << 20  # bytes of deltas that are folded together
MOST_STALLS = 5  # rounds in which deltas came as fast as they were replayed


def catch_up(
    version: Version,
    deltas: DeltaLog,
    dense: DenseParts,
    *,
    lag: int = 0,
    lenient: bool = False,
    undone: Undone | None = None,
    progress: ProgressFn | None = None,
) -> None:
    """Fold the log's deltas above the watermark of `version`, until at most `lag` are missing.

    For `undone` deltas (None: as the log says) only the watermark moves on. The log may grow meanwhile. If it grows as
    fast as it is replayed, a catch-up that may leave some (`lag`) ends early: its caller does the remainder while
    producers wait, or there would be no end. A delta whose rows do not fit the version is a DeltaError, or skipped if
    `lenient`. A dense part that does not fit is always skipped, but not the rows of its delta; the version reports it.
    """
    if deltas.start is None:
        return
    begin = max(version.watermark, deltas.start)
    lacking, stalls = sys.maxsize, 0
    while True:
        last, held = deltas.last or 0, max(version.watermark, deltas.start)
        if last - held <= lag or (lag and stalls >= MOST_STALLS):
            return
        if progress is not None:
            progress(Progress("catch up", held - begin, last - begin))
        stalls += last - held >= lacking
        hurry = stalls > 0  # or a thread that yields to requests never reaches the end of the log
        lacking = last - held
        with without_yielding(hurry):
            view = View(version, (), version.watermark)
            merged, with_graphs = _gather(view, deltas, last, FOLD_BYTES, undone or deltas.undone, lenient=lenient)
            yield_to_requests()
            _add_dense(merged, version, with_graphs, dense, deltas)
            version.fold(merged)


def missing(view: View, deltas: DeltaLog) -> bool:
    """Whether the log holds deltas that a view lacks."""
    return max(view.seq, deltas.start or 0) < (deltas.last or 0)


def unfolded(view: View, deltas: DeltaLog, dense: DenseParts, *, limit: int) -> Overlay | None:
    """The log's deltas that a view lacks, leniently, for serving from memory; None if none is missing.

    TooLarge if it would take more than about `limit` bytes.
    """
    if not missing(view, deltas):
        return None
    last = deltas.last or 0
    merged, with_graphs = _gather(view, deltas, last, limit, deltas.undone, lenient=True)
    if merged.hi < last:
        raise TooLarge(f"deltas {merged.lo} to {last} take more than {limit:,} bytes of memory")
    _add_dense(merged, view.open_version, with_graphs, dense, deltas, serve=True)
    return merged


def _gather(
    view: View, deltas: DeltaLog, last: int, limit: int, undone: Undone, *, lenient: bool
) -> tuple[Overlay, list[Delta]]:
    """The deltas that a view lacks, up to `last` or until they have `limit` bytes, as one overlay without dense parts;
    and those of them that bring dense parts to its version.
    """
    overlays: tuple[Overlay, ...] = ()
    held, colliding = max(view.seq, deltas.start or 0), dict(view.colliding)
    with_graphs: list[Delta] = []
    while held < last and _bytes(overlays, with_graphs) < limit:
        held += 1
        if (gap := undone.range_of(held)) is not None:
            end = min(gap[1], last)
            overlays = stack(overlays, Overlay(held, end, {}, undone=((held, end),)), frozen=None)
            held = end
            continue
        yield_to_requests()
        delta = read_delta(deltas.read(held))
        new = _overlay(view.open_version, delta, colliding, lenient)
        colliding |= new.colliding
        if new.heads:
            with_graphs.append(replace(delta, tables={}))
            new.heads = {}
        overlays = stack(overlays, new, frozen=None)
    merged = overlays[-1]
    for newer in reversed(overlays[:-1]):
        merged = merged.merged(newer)
    return merged, with_graphs


def _bytes(overlays: Sequence[Overlay], with_graphs: Sequence[Delta]) -> int:
    graphs = sum(len(graph) for delta in with_graphs for graph in delta.dense.values())
    return sum(overlay.nbytes for overlay in overlays) + graphs


def _add_dense(
    overlay: Overlay,
    version: Version,
    with_graphs: Sequence[Delta],
    dense: DenseParts,
    deltas: DeltaLog,
    *,
    serve: bool = False,
) -> None:
    """Add the newest graph of each head that fits to an overlay, checked as if the version had served all the time.

    The graphs of a delta fit all together, or are passed over. Accepted graphs are not checked again, unless the
    overlay is to `serve` as it is: then they are made ready to run.
    """
    view = View(version, (), version.watermark)
    for delta in reversed(with_graphs):
        graphs = {head: graph for head, graph in delta.dense.items() if head not in overlay.heads}
        if not graphs:
            continue
        accepted = delta.seq <= version.info.dense_accepted_upto
        accepted = accepted and not deltas.is_passed_over(delta.seq, version.number)
        heads: Heads = {head: DenseHead(graph=graph) for head, graph in graphs.items()}
        try:
            if serve or not accepted:
                brought = dense.of_delta(delta, graphs if accepted else delta.dense, view, accepted=accepted)
                heads = {head: brought[head] for head in graphs}
        except DeltaError as error:
            if not accepted:
                overlay.passed_over = dict.fromkeys(graphs, str(error)) | dict(overlay.passed_over)
                log.warning("version %d passes over the dense part of %s", version.number, error)
                continue
            heads = {head: replace(of, unserved=str(error)) for head, of in heads.items()}
        overlay.heads = {**overlay.heads, **heads}


def _overlay(version: Version, delta: Delta, colliding: Mapping[str, CollidingKeys], lenient: bool) -> Overlay:
    try:
        return version.encode(delta, colliding)
    except DeltaError:
        if not lenient:
            raise
        log.warning("version %d passes over delta %d, which does not fit it", version.number, delta.seq)
        return Overlay(delta.seq, delta.seq, {})
