"""Catching a version up from the delta log, while it does not serve.

For one thread at a time a version. A crash in between loses nothing: each fold carries its watermark.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.overlay import Overlay, encode_delta, stack
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.errors import DeltaError
from tierstore.formats.delta import Delta, read_delta
from tierstore.tiers.background import hand_over, hurrying
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

FOLD_BYTES = 64 << 20  # of deltas that are folded as one


def catch_up(
    version: Version,
    deltas: DeltaLog,
    dense: DenseParts,
    *,
    leave: int = 0,
    lenient: bool = False,
    progress: ProgressFn | None = None,
) -> None:
    """Fold what the log holds above the watermark of `version`, until at most `leave` deltas are missing.

    The log may grow meanwhile. A delta whose rows do not fit the version is a DeltaError, or passed over if `lenient`.
    A dense part that does not fit it is passed over in any case, the rows beside it are not; the version says so.
    """
    if deltas.start is None:
        return
    begin = max(version.watermark, deltas.start)
    missing, hurry = sys.maxsize, False
    while True:
        last, held = deltas.last or 0, max(version.watermark, deltas.start)
        if last - held <= leave:
            return
        if progress is not None:
            progress(Progress("catch up", held - begin, last - begin))
        hurry = hurry or last - held >= missing  # else who waits for requests never gets to the end of the log
        missing = last - held
        with hurrying(hurry):
            _fold_next(version, deltas, dense, held, last, lenient)


def _fold_next(version: Version, deltas: DeltaLog, dense: DenseParts, held: int, last: int, lenient: bool) -> None:
    """Fold what comes after `held`, as much as is folded as one."""
    overlays: tuple[Overlay, ...] = ()
    brought: list[tuple[Delta, bytes]] = []
    while held < last and _bytes(overlays, brought) < FOLD_BYTES:
        held += 1
        hand_over()
        delta = read_delta(deltas.read(held))
        new = _overlay(version, delta, lenient)
        if new.dense is not None:
            brought.append((delta, new.dense))
            new.dense = None
        overlays = stack(overlays, new, frozen=None)
    merged = overlays[-1]
    for newer in reversed(overlays[:-1]):
        merged = merged.merged(newer)
    hand_over()
    _bring_dense(merged, version, brought, dense)
    version.fold(merged)


def _bytes(overlays: Sequence[Overlay], brought: Sequence[tuple[Delta, bytes]]) -> int:
    return sum(overlay.nbytes for overlay in overlays) + sum(len(model) for _, model in brought)


def _bring_dense(overlay: Overlay, version: Version, brought: Sequence[tuple[Delta, bytes]], dense: DenseParts) -> None:
    """Have an overlay bring the newest dense part that fits, checked as if the version had served all the time."""
    for delta, model in reversed(brought):
        try:
            if delta.seq > version.info.asked_upto:
                overlay.predictor = dense.of_delta(delta, model, View(version, (), version.watermark))
        except DeltaError as error:
            overlay.passed_over = overlay.passed_over or str(error)
            log.warning("version %d passes over the dense part of %s", version.number, error)
        else:
            overlay.dense = model
            return


def _overlay(version: Version, delta: Delta, lenient: bool) -> Overlay:
    try:
        return encode_delta(delta, version.specs, for_this_version=delta.base_version in (None, version.number))
    except DeltaError:
        if not lenient:
            raise
        log.warning("version %d passes over delta %d, which does not fit it", version.number, delta.seq)
        return Overlay(delta.seq, delta.seq, {})
