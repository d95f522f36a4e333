"""Counters over the last hour, in steps."""

from __future__ import annotations

import numpy as np

from tierstore.engine.data.hour import HOUR_S, Hour


def test_each_step_has_what_was_counted_in_it_and_how_things_stood_at_its_end() -> None:
    hour = Hour(2, 1, 15)
    assert [hour.note(now_s, numbers) for now_s, numbers in (
        (30.2, (5, 0, 7)), (44.9, (6, 1, 8)), (45.0, (8, 1, 8)), (61.0, (8, 4, 9)), (110.0, (9, 4, 9)),
    )] == [True, False, True, True, True]  # fmt: skip
    assert hour.steps().tolist() == [[45, 15, 3, 1, 8], [60, 15, 0, 3, 9], [105, 45, 1, 0, 9]]
    assert hour.steps(2).tolist() == hour.steps().tolist()[1:]
    assert hour.steps(99).tolist() == hour.steps().tolist()


def test_before_two_notes_there_is_no_step() -> None:
    hour = Hour(1, 1, 60)
    assert hour.steps().shape == (0, 4)
    hour.note(0.0, (1, 1))
    assert hour.steps(10).shape == (0, 4)


def test_it_begins_anew_where_the_clock_was_set_back() -> None:
    hour = Hour(1, 0, 15)
    for now_s, count in ((600.0, 1), (615.0, 2), (300.0, 3), (315.0, 7)):
        assert hour.note(now_s, (count,))
    assert hour.steps().tolist() == [[315, 15, 4]]


def test_an_hour_is_kept_and_no_more_memory_is_taken_whatever_comes() -> None:
    hour, nbytes = Hour(1, 0, 15), Hour(1, 0, 15).nbytes
    for step in range(1000):
        hour.note(15.0 * step, (step * step,))
    steps = hour.steps()
    assert (len(steps), hour.nbytes) == (HOUR_S // 15, nbytes)
    assert steps[-1].tolist() == [15 * 999, 15, 999**2 - 998**2]
    assert np.diff(steps[:, 0]).tolist() == [15] * (len(steps) - 1)
