"""The disk tier on a real RocksDB, over both kinds of base: reading, files, records, damage, merging, closing."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocksdict
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.counts import few_or_many
from tests.sealed_files import write_sealed
from tests.tiers.backing_contract import LIMITS, ROW_BYTES, BackingContract, get, some_rows
from tierstore.errors import Closed, Corruption, Locked, StorageError
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk import database
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import BASE, SealedTier, base_record
from tierstore.tiers.disk.sealed_file import SealedFile
from tierstore.tiers.disk.sst import SstFile, file_xxh3, sst_keys, write_sst
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys, Rows, Tier

CACHE = 1 << 20


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(3, chunk_keys=64)
    yield pool
    pool.close()


@pytest.fixture(params=[DiskTier, SealedTier], ids=["rocksdb", "sealed"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, readers: ReaderPool) -> Iterator[DiskTier]:
    tier = request.param.create(tmp_path / "db", block_cache_bytes=CACHE, reader=readers)
    yield tier
    tier.close()


def reopen(tier: DiskTier, readers: ReaderPool) -> DiskTier:
    complete(tier)
    tier.close()
    return open_again(tier, readers)


def open_again(tier: DiskTier, readers: ReaderPool) -> DiskTier:
    return type(tier).open(tier.path, block_cache_bytes=CACHE, reader=readers)


def complete(tier: DiskTier) -> None:
    """A sealed tier without a base is not one that can be opened: give it an empty one."""
    if isinstance(tier, SealedTier) and tier.record(BASE) is None:
        path = tier.path.parent / f"in-{next(_next_file)}.sst"
        tier.ingest([write_sst(path, records=base_record([]), delta=True)])


def base_file(tier: DiskTier) -> Path:
    (path,) = tier.path.glob("base/*.sealed" if isinstance(tier, SealedTier) else "*.sst")
    return path


_next_file = iter(range(10**9))


def ingest(
    tier: DiskTier,
    keys: Any,
    rows: Rows,
    deleted: np.ndarray | None = None,
    *,
    table_id: int = 1,
    records: dict[str, bytes] | None = None,
    delta: bool = True,
) -> SstFile | SealedFile | None:
    path = tier.path.parent / f"in-{next(_next_file)}.sst"
    if isinstance(tier, SealedTier) and not delta:
        sealed = write_sealed(path.with_suffix(".sealed"), table_id, np.asarray(keys), rows)
        tier.ingest([sealed, write_sst(path, records={**(records or {}), **base_record([sealed])}, delta=True)])
        return sealed
    tables = [(table_id, np.asarray(keys), rows, deleted)]
    if delta:
        tier.change(path, records or {}, tables)
        return None
    built = write_sst(path, records=records or {}, tables=tables, delta=False)
    tier.ingest([built])
    return built


class TestContract(BackingContract):
    def make(self, directory: Path) -> DiskTier:
        self.pool = ReaderPool(2, chunk_keys=128)
        return DiskTier.create(directory / "db", block_cache_bytes=CACHE, reader=self.pool)

    def put(self, store: Any, table_id: int, keys: Keys, rows: Rows, deleted: np.ndarray | None = None) -> None:
        ingest(store, keys, rows, deleted, table_id=table_id)


class TestContractSealed(TestContract):
    """Rows that were put into a tier over sealed files, of which the first are the base."""

    def make(self, directory: Path) -> DiskTier:
        self.pool = ReaderPool(2, chunk_keys=128)
        return SealedTier.create(directory / "db", block_cache_bytes=CACHE, reader=self.pool)

    def put(self, store: Any, table_id: int, keys: Keys, rows: Rows, deleted: np.ndarray | None = None) -> None:
        first = store.record(BASE) is None and deleted is None
        ingest(store, keys, rows, deleted, table_id=table_id, delta=not first)


# ---- sorted files ---------------------------------------------------------------------------------------------


def test_stored_keys_sort_by_table_and_then_by_number() -> None:
    numbers = np.array([LIMITS.min, -(2**40), -1, 0, 1, 255, 256, 2**40, LIMITS.max])
    stored = [key for table_id in (1, 2, 255, 256, 65535) for key in sst_keys(table_id, numbers)]
    assert stored == sorted(stored)
    assert {len(key) for key in stored} == {10}
    assert sst_keys(258, np.array([0]))[0] == b"\x01\x02\x80\x00\x00\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "at least one"),
        ([(1, np.array([2, 1]), np.zeros((2, 4), np.uint8), None)], "ascending"),
        ([(1, np.array([1, 1]), np.zeros((2, 4), np.uint8), None)], "distinct"),
        ([(1, np.array([1, 2]), np.zeros((1, 4), np.uint8), None)], "do not match"),
        ([(0, np.array([1]), np.zeros((1, 4), np.uint8), None)], "ascending ids"),
        ([(65536, np.array([1]), np.zeros((1, 4), np.uint8), None)], "out of range"),
    ],
)
def test_entries_that_would_not_sort_are_refused_and_leave_no_file(
    tmp_path: Path, tables: list[Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_sst(tmp_path / "bad.sst", tables=tables, delta=False)
    assert list(tmp_path.iterdir()) == []


def test_a_built_file_carries_its_own_digest_and_size(tmp_path: Path) -> None:
    keys = np.arange(10_000)
    built = write_sst(tmp_path / "a.sst", records={"x": b"1"}, tables=[(1, keys, some_rows(keys), None)], delta=False)
    assert built.entries == 10_001
    assert built.bytes == built.path.stat().st_size
    assert built.xxh3 == file_xxh3(built.path)
    with open(built.path, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    assert built.xxh3 != file_xxh3(built.path)


def test_a_directory_that_cannot_be_written_to_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="writing"):
        write_sst(tmp_path / "nowhere" / "a.sst", records={"x": b"1"}, delta=True)


def test_an_ingest_is_all_or_nothing(tier: DiskTier, tmp_path: Path) -> None:
    good = write_sst(tmp_path / "good.sst", records={"word": b"1"}, delta=True)
    with pytest.raises(StorageError, match="ingesting"):
        tier.ingest([good, replace(good, path=tmp_path / "missing.sst")])
    assert tier.record("word") is None
    assert good.path.exists(), "a file that was not taken stays where it was"
    tier.ingest([good])
    assert not good.path.exists(), "a file that was taken has moved"
    assert tier.record("word") == b"1"


# ---- records --------------------------------------------------------------------------------------------------


def test_records_and_watermark_travel_with_the_rows_and_survive(tier: DiskTier, readers: ReaderPool) -> None:
    assert tier.watermark() is None
    assert tier.record("digest") is None
    ingest(tier, [1], some_rows(np.array([1])), records={"watermark": b"41820", "digest": b"\x00\xff"})
    ingest(tier, [2], some_rows(np.array([2])), records={"watermark": b"41821"})
    tier = reopen(tier, readers)
    assert tier.watermark() == 41821
    assert tier.record("digest") == b"\x00\xff"
    ingest(tier, [3], some_rows(np.array([3])), records={"watermark": b"4e4"})
    with pytest.raises(Corruption, match="watermark"):
        tier.watermark()
    tier.close()


# ---- scans and verification -----------------------------------------------------------------------------------


def test_a_scan_gives_live_rows_in_order_without_those_of_other_tables(tier: DiskTier) -> None:
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(LIMITS.min, LIMITS.max, 10_000))
    keys[0], keys[-1] = LIMITS.min, LIMITS.max
    for table_id in (1, 2, 65535):
        ingest(tier, keys, some_rows(keys, table_id), table_id=table_id)
    deleted = rng.random(len(keys)) < 0.3
    ingest(tier, keys, some_rows(keys, 9), deleted, table_id=2, records={"watermark": b"1"})
    for table_id, want_keys, salt in ((1, keys, 1), (2, keys[~deleted], 9), (65535, keys, 65535), (3, keys[:0], 0)):
        batches = list(tier.scan(table_id, ROW_BYTES, batch_rows=3000))
        got = np.concatenate([k for k, _ in batches]) if batches else keys[:0]
        np.testing.assert_array_equal(got, want_keys)
        if batches:
            assert max(len(k) for k, _ in batches) <= 3000
            np.testing.assert_array_equal(np.concatenate([r for _, r in batches]), some_rows(want_keys, salt))


def test_a_scan_shows_the_tier_as_it_was_when_it_began(tier: DiskTier) -> None:
    keys = np.arange(10_000)
    ingest(tier, keys, some_rows(keys, 1))
    scan = tier.scan(1, ROW_BYTES, batch_rows=100)
    first = next(scan)
    ingest(tier, keys, some_rows(keys, 2))
    rest = list(scan)
    np.testing.assert_array_equal(np.concatenate([first[1], *(r for _, r in rest)]), some_rows(keys, 1))


def test_a_scan_of_what_was_opened_for_reading_goes_on_while_a_change_opens_it_for_writing_and_merges_its_files(
    tier: DiskTier, readers: ReaderPool
) -> None:
    """The scan began on more files than RocksDB opens by itself, and the merge removes them from the directory."""
    files, each = 24, 50
    complete(tier)
    keys = np.arange(files * each).reshape(files, each)
    where = tier.path.parent
    built = [
        write_sst(where / f"part-{i}.sst", tables=[(1, some, some_rows(some), None)], delta=True)
        for i, some in enumerate(keys)
    ]
    DiskTier.ingest(tier, built)
    tier = reopen(tier, readers)
    assert tier.stats()["files"] >= files

    scan = tier.scan(1, ROW_BYTES, batch_rows=each)
    begun = [next(scan)]
    before = set(tier.path.glob("*.sst"))
    ingest(tier, keys[:, 7], some_rows(keys[:, 7], salt=1))
    tier.compact_range()
    assert len(before & set(tier.path.glob("*.sst"))) < files - 16  # they are gone
    seen, rows = map(np.concatenate, zip(*begun, *scan, strict=True))
    np.testing.assert_array_equal(seen, keys.ravel())
    np.testing.assert_array_equal(rows, some_rows(keys.ravel()))
    tier.close()


def test_a_scan_beside_a_change_shares_its_block_cache_and_keeps_nothing_open_afterwards(
    tier: DiskTier, readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change opens RocksDB for writing, and a scan that has begun before goes on with what it has open."""
    keys = np.arange(10_000)
    ingest(tier, keys, some_rows(keys, 1))
    tier = reopen(tier, readers)
    scan = tier.scan(1, ROW_BYTES, batch_rows=100)
    next(scan)
    open_before = sorted(_open_files_below(tier.path))
    made, make = [], rocksdict.Cache
    monkeypatch.setattr(rocksdict, "Cache", lambda capacity: made.append(capacity) or make(capacity))
    gone = np.zeros(len(keys), np.bool_)
    tier.change(tier.path.parent / "change.sst", {"watermark": b"1"}, [(1, keys, some_rows(keys, 2), gone)])
    assert made == [], "of the bytes that a tier may have"
    scanned = np.concatenate([rows for _, rows in scan])
    np.testing.assert_array_equal(scanned, some_rows(keys, 1)[100:])
    names = _open_files_below(tier.path)
    assert len(names) < 2 * len(open_before) + 8
    assert sum(name.startswith("LOG") for name in names) == 1, "what the scan had open is closed"
    rows, state = get(tier, 1, keys)
    np.testing.assert_array_equal(rows, some_rows(keys, 2))
    assert (state == Tier.DISK).all()
    tier.close()


