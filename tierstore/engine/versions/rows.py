"""The rows of one open version, wherever they are: what its cascades read, its folds move
on, and `explain` looks into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstore.engine.data.overlay import Overlay
from tierstore.engine.versions.info import VersionInfo
from tierstore.tiers.base import Peek, Records, VersionStore
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys


@dataclass(slots=True)
class Place:
    """Where the row of one key is, for a person who wants to know: on which machine, and what that holds of it.

    `explained`: what that machine says itself, an entry of `explain`. `error`: why there is neither.
    """

    node: str | None = None
    partition: tuple[int, int] | None = None  # (its number, of how many)
    peek: Peek | None = None
    error: str | None = None
    explained: dict[str, Any] | None = None


# (table, codes, seq of the view) → one a code
FindPlaces = Callable[[str, Keys, int], Sequence[Place]]


@dataclass(slots=True)
class Beneath:
    """What lies beneath the caches in memory of one key: (tier, what, more about it) as look-ups ask them.

    `answer`: what a look-up reads, None where that is not known. `newer_than_overlays`: it may have deltas that are in
    memory still, so that caches of a key that overlays have need not agree with it.
    """

    tiers: list[tuple[str, Peek, dict[str, Any]]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # by tier
    answer: Peek | None = None
    newer_than_overlays: bool = False
    time_s: int | None = None  # when the row was last written, where that is kept


class VersionRows(VersionStore, Records, Protocol):
    """The row store of a version, with what else depends on where its rows are."""

    @property
    def disk(self) -> DiskTier | None:
        """The version's files on this machine; without them the placement allows nothing that needs files."""

    def fold(self, info: VersionInfo, overlay: Overlay) -> None:
        """Have the rows be those with an overlay, and `info` say so. One thread at a time."""

    def needs_tidying(self) -> bool:
        """Whether `tidy` has anything to do."""

    def must_tidy(self) -> bool:
        """Whether there are so many files that it must not wait for other work."""

    def tidy(self, info: VersionInfo, give_up: Callable[[], bool]) -> None:
        """Put files of changed rows in order; `give_up` is asked again and again. The thread that folds."""

    def may_fold(self, seq: int) -> bool:
        """Whether deltas up to `seq` may be folded: another node may have to bring them into the rows first."""

    def places(self, table: str, codes: Keys, seq: int) -> Sequence[Place | None]:
        """Where the row of each code is, read for a view of `seq`; None: here."""

    def beneath(self, info: VersionInfo, table: str, code: int, place: Place | None) -> Beneath:
        """What is held of a code whose row is at `place`."""

    def tier_bytes(self, table_id: int, table_bytes: int, of_all: int) -> Mapping[str, int]:
        """Bytes by tier of a table, whose rows have `table_bytes` of the `of_all` of all tables."""

    def cache_stats(self, table_id: int) -> dict[str, int]:
        """Figures of the cache of a table's rows of other machines that are kept on this
        machine's SSD; empty where none are.
        """

    def bytes_on_disk(self) -> int:
        """How many bytes are kept on this machine's disk."""

    def stats(self) -> dict[str, Any]: ...
