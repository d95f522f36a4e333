"""What every cache tier owes the cascade: a suite that each implementation's tests subclass.

A subclass gives `open_cache`. A key may always be forgotten, so tests that expect a row to be there put
in far fewer than fit, and ask again with the same call that answers.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from tierstore.kernels import codec
from tierstore.tiers.base import Peek
from tierstore.types import Keys, KeyType, Rows, States, StorageDtype, TableSpec, Tier, Vectors

DIM = 6
LIMITS = np.iinfo(np.int64)
ODD_KEYS = np.array([0, -1, 1, LIMITS.min, LIMITS.max, LIMITS.min + 1, 255, 1 << 32, -(1 << 32)], np.int64)
SPEC = TableSpec("t", KeyType.INT64, DIM, StorageDtype.FLOAT32)
DEFAULT = np.linspace(-1, 1, DIM).astype(np.float32)


def vectors_of(keys: Keys, generation: int = 0) -> npt.NDArray[np.float32]:
    """A vector that tells its key and generation, representable in every dtype but int8 and int4, which come near."""
    base = (keys % 61).astype(np.float32) + generation * 64
    return base[:, None] + np.arange(DIM, dtype=np.float32) / 4


def rows_of(keys: Keys, generation: int = 0, dtype: StorageDtype = StorageDtype.FLOAT32) -> Rows:
    return codec.encode(vectors_of(keys, generation), dtype)


class CacheTier(Protocol):
    """A cache of one table of one version. Any thread may call anything; look-ups never wait for a writer.

    `seq` is the seq of the view under which a promoted row was read; see `raise_floor`.
    """

    @property
    def rows_resident(self) -> int: ...

    @property
    def capacity_rows(self) -> int: ...

    @property
    def bytes_in_use(self) -> int: ...

    @property
    def allowed_bytes(self) -> int: ...

    budget_bytes: int  # an upper bound

    def peek(self, key: int) -> Peek:
        """The cache's entry for a key, read without counting heat or hits."""

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Offer distinct keys with their stored rows; the tier decides which to admit. Returns the rows admitted."""

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Offer distinct keys that do not exist. Returns the keys admitted."""

    def raise_floor(self, seq: int) -> None:
        """Refuse, from now on, rows read under a view older than `seq`, because a delta is about to be folded."""

    def update(self, keys: Keys, rows: Rows, deleted: npt.NDArray[np.bool_]) -> None:
        """Apply a delta to its distinct keys that are resident. Admits no key."""

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free room with distinct keys, hottest first; none if `seq` is below the floor.

        Returns the rows admitted.
        """

    def hot_keys(self, limit: int) -> Keys:
        """At most `limit` resident keys, distinct, hottest first."""

    def resize(self, fraction: float) -> None:
        """Use this part of the budget, keep the hottest rows, and give the remaining memory back."""

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Decode rows of resident keys into `out`, or the table's default for keys that do not exist; count heat.

        Returns how many keys were answered with a row.
        """

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def ask(cache: CacheTier, keys: Keys, out_dtype: Any = np.float32) -> tuple[npt.NDArray, States]:
    out, state = np.full((len(keys), DIM), 99, out_dtype), np.zeros(len(keys), np.uint8)
    answered = cache.lookup(keys, out, state)
    assert answered == np.count_nonzero((state != Tier.PENDING) & (state != Tier.ABSENT))
    return out, state


def no_deletes(keys: Keys) -> npt.NDArray[np.bool_]:
    return np.zeros(len(keys), np.bool_)


