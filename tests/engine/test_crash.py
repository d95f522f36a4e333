"""Killed at any moment, or without power at it, the store holds everything acknowledged, whole, once, and in order.

`tools/crash_store.py` does the work and runs for as long as one likes; CRASH_ROUNDS makes this test longer.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine.quick_build import in_process
from tools import crash_export, crash_store, crash_work
from tools.crash_check import Acknowledged, Wrong, check

POINTS = (
    2  # a round, beside the kill: after single file operations, with and without power (where there is a C compiler)
)
KINDS = ("", "delta", "", "load", None)  # of steps that are broken off, in turn
MOST_ROUNDS = 20  # times CRASH_ROUNDS: on a slow machine a round does little before it is killed


@pytest.mark.counted
def test_nothing_acknowledged_is_lost_however_often_the_store_is_killed(tmp_path):
    rounds, killed = int(os.environ.get("CRASH_ROUNDS", few_or_many(2, 12))), Counter[str]()
    with crash_store.Crash(tmp_path, seed=20) as test:

        def enough() -> bool:
            done = test.acknowledged.done
            return killed.total() >= rounds and killed["delta"] > 0 and done["delta"] > 5 * rounds and done["load"] > 0

        while not enough() and killed.total() < rounds * MOST_ROUNDS:
            killed[test.round(POINTS, KINDS[killed.total() % len(KINDS)]).split()[0]] += 1
    assert enough(), (killed, test.acknowledged.done)
    if test.records:
        assert test.points.total() > rounds * 2, "kills, and what operations of theirs leave"


def journalled(tmp_path, deltas: int) -> tuple[Acknowledged, tierstore.Store]:
    """A store that was worked on here, and what the journal of that work would say."""
    crash_work.write_snapshot(tmp_path / "snapshot", 1, 0)
    store = tierstore.open(tmp_path / "data", fold_grace_s=60.0, **crash_work.SETTINGS)
    store.load_snapshot(tmp_path / "snapshot")
    for seq in range(1, deltas + 1):
        store.apply_delta(crash_work.delta(3, seq))
    known = Acknowledged(3)
    known.read(["done load 1 0", *(f"done delta {seq}" for seq in range(1, deltas + 1))])
    return known, store


@pytest.mark.parametrize(
    "lines", [["done delta 6"], ["done deactivate"], ["done load 2 0"], ["begin load 2 0", "done load 2 0"]]
)
def test_the_crash_test_notices_what_is_missing(tmp_path, lines):
    known, store = journalled(tmp_path, 5)
    with store:
        check(known, store)
        known.read(lines)
        with pytest.raises(Wrong):
            check(known, store)


def test_the_crash_test_notices_a_row_that_is_wrong_and_a_delta_that_is_half_there(tmp_path):
    known, store = journalled(tmp_path, 5)
    with store:
        with store.model("ctr").view() as view:
            overlay = view.overlays[-1].tables["user"]
            overlay.rows[np.flatnonzero(~overlay.deleted)[-1]] = 0
        with pytest.raises(Wrong, match="rows of 'user' are wrong"):
            check(known, store)


def test_an_unacknowledged_delta_may_be_there_or_not(tmp_path):
    known, store = journalled(tmp_path, 5)
    with store:
        known.read(["begin delta 6"])
        check(known, store)
        assert known.last == 5
        store.apply_delta(crash_work.delta(3, 6))
        known.read(["begin delta 6"])
        check(known, store)
        assert known.last == 6


@pytest.mark.thorough
def test_an_export_that_is_broken_off_does_not_pass_for_one(tmp_path):
    """The short form of `tools/crash_export.py`: of snapshots alone, as a build takes seconds."""
    with in_process(), crash_export.Crash(tmp_path, seed=4, kinds=("snapshot",)) as test:
        test.round(2, most=10, load=False)
        assert test.found["whole"]
        if test.records:
            assert test.points.total() == 12
            assert test.found["made again"] == test.found["refused"] + test.found["not there"] > 0
        for what, why in ("export gone", "gone was acknowledged"), ("delta 9999", "9999 was acknowledged"):
            (tmp_path / "disk/journal").write_text(f"begin {what}\ndone {what}\n")
            with pytest.raises(Wrong, match=why):
                test._look(tmp_path / "disk", "signal")
