"""Kernels of the set-associative cache against plain Python: intrinsics, where a key lies, and who is put out."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import kernels
from tierstore.kernels import atomics
from tierstore.kernels.hashing import mix as mix_kernel
from tierstore.tiers.host.cache import heat, resize, write
from tierstore.tiers.host.cache import layout as cache
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier

MASK = (1 << 64) - 1
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
    return mix_kernel(key)


@nb.njit
def _set_of(hashed, geometry, sets_per_region):
    return cache.set_of(hashed, geometry, sets_per_region)


@nb.njit
def _match(array, index, value):
    return atomics.match32(array, index, value)


@nb.njit
def _match8(address, value):
    return atomics.match8_at(address, value)


@nb.njit
def _first_bit(word):
    return atomics.trailing_zeros(word)


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
def _copy_line(target, source):
    atomics.prefetch_far(np.int64(source.ctypes.data))
    atomics.copy_line(np.int64(target.ctypes.data) + 3, np.int64(source.ctypes.data) + 5)


@nb.njit
def _heats(counters, ways, values):
    for i in range(ways.size):
        heat.set_heat(counters, 0, ways[i], values[i])


@nb.njit
def _bump(counters, way):
    heat.bump_heat(np.int64(counters.ctypes.data), way, counters.view(np.int64)[0])
    return heat.get_heat(counters, 0, way)


@given(int64s)
def test_mixing_is_as_published(key: int) -> None:
    assert int(_mix(np.int64(key))) == mix(key & MASK)


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


@given(st.binary(min_size=48, max_size=48), st.integers(0, 16), st.integers(0, 255))
def test_matching_32_bytes(data: bytes, at: int, value: int) -> None:
    array = np.frombuffer(data, np.uint8) & 7
    expected = sum(1 << i for i in range(32) if array[at + i] == value & 7)
    assert int(_match(array, at, np.uint8(value & 7))) == expected


@given(st.lists(st.integers(0, 5), min_size=40, max_size=40), st.integers(0, 8))
def test_matching_32_halfwords(values: list[int], at: int) -> None:
    array = np.array(values, np.uint16)
    assert int(_match(array, at, np.uint16(3))) == sum(1 << i for i in range(32) if array[at + i] == 3)


@given(st.lists(int64s, min_size=8, max_size=8), st.integers(0, 7))
def test_matching_8_words(values: list[int], like: int) -> None:
    memory = np.zeros(16, np.int64)
    array = memory[-memory.ctypes.data % 64 // 8 :][:8]  # the line that begins at a multiple of 64
    array[:] = values
    assert int(_match8(array.ctypes.data, array[like])) == sum(1 << i for i in range(8) if array[i] == array[like])


@given(st.integers(0, (1 << 32) - 1))
def test_the_first_bit(word: int) -> None:
    assert _first_bit(np.uint32(word)) == ((word & -word).bit_length() - 1 if word else 32)


def test_atomic_words_and_copies() -> None:
    words = np.zeros(4, np.uint32)
    assert _words(words, 1, np.uint32(9)) == (9, 9)
    assert words.tolist() == [0, 9, 9, 0]
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    _copy(target, source, 77)
    assert (target[:77] == source[:77]).all()
    assert not target[77:].any()
    target[:] = 0
    _copy_line(target, source)
    assert (target[3:67] == source[5:69]).all()
    assert not target[:3].any()
    assert not target[67:].any()


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 3)), max_size=60))
def test_heat_counters_are_apart(changes: list[tuple[int, int]]) -> None:
    counters, twin = np.zeros(8, np.uint8), [0] * 32
    _heats(counters, np.array([w for w, _ in changes], np.int64), np.array([h for _, h in changes], np.int64))
    for way, value in changes:
        twin[way] = value
    for way in range(32):
        twin[way] = min(3, twin[way] + 1)
        assert _bump(counters, way) == twin[way]


class OneSet:
    """A set and its promotion policy in plain Python: keys and hits by way, two queues, the ghosts."""

    def __init__(self) -> None:
        self.keys: list[int | None] = [None] * cache.WAYS
        self.hits = [0] * cache.WAYS
        self.probation: list[int] = []
        self.hand = self.ghost_hand = 0
        self.ghosts: list[int | None] = [None] * heat.GHOSTS

    def home(self, key: int) -> int:
        return mix(key) >> 8 & cache.LINES - 1

    def ways_of(self, line: int) -> range:
        return range(line * cache.LINE_WAYS, (line + 1) * cache.LINE_WAYS)

    def look_up(self, key: int) -> bool:
        if key not in self.keys:
            return False
        way = self.keys.index(key)
        self.hits[way] = min(heat.MAX_HEAT, self.hits[way] + 1)
        return True

    def free(self, home: int) -> int | None:
        for i in range(cache.LINES):
            for way in self.ways_of((home + i) % cache.LINES):
                if self.keys[way] is None:
                    return way
        return None

    def victim(self) -> int:
        while self.hand in self.probation or self.hits[self.hand]:
            if self.hand not in self.probation:
                self.hits[self.hand] -= 1
            self.hand = (self.hand + 1) % cache.WAYS
        way = self.hand
        self.hand = (way + 1) % cache.WAYS
        return way

    def put_out(self, key: int) -> tuple[int, bool]:
        known = key in self.ghosts
        if known:
            self.ghosts[self.ghosts.index(key)] = None
        if known or len(self.probation) < heat.PROBATION:
            way = self.victim()
        elif self.hits[self.probation[0]]:
            way = self.victim()
            self.probation.pop(0)
        else:
            way = self.probation.pop(0)
        self.ghosts[self.ghost_hand] = self.keys[way]
        self.ghost_hand = (self.ghost_hand + 1) % heat.GHOSTS
        self.keys[way] = None
        return way, not known

    def insert(self, key: int) -> None:
        home, on_probation = self.home(key), True
        way = self.free(home)
        if way is None:
            way, on_probation = self.put_out(key)
        guests = [other for other in self.ways_of(home) if self.keys[other] is not None and self.home(self.keys[other]) != home]  # type: ignore[arg-type]  # fmt: skip
        if way // cache.LINE_WAYS != home and guests:
            returning = [other for other in guests if self.home(self.keys[other]) == way // cache.LINE_WAYS]  # type: ignore[arg-type]  # fmt: skip
            guest = returning[0] if returning else guests[-1]
            self.keys[way], self.hits[way] = self.keys[guest], self.hits[guest]
            self.probation = [way if other == guest else other for other in self.probation]
            way = guest
        self.keys[way], self.hits[way] = key, 0
        if on_probation and len(self.probation) < heat.PROBATION:
            self.probation.append(way)


@pytest.mark.parametrize("seed", range(5))
def test_a_set_follows_the_policy_step_by_step(seed: int) -> None:
    spec = TableSpec("t", KeyType.INT64, 1, StorageDtype.FLOAT32)
    table = HostTable(spec, 1200, default_vector=np.zeros(1, np.float32))
    assert table.capacity_rows == cache.WAYS
    twin = OneSet()
    stream = np.random.default_rng(seed).zipf(1.1, 20_000) % 500
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


def test_most_rows_of_a_full_table_lie_in_their_home_line() -> None:
    """What makes a look-up read one line: a line says that others hold keys of its own only where it is full of them."""
    spec = TableSpec("t", KeyType.INT64, 1, StorageDtype.FLOAT32)
    table = HostTable(spec, 1 << 19, default_vector=np.zeros(1, np.float32))
    for begin in range(0, 8 * table.capacity_rows, 4096):
        keys = np.arange(begin, begin + 4096)
        table.insert(keys, np.zeros((4096, 4), np.uint8), 0)
    areas = table._areas
    assert areas is not None
    lines = areas.lines64.reshape(-1, cache.LINES, 8)
    taken = areas.lines.reshape(-1, cache.LINES, 64)[:, :, cache.OCCUPIED_AT]
    assert (taken == 127).all()
    homes = np.array([mix(int(key)) >> 8 & 7 for key in lines[:, :, 1:].ravel()]).reshape(-1, cache.LINES, 7)
    away = homes != np.arange(cache.LINES)[None, :, None]
    assert away.mean() < 0.18  # of 56 keys that fall on eight lines by chance 0.14 have no place
    named = areas.lines.reshape(-1, cache.LINES, 64)[:, :, cache.AWAY_AT]
    for line in range(cache.LINES):
        for other in range(cache.LINES):
            lies = (homes[:, other] == line).any(axis=1) & (other != line)
            np.testing.assert_array_equal((named[:, line] >> other & 1).astype(bool), lies)
    table.close()


def test_a_batch_leaves_the_table_as_its_keys_one_by_one_do() -> None:
    """Of any length: shorter than the keys that are worked on ahead, or longer."""
    spec = TableSpec("t", KeyType.INT64, 20, StorageDtype.FLOAT32)  # rows begin within cache lines
    tables = [HostTable(spec, 1 << 15, default_vector=np.zeros(20, np.float32)) for _ in range(2)]
    rng, n = np.random.default_rng(5), 1000
    for size in [*range(40), 500, 700] * 2:
        keys = rng.choice(n, size, replace=False)
        rows = rng.integers(0, 256, (size, spec.row_bytes), dtype=np.uint8)
        one_by_one = sum(tables[1].insert(keys[i : i + 1], rows[i : i + 1], 0) for i in range(size))
        assert tables[0].insert(keys, rows, 0) == one_by_one
        for left, right in zip(*(table._areas or () for table in tables), strict=True):
            if isinstance(left, np.ndarray):
                np.testing.assert_array_equal(left, right)
        for mine, one in zip(*(table.stored(np.arange(n)) for table in tables), strict=True):
            np.testing.assert_array_equal(mine, one)
    assert tables[0].stats() == tables[1].stats()
    assert tables[0].stats()["evicted"] > 0
    for table in tables:
        table.close()


@pytest.mark.parametrize("kernel", [write.insert, write.insert_absent, write.update, resize.merge, resize.split])
def test_writing_counts_no_references(kernel: Any) -> None:
    """Counting them, with an atomic instruction or two at each step, was two thirds of the time of an insert."""
    next(entry for entry in kernels.entries if entry.dispatcher is kernel).build()
    name = kernel._cache._impl.filename_base
    compiled = [file.read_bytes() for file in kernels.directory().iterdir() if file.match(f"{name}.*.nbc")]
    assert compiled
    assert not any(b"NRT_incref" in code or b"NRT_decref" in code for code in compiled)
