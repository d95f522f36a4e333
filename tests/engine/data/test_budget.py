"""Budgets are bounds: what they hand out never adds up to more, whoever comes and goes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tierstore
from tests.counts import few_or_many
from tests.engine.quick_build import in_process
from tests.engine.scenes import eventually
from tierstore.engine.data.budget import HostBudget, OverlayBudget, deal, deal_caches
from tierstore.errors import Overloaded, TooLarge

in_ci = settings(max_examples=few_or_many(40, 200), derandomize=True)
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
    unused = min(total, sum(needs)) - sum(deal(total, needs, by))
    assert 0 <= unused <= len(shares)  # each share is rounded down


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


# --- deal_caches

models = st.lists(st.tuples(sizes, st.integers(0, 3)), min_size=1, max_size=8)


@in_ci
@given(total=sizes, open_=models)
def test_caches_are_dealt_within_the_total_and_nothing_is_held_back(total, open_):
    needs, whose = [need for need, _ in open_], [model for _, model in open_]
    dealt = deal_caches(total, needs, whose)
    assert all(0 <= share <= need for share, need in zip(dealt, needs, strict=True))
    assert sum(dealt) <= total
    assert min(total, sum(needs)) - sum(dealt) <= len(needs)


@in_ci
@given(total=sizes, needs=st.lists(sizes, min_size=1, max_size=8))
def test_models_go_short_in_proportion_to_what_they_need(total, needs):
    dealt = deal_caches(total, needs, range(len(needs)))
    for share, need in zip(dealt, needs, strict=True):
        assert abs(share - need * min(1, total / max(1, sum(needs)))) <= 1


@in_ci
@given(total=sizes, others=st.lists(sizes, max_size=5), need=sizes)
def test_a_second_version_of_a_model_is_no_loss_to_the_others(total, others, need):
    alone = deal_caches(total, [*others, need], range(len(others) + 1))
    whose = [*range(len(others)), len(others), len(others)]
    beside = deal_caches(total, [*others, need, need], whose)
    assert all(abs(a - b) <= 1 for a, b in zip(alone[:-1], beside, strict=False))
    assert abs(beside[-1] - beside[-2]) <= 1


def test_versions_of_a_model_share_by_their_requests_and_none_gets_less_than_for_a_quarter_of_them():
    for share, part in ((0.5, 0.5), (0.4, 0.4), (0.25, 0.25), (0.1, 0.25 / 1.15), (0.0, 0.25 / 1.25), (1.0, 1 / 1.25)):
        active, canary, other = deal_caches(3000, [9000, 9000, 9000], "aab", [1 - share, share, 1.0])
        assert abs(other - 1500) <= 1, "the canary takes nothing from another model"
        assert abs(canary - 1500 * part) <= 1
        assert abs(active - 1500 * (1 - part)) <= 1


@in_ci
@given(total=sizes, open_=models, asked=st.dictionaries(st.integers(0, 3), st.floats(0, 1e9)), data=st.data())
def test_shares_and_traffic_neither_hold_memory_back_nor_hand_it_out_twice(total, open_, asked, data):
    needs, whose = [need for need, _ in open_], [model for _, model in open_]
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(needs), max_size=len(needs)))
    dealt = deal_caches(total, needs, whose, shares, asked)
    assert all(0 <= share <= need for share, need in zip(dealt, needs, strict=True))
    assert min(total, sum(needs)) - len(needs) <= sum(dealt) <= total


def test_memory_goes_to_the_models_that_are_looked_up():
    mib = 1 << 20
    assert deal_caches(128, [1000, 1000], "ab", None, {"a": 3 * mib, "b": mib}) == [96, 32]
    idle, busy = deal_caches(128, [2000, 1000], "ab", None, {"a": 0, "b": 50 * mib})
    assert (idle, busy) == (4, 123), "a small part of what is dealt by size"
    assert deal_caches(128, [2000, 100], "ab", None, {"a": 0, "b": 50 * mib}) == [28, 100], "what nobody needs is left"
    assert deal_caches(120, [2000, 1000], "ab", None, {"b": 50 * mib})[0] >= 48, "nobody knows yet of a new model"
    assert deal_caches(120, [2000, 1000], "ab", None, {"a": 0, "b": 4000}) == [80, 40], "a few look-ups say nothing"


def test_a_large_model_keeps_all_but_what_a_small_one_takes():
    assert deal_caches(1000, [700, 1], "ab") == [700, 1]
    assert deal_caches(32 << 30, [700 << 30, 1 << 30], "ab") == [(32 << 30) * 700 // 701, (32 << 30) // 701]


# --- host budget


class Holding:
    """A version that only counts its bytes; `least` are those that it cannot do without."""

    def __init__(self, need: int, least: int = 0) -> None:
        self.host_need_bytes, self._least = need, least
        self.host_reserved_bytes = self.limit_bytes = 0
        self.host_is_uneven = False
        self.request_share, self.looked_up_bytes = 1.0, 0

    def attach_host(self, budget_bytes, limit_bytes, like):
        assert budget_bytes <= limit_bytes
        self.host_reserved_bytes, self.limit_bytes, self.like = budget_bytes, limit_bytes, like
        self._least = min(self._least, budget_bytes)

    def resize_host(self, budget_bytes):
        assert budget_bytes <= self.limit_bytes
        self.host_reserved_bytes = max(self._least, budget_bytes)


class Halving(Holding):
    """Like a device's tables, which only halve and double."""

    def attach_host(self, budget_bytes, limit_bytes, like):
        super().attach_host(budget_bytes, limit_bytes, like)
        self._whole = budget_bytes << max(0, (limit_bytes // max(1, budget_bytes)).bit_length() - 1)

    def resize_host(self, budget_bytes):
        size = self._whole
        while size > max(1, budget_bytes):
            size //= 2
        self.host_reserved_bytes = size


def reserved(*holders: Holding) -> list[int]:
    return [user.host_reserved_bytes for user in holders]


def test_the_only_version_gets_what_it_needs_and_no_more_than_there_is():
    for need, inputs in ((300, 300), (5000, 1000)):
        budget, version = HostBudget(1000), Holding(need)
        budget.admit(version)
        assert (version.host_reserved_bytes, version.limit_bytes, budget.used) == (inputs, inputs, inputs)


def test_a_replacement_takes_half_and_grows_once_the_old_one_is_gone():
    budget, old, new, other = HostBudget(1024), Holding(5000), Holding(5000), Holding(5000)
    budget.admit(other)
    budget.admit(old)
    budget.admit(new, old)
    assert reserved(other, old, new) == [512, 256, 256]
    assert new.like is old
    budget.release(old)
    budget.rebalance()
    assert reserved(other, new) == [512, 512]


def test_a_replacement_that_fails_gives_its_share_back():
    budget, old, new = HostBudget(1024), Holding(5000), Holding(5000)
    budget.admit(old)
    budget.admit(new, old)
    budget.release(new)
    budget.rebalance()
    assert reserved(old) == [1024]


def test_nobody_gives_anything_up_while_there_is_room():
    budget, old, new = HostBudget(1024), Holding(300), Holding(300)
    budget.admit(old)
    budget.admit(new, old)
    assert reserved(old, new) == [300, 300]


def test_a_small_model_takes_what_it_needs_from_a_large_one_whichever_comes_first():
    for first, second in ((70_000, 100), (100, 70_000)):
        budget, a, b, gone = HostBudget(7010), Holding(first), Holding(second), Holding(70_000)
        budget.admit(a)
        budget.admit(b)
        budget.rebalance()
        assert sorted(reserved(a, b)) == [10, 7000]
        budget.admit(gone)
        budget.release(gone)
        budget.rebalance()
        assert sorted(reserved(a, b)) == [10, 7000]
        budget.release(a)
        budget.rebalance()
        assert reserved(b) == [min(7010, b.host_need_bytes)]


def test_what_cannot_shrink_is_not_taken_for_free():
    budget, stiff, new = HostBudget(1000), Holding(1000, least=900), Holding(1000)
    budget.admit(stiff)
    budget.admit(new)
    assert reserved(stiff, new) == [900, 100]
    budget.rebalance()
    assert reserved(stiff, new) == [900, 100]


def half_hour(budget: HostBudget, now_s: list[float], *asked: Holding) -> None:
    """The versions that are asked for rows, 100 MiB each in 30 s."""
    for _ in range(60):
        now_s[0] += 30
        for each in asked:
            each.looked_up_bytes += 100 << 20
        budget.rebalance()
        assert budget.used <= budget.total


def test_a_model_that_nobody_looks_up_gives_its_memory_to_one_that_is_looked_up_and_gets_it_back():
    mib, now_s = 1 << 20, [0.0]
    budget = HostBudget(128 * mib, clock=lambda: now_s[0])
    idle, busy = Holding(500 * mib), Holding(290 * mib)
    budget.admit(idle)
    budget.admit(busy)
    budget.rebalance()
    assert [round(each / mib) for each in reserved(idle, busy)] == [81, 47]

    now_s[0] += 540
    busy.looked_up_bytes = 100 * mib
    budget.rebalance()
    assert [round(each / mib) for each in reserved(idle, busy)] == [81, 47], "a new model may be asked yet"
    half_hour(budget, now_s, busy)
    assert reserved(idle)[0] < 6 * mib
    assert budget.used > 0.99 * budget.total
    half_hour(budget, now_s, idle)
    assert reserved(idle)[0] > 90 * mib


def test_a_version_that_comes_brings_no_look_ups_of_the_past():
    """The counts of its tables have those of all versions before, and its rows may be wider."""
    mib, now_s = 1 << 20, [0.0]
    budget = HostBudget(128 * mib, clock=lambda: now_s[0])
    one, other = Holding(500 * mib), Holding(500 * mib)
    for version in (one, other):
        budget.admit(version)
    half_hour(budget, now_s, one, other)
    wider = Holding(500 * mib)
    wider.looked_up_bytes = 1000 * one.looked_up_bytes
    budget.admit(wider, one)
    budget.release(one)
    now_s[0] += 30
    budget.rebalance()
    assert [round(each / mib) for each in reserved(wider, other)] == [64, 64]


def test_a_quiet_night_moves_no_memory():
    mib, now_s = 1 << 20, [0.0]
    budget = HostBudget(128 * mib, clock=lambda: now_s[0])
    large, busy = Holding(900 * mib), Holding(100 * mib)
    for version in (large, busy):
        budget.admit(version)
    half_hour(budget, now_s, busy)
    evening = reserved(large, busy)
    assert evening[1] > 90 * mib
    for _ in range(1000):
        now_s[0] += 30
        budget.rebalance()
    assert reserved(large, busy) == evening


def test_small_changes_of_traffic_move_no_memory():
    mib, now_s, moves = 1 << 20, [0.0], []

    class Counting(Holding):
        def resize_host(self, budget_bytes):
            moves.append(budget_bytes)
            super().resize_host(budget_bytes)

    budget = HostBudget(128 * mib, clock=lambda: now_s[0])
    both = [Counting(500 * mib), Counting(500 * mib)]
    for each in both:
        budget.admit(each)
    for minute in range(120):
        now_s[0] += 30
        for at, each in enumerate(both):
            each.looked_up_bytes += (100 + (minute + at) % 2 * 10) * mib
        budget.rebalance()
    assert len(moves) <= 2, "as the second came"


def test_growth_ends_early_where_somebody_asks_for_it():
    budget, version = HostBudget(1 << 40), Holding(1 << 40)
    other = Holding(1 << 40)
    budget.admit(other)
    budget.admit(version)
    budget.release(other)
    steps = iter([False, False, True])
    budget.rebalance(lambda: next(steps))
    assert 1 << 39 < version.host_reserved_bytes < 1 << 40


@in_ci
@pytest.mark.parametrize("kind", [Holding, Halving])
@example(total=3, steps=[("load", 3, 0), ("load", 2, 0)])
@given(
    total=st.integers(1, 5000),
    steps=st.lists(
        st.tuples(st.sampled_from(["load", "switch", "fail", "drop"]), st.integers(0, 6000), sizes), max_size=25
    ),
)
def test_the_host_budget_holds_whoever_comes_and_goes(kind, total, steps):
    budget = HostBudget(total)
    serving: list[Holding] = []
    for step, need, pick in steps:
        old = serving[pick % len(serving)] if serving else None
        new = kind(need)
        if step == "drop":
            if old is None:
                continue
            serving.remove(old)
            budget.release(old)
        else:
            replaced = None if step == "load" else old
            budget.admit(new, *([] if replaced is None else [replaced]))
            assert budget.used <= total
            assert new.host_reserved_bytes <= need
            gone = new if step == "fail" else replaced
            if gone is not new:
                serving.append(new)
            if gone in serving:
                serving.remove(gone)
            budget.release(gone)
        budget.rebalance()
        assert budget.used <= total
        assert budget.used == sum(reserved(*serving))
        if kind is Holding:  # each has its share
            fair = deal_caches(total, [holding.host_need_bytes for holding in serving], range(len(serving)))
            assert reserved(*serving) == fair


def test_memory_that_is_mapped_stays_within_the_budget_for_wide_rows(tmp_path):
    """A table of wide rows holds few sets, which is where halving in place reaches its limit."""
    with in_process(), tierstore.open(tmp_path / "data", host_budget="1MiB", fold_grace_s=0) as store:
        worst = 0

        def note(_):
            nonlocal worst
            tables = [table for v in store.shared.host_budget.users for table in v.tables.values()]
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
                    host = view.open_version.tables[table].host
                    assert host is not None
                    assert host.capacity_rows >= min(n, 56)


def write(root, name, rows, version=1, stamp=0):
    where = root / f"{name}-{version}"
    with tierstore.SnapshotWriter(where, model=name, version=version) as writer:
        keys = np.arange(rows, dtype=np.int64)
        writer.table("t", dim=16).write(keys, np.repeat((keys + stamp).astype(np.float32)[:, None], 16, axis=1))
        writer.feature("f", table="t")
        writer.warmup("t", keys)
    return where


def resident(store, keys):
    """How many of these keys the model `large` has in memory."""
    table = store.model("large").served.active.open_version.tables["t"]
    return int(np.isin(keys, table.host.hot_keys(100_000)).sum())


def test_models_that_come_and_go_are_dealt_what_there_is(tmp_path):
    """A large model alone; a small one beside it, and a second one of its size, with look-ups all the while; then alone."""
    rows = {"large": 33_000, "small": 500, "second": 33_000}
    with in_process(), tierstore.open(tmp_path / "data", host_budget="2MiB", fold_grace_s=0) as store:
        budget, over, wrong, worst = store.shared.host_budget, threading.Event(), [], [0]

        def look_up() -> None:
            rng = np.random.default_rng(3)
            while not over.is_set():
                keys = np.concatenate([rng.integers(0, 33_000, 500), rng.integers(0, 2000, 2000)])
                got = store.model("large").lookup("f", keys)[:, 0] % 33_000
                wrong.extend(keys[got != keys.astype(np.float32)].tolist())

        def watch() -> None:
            while not over.wait(0.0005):
                tables = [table for version in budget.users for table in version.tables.values()]
                worst[0] = max(worst[0], sum(host.bytes_in_use for t in tables if (host := t.host) is not None))

        def dealt(name: str) -> int:
            (table,) = store.status(name)["models"][name]["tables"].values()
            assert table["tier_bytes"]["host"] <= table["tier_budget_bytes"]["host"]
            return table["tier_budget_bytes"]["host"]

        def host_bytes(name: str) -> dict[str, int]:
            versions = store.status(name)["models"][name]["versions"]
            return next(entry["host_bytes"] for entry in versions if entry["state"] == "active")

        def rebalanced(**wanted: float) -> None:
            """Each has so many MiB, as far as the sets of its table allow."""
            eventually(lambda: all(abs(dealt(name) / 2**20 - mib) < 0.05 for name, mib in wanted.items()), str(wanted))
            for name in wanted:
                eventually(lambda name=name: host_bytes(name)["budget"] == dealt(name), "it is told alike")
                assert host_bytes(name)["need"] >= dealt(name)

        store.load_snapshot(write(tmp_path, "large", rows["large"]))
        rebalanced(large=2)
        watchers = [threading.Thread(target=work) for work in (look_up, look_up, watch)]
        for watcher in watchers:
            watcher.start()
        try:
            hot = np.arange(2000)
            for _ in range(20):
                store.model("large").lookup("f", hot)
            before = resident(store, hot)
            store.load_snapshot(write(tmp_path, "small", rows["small"]))
            rebalanced(large=1.91, small=0.09)
            assert resident(store, hot) > 0.8 * before > 0.5 * len(hot)  # look-ups go on beside it
            store.load_snapshot(write(tmp_path, "large", rows["large"], version=2, stamp=33_000))
            rebalanced(large=1.91, small=0.09)
            store.load_snapshot(write(tmp_path, "second", rows["second"]))
            rebalanced(large=0.97, second=0.97, small=0.045)
            store.deactivate("second")
            rebalanced(large=1.91, small=0.09)
            store.deactivate("small")
            rebalanced(large=2)
        finally:
            over.set()
            for watcher in watchers:
                watcher.join(30)
        assert not wrong
        assert 1 << 20 < worst[0] <= 2 << 20
        keys = np.arange(33_000)
        np.testing.assert_array_equal(store.model("large").lookup("f", keys)[:, 0], keys + 33_000.0)


# --- overlay budget


def test_overlay_bytes_are_bounded_and_come_back():
    budget = OverlayBudget(100)
    budget.reserve(60)
    with pytest.raises(Overloaded, match=r"60 of 100"):
        budget.reserve(41)
    budget.reserve(40)
    assert budget.used == 100
    budget.release(60)
    budget.reserve(60)
    with pytest.raises(TooLarge, match="101"):
        budget.reserve(101)
    assert budget.used == 100


def test_overlay_bytes_are_counted_right_by_many_threads():
    budget, refused = OverlayBudget(1000), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for nbytes in rng.integers(1, 600, 300).tolist():
            try:
                budget.reserve(nbytes)
            except Overloaded:
                refused.append(nbytes)
                continue
            assert budget.used <= 1000
            budget.release(nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert budget.used == 0


def test_a_cache_that_has_all_it_needs_keeps_every_row_but_one_of_ten_thousand(tmp_path):
    rows = 60_000
    keys = np.arange(rows, dtype=np.int64)
    with tierstore.SnapshotWriter(tmp_path / "1", model="ctr", version=1) as writer:
        writer.table("item", dim=4).write(keys, np.zeros((rows, 4), np.float32))
        writer.feature("item_id", table="item")
        writer.warmup("item", keys)
    with in_process(), tierstore.open(tmp_path / "data", host_budget="64MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "1")
        assert store.status()["models"]["ctr"]["tables"]["item"]["host"]["rows"] >= 0.9999 * rows


@pytest.mark.parametrize("total", [500, 5_000])
def test_many_that_are_awaited_get_their_shares_in_any_order_and_none_is_asked_about_the_others(total: int) -> None:
    class Coming:
        asked = has = looked_up_bytes = 0
        host_is_uneven = False
        request_share = 1.0

        @property
        def host_need_bytes(self) -> int:
            Coming.asked += 1
            return 10

        @property
        def host_reserved_bytes(self) -> int:
            Coming.asked += 1
            return self.has

        def attach_host(self, budget_bytes: int, limit_bytes: int, like: object) -> None:
            self.has = budget_bytes

        def resize_host(self, budget_bytes: int) -> None:
            self.has = budget_bytes

    budget, coming = HostBudget(total), [Coming() for _ in range(200)]
    with budget.awaiting(2000):
        for user in coming:
            budget.admit(user)
    assert budget.used <= total
    assert [user.host_reserved_bytes for user in coming] == [min(10, total // 200)] * 200
    assert Coming.asked <= 6 * len(coming)
    budget.rebalance()
    assert Coming.asked <= 20 * len(coming)
    budget.admit(late := Coming())
    assert budget.used <= total
    assert late.host_reserved_bytes > 0 or total // 201 == 0
