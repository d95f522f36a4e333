"""Bags pooled by the host tier: what pooling the looked-up rows gives, to the last bit; and what is left to others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.cache_contract import no_deletes
from tierstore.kernels import codec
from tierstore.kernels.pool import pool_bags
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
    padding = rng.random(n) < data.draw(st.sampled_from([0, 0.2]))

    rows, expected_state = np.zeros((n, table.spec.dim), np.float32), padding * np.uint8(Tier.REMOTE)
    table.lookup(keys, rows, expected_state)
    expected = pool_bags(rows, starts, weights, ~padding, combiner)
    pending = expected_state == Tier.PENDING
    bag_of = np.searchsorted(starts, np.arange(n), side="right") - 1

    out, left = np.full((len(starts), table.spec.dim), np.nan, np.float32), np.zeros(len(starts), np.uint8)
    state = padding * np.uint8(Tier.REMOTE)
    hits = table.pool(keys, starts, weights, combiner, out, state, left)
    np.testing.assert_array_equal(state, expected_state)
    assert hits == (state == Tier.HOST).sum()
    assert set(np.flatnonzero(left)) == set(bag_of[pending])
    np.testing.assert_array_equal(out[left == 0], expected[left == 0])


def test_sizes_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    table = filled(16, StorageDtype.FLOAT32)
    keys, starts = np.arange(10), np.array([0, 5])

    def pooled(bags: int = 2, dim: int = 16, states: int = 10, weights: int = 10, lefts: int = 2) -> int:
        out, state, left = np.zeros((bags, dim), np.float32), np.zeros(states, np.uint8), np.zeros(lefts, np.uint8)
        hits = table.pool(keys, starts, np.ones(weights, np.float32), Combiner.SUM, out, state, left)
        assert hits == 10 or not (out.any() or state.any() or left.any())
        return hits

    assert pooled() == 10
    for wrong in ({"bags": 3}, {"dim": 15}, {"states": 9}, {"weights": 9}, {"lefts": 1}):
        assert pooled(**wrong) == -1
    table.close()
    assert pooled() == -1


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
            state, left = np.zeros(60, np.uint8), np.zeros(15, np.uint8)
            if table.pool(rng.choice(keys, 60), starts, None, Combiner.SUM, out, state, left) < 0:
                continue
            whole = out[left == 0]
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
