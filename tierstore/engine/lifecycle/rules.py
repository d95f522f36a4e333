"""Rules for a model's versions: what may be done, given the active version and the canary, wherever the pointer is.

Pure functions, which raise Conflict. For this machine `switch.py`, `routes.py` and `drop.py` call them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from tierstore.engine.serving.order import ServingOrder
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


def served_last(model: str, active: int, there: Sequence[int], order: ServingOrder) -> int:
    """The version that a rollback from the active one goes to, out of `there`: the one that served last."""
    before = order.without([active]).last_of(there)
    if before is None:
        rejected = {number: order.why(number) for number in order.rejected if number in there}
        others = ", ".join(f"{n} ({rejected.get(n, 'never active')})" for n in there if n != active) or "none"
        raise Conflict(
            f"model {model!r} has no version that served before {active} to roll back to; others that are kept: "
            f"{others}, which can be activated by number. A load that failed changed nothing"
        )
    return before


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


def is_waiting(number: int, active: int | None, order: ServingOrder) -> bool:
    """Whether a version that does not serve is to serve one day: it is newer than the active one and never served."""
    return number > (active or 0) and number not in order


def is_to_serve(number: int, active: int | None, order: ServingOrder) -> bool:
    """Whether a version that does not serve is to serve without being named: a rollback may go to it, or it waits."""
    return number in order.served or is_waiting(number, active, order)


def surplus_of(
    there: Iterable[int], active: int | None, used: Container[int | None], keep: int, order: ServingOrder
) -> list[int]:
    """The versions beyond the `keep` that served last, in the order in which they go: rejected ones, those that never
    served, then those that served longest ago.

    `used` versions and those that wait do not count. A version that was left last, rejected, and newer than the active
    one stays until another one serves: somebody may want to look into it.
    """
    if active is None:
        return []
    others = [
        number
        for number in sorted(there)
        if number != active and number not in used and not is_waiting(number, active, order)
    ]
    going = order.first_to_go(others)
    last = [number for number, _ in order.left[-1:] if number > active and number in order.rejected]
    return [number for number in going[: max(0, len(going) - keep)] if number not in last]
