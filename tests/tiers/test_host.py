"""The host tier: the contract of every cache, and what is its own: budget, memory given back, one writer at a time."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.counts import few_or_many
from tests.tiers.cache_contract import (
    DEFAULT,
    DIM,
    ODD_KEYS,
    SPEC,
    CacheTierContract,
    ask,
    no_deletes,
    rows_of,
    vectors_of,
)
from tierstore.errors import ConfigError
from tierstore.tiers.host import memory
from tierstore.tiers.host.cache.layout import CONTROL_BYTES
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier


class TestHostTable(CacheTierContract):
    def open_cache(
        self, spec: TableSpec, budget_bytes: int, default: npt.NDArray[np.float32], fraction: float = 1.0
    ) -> HostTable:
        return HostTable(spec, budget_bytes, default_vector=default, fraction=fraction)


def resident_bytes(table: HostTable) -> int:
    """Memory behind the table's mapping, as the kernel counts it."""
    assert table._memory is not None
    address = table._memory.areas.control.__array_interface__["data"][0]
    pages = -(-table._memory.size // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(table._memory.size), present) == 0
    return int(np.count_nonzero(np.frombuffer(present, np.uint8) & 1)) * mmap.PAGESIZE


@pytest.mark.parametrize("budget", [1000, 4096, 100_000, 1 << 20, (1 << 24) + 12345])
@pytest.mark.parametrize("dtype", list(StorageDtype))
def test_the_mapping_keeps_to_the_budget_and_bookkeeping_to_16_bytes_a_row(budget: int, dtype: StorageDtype) -> None:
    spec = TableSpec("t", KeyType.INT64, 32, dtype)
    table = HostTable(spec, budget, default_vector=np.zeros(32, np.float32))
    assert table.bytes_in_use <= budget
    assert table.stats()["budget_bytes"] == budget
    if table.capacity_rows:
        overhead = table.bytes_in_use - table.capacity_rows * spec.row_bytes
        assert overhead - CONTROL_BYTES <= 16 * table.capacity_rows
        assert table._memory.size == table.bytes_in_use
    if budget >= 1 << 20:
        assert table.capacity_rows * (spec.row_bytes + 16) > 0.95 * budget
    table.close()


def test_a_budget_below_one_set_holds_nothing() -> None:
    table = HostTable(SPEC, 100, default_vector=DEFAULT)
    keys = np.arange(3, dtype=np.int64)
    assert table.insert(keys, rows_of(keys), 1) == 0
    table.update(keys, rows_of(keys), no_deletes(keys))
    table.resize(0.5)
    assert (ask(table, keys)[1] == Tier.PENDING).all()
    assert table.capacity_rows == table.bytes_in_use == 0
    table.close()


def test_memory_is_taken_on_touch_and_given_back_by_resize_and_close() -> None:
    spec = TableSpec("t", KeyType.INT64, 32, StorageDtype.FLOAT32)
    budget = 32 << 20
    table = HostTable(spec, budget, default_vector=np.zeros(32, np.float32))
    assert resident_bytes(table) <= 4 << 20
    keys = np.arange(2 * table.capacity_rows, dtype=np.int64)
    rows = np.zeros((len(keys), spec.row_bytes), np.uint8)
    table.warm(keys, rows)
    assert resident_bytes(table) > 0.95 * budget
    pages = 4 * 4 * 4096  # each of the two parts in use of the four areas may begin and end within a page
    for fraction in (0.97, 0.8, 0.5, 0.4, 0.25, 0.125, 0.03):
        table.resize(fraction)
        assert table.bytes_in_use <= table.allowed_bytes == int(fraction * budget)
        assert resident_bytes(table) <= fraction * budget + pages
        assert table.rows_resident > 0.9 * table.capacity_rows
    areas, memory = table._areas, table._memory  # what a reader that is under way holds on to
    table.close()
    table._areas, table._memory = areas, memory
    assert resident_bytes(table) <= pages
    table.close()


def test_a_fraction_is_never_exceeded_but_for_tables_of_few_sets() -> None:
    table = HostTable(SPEC, 1 << 22, default_vector=DEFAULT)
    for wanted, got in ((0.3, 0.3), (0.5, 0.5), (0.77, 0.77), (1.0, 1.0), (0.0, table.smallest_fraction)):
        table.resize(wanted)
        assert table.bytes_in_use <= max(wanted * (1 << 22), table.smallest_fraction * (1 << 22) + CONTROL_BYTES)
        assert table.bytes_in_use == pytest.approx((1 << 22) * got, rel=0.02)
    assert table.smallest_fraction <= 1 / 16
    table.close()


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.51, 0.999])
def test_a_table_that_begins_small_is_as_one_that_was_made_so(fraction: float) -> None:
    small = HostTable(SPEC, 1 << 22, default_vector=DEFAULT, fraction=fraction)
    made = HostTable(SPEC, 1 << 22, default_vector=DEFAULT)
    made.resize(fraction)
    assert (small.bytes_in_use, small._memory.shape) == (made.bytes_in_use, made._memory.shape)
    keys = np.arange(2 * small.capacity_rows, dtype=np.int64)
    for table in (small, made):
        table.warm(keys, rows_of(keys))
    np.testing.assert_array_equal(np.sort(small.hot_keys(len(keys))), np.sort(made.hot_keys(len(keys))))
    for table in (small, made):
        table.close()


