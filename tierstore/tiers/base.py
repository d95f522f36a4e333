"""The protocols of tiers: batched look-ups, against which the cascade is written.

A look-up passes its keys through the caches, fastest first, then to the one row store below them. Each tier answers the keys that it holds among
those whose state is `Tier.PENDING`, notes that in `state`, and leaves the others to the next tier. Only the row store knows which keys exist. A cache
may forget anything at any time, but it must never answer with an old row, or call a key absent that exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.types import Keys, Rows, States

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Peek(NamedTuple):
    """A tier's entry for one key, read without counting it: a row as stored, a note that the key does not exist (`absent`), or nothing.

    `heat`: a cache's measure of how often the key was asked for.
    """

    row: bytes | None = None
    absent: bool = False
    heat: Mapping[str, Any] = _NOTHING

    @property
    def holds(self) -> str:
        """`row`, `absent` or `nothing`."""
        return "row" if self.row is not None else "absent" if self.absent else "nothing"


class ReadBy(NamedTuple):
    """The addresses by which kernels read a table of a row store. Valid until the store is closed, and while this object is kept.

    `base_at`: of `disk.layout.BASE`. `changes`, `patches`: `sealed_rows.SOME` or ALL, and the addresses of patches, int64, newest first.
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
        """The addresses by which kernels read a table now; None if they cannot."""

    def close(self) -> None: ...


class Records(Protocol):
    """A reader of a version's own records."""

    def record(self, name: str) -> bytes | None: ...
    def records(self) -> list[str]: ...
    def watermark(self) -> int | None: ...


class VersionStore(RowStore, Protocol):
    """The row store beneath the cascades of a version. Others may write to it too: a row may be newer than the reader's view."""

    def get_at(self, table_id: int, keys: Keys, rows: Rows, state: States, seq: int) -> None:
        """`get` for a view of `seq`. Overloaded if rows may be newer than that: the caller should send the request again.

        Keys that could not be read stay PENDING if they are to be answered with defaults.
        """

    def in_order(self, table_id: int, keys: Keys) -> Keys:
        """`keys` in the order in which they are read fastest: as their rows lie on a drive."""

    def raise_floor(self, table_id: int, seq: int) -> None:
        """As for a cache: from now on refuse rows read under a view older than `seq`. For a store that keeps other machines' rows on this machine."""

    def forget(self, table_id: int, keys: Keys) -> None:
        """Drop rows of these keys: a delta that was folded has changed them."""
