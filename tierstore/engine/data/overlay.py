"""An overlay: one delta, or several merged, that look-ups see before it is folded into the tiers.

Immutable, so any number of threads may search it. It is in memory only: the delta log holds the same rows durably.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from tierstore.engine.data.dense_head import GONE, DenseHead, Heads, passed_over_after
from tierstore.errors import DeltaError
from tierstore.formats.colliding import NONE, CollidingKeys
from tierstore.formats.delta.reader import Delta, DeltaTable
from tierstore.formats.keys import are_own
from tierstore.formats.row_times import Times, as_rows, from_rows, seconds_of
from tierstore.kernels import codec, overlay_index
from tierstore.types import Keys, Partitions, Rows, TableSpec


class OverlayTable:
    """One table in an overlay: distinct `keys` ascending, their `rows` as stored, and which are deletions.

    `times`: when they were written, if the table has a ttl. `strings`: large_string [n], the keys themselves, if the
    version keeps them. What look-ups need is made by `prepare`, or else by the
    first of them: an overlay that is merged into the next one, or folded at once, does without.
    """

    __slots__ = ("_made", "deleted", "keys", "nbytes", "rows", "spec", "strings", "times")

    def __init__(
        self,
        spec: TableSpec,
        keys: Keys,
        rows: Rows,
        deleted: np.ndarray,
        times: Times | None = None,
        strings: pa.Array | None = None,
    ) -> None:
        self.spec, self.keys, self.rows, self.deleted, self.times = spec, keys, rows, deleted, times
        self.strings = strings
        self._made: dict[str, overlay_index.Answering] = {}  # at most one: what has an address of it relies on that
        kept = (array for array in (keys, rows, deleted, times, strings) if array is not None)
        self.nbytes = _index_bytes(len(keys)) + sum(array.nbytes for array in kept)

    def prepare(self) -> overlay_index.Answering:
        """Make it ready for look-ups. Any thread; of two at once both get what the first has kept."""
        made = self._made.get("answering")
        if made is None:
            spec = self.spec
            answering = overlay_index.Answering(
                overlay_index.build(self.keys), self.keys, self.rows, self.deleted, spec.dtype, spec.dim
            )
            made = self._made.setdefault("answering", answering)  # one step
        return made

    @property
    def words(self) -> np.ndarray:
        """The addresses of its parts, for kernels: `overlay_index.Answering.words`."""
        return self.prepare().words

    @property
    def filter_bytes(self) -> int:
        """Bytes of the filter of its keys."""
        return 8 * int(self.words["filter_words"])

    def merged(self, newer: OverlayTable) -> OverlayTable:
        """Two tables of overlays merged; a key in both keeps its row of `newer`."""
        old = overlay_index.Part(self.keys, self.rows, self.deleted)
        both = overlay_index.merge(old, overlay_index.Part(newer.keys, newer.rows, newer.deleted))
        times: Times | None = None
        strings: pa.Array | None = None
        if self.times is not None and newer.times is not None:
            times = self._merged_with(newer, self.times, newer.times)
        if self.strings is not None and newer.strings is not None:
            places = np.arange(len(self.keys) + len(newer.keys), dtype=np.uint32)
            chosen = self._merged_with(newer, places[: len(self.keys)], places[len(self.keys) :])
            strings = pa.concat_arrays([self.strings, newer.strings]).take(pa.array(chosen))
        return OverlayTable(self.spec, *both, times, strings)

    def _merged_with(self, newer: OverlayTable, values: Times, newer_values: Times) -> Times:
        """uint32 values of the keys of both tables, merged as their rows are."""
        old = overlay_index.Part(self.keys, as_rows(values), self.deleted)
        new = overlay_index.Part(newer.keys, as_rows(newer_values), newer.deleted)
        return from_rows(overlay_index.merge(old, new).rows)


def _index_bytes(keys: int) -> int:
    """`overlay_index.Answering.index_bytes` of an index over so many keys."""
    slots = 1 << max(2 * keys - 1, 0).bit_length()
    return 8 * (slots + max(1, slots >> 3))


@dataclass(slots=True, eq=False)
class Overlay:
    """The deltas `lo` … `hi`, visible and not folded yet. `born_s` is on the monotonic clock.

    `heads`: the dense parts that they brought, or took away. `passed_over`: the newest graphs that do not fit the
    version, and why, by head; newer than those. `colliding`: of the tables in which they brought more of these keys,
    all that there are then. `undone`: (first, last) of the seqs that it is without, as they are undone.
    """

    lo: int
    hi: int
    tables: Mapping[str, OverlayTable]
    heads: Heads = field(default_factory=dict)
    colliding: Mapping[str, CollidingKeys] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    born_s: float = field(default_factory=time.monotonic)
    undone: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        graphs = sum(len(head.graph or GONE) for head in self.heads.values())
        return sum(table.nbytes for table in self.tables.values()) + graphs

    @property
    def says_of_dense(self) -> bool:
        """Whether its deltas brought a dense part, which fits the version or was passed over."""
        return bool(self.heads or self.passed_over)

    def prepare(self) -> None:
        """Make its tables ready for look-ups."""
        for table in self.tables.values():
            table.prepare()

    def merged(self, newer: Overlay) -> Overlay:
        """This overlay merged with the one that follows it."""
        tables = dict(self.tables)
        for name, table in newer.tables.items():
            tables[name] = tables[name].merged(table) if name in tables else table
        return Overlay(
            self.lo,
            newer.hi,
            tables,
            {**self.heads, **newer.heads},
            {**self.colliding, **newer.colliding},
            passed_over_after(self.passed_over, newer.heads, newer.passed_over),
            self.born_s,
            self.undone + newer.undone,
        )


def stack(overlays: tuple[Overlay, ...], new: Overlay, *, frozen: Overlay | None) -> tuple[Overlay, ...]:
    """Put `new` on top of `overlays` (newest first), merging them so that a look-up searches few.

    Neighbours of like size merge, so n deltas are about log2(n) overlays and each row is copied about log2(n) times.
    `frozen`, the one being folded, is not merged.
    """
    older = list(overlays)
    while older and older[0] is not frozen and older[0].nbytes <= 2 * new.nbytes:
        new = older.pop(0).merged(new)
    return (new, *older)


def encode_delta(
    delta: Delta,
    specs: Mapping[str, TableSpec],
    colliding: Mapping[str, CollidingKeys],
    *,
    for_this_version: bool,
    own: Partitions | None = None,
    with_strings: Container[str] = (),
) -> Overlay:
    """Make an overlay of a delta, in the storage dtypes of `specs`; DeltaError names table and row.

    `colliding`: the version's colliding keys by table, with all deltas before this one. A delta for another version
    becomes an empty overlay, which moves the watermark on. With `own`, keys in other partitions are checked too, so
    that every node accepts the same deltas, and then left out. `with_strings`: the tables whose strings are kept.
    """
    if not for_this_version:
        return Overlay(delta.seq, delta.seq, {})
    tables: dict[str, OverlayTable] = {}
    more: dict[str, CollidingKeys] = {}
    for name, table in delta.tables.items():
        spec, rows = _encode_rows(delta.seq, name, table, specs)
        hashes, deleted, strings_at = table.keys, table.deleted, table.strings_at
        if own is not None:
            mine = np.flatnonzero(are_own(hashes, own))
            hashes, rows, deleted = hashes[mine], rows[mine], deleted[mine]
            strings_at = partial(_strings_at, table, mine)
        keys, strings = hashes, None
        if table.given is not None:
            if name in with_strings:
                strings = strings_at(np.arange(len(hashes)))
            before = colliding.get(name, NONE)
            keys, now = before.changed(hashes, strings_at, 1 if own is None else own.count)
            if now is not before:
                more[name] = now
            if keys is not hashes:
                order = np.argsort(keys)
                keys, rows, deleted = keys[order], rows[order], deleted[order]
                strings = None if strings is None else strings.take(pa.array(order))
        if len(keys):
            times = None if spec.ttl_s is None else np.full(len(keys), seconds_of(delta.event_time), np.uint32)
            tables[name] = OverlayTable(spec, keys, rows, deleted, times, strings)
    heads = {name: DenseHead(graph=graph) for name, graph in delta.dense.items()}
    return Overlay(delta.seq, delta.seq, tables, heads, colliding=more)


def _strings_at(table: DeltaTable, mine: np.ndarray, positions: np.ndarray) -> pa.Array:
    return table.strings_at(mine[positions])


def _encode_rows(seq: int, name: str, table: DeltaTable, specs: Mapping[str, TableSpec]) -> tuple[TableSpec, Rows]:
    spec = specs.get(name)
    if spec is None:
        raise DeltaError(
            f"delta {seq}: no table {name!r} in the version it is for; its tables are {', '.join(sorted(specs))}"
        )
    if table.key != spec.key:
        raise DeltaError(
            f"delta {seq}: table {name!r} has {spec.key.value} keys, the delta brings {table.key.value}; "
            f"`DeltaWriter` takes key={spec.key.value!r} where the keys alone do not say it"
        )
    if table.dim is None:  # deletions only
        return spec, np.zeros((len(table.keys), spec.row_bytes), np.uint8)
    if table.dim != spec.dim:
        raise DeltaError(f"delta {seq}: table {name!r} has vectors of {spec.dim} numbers, the delta brings {table.dim}")
    try:
        return spec, codec.encode(table.vectors, spec.dtype)
    except codec.BadRow as error:
        key = table.keys[error.row]
        raise DeltaError(f"delta {seq}: table {name!r}, key {key}: {error.reason}") from error
