"""Sealed base files: the format, look-ups against a plain twin, damage of every kind, and the filter of changed keys."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tests.sealed_files import write_sealed
from tests.tiers.backing_contract import LIMITS, ROW_BYTES, get, some_rows
from tierstore import open_files
from tierstore.errors import Corruption, StorageError
from tierstore.formats.keys import partition_of
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk import sealed_rows
from tierstore.tiers.disk.block_shape import block_shape
from tierstore.tiers.disk.changed_keys import ChangedKeys
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import SealedTier, base_record
from tierstore.tiers.disk.sealed_file import SealedFile, open_sealed, read_blocks
from tierstore.tiers.disk.sealed_table import SealedTable
from tierstore.tiers.disk.sst import write_sst
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys, Rows, Tier

CACHE = 1 << 20
GOLDEN = Path(__file__).parents[2] / "schema/golden/sealed/five-rows.sealed"
KEYS = np.arange(-10_000, 10_000, 2)


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(3)
    yield pool
    pool.close()


def pieces(keys: Keys, files: int, parts: int) -> list[npt.NDArray[np.int64]]:
    """Which of `keys` each file of a base has: so many files of each partition of so many."""
    of = partition_of(keys, parts)
    split = [np.array_split(np.flatnonzero(of == part), files) for part in range(parts)]
    return [piece for part in split for piece in part if len(piece)]


def make(path: Path, readers: ReaderPool, tables: dict[int, Keys], files: int = 1, parts: int = 1) -> SealedTier:
    """A tier whose base holds `some_rows` of these keys, by table, in so many files each, or so many of each partition."""
    built: list[SealedFile] = []
    for table_id, keys in tables.items():
        for number, piece in enumerate(pieces(keys, files, parts)):
            name = path.parent / f"base-{table_id}-{number}.sealed"
            built.append(write_sealed(name, table_id, keys[piece], some_rows(keys[piece])))
    tier = SealedTier.create(path, block_cache_bytes=CACHE, reader=readers)
    records = {"watermark": b"0", **base_record(built, parts)}
    tier.ingest([*built, write_sst(path.parent / "records.sst", records=records, delta=True)])
    return tier


@pytest.fixture
def tier(tmp_path: Path, readers: ReaderPool) -> Iterator[SealedTier]:
    tier = make(tmp_path / "db", readers, {1: KEYS}, files=2)
    yield tier
    tier.close()


def again(tier: SealedTier, readers: ReaderPool) -> SealedTier:
    return SealedTier.open(tier.path, block_cache_bytes=CACHE, reader=readers)


def change(tier: SealedTier, keys: Any, salt: int, deleted: np.ndarray | None = None, table_id: int = 1) -> None:
    keys = np.asarray(keys, np.int64)
    tier.change(tier.path.parent / f"delta-{salt}.sst", {}, [(table_id, keys, some_rows(keys, salt), deleted)])


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


# ---- the format -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [1, 2, 12, 64, 65, 128, 511, 512, 1000, 2048, 4072, 4080, 4081, 9000, 100_000])
def test_a_block_holds_a_row_and_wastes_little(row_bytes: int) -> None:
    size, rows = block_shape(row_bytes)
    assert size % 4096 == 0
    assert rows >= 1
    assert rows * (row_bytes + 8) + 8 <= size < (rows + 1) * (row_bytes + 8) + 8 + 4096
    if row_bytes < 4096:
        assert rows * (row_bytes + 8) / size >= 0.875


def plain_checksum(block: bytes, number: int) -> int:
    """What schema/layout.md says of a block's checksum, in Python's own numbers."""
    ones = 2**64 - 1
    s = [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5]

    def fold(x: int, y: int) -> int:
        return ((x * y) & ones) ^ ((x * y) >> 64)

    lanes = list(s)
    words = [*struct.unpack(f"<{len(block) // 8 - 1}Q", block[:-8]), number]
    for i in range(0, len(words), 8):
        for lane in range(4):
            first, second = words[i + 2 * lane], words[i + 2 * lane + 1]
            lanes[lane] = fold(first ^ s[lane] ^ lanes[lane], second ^ s[(lane + 1) % 4])
    x = fold(lanes[0] ^ s[1], lanes[1] ^ s[2]) ^ fold(lanes[2] ^ s[3], lanes[3] ^ s[0]) ^ len(block)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = ((x ^ (x >> 33)) * factor) & ones
    return x ^ (x >> 33)


def golden_rows() -> tuple[Keys, Rows]:
    keys = np.array([LIMITS.min, -1, 0, 7, LIMITS.max])
    return keys, (np.arange(2000) * 7 + np.arange(5)[:, None]).astype(np.uint8)


def test_the_golden_file_is_to_the_byte_what_the_layout_says() -> None:
    raw = GOLDEN.read_bytes()
    keys, rows = golden_rows()
    assert len(raw) == 4096 + 3 * 4096 + 3 * 8 + 48
    assert struct.unpack_from("<8sIIIII", raw) == (b"TIERSEAL", 1, 3, 2000, 4096, 2)
    assert not any(raw[28:4096])
    for number in range(3):
        block = raw[4096 * (1 + number) : 4096 * (2 + number)]
        count = min(2, 5 - 2 * number)
        mine = slice(2 * number, 2 * number + count)
        assert block[: 8 * count] == keys[mine].tobytes()
        assert block[16 : 16 + 2000 * count] == rows[mine].tobytes()
        assert not any(block[16 + 2000 * count : -8])
        assert struct.unpack("<Q", block[-8:])[0] == plain_checksum(block, number)
    first_keys = raw[4 * 4096 : 4 * 4096 + 24]
    assert first_keys == keys[::2].tobytes()
    rows_n, blocks, first, last, checksum, end = struct.unpack("<QQqqQ8s", raw[-48:])
    assert (rows_n, blocks, first, last, end) == (5, 3, LIMITS.min, LIMITS.max, b"LAESREIT")
    zeroed = raw[-48:-16] + bytes(8) + end
    assert checksum == xxhash.xxh3_64_intdigest(raw[:4096] + first_keys + zeroed)


def test_a_file_of_the_same_keys_and_other_rows_does_not_pass_for_it(tmp_path: Path) -> None:
    keys, rows = golden_rows()
    built = write_sealed(tmp_path / "right.sealed", 3, keys, rows)
    other = write_sealed(tmp_path / "other.sealed", 3, keys, rows ^ 1)
    assert built.bytes == other.bytes
    with pytest.raises(Corruption, match="do not match their checksum"):
        open_sealed(tmp_path / "other.sealed", xxh3=built.xxh3, size=built.bytes)


def test_the_golden_file_is_read_and_what_is_written_today_differs_by_the_hash_of_its_content(tmp_path: Path) -> None:
    """The golden file is of a release that had no such hash."""
    keys, rows = golden_rows()
    built = write_sealed(tmp_path / "now.sealed", 3, keys, rows)
    golden, now = GOLDEN.read_bytes(), (tmp_path / "now.sealed").read_bytes()
    assert now[:28] + bytes(8) + now[36:-16] + golden[-16:-8] + now[-8:] == golden
    assert struct.unpack_from("<Q", now, 28)[0] == xxhash.xxh3_64_intdigest(now[4096 : 4 * 4096])
    file = open_sealed(GOLDEN, xxh3=f"{struct.unpack('<Q', golden[-16:-8])[0]:016x}", size=built.bytes)
    got_keys, got_rows = read_blocks(file, 0, 3, None)
    np.testing.assert_array_equal(got_keys, keys)
    np.testing.assert_array_equal(got_rows, rows)
    os.close(file.fd)


@pytest.mark.parametrize("keys", [[], [2, 1], [1, 1]])
def test_keys_that_do_not_ascend_are_refused_and_leave_no_file(tmp_path: Path, keys: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        write_sealed(tmp_path / "bad.sealed", 1, np.array(keys, np.int64), np.zeros((len(keys), 4), np.uint8))
    assert list(tmp_path.iterdir()) == []


# ---- look-ups -------------------------------------------------------------------------------------------------

_codes = st.integers(-300, 300) | st.sampled_from([LIMITS.min, LIMITS.max])


@settings(max_examples=few_or_many(20, 60))
@given(
    held=st.sets(_codes, min_size=1, max_size=200),
    asked=st.sets(_codes, max_size=200),
    row_bytes=st.sampled_from([1, 8, 300, 2040, 5000]),
    files=st.integers(1, 4),
    parts=st.sampled_from([1, 2, 5, 64]),
)
def test_look_ups_answer_as_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory, held: set[int], asked: set[int], row_bytes: int, files: int, parts: int
) -> None:
    directory = tmp_path_factory.mktemp("sealed")
    keys = np.array(sorted(held), np.int64)
    rows = np.random.default_rng(len(held)).integers(0, 256, (len(keys), row_bytes), np.uint8)
    opened = []
    for number, part in enumerate(pieces(keys, files, parts)):
        built = write_sealed(directory / f"{number}", 1, keys[part], rows[part])
        opened.append(open_sealed(built.path, xxh3=built.xxh3, size=built.bytes))
    table = SealedTable(opened, parts)
    wanted = np.array(sorted(asked), np.int64)
    wanted = wanted[np.argsort(partition_of(wanted, parts), kind="stable")]
    got, state = np.full((len(wanted), row_bytes), 0xEE, np.uint8), np.zeros(len(wanted), np.uint8)
    trouble, base = np.zeros(len(wanted), np.int32), table.words(0)
    at = base.ctypes.data, 0, 0, sealed_rows.BASE_ALONE
    assert sealed_rows.look_up(*at, wanted, got.ctypes.data, row_bytes, state, trouble, 0) == 0
    assert not trouble.any()
    twin = dict(zip(keys.tolist(), rows, strict=True))
    for key, row, where in zip(wanted.tolist(), got, state, strict=True):
        assert where == (Tier.DISK if key in twin else Tier.ABSENT)
        assert (row == twin.get(key, 0xEE)).all()
    table.close()


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [2, 7, 64])
@pytest.mark.parametrize("batch", [1, 100, 5000])
def test_a_base_in_parts_is_scanned_by_key_as_one_that_is_whole(
    tmp_path: Path, readers: ReaderPool, parts: int, batch: int
) -> None:
    keys = np.random.default_rng(parts).permutation(np.arange(-(1 << 62), 1 << 62, 1 << 50))[:3000]
    keys = np.sort(keys)
    tiers = []
    for n in (1, parts):
        (tmp_path / str(n)).mkdir()
        tiers.append(make(tmp_path / f"{n}/db", readers, {1: keys}, files=2, parts=n))
        change(tiers[-1], keys[::9], 5)
    whole, cut = ([*tier.scan(1, ROW_BYTES, batch)] for tier in tiers)
    assert max(len(found) for found, _ in cut) <= max(batch, 2 * parts)
    for column in (0, 1):
        np.testing.assert_array_equal(*(np.concatenate([piece[column] for piece in each]) for each in (whole, cut)))
    low, high = int(keys[700]) + 1, int(keys[2000])
    sums = [tier.sum_up(1, ROW_BYTES, low, high, report=lambda _: None) for tier in tiers]
    assert sums[0] == sums[1]
    assert sums[0].rows > 1000
    for tier in tiers:
        np.testing.assert_array_equal(tier.codes_from(1, ROW_BYTES, low, 50), keys[701:751])
        tier.close()


def test_a_file_of_several_partitions_or_out_of_their_order_is_damage(tmp_path: Path, readers: ReaderPool) -> None:
    (tmp_path / "db").mkdir()
    tier = make(tmp_path / "db/db", readers, {1: KEYS}, parts=3)
    files = tier._base[1].files
    for wrong, parts in ((files[:1], 2), (files[:1], 64), (files[::-1], 3), ([files[0], files[0]], 3)):
        with pytest.raises(Corruption, match=r"partitions|begin before"):
            SealedTable(wrong, parts)
    rows, state = get(tier, 1, KEYS)
    assert (state == Tier.DISK).all()
    np.testing.assert_array_equal(rows, some_rows(KEYS))
    # a damaged block of one part fails its own keys alone, and is named
    with open(files[1].path, "r+b") as file:
        file.seek(5000)
        file.write(b"!")
    with pytest.raises(Corruption, match=rf"{files[1].path.name}, block 0: its checksum") as damage:
        get(tier, 1, KEYS)
    lost = np.array(damage.value.keys)
    assert set(partition_of(lost, 3)) == {1}
    tier.close()


def test_what_is_not_in_the_systems_cache_is_read_as_well(tier: SealedTier) -> None:
    for file in tier._base[1].files:
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    rows, state = get(tier, 1, KEYS)
    assert (state == Tier.DISK).all()
    np.testing.assert_array_equal(rows, some_rows(KEYS))


@pytest.mark.parametrize("parts", [1, 3])
def test_keys_in_order_are_as_their_rows_lie_in_the_files(tmp_path: Path, readers: ReaderPool, parts: int) -> None:
    tier = make(tmp_path / "db", readers, {1: KEYS}, files=2, parts=parts)
    lie = [read_blocks(file, 0, len(file.first_keys), None)[0] for file in tier._base[1].files]
    np.testing.assert_array_equal(tier.in_order(1, np.random.default_rng(1).permutation(KEYS)), np.concatenate(lie))
    tier.close()


def test_keys_that_no_delta_changed_do_not_ask_rocksdb(tier: SealedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    change(tier, KEYS[:3], 5)
    tier._patches._drop()

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("RocksDB was asked")

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_get", refuse)
        far = KEYS[5000:5064]  # so few that none is let through by chance, with these keys
        np.testing.assert_array_equal(get(tier, 1, far)[0], some_rows(far))
        with pytest.raises(AssertionError):
            get(tier, 1, KEYS[:1])
    np.testing.assert_array_equal(get(tier, 1, KEYS[:4])[0], [*some_rows(KEYS[:3], 5), *some_rows(KEYS[3:4])])


def test_the_filter_knows_a_key_before_its_row_can_be_found(tier: SealedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a look-up after another thread's could pass by a row that the other has read."""
    seen: list[bool] = []

    def ingest(self: DiskTier, files: Any) -> None:
        maybe_changed = tier._changed[1].maybe_changed(KEYS[:1])
        seen.append(maybe_changed is not None)
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "ingest", ingest)
        with pytest.raises(StorageError):
            change(tier, KEYS[:1], 5)
    assert seen == [True]
    np.testing.assert_array_equal(get(tier, 1, KEYS[:1])[0], some_rows(KEYS[:1]), "a fold that failed changed nothing")


