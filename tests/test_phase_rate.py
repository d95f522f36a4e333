"""What is said of how long something will take: nothing before it can be known, and then what is left."""

from __future__ import annotations

import pytest

from tierstore.phase_rate import PhaseRate
from tierstore.types import Progress


def test_a_slow_start_says_nothing_of_what_is_left() -> None:
    """Helpers start for three seconds, and then 100,000 rows a second are done."""
    rate, total = PhaseRate(Progress("read", 0, 2_000_000), 0.0), 2_000_000
    assert rate.left_s(2.9) is None
    rate.note(Progress("read", 10_000, total), 3.0)
    assert rate.left_s(3.0) is None
    for second in range(1, 21):
        done = 10_000 + 99_500 * second
        rate.note(Progress("read", done, total), 3.0 + second)
        left_s = rate.left_s(3.0 + second)
        if done < total / 10:
            assert left_s is None
        else:
            assert left_s == pytest.approx((total - done) / 99_500)
    assert rate.left_s(23.0) == 0.0


def test_of_a_long_phase_it_is_said_after_half_a_minute() -> None:
    rate = PhaseRate(Progress("read", 500, 1_000_500), 0.0)
    for second in range(1, 60):
        rate.note(Progress("read", 500 + 10 * second, 1_000_500), float(second))
        left_s = rate.left_s(float(second))
        assert (left_s is None) == (second < 30)
    assert left_s == pytest.approx((1_000_000 - 590) / 10)
    assert rate.per_second(59.0) == 10


@pytest.mark.parametrize(("done", "total"), [(0, 0), (10, 0), (50, 40)])
def test_nothing_is_said_where_nobody_knows_how_much_it_is(done: int, total: int) -> None:
    rate = PhaseRate(Progress("warm", 0, total), 0.0)
    rate.note(Progress("warm", done, total), 1.0)
    rate.note(Progress("warm", done, total), 100.0)
    assert rate.left_s(100.0) is None
