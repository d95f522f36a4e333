"""How often a test does what it does: seldom in `make test`, often in `make thorough`, which runs the tests that count once more.

Those are the tests of Hypothesis and those marked `counted`. LARGE_COUNTS=1 makes the counts of any run large.
"""

from __future__ import annotations

import os

LARGE = os.environ.get("LARGE_COUNTS", "") not in ("", "0")


def few_or_many(few: int, many: int) -> int:
    return many if LARGE else few