def test_verify_tells_what_was_built_from_what_is_there(tier: DiskTier) -> None:
    keys = np.arange(-5000, 5000)
    ingest(tier, keys, some_rows(keys), delta=False)
    whole = tier.verify({1: ROW_BYTES})[1]
    assert (whole.rows, whole.deleted, whole.digest) == (10_000, 0, digest_rows(keys, some_rows(keys)))
    changed = some_rows(keys)
    changed[17, 3] ^= 1
    ingest(tier, keys[17:18], changed[17:18])
    ingest(tier, keys[:3], some_rows(keys[:3]), np.array([False, True, False]))
    seen: list[int] = []
    now = tier.verify({1: ROW_BYTES}, seen.append)[1]
    kept = np.arange(10_000) != 1
    assert (now.rows, now.deleted, now.digest) == (9_999, 1, digest_rows(keys[kept], changed[kept]))
    assert seen[-1] == 10_000


@pytest.mark.parametrize("row_bytes", [1, 7, 8, 12, 64, 65])
def test_the_digest_sees_every_byte_and_every_swap_and_adds_up(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    keys, rows = np.arange(20), rng.integers(0, 256, (20, row_bytes), np.uint8)
    whole = digest_rows(keys, rows)
    assert whole == (digest_rows(keys[:7], rows[:7]) + digest_rows(keys[7:], rows[7:])) % 2**64
    order = rng.permutation(20)
    assert whole == digest_rows(keys[order], rows[order])
    for column in range(row_bytes):
        other = rows.copy()
        other[3, column] ^= 0x80
        assert digest_rows(keys, other) != whole
    swapped = keys.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    if not np.array_equal(rows[0], rows[1]):
        assert digest_rows(swapped, rows) != whole
    wider = np.zeros((20, row_bytes + 1), np.uint8)
    wider[:, :-1] = rows
    assert digest_rows(keys, wider) != whole, "a row is not the same row with a zero behind it"


def test_rows_of_another_length_are_named_and_the_others_answered(tier: DiskTier) -> None:
    keys = np.arange(300)
    ingest(tier, keys, some_rows(keys))
    ingest(tier, [77, 250], np.ones((2, ROW_BYTES + 1), np.uint8))
    rows, state = np.zeros((300, ROW_BYTES), np.uint8), np.zeros(300, np.uint8)
    with pytest.raises(Corruption, match=r"table 1 \(77, 250\).*another length") as failure:
        tier.get(1, keys, rows, state)
    assert list(failure.value.keys) == [77, 250]
    good = ~np.isin(keys, [77, 250])
    assert (state[good] == Tier.DISK).all()
    assert (state[~good] == Tier.PENDING).all()
    np.testing.assert_array_equal(rows[good], some_rows(keys[good]))
    with pytest.raises(Corruption, match="table 1, key 77"):
        list(tier.scan(1, ROW_BYTES))


# ---- damage ---------------------------------------------------------------------------------------------------


def test_a_damaged_block_costs_its_own_keys_only_and_verify_names_the_file(tier: DiskTier, readers: ReaderPool) -> None:
    keys = np.arange(20_000)
    ingest(tier, keys, some_rows(keys), delta=False)
    tier.close()
    sst = base_file(tier)
    with open(sst, "r+b") as file:
        file.seek(sst.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
    tier = open_again(tier, readers)
    rows, state = np.zeros((20_000, ROW_BYTES), np.uint8), np.zeros(20_000, np.uint8)
    with pytest.raises(Corruption, match=sst.name) as failure:
        tier.get(1, keys, rows, state)
    bad = np.isin(keys, failure.value.keys)
    assert 0 < bad.sum() < 1000, "one block"
    assert np.ptp(keys[bad]) == bad.sum() - 1, "its keys are neighbours"
    assert (state[bad] == Tier.PENDING).all()
    assert (state[~bad] == Tier.DISK).all()
    np.testing.assert_array_equal(rows[~bad], some_rows(keys[~bad]))
    with pytest.raises(Corruption, match=sst.name):
        tier.verify({1: ROW_BYTES})
    with pytest.raises(Corruption, match=sst.name):
        list(tier.scan(1, ROW_BYTES))
    tier.close()


def test_a_missing_file_is_refused_at_open(tier: DiskTier, readers: ReaderPool) -> None:
    keys = np.arange(100)
    ingest(tier, keys, some_rows(keys))
    tier.close()
    (sst,) = tier.path.glob("*.sst")
    sst.unlink()
    with pytest.raises(StorageError, match=sst.name):
        type(tier).open(tier.path, block_cache_bytes=CACHE, reader=readers)


# ---- many deltas ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_thousands_of_small_ingests_stay_bounded_and_right(tier: DiskTier, readers: ReaderPool) -> None:
    rng = np.random.default_rng(3)
    keys = np.arange(50_000)
    ingest(tier, keys, some_rows(keys), delta=False)
    salts = np.zeros(len(keys), np.int32)
    live = np.ones(len(keys), bool)
    most, sealed = 0, isinstance(tier, SealedTier)
    times = few_or_many(500, 2000)
    for number in range(1, times + 1):
        some = np.unique(rng.integers(0, len(keys), 20))
        deleted = rng.random(len(some)) < 0.2
        ingest(tier, some, some_rows(some, number), deleted, records={"watermark": b"%d" % number})
        salts[some], live[some] = number, ~deleted
        most = max(most, tier.stats()["l0_files"])
    assert most <= (36 if sealed else 24), "files that reads have to ask are bounded"
    for _ in range(2):
        rows, state = get(tier, 1, keys)
        np.testing.assert_array_equal(state == Tier.DISK, live)
        np.testing.assert_array_equal(np.ascontiguousarray(rows[live][:, 8:]).view(np.int32).ravel(), salts[live])
        assert tier.watermark() == times
        tier.compact_range()
        assert tier.stats()["l0_files"] == 0
        tier = reopen(tier, readers)
    tier.close()


# ---- opening and closing --------------------------------------------------------------------------------------


def test_a_tier_is_changed_by_one_that_is_open_alone(tier: DiskTier, tmp_path: Path, readers: ReaderPool) -> None:
    complete(tier)
    with contextlib.closing(open_again(tier, readers)) as other:
        with pytest.raises(Locked):
            ingest(other, [7], some_rows(np.array([7])))
        tier.close()
        ingest(other, [7], some_rows(np.array([7])))


def test_only_those_that_were_used_last_stay_open_and_any_is_opened_when_it_is_needed(
    tier: DiskTier, tmp_path: Path, readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MOST_UNUSED", 2)
    keys = np.arange(100)
    with contextlib.ExitStack() as stack:
        tiers = []
        for number in range(8):
            other = type(tier).create(tmp_path / f"tier-{number}", block_cache_bytes=CACHE, reader=readers)
            stack.callback(other.close)
            ingest(other, keys, some_rows(keys), records={"watermark": b"%d" % number})
            tiers.append(other)
        before = tiers[0].stats()
        assert sum(names.count("LOCK") for names in map(_open_files_below, [t.path for t in tiers])) <= 2
        for number, other in enumerate(tiers):
            assert other.watermark() == number
            rows, state = np.zeros((100, ROW_BYTES), np.uint8), np.zeros(100, np.uint8)
            other.get(1, keys, rows, state)
            assert np.array_equal(rows, some_rows(keys))
        assert tiers[0].stats()["bytes"] == before["bytes"]
        scan = tiers[0].scan(1, ROW_BYTES, batch_rows=10)
        next(scan)
        for other in tiers[1:]:
            ingest(other, keys, some_rows(keys + 1), records={"watermark": b"9"})
        assert sum(len(rows) for _, rows in scan) == 90, "what is being scanned stays open"
        assert [other.watermark() for other in tiers] == [0, *[9] * 7]


def _open_files_below(root: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if root in path.parents:
                found.append(path.name)
    return found


def test_create_wants_no_database_and_open_wants_one(tier: DiskTier, tmp_path: Path, readers: ReaderPool) -> None:
    tier.close()
    with pytest.raises(StorageError, match="opening"):
        type(tier).create(tier.path, block_cache_bytes=CACHE, reader=readers)
    with pytest.raises(StorageError, match="opening"):
        type(tier).open(tmp_path / "none", block_cache_bytes=CACHE, reader=readers)


def test_the_block_cache_keeps_its_size_over_a_reopen(tier: DiskTier, readers: ReaderPool) -> None:
    assert tier.stats()["block_cache_budget_bytes"] == CACHE
    tier = reopen(tier, readers)
    assert tier.stats()["block_cache_budget_bytes"] == CACHE
    tier.close()


def test_closing_under_a_scan_ends_it_and_gives_the_lock_back(tier: DiskTier, readers: ReaderPool) -> None:
    keys = np.arange(10_000)
    ingest(tier, keys, some_rows(keys))
    scan = tier.scan(1, ROW_BYTES, batch_rows=100)
    next(scan)
    again = reopen(tier, readers)  # while the old scan is still there
    with pytest.raises(Closed):
        next(scan)
    for call in (
        tier.stats,
        tier.watermark,
        tier.compact_range,
        tier.bytes_on_disk,
        lambda: tier.verify({1: ROW_BYTES}),
    ):
        with pytest.raises(Closed):
            call()
    again.close()


def test_a_dropped_tier_gives_its_disk_space_back(tier: DiskTier) -> None:
    keys = np.arange(100_000)
    built = ingest(tier, keys, some_rows(keys), delta=False)
    assert built.bytes <= tier.bytes_on_disk() <= built.bytes + 4096
    tier.close()
    shutil.rmtree(tier.path)
    assert not tier.path.exists()


def test_nothing_is_ever_written_to_the_log_of_rocksdb(tier: DiskTier) -> None:
    for number in range(5):
        ingest(tier, [number], some_rows(np.array([number])), records={"watermark": b"1"})
    assert sum(log.stat().st_size for log in tier.path.glob("*.log")) == 0


# ---- the reader pool ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_pool_covers_a_range_exactly_once(threads: int) -> None:
    pool = ReaderPool(threads, chunk_keys=10)
    for count in (0, 1, 9, 10, 11, 995):
        seen = np.zeros(count, int)

        def work(start: int, stop: int, seen: np.ndarray = seen) -> None:
            seen[start:stop] += 1

        pool.run(count, work)
        assert (seen == 1).all()
    pool.close()


def test_callers_get_on_when_the_pool_is_full_and_when_it_is_closed() -> None:
    """All helpers are held up; other callers must finish without them."""
    pool = ReaderPool(2, chunk_keys=1)
    release = threading.Event()
    inside = threading.Semaphore(0)

    def block(start: int, stop: int) -> None:
        inside.release()
        assert release.wait(30)

    blocked = threading.Thread(target=pool.run, args=(3, block))
    blocked.start()
    for _ in range(3):  # the caller and both helpers
        assert inside.acquire(timeout=30)
    done: list[int] = []
    pool.run(20, lambda start, stop: done.append(start))
    assert sorted(done) == list(range(20))
    release.set()
    blocked.join(30)
    pool.close()
    done.clear()
    pool.run(20, lambda start, stop: done.append(start))
    assert sorted(done) == list(range(20))


def test_an_error_in_a_chunk_reaches_the_caller_after_the_others_have_stopped() -> None:
    pool = ReaderPool(3, chunk_keys=1)
    running = []

    def work(start: int, stop: int) -> None:
        running.append(start)
        try:
            if start == 5:
                raise OSError("chunk 5")
        finally:
            running.remove(start)

    with pytest.raises(OSError, match="chunk 5"):
        pool.run(100, work)
    assert running == []
    pool.close()


# ---- the model test -------------------------------------------------------------------------------------------

_keys = st.integers(-20, 20) | st.sampled_from([LIMITS.min, LIMITS.max])
_delta = st.dictionaries(_keys, st.one_of(st.none(), st.integers(0, 2**31 - 1)), min_size=1, max_size=12)


class DiskAgainstDict(RuleBasedStateMachine):
    """Ingests, reopens and compactions in any order leave what a dict would hold."""

    kind: type[DiskTier] = DiskTier

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = Path(tempfile.mkdtemp())
        self.readers = ReaderPool(1, chunk_keys=4)
        self.tier = self.kind.create(self.directory / "db", block_cache_bytes=CACHE, reader=self.readers)
        self.model: dict[int, dict[int, int]] = {1: {}, 2: {}}
        self.seq = 0

    @rule(first=_delta, second=_delta, base=st.booleans())
    def apply(self, first: dict[int, int | None], second: dict[int, int | None], base: bool) -> None:
        self.seq += 1
        tables = []
        for table_id, delta in ((1, first), (2, second)):
            keys = np.array(sorted(delta), np.int64)
            salts = [delta[int(key)] for key in keys]
            rows = np.concatenate([some_rows(keys[i : i + 1], salt or 0) for i, salt in enumerate(salts)])
            tables.append((table_id, keys, rows, np.array([salt is None for salt in salts])))
            for key, salt in delta.items():
                if salt is None:
                    self.model[table_id].pop(key, None)
                else:
                    self.model[table_id][key] = salt
        path = self.directory / f"{self.seq}.sst"
        records = {"watermark": b"%d" % self.seq}
        if base and self.kind is DiskTier:
            self.tier.ingest([write_sst(path, records=records, tables=tables, delta=False)])
        else:
            self.tier.change(path, records, tables)

    @rule()
    def reopen(self) -> None:
        self.tier = reopen(self.tier, self.readers)

    @rule()
    def compact_range(self) -> None:
        self.tier.compact_range()

    @rule()
    def compact(self) -> None:
        self.tier.compact(self.directory / "compact.sst", {}, dict.fromkeys(self.model, ROW_BYTES), lambda: False)

    @invariant()
    def reads_as_the_model(self) -> None:
        asked = np.array([LIMITS.min, *range(-21, 22), LIMITS.max])
        for table_id, model in self.model.items():
            rows, state = get(self.tier, table_id, asked)
            assert [bool(s == Tier.DISK) for s in state] == [int(key) in model for key in asked]
            held = np.array([key for key in asked if int(key) in model], np.int64)
            want = {int(key): some_rows(np.array([key]), model[int(key)])[0].tobytes() for key in held}
            assert {int(k): r.tobytes() for k, r in zip(asked, rows, strict=True) if int(k) in model} == want
            scanned = {
                int(k): r.tobytes()
                for keys, block in self.tier.scan(table_id, ROW_BYTES, batch_rows=5)
                for k, r in zip(keys, block, strict=True)
            }
            assert scanned == want
        assert self.tier.watermark() == (self.seq or None)

    def teardown(self) -> None:
        self.tier.close()
        self.readers.close()
        shutil.rmtree(self.directory)


class SealedAgainstDict(DiskAgainstDict):
    """The same over a base of sealed files, which holds every other key of both tables."""

    kind = SealedTier

    def __init__(self) -> None:
        super().__init__()
        keys, built = np.array([LIMITS.min, *range(-20, 21, 2)]), []
        for table_id in self.model:
            path = self.directory / f"base-{table_id}.sealed"
            built.append(write_sealed(path, table_id, keys, some_rows(keys, table_id)))
            self.model[table_id] = dict.fromkeys(keys.tolist(), table_id)
        records = write_sst(self.directory / "base.sst", records=base_record(built), delta=True)
        self.tier.ingest([*built, records])


TestDiskAgainstDict = DiskAgainstDict.TestCase
TestSealedAgainstDict = SealedAgainstDict.TestCase
TestDiskAgainstDict.settings = TestSealedAgainstDict.settings = settings(
    max_examples=few_or_many(6, 20), stateful_step_count=15
)
