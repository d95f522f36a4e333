"""The rows of one open version, wherever they are: its cascades read them, its folds change them, `explain` shows
them.
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
    """The place of one key's row, for a person: on which machine, and the entry there.

    `explained`: that machine's own report, an entry of `explain`. `error`: why neither is known.
    """

    node: str | None = None
    partition: tuple[int, int] | None = None  # (its number, the number of all)
    peek: Peek | None = None
    error: str | None = None
    explained: dict[str, Any] | None = None


# (table, codes, seq of the view) → a place for each code
FindPlaces = Callable[[str, Keys, int], Sequence[Place]]


@dataclass(slots=True)
class Beneath:
    """The entries for a key beneath the caches in memory: (tier, entry, more about it), in the order of look-ups.

    `answer`: the row that a look-up reads, None if unknown. `newer_than_overlays`: it may have deltas that are still
    in memory, so that caches need not agree with it for a key that overlays have.
    """

    tiers: list[tuple[str, Peek, dict[str, Any]]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # by tier
    answer: Peek | None = None
    newer_than_overlays: bool = False
    time_s: int | None = None  # when the row was last written, if that is kept


class VersionRows(VersionStore, Records, Protocol):
    """The row store of a version, with everything else that depends on the place of its rows."""

    @property
    def disk(self) -> DiskTier | None:
        """The version's files on this machine; without them the placement refuses everything that needs files."""

    def fold(self, info: VersionInfo, overlay: Overlay) -> None:
        """Apply an overlay to the rows, and note it in `info`. One thread at a time."""

    def compaction_due(self) -> bool:
        """Whether `compact` has anything to do."""

    def compaction_urgent(self) -> bool:
        """Whether there are so many files that it must not wait for other work."""

    def compact(self, info: VersionInfo, give_up: Callable[[], bool]) -> bool:
        """Merge the files of changed rows, on the thread that folds; `give_up` is called often. Returns whether there
        are other files now.
        """

    def may_fold(self, seq: int) -> bool:
        """Whether deltas up to `seq` may be folded: another node may have to apply them to the rows first."""

    def places(self, table: str, codes: Keys, seq: int) -> Sequence[Place | None]:
        """The place of each code's row, read for a view of `seq`; None: here."""

    def beneath(self, info: VersionInfo, table: str, code: int, place: Place | None) -> Beneath:
        """The entries for a code whose row is at `place`."""

    def tier_bytes(self, table_id: int, table_bytes: int, of_all: int) -> Mapping[str, int]:
        """Bytes by tier of a table whose rows have `table_bytes` of the `of_all` bytes of all tables."""

    def cache_stats(self, table_id: int) -> dict[str, int]:
        """Counts of the SSD cache for a table's rows of other machines; empty if none are kept."""

    def bytes_on_disk(self) -> int:
        """Bytes on this machine's disk."""

    def stats(self) -> dict[str, Any]: ...
