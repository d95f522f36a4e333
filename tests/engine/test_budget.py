"""Budgets are bounds: what they hand out never adds up to more, whoever comes and goes."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tierstore
from tests.engine.quick_build import in_process
from tierstore.engine.budget import MIN_FRACTION, HostBudget, OverlayBudget, deal
from tierstore.errors import Overloaded, TooLarge

in_ci = settings(max_examples=200, deadline=None, derandomize=True)
sizes = st.integers(0, 10_000)
weights = st.floats(0, 1000).filter(lambda w: w == 0 or w > 1e-3)


# --- deal


@in_ci
@given(total=sizes, shares=st.lists(st.tuples(sizes, weights), min_size=1, max_size=8))
def test_dealt_shares_stay_within_the_total_and_every_need(total, shares):
    needs, by = [need for need, _ in shares], [weight for _, weight in shares]
    dealt = deal(total, needs, by)
    assert sum(dealt) <= total
    assert all(0 <= share <= need for share, need in zip(dealt, needs, strict=True))


@in_ci
@given(total=sizes, shares=st.lists(st.tuples(sizes, st.floats(0.1, 100)), min_size=1, max_size=8))
def test_nothing_is_held_back_while_somebody_needs_it(total, shares):
    needs, by = [need for need, _ in shares], [weight for _, weight in shares]
    left = min(total, sum(needs)) - sum(deal(total, needs, by))
    assert 0 <= left <= len(shares)  # each share is rounded down


@in_ci
@given(total=sizes, shares=st.lists(st.tuples(sizes, st.floats(0.1, 100)), min_size=2, max_size=8))
def test_who_goes_short_gets_its_weight(total, shares):
    needs, by = [need for need, _ in shares], [weight for _, weight in shares]
    dealt = deal(total, needs, by)
    short = [(share, weight) for share, need, weight in zip(dealt, needs, by, strict=True) if share < need]
    for share, weight in short:
        for other, its_weight in zip(dealt, by, strict=True):
            assert other <= (share + 1) / weight * its_weight + 1e-6  # nobody has more for its weight


def test_what_one_leaves_goes_to_the_others():
    assert deal(100, [10, 1000, 1000], [1, 1, 2]) == [10, 30, 60]
    assert deal(100, [10, 20], [1, 1]) == [10, 20]
    assert deal(0, [10, 20], [1, 1]) == [0, 0]


# --- host budget


class Holding:
    """A version that only counts its bytes."""

    def __init__(self, need: int) -> None:
        self.host_need_bytes = need
        self.budget_bytes, self.host_fraction = 0, 1.0
        self.resized: list[float] = []

    @property
    def host_reserved_bytes(self) -> int:
        return math.ceil(self.budget_bytes * self.host_fraction)

    def attach_host(self, budget_bytes, fraction, like):
        self.budget_bytes, self.host_fraction, self.like = budget_bytes, fraction, like

    def resize_host(self, fraction):
        assert MIN_FRACTION <= fraction <= 1
        self.host_fraction = fraction
        self.resized.append(fraction)


def test_the_only_version_gets_what_it_needs_and_no_more_than_there_is():
    for need, given_ in ((300, 300), (5000, 1000)):
        budget, version = HostBudget(1000), Holding(need)
        budget.admit(version, None)
        assert (version.host_reserved_bytes, version.host_fraction, budget.used) == (given_, 1.0, given_)


def test_a_replacement_takes_half_while_the_old_one_is_halved_and_grows_once_it_is_gone():
    budget, old, new = HostBudget(1024), Holding(5000), Holding(5000)
    budget.admit(old, None)
    budget.admit(new, old)
    assert (old.host_reserved_bytes, new.host_reserved_bytes) == (512, 512)
    assert new.like is old
    old.budget_bytes = 0
    budget.release(old)
    budget.settle()
    assert (new.host_fraction, budget.used) == (1.0, 1024)


def test_a_replacement_that_fails_gives_its_share_back():
    budget, old, new = HostBudget(1024), Holding(5000), Holding(5000)
    budget.admit(old, None)
    budget.admit(new, old)
    budget.release(new)
    budget.settle()
    assert (old.host_fraction, budget.used) == (1.0, 1024)


def test_no_one_is_halved_while_there_is_room():
    budget, old, new = HostBudget(1024), Holding(300), Holding(300)
    budget.admit(old, None)
    budget.admit(new, old)
    assert not old.resized
    assert budget.used == 450


def test_another_model_makes_room_for_a_new_one():
    budget, first, second = HostBudget(1024), Holding(3000), Holding(1000)
    budget.admit(first, None)
    budget.admit(second, None)
    assert first.host_reserved_bytes >= 512
    assert second.host_reserved_bytes == 256
    assert budget.used <= 1024


@in_ci
@example(total=3, steps=[("load", 3, 0), ("load", 2, 0)])
@given(
    total=st.integers(1, 5000),
    steps=st.lists(
        st.tuples(st.sampled_from(["load", "switch", "fail", "drop"]), st.integers(0, 6000), sizes), max_size=25
    ),
)
def test_the_host_budget_holds_whoever_comes_and_goes(total, steps):
    budget = HostBudget(total)
    serving: list[Holding] = []
    for step, need, pick in steps:
        old = serving[pick % len(serving)] if serving else None
        new = Holding(need)
        if step == "drop":
            if old is None:
                continue
            serving.remove(old)
            budget.release(old)
        else:
            replaced = None if step == "load" else old
            budget.admit(new, replaced)
            assert budget.used <= total
            assert new.budget_bytes <= need
            gone = new if step == "fail" else replaced
            if gone is not new:
                serving.append(new)
            if gone in serving:
                serving.remove(gone)
            budget.release(gone)
        budget.settle()
        assert budget.used <= total
        assert budget.used == sum(holding.host_reserved_bytes for holding in serving)


def test_memory_that_is_mapped_stays_within_the_budget_for_wide_rows(tmp_path):
    """A table of wide rows holds few sets, which is where halving in place reaches its limit."""
    with in_process(), tierstore.open(tmp_path / "data", host_budget="1MiB", fold_grace_s=0) as store:
        worst = 0

        def note(_):
            nonlocal worst
            tables = [table for v in store._shared.host_budget._holders for table in v.tables.values()]
            worst = max(worst, sum(table.host.bytes_in_use for table in tables if table.host is not None))

        for version in (1, 2, 3):
            where = tmp_path / f"wide-{version}"
            with tierstore.SnapshotWriter(where, model="wide", version=version) as writer:
                for table in "abcd":
                    rows = np.ones((64, 768), np.float32)
                    writer.table(table, dim=768).write(np.arange(64), rows)
                    writer.feature(table, table=table)
            store.load_snapshot(where, progress=note)
        assert 0 < worst <= 1 << 20


def test_a_small_table_of_wide_rows_is_held_as_well_by_the_version_that_follows(tmp_path):
    sizes = {"a": (20, 1024), "b": (50, 768), "c": (60, 512)}  # rows, numbers a row: about a set of the host tier
    with in_process(), tierstore.open(tmp_path / "data", host_budget="64MiB", fold_grace_s=0) as store:
        for version in (1, 2):
            where = tmp_path / f"small-{version}"
            with tierstore.SnapshotWriter(where, model="small", version=version) as writer:
                for table, (n, dim) in sizes.items():
                    writer.table(table, dim=dim).write(np.arange(n), np.ones((n, dim), np.float32))
                    writer.feature(table, table=table)
            store.load_snapshot(where)
            with store.model("small").view() as view:
                for table, (n, _) in sizes.items():
                    host = view.holder.tables[table].host
                    assert host is not None
                    assert host.capacity_rows >= min(n, 56)


# --- overlay budget


def test_overlay_bytes_are_bounded_and_come_back():
    budget = OverlayBudget(100)
    budget.take(60)
    with pytest.raises(Overloaded, match=r"60 of 100"):
        budget.take(41)
    budget.take(40)
    assert budget.used == 100
    budget.give(60)
    budget.take(60)
    with pytest.raises(TooLarge, match="101"):
        budget.take(101)
    assert budget.used == 100


def test_overlay_bytes_are_counted_right_by_many_threads():
    budget, refused = OverlayBudget(1000), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for nbytes in rng.integers(1, 600, 300).tolist():
            try:
                budget.take(nbytes)
            except Overloaded:
                refused.append(nbytes)
                continue
            assert budget.used <= 1000
            budget.give(nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert budget.used == 0