def test_rows_are_right_and_the_hottest_stay_at_every_size() -> None:
    """Sizes at random, up and down; every resident key answers its own row, and what is asked for most is never lost."""
    table = HostTable(SPEC, 1 << 21, default_vector=DEFAULT)
    rng = np.random.default_rng(7)
    keys = np.arange(table.capacity_rows, dtype=np.int64)
    table.warm(keys, rows_of(keys))
    assert table.rows_resident > 0.9 * table.capacity_rows
    present = table.hot_keys(len(keys))
    hot = rng.choice(present, len(present) // 20, replace=False)
    for fraction in (*rng.uniform(0.3, 1.0, 12), 0.125, 1.0):
        for _ in range(8):
            before = ask(table, hot)[1] == Tier.HOST
        table.resize(fraction)
        there = table.hot_keys(len(keys))  # which warms no row, as look-ups do
        assert len(there) == table.rows_resident <= table.capacity_rows
        assert np.count_nonzero(np.isin(hot, there)) > 0.98 * np.count_nonzero(before)
        some = rng.choice(keys, 1024, replace=False)
        answers, state = ask(table, some)
        held = state == Tier.HOST
        np.testing.assert_array_equal(held, np.isin(some, there))
        np.testing.assert_array_equal(answers[held], vectors_of(some[held]))
        more = rng.choice(keys, 4096, replace=False)
        table.insert(more, rows_of(more), 0)
    table.close()


def test_huge_pages_are_told_and_lie_within_what_is_resident() -> None:
    table = HostTable(SPEC, 1 << 23, default_vector=DEFAULT)
    keys = np.arange(table.capacity_rows, dtype=np.int64)
    table.warm(keys, rows_of(keys))
    assert 0 <= table.huge_page_bytes() <= resident_bytes(table) + (4 << 20)
    table.close()
    assert table.huge_page_bytes() == 0


@pytest.mark.parametrize("slow", [False, True], ids=["pages come at once", "a page takes long"])
def test_memory_is_taken_page_by_page_beside_requests_and_in_small_pages_where_that_takes_long(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests, advice = [], []
    monkeypatch.setattr(memory, "yield_to_requests", lambda: rests.append(1))
    monkeypatch.setattr(memory, "_LONGEST_PAGE_S", -1.0 if slow else 60.0)
    monkeypatch.setattr(memory.HostMemory, "_advise", lambda _, name: advice.append(name))
    table = HostTable(SPEC, 16 << 20, default_vector=DEFAULT)
    keys = np.arange(1000)
    with table.gently_warmed(len(keys)):
        assert resident_bytes(table) > 0
        pages = len(rests)
        table.warm(keys, rows_of(keys))
    assert advice == ["MADV_HUGEPAGE", *(["MADV_NOHUGEPAGE"] if slow else []), "MADV_HUGEPAGE"]
    assert (pages == 0) if slow else (2 < pages <= 8)  # whole huge pages of three areas
    np.testing.assert_array_equal(ask(table, keys)[0], vectors_of(keys))


def test_memory_that_few_rows_would_touch_is_not_taken_for_them() -> None:
    table = HostTable(SPEC, 16 << 20, default_vector=DEFAULT)
    with table.gently_warmed(10):
        assert resident_bytes(table) <= 4 << 20


def test_a_large_table_is_given_back_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HostTable(SPEC, 48 << 20, default_vector=DEFAULT)
    rests: list[int] = []
    monkeypatch.setattr(memory, "yield_to_requests", lambda: rests.append(1))
    table.close()
    assert len(rests) == 6


def test_a_budget_that_cannot_be_reserved_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="host_budget"):
        HostTable(SPEC, 1 << 60, default_vector=DEFAULT)


def test_a_promotion_does_not_wait_for_a_writer() -> None:
    table = HostTable(SPEC, 1 << 20, default_vector=DEFAULT)
    keys = np.arange(3, dtype=np.int64)
    with table._lock:
        assert table.insert(keys, rows_of(keys), 1) == 0
        assert table.insert_absent(keys, 1) == 0
    assert table.stats()["dropped_busy"] == 2
    assert table.insert(keys, rows_of(keys), 1) == 3
    table.close()


def test_the_floor_is_checked_under_the_lock() -> None:
    """The floor rises between a promotion's call and its turn at the lock: the promotion must still be dropped."""
    table = HostTable(SPEC, 1 << 20, default_vector=DEFAULT)
    key = np.array([1], np.int64)
    real = table._lock

    class RaisedMeanwhile:
        """A lock whose taker finds that a fold came first."""

        def acquire(self, blocking: bool = True) -> bool:
            table._floor_seq = 6
            return real.acquire(blocking)

        def release(self) -> None:
            real.release()

    table._lock = RaisedMeanwhile()  # type: ignore[assignment]
    assert table.insert(key, rows_of(key), 5) == 0
    assert table.insert_absent(key, 5) == 0
    assert table.stats()["dropped_stale"] == 2
    table._lock = real
    table.close()


def test_threads_that_promote_the_same_keys_leave_no_duplicates() -> None:
    table = HostTable(SPEC, 1 << 20, default_vector=DEFAULT)
    keys = np.arange(table.capacity_rows // 2, dtype=np.int64)
    start = threading.Barrier(3)

    def promote(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(200):
            some = rng.choice(keys, 64, replace=False)
            table.insert(some, rows_of(some), 1)

    threads = [threading.Thread(target=promote, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    listed = table.hot_keys(len(keys) * 2)
    assert len(listed) == len(np.unique(listed)) == table.rows_resident
    resident = np.flatnonzero(ask(table, keys)[1] == Tier.HOST)
    assert sorted(listed) == resident.tolist()
    table.close()


def test_a_set_that_a_writer_never_leaves_is_a_miss_and_not_a_hang() -> None:
    table = HostTable(SPEC, 1 << 16, default_vector=DEFAULT)
    keys = np.arange(100, dtype=np.int64)
    table.insert(keys, rows_of(keys), 1)
    lines = table._areas.lines32  # type: ignore[union-attr]
    lines[::16] += 1
    assert (ask(table, keys)[1] == Tier.PENDING).all()
    lines[::16] += 1
    assert (ask(table, keys)[1] == Tier.HOST).all()
    table.close()


def test_a_reader_from_before_the_memory_went_back_takes_nothing_for_an_answer() -> None:
    """The epoch changes with every shrinking and growing, so that two lives of a set are not taken for one."""
    table = HostTable(SPEC, 1 << 20, default_vector=DEFAULT)
    control = table._areas.control  # type: ignore[union-attr]
    seen = [int(control[1])]
    for fraction in (0.5, 0.25, 1.0, 0.5):
        table.resize(fraction)
        seen.append(int(control[1]))
    table.close()
    assert seen == sorted(set(seen))
    assert int(control[1]) not in seen


POOL = np.concatenate([ODD_KEYS, np.arange(100, 131, dtype=np.int64)])
some_keys = st.lists(st.sampled_from(POOL.tolist()), min_size=1, max_size=12, unique=True).map(
    lambda k: np.array(k, np.int64)
)


class HostAgainstDict(RuleBasedStateMachine):
    """The table beside a dict of generations (None: does not exist) that stands for the disk below it."""

    @initialize(budget=st.sampled_from([1 << 12, 1 << 13, 1 << 16]), fraction=st.sampled_from([1.0, 0.7, 0.5, 0.25]))
    def start(self, budget: int, fraction: float) -> None:
        self.table = HostTable(SPEC, budget, default_vector=DEFAULT, fraction=fraction)
        self.truth: dict[int, int | None] = {int(key): (0 if i % 3 else None) for i, key in enumerate(POOL)}
        self.seq = 1
        self.reads: list[tuple[np.ndarray, dict[int, int | None], int]] = []

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the disk says now: keys that exist, their rows, keys that do not."""
        exists = np.array([self.truth[int(key)] is not None for key in keys])
        there = keys[exists]
        rows = [rows_of(np.array([key]), self.truth[int(key)] or 0) for key in there]
        return there, np.concatenate(rows) if rows else np.empty((0, SPEC.row_bytes), np.uint8), keys[~exists]

    @rule(keys=some_keys)
    def promote(self, keys: np.ndarray) -> None:
        there, rows, absent = self.read(keys)
        self.table.insert(there, rows, self.seq)
        self.table.insert_absent(absent, self.seq)

    @rule(keys=some_keys)
    def begin_slow_promotion(self, keys: np.ndarray) -> None:
        self.reads.append((*self.read(keys), self.seq))  # type: ignore[arg-type]

    @precondition(lambda self: self.reads)
    @rule()
    def end_slow_promotion(self) -> None:
        there, rows, absent, seq = self.reads.pop(0)  # type: ignore[misc]
        self.table.insert(there, rows, seq)
        self.table.insert_absent(absent, seq)

    @rule(keys=some_keys, deletes=st.integers(0, 4095))
    def fold(self, keys: np.ndarray, deletes: int) -> None:
        self.seq += 1
        deleted = np.array([bool(deletes >> i & 1) for i in range(len(keys))])
        self.table.raise_floor(self.seq)
        for key, gone in zip(keys.tolist(), deleted, strict=True):
            self.truth[key] = None if gone else self.seq
        self.table.update(keys, rows_of(keys, self.seq), deleted)

    @rule(keys=some_keys)
    def warm(self, keys: np.ndarray) -> None:
        there, rows, _ = self.read(keys)
        self.table.warm(there, rows)

    @rule(fraction=st.sampled_from([1.0, 0.9, 0.6, 0.5, 0.3, 0.25, 0.125]))
    def resize(self, fraction: float) -> None:
        self.table.resize(fraction)

    @invariant()
    def answers_are_the_newest_or_none(self) -> None:
        if not hasattr(self, "table"):
            return
        out, state = ask(self.table, POOL)
        resident = 0
        for i, key in enumerate(POOL.tolist()):
            generation = self.truth[key]
            if state[i] == Tier.HOST:
                resident += 1
                assert generation is not None
                np.testing.assert_array_equal(out[i], vectors_of(POOL[i : i + 1], generation)[0])
            elif state[i] == Tier.ABSENT:
                assert generation is None
                np.testing.assert_array_equal(out[i], DEFAULT)
            else:
                assert state[i] == Tier.PENDING
        assert resident == self.table.rows_resident <= self.table.capacity_rows
        listed = self.table.hot_keys(1000).tolist()
        assert len(listed) == len(set(listed)) == resident

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()


TestHostAgainstDict = HostAgainstDict.TestCase
TestHostAgainstDict.settings = settings(max_examples=few_or_many(15, 60), stateful_step_count=40)

assert SPEC.dim == DIM


@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("dim", [1, 6, 7, 64])
def test_stored_rows_come_as_they_were_put_in(dtype: StorageDtype, dim: int) -> None:
    spec = TableSpec("t", KeyType.INT64, dim, dtype)
    table = HostTable(spec, 1 << 20, default_vector=np.ones(dim, np.float32))
    keys = np.arange(200, dtype=np.int64)
    rows = np.random.default_rng(dim).integers(0, 256, (200, spec.row_bytes), np.uint8)
    table.insert(keys[:150], rows[:150], 1)
    table.insert_absent(keys[150:160], 1)
    got, state = table.stored(keys)
    assert (state[:150] == Tier.HOST).all()
    assert not (state[150:] == Tier.HOST).any()
    np.testing.assert_array_equal(got[:150], rows[:150])
    table.close()
    assert not table.stored(keys)[1].any()


def test_answers_of_wrong_shapes_are_refused() -> None:
    table = HostTable(SPEC, 1 << 20, default_vector=DEFAULT)
    keys = np.arange(3, dtype=np.int64)
    for out, state in (
        (np.empty((2, DIM), np.float32), np.zeros(3, np.uint8)),
        (np.empty((3, DIM + 1), np.float32), np.zeros(3, np.uint8)),
        (np.empty((3, DIM), np.float32), np.zeros(2, np.uint8)),
    ):
        with pytest.raises(ValueError, match="expected"):
            table.lookup(keys, out, state)
    with pytest.raises(TypeError):
        table.lookup(keys, np.empty((3, DIM), np.float64), np.zeros(3, np.uint8))
