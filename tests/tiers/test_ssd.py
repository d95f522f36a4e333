"""The cache on SSD by itself: what it holds is right, within its budget, and what its disk does to it harms nobody."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.backing_contract import ROW_BYTES, some_rows
from tierstore.errors import DiskFull
from tierstore.kernels.hashing import mix_all
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.ssd import cache as cache_module
from tierstore.tiers.ssd import index as ssd_index
from tierstore.tiers.ssd.cache import SsdCache
from tierstore.tiers.ssd.table import Offer, SsdTable
from tierstore.types import Keys, Rows, States, Tier

SMALLEST = 1 << 20  # 16 segments
FITS = SMALLEST // 32  # rows of ROW_BYTES in it


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(2)
    yield pool
    pool.close()


OpenCache = Callable[..., SsdCache]


@pytest.fixture
def open_cache(tmp_path: Path, readers: ReaderPool) -> Iterator[OpenCache]:
    opened: list[SsdCache] = []

    def open_(budget_bytes: int = SMALLEST, **more: object) -> SsdCache:
        opened.append(SsdCache(tmp_path, budget_bytes, readers, **more))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache: OpenCache) -> SsdCache:
    return open_cache()


def table_of(cache: SsdCache, rows: int = 100_000, row_bytes: int = ROW_BYTES) -> SsdTable:
    table = cache.table(rows, row_bytes)
    assert table is not None
    return table


def look_up(table: SsdTable, keys: Keys) -> tuple[Rows, States]:
    rows, state = np.zeros((len(keys), table.row_bytes), np.uint8), np.zeros(len(keys), np.uint8)
    table.lookup(keys, rows, state)
    assert set(np.unique(state).tolist()) <= {Tier.PENDING, Tier.DISK}
    return rows, state


def held(table: SsdTable, keys: Keys, salt: int = 0) -> np.ndarray:
    """Which keys are held; all of those rows are right."""
    rows, state = look_up(table, keys)
    there = state == Tier.DISK
    np.testing.assert_array_equal(rows[there], some_rows(keys, salt)[there])
    return there


def fetch(cache: SsdCache, table: SsdTable, keys: Keys, seq: int = 0) -> np.ndarray:
    """A look-up as a node does it. Returns which keys were held."""
    there = held(table, keys)
    table.offer(keys[~there], some_rows(keys[~there]), seq)
    cache.drain()
    return there


def file_bytes(cache: SsdCache) -> int:
    return os.fstat(cache.file._fd).st_size


def test_what_was_offered_is_held_and_its_file_has_no_name(cache: SsdCache, tmp_path: Path) -> None:
    table, keys = table_of(cache), np.arange(-500, 500)
    assert not fetch(cache, table, keys).any()
    assert held(table, keys).all()
    assert not held(table, np.arange(500, 1500)).any()
    assert not list(tmp_path.iterdir())
    stats = table.stats()
    assert (stats["rows"], stats["hits"], stats["misses"], stats["evicted"]) == (1000, 1000, 2000, 0)


def test_a_peek_tells_what_is_held_and_counts_nothing(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(-500, 500)
    fetch(cache, table, keys)
    before = table.stats()
    for key, row in zip(keys.tolist(), some_rows(keys), strict=True):
        found = table.peek(key)
        assert found.row == row.tobytes()
        assert found.heat == table.peek(key).heat
    assert all(table.peek(key).holds == "nothing" for key in range(500, 1500))
    assert table.stats() == before
    cold = table.peek(7).heat["hits"]
    look_up(table, np.array([7]))
    assert table.peek(7).heat["hits"] == cold + 1
    table.forget(np.array([7]))
    assert table.peek(7).holds == "nothing"
    cache.drop(table)
    assert table.peek(8).holds == "nothing"


@pytest.mark.parametrize("row_bytes", [1, 8, 13, 4096, 20_000])
def test_rows_of_any_size_within_the_budget(cache: SsdCache, row_bytes: int) -> None:
    table, rng = table_of(cache, row_bytes=row_bytes), np.random.default_rng(row_bytes)
    truth = rng.integers(0, 256, (3000, row_bytes), np.uint8)
    hits = 0
    for _ in range(60):
        keys = np.unique(rng.integers(0, 3000, 200))
        rows, state = look_up(table, keys)
        there = state == Tier.DISK
        hits += int(there.sum())
        np.testing.assert_array_equal(rows[there], truth[keys[there]])
        table.offer(keys[~there], truth[keys[~there]], 0)
        cache.drain()
        assert file_bytes(cache) <= cache.status()["used"] <= SMALLEST
    assert hits
    assert cache.status()["problem"] is None


def test_rows_larger_than_a_segment_are_not_held(cache: SsdCache) -> None:
    assert cache.table(10, 1 << 16) is None


def test_a_scan_does_not_wash_out_what_is_asked_for_again(cache: SsdCache) -> None:
    table, hot, other = table_of(cache), np.arange(FITS // 4), np.arange(FITS // 4, FITS)
    fetch(cache, table, hot)
    fetch(cache, table, other)
    assert fetch(cache, table, hot).mean() > 0.99
    for start in range(10**6, 10**6 + 10 * FITS, 4096):
        fetch(cache, table, np.arange(start, start + 4096))
    assert held(table, hot).mean() > 0.95, "a key that was read once does not take a place"
    admitted = table.stats()["admitted"]
    for start in range(10**6, 10**6 + FITS // 2, 4096):
        keys = np.arange(start, start + 4096)
        fetch(cache, table, keys)
        fetch(cache, table, keys)
    assert table.stats()["admitted"] > admitted, "and one that was read twice does"
    assert held(table, hot).mean() > 0.9, "in the place of what was not asked for"
    assert held(table, other).mean() < 0.6
    assert table.stats()["evicted"] > 0


def test_what_was_asked_for_again_is_kept_when_its_segment_makes_room(cache: SsdCache) -> None:
    table, keys, hot = table_of(cache), np.arange(FITS), np.arange(0, FITS, 10)
    fetch(cache, table, keys)
    fetch(cache, table, hot)
    new = np.arange(FITS, 2 * FITS, 2)
    for _ in range(2):
        fetch(cache, table, new)
    assert held(table, hot).mean() > 0.99
    assert 0.3 < held(table, keys).mean() < 0.7


def test_the_budget_goes_to_the_table_that_is_asked(cache: SsdCache) -> None:
    old, new, keys = table_of(cache), table_of(cache), np.arange(FITS)
    fetch(cache, old, keys)
    for _ in range(3):
        fetch(cache, new, keys[: FITS // 2])
    assert held(new, keys[: FITS // 2]).mean() > 0.8
    assert held(old, keys).sum() <= FITS // 2


def test_a_dropped_table_frees_its_bytes_for_others(cache: SsdCache) -> None:
    old, new, keys = table_of(cache), table_of(cache), np.arange(FITS)
    fetch(cache, old, keys)
    cache.drop(old)
    cache.drain()
    assert cache.status()["used"] == 0
    assert not held(old, keys).any()
    old.offer(keys, some_rows(keys), 0)
    fetch(cache, new, keys)
    assert held(new, keys).mean() > 0.9


def test_what_a_fold_has_changed_goes_and_what_is_older_does_not_come_in(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(100)
    fetch(cache, table, keys, seq=4)
    table.raise_floor(5)
    table.forget(keys[:50])
    assert held(table, keys).tolist() == [False] * 50 + [True] * 50
    assert not fetch(cache, table, keys[:50], seq=4).any()
    assert not fetch(cache, table, keys[:50], seq=5).any()
    assert held(table, keys).all()


class Paused:
    """Stops the thread that writes before its next write."""

    def __init__(self, cache: SsdCache) -> None:
        self.reached, self.resume, self._write = threading.Event(), threading.Event(), cache.file.write
        cache.file.write = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: object) -> None:
        self.reached.set()
        assert self.resume.wait(60)
        self._write(*args)  # type: ignore[arg-type]


def test_a_fold_while_its_rows_are_being_written_wins(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(100)
    paused = Paused(cache)
    table.offer(keys, some_rows(keys), 4)
    assert paused.reached.wait(60)
    table.raise_floor(5)
    table.forget(keys[:10])
    paused.resume.set()
    cache.drain()
    assert not held(table, keys).any()


def test_a_fold_while_its_rows_are_being_moved_wins(cache: SsdCache) -> None:
    table, hot = table_of(cache), np.arange(100)
    fetch(cache, table, hot)
    assert fetch(cache, table, hot).all()
    fetch(cache, table, np.arange(1000, 900 + FITS))
    assert not cache.file.has_room
    paused = Paused(cache)
    for _ in range(2):
        table.offer(hot + 10**6, some_rows(hot + 10**6), 0)
    assert paused.reached.wait(60)
    table.raise_floor(1)
    table.forget(hot)
    paused.resume.set()
    cache.drain()
    assert not held(table, hot).any()


def test_a_version_that_is_closed_while_its_rows_are_being_written(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(100)
    paused = Paused(cache)
    table.offer(keys, some_rows(keys), 0)
    assert paused.reached.wait(60)
    table.offer(keys, some_rows(keys), 0)
    cache.drop(table)
    cache._put(Offer(table, keys, some_rows(keys), 0))  # of a look-up that had looked before
    paused.resume.set()
    cache.drain()
    assert not held(table, keys).any()
    assert (cache.status()["used"], cache.status()["waiting_bytes"]) == (0, 0)


def test_a_slot_that_another_table_has_by_the_time_it_is_read_is_a_miss(
    cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same key lies at the same place there, and its row is whole: all that differs is whose it is."""
    old, new, keys = table_of(cache), table_of(cache), np.arange(FITS - 1000)
    fetch(cache, old, keys)
    first, read = keys[: old.per_segment], cache.file.read

    def read_late(*args: object) -> None:
        monkeypatch.undo()
        for _ in range(2):
            new.offer(first, some_rows(first, 1), 0)
            cache.drain()
        read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache.file, "read", read_late)
    assert not held(old, first[5:15]).any()
    assert held(new, first, 1).all()
    assert os.pread(cache.file._fd, 8, 5 * new.slot_bytes) == first[5].tobytes(), "it has the segment"


