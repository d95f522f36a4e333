"""Catching a version up from the delta log, while it does not serve.

For one thread at a time a version. A crash in between loses nothing: each fold carries its watermark.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.overlay import Overlay, encode_delta, stack
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.errors import DeltaError, TooLarge
from tierstore.formats.colliding import CollidingKeys
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
            merged, brought = _gather(version, deltas, held, last, FOLD_BYTES, lenient)
            hand_over()
            _bring_dense(merged, version, brought, dense)
            version.fold(merged)


def unfolded(version: Version, deltas: DeltaLog, dense: DenseParts, *, limit: int) -> Overlay | None:
    """What `catch_up` would fold, leniently, for a version to serve from memory; None where nothing is missing.

    TooLarge where it would take more than about `limit` bytes.
    """
    last, held = deltas.last or 0, max(version.watermark, deltas.start or 0)
    if last <= held:
        return None
    merged, brought = _gather(version, deltas, held, last, limit, lenient=True)
    if merged.hi < last:
        raise TooLarge(f"deltas {merged.lo} to {last} take more than {limit:,} bytes of memory")
    _bring_dense(merged, version, brought, dense, serve=True)
    return merged


def _gather(
    version: Version, deltas: DeltaLog, held: int, last: int, limit: int, lenient: bool
) -> tuple[Overlay, list[tuple[Delta, bytes]]]:
    """The deltas above `held`, up to `last` or until they have `limit` bytes, as one; dense parts apart."""
    overlays: tuple[Overlay, ...] = ()
    colliding = dict(version.colliding)
    brought: list[tuple[Delta, bytes]] = []
    while held < last and _bytes(overlays, brought) < limit:
        held += 1
        hand_over()
        delta = read_delta(deltas.read(held))
        new = _overlay(version, delta, colliding, lenient)
        colliding |= new.colliding
        if new.dense is not None:
            brought.append((delta, new.dense))
            new.dense = None
        overlays = stack(overlays, new, frozen=None)
    merged = overlays[-1]
    for newer in reversed(overlays[:-1]):
        merged = merged.merged(newer)
    return merged, brought


def _bytes(overlays: Sequence[Overlay], brought: Sequence[tuple[Delta, bytes]]) -> int:
    return sum(overlay.nbytes for overlay in overlays) + sum(len(model) for _, model in brought)


def _bring_dense(
    overlay: Overlay,
    version: Version,
    brought: Sequence[tuple[Delta, bytes]],
    dense: DenseParts,
    *,
    serve: bool = False,
) -> None:
    """Have an overlay bring the newest dense part that fits, checked as if the version had served all the time.

    One that was accepted is not asked again, unless the overlay is to `serve` as it is: then it has it ready to run.
    """
    for delta, model in reversed(brought):
        accepted = delta.seq <= version.info.asked_upto
        try:
            if serve or not accepted:
                overlay.predictor = dense.of_delta(delta, model, View(version, (), version.watermark))
        except DeltaError as error:
            if not accepted:
                overlay.passed_over = overlay.passed_over or str(error)
                log.warning("version %d passes over the dense part of %s", version.number, error)
                continue
            version.unserved = str(error)
        overlay.dense = model
        return


def _overlay(version: Version, delta: Delta, colliding: Mapping[str, CollidingKeys], lenient: bool) -> Overlay:
    try:
        for_it = delta.base_version in (None, version.number)
        return encode_delta(delta, version.specs, colliding, for_this_version=for_it)
    except DeltaError:
        if not lenient:
            raise
        log.warning("version %d passes over delta %d, which does not fit it", version.number, delta.seq)
        return Overlay(delta.seq, delta.seq, {})
