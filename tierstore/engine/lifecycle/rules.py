"""Rules for a model's versions: what may be done, given the active version and the canary, wherever the pointer is.

Pure functions, which raise Conflict. For this machine `switch.py`, `routes.py` and `drop.py` call them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from tierstore.errors import Conflict


def check_expected(model: str, expected: int | None, active: int | None) -> None:
    if expected not in (None, active):
        raise Conflict(f"model {model!r}: expected version {expected} to be active, got {active}")


def check_active(model: str, active: int | None, expected: int | None, there: Sequence[int]) -> int:
    """The active version, from which a rollback can go back."""
    if active is None:
        raise Conflict(f"model {model!r} has no active version to roll back from; activate one of {there}")
    check_expected(model, expected, active)
    return active


def newest_before(model: str, active: int, there: Sequence[int]) -> int:
    """The version that a rollback goes to, out of `there`, ascending."""
    if not (older := [number for number in there if number < active]):
        raise Conflict(
            f"model {model!r} has no version older than {active}, which serves, to roll back to; a load that failed "
            "changed nothing"
        )
    return older[-1]


def check_canary(model: str, number: int, active: int | None, canary: int | None) -> None:
    """Conflict if a version may not become, or stay, the canary."""
    if active is None:
        raise Conflict(f"model {model!r} has no active version to stand beside; activate {number} instead")
    if number == active:
        raise is_active(model, number)
    if canary not in (None, number):
        raise Conflict(f"version {canary} of {model!r} is the canary; promote or withdraw it first")


def is_active(model: str, number: int) -> Conflict:
    return Conflict(f"version {number} of {model!r} is active; the canary is another one")


def no_canary(model: str, why: str | None = None) -> Conflict:
    return Conflict(f"model {model!r} has no canary" + (f": {why}" if why else ""))


def check_unused(model: str, number: int, active: Container[int | None], canary: int | None) -> None:
    """Conflict if a version may not be dropped. `active`: the active version, and one that is about to be."""
    if number in active:
        raise Conflict(f"version {number} of {model!r} is active; activate another one first")
    if number == canary:
        raise Conflict(f"version {number} of {model!r} is the canary; withdraw it first")


def surplus_of(there: Iterable[int], active: int | None, used: Container[int | None], keep: int) -> list[int]:
    """The versions, ascending, beyond the `keep` newest of those older than the active one; `used` versions do not
    count.
    """
    older = sorted(number for number in there if active is not None and number < active and number not in used)
    return older[: max(0, len(older) - keep)]
