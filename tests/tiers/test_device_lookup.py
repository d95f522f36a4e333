"""Answers that stay on the device: rows and pooled bags as the CPU gives them, with few copies and one fetch a chunk."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_shim import compile
from tests.tiers.cuda_shim.backend import OnGpu, ShimDevice
from tests.tiers.cuda_shim.functions import CALL, LAUNCH, NOT_SUPPORTED
from tests.tiers.devices import ReadTable, either, open_device, to_host
from tierstore.engine.data.overlay import OverlayTable
from tierstore.errors import InvalidInput, StorageError
from tierstore.kernels import codec
from tierstore.kernels.hashing import mix_all
from tierstore.kernels.pool import pool_bags
from tierstore.tiers.device import driver_calls, reports, round_trip
from tierstore.tiers.device.backend import Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.host_registration import NOT_YET
from tierstore.tiers.device.later import Finisher
from tierstore.tiers.device.lookup import PADDING, LookUp, OtherTiers, PendingLookup, Pooling, from_device, to_device
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ANSWERING, DeviceMemory
from tierstore.tiers.host.access_sample import ALL, NOTHING, AccessSample
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, GpuArray, Keys, KeyType, States, StorageDtype, TableSpec, Tier, Vectors
from tools.soak_device import Soak

RESIDENT = np.arange(0, 400, dtype=np.int64)
GONE = np.arange(400, 440, dtype=np.int64)  # known absent by the device
BELOW = np.arange(440, 600, dtype=np.int64)  # of the tiers below; those above are nowhere
LAST = 640
KEPT = np.arange(3000, 7000, dtype=np.int64)  # of the host tier, where a test has a large one
NOWHERE = np.arange(620, 640, dtype=np.int64)  # which it knows not to exist
NO_OVERLAYS = np.empty(0, np.int64)
CALLS = {  # of a look-up in a stream
    driver_calls.LAUNCH: LAUNCH,
    **dict.fromkeys(
        (
            driver_calls.PUSH, driver_calls.RECORD, driver_calls.WAIT, driver_calls.WAIT_VALUE, driver_calls.COPY_DOWN,
            driver_calls.WRITE_VALUE,
        ),
        CALL,
    ),
}  # fmt: skip
PADDING_KEY = 90  # which is on the device, and has a row of a delta too


def row_bytes_of(spec: TableSpec, keys: Keys) -> np.ndarray:
    vectors = np.sin(keys[:, None] * 7.0 + np.arange(spec.dim)).astype(np.float32)
    return codec.encode(vectors, spec.dtype)


class Scene:
    """A table on a stand-in device, what lies below it, and what a look-up ought to answer."""

    def __init__(self, dim: int, dtype: StorageDtype, memory_bytes: int = 64 << 20, kind: str = "late") -> None:
        self.spec = TableSpec("t", KeyType.INT64, dim, dtype)
        self.default = np.linspace(-2, 2, dim).astype(np.float32)
        self.device = open_device(kind)
        self.memory = DeviceMemory(self.device, memory_bytes)
        self.table = ReadTable(self.spec, 1 << 20, self.memory, default_vector=self.default)
        assert self.table.warm(RESIDENT, row_bytes_of(self.spec, RESIDENT)) == len(RESIDENT)
        self.table.insert_absent(GONE, 1)
        self.asked: list[Keys] = []

    def host_tier(self, keys: Keys, budget_bytes: int, sample: AccessSample = NOTHING) -> HostTable:
        """One with the rows of these keys, as far as they find room."""
        host = HostTable(self.spec, budget_bytes, default_vector=self.default, sample=sample)
        host.warm(keys, row_bytes_of(self.spec, keys))
        return host

    def fetch(self, keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        self.asked.append(keys)
        rows = np.empty((len(keys), self.spec.dim), dtype)
        codec.decode(row_bytes_of(self.spec, keys), self.spec.dtype, rows)
        states = np.where((keys <= BELOW[-1]) | (keys >= KEPT[0]), Tier.HOST, Tier.ABSENT).astype(np.uint8)
        states[(keys >= GONE[0]) & (keys <= GONE[-1])] = Tier.ABSENT  # marks may be forgotten
        rows[states == Tier.ABSENT] = self.default
        return rows, states

    def rows(self, keys: Keys, dtype: Any) -> Vectors:
        """The twin: what every key answers, wherever it lies."""
        rows = np.empty((len(keys), self.spec.dim), dtype)
        codec.decode(row_bytes_of(self.spec, keys), self.spec.dtype, rows)
        rows[(keys >= GONE[0]) & (keys <= GONE[-1]) | (keys > BELOW[-1]) & (keys < KEPT[0])] = self.default
        return rows

    def look_up(
        self,
        keys: Keys,
        dtype: Any,
        state: States,
        bags: Pooling | None = None,
        host: HostTable | None = None,
        overlays: Keys = NO_OVERLAYS,
        padding: int | None = None,
    ) -> np.ndarray:
        out = self.device.empty((len(keys) if bags is None else len(bags.offsets), self.spec.dim), dtype)
        assert look_up_of(
            self.table, keys, state, GpuArray.of(self.device, out), self.fetch, bags, host, overlays, padding
        ).finish()
        return to_host(out)


def look_up_of(
    table: DeviceTable,
    keys: Any,
    state: States,
    out: GpuArray,
    fetch: Any,
    bags: Pooling | None = None,
    host: HostTable | None = None,
    overlays: Keys = NO_OVERLAYS,
    padding: int | None = None,
    filters: int = 0,
) -> LookUp:
    """A look-up whose other tiers are named one by one."""
    return LookUp(table, keys, state, out, OtherTiers(fetch, host, overlays, filters), bags, padding)


def mixed(n: int, seed: int) -> Keys:
    """Keys of every kind, some asked for often, a fifth of them the padding key."""
    rng = np.random.default_rng(seed)
    keys = np.minimum(rng.integers(0, LAST, n), rng.integers(0, LAST, n))
    keys[rng.random(n) < 0.2] = PADDING_KEY
    return keys


class Deltas:
    """Two overlays over a table: every fifth key is changed by one of them or by both, every thirtieth is deleted."""

    def __init__(self, spec: TableSpec) -> None:
        self._vectors: dict[int, np.ndarray] = {}  # None: deleted
        self._overlays = [
            self._delta(spec, keys, seed) for seed, keys in enumerate((range(0, LAST, 10), range(5, LAST, 5)))
        ]
        self.addresses = np.array([overlay.words.ctypes.data for overlay in reversed(self._overlays)], np.int64)
        self.filters = sum(overlay.filter_bytes for overlay in self._overlays)

    def _delta(self, spec: TableSpec, keys: range, seed: int) -> OverlayTable:
        rng = np.random.default_rng(seed)
        rows = codec.encode(rng.normal(size=(len(keys), spec.dim)).astype(np.float32), spec.dtype)
        vectors = np.empty((len(keys), spec.dim), np.float32)
        codec.decode(rows, spec.dtype, vectors)
        deleted = np.array([key % 30 == 10 for key in keys])
        self._vectors |= dict(zip(keys, vectors, strict=True)) | dict.fromkeys(np.array(keys)[deleted].tolist())
        return OverlayTable(spec, np.array(keys, np.int64), rows, deleted)

    def over(self, keys: Keys, rows: Vectors, default: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Put the rows that they answer over others. Returns which keys they have changed, and which deleted."""
        changed, deleted = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        for i, key in enumerate(keys.tolist()):
            if key in self._vectors:
                vector = self._vectors[key]
                (deleted if vector is None else changed)[i] = True
                rows[i] = default if vector is None else vector
        return changed, deleted

    def fetch(self, scene: Scene) -> Callable[[Keys, Any], tuple[Vectors, States]]:
        """What answers keys that they may have, or that no tier in memory has."""

        def fetch(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
            rows, states = scene.fetch(keys, dtype)
            changed, deleted = self.over(keys, rows, scene.default)
            states[changed], states[deleted] = Tier.OVERLAY, Tier.ABSENT
            return rows, states

        return fetch


@either
@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("out_dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("dim", "memory"), [(6, 64 << 20), (8, 1 << 20), (33, 1 << 20), (64, 64 << 20)])
def test_every_key_answers_its_row_from_wherever_it_comes(
    kind: str, dtype: StorageDtype, out_dtype: Any, dim: int, memory: int
) -> None:
    scene = Scene(dim, dtype, memory, kind)
    keys, state = mixed(901, dim), np.zeros(901, np.uint8)
    deltas, asked = Deltas(scene.spec), keys != PADDING_KEY
    expected = scene.rows(keys, out_dtype)
    changed, deleted = deltas.over(keys, expected, scene.default)
    expected[~asked] = 0
    out = scene.look_up(keys, out_dtype, state, overlays=deltas.addresses, padding=PADDING_KEY)
    np.testing.assert_array_equal(out, expected)
    assert (state[~asked] == PADDING).all()
    assert (state[asked & changed] == Tier.OVERLAY).all()
    assert (state[asked & deleted] == Tier.ABSENT).all()
    looked = asked & ~changed & ~deleted
    assert not np.isin(np.concatenate(scene.asked), keys[changed | deleted]).any()
    resident = keys < len(RESIDENT)
    assert (state[looked & resident] == Tier.DEVICE).all()
    below = (keys >= BELOW[0]) & (keys <= BELOW[-1])
    assert (state[looked & below] == Tier.HOST).all()
    assert (state[looked & ~resident & ~below] == Tier.ABSENT).all()


@either
@pytest.mark.parametrize("combiner", list(Combiner))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype", "memory"),
    [
        (8, StorageDtype.FLOAT32, 64 << 20),
        (33, StorageDtype.INT8, 2 << 20),
        (64, StorageDtype.FLOAT16, 4 << 20),
        (37, StorageDtype.INT4, 2 << 20),
    ],
)
def test_bags_are_pooled_bit_for_bit_as_on_the_cpu(
    kind: str, combiner: Combiner, weighted: bool, dim: int, dtype: StorageDtype, memory: int
) -> None:
    scene = Scene(dim, dtype, memory, kind)
    keys, state = mixed(700, dim), np.zeros(700, np.uint8)
    keys[:200] = np.arange(200)  # bags that are all here
    rng = np.random.default_rng(dim)
    offsets = np.sort(np.concatenate([[0, 0], rng.integers(0, len(keys), 120), [len(keys)]])).astype(np.int64)
    weights = rng.normal(size=len(keys)).astype(np.float32) if weighted else None
    deltas, bags = Deltas(scene.spec), Pooling(offsets, weights, combiner)
    for addresses, padding in (NO_OVERLAYS, None), (NO_OVERLAYS, PADDING_KEY), (deltas.addresses, PADDING_KEY):
        rows = scene.rows(keys, np.float32)
        if len(addresses):
            deltas.over(keys, rows, scene.default)
        expected = pool_bags(rows, offsets, weights, keys != (-1 if padding is None else padding), combiner)
        out = scene.look_up(keys, np.float32, state, bags, overlays=addresses, padding=padding)
        np.testing.assert_array_equal(out, expected)
        half = scene.look_up(keys, np.float16, state, bags, overlays=addresses, padding=padding)
        np.testing.assert_array_equal(half, expected.astype(np.float16))


@either
@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("dim", [6, 16, 33])
def test_the_host_tier_is_read_by_the_device_as_the_cpu_reads_it(kind: str, dtype: StorageDtype, dim: int) -> None:
    """Lines that are full, so that keys lie in other lines; and keys that are known not to exist."""
    scene = Scene(dim, dtype, kind=kind)
    host = scene.host_tier(KEPT, 640 << 10)
    host.insert_absent(NOWHERE, 1)
    rng = np.random.default_rng(dim)
    keys = rng.permutation(np.concatenate([KEPT, KEPT[:300], RESIDENT[:50], NOWHERE, [-5]]))
    expected = scene.rows(keys, np.float32)
    for times in (1, 2):
        before = dict(host.stats())
        state, there = np.zeros(len(keys), np.uint8), np.zeros(len(keys), np.uint8)
        np.testing.assert_array_equal(scene.look_up(keys, np.float32, state, host=host), expected)
        if times == 1:  # the CPU has answered
            scene.table.read_below(host)
            asked = len(scene.asked)
            continue
        assert host.stats() == before
        host.lookup(keys, np.empty_like(expected), there)
        there[np.isin(keys, RESIDENT)] = Tier.DEVICE
        left = there == Tier.PENDING  # by the CPU too, as there is no room for all of them
        assert sorted(np.concatenate(scene.asked[asked:])) == sorted(keys[left])
        assert 0 < np.count_nonzero(left) < 500
        np.testing.assert_array_equal(state[~left], there[~left])
    half = scene.look_up(keys, np.float16, np.zeros(len(keys), np.uint8), host=host)
    np.testing.assert_array_equal(half, scene.rows(keys, np.float16))
    offsets, weights = np.arange(0, len(keys), 5), rng.normal(size=len(keys)).astype(np.float32)
    padding = int(KEPT[5])
    pooled = pool_bags(expected, offsets, weights, keys != padding, Combiner.SQRTN)
    bags = Pooling(offsets, weights, Combiner.SQRTN)
    np.testing.assert_array_equal(scene.look_up(keys, np.float32, state, bags, host, padding=padding), pooled)
    assert all(set(some) <= set(keys[left]) for some in scene.asked[asked:])
    host.close()


def lines_of(host: HostTable, keys: Keys) -> np.ndarray:
    """In which line of which set keys belong, of a table that was not made smaller: [n, 3]."""
    assert host.areas is not None
    hashed, depth = mix_all(keys), np.uint64(host._memory.shape[0])  # type: ignore[union-attr]
    within = (hashed >> np.uint64(32)) * np.uint64(host.areas.sets_per_region) >> np.uint64(32)
    one = np.uint64(1)
    return np.stack([hashed >> np.uint64(8) & np.uint64(7), hashed & (one << depth) - one, within], 1)


@pytest.mark.parametrize("dim", [64, 33])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_row_is_whole_whenever_the_host_tier_is_written_while_the_device_reads_it(dim: int, replaced: bool) -> None:
    """Before any load of a kernel: overwritten by a delta, or put out for another key's."""
    dtype = StorageDtype.FLOAT32 if dim == 64 else StorageDtype.INT8
    scene = Scene(dim, dtype)
    host, key, load, answers = scene.host_tier(BELOW[:1], 160 << 10), BELOW[:1], 0, set()
    others = np.arange(100_000, 300_000)
    beside = others[(lines_of(host, others) == lines_of(host, key)).all(1)]
    scene.table.read_below(host)
    paused = True
    while paused:
        load += 1
        keys = np.array([int(key[0]), beside[load]])  # the second one takes its place, or its row
        rows = codec.encode(np.arange(2 * dim, dtype=np.float32).reshape(2, -1) + np.float32(load), dtype)
        host.update(key, rows[:1], np.zeros(1, np.bool_))
        vectors = np.empty((2, dim), np.float32)
        codec.decode(rows, dtype, vectors)
        got: list[np.ndarray] = []

        def look_up_key(keys: Keys = key, got: list[np.ndarray] = got) -> None:
            got.append(scene.look_up(keys, np.float32, np.zeros(1, np.uint8), host=host))

        def write(other: Keys = keys[1:], row: np.ndarray = rows[1:]) -> None:
            if replaced:
                host.update(key, row, np.ones(1, np.bool_))
                host.insert(other, row, 1)
            else:
                host.update(key, row, np.zeros(1, np.bool_))

        paused = compile.paused_before(load, threading.Thread(target=look_up_key), write)
        whole = [vectors[0], scene.default if replaced else vectors[1], scene.rows(key, np.float32)[0]]
        matches = [np.array_equal(got[0][0], row) for row in whole]
        assert any(matches), load
        answers.add(matches.index(True))
        if replaced:
            host.update(keys[1:], rows[1:], np.ones(1, np.bool_))
            host.insert(key, rows[:1], 1)
    assert load > 20
    assert {0, 1} <= answers | ({1} if replaced else set())
    host.close()


def test_what_the_device_reads_of_the_host_tier_is_heat_and_is_sampled() -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    sample = AccessSample()
    host = scene.host_tier(BELOW, 1 << 20, sample)
    scene.table.read_below(host)
    sample.collect(ALL)
    warm = BELOW[::3]
    for _ in range(5):
        scene.look_up(warm, np.float32, np.zeros(len(warm), np.uint8), host=host)
    assert scene.asked == []
    heat = {int(key): host.peek(int(key)).heat["hits"] for key in BELOW}
    assert all(heat[int(key)] > 0 for key in warm)
    assert all(heat[int(key)] == 0 for key in np.setdiff1d(BELOW, warm))
    noted = sample.collect(0)
    assert noted.seen == 5 * len(warm)
    assert sorted(noted.keys) == sorted(np.tile(warm, 5))
    host.close()


@pytest.mark.parametrize("in_stream", [False, True])
def test_of_keys_that_the_device_lists_none_is_noted_as_an_answer_of_the_host_tier(in_stream: bool) -> None:
    """Also if an earlier look-up has left states in the workspace."""
    scene, sample = Scene(8, StorageDtype.FLOAT32), AccessSample()
    host, caller = scene.host_tier(BELOW, 1 << 20, sample), Caller(scene)
    scene.table.read_below(host)

    def look_up(keys: Keys) -> None:
        if in_stream:
            caller.ask(keys, host=host)
            caller.is_through()
        else:
            scene.look_up(keys, np.float32, np.zeros(len(keys), np.uint8), host=host)

    for _ in range(ANSWERING):
        look_up(BELOW[:80])
    sample.collect(ALL)
    for _ in range(ANSWERING):
        look_up(np.concatenate([KEPT[:50], BELOW[:30]]))
    assert len(scene.asked) == ANSWERING
    noted = sample.collect(0)
    assert sorted(noted.keys) == sorted(np.tile(BELOW[:30], ANSWERING))
    assert noted.seen == ANSWERING * 30
    host.close()


def test_memory_that_the_host_tier_gives_back_is_not_read_any_more() -> None:
    """Whatever the order in which both are closed; the stand-in ends the process where it is read all the same."""
    scene = Scene(8, StorageDtype.FLOAT32)
    zeros = np.zeros(len(BELOW), np.uint8)
    expected = scene.rows(BELOW, np.float32)
    for _ in range(2):
        host = scene.host_tier(BELOW, 4 << 20)
        for fraction in (0.5, 0.7, 0.25, 1.0):
            scene.table.read_below(host)
            locked = scene.device.locked
            assert locked >= host.bytes_in_use
            np.testing.assert_array_equal(scene.look_up(BELOW, np.float32, zeros.copy(), host=host), expected)
            assert scene.asked == []
            host.resize(fraction)
            assert scene.device.locked == 0
            scene.look_up(BELOW, np.float32, zeros.copy(), host=host)
            assert len(scene.asked.pop()) == len(BELOW)
            host.resize(fraction)
        scene.table.read_below(host)
        other = scene.host_tier(BELOW[:5], 1 << 20)
        assert len(scene.look_up(BELOW, np.float32, zeros.copy(), host=other)) == len(scene.asked.pop())
        scene.table.read_below(other)
        assert 0 < scene.device.locked < locked
        host.close()
        other.close()
        assert scene.device.locked == 0
    scene.table.read_below(scene.host_tier(BELOW, 1 << 20))
    scene.table.close()
    assert scene.device.locked == 0


def test_where_memory_of_the_host_tier_cannot_be_locked_the_cpu_reads_it_and_the_status_says_so() -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    host = scene.host_tier(BELOW, 4 << 20)
    scene.device.lockable = host.bytes_in_use // 2
    assert scene.table.stats()["host_problem"] == NOT_YET
    scene.table.read_below(host)
    assert "cannot be registered: device 0" in scene.table.stats()["host_problem"]
    assert scene.device.locked == 0
    rows = scene.look_up(BELOW, np.float32, np.zeros(len(BELOW), np.uint8), host=host)
    np.testing.assert_array_equal(rows, scene.rows(BELOW, np.float32))
    assert len(scene.asked) == 1
    scene.device.lockable <<= 4
    scene.table.read_below(host)  # of that size it is not tried again
    assert scene.device.locked == 0
    host.resize(0.5)
    scene.table.read_below(host)
    assert scene.device.locked > 0
    assert scene.table.stats()["host_problem"] is None
    host.close()
    scene.table.close()


@either
@pytest.mark.parametrize("dtype", [StorageDtype.FLOAT32, StorageDtype.BFLOAT16, StorageDtype.INT8])
def test_numbers_below_the_least_normal_one_are_not_taken_for_zeros(kind: str, dtype: StorageDtype) -> None:
    scene = Scene(8, dtype, kind=kind)
    keys = np.arange(1000, 1064, dtype=np.int64)
    vectors = (np.linspace(-1, 1, len(keys) * 8) * 1e-39).astype(np.float32).reshape(-1, 8)
    raw = codec.encode(vectors, dtype)
    assert scene.table.insert(keys, raw, 1) == len(keys)
    expected = np.empty_like(vectors)
    codec.decode(raw, dtype, expected)
    assert np.count_nonzero(expected) > 400
    state = np.zeros(len(keys), np.uint8)
    np.testing.assert_array_equal(scene.look_up(keys, np.float32, state.copy()), expected)
    offsets, weights = np.arange(0, len(keys), 4), np.full(len(keys), 0.75, np.float32)
    pooled = scene.look_up(keys, np.float32, state.copy(), Pooling(offsets, weights, Combiner.MEAN))
    np.testing.assert_array_equal(pooled, pool_bags(expected, offsets, weights, None, Combiner.MEAN))
    assert np.count_nonzero(pooled)


def test_all_misses_are_fetched_at_once_and_only_many_keys_are_copied() -> None:
    scene = Scene(16, StorageDtype.FLOAT32)
    keys = np.concatenate([np.repeat(RESIDENT, 3), np.repeat(BELOW, 4)])
    np.random.default_rng(1).shuffle(keys)
    scene.device.moved[:] = 0, 0
    scene.look_up(keys, np.float32, np.zeros(len(keys), np.uint8))
    assert sorted(scene.asked[0]) == np.repeat(BELOW, 4).tolist()
    scene.look_up(RESIDENT, np.float32, np.zeros(len(RESIDENT), np.uint8))
    assert len(scene.asked) == 1
    assert scene.device.moved == [0, 0]  # the kernels read and write page-locked memory
    scene = Scene(16, StorageDtype.FLOAT32, 512 << 20)
    many = np.tile(RESIDENT, -(-16_384 // len(RESIDENT)))
    scene.device.moved[:] = 0, 0
    np.testing.assert_array_equal(
        scene.look_up(many, np.float32, np.zeros(len(many), np.uint8)), scene.rows(many, np.float32)
    )
    assert scene.device.moved[0] == 1
    assert scene.device.moved[1] < len(many) * (8 + 1) + 100


def test_every_key_value_may_be_asked_for() -> None:
    scene = Scene(4, StorageDtype.FLOAT32)
    limits = np.iinfo(np.int64)
    keys = np.array([0, -1, limits.min, limits.max, -1, limits.min], np.int64)
    seen: list[Keys] = []

    def fetch(missing: Keys, dtype: Any) -> tuple[Vectors, States]:
        seen.append(missing)
        return np.repeat((missing % 1000).astype(dtype)[:, None], 4, 1), np.full(len(missing), Tier.DISK, np.uint8)

    scene.table.update(keys[:1], row_bytes_of(scene.spec, keys[:1]), np.ones(1, np.bool_))  # which forgets key 0
    out = scene.device.empty((len(keys), 4), np.float32)
    state = np.zeros(len(keys), np.uint8)
    assert look_up_of(scene.table, keys, state, GpuArray.of(scene.device, out), fetch).finish()
    assert sorted(seen[0]) == [limits.min, limits.min, -1, -1, limits.max]
    np.testing.assert_array_equal(out[1:, 0], (keys[1:] % 1000).astype(np.float32))
    np.testing.assert_array_equal(out[0], scene.default)


def test_no_keys_and_empty_bags_are_answered() -> None:
    scene = Scene(4, StorageDtype.FLOAT32)
    nothing = np.empty(0, np.int64)
    assert scene.look_up(nothing, np.float32, np.empty(0, np.uint8)).shape == (0, 4)
    bags = Pooling(np.zeros(3, np.int64), None, Combiner.MEAN)
    np.testing.assert_array_equal(scene.look_up(nothing, np.float32, np.empty(0, np.uint8), bags), np.zeros((3, 4)))


def test_a_bag_larger_than_a_workspace_is_left_to_the_cpu() -> None:
    scene = Scene(64, StorageDtype.FLOAT32, 1 << 20)
    keys = np.zeros(1000, np.int64)
    out = scene.device.empty((1, 64), np.float32)
    bags = Pooling(np.zeros(1, np.int64), None, Combiner.SUM)
    assert not look_up_of(
        scene.table, keys, np.zeros(1000, np.uint8), GpuArray.of(scene.device, out), scene.fetch, bags
    ).finish()


def test_a_disk_that_fails_meanwhile_leaves_the_device_as_it_was() -> None:
    scene = Scene(8, StorageDtype.FLOAT32)

    def fail(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        raise StorageError("the disk failed")

    out = scene.device.empty((len(BELOW), 8), np.float32)
    with pytest.raises(StorageError, match="the disk failed"):
        look_up_of(scene.table, BELOW, np.zeros(len(BELOW), np.uint8), GpuArray.of(scene.device, out), fail).finish()
    assert scene.memory.held == 0
    again = scene.look_up(RESIDENT, np.float32, np.zeros(len(RESIDENT), np.uint8))
    np.testing.assert_array_equal(again, scene.rows(RESIDENT, np.float32))


@either
def test_an_answer_is_not_written_before_the_callers_work_that_is_in_its_stream(kind: str) -> None:
    """Memory of an array that was let go may be given out again while the program's kernels are still to read it."""
    scene = Scene(8, StorageDtype.FLOAT32, kind=kind)
    stream, read = scene.device.stream(), scene.device.pinned(len(RESIDENT) * 32)
    before = scene.rows(RESIDENT[::-1], np.float32)
    out = scene.device.empty(before.shape, np.float32)
    up = scene.device.pinned(before.nbytes)
    up[:] = before.reshape(-1).view(np.uint8)
    stream.upload(scene.device.address_of(out), up)
    stream.synchronize()
    stream.download(read, scene.device.address_of(out))
    with scene.device.in_stream(getattr(stream, "_stream", stream)):
        state = np.zeros(len(RESIDENT), np.uint8)
        assert look_up_of(scene.table, RESIDENT, state, GpuArray.of(scene.device, out), scene.fetch).finish()
    np.testing.assert_array_equal(to_host(out), scene.rows(RESIDENT, np.float32))
    stream.synchronize()
    np.testing.assert_array_equal(read.view(np.float32).reshape(-1, 8), before)


@either
@pytest.mark.parametrize("pooled", [False, True])
def test_parts_of_a_look_up_overlap_and_are_all_given_back(kind: str, pooled: bool) -> None:
    """More parts than workspaces; one that fails in the middle leaves nothing behind, and no kernel that still writes."""
    scene = Scene(8, StorageDtype.FLOAT32, 1 << 20, kind)
    keys = np.random.default_rng(5).integers(0, LAST, 3000)
    bags = Pooling(np.arange(0, len(keys), 3), None, Combiner.SUM) if pooled else None
    expected = scene.rows(keys, np.float32)
    if bags is not None:
        expected = pool_bags(expected, bags.offsets, None, None, bags.combiner)
    held: list[int] = []

    def fetch(missing: Keys, dtype: Any) -> tuple[Vectors, States]:
        held.append(scene.memory.held)
        if len(held) == 12:
            raise StorageError("the disk failed")
        return scene.fetch(missing, dtype)

    out, state = scene.device.empty(expected.shape, np.float32), np.zeros(len(keys), np.uint8)
    assert look_up_of(scene.table, keys, state, GpuArray.of(scene.device, out), scene.fetch, bags).finish()
    np.testing.assert_array_equal(to_host(out), expected)
    assert (state[keys < len(RESIDENT)] == Tier.DEVICE).all()
    assert (state != Tier.PENDING).all()
    with pytest.raises(StorageError, match="the disk failed"):
        look_up_of(
            scene.table, keys, np.zeros(len(keys), np.uint8), GpuArray.of(scene.device, out), fetch, bags
        ).finish()
    assert held == [2] * 12
    assert scene.memory.held == 0
    if isinstance(scene.device, ShimDevice):
        assert all(stream.done == stream.put for stream in scene.device._streams)


@either
def test_look_ups_that_have_begun_together_are_finished_one_after_the_other(kind: str) -> None:
    """Rows and bags, from every tier, more of them than there are workspaces; one of them is abandoned."""
    scene, begun = Scene(8, StorageDtype.FLOAT32, kind=kind), []
    host = scene.host_tier(KEPT[:1000], 1 << 20)
    scene.table.read_below(host)
    for number in range(12):
        keys = np.random.default_rng(number).integers(0, LAST, 300)
        bags = Pooling(np.arange(0, 300, 10), None, Combiner.SUM) if number % 2 else None
        expected = scene.rows(keys, np.float32)
        if bags is not None:
            expected = pool_bags(expected, bags.offsets, None, None, bags.combiner)
        out, state = scene.device.empty(expected.shape, np.float32), np.zeros(len(keys), np.uint8)
        look_up = look_up_of(scene.table, keys, state, GpuArray.of(scene.device, out), scene.fetch, bags, host)
        assert look_up.begin() == (number < ANSWERING)
        begun.append((look_up, keys, state, expected))
    assert scene.memory.held == ANSWERING
    begun.pop(3)[0].abandon()
    assert scene.memory.held == ANSWERING - 1
    for look_up, keys, state, expected in begun:
        assert look_up.finish()
        look_up.abandon()  # which does nothing any more
        np.testing.assert_array_equal(to_host(look_up.out), expected)
        assert (state[keys < len(RESIDENT)] == Tier.DEVICE).all()
        assert (state != Tier.PENDING).all()
    assert scene.memory.held == 0
    host.close()


def test_threads_with_several_look_ups_at_once_never_wait_for_each_other() -> None:
    """Of one part and of more parts than there are workspaces, by more threads than there are workspaces."""
    scene = Scene(8, StorageDtype.FLOAT32, 1 << 20)
    wrong: list[int] = []

    def fetch(missing: Keys, dtype: Any) -> tuple[Vectors, States]:
        time.sleep(0.0005)  # others get on
        return scene.fetch(missing, dtype)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(4):
            look_ups = []
            for n in (100, 2500, 100, 2500):
                keys, out = rng.integers(0, LAST, n), scene.device.empty((n, 8), np.float32)
                look_up = look_up_of(scene.table, keys, np.zeros(n, np.uint8), GpuArray.of(scene.device, out), fetch)
                look_ups.append((look_up, scene.rows(keys, np.float32)))
            for look_up, expected in sorted(look_ups, key=lambda one: not one[0].begin()):
                if not look_up.finish() or not np.array_equal(to_host(look_up.out), expected):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(ANSWERING + 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert scene.memory.held == 0


def test_a_look_up_begins_only_where_it_can_end() -> None:
    scene = Scene(8, StorageDtype.FLOAT32, 1 << 20)

    def begins(keys: Keys) -> bool:
        out = scene.device.empty((len(keys), 8), np.float32)
        return look_up_of(
            scene.table, keys, np.zeros(len(keys), np.uint8), GpuArray.of(scene.device, out), scene.fetch
        ).begin()

    assert not begins(BELOW[:0])
    assert not begins(np.tile(BELOW, 10))  # several parts, for which `finish` may wait
    assert scene.memory.held == 0
    assert begins(BELOW[:9])
    scene.device.broken = True
    out, state = scene.device.empty((9, 8), np.float32), np.zeros(9, np.uint8)
    look_up = look_up_of(scene.table, BELOW[:9], state, GpuArray.of(scene.device, out), scene.fetch)
    assert look_up.begin()
    assert not look_up.finish()
    assert scene.table.problem is not None
    assert not begins(BELOW[:9])
    assert scene.memory.held == 1  # of the first that had begun


class Caller:
    """A program with a stream of its own, which asks and does not wait. `held`: look-ups that hold the tiers below."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.stream = scene, scene.device.stream()
        self.changed = threading.Condition()
        self.held = 0
        self.told: list[tuple[list[int], list[int]]] = []
        self._read: list[np.ndarray] = []  # kept, as copies into it are under way

    def hold(self) -> Callable[[], None]:
        self._hold(1)
        return lambda: self._hold(-1)

    def _hold(self, more: int) -> None:
        with self.changed:
            self.held += more
            self.changed.notify_all()

    def ask(
        self,
        keys: Any,
        dtype: Any = np.float32,
        bags: Pooling | None = None,
        host: HostTable | None = None,
        fetch: Any = None,
        overlays: Keys = NO_OVERLAYS,
        padding: int | None = None,
        filters: int = 0,
    ) -> tuple[np.ndarray, bool]:
        """Where the answer is once the stream is through, as a copy of it is in the stream; and whether it was put off."""
        scene, device = self.scene, self.scene.device
        out = device.empty((len(keys) if bags is None else len(bags.offsets), scene.spec.dim), dtype)
        read = device.pinned(out.shape[0] * out.shape[1] * np.dtype(dtype).itemsize)

        def after(keys: Keys, states: States) -> int:
            self.told.append((keys.tolist(), states.tolist()))
            return int((states == Tier.HOST).sum())

        pending_lookup = PendingLookup(self.hold, after)
        state = np.zeros(len(keys), np.uint8)
        with device.in_stream(getattr(self.stream, "_stream", self.stream)):
            assert look_up_of(
                scene.table,
                keys,
                state,
                GpuArray.of(scene.device, out),
                fetch or scene.fetch,
                bags,
                host,
                overlays,
                padding,
                filters,
            ).finish(pending_lookup)
        self._read.append(read)
        self.stream.download(read, device.address_of(out))
        return read.view(dtype).reshape(out.shape), pending_lookup.begun

    def is_through(self) -> None:
        """Wait for the stream, and until everything is given back."""
        self.stream.synchronize()
        self.has_released()

    def has_released(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.held, 60)


def be_still(device: Any, still: bool = True) -> bool:
    """Have a stand-in do nothing by itself. False if it is a GPU."""
    found = device if isinstance(device, ShimDevice) else getattr(device.cupy, "device", None)
    if isinstance(found, ShimDevice):
        found.still = still
    return isinstance(found, ShimDevice)


@either
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_an_answer_is_complete_in_the_order_of_the_callers_stream(kind: str, pooled: bool, there: bool) -> None:
    """With keys of every kind, and rows from every tier; what the caller gave may change at once."""
    scene = Scene(33, StorageDtype.FLOAT32, kind=kind)
    caller, rng = Caller(scene), np.random.default_rng(33)
    host = scene.host_tier(KEPT[:1000], 1 << 20)
    scene.table.read_below(host)
    is_still = be_still(scene.device)
    keys = mixed(901, 33)
    keys[::5] = KEPT[:181]
    deltas, expected = Deltas(scene.spec), scene.rows(keys, np.float32)
    changed = np.logical_or(*deltas.over(keys, expected, scene.default))
    counted = keys != PADDING_KEY
    expected[~counted] = 0
    bags = None
    if pooled:
        offsets, weights = np.arange(0, len(keys), 7), rng.normal(size=len(keys)).astype(np.float32)
        bags = Pooling(offsets.copy(), weights.copy(), Combiner.MEAN)
        expected = pool_bags(expected, offsets, weights, counted, Combiner.MEAN)
    asked = keys.copy()
    if there:
        array = to_device(scene.memory, asked)
        given_keys: Any = GpuArray.of(scene.device, array)
    else:
        given_keys = asked
    answer, put_off = caller.ask(
        given_keys, bags=bags, host=host, fetch=deltas.fetch(scene), overlays=deltas.addresses, padding=PADDING_KEY, filters=deltas.filters,
    )  # fmt: skip
    assert put_off
    assert caller.held == 1 or not is_still
    if not there:
        asked[:] = -1
    if bags is not None:
        bags.offsets[:] = 0
        assert bags.weights is not None
        bags.weights[:] = np.nan
    caller.is_through()
    np.testing.assert_array_equal(answer, expected)
    ((told, states),) = caller.told
    assert told == keys.tolist()
    looked, tiers, asked_for = counted & ~changed, np.array(states), np.concatenate([*scene.asked, keys[:0]])
    assert (tiers[counted & changed] != Tier.DEVICE).all()
    assert np.isin(keys[counted & changed], asked_for).all() or not there
    # the filters of deltas have few other keys, which are asked for
    resident = looked & (keys < len(RESIDENT))
    passed = resident & np.isin(keys, asked_for)
    assert (tiers[resident & ~passed] == Tier.DEVICE).all()
    assert passed.sum() < (len(keys) // 20 if there else 1)
    assert (tiers[looked & (keys >= BELOW[0]) & (keys <= BELOW[-1])] == Tier.HOST).all()
    assert (tiers[~counted] == PADDING).all()
    be_still(scene.device, False)
    host.close()


@either
@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("offsets", [[0, 30, 10, 60], [2, 30, 40], [0, 20, 101], [0, -1], [0, 1 << 62, 50], [-5]])
def test_offsets_on_the_device_that_do_not_fit_are_an_error_and_their_bags_are_nan(
    kind: str, in_stream: bool, offsets: list[int]
) -> None:
    scene = Scene(8, StorageDtype.FLOAT32, kind=kind)
    keys, starts = np.tile(BELOW[:50], 2), np.array(offsets)
    bounds = np.append(starts, len(keys))
    fit = (bounds[:-1] >= 0) & (bounds[:-1] <= bounds[1:]) & (bounds[1:] <= len(keys))
    fit[0] &= starts[0] == 0
    arrays = [to_device(scene.memory, array) for array in (keys, starts)]
    there, starts_there = (GpuArray.of(scene.device, array) for array in arrays)
    bags, caller, match = Pooling(starts_there, None, Combiner.SUM), Caller(scene), "offsets on the GPU: the first is 0"
    if in_stream:
        answer, put_off = caller.ask(there, bags=bags)
        assert put_off
        caller.is_through()
        assert np.isnan(answer[~fit]).all()
        with pytest.raises(InvalidInput, match=match):
            caller.ask(RESIDENT)
    else:
        out = scene.device.empty((len(starts), 8), np.float32)
        with pytest.raises(InvalidInput, match=match):
            look_up_of(
                scene.table, there, np.zeros(len(keys), np.uint8), GpuArray.of(scene.device, out), scene.fetch, bags
            ).finish()
    assert scene.asked == []
    assert scene.memory.held == 0
    answer, _ = caller.ask(RESIDENT)
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(RESIDENT, np.float32))
    assert scene.table.problem is None


@either
@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("n", [901, 20_000])
def test_bags_whose_keys_offsets_and_weights_are_on_the_device_are_as_those_from_the_cpu(
    kind: str, waited: bool, n: int
) -> None:
    """Read in place, or copied to the CPU where they do not fit a workspace."""
    scene, rng = Scene(16, StorageDtype.INT8, kind=kind), np.random.default_rng(n)
    caller, keys = Caller(scene), mixed(n, 4)
    offsets = np.sort(np.append([0, 0, n, n], rng.integers(0, n, n // 8)))
    weights = rng.normal(size=n).astype(np.float32)
    of = [to_device(scene.memory, array) for array in (keys, offsets, weights)]
    there, starts, factors = (GpuArray.of(scene.device, array) for array in of)
    for weighted, padding in (False, None), (True, PADDING_KEY):
        counted = keys != (-1 if padding is None else padding)
        rows = scene.rows(keys, np.float32)
        expected = pool_bags(rows, offsets, weights if weighted else None, counted, Combiner.MEAN)
        bags = Pooling(starts, factors if weighted else None, Combiner.MEAN)
        if waited:
            out, state = scene.device.empty(expected.shape, np.float32), np.zeros(n, np.uint8)
            assert look_up_of(
                scene.table, there, state, GpuArray.of(scene.device, out), scene.fetch, bags, padding=padding
            ).finish()
            answer = to_host(out)
            assert (state[counted & (keys < len(RESIDENT))] == Tier.DEVICE).all()
        else:
            answer, put_off = caller.ask(there, bags=bags, padding=padding)
            assert put_off == (n < 10_000)
            caller.is_through()
        np.testing.assert_array_equal(answer, expected)


@either
def test_an_answer_whose_keys_are_all_on_the_device_waits_for_nobody(kind: str) -> None:
    scene = Scene(8, StorageDtype.FLOAT32, kind=kind)
    caller, asked = Caller(scene), len(scene.asked)
    answers = [caller.ask(RESIDENT[begin::3]) for begin in range(3)]
    caller.stream.synchronize()
    for begin, (answer, put_off) in enumerate(answers):
        assert put_off
        np.testing.assert_array_equal(answer, scene.rows(RESIDENT[begin::3], np.float32))
    caller.is_through()
    assert len(scene.asked) == asked


@either
@pytest.mark.parametrize("in_line", [False, True])
def test_look_ups_of_several_streams_that_wait_for_each_other_come_to_an_end(kind: str, in_line: bool) -> None:
    """More than there are workspaces, with missing keys in each; also if the device has one queue for all streams."""
    scene = Scene(8, StorageDtype.FLOAT32, kind=kind)
    if isinstance(scene.device, ShimDevice):
        scene.device.in_line = in_line
    callers = [Caller(scene) for _ in range(3)]
    answers = []
    for turn in range(30):
        keys = np.random.default_rng(turn).integers(0, LAST, 100)
        caller, before = callers[turn % 3], callers[(turn - 1) % 3]
        with scene.device.in_stream(getattr(before.stream, "_stream", before.stream)):
            caller.stream.wait_for_caller()
        answers.append((keys, caller.ask(keys)))
    for caller in callers:
        caller.is_through()
    assert scene.memory.held == 0
    for keys, (answer, put_off) in answers:
        assert put_off
        np.testing.assert_array_equal(answer, scene.rows(keys, np.float32))


@either
@pytest.mark.parametrize("pooled", [False, True])
def test_rows_that_cannot_be_read_are_nan_and_the_next_look_up_in_that_stream_says_why(kind: str, pooled: bool) -> None:
    scene = Scene(8, StorageDtype.FLOAT32, kind=kind)
    caller, other = Caller(scene), Caller(scene)

    def fail(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        raise StorageError("the disk failed")

    keys = np.concatenate([RESIDENT[:50], BELOW[:50]])
    bags = Pooling(np.arange(0, 100, 10), None, Combiner.SUM) if pooled else None
    answer, put_off = caller.ask(keys, bags=bags, fetch=fail)
    caller.is_through()
    assert put_off
    assert np.isnan(answer[len(answer) // 2 :]).all()
    assert not np.isnan(answer[: len(answer) // 2]).any()
    assert caller.told == []
    assert scene.memory.finisher is not None
    assert scene.memory.finisher.failed == 1
    other.ask(BELOW)
    with pytest.raises(StorageError, match=r"before this one in its stream could not read rows.* the disk failed"):
        caller.ask(RESIDENT if pooled else np.tile(RESIDENT, 1500))  # which does not fit a workspace
    answer, _ = caller.ask(BELOW)
    for each in caller, other:
        each.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))
    assert scene.table.problem is None
    assert scene.memory.held == 0


def test_what_a_look_up_holds_is_released_when_the_device_fails_before_its_end() -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    caller = Caller(scene)
    scene.device.still = True
    caller.ask(BELOW)
    scene.device.broken = True
    out = scene.device.empty((1, 8), np.float32)
    assert not look_up_of(
        scene.table, RESIDENT[:1], np.zeros(1, np.uint8), GpuArray.of(scene.device, out), scene.fetch
    ).finish()
    caller.has_released()
    scene.memory.close()


@pytest.mark.parametrize("refused", [(NOT_SUPPORTED, 0), (0, NOT_SUPPORTED)])
def test_a_look_up_that_a_stream_does_not_take_whole_leaves_the_stream_free(refused: tuple[int, int]) -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    caller = Caller(scene)
    scene.device.functions.refused_in_streams = refused
    with pytest.raises(AssertionError):  # of `ask`: the device does not answer
        caller.ask(BELOW)
    assert scene.table.problem is not None
    caller.is_through()
    assert scene.memory.held == 0


def refuse(calls: np.ndarray, number: int) -> list[Any]:
    """Have the driver refuse a call of CALLS, by its number from now on. Returns what must be kept meanwhile."""
    asked = itertools.count(1)

    def refusing(kind: Any, at: int) -> Any:
        do = kind(at)
        return kind(lambda *args: 1 if next(asked) == number else do(*args))

    kept = []
    for which, kind in CALLS.items():
        kept.append(refusing(kind, int(calls[which])))
        calls[which] = ctypes.cast(kept[-1], ctypes.c_void_p).value
    return kept


@pytest.mark.parametrize("pooled", [False, True])
def test_a_look_up_of_which_the_driver_refuses_any_call_leaves_the_stream_free(pooled: bool) -> None:
    """Rows of it are missing, which the thread may have begun to read."""
    refused, put_off = 0, False
    while not put_off:
        refused += 1
        scene = Scene(8, StorageDtype.FLOAT32)
        caller, there = Caller(scene), GpuArray.of(scene.device, to_device(scene.memory, BELOW))
        bags = Pooling(np.arange(0, len(BELOW), 10), None, Combiner.SUM) if pooled else None
        kept = refuse(scene.memory.driver.calls, refused)
        try:
            _, put_off = caller.ask(there, bags=bags)
        except AssertionError:  # of `ask`: the device does not answer
            assert scene.table.problem is not None
        caller.is_through()
        assert scene.memory.held == 0
        del kept
    assert refused > 11


def test_a_workspace_is_given_back_once_if_a_look_up_is_ended_before_its_call_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    caller, finisher, look_up = Caller(scene), scene.memory.finisher, round_trip.look_up
    assert finisher is not None

    def ended_meanwhile(*args: Any) -> int:
        said = look_up(*args)
        caller.stream.synchronize()
        finisher.end_some()
        caller.has_released()
        return said

    monkeypatch.setattr(round_trip, "look_up", ended_meanwhile)
    answer, put_off = caller.ask(BELOW)
    assert put_off
    assert scene.memory.held == 0
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_rows_come_although_another_thread_waits_for_the_stream_inside_the_driver_between_two_calls(
    pooled: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing memory may be such a wait. It lets no other thread into the driver."""
    scene = Scene(8, StorageDtype.FLOAT32)
    caller, keys = Caller(scene), np.concatenate([RESIDENT[:30], BELOW[:50]])
    given = GpuArray.of(scene.device, to_device(scene.memory, keys)) if there else keys
    offsets = np.arange(0, len(keys), 10)
    bags = Pooling(offsets, None, Combiner.SUM) if pooled else None
    add = caller.stream._add

    def waited_for(*work: Any) -> None:
        add(*work)
        caller.stream.synchronize()

    with monkeypatch.context() as patched:
        patched.setattr(caller.stream, "_add", waited_for)
        answer, put_off = caller.ask(given, bags=bags)
    assert put_off
    caller.is_through()
    assert scene.memory.held == 0
    expected = scene.rows(keys, np.float32)
    if pooled:
        expected = pool_bags(expected, offsets, None, np.ones(len(keys), np.bool_), Combiner.SUM)
    np.testing.assert_array_equal(answer, expected)


def test_a_look_up_that_is_interrupted_leaves_the_stream_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    caller, look_up = Caller(scene), round_trip.look_up

    def interrupted(*args: Any) -> int:
        """Ctrl-C is noticed when the compiled call returns."""
        look_up(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(round_trip, "look_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            caller.ask(BELOW)
    caller.is_through()
    assert scene.memory.held == 0
    answer, _ = caller.ask(BELOW)
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))


@pytest.mark.parametrize("closed", [False, True])
def test_a_table_that_is_not_in_use_answers_nothing_and_waits_for_nobody(closed: bool) -> None:
    scene, other, go_on = Scene(8, StorageDtype.FLOAT32), Scene(8, StorageDtype.FLOAT32), threading.Event()
    other.memory, caller = scene.memory, Caller(scene)
    other.table = ReadTable(other.spec, 1 << 20, scene.memory, default_vector=other.default)
    other.device = scene.device

    def slow(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        assert go_on.wait(60)
        return scene.fetch(keys, dtype)

    answer, _ = caller.ask(BELOW, fetch=slow)
    if closed:
        other.table.close()
    else:
        other.table.give_up(DeviceError("of old age"))
    with pytest.raises(AssertionError):  # of `ask`: the device does not answer
        Caller(other).ask(RESIDENT)
    assert scene.memory.held == 1
    go_on.set()
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))
    assert scene.memory.held == 0


def test_keys_on_the_device_are_let_go_by_a_caller_while_the_thread_reads_rows_of_another_look_up() -> None:
    scene, reads, go_on, gone = Scene(8, StorageDtype.FLOAT32), threading.Event(), threading.Event(), []
    caller, other = Caller(scene), Caller(scene)

    def slow(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        reads.set()
        assert go_on.wait(60)
        return scene.fetch(keys, dtype)

    keys = GpuArray.of(scene.device, to_device(scene.memory, RESIDENT))
    weakref.finalize(keys.array, lambda: gone.append(threading.current_thread()))
    scene.device.still = True
    caller.ask(BELOW, fetch=slow)
    other.ask(keys)
    del keys
    scene.device.still = False
    assert reads.wait(60)
    other.stream.synchronize()
    finisher = scene.memory.finisher
    assert finisher is not None
    finisher.end_some()
    other.has_released()
    go_on.set()
    caller.is_through()
    assert gone == [threading.current_thread()]


def test_a_look_up_that_is_interrupted_while_the_device_cannot_be_waited_for_is_ended_in_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where another thread captures a CUDA graph."""
    scene = Scene(8, StorageDtype.FLOAT32)
    caller, look_up = Caller(scene), round_trip.look_up

    def interrupted(*args: Any) -> int:
        look_up(*args)
        raise KeyboardInterrupt

    def refused() -> None:
        raise Captured("a graph")

    scene.device.still = True
    with monkeypatch.context() as patched:
        patched.setattr(round_trip, "look_up", interrupted)
        patched.setattr(scene.device, "synchronize", refused)
        with pytest.raises(KeyboardInterrupt):
            caller.ask(BELOW)
    scene.device.still = False
    caller.is_through()
    assert scene.memory.held == 0
    answer, _ = caller.ask(BELOW)
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))


def test_a_look_up_gives_everything_back_wherever_it_is_interrupted() -> None:
    """Python looks for Ctrl-C where a function begins. Not in `with`, whose entry nobody can make sure of."""
    scene, turn, names = Scene(8, StorageDtype.FLOAT32), 0, []
    caller = Caller(scene)
    caller.ask(RESIDENT)
    caller.is_through()

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if "tiers/device" in code.co_filename and "cuda_shim" not in code.co_filename:
            if code.co_name == "_put_off" or names:
                names.append(code.co_name)
            if len(names) == turn and code.co_name not in ("__enter__", "_wait_until_free"):
                sys.settrace(None)
                raise KeyboardInterrupt
        return None

    while True:
        turn, names = turn + 1, []
        sys.settrace(interrupt)
        try:
            caller.ask(RESIDENT)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(None)
            caller.is_through()
            assert scene.memory.held == 0, names
        if len(names) < turn:
            break
    assert {"leave", "__exit__", "add", "set_job"} <= set(names)


def test_where_streams_cannot_wait_or_there_is_too_much_for_a_workspace_the_caller_waits() -> None:
    scene = Scene(8, StorageDtype.FLOAT32, 1 << 20)
    caller, many = Caller(scene), np.tile(BELOW, 10)
    assert not caller.ask(many)[1]
    scene.memory.finisher = None
    answer, put_off = caller.ask(BELOW)
    assert not put_off
    caller.is_through()
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))
    device = ShimDevice()
    device.functions.refused_in_streams = NOT_SUPPORTED, 0
    assert DeviceMemory(device, 1 << 20).finisher is None


def test_a_look_up_that_is_abandoned_or_cannot_read_rows_does_not_wait_for_streams_of_others() -> None:
    scene, go_on = Scene(8, StorageDtype.FLOAT32), threading.Event()
    caller = Caller(scene)

    def slow(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        assert go_on.wait(60)
        return scene.fetch(keys, dtype)

    def fail(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        raise StorageError("the disk failed")

    caller.ask(BELOW, fetch=slow)
    out, state = scene.device.empty((len(RESIDENT), 8), np.float32), np.zeros(len(RESIDENT), np.uint8)
    look_up = look_up_of(scene.table, RESIDENT, state, GpuArray.of(scene.device, out), scene.fetch)
    assert look_up.begin()
    look_up.abandon()
    assert scene.memory.held == 1
    with pytest.raises(StorageError, match="the disk failed"):
        look_up_of(scene.table, RESIDENT + BELOW[0], state, GpuArray.of(scene.device, out), fail).finish()
    assert scene.memory.held == 1
    go_on.set()
    caller.is_through()
    assert scene.memory.held == 0


class Slow:
    """An `UnderWay` whose rows take so long that others get on meanwhile."""

    def __init__(self, number: int, report: np.ndarray, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.number, self.report, self._meanwhile = number, report.ctypes.data, meanwhile
        self.kept: Any = None
        self.answered: list[int] = []
        self.ended = threading.Event()

    def answer_missing(self, listed: int, failed: Any) -> None:
        self._meanwhile()
        self.answered.append(listed)
        reports.say(self.report, reports.WHOLE | listed << 32)
        reports.say(self.report + reports.OVER, 1)

    def end(self) -> None:
        self.ended.set()

    def forsake(self) -> bool:
        return False


def test_a_later_look_up_in_the_same_place_is_not_taken_for_the_one_before() -> None:
    finisher, words = Finisher(ShimDevice().driver().calls, 2), np.zeros((2, 2), np.int64)
    later = Slow(1, words[1])

    def meanwhile() -> None:
        """The second look-up ends without missing a row, and another one, which misses three, takes its place."""
        words[1] = reports.WHOLE, 1
        finisher.prepare(7)
        assert second.ended.is_set()
        words[1] = reports.DONE | 3 << 32, 0
        finisher.add(later)

    first, second = Slow(0, words[0], meanwhile), Slow(1, words[1])
    finisher.prepare(7)
    finisher.add(first)
    finisher.add(second)
    reports.say(first.report, reports.DONE | 5 << 32)
    assert later.ended.wait(60)
    assert first.ended.wait(60)
    assert (first.answered, second.answered, later.answered) == ([5], [], [3])
    finisher.close()


def test_a_later_look_up_is_not_ended_in_the_place_of_one_that_another_thread_has_ended() -> None:
    finisher, words = Finisher(ShimDevice().driver().calls, 2), np.zeros((2, 2), np.int64)
    later: list[Slow] = []

    class Ending(Slow):
        def end(self) -> None:
            """Another caller ends the other look-up meanwhile, and a further one takes its place."""
            super().end()
            if not (other := pair[1 - self.number]).ended.is_set():
                finisher.end_some()
                assert other.ended.is_set()
                words[other.number] = 0
                later.append(Slow(other.number, words[other.number]))
                finisher.add(later[0])

    pair = [Ending(number, words[number]) for number in range(2)]
    for one in pair:
        finisher.add(one)
        words[one.number] = reports.WHOLE, 1
    finisher.end_some()
    assert all(one.ended.is_set() for one in pair)
    assert not later[0].ended.is_set()
    words[later[0].number] = reports.WHOLE, 1
    finisher.end_some()
    assert later[0].ended.is_set()


def test_memory_on_the_device_is_let_go_by_callers_as_that_may_wait_for_a_stream() -> None:
    class Memory:
        pass

    finisher, words = Finisher(ShimDevice().driver().calls, 1), np.zeros((1, 2), np.int64)
    one, gone = Slow(0, words[0]), []
    one.kept = Memory()
    weakref.finalize(one.kept, lambda: gone.append(threading.current_thread()))
    finisher.prepare(7)
    finisher.add(one)
    words[0] = reports.WHOLE, 1
    assert one.ended.wait(60)
    del one
    finisher.close()
    assert gone == [threading.current_thread()]


@pytest.mark.parametrize("waited", [False, True])
def test_a_stream_of_another_device_is_an_error_of_its_caller_alone(waited: bool) -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    caller, mine = Caller(scene), scene.device.stream()
    caller.stream = ShimDevice(number=1).stream()
    finisher = scene.memory.finisher
    if waited:
        scene.memory.finisher = None
    with pytest.raises(InvalidInput, match="stream: expected one of GPU 0; this is one of another GPU"):
        caller.ask(BELOW)
    caller.has_released()
    scene.memory.finisher = finisher
    assert scene.memory.held == 0
    assert scene.table.problem is None
    caller.stream = mine
    answer, put_off = caller.ask(BELOW)
    caller.is_through()
    assert put_off
    np.testing.assert_array_equal(answer, scene.rows(BELOW, np.float32))


def test_a_store_that_puts_nothing_off_has_no_thread_for_it() -> None:
    def threads() -> int:
        return sum(thread.name == "tierstore-device-answers" for thread in threading.enumerate())

    before, scene = threads(), Scene(8, StorageDtype.FLOAT32)
    scene.look_up(BELOW, np.float32, np.zeros(len(BELOW), np.uint8))
    assert threads() == before
    caller = Caller(scene)
    caller.ask(BELOW)
    assert threads() == before + 1
    caller.is_through()
    scene.table.close()
    scene.memory.close()
    assert threads() == before


def test_a_stream_whose_work_has_ended_without_the_word_that_is_waited_for_is_an_error() -> None:
    device = ShimDevice()
    stream, word = device.stream(), device.pinned(64).view(np.uint32)
    word[:] = 0
    with pytest.raises(DeviceError, match="device 0: a kernel has ended and did not say so"):
        stream.wait_for_word(word.ctypes.data, np.zeros(2, np.int64))
    word[0] = 1
    device.functions.refused = 719  # whatever is said of the stream: the kernel is done
    stream.wait_for_word(word.ctypes.data, np.zeros(2, np.int64))


@pytest.mark.parametrize(("status", "kind"), [(2, OutOfDeviceMemory), (901, Captured), (719, DeviceError)])
def test_what_the_driver_refuses_is_told_by_its_number(status: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="device 0: ") as caught:
        ShimDevice().driver().check(status)
    assert type(caught.value) is kind


def test_a_device_that_fails_is_passed_over() -> None:
    scene = Scene(8, StorageDtype.FLOAT32)
    scene.device.broken = True
    out = scene.device.empty((len(RESIDENT), 8), np.float32)
    assert not look_up_of(
        scene.table, RESIDENT, np.zeros(len(RESIDENT), np.uint8), GpuArray.of(scene.device, out), scene.fetch
    ).finish()
    assert "fell off the bus" in str(scene.table.stats()["problem"])
    scene.device.broken = False
    cpu, state = np.empty((len(RESIDENT), 8), np.float32), np.zeros(len(RESIDENT), np.uint8)
    scene.table.lookup(RESIDENT, cpu, state)
    assert (state == Tier.PENDING).all()


def test_an_array_goes_up_in_pieces() -> None:
    memory = DeviceMemory(ShimDevice(), 1 << 16)
    array = np.random.default_rng(3).normal(size=(1000, 7)).astype(np.float32)
    np.testing.assert_array_equal(to_device(memory, array), array)


@either
def test_an_array_goes_up_after_the_work_that_is_in_the_callers_stream(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That work may still use memory that the program has let go, and that the array is given."""
    device = open_device(kind)
    memory = DeviceMemory(device, 1 << 18)
    stream, old = device.stream(), device.pinned(8000)
    old[:] = 7
    again = device.empty((1000,), np.int64)
    stream.upload(device.address_of(again), old)
    array = np.arange(1000)
    monkeypatch.setattr(device, "empty", lambda shape, dtype: again)
    with device.in_stream(getattr(stream, "_stream", stream)):
        to_device(memory, array)
    stream.synchronize()
    np.testing.assert_array_equal(to_host(again), array)


@either
def test_an_array_comes_down_in_pieces_after_the_work_that_is_in_the_callers_stream(kind: str) -> None:
    device = open_device(kind)
    memory = DeviceMemory(device, 1 << 18)
    stream, made = device.stream(), device.pinned(80_000).view(np.int64)
    made[:] = np.random.default_rng(3).integers(-(1 << 63), (1 << 63) - 1, 10_000)
    array = device.empty((100, 100), np.int64)
    stream.upload(device.address_of(array), made.view(np.uint8))
    theirs = OnGpu(array) if isinstance(array, np.ndarray) else array
    with device.in_stream(getattr(stream, "_stream", stream)):
        np.testing.assert_array_equal(from_device(memory, theirs), made.reshape(100, 100))


@either
def test_look_ups_beside_deltas_promotion_and_resizing_are_right(kind: str) -> None:
    soak = Soak(kind)
    soak.run(2.0)
    assert soak.faults == []
    assert 0 < soak.below < soak.keys
    assert 0 < soak.put_off < soak.keys