class CacheTierContract:
    budget = 1 << 20
    torn_batches = 2500  # that each reader asks for while rows are rewritten

    def open_cache(
        self, spec: TableSpec, budget_bytes: int, default: npt.NDArray[np.float32], fraction: float = 1.0
    ) -> CacheTier:
        raise NotImplementedError

    @pytest.fixture
    def cache(self) -> Any:
        cache = self.open_cache(SPEC, self.budget, DEFAULT)
        yield cache
        cache.close()

    @pytest.mark.parametrize("dtype", list(StorageDtype))
    @pytest.mark.parametrize("out_dtype", [np.float32, np.float16])
    def test_a_resident_row_answers_as_its_stored_bytes_decode(self, dtype: StorageDtype, out_dtype: Any) -> None:
        cache = self.open_cache(TableSpec("t", KeyType.INT64, DIM, dtype), self.budget, DEFAULT)
        keys = np.arange(100, dtype=np.int64)
        rows = rows_of(keys, dtype=dtype)
        assert cache.insert(keys, rows, 1) == 100
        expected = np.empty((100, DIM), out_dtype)
        codec.decode(rows, dtype, expected)
        out, state = ask(cache, keys[::-1].copy(), out_dtype)
        assert (state == Tier.HOST).all() or (state == Tier.DEVICE).all()
        np.testing.assert_array_equal(out, expected[::-1])
        cache.close()

    def test_no_key_value_is_reserved(self, cache: CacheTier) -> None:
        _, state = ask(cache, ODD_KEYS)
        assert (state == Tier.PENDING).all()
        there, absent = ODD_KEYS[::2], ODD_KEYS[1::2]
        cache.insert(there, rows_of(there), 1)
        cache.insert_absent(absent, 1)
        out, state = ask(cache, ODD_KEYS)
        assert (state[1::2] == Tier.ABSENT).all()
        assert not np.isin(state[::2], [Tier.ABSENT, Tier.PENDING]).any()
        np.testing.assert_array_equal(out[::2], vectors_of(there))
        np.testing.assert_array_equal(out[1::2], np.tile(DEFAULT, (len(absent), 1)))

    def test_a_peek_tells_what_is_held_and_counts_nothing(self, cache: CacheTier) -> None:
        there, absent = np.arange(40, dtype=np.int64), np.arange(100, 110, dtype=np.int64)
        rows = rows_of(there)
        cache.insert(there, rows, 1)
        cache.insert_absent(absent, 1)
        hot = cache.peek(7).heat
        for _ in range(5):
            for key, row in zip(there.tolist(), rows, strict=True):
                assert cache.peek(key).row == row.tobytes()
        assert all(cache.peek(key).holds == "absent" for key in absent.tolist())
        assert all(cache.peek(key).holds == "nothing" for key in range(200, 260))
        assert cache.peek(7).heat == hot
        for _ in range(3):
            ask(cache, there)
        assert cache.peek(7).heat["hits"] > hot["hits"]
        cache.update(there[:1], rows_of(there[:1], 1), no_deletes(there[:1]))
        assert cache.peek(0).row == rows_of(there[:1], 1).tobytes()
        cache.close()
        assert cache.peek(7).holds == "nothing"

    def test_only_pending_keys_are_answered(self, cache: CacheTier) -> None:
        keys = np.arange(10, dtype=np.int64)
        cache.insert(keys, rows_of(keys), 1)
        out, state = np.full((10, DIM), 99, np.float32), np.zeros(10, np.uint8)
        state[::2] = Tier.OVERLAY
        assert cache.lookup(keys, out, state) == 5
        assert (state[::2] == Tier.OVERLAY).all()
        assert (out[::2] == 99).all()
        np.testing.assert_array_equal(out[1::2], vectors_of(keys)[1::2])

    def test_a_key_asked_for_twice_in_a_batch_answers_twice(self, cache: CacheTier) -> None:
        keys = np.array([5, 7], np.int64)
        cache.insert(keys, rows_of(keys), 1)
        many = np.repeat(keys, 300)
        out, state = ask(cache, many)
        assert (state != Tier.PENDING).all()
        np.testing.assert_array_equal(out, vectors_of(many))

    def test_an_absent_key_answers_the_default_in_either_width(self, cache: CacheTier) -> None:
        keys = np.arange(5, dtype=np.int64)
        assert cache.insert_absent(keys, 1) == 5
        for dtype in (np.float32, np.float16):
            out, state = ask(cache, keys, dtype)
            assert (state == Tier.ABSENT).all()
            np.testing.assert_array_equal(out, np.tile(DEFAULT.astype(dtype), (5, 1)))

    def test_what_was_read_before_a_delta_is_refused_once_the_floor_is_raised(self, cache: CacheTier) -> None:
        keys = np.arange(4, dtype=np.int64)
        cache.raise_floor(7)
        assert cache.insert(keys, rows_of(keys), 6) == 0
        assert cache.insert_absent(keys, 6) == 0
        assert (ask(cache, keys)[1] == Tier.PENDING).all()
        cache.raise_floor(3)  # never sinks
        assert cache.insert(keys, rows_of(keys), 6) == 0
        assert cache.insert(keys, rows_of(keys), 7) == 4

    def test_a_late_promotion_never_brings_an_older_row(self, cache: CacheTier) -> None:
        """A key is read at seq 5, delta 6 changes it, and the promotion comes at each possible point of the fold."""
        old, new = rows_of(np.array([1]), 0), rows_of(np.array([1]), 1)

        def promote(key: Keys) -> None:
            cache.insert(key, old, 5)

        steps = [
            lambda key: cache.raise_floor(6),
            lambda key: None,  # the disk is written
            lambda key: cache.update(key, new, no_deletes(key)),
        ]
        for late in range(1, len(steps) + 1):
            cache.close()
            cache = self.open_cache(SPEC, self.budget, DEFAULT)
            key = np.array([1], np.int64)
            for i, step in enumerate(steps):
                step(key)
                if i + 1 == late:
                    promote(key)
            out, state = ask(cache, key)
            assert state[0] == Tier.PENDING or (out == vectors_of(key, 1)).all()
        cache.close()
        early = self.open_cache(SPEC, self.budget, DEFAULT)
        key = np.array([1], np.int64)
        early.insert(key, old, 5)
        for step in (early.raise_floor(6), early.update(key, new, no_deletes(key))):
            assert step is None
        out, state = ask(early, key)
        np.testing.assert_array_equal(out, vectors_of(key, 1))
        early.close()

    def test_a_delta_overwrites_what_is_resident_and_lets_nobody_in(self, cache: CacheTier) -> None:
        keys = np.arange(6000, dtype=np.int64)  # more than one chunk
        resident = keys[::20]
        cache.insert(resident, rows_of(resident), 1)
        cache.update(keys, rows_of(keys, 1), no_deletes(keys))
        out, state = ask(cache, keys)
        assert (state[::20] != Tier.PENDING).all()
        assert np.count_nonzero(state) == len(resident) == cache.rows_resident
        np.testing.assert_array_equal(out[::20], vectors_of(resident, 1))

    def test_a_delta_erases_deleted_rows_and_clears_absent_marks_of_new_ones(self, cache: CacheTier) -> None:
        keys = np.arange(8, dtype=np.int64)
        cache.insert(keys[:4], rows_of(keys[:4]), 1)
        cache.insert_absent(keys[4:], 1)
        cache.update(keys, rows_of(keys, 1), keys < 4)
        _, state = ask(cache, keys)
        assert np.isin(state[:4], [Tier.PENDING, Tier.ABSENT]).all()
        assert (state[4:] == Tier.PENDING).all()
        assert cache.rows_resident == 0

    def test_an_inserted_row_counts_more_than_an_absent_mark(self, cache: CacheTier) -> None:
        key = np.array([3], np.int64)
        cache.insert_absent(key, 1)
        cache.insert(key, rows_of(key), 1)
        cache.insert_absent(key, 1)
        out, _ = ask(cache, key)
        np.testing.assert_array_equal(out, vectors_of(key))
        some = np.arange(100, 200, dtype=np.int64)
        cache.insert_absent(some, 1)
        cache.insert(some, rows_of(some), 1)
        others = np.arange(200, 200 + 4 * cache.capacity_rows, dtype=np.int64)
        cache.insert(others, rows_of(others), 1)
        _, state = ask(cache, some)
        assert (state == Tier.PENDING).any()  # put out, and no claim is left that they do not exist
        assert not (state == Tier.ABSENT).any()

    def test_inserting_again_takes_no_second_place(self, cache: CacheTier) -> None:
        keys = np.arange(50, dtype=np.int64)
        assert cache.insert(keys, rows_of(keys), 1) == 50
        assert cache.insert(keys, rows_of(keys), 1) == 0
        assert cache.rows_resident == len(cache.hot_keys(1000)) == 50

    def test_warming_fills_what_is_free_and_puts_nobody_out(self, cache: CacheTier) -> None:
        first = np.arange(cache.capacity_rows // 2, dtype=np.int64)
        admitted = cache.warm(first, rows_of(first))
        assert admitted > 0.95 * len(first)
        there = first[ask(cache, first)[1] != Tier.PENDING]
        second = np.arange(len(first), 3 * len(first), dtype=np.int64)
        cache.warm(second, rows_of(second))
        out, state = ask(cache, there)
        assert (state != Tier.PENDING).all()
        np.testing.assert_array_equal(out, vectors_of(there))
        assert cache.capacity_rows * 0.9 < cache.rows_resident <= cache.capacity_rows

    def test_warming_with_what_was_read_before_a_fold_lets_nothing_in(self, cache: CacheTier) -> None:
        keys = np.arange(10, dtype=np.int64)
        cache.raise_floor(5)
        assert cache.warm(keys, rows_of(keys), 4) == 0
        assert cache.warm(keys, rows_of(keys), 5) == 10

    def test_a_stream_larger_than_the_cache_stays_within_it(self, cache: CacheTier) -> None:
        everything = np.arange(4 * cache.capacity_rows, dtype=np.int64)
        for keys in np.array_split(everything, 50):
            cache.insert(keys, rows_of(keys), 1)
            cache.insert_absent(keys + len(everything), 1)
        assert cache.rows_resident <= cache.capacity_rows
        out, state = ask(cache, everything)
        assert np.count_nonzero(state) == cache.rows_resident > 0.9 * cache.capacity_rows
        np.testing.assert_array_equal(out[state != 0], vectors_of(everything)[state != 0])

    def test_hot_keys_come_hottest_first(self, cache: CacheTier) -> None:
        keys = np.arange(100, dtype=np.int64)
        cache.warm(keys, rows_of(keys))
        for _ in range(3):
            ask(cache, keys[::10])
        hottest = cache.hot_keys(10)
        assert sorted(hottest) == keys[::10].tolist()
        assert sorted(cache.hot_keys(1000)) == keys.tolist()
        assert len(cache.hot_keys(0)) == 0

    def test_resizing_keeps_the_hottest_and_their_rows(self, cache: CacheTier) -> None:
        full = cache.capacity_rows
        keys = np.arange(full * 9 // 10, dtype=np.int64)
        cache.warm(keys, rows_of(keys))
        absent = np.arange(-20, 0, dtype=np.int64)
        cache.insert_absent(absent, 1)
        hot = keys[:: len(keys) // (full // 16)]
        hot = hot[ask(cache, hot)[1] != Tier.PENDING]
        for _ in range(3):
            ask(cache, hot)
        for fraction in (0.5, 0.25, 0.5, 1.0, 0.25, 1.0):
            cache.resize(fraction)
            assert cache.capacity_rows == pytest.approx(full * fraction, rel=0.01)
            assert cache.rows_resident <= cache.capacity_rows
            assert cache.bytes_in_use <= cache.budget_bytes * fraction + 4096
            out, state = ask(cache, keys)
            there = state != Tier.PENDING
            assert np.count_nonzero(there) == cache.rows_resident
            np.testing.assert_array_equal(out[there], vectors_of(keys)[there])
            assert np.count_nonzero(ask(cache, hot)[1]) > 0.97 * len(hot)
            assert np.isin(ask(cache, absent)[1], [Tier.ABSENT, Tier.PENDING]).all()
            more = np.arange(10 * full, 10 * full + 500, dtype=np.int64)
            cache.update(more, rows_of(more), no_deletes(more))

    def test_a_cache_may_start_small_and_grow(self) -> None:
        cache = self.open_cache(SPEC, self.budget, DEFAULT, 0.25)
        small = cache.capacity_rows
        keys = np.arange(3 * small, dtype=np.int64)
        cache.warm(keys, rows_of(keys))
        assert 0.95 * small < cache.rows_resident <= small
        cache.resize(1.0)
        cache.warm(keys, rows_of(keys))
        out, state = ask(cache, keys)
        assert cache.rows_resident > 2.5 * small
        np.testing.assert_array_equal(out[state != 0], vectors_of(keys)[state != 0])
        cache.close()

    def test_wrong_shapes_are_refused(self, cache: CacheTier) -> None:
        keys = np.arange(3, dtype=np.int64)
        with pytest.raises(ValueError, match="expected rows"):
            cache.insert(keys, rows_of(keys)[:2], 1)

    def test_a_closed_cache_answers_nothing(self) -> None:
        cache = self.open_cache(SPEC, self.budget, DEFAULT)
        keys = np.arange(3, dtype=np.int64)
        cache.insert(keys, rows_of(keys), 1)
        cache.close()
        cache.close()
        assert (ask(cache, keys)[1] == Tier.PENDING).all()
        assert (
            cache.insert(keys, rows_of(keys), 1) == cache.insert_absent(keys, 1) == cache.warm(keys, rows_of(keys)) == 0
        )
        cache.update(keys, rows_of(keys), no_deletes(keys))
        cache.resize(0.5)
        assert cache.rows_resident == cache.capacity_rows == cache.bytes_in_use == len(cache.hot_keys(5)) == 0

    def test_no_reader_sees_a_torn_or_foreign_row_while_rows_are_rewritten_moved_and_put_out(self) -> None:
        """All numbers of a row are equal, and tell its key: what is read must be one number, of that key.

        Rows are long and few, so that a reader which did not check would meet the writer all the time.
        """
        dim, batches = 2048, self.torn_batches
        spec = TableSpec("t", KeyType.INT64, dim, StorageDtype.FLOAT32)
        cache = self.open_cache(spec, 4 * 33 * 8192, np.zeros(dim, np.float32))
        assert 64 <= cache.capacity_rows <= 128
        keys = np.arange(cache.capacity_rows * 5 // 4, dtype=np.int64)
        count = len(keys)
        generations = [
            np.repeat((keys + generation * count).astype(np.float32)[:, None], dim, 1).view(np.uint8)
            for generation in range(4)
        ]
        cache.insert(keys, generations[0], 0)  # readers may be done before a slow writer has begun
        faults: list[str] = []
        answered, done = [0, 0], [0, 0]

        def read(number: int) -> None:
            out, rng = np.empty((64, dim), np.float32), np.random.default_rng(number)
            while done[number] < batches and not faults:
                wanted = rng.choice(keys, 64)
                state = np.zeros(64, np.uint8)
                cache.lookup(wanted, out, state)
                there = state != Tier.PENDING
                got = out[there]
                if (got != got[:, :1]).any():
                    faults.append("torn")
                if (got[:, 0].astype(np.int64) % count != wanted[there]).any():
                    faults.append("of another key")
                answered[number] += len(got)
                done[number] += 1

        readers = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
        for reader in readers:
            reader.start()
        step = 0
        while any(reader.is_alive() for reader in readers):
            step += 1
            rows = generations[step % 4]
            cache.update(keys, rows, no_deletes(keys))
            cache.insert(keys[step % 4 :: 4], rows[step % 4 :: 4], step)
            if step % 50 == 0:
                cache.resize((1.0, 0.5)[step // 50 % 2])
        for reader in readers:
            reader.join()
        assert faults == []
        assert min(answered) > 10 * batches
        cache.close()
