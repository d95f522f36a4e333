"""Several devices as one cache: the contract for replicas and for shards, and what each device holds then."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.tiers.cache_contract import DEFAULT, SPEC, CacheTierContract, ask, no_deletes, rows_of, vectors_of
from tests.tiers.cuda_shim.backend import ShimDevice
from tierstore.kernels.pool import pool_bags
from tierstore.tiers.device.cache import DeviceCache
from tierstore.tiers.device.lookup import Bags
from tierstore.tiers.device.workspaces import DeviceMemory
from tierstore.types import Combiner, Keys, States, TableSpec, Tier, Vectors


def memories(count: int) -> list[DeviceMemory]:
    return [DeviceMemory(ShimDevice(number=number), 64 << 20) for number in range(count)]


class TestShards(CacheTierContract):
    torn_batches = 100

    def open_cache(
        self, spec: TableSpec, budget_bytes: int, default: npt.NDArray[np.float32], fraction: float = 1.0
    ) -> DeviceCache:
        return DeviceCache(spec, budget_bytes, memories(2), kind="shard", default_vector=default, fraction=fraction)


def open_cache(kind: Any, count: int = 3) -> DeviceCache:
    return DeviceCache(SPEC, count << 20, memories(count), kind=kind, default_vector=DEFAULT)


KEYS = np.arange(1000, dtype=np.int64)


def test_a_shard_holds_its_own_keys_and_a_replica_all_of_them() -> None:
    for kind in ("shard", "replica"):
        cache = open_cache(kind)
        assert cache.warm(KEYS, rows_of(KEYS)) == cache.rows_resident == len(KEYS)
        held = [part.hot_keys(2000) for part in cache.parts]
        if kind == "shard":
            assert all(250 < len(keys) < 420 for keys in held)
            assert sorted(np.concatenate(held)) == KEYS.tolist()
        else:
            assert all(sorted(keys) == KEYS.tolist() for keys in held)
        cache.update(KEYS, rows_of(KEYS, 1), no_deletes(KEYS))
        for _ in range(4):  # whichever device's turn it is
            out, state = ask(cache, KEYS)
            assert (state == Tier.DEVICE).all()
            np.testing.assert_array_equal(out, vectors_of(KEYS, 1))
        assert cache.bytes_in_use <= cache.budget_bytes
        cache.close()
        assert cache.bytes_in_use == 0


@pytest.mark.parametrize("kind", ["shard", "replica"])
@pytest.mark.parametrize("number", [None, 0, 2])
def test_an_answer_lies_on_the_device_that_was_asked_for(kind: Any, number: int | None) -> None:
    cache = open_cache(kind)
    cache.warm(KEYS[:600], rows_of(KEYS[:600]))
    asked: list[Keys] = []

    def fetch(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        asked.append(keys)
        return vectors_of(keys).astype(dtype), np.full(len(keys), Tier.HOST, np.uint8)

    state = np.zeros(len(KEYS), np.uint8)
    none = np.empty((0, SPEC.dim), np.float32)
    out = cache.answer(KEYS, state, none, np.float32, fetch, number=number)
    np.testing.assert_array_equal(out, vectors_of(KEYS))
    assert (state[:600] == Tier.DEVICE).all()
    assert (state[600:] == Tier.HOST).all()
    assert sorted(np.concatenate(asked)) == KEYS[600:].tolist()
    ran = [part.device.backend.launched.get("scatter", 0) for part in cache.parts]  # type: ignore[attr-defined]
    assert sum(ran) == 1
    assert number is None or ran[number] == 1
    bags = Bags(np.arange(0, 1000, 10), None, Combiner.SUM)
    pooled = cache.answer(KEYS, np.zeros(len(KEYS), np.uint8), none, np.float32, fetch, bags, number)
    np.testing.assert_array_equal(pooled, pool_bags(vectors_of(KEYS), bags.offsets, None, None, Combiner.SUM))
    assert cache.answer(KEYS, np.zeros(len(KEYS), np.uint8), none, np.float32, fetch, number=7) is None
    cache.close()


def test_who_is_put_out_of_a_shard_is_handed_over_but_not_of_a_replica() -> None:
    for kind in ("shard", "replica"):
        cache = open_cache(kind, 2)
        first = np.arange(2 * cache.capacity_rows, dtype=np.int64)
        cache.insert(first, rows_of(first), 1)
        second = first[:2000] + 1_000_000
        admitted, keys, rows = cache.exchange(second, rows_of(second), 1)
        assert admitted > 1900
        assert (len(keys) > 1500) is (kind == "shard")
        np.testing.assert_array_equal(rows, rows_of(keys))
        cache.close()