def test_changes_are_known_again_after_a_reopen(tier: SealedTier, readers: ReaderPool) -> None:
    change(tier, [-10_000, 1, 9_998], 5, np.array([True, False, False]))
    change(tier, [4], 6, table_id=2)
    stats = tier.stats()
    tier.close()
    tier = again(tier, readers)
    assert tier.stats()["changed_keys"] == stats["changed_keys"] == 4
    assert tier.stats()["changed_filter_memory_bytes"] == stats["changed_filter_memory_bytes"] > 0
    rows, state = get(tier, 1, [-10_000, -9_998, 1, 9_998])
    assert state.tolist() == [Tier.ABSENT, Tier.DISK, Tier.DISK, Tier.DISK]
    np.testing.assert_array_equal(rows[2:], some_rows(np.array([1, 9_998]), 5))
    np.testing.assert_array_equal(get(tier, 2, [4])[0], some_rows(np.array([4]), 6))
    tier.close()


def test_a_base_is_taken_in_once(tier: SealedTier, tmp_path: Path) -> None:
    more = write_sealed(tmp_path / "more.sealed", 1, np.array([1]), some_rows(np.array([1])))
    with pytest.raises(ValueError, match="base already"):
        tier.ingest([more])
    assert more.path.exists()


def test_rows_come_by_change_alone(tier: SealedTier, tmp_path: Path) -> None:
    built = write_sst(tmp_path / "x.sst", tables=[(1, KEYS[:1], some_rows(KEYS[:1]), None)], delta=True)
    for file in (built, built.path):
        with pytest.raises(ValueError, match="rows come by `change`"):
            tier.ingest([file])


