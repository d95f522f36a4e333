"""Which plans come to little enough to be run where a request was received: a fraction of a millisecond's work. Any thread."""

from __future__ import annotations

from tierstore.service.plane.plan import Plan

DIRECT_KEYS = 8192
DIRECT_WORK_BYTES = 1 << 20  # of rows


def is_short(plan: Plan) -> bool:
    """Whether what it comes to is little enough to keep no other request waiting."""
    return (
        plan.dense is None
        and plan.numbers is None
        and plan.work_bytes <= DIRECT_WORK_BYTES
        and plan.keys <= DIRECT_KEYS
    )
