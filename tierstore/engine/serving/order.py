"""The serving order of a model's versions, and why each was left: where a rollback goes, and what goes first.

Immutable values and pure functions. On this machine it is a part of the model's document (`document.py`), in a cluster
of the pointer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

REPLACED = "replaced"  # another version was activated, or promoted, in its place
DEACTIVATED = "deactivated"  # nothing was to serve
ROLLBACK = "rollback"  # a rollback has left it
WITHDRAWN = "withdrawn"  # it was a canary and never active
_REASONS = frozenset({REPLACED, DEACTIVATED, ROLLBACK, WITHDRAWN})
REJECTED = frozenset({ROLLBACK, WITHDRAWN})

Serving = tuple[int | None, int | None]  # the active version and the canary


@dataclass(frozen=True, slots=True)
class ServingOrder:
    """`left`: (version, why) of versions that served and do not any more, each once, in the order in which they were
    left.

    A version left by a rollback, or withdrawn, is **rejected**: no rollback goes to it, and it goes first.
    """

    left: tuple[tuple[int, str], ...] = ()

    @classmethod
    def by_number(cls, versions: Iterable[int], active: int | None) -> ServingOrder:
        """The order for a model that has none on record: the versions older than the active one, by number."""
        return cls(tuple((number, REPLACED) for number in sorted(versions) if active is not None and number < active))

    @classmethod
    def parse(cls, document: Any) -> ServingOrder:
        """From its JSON. TypeError or ValueError if it is invalid."""
        left = tuple((int(number), str(why)) for number, why in document)
        if len(dict(left)) < len(left) or not {why for _, why in left} <= _REASONS:
            raise ValueError(f"expected versions, each once, with one of {sorted(_REASONS)}")
        return cls(left)

    def document(self) -> list[list[Any]]:
        return [list(each) for each in self.left]

    def __contains__(self, version: int) -> bool:
        return any(number == version for number, _ in self.left)

    def why(self, version: int) -> str | None:
        """Why a version was left; None if it never served, or serves."""
        return next((why for number, why in self.left if number == version), None)

    @property
    def rejected(self) -> list[int]:
        """The rejected versions, the one that was left last at the end."""
        return [number for number, why in self.left if why in REJECTED]

    @property
    def served(self) -> list[int]:
        """The versions that a rollback may go to, the one that served last at the end."""
        return [number for number, why in self.left if why not in REJECTED]

    def last_of(self, versions: Container[int]) -> int | None:
        """The version that served last, of those."""
        return next((number for number in reversed(self.served) if number in versions), None)

    def first_to_go(self, versions: Iterable[int]) -> list[int]:
        """Versions in the order in which they go: rejected, never served, then those that served longest ago."""
        there = set(versions)
        never = [number for number in sorted(there) if number not in self]
        return [number for number in (*self.rejected, *never, *self.served) if number in there]

    def without(self, versions: Container[int | None]) -> ServingOrder:
        """The same without versions that are gone, or serve again."""
        return ServingOrder(tuple(each for each in self.left if each[0] not in versions))

    def after(self, old: Serving, new: Serving, why: str) -> ServingOrder:
        """The order after a change of what serves: the active version and the canary. `why` the active one is left.

        A canary that was active before keeps its place.
        """
        order = self.without([new[0]])
        if old[1] not in (None, *new) and old[1] not in order:
            order = ServingOrder((*order.left, (old[1], WITHDRAWN)))
        if old[0] not in (None, new[0]):
            order = ServingOrder((*order.without([old[0]]).left, (old[0], why)))
        return order
