"""Digests of a sample of the served rows, at one seq, by which two nodes are compared without sending their tables.

The rows are as a request would get them, overlays included. Any thread; only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.model import Model
from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import STABLE
from tierstore.errors import InvalidInput
from tierstore.formats.row_times import TIME_BYTES, Times, from_rows, live_at
from tierstore.kernels.digest import digest_rows
from tierstore.types import Keys, Tier

MOST_KEYS = 65536  # of a table, in one request
_PIECES = 16  # runs of neighbouring codes that a node chooses, spread over the table
_LOWEST, _END = -(1 << 63), 1 << 63


def sampled_digests(
    model: Model,
    version: int | str | None,
    keys: Mapping[str, Sequence[int]] | None,
    rows: int,
    expired_at_s: int | None = None,
) -> dict[str, Any]:
    """Digests of the answers of `version` (a number or a label; None: the active one) for some keys of every table.

    Args:
        keys: by table, the keys' codes, at most `MOST_KEYS`. A code is the key itself, as int64 (for uint64 its bit
            pattern, for a string its hash). None: `rows` of each table are chosen, the same ones on every node that has
            the same rows.
        expired_at_s: seconds since 1970; rows that are expired then count as absent, whether this node has removed them
            or not.

    Returns `{"model", "version", "seq", "tables": {table: {"keys": [code], "found": n, "digest": 16 hex digits,
    "ttl_s"}}}`.
    """
    with model.view(STABLE if version is None else version) as view:
        tables = view.open_version.tables
        if keys is not None and (unknown := keys.keys() - tables.keys()):
            raise InvalidInput(
                f"no table {sorted(unknown)[0]!r}; version {view.version} has {', '.join(sorted(tables))}"
            )
        if keys is None:
            model.state.shared.placement.refusals.check("compare_unnamed")
        wanted = {name: _codes(keys[name]) for name in keys} if keys is not None else _chosen(view, rows)
        return {
            "model": model.name,
            "version": view.version,
            "seq": view.seq,
            "tables": {name: _digest(view, tables[name], name, codes, expired_at_s) for name, codes in wanted.items()},
        }


def _codes(keys: Sequence[int]) -> Keys:
    if len(keys) > MOST_KEYS:
        raise InvalidInput(f"keys: expected at most {MOST_KEYS} of a table, got {len(keys)}")
    try:
        return np.array(keys, np.int64)
    except OverflowError:
        raise InvalidInput("keys: expected codes that fit int64") from None


def _digest(view: View, table: Cascade, name: str, codes: Keys, expired_at_s: int | None) -> dict[str, Any]:
    rows, state = np.empty((len(codes), table.spec.dim), np.float32), np.zeros(len(codes), np.uint8)
    view.table(name).lookup(codes, rows, state)
    found: npt.NDArray[np.bool_] = state != np.uint8(Tier.ABSENT)
    if expired_at_s is not None and (times := _times(view, name, codes)) is not None:
        assert table.spec.ttl_s is not None
        found &= live_at(times, expired_at_s, table.spec.ttl_s)
        rows[~found] = table.default
    answers = np.concatenate(
        [rows.view(np.uint8).reshape(len(codes), 4 * table.spec.dim), found.view(np.uint8)[:, None]], axis=1
    )
    return {
        "keys": codes.tolist(),
        "found": int(np.count_nonzero(found)),
        "digest": f"{digest_rows(codes, answers):016x}",
        "ttl_s": table.spec.ttl_s,
    }


def _times(view: View, name: str, codes: Keys) -> Times | None:
    """When rows were last written; 0 for rows that do not exist, or have just expired.

    None for a table without times here.
    """
    version = view.open_version
    if name not in version.info.times_ids:
        return None
    keys, inverse = np.unique(codes, return_inverse=True)
    stored, state = np.zeros((len(keys), TIME_BYTES), np.uint8), np.zeros(len(keys), np.uint8)
    version.disk.get(version.info.times_ids[name], keys, stored, state)
    times = np.where(state == Tier.DISK, from_rows(stored), np.uint32(0))
    for overlay in reversed(view.table(name).overlays):  # the newest last
        assert overlay.times is not None
        _, at, there = np.intersect1d(keys, overlay.keys, assume_unique=True, return_indices=True)
        times[at] = overlay.times[there]
    return times[inverse]


def _chosen(view: View, rows: int) -> dict[str, Keys]:
    return {name: _spread(view, table, min(rows, MOST_KEYS)) for name, table in view.open_version.tables.items()}


def _spread(view: View, table: Cascade, rows: int) -> Keys:
    """At most `rows` codes from the table's files, in runs that begin at positions that depend on the table alone."""

    def next_codes(low: int, count: int) -> Keys:
        return view.open_version.disk.codes_from(table.table_id, table.spec.row_bytes, low, count)

    first = next_codes(_LOWEST, 1)
    if not len(first):
        return first
    low, high = int(first[0]), _END
    if low >= 0:  # small numbers, as ids are: the range of codes ends at a power of two
        while high > 1 and not len(next_codes(high // 2, 1)):
            high //= 2
    each = -(-rows // _PIECES)
    starts = (low + (high - low) * piece // _PIECES for piece in range(_PIECES))
    return np.unique(np.concatenate([next_codes(start, each) for start in starts]))[:rows]
