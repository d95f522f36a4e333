"""What every row store below the caches must do (`tiers/base.py`, RowStore). Subclass per implementation.

A subclass says how to make an empty store and how to put rows into it by a way of its own, so that what
is checked is reading.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.errors import Closed
from tierstore.tiers.base import RowStore
from tierstore.types import Keys, Rows, States, Tier

ROW_BYTES = 12
LIMITS = np.iinfo(np.int64)


def some_rows(keys: Keys, salt: int = 0) -> Rows:
    """Rows that tell their key and `salt`."""
    rows = np.zeros((len(keys), ROW_BYTES), np.uint8)
    rows[:, :8] = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 8)
    rows[:, 8:] = np.frombuffer(np.int32(salt).tobytes(), np.uint8)
    return rows


def get(store: RowStore, table_id: int, keys: Any) -> tuple[Rows, States]:
    keys = np.asarray(keys, np.int64)
    rows = np.full((len(keys), ROW_BYTES), 0xEE, np.uint8)
    state = np.zeros(len(keys), np.uint8)
    store.get(table_id, keys, rows, state)
    return rows, state


class BackingContract:
    answered = Tier.DISK

    def make(self, directory: Path) -> RowStore:
        raise NotImplementedError

    def put(self, store: Any, table_id: int, keys: Keys, rows: Rows, deleted: np.ndarray | None = None) -> None:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        store = self.make(tmp_path)
        yield store
        store.close()

    def test_answers_what_was_put_and_says_what_does_not_exist(self, store: Any) -> None:
        keys = np.arange(-3000, 3000, 2)
        self.put(store, 1, keys, some_rows(keys))
        asked = np.arange(-3000, 3000)
        rows, state = get(store, 1, asked)
        held = asked % 2 == 0
        assert (state[held] == self.answered).all()
        assert (state[~held] == Tier.ABSENT).all()
        np.testing.assert_array_equal(rows[held], some_rows(asked[held]))
        assert (rows[~held] == 0xEE).all(), "rows of absent keys are not touched"

    @pytest.mark.parametrize("key", [LIMITS.min, LIMITS.min + 1, -1, 0, 1, 255, 256, LIMITS.max - 1, LIMITS.max])
    def test_every_64_bit_key_is_legal(self, store: Any, key: int) -> None:
        keys = np.array([key])
        self.put(store, 1, keys, some_rows(keys, 7))
        neighbours = sorted({max(key - 1, LIMITS.min), key, min(key + 1, LIMITS.max)})
        rows, state = get(store, 1, neighbours)
        assert [s == self.answered for s in state] == [k == key for k in neighbours]
        np.testing.assert_array_equal(rows[neighbours.index(key)], some_rows(keys, 7)[0])

    def test_tables_do_not_see_each_other(self, store: Any) -> None:
        keys = np.arange(100)
        for table_id in (1, 2, 255, 256, 65535):
            self.put(store, table_id, keys, some_rows(keys, table_id))
        for table_id in (1, 2, 255, 256, 65535):
            np.testing.assert_array_equal(get(store, table_id, keys)[0], some_rows(keys, table_id))
        assert (get(store, 3, keys)[1] == Tier.ABSENT).all()

    def test_a_later_put_wins_and_a_deleted_key_is_absent_until_put_again(self, store: Any) -> None:
        keys = np.arange(10)
        self.put(store, 1, keys, some_rows(keys, 1))
        self.put(store, 1, keys[:4], some_rows(keys[:4], 2), np.array([False, True, False, True]))
        rows, state = get(store, 1, keys)
        assert state.tolist() == [Tier.ABSENT if k in (1, 3) else self.answered for k in range(10)]
        np.testing.assert_array_equal(rows[[0, 2]], some_rows(keys[[0, 2]], 2))
        np.testing.assert_array_equal(rows[4:], some_rows(keys[4:], 1))
        self.put(store, 1, keys[1:2], some_rows(keys[1:2], 3))
        np.testing.assert_array_equal(get(store, 1, [1])[0], some_rows(keys[1:2], 3))

    @pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
    def test_batches_of_any_size(self, store: Any, count: int) -> None:
        keys = np.arange(5000)
        self.put(store, 1, keys, some_rows(keys))
        rows, state = get(store, 1, keys[:count])
        np.testing.assert_array_equal(rows, some_rows(keys[:count]))
        assert (state == self.answered).all()

    def test_a_strided_rows_array_is_filled_in_place(self, store: Any) -> None:
        keys = np.arange(50)
        self.put(store, 1, keys, some_rows(keys))
        wide = np.zeros((50, 2 * ROW_BYTES), np.uint8)
        state = np.zeros(50, np.uint8)
        store.get(1, keys, wide[:, ROW_BYTES:], state)
        np.testing.assert_array_equal(wide[:, ROW_BYTES:], some_rows(keys))
        assert not wide[:, :ROW_BYTES].any()

    def test_many_threads_read_while_rows_are_put(self, store: Any) -> None:
        """Every answer is a whole row, of one put, and puts are never seen going backwards."""
        keys = np.arange(2000)
        self.put(store, 1, keys, some_rows(keys, 0))
        stop = threading.Event()

        def read() -> int:
            last = 0
            while not stop.is_set():
                rows, state = get(store, 1, keys)
                assert (state == self.answered).all()
                np.testing.assert_array_equal(rows[:, :8], some_rows(keys)[:, :8])
                salts = np.ascontiguousarray(rows[:, 8:]).view(np.int32)
                assert salts.min() >= last
                last = int(salts.min())
            return last

        with ThreadPoolExecutor(4) as threads:
            readers = [threads.submit(read) for _ in range(4)]
            try:
                for salt in range(1, 20):
                    self.put(store, 1, keys, some_rows(keys, salt))
            finally:
                stop.set()
            for reader in readers:
                reader.result()

    def test_closed_is_closed_even_for_readers_under_way(self, store: Any) -> None:
        keys = np.arange(20_000)
        self.put(store, 1, keys, some_rows(keys))
        begun = threading.Barrier(4)

        def read_until_closed() -> None:
            begun.wait()
            while True:
                rows, _ = get(store, 1, keys)
                np.testing.assert_array_equal(rows, some_rows(keys))

        with ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read_until_closed) for _ in range(3)]
            begun.wait()
            get(store, 1, keys)
            store.close()
            for reader in readers:
                with pytest.raises(Closed):
                    reader.result(timeout=30)
        store.close()
