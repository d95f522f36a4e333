"""Background work slows down where look-ups get slower by it, speeds up where not, and ends in any case."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.engine.lifecycle import throttle
from tierstore.engine.lifecycle.throttle import LEAST_SHARE, Control, LookupTimes, Throttle, p99_s
from tierstore.kernels.latency import BOUNDS_NS, BUCKETS, COARSE_FROM, COARSE_NS

# --- p99


@pytest.mark.parametrize("scale_ns", [20_000, 700_000, 10_000_000])
def test_the_p99_of_buckets_is_near_that_of_the_times(scale_ns):
    times, samples = LookupTimes(), np.random.default_rng(1).gamma(2.0, scale_ns, 20_000)
    for ns in samples.tolist():
        times.add(int(ns))
    assert p99_s(times.counts) == pytest.approx(np.quantile(samples, 0.99) / 1e9, rel=0.05)


def test_few_look_ups_say_nothing_and_extremes_are_counted():
    times = LookupTimes()
    for _ in range(199):
        times.add(5_000_000)
    assert p99_s(times.counts) is None
    for ns in (0, 1 << 50):
        times.add(ns)
    assert p99_s(times.counts) == pytest.approx(0.005, rel=0.1)
    more = np.zeros(BUCKETS, np.int64)
    more[-1] = 1_000_000
    times.absorb(more)
    assert p99_s(times.counts) >= BOUNDS_NS[-1] / 1e9


def test_fine_buckets_add_up_to_the_coarse_ones():
    assert list(BOUNDS_NS) == sorted(set(BOUNDS_NS))
    ns = np.random.default_rng(2).integers(1, 2 * 10**10, 5000).tolist() + list(COARSE_NS)
    fine, coarse = np.zeros(BUCKETS, np.int64), np.zeros(len(COARSE_NS) + 1, np.int64)
    for one in ns:
        fine[bisect_left(BOUNDS_NS, one)] += 1
        coarse[bisect_left(COARSE_NS, one)] += 1
    np.testing.assert_array_equal(np.add.reduceat(fine, COARSE_FROM), coarse)


# --- the decision


def beside(control: Control, p99: float | None, windows: int, lookups: int = 5000) -> list[float]:
    shares = []
    for _ in range(windows):
        control.worked(p99, lookups, 1.0)
        shares.append(control.share)
    return shares


def test_it_slows_down_to_the_least_while_look_ups_are_too_slow_and_no_further():
    control = Control(1.3)
    control.quiet(0.001)
    shares = [*beside(control, 0.0021, 1), *beside(control, 0.0014, 40)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1.3 / 2.1)
    assert shares[-1] == LEAST_SHARE > 0
    control.share = 1.0
    assert beside(control, 0.1, 1) == [0.5]


def test_it_speeds_up_to_all_while_they_are_not():
    control = Control(1.3, share=LEAST_SHARE)
    control.quiet(0.001)
    shares = beside(control, 0.00129, 40)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_without_look_ups_it_is_at_full_speed_at_once_and_with_few_of_them_soon():
    control = Control(1.3, share=LEAST_SHARE)
    control.quiet(0.001)
    assert beside(control, None, 1, lookups=0) == [1.0]
    control.share = LEAST_SHARE
    assert beside(control, None, 40, lookups=10)[-1] == 1.0


@pytest.mark.parametrize("slope", [0.1, 1.0, 5.0])
def test_it_settles_where_look_ups_take_what_they_may(slope):
    """Look-ups that are slower in proportion to the work beside them, and noise of a tenth on every p99."""
    control, rng, quiet = Control(1.3), np.random.default_rng(3), 0.001
    control.quiet(quiet)
    shares, ratios = [], []
    for _ in range(400):
        ratio = 1 + slope * control.share
        control.worked(quiet * ratio * rng.uniform(0.9, 1.1), 5000, 1.0)
        shares.append(control.share)
        ratios.append(1 + slope * control.share)
    assert np.mean(ratios[50:]) <= 1.33
    assert np.mean(shares[50:]) > 0.5 * min(1.0, 0.3 / slope)


def test_work_that_is_slowed_down_in_vain_is_done_with_soon():
    """Look-ups are as slow beside a little work as beside much: a load of 1,000 seconds at full speed."""
    control, remaining_s, took_s = Control(1.3), 1000.0, 0
    control.quiet(0.001)
    while remaining_s > 0:
        remaining_s -= control.share
        took_s += 1
        control.worked(0.002, 5000, 1.0)
    assert took_s < 1400


def test_work_that_is_slowed_down_with_some_effect_stays_so():
    control = Control(1.3)
    control.quiet(0.001)
    for _ in range(200):
        control.worked(0.0014 + 0.002 * control.share, 5000, 1.0)
    assert control.share == LEAST_SHARE


def test_it_asks_for_quiet_where_none_was_measured_for_a_while_and_somebody_looks_up():
    control = Control(1.3)
    assert not control.wants_quiet(None)
    assert control.wants_quiet(0.001)
    control.quiet(0.001)
    assert not control.wants_quiet(0.001)
    beside(control, 0.001, 59)
    assert not control.wants_quiet(0.001)
    beside(control, 0.001, 1)
    assert control.wants_quiet(0.001)


def test_work_that_is_slowed_down_for_what_is_not_its_fault_gets_on_again():
    """Look-ups have become slower, work or no work."""
    control = Control(1.3)
    control.quiet(0.001)
    for _ in range(120):
        control.worked(0.003, 5000, 1.0)
        if control.wants_quiet(0.003):
            control.quiet(0.003)
    assert control.share == 1.0


def test_what_was_quiet_once_fades():
    control = Control(1.3)
    control.quiet(0.001)
    for _ in range(20):
        control.quiet(0.004)
    assert control.quiet_s == pytest.approx(0.004, rel=0.01)


# --- the thread


@contextmanager
def measuring(times: LookupTimes, most: float = 1.3) -> Iterator[Throttle]:
    throttle = Throttle(times, lambda: None, most, window_s=0.02)
    throttle.start()
    try:
        yield throttle
    finally:
        throttle.close()


def slowed(held: Throttle) -> int:
    """What a look-up takes beside work: a millisecond where that stands still, too long however little of it is done."""
    return 1_000_000 if held.share == 0 else 1_500_000 + round(4_000_000 * held.share)


class Lookups:
    """Look-ups that are told to take as long as `takes_ns` says, 2,000 at a time."""

    def __init__(self, times: LookupTimes, duration_ns) -> None:
        self._times, self._duration_ns, self._over = times, duration_ns, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            ns = self._duration_ns()
            for _ in range(400):
                self._times.add(ns)

    def __enter__(self) -> Lookups:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_throttle_learns_what_quiet_is_slows_work_down_and_lets_it_go(monkeypatch):
    times = LookupTimes()
    slow = [True]
    with (
        measuring(times) as held,
        Lookups(times, lambda: slowed(held) if slow[0] and held.status()["work"] else 1_000_000),
    ):
        scenes.eventually(lambda: held.control.quiet_s is not None, "quiet is measured")
        with held.at_work("load"):
            assert held.status()["work"] == ["load"]
            scenes.eventually(lambda: held.share < 0.1, "slow look-ups slow it down")
            slow[0] = False
            scenes.eventually(lambda: held.share == 1.0, "quick ones speed it up")
        assert held.status()["quiet_p99_s"] == pytest.approx(0.001, rel=0.1)


def test_work_that_begins_before_anything_was_measured_stands_still_for_it():
    times, stood = LookupTimes(), []
    with (
        measuring(times) as held,
        held.at_work("load"),
        Lookups(times, lambda: slowed(held)),
    ):
        scenes.eventually(lambda: stood.append(held.share) or held.control.quiet_s is not None, "quiet is measured")
        assert 0.0 in stood
        scenes.eventually(lambda: 0 < held.share < 0.1, "slow look-ups slow it down")
    assert held.share == 1.0


def test_with_a_ratio_of_0_nothing_slows_down():
    times, before = LookupTimes(), set(threading.enumerate())
    with measuring(times, most=0) as held, held.at_work("load"), Lookups(times, lambda: 10**9):
        assert "tierstore-throttle" not in [thread.name for thread in set(threading.enumerate()) - before]
        assert held.share == 1.0


# --- a store


def test_a_load_beside_slow_look_ups_slows_down_and_ends(tmp_path, monkeypatch):
    """Look-ups are told to be slow while the load is at work, then quick: the load must notice both, and end."""
    monkeypatch.setattr(throttle, "_COMES_TO_A_STOP_S", 0.02)
    where = tmp_path / "large"
    with tierstore.SnapshotWriter(where, model="large", version=1) as writer:
        keys, rows = np.arange(400_000, dtype=np.int64), np.ones((400_000, 16), np.float32)
        table = writer.table("t", dim=16)
        for begin in range(0, len(keys), 20_000):
            table.write(keys[begin : begin + 20_000], rows[begin : begin + 20_000])
        writer.feature("f", table="t")
    with tierstore.open(tmp_path / "data", load_workers=1, host_budget="4MiB") as store:
        held = store.shared.throttle
        held.window_s = 0.05
        slow, phases = [True], []
        with Lookups(store.lookup_times, lambda: slowed(held) if slow[0] and held.status()["work"] else 1_000_000):
            scenes.eventually(lambda: held.control.quiet_s is not None, "quiet is measured")
            load = threading.Thread(target=store.load_snapshot, args=(where,), kwargs={"progress": phases.append})
            load.start()
            scenes.eventually(lambda: held.share == LEAST_SHARE, "the load is slowed down")
            assert load.is_alive()
            assert store.status()["throttle"]["work"] == ["load"]
            assert store.status()["throttle"]["share"] == pytest.approx(LEAST_SHARE)
            slow[0] = False
            scenes.eventually(lambda: held.share > 0.5 or not load.is_alive(), "it speeds up")
            load.join(60)
            assert not load.is_alive()
        assert store.model("large").lookup("f", [399_999])[0, 0] == 1.0
        assert store.status()["throttle"]["work"] == []


def test_look_ups_in_process_are_measured_while_work_is_done(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    before = sum(store.lookup_times.counts)
    store.model("ctr").lookup("item_id", [1, 2])
    assert sum(store.lookup_times.counts) == before
    with store.shared.throttle.at_work("load"):
        store.model("ctr").lookup("item_id", [1, 2])
        store.model("ctr").lookup_bags("clicked", [1, 2], [0])
    assert sum(store.lookup_times.counts) == before + 2


def test_verify_and_warming_go_by_the_share(open_store, tmp_path, monkeypatch):
    store = open_store(keep_versions=9)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    shares: list[float] = []
    from tierstore.tiers.background import Pace

    monkeypatch.setattr(Pace, "sleep", lambda pace: shares.append(pace._share()))
    store.shared.throttle.control.share = 0.4
    assert store.verify().ok
    assert shares
    assert set(shares) == {0.4}
    shares.clear()
    store.shared.throttle.control.share = 0.1
    store.rollback("ctr")
    assert set(shares) == {throttle.LEAST_OF_A_SWITCH}
    monkeypatch.setattr(store.model("ctr").folder, "_share", lambda: shares.append(0.1) or 0.1)
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    scenes.eventually(lambda: 0.1 in shares, "a fold shares")


def test_a_pace_rests_as_long_as_the_share_says(monkeypatch):
    from tierstore.tiers import background

    now = [100.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    share = [0.25]
    pace = background.Pace(lambda: share[0], most_s=5.0, clock=lambda: now[0])
    now[0] += 1.0
    pace.sleep()
    assert now[0] == pytest.approx(104.0)
    share[0] = 1.0
    now[0] += 1.0
    pace.sleep()
    assert now[0] == pytest.approx(105.0)
    share[0] = 0.0
    pace.sleep()
    assert now[0] == pytest.approx(110.0, abs=0.1), "it does not stand still for ever"