def keys_with_the_same_bits(buckets: int) -> tuple[int, int, int]:
    """Two keys that the index takes for each other in the first bucket of both, which have another second one, and a third of that bucket."""
    keys = np.arange(500_000)
    hashed = mix_all(keys)
    place = lambda hashed: (hashed >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)  # noqa: E731
    first, second, tags = place(hashed), place(hashed * ssd_index._S0), hashed & np.uint64((1 << 24) - 1)
    order = np.argsort(tags, kind="stable")
    pairs = np.stack([order[:-1], order[1:]])[:, tags[order[:-1]] == tags[order[1:]]]
    apart = (first[pairs[0]] == first[pairs[1]]) & (second[pairs[0]] != second[pairs[1]])
    one, other = pairs[:, apart & (first[pairs[0]] != second[pairs[0]])][:, 0]
    third = keys[(first == first[one]) & (tags != tags[one])][0]
    return int(one), int(other), int(third)


def test_what_a_fold_has_changed_goes_also_where_the_index_takes_another_key_for_it(cache: SsdCache) -> None:
    table = table_of(cache, 1)
    key, other, third = (np.array([key]) for key in keys_with_the_same_bits(table._index.size // ssd_index.WAYS))
    fetch(cache, table, third)
    fetch(cache, table, key)  # into its second bucket, which is emptier
    table.forget(third)
    fetch(cache, table, other)  # into the first
    assert held(table, other).all()
    table.raise_floor(1)
    table.forget(key)
    assert not held(table, key).any()


def test_a_slot_that_is_damaged_is_a_miss_and_is_mended(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(100)
    fetch(cache, table, keys)
    os.pwrite(cache.file._fd, b"\xff", 7 * table.slot_bytes + ssd_index.HEAD_BYTES + 9)
    assert held(table, keys).tolist() == [key != 7 for key in range(100)]
    fetch(cache, table, keys)
    assert held(table, keys).all()
    assert cache.status()["problem"] is None


def test_offers_that_come_faster_than_they_are_written_are_dropped(
    cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "WAITING_BYTES", 5000)
    table, keys = table_of(cache), np.arange(100)
    paused = Paused(cache)
    for part in range(10):
        table.offer(keys + 100 * part, some_rows(keys + 100 * part), 0)
    assert cache.status()["dropped_rows"] == 600
    assert cache.status()["waiting_bytes"] == 4 * 100 * ROW_BYTES
    paused.resume.set()
    cache.drain()
    assert held(table, np.arange(1000)).sum() == 400


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def off(cache: SsdCache, table: SsdTable, why: str) -> None:
    """It says why, holds nothing, gives its bytes back, and refuses nothing."""
    assert why in (cache.status()["problem"] or "")
    assert not fetch(cache, table, np.arange(100)).any()
    assert not held(table, np.arange(100)).any()
    assert file_bytes(cache) == 0


def test_a_full_disk_switches_it_off(cache: SsdCache, monkeypatch: pytest.MonkeyPatch) -> None:
    table, keys = table_of(cache), np.arange(100)
    fetch(cache, table, keys)
    monkeypatch.setattr(os, "pwrite", no_space)
    table.offer(keys + 100, some_rows(keys + 100), 0)
    cache.drain()
    off(cache, table, "No space left on device")


def test_what_is_being_written_when_it_is_switched_off_is_given_back(cache: SsdCache) -> None:
    table, keys = table_of(cache), np.arange(100)
    paused = Paused(cache)
    table.offer(keys, some_rows(keys), 0)
    assert paused.reached.wait(60)
    cache.file.switch_off(OSError("it is worn out"))
    paused.resume.set()
    cache.drain()
    off(cache, table, "it is worn out")


def test_a_disk_that_is_nearly_full_switches_it_off(open_cache: OpenCache) -> None:
    def check_room(nbytes: int) -> None:
        if cache.file.bytes_in_use + nbytes > 3 * cache.file.segment_bytes:
            raise DiskFull("no room for the cache on SSD")

    cache = open_cache(check_room=check_room)
    table = table_of(cache)
    fetch(cache, table, np.arange(100))
    assert held(table, np.arange(100)).all()
    table.offer(np.arange(FITS), some_rows(np.arange(FITS)), 0)
    cache.drain()
    off(cache, table, "no room for the cache on SSD")


def test_a_disk_that_cannot_be_read_switches_it_off(cache: SsdCache, monkeypatch: pytest.MonkeyPatch) -> None:
    table, keys = table_of(cache), np.arange(100)
    fetch(cache, table, keys)
    read_only = os.open(os.devnull, os.O_WRONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cache.file, "_fd", read_only)
            assert not held(table, keys).any()
        off(cache, table, "Bad file descriptor")
    finally:
        os.close(read_only)


def test_a_directory_that_cannot_be_written_switches_it_off(readers: ReaderPool, tmp_path: Path) -> None:
    cache = SsdCache(tmp_path / "none", SMALLEST, readers)
    table = table_of(cache)
    assert not fetch(cache, table, np.arange(100)).any()
    assert "No such file" in (cache.status()["problem"] or "")
    cache.close()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_to_it_no_answer_is_older_than_the_view(open_cache: OpenCache, seed: int) -> None:
    """Against a dict: look-ups, offers that were read under older views, folds, versions that come and go."""
    cache, rng = open_cache(), np.random.default_rng(seed)

    class Version:
        def __init__(self) -> None:
            self.table, self.seq = table_of(cache), 0
            self.salts = np.zeros(60_000, np.int32)  # of each key's row
            self.read: list[tuple[Keys, Rows, int]] = []  # what look-ups have fetched and not offered yet

        def rows(self, keys: Keys) -> Rows:
            rows = some_rows(keys)
            rows[:, 8:] = self.salts[keys].view(np.uint8).reshape(-1, 4)
            return rows

        def look_up(self) -> int:
            keys = np.unique(rng.zipf(1.1, 2000) % len(self.salts))
            rows, state = look_up(self.table, keys)
            there = state == Tier.DISK
            np.testing.assert_array_equal(rows[there], self.rows(keys)[there])
            self.read.append((keys[~there], self.rows(keys[~there]), self.seq))
            return int(there.sum())

        def offer(self) -> None:
            if self.read:
                self.table.offer(*self.read.pop(int(rng.integers(len(self.read)))))

        def fold(self) -> None:
            keys = np.unique(rng.zipf(1.1, 50) % len(self.salts))
            self.seq += 1
            self.table.raise_floor(self.seq)
            self.salts[keys] = self.seq
            self.table.forget(keys)

    versions, hits = [Version()], 0
    for _ in range(400):
        version = versions[int(rng.integers(len(versions)))]
        what = rng.random()
        if what < 0.5:
            hits += version.look_up()
            version.offer()
        elif what < 0.8:
            version.offer()
        elif what < 0.95:
            version.fold()
        elif what < 0.98 and len(versions) < 3:
            versions.append(Version())
        elif len(versions) > 1:
            versions.remove(version)
            cache.drop(version.table)
    cache.drain()
    assert hits > 1000
    assert cache.status()["problem"] is None
    assert cache.status()["used"] == sum(version.table.stats()["bytes"] for version in versions)
