"""Kernels of the set-associative cache against plain Python: intrinsics, where a key lies, and who is put out."""

from __future__ import annotations

import numba as nb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.kernels import atomics, heat, setcache
from tierstore.tiers.host import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier

MASK = (1 << 64) - 1
unhurried = settings(deadline=None)  # the first example waits for the compiler
int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def mix(key: int) -> int:
    x = (key + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def set_of(hashed: int, depth: int, cursor: int, sets_per_region: int) -> int:
    within = (hashed >> 32) * sets_per_region >> 32
    index = (hashed & ((1 << depth) - 1)) * sets_per_region + within
    half = sets_per_region << depth >> 1
    return index - half if half <= index < half + cursor else index


@nb.njit
def _mix(key):
    return setcache.mix(key)


@nb.njit
def _set_of(hashed, geometry, sets_per_region):
    return setcache.set_of(hashed, geometry, sets_per_region)


@nb.njit
def _match(array, index, value):
    return atomics.match32(array, index, value)


@nb.njit
def _bits(word):
    return atomics.trailing_zeros(word), atomics.last_one(word)


@nb.njit
def _words(array, i, value):
    atomics.store_relaxed(array, i, value)
    atomics.fence_release()
    atomics.store_release(array, i + 1, value)
    atomics.fence_acquire()
    return atomics.load_acquire(array, i), atomics.load_relaxed(array, i + 1)


@nb.njit
def _copy(target, source, count):
    atomics.prefetch(np.int64(source.ctypes.data))
    atomics.copy_bytes(np.int64(target.ctypes.data), np.int64(source.ctypes.data), count)


@nb.njit
def _heats(counters, ways, values):
    for i in range(ways.size):
        heat.set_heat(counters, 0, ways[i], values[i])


@nb.njit
def _bump(counters, way):
    heat.bump_heat(counters, 0, way)
    return heat.get_heat(counters, 0, way)


@nb.njit
def _victim(counters, hand, ways):
    return heat.next_victim(counters, 0, hand, ways)


@unhurried
@given(int64s)
def test_mixing_is_as_published(key: int) -> None:
    assert int(_mix(np.int64(key))) == mix(key & MASK)


@unhurried
@given(int64s, st.integers(0, 6), st.integers(1, 1 << 20), st.floats(0, 1))
def test_a_key_has_one_set_at_every_depth_and_cursor(key: int, depth: int, sets_per_region: int, part: float) -> None:
    hashed = mix(key & MASK)
    half = (sets_per_region << depth >> 1) if depth else 0
    cursor = int(half * part)
    got = int(_set_of(np.uint64(hashed), np.int64(cursor << 8 | depth), np.int64(sets_per_region)))
    assert got == set_of(hashed, depth, cursor, sets_per_region)
    assert 0 <= got < sets_per_region << depth
    if depth:  # all merged is one level less
        below = int(_set_of(np.uint64(hashed), np.int64(depth - 1), np.int64(sets_per_region)))
        assert int(_set_of(np.uint64(hashed), np.int64(half << 8 | depth), np.int64(sets_per_region))) == below
        assert got in (below, below + half)


def test_keys_spread_evenly_over_sets() -> None:
    keys = np.arange(1 << 18)
    sets = np.array([set_of(mix(int(key)), 3, 0, 125) for key in keys[:: 1 << 4]])
    counts = np.bincount(sets, minlength=1000)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)  # Poisson


@unhurried
@given(st.binary(min_size=48, max_size=48), st.integers(0, 16), st.integers(0, 255))
def test_matching_32_bytes(data: bytes, at: int, value: int) -> None:
    array = np.frombuffer(data, np.uint8) & 7
    expected = sum(1 << i for i in range(32) if array[at + i] == value & 7)
    assert int(_match(array, at, np.uint8(value & 7))) == expected


@unhurried
@given(st.lists(st.integers(0, 5), min_size=40, max_size=40), st.integers(0, 8))
def test_matching_32_halfwords(values: list[int], at: int) -> None:
    array = np.array(values, np.uint16)
    assert int(_match(array, at, np.uint16(3))) == sum(1 << i for i in range(32) if array[at + i] == 3)


