"""What a tier is: the batched protocols that the cascade is written against.

A look-up passes its keys through the caches, fastest first, then to the one row store below them. Each
answers what it holds among the keys whose state is `Tier.PENDING`, says so in `state`, and leaves the
rest to the next. Only the row store knows what exists; a cache may forget anything at any time, and
must never answer anything but a key's newest row, or that a key does not exist when it does.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.types import Keys, Rows, States, Vectors


class RowStore(Protocol):
    """The last tier: holds every row of every table of one version. Any thread may read."""

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """Fill rows[i], uint8[n, row_bytes], and state[i], or set state[i] to ABSENT. `keys` ascending and distinct."""

    def words_at(self, table_id: int, row_bytes: int) -> int:
        """The address of words by which kernels read a table (`lookupplan.BASE_WORDS`), until `close`; 0: they cannot."""

    def close(self) -> None: ...


class CacheTier(Protocol):
    """A cache of one table of one version. Any thread may call anything; `lookup` never waits for a writer.

    `seq` is that of the view under which a promoted row was read; see `raise_floor`.
    """

    @property
    def rows_resident(self) -> int: ...

    @property
    def capacity_rows(self) -> int: ...

    @property
    def bytes_in_use(self) -> int: ...

    @property
    def allowed_bytes(self) -> int: ...

    budget_bytes: int  # at most

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Decode rows of resident keys into `out`, the table's default for keys known absent; count heat.

        Returns how many keys were answered with a row.
        """

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Offer distinct keys with their stored rows; admission is the tier's. Returns rows let in."""

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Offer distinct keys that do not exist. Returns keys let in."""

    def raise_floor(self, seq: int) -> None:
        """Refuse from now on what was read under a view older than `seq`, because a delta is about to be folded."""

    def update(self, keys: Keys, rows: Rows, deleted: npt.NDArray[np.bool_]) -> None:
        """Bring what is held of distinct keys up to a delta. Lets no key in."""

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free room with distinct keys, hottest first; none if `seq` is below the floor. Returns rows let in."""

    def hot_keys(self, limit: int) -> Keys:
        """At most `limit` resident keys, distinct, hottest first."""

    def resize(self, fraction: float) -> None:
        """Use this part of the budget, keeping the hottest rows, and give the rest of the memory back."""

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
