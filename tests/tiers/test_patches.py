"""Sealed patches: changed rows as kernels read them, whatever fails, is killed, damaged, lost or changed by another release."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import few_or_many
from tests.engine.test_torn import Before, CutOff
from tests.formats.disks import FailingDisk
from tests.tiers.backing_contract import ROW_BYTES, get, some_rows
from tests.tiers.test_sealed import CACHE, KEYS, again, flip, make
from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.tiers.disk import patches, sealed, sealed_rows
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import SealedTier
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Tier

Twin = dict[int, int | None]  # of changed keys the salt of their rows, None where they are deleted
TABLES = {1: ROW_BYTES}


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(2)
    yield pool
    pool.close()


@pytest.fixture
def tier(tmp_path: Path, readers: ReaderPool) -> Iterator[SealedTier]:
    tier = make(tmp_path / "db", readers, {1: KEYS}, files=2)
    yield tier
    tier.close()


def change(tier: DiskTier, twin: Twin, seq: int, keys: Any, deleted: Any = ()) -> None:
    """Change rows as a fold does, and the twin with them once it is done."""
    keys = np.unique(np.asarray(keys, np.int64))
    gone = np.isin(keys, np.asarray(deleted, np.int64))
    tier.change(tier.path.parent / "delta.sst", {"watermark": b"%d" % seq}, [(1, keys, some_rows(keys, seq), gone)])
    twin |= {int(key): None if of else seq for key, of in zip(keys, gone, strict=True)}


def compact(tier: SealedTier, give_up: Callable[[], bool] = never) -> None:
    tier.compact(tier.path.parent / "compact.sst", {"watermark": tier.record("watermark") or b"0"}, TABLES, give_up)


def check(tier: SealedTier, twin: Twin) -> None:
    asked = np.unique(np.concatenate([KEYS[::37], np.array(list(twin), np.int64), np.array(list(twin), np.int64) + 1]))
    rows, state = get(tier, 1, asked)
    base = set(KEYS.tolist())
    for key, row, where in zip(asked.tolist(), rows, state, strict=True):
        salt = twin.get(key, 0 if key in base else None)
        assert where == (Tier.ABSENT if salt is None else Tier.DISK), key
        if salt is not None:
            assert row.tobytes() == some_rows(np.array([key]), salt)[0].tobytes(), key


def reads_alone(tier: SealedTier, keys: Any) -> np.ndarray:
    """States after kernels have read keys alone, without RocksDB."""
    keys = np.asarray(keys, np.int64)
    by = tier.read_by(1, ROW_BYTES)
    assert by is not None
    rows, state, trouble = (
        np.empty((len(keys), ROW_BYTES), np.uint8),
        np.zeros(len(keys), np.uint8),
        np.zeros(len(keys), np.int32),
    )
    places = by.base_at, by.patches.ctypes.data, len(by.patches), by.changes
    assert sealed_rows.look_up(*places, keys, rows.ctypes.data, ROW_BYTES, state, trouble, 0) == 0
    return state


def changed_much(tier: SealedTier, count: int = 30) -> Twin:
    twin: Twin = {}
    rng = np.random.default_rng(count)
    for seq in range(1, count + 1):
        keys = rng.choice(np.arange(-12_000, 12_000), 300)
        change(tier, twin, seq, keys, keys[::7])
    return twin


def test_kernels_read_changed_rows_without_rocksdb(tier: SealedTier, readers: ReaderPool) -> None:
    twin = changed_much(tier)
    check(tier, twin)
    assert tier.compaction_due
    compact(tier)
    assert not tier.compaction_due
    assert tier.stats()["patches"] < 10
    check(tier, twin)
    tier.close()
    opened = again(tier, readers)
    check(opened, twin)
    changed = np.sort(np.array(list(twin)))
    expected = [Tier.ABSENT if twin[key] is None else Tier.DISK for key in changed.tolist()]
    assert reads_alone(opened, changed).tolist() == expected
    opened.close()


def test_a_key_that_is_deleted_and_comes_back_is_the_newest_one(tier: SealedTier) -> None:
    twin: Twin = {}
    for seq, gone in ((1, []), (2, [5, 4]), (3, []), (4, [4])):
        change(tier, twin, seq, [4, 5, 6] if seq != 3 else [5], gone)
        check(tier, twin)
    compact(tier)
    check(tier, twin)
    assert twin == {4: None, 5: 4, 6: 4}


def test_a_table_that_the_base_has_no_rows_of_is_read_by_kernels_too(tmp_path: Path, readers: ReaderPool) -> None:
    tier = make(tmp_path / "db", readers, {1: KEYS})
    keys = np.arange(10)
    tier.change(tmp_path / "d.sst", {"watermark": b"1"}, [(2, keys, some_rows(keys, 9), keys == 3)])
    by = tier.read_by(2, ROW_BYTES)
    assert by is not None
    assert by.changes == sealed_rows.ALL
    rows, state = get(tier, 2, np.arange(12))
    assert state.tolist() == [Tier.DISK] * 3 + [Tier.ABSENT] + [Tier.DISK] * 6 + [Tier.ABSENT] * 2
    np.testing.assert_array_equal(rows[4:10], some_rows(keys[4:], 9))
    tier.close()


def test_what_a_reader_holds_is_readable_after_it_was_merged_and_removed(tier: SealedTier) -> None:
    twin: Twin = {}
    for seq in range(1, 5):
        change(tier, twin, seq, np.arange(seq * 100, seq * 100 + 300))
    held = tier.read_by(1, ROW_BYTES)
    assert held is not None
    before = {path.name for path in (tier.path / patches.FOLDER).iterdir()}
    compact(tier)
    change(tier, twin, 5, [7])
    assert not before & {path.name for path in (tier.path / patches.FOLDER).iterdir()}
    keys = np.arange(200, 210)
    rows, state, trouble = np.empty((10, ROW_BYTES), np.uint8), np.zeros(10, np.uint8), np.zeros(10, np.int32)
    places = held.base_at, held.patches.ctypes.data, len(held.patches), held.changes
    assert sealed_rows.look_up(*places, keys, rows.ctypes.data, ROW_BYTES, state, trouble, 32) == 0
    np.testing.assert_array_equal(rows, some_rows(keys, 2))
    descriptors = len(os.listdir("/proc/self/fd"))
    del held
    assert len(os.listdir("/proc/self/fd")) == descriptors - 4


def test_a_merge_that_is_given_up_changes_nothing(tier: SealedTier) -> None:
    twin = changed_much(tier, 4)
    names = {path.name for path in (tier.path / patches.FOLDER).iterdir()}
    compact(tier, lambda: True)
    assert {path.name for path in (tier.path / patches.FOLDER).iterdir()} == names
    check(tier, twin)


def test_every_operation_of_the_disk_may_fail(tmp_path: Path, readers: ReaderPool) -> None:
    """What fails is as if it had not begun, or done; and the next change and the next start are right."""
    (tmp_path / "one").mkdir()
    tier = make(tmp_path / "one" / "db", readers, {1: KEYS[:2000]})
    twin: Twin = {}
    for seq in (1, 2, 3):
        change(tier, twin, seq, KEYS[seq : 60 * seq : 3], KEYS[seq : 60 * seq : 9])
    tier.close()
    number = 0
    while True:
        at = tmp_path / f"at-{number}"
        shutil.copytree(tmp_path / "one", at)
        tier, mine = SealedTier.open(at / "db", block_cache_bytes=CACHE, reader=readers), dict(twin)
        disk = FailingDisk(number)
        with files.use(disk):
            try:
                change(tier, mine, 4, KEYS[3:90:5], KEYS[3:90:10])
                compact(tier)
            except StorageError:
                assert tier.watermark() in (3, 4)
        check_small(tier, mine)
        change(tier, mine, 5, KEYS[5:50:4])
        compact(tier)
        check_small(tier, mine)
        tier.close()
        tier = SealedTier.open(at / "db", block_cache_bytes=CACHE, reader=readers)
        check_small(tier, mine)
        tier.close()
        if disk.operations <= number:
            break
        number += 1
    assert number > 8


def check_small(tier: SealedTier, twin: Twin) -> None:
    asked = KEYS[:120]
    rows, state = get(tier, 1, asked)
    for key, row, where in zip(asked.tolist(), rows, state, strict=True):
        salt = twin.get(key, 0)
        assert where == (Tier.ABSENT if salt is None else Tier.DISK), key
        if salt is not None:
            assert row.tobytes() == some_rows(np.array([key]), salt)[0].tobytes(), key


def test_a_change_that_is_interrupted_anywhere_is_done_or_was_never_begun(tier: SealedTier) -> None:
    """Rows of kernels and of RocksDB are of one moment, whatever comes in between two lines."""
    twin: Twin = {}
    change(tier, twin, 1, KEYS[:50])
    n, steps = 0, few_or_many(7, 1)
    while True:
        seq, before = n + 2, dict(twin)
        interrupt = Before(n, sealed, patches)
        try:
            with interrupt:
                change(tier, twin, seq, KEYS[n % 40 : n % 40 + 20], KEYS[n % 40 : n % 40 + 20 : 3])
        except CutOff:
            pass
        if tier.watermark() == seq and twin == before:
            keys = KEYS[n % 40 : n % 40 + 20]
            twin |= {int(key): None if i % 3 == 0 else seq for i, key in enumerate(keys)}
        check_small(tier, twin)
        if interrupt.ended:
            break
        compact(tier)  # else there would be ever more lines
        n += steps
    assert n > 40
    compact(tier)
    check_small(tier, twin)


@pytest.mark.parametrize("part", ["block", "filter", "index", "cut", "gone"])
def test_a_patch_that_is_damaged_is_read_from_rocksdb_and_made_again(
    tier: SealedTier, readers: ReaderPool, part: str
) -> None:
    twin = changed_much(tier, 3)
    tier.close()
    rows = sorted((tier.path / patches.FOLDER).glob("*.rows"))[1]
    if part == "filter":
        flip(rows.with_suffix(".filter"), 3)
    elif part == "gone":
        rows.unlink()
    elif part == "cut":
        os.truncate(rows, rows.stat().st_size - 10)
    else:
        flip(rows, 4096 + 20 if part == "block" else rows.stat().st_size - 100)
    opened = again(tier, readers)
    if part == "block":
        with pytest.raises(Corruption, match=rows.name):
            opened.verify(TABLES)
    check(opened, twin)
    assert opened.compaction_due
    compact(opened)
    assert not opened.compaction_due
    check(opened, twin)
    opened.verify(TABLES)
    changed = np.sort(np.array(list(twin)))
    assert (reads_alone(opened, changed) != Tier.PENDING).all()
    opened.close()


@pytest.mark.parametrize("patch_too", [False, True])
def test_a_damaged_base_loses_no_key_that_deltas_changed(
    tier: SealedTier, readers: ReaderPool, patch_too: bool
) -> None:
    twin: Twin = {}
    file = tier._base[1].files[1]
    block = KEYS[5000:][: file.per_block]
    changed = block[10:40:2]
    change(tier, twin, 1, changed, changed[:3])
    tier.close()
    flip(file.path, 4096 + 20)
    if patch_too:
        flip(next((tier.path / patches.FOLDER).glob("*.rows")), 4096 + 20)
    opened = again(tier, readers)
    rows, state = np.empty((len(block), ROW_BYTES), np.uint8), np.zeros(len(block), np.uint8)
    with pytest.raises(Corruption, match=f"{file.path.name}, block 0") as damage:
        opened.get(1, block, rows, state)
    assert damage.value.keys == np.setdiff1d(block, changed).tolist()
    there = np.isin(block, changed)
    assert state[there].tolist() == [Tier.ABSENT] * 3 + [Tier.DISK] * (len(changed) - 3)
    np.testing.assert_array_equal(rows[there][3:], some_rows(changed[3:], 1))
    assert opened.compaction_due is patch_too
    opened.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_changed_rows_over_a_base_of_several_partitions_are_the_newest(
    tmp_path: Path, readers: ReaderPool, parts: int
) -> None:
    """Keys are asked for by partition, so that those of a patch ascend in runs."""
    tier = make(tmp_path / "db", readers, {1: KEYS}, parts=parts)
    twin: Twin = {}
    rng = np.random.default_rng(1)
    for seq in range(1, 8):
        keys = rng.choice(np.arange(-12_000, 12_000), 300)
        change(tier, twin, seq, keys, keys[::7])
    for count in (1, 3, 17, 200):
        some = np.sort(rng.choice(np.array(list(twin)), count, replace=False))
        rows, state = get(tier, 1, some)
        expected = [Tier.ABSENT if twin[key] is None else Tier.DISK for key in some.tolist()]
        assert state.tolist() == expected
        for i, key in enumerate(some.tolist()):
            if (salt := twin[key]) is not None:
                assert rows[i].tobytes() == some_rows(some[i : i + 1], salt)[0].tobytes()
    check(tier, twin)
    tier.close()


def test_unflushed_patches_that_lost_their_blocks_answer_nothing_wrong(tier: SealedTier, readers: ReaderPool) -> None:
    """Nothing waits for the drive to have a patch: after power has failed its blocks may be zeros."""
    twin = changed_much(tier, 3)
    tier.close()
    for path in (tier.path / patches.FOLDER).glob("*.rows"):
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(bytes(4096))
    opened = again(tier, readers)
    check(opened, twin)
    compact(opened)
    check(opened, twin)
    opened.close()


def test_rows_that_a_release_without_patches_has_changed_are_not_read_from_them(
    tier: SealedTier, readers: ReaderPool
) -> None:
    twin = changed_much(tier, 3)
    change_without_patches(tier, twin, 4)
    tier.close()
    opened = again(tier, readers)
    assert opened.compaction_due
    check(opened, twin)
    compact(opened)
    check(opened, twin)
    opened.close()


def change_without_patches(tier: SealedTier, twin: Twin, seq: int) -> None:
    """As a release did it that knew nothing of patches."""
    keys = np.sort(np.array(list(twin)))[::2]
    tier._change([(1, keys)], b"%d" % seq)
    DiskTier.change(
        tier, tier.path.parent / "old.sst", {"watermark": b"%d" % seq}, [(1, keys, some_rows(keys, seq), None)]
    )
    twin |= dict.fromkeys(keys.tolist(), seq)


def test_files_that_no_record_names_are_removed_at_the_next_start(tier: SealedTier, readers: ReaderPool) -> None:
    twin = changed_much(tier, 4)
    compact(tier)  # merged, and no change has come since
    named = {entry["name"] for entry in json.loads(tier.record(patches.RECORD) or b"")["files"]}
    tier.close()
    folder = tier.path / patches.FOLDER
    assert {path.name for path in folder.glob("*.rows")} > named
    opened = again(tier, readers)
    assert {path.name for path in folder.glob("*.rows")} == named
    check(opened, twin)
    change(opened, twin, 9, [1, 2, 3])
    check(opened, twin)
    opened.close()


def test_a_restored_tier_without_its_patches_gets_them_again(tier: SealedTier, readers: ReaderPool) -> None:
    twin = changed_much(tier, 5)
    tier.close()
    shutil.rmtree(tier.path / patches.FOLDER)
    opened = again(tier, readers)
    check(opened, twin)
    calls = iter([False, True])
    compact(opened, lambda: next(calls, True))  # broken off
    check(opened, twin)
    compact(opened)
    check(opened, twin)
    assert (reads_alone(opened, np.sort(np.array(list(twin)))) != Tier.PENDING).all()
    opened.close()


def test_patches_are_made_again_however_often_that_has_to_stop_for_deltas(
    tier: SealedTier, readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore under load: each time goes on from where the one before stopped, with changes in between."""
    monkeypatch.setattr(patches, "LEAST_COPIED", 1000)
    monkeypatch.setattr(sealed, "_COPY_ROWS", 500)
    twin = changed_much(tier)
    tier.close()
    shutil.rmtree(tier.path / patches.FOLDER)
    opened = again(tier, readers)
    left, seq = list(range(20)), 100
    while not opened._patches.is_whole:
        left.pop()
        compact(opened, lambda: True)
        seq += 1
        change(opened, twin, seq, [seq, *list(twin)[:: seq % 7 + 2]], [seq - 1, *list(twin)[:40:3]])
        check(opened, twin)
    assert len(left) < 18, "it took some tries"
    assert (reads_alone(opened, np.sort(np.array(list(twin)))) != Tier.PENDING).all()
    compact(opened)
    opened.close()
    opened = again(opened, readers)
    check(opened, twin)
    assert (reads_alone(opened, np.sort(np.array(list(twin)))) != Tier.PENDING).all()
    opened.close()


def test_a_merge_holds_no_more_of_its_keys_than_a_piece(tier: SealedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_PIECE_BYTES", 0)  # then 1,024 rows at a time
    monkeypatch.setattr(patches, "_KEPT_KEYS", 4096)
    each, twin = 60_000, dict[int, int | None]()
    for seq in range(1, 5):
        change(tier, twin, seq, np.arange(each) * 4 + seq)
    tracemalloc.start()
    compact(tier)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tier.stats()["patches"] == 1
    keys_bytes, filter_bytes = 8 * 4 * each, tier.stats()["patch_memory_bytes"]
    assert most < filter_bytes + keys_bytes // 3
    check(tier, twin)
