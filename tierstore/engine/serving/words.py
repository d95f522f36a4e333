"""What is served, as numbers for compiled readers (`kernels/lookupplan.py` has the layout).

The words hold addresses of memory that belongs to a version's tables and to overlays. `PublishedWords` keeps the views,
whose publisher keeps their versions open, for as long as a compiled reader may be at them. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.reads.view import View
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.routing import Routing
from tierstore.kernels import lookupplan as layout
from tierstore.kernels.codec import address_of

Words = npt.NDArray[np.int64]


def can_be_read(table: Cascade) -> bool:
    """Whether a compiled reader may look up in a table: not where it has a device tier."""
    return table.device is None and table.offer is None


def labels_word(served: Routing) -> int:
    """A number for the labels of one's own that there are: equal for equal ones."""
    return xxhash.xxh3_64_intdigest(repr(sorted(served.labels.items())).encode()) >> 1


class PublishedWords:
    """The views of one `Routing`, `served`, as words, whose address is `address`; 0 where nothing is served."""

    def __init__(self, served: Routing, token_of: Callable[[View], int], epochs: Epochs) -> None:
        self.served = served
        self._kept: list[object] = []
        self._epochs = epochs
        views = [0 if view is None else self._view(view, token_of(view)) for view in (served.active, served.canary)]
        share = min(int(served.share * layout.SHARE_UNIT), layout.SHARE_UNIT)
        self._words = np.array([*views, share, labels_word(served)], np.int64)
        self.address = address_of(self._words) if views[0] else 0

    def _view(self, view: View, token: int) -> int:
        tables = view.open_version.tables
        words = np.zeros(layout.VIEW_WORDS + layout.TABLE_WORDS * len(tables), np.int64)
        words[layout.VIEW_TOKEN], words[layout.VIEW_SEQ], words[layout.VIEW_TABLES] = token, view.seq, len(tables)
        for i, (name, table) in enumerate(tables.items()):
            begin = layout.VIEW_WORDS + layout.TABLE_WORDS * i
            self._table(view, name, table, words[begin : begin + layout.TABLE_WORDS])
        self._kept.append(words)
        return address_of(words)

    def _table(self, view: View, name: str, table: Cascade, words: Words) -> None:
        overlays = np.array([address_of(overlay.words) for overlay in view.overlays_of(name)], np.int64)
        defaults = np.ascontiguousarray(table.default, np.float32), np.ascontiguousarray(table.default, np.float16)
        self._kept += [overlays, *defaults]
        words[layout.HOST_AT] = 0 if table.host is None else table.host.words_at
        words[layout.OVERLAYS], words[layout.OVERLAYS_AT] = len(overlays), address_of(overlays)
        words[layout.DEFAULT_AT], words[layout.HALF_DEFAULT_AT] = (address_of(default) for default in defaults)
        words[layout.TABLE_DIM], words[layout.CODE] = table.spec.dim, table.spec.dtype.code
        words[layout.ROW_BYTES], words[layout.TABLE_ID] = table.spec.row_bytes, self._epochs.table_id(table)
        if table.own is not None:
            words[layout.OWN_AT], words[layout.PARTITIONS] = address_of(table.own.is_own), table.own.count
        shared = self._hashes_shared(view, table)
        words[layout.COLLIDING], words[layout.COLLIDING_AT] = len(shared), address_of(shared)
        words[layout.BASE_AT] = table.store.words_at(table.table_id, table.spec.row_bytes)

    def _hashes_shared(self, view: View, table: Cascade) -> Words:
        """The hashes by which string keys of a table cannot be told apart."""
        colliding = view.colliding.get(table.spec.name)
        shared = np.empty(0, np.int64) if colliding is None else colliding.hashes
        self._kept.append(shared)
        return shared
