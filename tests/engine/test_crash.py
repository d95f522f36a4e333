"""Killed with SIGKILL at any moment, the store holds everything acknowledged, whole, once, and in order.

`tools/crash_test.py` does the work and runs for as long as one likes; CRASH_ROUNDS makes this test longer.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

import tierstore
from tests.engine import quick_build
from tools import crash_test
from tools.crash_test import CrashTest, Known, Wrong

MOST_ROUNDS = 20  # times CRASH_ROUNDS: on a slow machine a round does little before it is killed


def test_nothing_acknowledged_is_lost_however_often_the_store_is_killed(tmp_path):
    rounds, killed = int(os.environ.get("CRASH_ROUNDS", 16)), Counter[str]()
    with CrashTest(tmp_path, seed=20) as test:

        def enough() -> bool:
            done = test.known.done
            return killed.total() >= rounds and killed["delta"] > 0 and done["delta"] > 100 and done["load"] > 1

        while not enough() and killed.total() < rounds * MOST_ROUNDS:
            killed[test.round().split()[0]] += 1
    assert enough(), (killed, test.known.done)


def journalled(tmp_path, deltas: int) -> tuple[Known, tierstore.Store]:
    """A store that was worked on here, and what the journal of that work would say."""
    crash_test.write_snapshot(tmp_path / "snapshot", 1, 0)
    store = tierstore.open(tmp_path / "data", fold_grace_s=60.0, **crash_test.SETTINGS)
    with quick_build.in_process():
        store.load_snapshot(tmp_path / "snapshot")
    for seq in range(1, deltas + 1):
        store.apply_delta(crash_test.delta(3, seq))
    known = Known(3)
    known.read(["done load 1 0", *(f"done delta {seq}" for seq in range(1, deltas + 1))])
    return known, store


@pytest.mark.parametrize(
    "lines", [["done delta 6"], ["done deactivate"], ["done load 2 0"], ["begin load 2 0", "done load 2 0"]]
)
def test_the_crash_test_notices_what_is_missing(tmp_path, lines):
    known, store = journalled(tmp_path, 5)
    with store:
        crash_test.check(known, store)
        known.read(lines)
        with pytest.raises(Wrong):
            crash_test.check(known, store)


def test_the_crash_test_notices_a_row_that_is_wrong_and_a_delta_that_is_half_there(tmp_path):
    known, store = journalled(tmp_path, 5)
    with store:
        with store.model("ctr").view() as view:
            overlay = view.overlays[-1].tables["user"]
            overlay.rows[np.flatnonzero(~overlay.deleted)[-1]] = 0
        with pytest.raises(Wrong, match="rows of 'user' are wrong"):
            crash_test.check(known, store)


def test_an_unacknowledged_delta_may_be_there_or_not(tmp_path):
    known, store = journalled(tmp_path, 5)
    with store:
        known.read(["begin delta 6"])
        crash_test.check(known, store)
        assert known.last == 5
        store.apply_delta(crash_test.delta(3, 6))
        known.read(["begin delta 6"])
        crash_test.check(known, store)
        assert known.last == 6