def test_figures_say_what_is_held_in_memory_and_on_disk(tier: SealedTier) -> None:
    stats = tier.stats()
    assert stats["base_files"] == 2
    assert stats["base_bytes"] == sum(path.stat().st_size for path in tier.path.glob("base/*"))
    assert stats["base_index_memory_bytes"] == 8 * 2 * -(-5000 // block_shape(ROW_BYTES)[1])
    assert tier.bytes_on_disk() >= stats["base_bytes"] > 10_000 * ROW_BYTES


# ---- damage ---------------------------------------------------------------------------------------------------


def regions(path: Path) -> dict[str, int]:
    """A byte of each part of a file."""
    size = path.stat().st_size
    return {
        "header": 12,
        "key": 4096 * 3 + 20,
        "row": 4096 * 3 + 4000,
        "checksum": 4096 * 4 - 3,
        "fence": size - 60,
        "trailer": size - 40,
    }


@pytest.mark.parametrize("where", ["key", "row", "checksum"])
def test_a_flipped_byte_in_a_block_costs_its_keys_and_is_named(tier: SealedTier, where: str) -> None:
    damaged = tier._base[1].files[1]
    flip(damaged.path, regions(damaged.path)[where])
    change(tier, [KEYS[0], 1, KEYS[-1]], 5)  # some are answered by RocksDB
    rows, state = np.zeros((len(KEYS), ROW_BYTES), np.uint8), np.zeros(len(KEYS), np.uint8)
    with pytest.raises(Corruption, match=rf"{damaged.path.name}, block 2.*checksum") as failure:
        tier.get(1, KEYS, rows, state)
    want = KEYS[5000:][2 * damaged.per_block : 3 * damaged.per_block]
    assert list(failure.value.keys) == want.tolist()
    bad = np.isin(KEYS, want)
    assert (state[bad] == Tier.PENDING).all()
    assert (state[~bad] == Tier.DISK).all()
    np.testing.assert_array_equal(rows[~bad][1:-1], some_rows(KEYS[~bad])[1:-1])
    for read in (lambda: tier.verify({1: ROW_BYTES}), lambda: list(tier.scan(1, ROW_BYTES))):
        with pytest.raises(Corruption, match=rf"{damaged.path.name}: block 2"):
            read()


@pytest.mark.parametrize("where", ["header", "fence", "trailer"])
def test_a_flipped_byte_elsewhere_is_refused_at_open(tier: SealedTier, readers: ReaderPool, where: str) -> None:
    path = tier._base[1].files[0].path
    tier.close()
    flip(path, regions(path)[where])
    with pytest.raises(Corruption, match=path.name):
        again(tier, readers)
    flip(path, regions(path)[where])
    again(tier, readers).close()


def test_a_file_that_was_cut_off_exchanged_or_lost_is_refused_at_open(
    tier: SealedTier, readers: ReaderPool, tmp_path: Path
) -> None:
    path = tier._base[1].files[0].path
    whole = path.read_bytes()
    tier.close()
    path.write_bytes(whole[:-1])
    with pytest.raises(Corruption, match=rf"{path.name}: expected {len(whole)} bytes, found {len(whole) - 1}"):
        again(tier, readers)
    other = some_rows(KEYS[:5000], 9)
    path.unlink()
    write_sealed(path, 1, KEYS[:5000] + 1, other)
    assert path.stat().st_size == len(whole)
    with pytest.raises(Corruption, match=path.name):
        again(tier, readers)
    path.unlink()
    with pytest.raises(Corruption, match=rf"{path.name} is missing"):
        again(tier, readers)
    path.write_bytes(whole)
    tier = again(tier, readers)
    assert tier.verify({1: ROW_BYTES})[1].digest == digest_rows(KEYS, some_rows(KEYS))
    tier.close()


def test_two_blocks_in_each_others_place_are_noticed(tier: SealedTier) -> None:
    file = tier._base[1].files[0]
    raw = bytearray(file.path.read_bytes())
    raw[4096:8192], raw[8192:12288] = raw[8192:12288], raw[4096:8192]
    with open(file.path, "r+b") as over:
        over.write(raw)
    with pytest.raises(Corruption, match="checksum") as failure:
        get(tier, 1, KEYS)
    assert list(failure.value.keys) == KEYS[: 2 * file.per_block].tolist()
    with pytest.raises(Corruption, match="block 0"):
        list(tier.scan(1, ROW_BYTES))


def test_a_file_that_is_cut_off_under_a_reader_is_an_error_and_no_signal(tier: SealedTier) -> None:
    file = tier._base[1].files[1]
    os.truncate(file.path, 4096 * 3 + 100)
    with pytest.raises(Corruption, match="ends before") as failure:
        get(tier, 1, KEYS)
    assert list(failure.value.keys) == KEYS[5000 + 2 * file.per_block :].tolist()
    with pytest.raises(Corruption, match="ends within block 2"):
        list(tier.scan(1, ROW_BYTES))


def test_a_drive_that_fails_is_a_storage_error_with_the_keys_it_cost(tier: SealedTier, tmp_path: Path) -> None:
    file = tier._base[1].files[0]
    kept, directory = os.dup(file.fd), os.open(tmp_path, os.O_RDONLY)
    os.dup2(directory, file.fd)  # reads of a directory fail
    rows, state = np.zeros((len(KEYS), ROW_BYTES), np.uint8), np.zeros(len(KEYS), np.uint8)
    with pytest.raises(StorageError, match="directory") as failure:
        tier.get(1, KEYS, rows, state)
    assert not isinstance(failure.value, Corruption)
    assert list(failure.value.keys) == KEYS[:5000].tolist()
    np.testing.assert_array_equal(rows[5000:], some_rows(KEYS[5000:]))
    assert (state == np.repeat([Tier.PENDING, Tier.DISK], 5000)).all()
    os.dup2(kept, file.fd)
    assert (get(tier, 1, KEYS)[1] == Tier.DISK).all()
    os.close(kept)
    os.close(directory)


def test_rows_of_another_length_are_refused_whole(tier: SealedTier) -> None:
    with pytest.raises(Corruption, match=r"rows of 20 bytes, found 12") as failure:
        tier.get(1, KEYS[:3], np.zeros((3, 20), np.uint8), np.zeros(3, np.uint8))
    assert list(failure.value.keys) == KEYS[:3].tolist()
    with pytest.raises(Corruption, match=r"rows of 20 bytes, found 12"):
        tier.verify({1: 20})


# ---- the filter -----------------------------------------------------------------------------------------------


def test_the_filter_never_denies_a_key_and_grows_with_few_false_alarms() -> None:
    rng = np.random.default_rng(4)
    keys = np.unique(rng.integers(LIMITS.min, LIMITS.max, 400_000))
    rng.shuffle(keys)
    held, others = keys[:200_000], keys[200_000:]
    changed = ChangedKeys()
    assert changed.maybe_changed(others) is None
    for part in np.array_split(held, 50):
        changed.add(part)
        changed.add(part[:100])  # again
    maybe_changed = changed.maybe_changed(held)
    assert maybe_changed is not None
    assert maybe_changed.all()
    alarms = changed.maybe_changed(others)
    assert alarms is not None
    assert alarms.mean() < 0.02
    assert 0.98 * len(held) < changed.keys <= len(held)
    assert changed.nbytes < 4 * len(held), "12 bits a key, and room to grow"


# ---- a failed merge -------------------------------------------------------------------------------------------


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """Within the block, no file of this process may grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def failed(tier: SealedTier) -> SealedTier:
    """A tier whose RocksDB takes nothing any more, because a merge had no room."""
    for salt in (1, 2):
        change(tier, KEYS, salt)
    with small_files_only(100_000), pytest.raises(StorageError):
        tier.compact_range()
    with pytest.raises(StorageError):
        tier.check_background()
    return tier


def test_a_tier_that_takes_nothing_any_more_is_as_good_as_new_once_it_was_opened_again(
    failed: SealedTier, readers: ReaderPool
) -> None:
    failed.close()
    reopened = again(failed, readers)
    try:
        reopened.check_background()
        change(reopened, KEYS[:10], 3)
        reopened.compact_range()
        rows, states = get(reopened, 1, KEYS[:20])
        np.testing.assert_array_equal(states, np.full(20, Tier.DISK))
        np.testing.assert_array_equal(rows[:10], some_rows(KEYS[:10], 3))
        np.testing.assert_array_equal(rows[10:], some_rows(KEYS[10:20], 2))
    finally:
        reopened.close()


def test_a_tier_that_takes_nothing_any_more_can_be_closed_and_gives_everything_back(
    failed: SealedTier, readers: ReaderPool
) -> None:
    base = [file.fd for table in failed._base.values() for file in table.files]
    failed.close()
    for fd in base:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    again(failed, readers).close()


def test_an_error_that_is_kept_keeps_no_tier_open(tier: SealedTier, readers: ReaderPool) -> None:
    change(tier, KEYS, 1)
    file = max(tier.path.glob("*.sst"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    with pytest.raises(Corruption) as kept:
        tier.verify({1: ROW_BYTES})
    tier.close()
    DiskTier.open(tier.path, block_cache_bytes=CACHE, reader=readers).close()  # its lock is free
    assert kept.value.__traceback__ is not None


def test_the_first_keys_of_blocks_are_in_memory_once(tier: SealedTier) -> None:
    (table,) = tier._base.values()
    assert len(table.files) == 2
    assert all(np.shares_memory(file.first_keys, table.first_keys) for file in table.files)
    assert tier.stats()["base_index_memory_bytes"] == sum(file.first_keys.nbytes for file in table.files)


@pytest.mark.parametrize(("held", "raised"), [(10, False), (40, True)])
def test_files_that_the_process_has_open_already_count_for_its_limit(
    monkeypatch: pytest.MonkeyPatch, held: int, raised: bool
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (100, 10_000))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda what, limit: limits.append(limit))
    monkeypatch.setattr(open_files.os, "listdir", lambda path: [""] * held)
    open_files.allow(20)
    assert limits == ([(220, 10_000)] if raised else [])
