"""Catching a version up from the delta log, while it does not serve.

For one thread at a time a version. A crash in between loses nothing: each fold carries its watermark.
"""

from __future__ import annotations

import logging

from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.overlay import Overlay, encode_delta, stack
from tierstore.engine.version import Version
from tierstore.errors import DeltaError
from tierstore.formats.delta import read_delta
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

FOLD_BYTES = 64 << 20  # of deltas that are folded as one


def catch_up(
    version: Version, deltas: DeltaLog, *, leave: int = 0, lenient: bool = False, progress: ProgressFn | None = None
) -> None:
    """Fold what the log holds above the watermark of `version`, until at most `leave` deltas are missing.

    The log may grow meanwhile. A delta that does not fit the version is a DeltaError, or passed over if `lenient`.
    """
    if deltas.start is None:
        return
    begin = max(version.watermark, deltas.start)
    while True:
        last, held = deltas.last or 0, max(version.watermark, deltas.start)
        if last - held <= leave:
            return
        if progress is not None:
            progress(Progress("catch up", held - begin, last - begin))
        overlays: tuple[Overlay, ...] = ()
        while held < last and sum(overlay.nbytes for overlay in overlays) < FOLD_BYTES:
            held += 1
            overlays = stack(overlays, _overlay(version, deltas, held, lenient), frozen=None)
        merged = overlays[-1]
        for newer in reversed(overlays[:-1]):
            merged = merged.merged(newer)
        version.fold(merged)


def _overlay(version: Version, deltas: DeltaLog, seq: int, lenient: bool) -> Overlay:
    delta = read_delta(deltas.read(seq))
    try:
        return encode_delta(delta, version.specs, for_this_version=delta.base_version in (None, version.number))
    except DeltaError:
        if not lenient:
            raise
        log.warning("version %d passes over delta %d, which does not fit it", version.number, seq)
        return Overlay(seq, seq, {})
