"""Bags pooled by the host tier: what pooling the looked-up rows gives, to the last bit; and what is left to others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.cache_contract import no_deletes
from tests.tiers.host_rows import pool
from tierstore.kernels import codec
from tierstore.kernels.pool import pool_bags
from tierstore.lookup.table_rows import NOT_POOLED
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, KeyType, StorageDtype, TableSpec, Tier

RESIDENT, ABSENT, ALL = 300, 330, 400  # keys below are in the table; below, known to be absent; the others unknown


def filled(dim: int, dtype: StorageDtype, *, full: bool = True) -> HostTable:
    spec = TableSpec("t", KeyType.INT64, dim, dtype)
    table = HostTable(spec, 1 << 20, default_vector=np.linspace(-1, 1, dim, dtype=np.float32))
    keys = np.arange(ALL if full else RESIDENT, dtype=np.int64)
    rows = codec.encode(np.random.default_rng(dim).normal(size=(len(keys), dim)).astype(np.float32), dtype)
    table.warm(keys, rows)
    if not full:
        table.insert_absent(np.arange(RESIDENT, ABSENT, dtype=np.int64), 1)
    return table


@pytest.fixture(scope="module")
def tables() -> dict[tuple[int, StorageDtype], HostTable]:
    return {(dim, dtype): filled(dim, dtype, full=False) for dim in (1, 16, 19, 32) for dtype in StorageDtype}


@given(data=st.data())
@pytest.mark.parametrize("combiner", list(Combiner))
def test_a_bag_is_pooled_as_its_looked_up_rows_are_or_left(
    tables: dict[tuple[int, StorageDtype], HostTable], combiner: Combiner, data: st.DataObject
) -> None:
    table = tables[data.draw(st.sampled_from(sorted(tables, key=str)))]
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    n = data.draw(st.integers(0, 200))
    last = data.draw(st.sampled_from([RESIDENT, ABSENT, ALL]))
    keys = rng.integers(0, last, n)
    starts = np.array([0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=12)))], np.int64)
    weights = rng.choice(np.array([0, 1, -1, 0.3, 2.7], np.float32), n) if data.draw(st.booleans()) else None
    padding = data.draw(st.sampled_from([None, 7]))
    is_padding = np.zeros(n, np.bool_)
    if padding is not None:
        keys[rng.random(n) < 0.2] = padding
        is_padding = keys == padding

    rows, expected_state = np.zeros((n, table.spec.dim), np.float32), is_padding * np.uint8(Tier.ABSENT)
    table.lookup(keys, rows, expected_state)
    expected = pool_bags(rows, starts, weights, ~is_padding, combiner)
    pending = expected_state == Tier.PENDING
    bag_of = np.searchsorted(starts, np.arange(n), side="right") - 1

    for dtype in (np.float32, np.float16):
        out, state = np.full((len(starts), table.spec.dim), np.nan, dtype), np.zeros(n, np.uint8)
        hits = pool(table, keys, starts, weights, combiner, out, state, padding)
        np.testing.assert_array_equal(state, expected_state)
        assert hits == (state == Tier.HOST).sum()
        whole = np.setdiff1d(np.arange(len(starts)), bag_of[pending])
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(out[whole], expected[whole].astype(dtype))


def test_sizes_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    table = filled(16, StorageDtype.FLOAT32)
    keys, starts = np.arange(10), np.array([0, 5])

    def pooled(bags: int = 2, dim: int = 16, states: int = 10, weights: int = 10) -> int:
        out, state = np.zeros((bags, dim), np.float32), np.zeros(states, np.uint8)
        hits = pool(table, keys, starts, np.ones(weights, np.float32), Combiner.SUM, out, state)
        assert hits == 10 or not (out.any() or state.any())
        return hits

    assert pooled() == 10
    for wrong in ({"bags": 3}, {"dim": 15}, {"states": 9}, {"weights": 9}):
        assert pooled(**wrong) == NOT_POOLED
    table.close()
    assert pooled() == NOT_POOLED


def test_no_bag_holds_a_torn_row_while_rows_are_rewritten_and_the_table_changes_its_size() -> None:
    """All numbers of a row are equal, so all numbers of a sum are; long rows make a reader meet the writer."""
    dim = 2048
    spec = TableSpec("t", KeyType.INT64, dim, StorageDtype.FLOAT32)
    table = HostTable(spec, 4 * 33 * 8192, default_vector=np.zeros(dim, np.float32))
    keys = np.arange(table.capacity_rows, dtype=np.int64)
    generations = [np.full((len(keys), dim), value, np.float32).view(np.uint8) for value in (1, 2, 4)]
    table.insert(keys, generations[0], 0)
    starts = np.arange(0, 60, 4)
    faults: list[np.ndarray] = []
    pooled = 0

    def read() -> None:
        nonlocal pooled
        rng, out = np.random.default_rng(0), np.empty((15, dim), np.float32)
        for _ in range(1500):
            state = np.zeros(60, np.uint8)
            if pool(table, rng.choice(keys, 60), starts, None, Combiner.SUM, out, state) == NOT_POOLED:
                continue
            whole = out[(state != Tier.PENDING).reshape(15, 4).all(axis=1)]
            pooled += len(whole)
            if (whole != whole[:, :1]).any():
                faults.append(whole)
                return

    reader = threading.Thread(target=read)
    reader.start()
    step = 0
    while reader.is_alive():
        step += 1
        table.update(keys, generations[step % 3], no_deletes(keys))
        if step % 100 == 0:
            table.resize((1.0, 0.5)[step // 100 % 2])
            table.insert(keys, generations[step % 3], step)
    reader.join()
    assert not faults
    assert pooled > 100
    table.close()
