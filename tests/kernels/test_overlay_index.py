"""The index of a delta's keys answers like a dict, for every key value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import codec, overlay_index
from tierstore.kernels.codec import AS_STORED, address_of
from tierstore.lookup import table_rows
from tierstore.lookup.plans import TABLE
from tierstore.types import StorageDtype, Tier

INT64 = np.iinfo(np.int64)
# few distinct values, so that keys meet again, the extremes among them
keys_of_a_delta = st.lists(
    st.sampled_from([INT64.min, INT64.min + 1, INT64.max, 0, -1, 1, 256, 1 << 32, -(1 << 40)]) | st.integers(-40, 40),
    max_size=120,
)
any_keys = st.lists(st.integers(INT64.min, INT64.max), max_size=80)


def codes(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.int64)


@given(keys_of_a_delta | any_keys)
def test_dedup_keeps_the_last_of_each_key_in_order_of_keys(keys: list[int]) -> None:
    last = {key: i for i, key in enumerate(keys)}
    assert overlay_index.dedup_last(codes(keys)).tolist() == [last[key] for key in sorted(last)]


@pytest.mark.parametrize("spread", [1 << 8, 1 << 20, 1 << 62])
def test_dedup_of_many_keys(spread: int) -> None:
    keys = np.random.default_rng(spread).integers(-spread, spread, 30_000)
    positions = overlay_index.dedup_last(keys)
    distinct, first_reversed = np.unique(keys[::-1], return_index=True)
    assert np.array_equal(keys[positions], distinct)
    assert np.array_equal(positions, len(keys) - 1 - first_reversed)


class Overlaid:
    """A table of which one overlay is all there is."""

    def __init__(self, rows: overlay_index.Answering, dtype: StorageDtype, dim: int, default: float = 0.0) -> None:
        self._defaults = [np.full(dim, default, kind) for kind in (np.float32, np.float16)]
        self._kept = rows, np.array([address_of(rows.words)])
        self._words = TABLE.make(
            overlays=1, overlays_at=address_of(self._kept[1]), default_at=address_of(self._defaults[0]),
            half_default_at=address_of(self._defaults[1]), dim=dim, code=dtype.code, row_bytes=dtype.row_bytes(dim),
        )  # fmt: skip

    def answer(self, keys: np.ndarray, out: np.ndarray, state: np.ndarray) -> int:
        """How many keys are answered; -1 where arrays do not pair up."""
        before, code = state.copy(), AS_STORED if out.dtype == np.uint8 else int(out.dtype == np.float16)
        keys = np.ascontiguousarray(keys)
        hits = table_rows.lookup(address_of(self._words), keys, state, code, False, 0, out.view(np.uint8))
        assert hits in (0, -1)
        return hits or int((state != before).sum())


def held(keys: np.ndarray, deleted: np.ndarray | None = None, default: float = 0.0) -> Overlaid:
    """Under each key its row number, twice."""
    rows = np.repeat(np.arange(len(keys), dtype=np.float32), 2).reshape(len(keys), 2).view(np.uint8)
    gone = np.zeros(len(keys), bool) if deleted is None else deleted
    rows = overlay_index.Answering(overlay_index.build(keys), keys, rows, gone, StorageDtype.FLOAT32, 2)
    return Overlaid(rows, StorageDtype.FLOAT32, 2, default)


@given(keys_of_a_delta | any_keys, keys_of_a_delta | any_keys, st.randoms(use_true_random=False))
def test_answers_are_those_of_a_dict(kept: list[int], asked: list[int], random: np.random.Generator) -> None:
    table = list(dict.fromkeys(kept))
    deleted = np.array([random.choice([True, False, False]) for _ in table], bool)
    rows = {key: row for row, key in enumerate(table)}
    asked = asked + kept[:20]
    before = [random.choice([Tier.PENDING, Tier.PENDING, Tier.DISK, Tier.ABSENT]) for _ in asked]
    for dtype in (np.float32, np.float16):
        state, out = np.array(before, np.uint8), np.full((len(asked), 2), -77, dtype)
        answered = held(codes(table), deleted, 0.5).answer(codes(asked), out, state)
        expected: list[tuple[int, float]] = []
        for key, was in zip(asked, before, strict=True):
            row = rows.get(key) if was == Tier.PENDING else None
            expected.append((was, -77) if row is None else (Tier.ABSENT, 0.5) if deleted[row] else (Tier.OVERLAY, row))
        assert [*zip(state.tolist(), out[:, 0].tolist(), strict=True)] == expected
        assert (out[:, 0] == out[:, 1]).all()
        assert answered == sum(now != was for (now, _), was in zip(expected, before, strict=True))


@pytest.mark.parametrize("step", [1, 2, 1 << 20, 1 << 33, 0x9E3779B97F4A7C15 - (1 << 64)])
def test_regular_keys_are_all_found_and_their_neighbours_are_not(step: int) -> None:
    with np.errstate(over="ignore"):
        keys = np.arange(-5000, 5000, dtype=np.int64) * np.int64(step)
        neighbours = keys + np.int64(step // 2 or 1 << 40)
    absent = ~np.isin(neighbours, keys)
    assert absent.any()
    assert len(overlay_index.build(keys)) >= 2 * len(keys)
    table = held(keys)
    out, state = np.empty((len(keys), 2), np.float32), np.zeros(len(keys), np.uint8)
    assert table.answer(keys, out, state) == len(keys)
    assert np.array_equal(out[:, 1], np.arange(len(keys)))
    state[:] = 0
    table.answer(neighbours, out, state)
    assert (state[absent] == Tier.PENDING).all()


@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("dim", [1, 7, 32, 300])
def test_rows_are_decoded_as_the_codec_does(dtype: StorageDtype, dim: int) -> None:
    vectors = np.random.default_rng(dim).standard_normal((500, dim)).astype(np.float32)
    rows, keys = codec.encode(vectors, dtype), np.arange(500, dtype=np.int64) * 3
    gone = np.zeros(500, bool)
    table = Overlaid(overlay_index.Answering(overlay_index.build(keys), keys, rows, gone, dtype, dim), dtype, dim)
    stored, state = np.zeros((501, rows.shape[1]), np.uint8), np.zeros(501, np.uint8)
    assert table.answer(np.append(keys[::-1], -1), stored, state) == 500
    assert np.array_equal(stored[:500], rows[::-1])
    assert not stored[500].any()
    assert state.tolist() == [Tier.OVERLAY] * 500 + [Tier.PENDING]
    for kind in (np.float32, np.float16):
        out, expected = np.empty((500, dim), kind), np.empty((500, dim), kind)
        table.answer(keys[::-1], out, np.zeros(500, np.uint8))
        codec.decode(rows, dtype, expected)
        assert np.array_equal(out[::-1], expected)


def test_of_a_deleted_row_nothing_is_written() -> None:
    stored, state = np.full((3, 8), 0xEE, np.uint8), np.array([Tier.PENDING, Tier.PENDING, Tier.DISK], np.uint8)
    assert held(codes([7, 8, 9]), np.array([False, True, False])).answer(codes([7, 8, 9]), stored, state) == 2
    assert state.tolist() == [Tier.OVERLAY, Tier.ABSENT, Tier.DISK]
    assert not stored[0].any()
    assert (stored[1:] == 0xEE).all()
    for rows, of in ((stored[:2], state), (stored[:, :4].copy(), state), (stored, state[:2])):
        assert held(codes([7])).answer(codes([7, 8, 9]), rows, of) == -1


def test_read_only_arrays_are_taken_as_they_are() -> None:
    keys = np.array([5, -5], np.int64)
    index, rows, gone = overlay_index.build(keys), np.zeros((2, 8), np.uint8), np.zeros(2, bool)
    for array in (keys, index, rows, gone):
        array.flags.writeable = False
    table = Overlaid(overlay_index.Answering(index, keys, rows, gone, StorageDtype.FLOAT32, 2), StorageDtype.FLOAT32, 2)
    assert table.answer(keys, np.empty((2, 2), np.float32), np.zeros(2, np.uint8)) == 2
    assert overlay_index.dedup_last(keys).tolist() == [1, 0]


def test_a_key_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="-9 in row 3"):
        overlay_index.build(codes([4, -9, 7, -9]))


def test_arrays_that_do_not_pair_up_are_refused() -> None:
    keys = codes([1, 2, 3])
    for rows, states in ((3, 2), (2, 3)):
        assert held(keys).answer(keys, np.empty((rows, 2), np.float32), np.zeros(states, np.uint8)) == -1
    with pytest.raises(ValueError, match="pair up"):
        overlay_index.Answering(
            overlay_index.build(keys), keys, np.zeros((3, 4), np.uint8), np.zeros(3, bool), StorageDtype.FLOAT32, 2
        )


@given(keys_of_a_delta | any_keys, keys_of_a_delta | any_keys, st.integers(1, 17), st.randoms(use_true_random=False))
def test_a_merge_keeps_the_newer_of_two_rows(
    old: list[int], new: list[int], width: int, random: np.random.Generator
) -> None:
    def part(keys: list[int], number: int) -> overlay_index.Part:
        distinct = sorted(set(keys))
        rows = np.array([[random.randrange(256) for _ in range(width)] for _ in distinct], np.uint8)
        deleted = np.array([random.choice([True, False]) for _ in distinct], bool)
        return overlay_index.Part(codes(distinct), rows.reshape(len(distinct), width), deleted)

    parts = part(old, 1), part(new, 2)
    expected = {key: (row.tolist(), gone) for keys in parts for key, row, gone in zip(*keys, strict=True)}
    merged = overlay_index.merge(*parts)
    assert merged.keys.tolist() == sorted(expected)
    assert [(row.tolist(), gone) for row, gone in zip(merged.rows, merged.deleted, strict=True)] == [
        expected[key] for key in sorted(expected)
    ]


def test_parts_of_different_widths_are_not_merged() -> None:
    wide, narrow = (
        overlay_index.Part(codes([1]), np.zeros((1, width), np.uint8), np.zeros(1, bool)) for width in (8, 4)
    )
    with pytest.raises(ValueError, match="one width, got 8 and 4 bytes"):
        overlay_index.merge(wide, narrow)
