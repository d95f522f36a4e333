"""Skew of look-ups: how unevenly keys are looked up, and the hit rate of a cache of the hottest rows.

Immutable values; any thread.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tierstore.errors import InvalidInput

_EXACT = 1000  # terms of a sum that are added up; the others are integrated

# By how much the host tier's miss ratio is above that of a cache that always holds the hottest rows, by the cache's
# share of all rows: medians over Zipf 0.8 to 1.2 and the ads trace, from the table of
# docs/decisions/promotion-policy.md.
_POLICY_LOSS = ((0.0, 1.05), (0.01, 1.05), (0.1, 1.11), (1.0, 1.2))

# embedding_bag/2021/locality_stats.txt of github.com/facebookresearch/dlrm_datasets, set fbgemm_t856_bs65536:
# 887,017,990 accesses to 128,435,723 keys of 856 tables. (share of the keys, share of the accesses) by how often a key
# was looked up again: from 32,768 times on, from 16,384, and so on by halves, down to once and never. The key shares of
# the first seven are below a rounding step there, and follow from the accesses.
_ADS = (
    (0.0000028, 0.019),
    (0.0000069, 0.023),
    (0.0000185, 0.031),
    (0.0000513, 0.043),
    (0.000114, 0.048),
    (0.00023, 0.048),
    (0.00047, 0.049),
    (0.001, 0.050),
    (0.002, 0.052),
    (0.005, 0.058),
    (0.011, 0.073),
    (0.032, 0.104),
    (0.072, 0.121),
    (0.112, 0.101),
    (0.139, 0.068),
    (0.152, 0.044),
    (0.473, 0.068),
)


class Reuse(Protocol):
    """A distribution of look-ups over rows."""

    @property
    def name(self) -> str: ...

    def ideal(self, cached: float, rows: float) -> float:
        """The share of look-ups for the `cached` hottest of `rows`."""


@dataclass(frozen=True, slots=True)
class Zipf:
    """The row of rank k is looked up in proportion to 1 / k**exponent."""

    exponent: float

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 3:
            raise InvalidInput(f"zipf: expected an exponent from 0 to 3, got {self.exponent:g}")

    @property
    def name(self) -> str:
        return f"Zipf {self.exponent:g}" if self.exponent else "uniform"

    def ideal(self, cached: float, rows: float) -> float:
        return _harmonic(min(cached, rows), self.exponent) / _harmonic(rows, self.exponent)


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of rows, the hottest first: (share of the rows, share of the look-ups); even within a class."""

    name: str
    shares: Sequence[tuple[float, float]]

    def ideal(self, cached: float, rows: float) -> float:
        remaining, answered = min(1.0, cached / rows), 0.0
        for of_rows, of_lookups in self.shares:
            part = min(1.0, remaining / of_rows)
            answered += part * of_lookups
            remaining -= part * of_rows
        return min(1.0, answered)


@dataclass(frozen=True, slots=True)
class Measured:
    """Hit rates that a running cache would have, by the share of the rows that it holds:
    ascending, both from 0 to 1.
    """

    name: str
    points: Sequence[tuple[float, float]]

    def hit_rate(self, share: float) -> float:
        """The hit rate with that share cached, by the logarithm of the share between two points and below the first."""
        points = [point for point in self.points if point[0] < 1.0]
        if not points:
            return share
        at = min(max(1, bisect_left([point[0] for point in points], share)), len(points))
        (low, low_rate), (high, high_rate) = points[at - 1], [*points, (1.0, 1.0)][at]
        rate = low_rate + math.log(share / low) / math.log(high / low) * (high_rate - low_rate)
        return max(rate, low_rate * share / low) if share < low else rate


ADS = Classes("ads models (Meta, 2021)", _ADS)


def hit_rate(reuse: Reuse | Measured, cached: float, rows: float) -> float:
    """The share of look-ups that the host tier answers once it has settled in, if it holds `cached` of `rows` rows."""
    if cached >= rows:
        return 1.0
    if cached <= 0:
        return 0.0
    if isinstance(reuse, Measured):
        return reuse.hit_rate(cached / rows)
    return 1.0 - min(1.0, (1.0 - reuse.ideal(cached, rows)) * _loss(cached / rows))


def read_classes(path: Path) -> Classes:
    """A distribution from a file of lines `rows,look-ups`: how many rows (or what share),
    and how many look-ups they got.

    Lines may come in any order, with a header or without. InvalidInput for anything else.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if line and not line[0].lstrip().startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error
    pairs: list[tuple[float, float]] = []
    for number, line in enumerate(lines):
        try:
            rows, lookups = (float(word) for word in line)
        except ValueError:
            if number == 0:
                continue  # the header
            raise InvalidInput(f"{path}: expected lines of `rows,look-ups`, got {','.join(line)!r}") from None
        if not (0 < rows < math.inf and 0 <= lookups < math.inf):
            raise InvalidInput(f"{path}: expected positive numbers, got {','.join(line)!r}")
        pairs.append((rows, lookups))
    all_rows, all_lookups = sum(rows for rows, _ in pairs), sum(lookups for _, lookups in pairs)
    if not all_lookups:
        raise InvalidInput(f"{path}: expected lines of `rows,look-ups`, got none with a look-up")
    pairs.sort(key=lambda pair: pair[1] / pair[0], reverse=True)
    return Classes(path.name, tuple((rows / all_rows, lookups / all_lookups) for rows, lookups in pairs))


def _harmonic(n: float, exponent: float) -> float:
    """The sum of 1 / k**exponent for k = 1 … n; n need not be whole."""
    exact = int(min(n, _EXACT))
    total = math.fsum(k**-exponent for k in range(1, exact + 1))
    if n <= exact:
        return max(total, 1e-300) if n >= 1 else n
    low, high = exact + 0.5, n + 0.5
    if abs(exponent - 1.0) < 1e-9:
        return total + math.log(high / low)
    return total + float(high ** (1.0 - exponent) - low ** (1.0 - exponent)) / (1.0 - exponent)


def _loss(share: float) -> float:
    """The hit rate that is lost at a share, between the measured points by its logarithm."""
    at = bisect_left([point for point, _ in _POLICY_LOSS], share)
    (low, low_loss), (high, high_loss) = _POLICY_LOSS[max(at - 1, 0)], _POLICY_LOSS[at]
    if low <= 0:
        return high_loss
    part = math.log(share / low) / math.log(high / low)
    return low_loss + part * (high_loss - low_loss)
