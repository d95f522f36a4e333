"""Histogram buckets for latencies, fine enough that a p99 and one a sixth higher fall into different buckets.

Constants, for compiled threads and Python. Metrics show `COARSE_NS`, all of which are among the fine bounds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

COARSE_NS = (100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000,
             250_000_000, 500_000_000, 1_000_000_000, 2_500_000_000, 5_000_000_000, 10_000_000_000)  # fmt: skip
_FROM_NS, _FINE_UPTO_NS, _RATIO = 4_000, 100_000_000, 1.15


def _between(low: int, high: int) -> list[int]:
    steps = math.ceil(math.log(high / low) / math.log(_RATIO)) if high <= _FINE_UPTO_NS else 1
    return [round(low * (high / low) ** (step / steps)) for step in range(1, steps + 1)]


BOUNDS_NS = (_FROM_NS, *(bound for low, high in pairwise((_FROM_NS, *COARSE_NS)) for bound in _between(low, high)))
"""Upper bounds of the buckets but for the last, which has none."""

BUCKETS = len(BOUNDS_NS) + 1
COARSE_FROM = np.array([0, *(BOUNDS_NS.index(bound) + 1 for bound in COARSE_NS)])
"""The fine bucket with which each coarse one begins, for `np.add.reduceat`."""
