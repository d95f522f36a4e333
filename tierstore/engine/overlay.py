"""An overlay: one delta, or several in a row merged, as look-ups see it before it is folded into the tiers.

Immutable once made, so any number of threads may search it. It lives in memory only: the delta log holds the
same rows durably.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tierstore.errors import DeltaError
from tierstore.formats.colliding import NONE, CollidingKeys
from tierstore.formats.delta import Delta, DeltaTable
from tierstore.kernels import codec, overlay_index
from tierstore.predict.session import DenseSession
from tierstore.types import Keys, Rows, States, TableSpec, Vectors


class OverlayTable:
    """The rows of one table in an overlay: distinct `keys` ascending, their `rows` as stored, and which are deletions."""

    __slots__ = ("_answering", "deleted", "keys", "nbytes", "rows", "spec")

    def __init__(self, spec: TableSpec, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        self.spec, self.keys, self.rows, self.deleted = spec, keys, rows, deleted
        index = overlay_index.build(keys)
        self._answering = overlay_index.Answering(index, keys, rows, deleted, spec.dtype, spec.dim)
        self.nbytes = keys.nbytes + index.nbytes + rows.nbytes + deleted.nbytes

    @property
    def words(self) -> np.ndarray:
        """Where its parts lie, for kernels: `overlay_index.Answering.words`."""
        return self._answering.words

    def lookup(self, keys: Keys, out: Vectors, state: States, default: np.ndarray) -> None:
        """Answer the keys with state PENDING that are in this overlay: OVERLAY, or ABSENT where deleted."""
        self._answering.answer(keys, out, state, default)

    def merged(self, newer: OverlayTable) -> OverlayTable:
        """Both in one; a key in both keeps its row of `newer`."""
        keys = np.concatenate([self.keys, newer.keys])
        last = overlay_index.dedup_last(keys)
        rows = np.concatenate([self.rows, newer.rows])[last]
        return OverlayTable(self.spec, keys[last], rows, np.concatenate([self.deleted, newer.deleted])[last])


@dataclass(slots=True, eq=False)
class Overlay:
    """The deltas `lo` … `hi`, visible and not folded yet. `born_s` is on the monotonic clock.

    `colliding`: of the tables in which they brought more of these keys, all that there are then.
    """

    lo: int
    hi: int
    tables: Mapping[str, OverlayTable]
    dense: bytes | None = field(default=None, repr=False)
    predictor: DenseSession | None = None  # of `dense`; None where it cannot be served here
    colliding: Mapping[str, CollidingKeys] = field(default_factory=dict)
    passed_over: str | None = None  # of catch-ups alone: the newest dense part that does not fit the version, and why
    born_s: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values()) + len(self.dense or b"")

    def merged(self, newer: Overlay) -> Overlay:
        """This overlay and the one that follows it as one."""
        tables = dict(self.tables)
        for name, table in newer.tables.items():
            tables[name] = tables[name].merged(table) if name in tables else table
        of = newer if newer.dense is not None else self
        colliding = {**self.colliding, **newer.colliding}
        return Overlay(self.lo, newer.hi, tables, of.dense, of.predictor, colliding, born_s=self.born_s)


def stack(overlays: tuple[Overlay, ...], new: Overlay, *, frozen: Overlay | None) -> tuple[Overlay, ...]:
    """Put `new` on top of `overlays` (newest first), merging so that a look-up searches few of them.

    Neighbours of like size merge, so n deltas stand as about log2(n) overlays and each row is copied about
    log2(n) times. `frozen` is the one being folded: it must stay the object that it is.
    """
    rest = list(overlays)
    while rest and rest[0] is not frozen and rest[0].nbytes <= 2 * new.nbytes:
        new = rest.pop(0).merged(new)
    return (new, *rest)


def encode_delta(
    delta: Delta, specs: Mapping[str, TableSpec], colliding: Mapping[str, CollidingKeys], *, for_this_version: bool
) -> Overlay:
    """Turn a delta into an overlay in the storage dtypes of `specs`, or raise DeltaError naming table and row.

    `colliding` are the keys that collide in the version, table by table, with all deltas before this one.
    A delta that is for another version becomes an empty overlay, which moves the watermark on.
    """
    if not for_this_version:
        return Overlay(delta.seq, delta.seq, {})
    tables: dict[str, OverlayTable] = {}
    more: dict[str, CollidingKeys] = {}
    for name, table in delta.tables.items():
        spec, rows = _encode_rows(delta.seq, name, table, specs)
        keys, deleted = table.keys, table.deleted
        if table.given is not None:
            known = colliding.get(name, NONE)
            keys, now = known.changed(keys, table.strings_at)
            if now is not known:
                more[name] = now
            if keys is not table.keys:
                order = np.argsort(keys)
                keys, rows, deleted = keys[order], rows[order], deleted[order]
        if len(keys):
            tables[name] = OverlayTable(spec, keys, rows, deleted)
    return Overlay(delta.seq, delta.seq, tables, delta.dense, colliding=more)


def _encode_rows(seq: int, name: str, table: DeltaTable, specs: Mapping[str, TableSpec]) -> tuple[TableSpec, Rows]:
    spec = specs.get(name)
    if spec is None:
        raise DeltaError(
            f"delta {seq}: no table {name!r} in the version it is for; its tables are {', '.join(sorted(specs))}"
        )
    if table.key != spec.key:
        raise DeltaError(f"delta {seq}: table {name!r} has {spec.key.value} keys, the delta brings {table.key.value}")
    if table.dim is None:  # deletions only
        return spec, np.zeros((len(table.keys), spec.row_bytes), np.uint8)
    if table.dim != spec.dim:
        raise DeltaError(f"delta {seq}: table {name!r} has vectors of {spec.dim} numbers, the delta brings {table.dim}")
    try:
        return spec, codec.encode(table.vectors, spec.dtype)
    except codec.BadRow as error:
        key = table.keys[error.row]
        raise DeltaError(f"delta {seq}: table {name!r}, key {key}: {error.reason}") from error
