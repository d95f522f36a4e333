"""A full scan: every row that a model serves at one seq, for work that writes or compares all of them.

A view is held until every table has an iterator of that seq, a fraction of a second: until then no later delta is
folded. After that deltas, folds and switches go on as ever. The version stays open until the block ends, also if
another one is switched to; but a switch back to it, or its drop, ends the work on it.

On the caller's thread; it only reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np

from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.deltas.dense_parts import check_dense
from tierstore.engine.model import Model
from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import STABLE
from tierstore.engine.versions.kept_strings import standing_strings
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, Corruption, StorageError
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.regular import read_regular
from tierstore.formats.row_times import TIME_BYTES, Times, as_rows, from_rows
from tierstore.tiers.disk.merge import Changes, merged_blocks
from tierstore.tiers.disk.strings_file import Strings
from tierstore.types import Keys, Rows

_READ_BYTES = 64 << 20  # that all tables together may read ahead
_LEAST_ROWS, _MOST_ROWS = 2048, 65536  # of a batch


@dataclass(frozen=True, slots=True)
class FullScan:
    """A version at one seq. `tables` has each table's rows of that seq by ascending code, each to be read once.

    With each batch are the times of its rows, if the table has some. `strings`: all kept strings of a table's keys of
    that seq, where they were asked for; each to be read once.
    """

    version: Version
    seq: int
    graphs: dict[str, bytes]  # by head
    tables: dict[str, Iterator[tuple[Keys, Rows, Times | None]]]
    strings: dict[str, Strings]
    colliding: Mapping[str, CollidingKeys]


def check_goes_on(what: str, model: Model, number: int | None, stops: Callable[[], bool]) -> None:
    """Closed if the work `what` should end, or version `number`, which it still reads, is needed otherwise."""
    model.state.live.check_open()
    if stops():
        raise Closed(f"the {what} of {model.name!r} was cancelled")
    if number is not None and model.state.retiring.is_awaited(number):
        raise Closed(
            f"the {what} of {model.name!r} ended: version {number} is being switched to or dropped; {what} again"
        )


@contextlib.contextmanager
def full_scan(
    model: Model, wanted: int | str | None, check: Callable[[View], None], *, with_strings: bool = False
) -> Iterator[FullScan]:
    """What a version (number or label; None: the active one) serves now; `check` may refuse its view.

    Its version stays open until the end of the block. `with_strings`: of all tables that keep them.
    """
    publisher = model.publisher
    wanted = model.wanted(wanted)
    with contextlib.ExitStack() as stack:
        scan = None
        while scan is None:
            with publisher.hold_all() as served, contextlib.ExitStack() as pin:
                view = served.choose(model.name, STABLE if wanted is None else wanted, None)
                check(view)
                if pin.enter_context(publisher.pinned(view.version)) is view.open_version:  # not switched meanwhile
                    scan = _read(view, stack, with_strings)
                    stack.push(pin.pop_all())
        yield scan


def _read(view: View, stack: contextlib.ExitStack, with_strings: bool) -> FullScan:
    """The scan of a held view. When this returns, all iterators are positioned, and the view may be released."""
    version = view.open_version
    row_bytes = sum(8 + spec.row_bytes for spec in version.specs.values())
    batch = max(_LEAST_ROWS, min(_MOST_ROWS, _READ_BYTES // max(1, row_bytes)))

    def standing(table_id: int, row_bytes: int) -> Iterator[tuple[Keys, Rows]]:
        stored = version.disk.scan(table_id, row_bytes, batch)
        stack.callback(stored.close)  # type: ignore[attr-defined]
        first = next(stored, None)  # only now its iterator is positioned
        return chain(() if first is None else (first,), stored)

    tables: dict[str, Iterator[tuple[Keys, Rows, Times | None]]] = {}
    strings: dict[str, Strings] = {}
    with version.writing:  # or rows might expire between two of them
        for name, table in version.tables.items():
            overlays = view.table(name).overlays
            changed = reduce(OverlayTable.merged, reversed(overlays)) if overlays else None
            rows = _with_changes(standing(table.table_id, table.spec.row_bytes), changed, None, batch)
            if with_strings and name in version.info.strings_ids:
                strings[name] = standing_strings(version.info, version.disk, name, changed, stack)
            number = version.info.times_ids.get(name)
            if number is None:
                tables[name] = ((keys, stored, None) for keys, stored in rows)
            else:
                of_overlays = None if changed is None or changed.times is None else as_rows(changed.times)
                times = _with_changes(standing(number, TIME_BYTES), changed, of_overlays, batch)
                tables[name] = _in_step(name, rows, times)
    return FullScan(version, view.seq, _graphs(view), tables, strings, view.colliding)


def _with_changes(
    stored: Iterator[tuple[Keys, Rows]], changed: OverlayTable | None, rows: Rows | None, batch: int
) -> Iterator[tuple[Keys, Rows]]:
    """Stored rows with the changes of overlays; `rows` replace those of the overlays."""
    if changed is None:
        yield from stored
        return
    for keys, merged, _ in merged_blocks(
        stored, _changes(changed, changed.rows if rows is None else rows, batch), batch
    ):
        if len(keys):
            yield keys, merged


def _changes(changed: OverlayTable, rows: Rows, batch: int) -> Iterator[Changes]:
    """The changes of an overlay, by ascending code."""
    for start in range(0, len(changed.keys), batch):
        part = slice(start, start + batch)
        deleted = changed.deleted[part].astype(np.bool_)
        yield changed.keys[part], deleted, rows[part][~deleted]


def _in_step(
    table: str, rows: Iterator[tuple[Keys, Rows]], times: Iterator[tuple[Keys, Rows]]
) -> Iterator[tuple[Keys, Rows, Times | None]]:
    """Rows with the times of the same keys, in the batches of the rows. Corruption if the keys differ."""
    ahead, ahead_times = np.empty(0, np.int64), np.empty((0, TIME_BYTES), np.uint8)
    for keys, stored in rows:
        n = len(keys)
        while len(ahead) < n and (more := next(times, None)) is not None:
            ahead, ahead_times = np.concatenate([ahead, more[0]]), np.concatenate([ahead_times, more[1]])
        if not np.array_equal(ahead[:n], keys):
            raise Corruption(f"table {table!r}: its rows and the times of its rows are not of the same keys")
        yield keys, stored, from_rows(ahead_times[:n])
        ahead, ahead_times = ahead[n:], ahead_times[n:]


def _graphs(view: View) -> dict[str, bytes]:
    """The ONNX files that the view serves, by head, or would serve if the extra were installed.

    No fold replaces them while the view is held.
    """
    return {name: _stored(view, name) if head.graph is None else head.graph for name, head in view.heads.items()}


def _stored(view: View, head: str) -> bytes:
    info = view.open_version.info
    try:
        content = read_regular(info.where.dense(head))
    except OSError as error:
        raise StorageError(f"cannot read {info.where.dense(head)}: {error.strerror or error}") from error
    check_dense(info, head, content)
    return content
