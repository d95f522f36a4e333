"""How often a test does what it does: seldom in `make test`, often in `make thorough`, which runs the tests that count once more.

Those are the tests of Hypothesis and those marked `counted`. LARGE_COUNTS=1 makes the counts of any run large.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

LARGE = os.environ.get("LARGE_COUNTS", "") not in ("", "0")
# of what costs minutes and repeats at another size, or with another server, what other tests do
with_large_counts = pytest.mark.skipif(not LARGE, reason="with large counts alone: `make test-all`")


def few_or_many(few: T, many: T) -> T:
    return many if LARGE else few
