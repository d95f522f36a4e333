"""The served state as numbers for compiled readers (`lookup/plans.py` has the layout).

The words hold addresses of memory that belongs to a version's tables and to overlays. `PublishedWords` keeps the
views, whose publisher keeps their versions open, while a compiled reader may use them. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.reads.view import View
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.routing import Routing
from tierstore.kernels.codec import address_of
from tierstore.lookup import plans as layout

Words = npt.NDArray[Any]


def labels_word(served: Routing) -> int:
    """A number for the free labels: equal for equal labels."""
    return xxhash.xxh3_64_intdigest(repr(sorted(served.labels.items())).encode()) >> 1


class PublishedWords:
    """The views of one `Routing`, `served`, as words at `address`, which is 0 if nothing is served."""

    def __init__(self, served: Routing, token_of: Callable[[View], int], epochs: Epochs) -> None:
        self.served = served
        self._kept: list[object] = []
        self._epochs = epochs
        views = [0 if view is None else self._view(view, token_of(view)) for view in (served.active, served.canary)]
        share = min(int(served.share * layout.SHARE_UNIT), layout.SHARE_UNIT)
        self._words = layout.SERVED.make(active=views[0], canary=views[1], share=share, labels=labels_word(served))
        self.address = address_of(self._words) if views[0] else 0

    def _view(self, view: View, token: int) -> int:
        tables = layout.TABLE.new(len(view.open_version.tables))
        for i, (name, table) in enumerate(view.open_version.tables.items()):
            tables[i] = self._table(view, name, table)
        made = layout.VIEW.make(token=token, seq=view.seq, tables=address_of(tables))
        self._kept += [tables, made]
        self._epochs.views[address_of(made)] = view
        return address_of(made)

    def _table(self, view: View, name: str, table: Cascade) -> Words:
        under, shared = view.table(name), self._hashes_shared(view, table)
        on_disk = table.store.read_by(table.table_id, table.spec.row_bytes)
        self._kept += [under, on_disk]
        words = under.words.copy()
        words["id"] = self._epochs.table_id(table)
        if on_disk is not None:
            words["base"], words["changes"] = on_disk.base_at, on_disk.changes
            words["patches"], words["patches_at"] = len(on_disk.patches), address_of(on_disk.patches)
        if table.own is not None:
            words["own_at"], words["partitions"] = address_of(table.own.is_own), table.own.count
        words["colliding"], words["colliding_at"] = len(shared), address_of(shared)
        return words

    def _hashes_shared(self, view: View, table: Cascade) -> Words:
        """The hashes that several string keys of a table share."""
        colliding = view.colliding.get(table.spec.name)
        shared = np.empty(0, np.int64) if colliding is None else colliding.hashes
        self._kept.append(shared)
        return shared
