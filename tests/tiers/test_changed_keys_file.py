"""The file of changed keys: the same filters after a restart, to the bit, and made anew wherever it could say too little."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tests.formats.disks import FailingDisk
from tests.tiers.test_sealed import CACHE, KEYS, make, some_rows
from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.tiers.disk import changed_keys_file
from tierstore.tiers.disk.changed_keys import ChangedKeys
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import SealedTier
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Tier

GOLDEN = Path(__file__).parents[2] / "schema/golden/changed/three-folds.keys"


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(2)
    yield pool
    pool.close()


@pytest.fixture
def reopen(tmp_path: Path, readers: ReaderPool) -> Iterator[Callable[..., SealedTier]]:
    """Opens the tier that was made, closing it before."""
    tiers = [make(tmp_path / "db", readers, {1: KEYS})]

    def open_(**options: bool) -> SealedTier:
        tiers[-1].close()
        tiers.append(SealedTier.open(tmp_path / "db", block_cache_bytes=CACHE, reader=readers, **options))
        return tiers[-1]

    open_()
    yield open_
    tiers[-1].close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "db" / changed_keys_file.NAME


def fold(tier: SealedTier, seq: int, keys: list[int] | np.ndarray, table_id: int = 1) -> None:
    keys = np.asarray(keys, np.int64)
    tables = [(table_id, keys, some_rows(keys, seq), None)] if len(keys) else []
    tier.change(tier.path.parent / f"delta-{seq}.sst", {"watermark": str(seq).encode()}, tables)


def words(filters: dict[int, ChangedKeys]) -> dict[int, list[bytes]]:
    return {number: [layer.words.tobytes() for layer in each._layers] for number, each in filters.items()}


def asked_rocksdb(tier: SealedTier, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether opening reads the keys out of RocksDB."""
    asked = []
    keys = DiskTier._table_keys
    monkeypatch.setattr(DiskTier, "_table_keys", lambda self: asked.append(1) or keys(self))
    return lambda: bool(asked)


def check(tier: SealedTier, changed: dict[int, int]) -> None:
    """Every key that was changed is answered as it was last."""
    keys = np.array(sorted(changed), np.int64)
    rows, state = np.zeros((len(keys), some_rows(keys).shape[1]), np.uint8), np.zeros(len(keys), np.uint8)
    tier.get(1, keys, rows, state)
    assert (state == Tier.DISK).all()
    for key, row in zip(keys, rows, strict=True):
        np.testing.assert_array_equal(row, some_rows(np.array([key]), changed[int(key)])[0])


def test_an_open_tier_says_no_more_and_no_less_after_a_restart(reopen, monkeypatch):
    tier = reopen()
    fold(tier, 1, [-10_000, 1, 9_998])
    fold(tier, 2, [])
    fold(tier, 3, [1, 2, 3])
    fold(tier, 4, [4], table_id=2)
    before = words(tier._changed)
    asked = asked_rocksdb(tier, monkeypatch)
    tier = reopen()
    assert words(tier._changed) == before
    assert not asked()
    check(tier, {-10_000: 1, 1: 3, 2: 3, 3: 3, 9_998: 1})


def test_what_seemed_to_be_there_by_chance_goes_on_seeming_so(reopen):
    """Such a key is in no entry: replayed into filters that were laid out otherwise it would be denied."""
    tier, rng = reopen(), np.random.default_rng(5)
    changed: dict[int, int] = {}
    for seq in range(1, 30):
        keys = np.unique(rng.integers(-(2**62), 2**62, 4000))
        fold(tier, seq, keys)
        changed |= dict.fromkeys(keys.tolist(), seq)
    in_file = sum(each.keys for each in tier._changed.values())
    assert in_file < len(changed), "some seemed to be there"
    tier = reopen()
    maybe_changed = tier._changed[1].maybe_changed(np.array(list(changed), np.int64))
    assert maybe_changed.all()


@settings(max_examples=few_or_many(8, 30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.integers(-50, 50), unique=True), max_size=8), cut=st.integers(0, 400))
def test_a_file_that_was_cut_off_anywhere_holds_its_whole_entries(tmp_path, batches, cut):
    path = tmp_path / "file"
    filters, sizes, states = ChangedKeys(), [], []
    size = changed_keys_file.rewrite(path, [], None)
    sizes.append(size)
    states.append(words({1: filters}))
    open_file = changed_keys_file.ChangedFile(path, size)
    for seq, batch in enumerate(batches):
        open_file.add(seq, {1: filters.add(np.array(batch, np.int64))})
        sizes.append(path.stat().st_size)
        states.append(words({1: filters}))
    os.truncate(path, max(0, sizes[-1] - cut))
    left = [i for i, size in enumerate(sizes) if size <= sizes[-1] - cut]
    found = changed_keys_file.replay(path, len(left) - 2, None)
    assert changed_keys_file.replay(path, len(left) - 1, None) is None
    if left and len(left) > 1:
        replayed, end = found
        assert end == sizes[left[-1]]
        assert words({1: replayed.get(1, ChangedKeys())}) == states[left[-1]]


@pytest.mark.parametrize("at", [0, 9, 20, 30, 40, 50, -1])
def test_a_damaged_file_is_made_anew(reopen, file, monkeypatch, at):
    tier = reopen()
    fold(tier, 1, [1, 2, 3])
    tier.close()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    asked = asked_rocksdb(tier, monkeypatch)
    check(reopen(), {1: 1, 2: 1, 3: 1})
    assert asked()
    monkeypatch.undo()
    asked = asked_rocksdb(tier, monkeypatch)
    check(reopen(), {1: 1, 2: 1, 3: 1})
    assert not asked(), "it was made anew"