@unhurried
@given(st.integers(0, (1 << 32) - 1))
def test_first_and_last_bit(word: int) -> None:
    first, last = _bits(np.uint32(word))
    assert first == ((word & -word).bit_length() - 1 if word else 32)
    assert last == word.bit_length() - 1


def test_atomic_words_and_copies() -> None:
    words = np.zeros(4, np.uint32)
    assert _words(words, 1, np.uint32(9)) == (9, 9)
    assert words.tolist() == [0, 9, 9, 0]
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    _copy(target, source, 77)
    assert (target[:77] == source[:77]).all()
    assert not target[77:].any()


@unhurried
@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 3)), max_size=60))
def test_heat_counters_are_apart(changes: list[tuple[int, int]]) -> None:
    counters, twin = np.zeros(8, np.uint8), [0] * 32
    _heats(counters, np.array([w for w, _ in changes], np.int64), np.array([h for _, h in changes], np.int64))
    for way, value in changes:
        twin[way] = value
    for way in range(32):
        twin[way] = min(3, twin[way] + 1)
        assert _bump(counters, way) == twin[way]


@unhurried
@given(st.lists(st.integers(0, 3), min_size=32, max_size=32), st.integers(0, 31))
def test_the_victim_is_the_first_without_hits_and_those_before_lose_one(hits: list[int], hand: int) -> None:
    counters, twin = np.zeros(8, np.uint8), list(hits)
    _heats(counters, np.arange(32), np.array(hits))
    way = max(hand, heat.PROBATION)
    while twin[way]:
        twin[way] -= 1
        way = way + 1 if way < 31 else heat.PROBATION
    assert _victim(counters, hand, 32) == way
    after = np.zeros(8, np.uint8)
    _heats(after, np.arange(32), np.array(twin))
    assert (counters == after).all()


class OneSet:
    """The promotion policy on one set, in plain Python: keys, hits, two hands and the ghosts."""

    def __init__(self) -> None:
        self.keys: list[int | None] = [None] * 32
        self.hits = [0] * 32
        self.probation, self.main, self.ghost_hand = 0, heat.PROBATION, 0
        self.ghosts: list[int | None] = [None] * heat.GHOSTS

    def look_up(self, key: int) -> bool:
        if key not in self.keys:
            return False
        way = self.keys.index(key)
        self.hits[way] = min(3, self.hits[way] + 1)
        return True

    def insert(self, key: int) -> None:
        if None in self.keys:
            way = self.keys.index(None)
        else:
            known = key in self.ghosts
            if known:
                self.ghosts[self.ghosts.index(key)] = None
            oldest = self.probation
            if known or self.hits[oldest]:
                while self.hits[self.main]:
                    self.hits[self.main] -= 1
                    self.main = self.main + 1 if self.main < 31 else heat.PROBATION
                way = self.main
                self.main = self.main + 1 if self.main < 31 else heat.PROBATION
            else:
                way = oldest
            self.ghosts[self.ghost_hand] = self.keys[way]
            self.ghost_hand = (self.ghost_hand + 1) % heat.GHOSTS
            if not known:
                self.probation = (oldest + 1) % heat.PROBATION
                if way != oldest:
                    self.keys[way], self.hits[way] = self.keys[oldest], self.hits[oldest]
                way = oldest
        self.keys[way], self.hits[way] = key, 0


@pytest.mark.parametrize("seed", range(5))
def test_a_set_follows_the_policy_step_by_step(seed: int) -> None:
    spec = TableSpec("t", KeyType.INT64, 1, StorageDtype.FLOAT32)
    table = HostTable(spec, 700, default_vector=np.zeros(1, np.float32))
    assert table.capacity_rows == 32
    twin = OneSet()
    stream = np.random.default_rng(seed).zipf(1.1, 20_000) % 300
    row, out = np.zeros((1, 4), np.uint8), np.empty((1, 1), np.float32)
    for key in stream.astype(np.int64).reshape(-1, 1):
        state = np.zeros(1, np.uint8)
        table.lookup(key, out, state)
        assert (state[0] == Tier.HOST) == twin.look_up(int(key[0]))
        if state[0] == Tier.PENDING:
            assert table.insert(key, row, 0) == 1
            twin.insert(int(key[0]))
    assert sorted(table.hot_keys(64)) == sorted(key for key in twin.keys if key is not None)
    table.close()
