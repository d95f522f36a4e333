"""What is read from a row store that gives defaults for what it cannot read."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.engine.data.cascade import Cascade, LookupCounts
from tierstore.engine.data.table_view import TableView
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier

SPEC = TableSpec("item", KeyType.INT64, 2, StorageDtype.FLOAT32, "zeros")


class Failing:
    """Has the even keys and not the odd ones; those from 10 on cannot be read, and defaults are wanted for them."""

    def get_at(self, table_id, keys, rows, state, seq):
        rows[:] = np.repeat(keys[:, None], 2, axis=1).astype(np.float32).view(np.uint8)
        state[:] = np.where(keys >= 10, Tier.PENDING, np.where(keys % 2, Tier.ABSENT, Tier.REMOTE))


@pytest.mark.parametrize("way", ["looked up", "as stored"])
def test_a_key_that_could_not_be_read_is_not_remembered_as_absent(way):
    default = np.full(2, -1, np.float32)
    table = Cascade(SPEC, 1, default, Failing(), LookupCounts())
    table.host = HostTable(SPEC, 1 << 20, default_vector=default)
    under, keys = TableView(table, (), 1), np.array([2, 3, 10, 11])
    state = np.zeros(4, np.uint8)
    if way == "looked up":
        out = np.empty((4, 2), np.float32)
        under.lookup(keys, out, state)
        assert out[:, 0].tolist() == [2, -1, -1, -1]
    else:
        rows, state = under.stored(keys)
        under.finish_stored(keys, rows, state)
    assert state.tolist() == [Tier.REMOTE, Tier.ABSENT, Tier.ABSENT, Tier.ABSENT]
    peeks = [table.host.peek(int(key)) for key in keys]
    assert [(peek.row is not None, peek.absent) for peek in peeks] == [
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]


def test_keys_are_counted_by_the_tiers_that_answered_them() -> None:
    counts, rng = LookupCounts(), np.random.default_rng(1)
    expected = np.zeros(256, np.int64)
    for n in (0, 1, 5000):
        state = rng.integers(0, 256, n).astype(np.uint8)  # what is no tier counts for none
        assert counts.add_states(state, 0) == (state == Tier.HOST).sum()
        expected += np.bincount(state, minlength=256)
    counts.add_host(3)
    counts.add_states(np.full(9, Tier.ABSENT, np.uint8), 4)
    expected[Tier.HOST] += 3
    expected[Tier.ABSENT] += 5
    assert counts.as_dict() == {tier.label: expected[tier] for tier in Tier if tier is not Tier.PENDING}