def test_what_another_release_has_folded_without_it_is_found(reopen, file):
    tier = reopen()
    fold(tier, 1, [1])
    before = file.read_bytes()
    fold(tier, 2, [2])
    tier.close()
    file.write_bytes(before)
    check(reopen(), {1: 1, 2: 2})


def test_a_fold_that_was_cut_off_after_the_entry_does_no_harm(reopen, file, monkeypatch):
    tier = reopen()

    def fail(self, files):
        raise StorageError("injected failure")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "ingest", fail)
        with pytest.raises(StorageError):
            fold(tier, 1, [1, 2])
    tier = reopen()
    keys = np.array([2], np.int64)
    rows, state = np.zeros((1, some_rows(keys).shape[1]), np.uint8), np.zeros(1, np.uint8)
    tier.get(1, keys, rows, state)
    np.testing.assert_array_equal(rows, some_rows(keys))
    fold(tier, 1, [1, 2])
    check(reopen(), {1: 1, 2: 1})


def test_an_entry_is_durable_before_rocksdb_has_the_delta(reopen, file, monkeypatch):
    tier, order = reopen(), []

    class Noting(files.FileSystem):
        def fsync(self, file):
            super().fsync(file)
            order.append(Path(file.name).name)

    ingest = DiskTier.ingest
    monkeypatch.setattr(DiskTier, "ingest", lambda self, files: order.append("ingest") or ingest(self, files))
    with files.use(Noting()):
        fold(tier, 1, [1])
    assert order.index(changed_keys_file.NAME) < order.index("ingest")


def test_a_file_that_cannot_be_written_holds_no_fold_up_and_is_missed_by_nobody(reopen, file):
    tier = reopen()
    with files.use(FailingDisk(0)):
        fold(tier, 1, [1])
    fold(tier, 2, [2])
    check(tier, {1: 1, 2: 2})
    check(reopen(), {1: 1, 2: 2})


def test_a_file_that_would_pass_for_up_to_date_without_new_keys_holds_them_up(reopen, file):
    """Rows that expire bring no newer watermark, by which a file that lacks them could be told."""

    class Stubborn(files.FileSystem):
        def fsync(self, file):
            raise OSError(errno.EIO, "injected failure")

        def unlink(self, path):
            raise OSError(errno.EIO, "injected failure")

    tier = reopen()
    fold(tier, 1, [1])
    for _ in range(2):
        with files.use(Stubborn()), pytest.raises(StorageError, match="can be neither written nor removed"):
            fold(tier, 1, [2])
    fold(tier, 2, [3])  # a newer watermark: the file shows that it is behind
    check(tier, {1: 1, 3: 2})
    tier = reopen()
    check(tier, {1: 1, 3: 2})
    fold(tier, 2, [2])
    check(reopen(), {1: 1, 2: 2, 3: 2})


def test_a_disk_that_takes_no_file_opens_all_the_same(reopen, file):
    tier = reopen()
    fold(tier, 1, [1])
    file.unlink()

    class Full(files.FileSystem):
        def create(self, path):
            raise OSError(errno.ENOSPC, "no space")

    with files.use(Full()):
        tier = reopen()
    check(tier, {1: 1})
    fold(tier, 2, [2])
    check(reopen(), {1: 1, 2: 2})


def test_who_only_reads_writes_none(reopen, file):
    reopen().close()
    file.unlink()
    reopen(read_only=True)
    assert not file.exists()


# --- what users have


def plain_filter(keys: list[int]) -> bytes:
    """What schema/layout.md says of one layer of few keys, in Python's own numbers."""
    ones, blocks = 2**64 - 1, -(-12 * 16384 // 256)
    salts = [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31]
    words = np.zeros(blocks * 8, np.uint32)
    for key in keys:
        h = (key + 0x9E3779B97F4A7C15) & ones
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & ones
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & ones
        h ^= h >> 31
        at = (((h >> 32) * blocks) >> 32) * 8
        for i, salt in enumerate(salts):
            words[at + i] |= np.uint32(1 << (((h & 0xFFFFFFFF) * salt & 0xFFFFFFFF) >> 27))
    return words.tobytes()


def test_the_golden_file_gives_the_filters_that_the_layout_says():
    """Where this fails because filters are made otherwise, old files mean something else: they need another format number."""
    filters, size = changed_keys_file.replay(GOLDEN, 41822, None)
    assert size == GOLDEN.stat().st_size
    assert changed_keys_file.replay(GOLDEN, 41823, None) is None
    of_one, of_three = [-(2**63), -1, 0, 1, 2**63 - 1, 7, 8], [5]
    assert words(filters) == {1: [plain_filter(of_one)], 3: [plain_filter(of_three)]}
    body = changed_keys_file.entry(41821, {1: np.array([7, 8]), 3: np.array([5])})
    assert body in GOLDEN.read_bytes()


def test_a_file_beside_a_version_that_says_what_it_is_says_it_too(tmp_path):
    """By the layout: format 2, and the hash of the record after the header; of no other record, and of none, it is taken."""
    path, identity = tmp_path / changed_keys_file.NAME, b'{"model": "ctr"}'
    body = changed_keys_file.entry(7, {1: np.array([7, 8])})
    changed_keys_file.rewrite(path, [body], identity)
    head = GOLDEN.read_bytes()[:16]
    assert path.read_bytes() == head[:8] + b"\2\0" + head[10:] + xxhash.xxh3_64_digest(identity)[::-1] + body
    filters, size = changed_keys_file.replay(path, 7, identity)
    assert (filters[1].keys, size) == (2, path.stat().st_size)
    for other in (None, b'{"model": "cvr"}'):
        assert changed_keys_file.replay(path, 7, other) is None
    assert changed_keys_file.replay(GOLDEN, 41822, identity) is None
