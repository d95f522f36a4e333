"""What a tier is: the batched protocols that the cascade is written against.

A look-up passes its keys through the caches, fastest first, then to the one row store below them. Each
answers the keys that it holds among those whose state is `Tier.PENDING`, says so in `state`, and leaves the
others to the next tier. Only the row store knows which keys exist. A cache may forget anything at any time,
but it must never answer an old row, or that a key does not exist when it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.types import Keys, Rows, States, Vectors

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Peek(NamedTuple):
    """What a tier holds of one key, read without counting it: a row as stored, or that there is none
    (`absent`), or nothing of it.

    `heat`: what a cache knows of how often the key is asked for.
    """

    row: bytes | None = None
    absent: bool = False
    heat: Mapping[str, Any] = _NOTHING

    @property
    def holds(self) -> str:
        """`row`, `absent` or `nothing`."""
        return "row" if self.row is not None else "absent" if self.absent else "nothing"


class ReadBy(NamedTuple):
    """What kernels read a table of a row store by. Its addresses are valid until the store is closed, and as long as it
    is kept.

    `base_at`: of `disk.layout.BASE`. `changes`, `patches`: `sealed_rows.SOME` or ALL, and the addresses of patches,
    int64, the newest first.
    """

    base_at: int
    changes: int
    patches: npt.NDArray[np.int64]
    kept: object


class RowStore(Protocol):
    """The last tier: holds every row of every table of one version. Any thread may read."""

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """Fill rows[i], uint8[n, row_bytes], and state[i], or set state[i] to ABSENT.

        `keys` are ascending and distinct.
        """

    def read_by(self, table_id: int, row_bytes: int) -> ReadBy | None:
        """What kernels read a table by, as it is now; None: they cannot."""

    def close(self) -> None: ...


class Records(Protocol):
    """What a version's own records are read from."""

    def record(self, name: str) -> bytes | None: ...
    def watermark(self) -> int | None: ...


class VersionStore(RowStore, Protocol):
    """The row store beneath the cascades of a version, which may be written by others too: a row may be
    newer than the view that asks.
    """

    def get_at(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        """`get` for a view of `seq`. Overloaded where rows may be newer than that: the request is to be sent again.

        Keys that could not be read stay PENDING where defaults are to be answered for them.
        """

    def raise_floor(self, table_id: int, seq: int) -> None:
        """As of a `CacheTier`, where the store keeps rows of others on this machine."""

    def forget(self, table_id: int, keys: Keys) -> None:
        """Keep no row of these keys: a delta that is folded has changed them."""


class CacheTier(Protocol):
    """A cache of one table of one version. Any thread may call anything; `lookup` never waits for a writer.

    `seq` is the seq of the view under which a promoted row was read; see `raise_floor`.
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
        """Decode rows of resident keys into `out`, the table's default for keys that do not exist; count heat.

        Returns how many keys were answered with a row.
        """

    def peek(self, key: int) -> Peek:
        """What is held of a key, without counting it: neither heat nor hits."""

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Offer distinct keys with their stored rows; admission is the tier's. Returns the rows admitted."""

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Offer distinct keys that do not exist. Returns the keys admitted."""

    def raise_floor(self, seq: int) -> None:
        """From now on refuse rows read under a view older than `seq`, because a delta is about to be folded."""

    def update(self, keys: Keys, rows: Rows, deleted: npt.NDArray[np.bool_]) -> None:
        """Apply a delta to those of its distinct keys that are resident. Admits no key."""

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free room with distinct keys, hottest first; none if `seq` is below the floor.

        Returns the rows admitted.
        """

    def hot_keys(self, limit: int) -> Keys:
        """At most `limit` resident keys, distinct, hottest first."""

    def resize(self, fraction: float) -> None:
        """Use this part of the budget, keep the hottest rows, and give the remaining memory back."""

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
