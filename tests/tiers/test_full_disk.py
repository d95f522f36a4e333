"""A disk tier on a full disk: read as it is, and opened for writing by the first ingest for which there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.backing_contract import ROW_BYTES, get, some_rows
from tests.tiers.full_disk import full_disk
from tests.tiers.test_disk import CACHE, complete, ingest, open_again
from tierstore.errors import Closed, DiskFull
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import SealedTier
from tierstore.tiers.disk.tier import DiskTier

KEYS = np.arange(500)


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(2)
    yield pool
    pool.close()


@pytest.fixture(params=[DiskTier, SealedTier], ids=["rocksdb", "sealed"])
def whole(request: pytest.FixtureRequest, tmp_path: Path, readers: ReaderPool) -> DiskTier:
    """A tier that holds KEYS, closed."""
    tier: DiskTier = request.param.create(tmp_path / "db", block_cache_bytes=CACHE, reader=readers)
    ingest(tier, KEYS, some_rows(KEYS), records={"watermark": b"1"})
    complete(tier)
    tier.close()
    return tier


def holds(tier: DiskTier, salt: int) -> bool:
    rows, _ = get(tier, 1, KEYS[:3])
    return np.array_equal(rows, some_rows(KEYS[:3], salt))


def test_it_is_read_until_there_is_room_and_scans_go_on_beyond(
    whole: DiskTier, readers: ReaderPool, tmp_path: Path
) -> None:
    with full_disk() as disk:
        disk.full = True
        tier = open_again(whole, readers)
        assert holds(tier, 0)
        assert tier.watermark() == 1
        scan = tier.scan(1, ROW_BYTES, batch_rows=100)
        seen = [next(scan)]
        with pytest.raises(DiskFull, match="free some space"):
            ingest(tier, KEYS[:3], some_rows(KEYS[:3], 7))
        assert holds(tier, 0)
        disk.full = False
        ingest(tier, KEYS[:3], some_rows(KEYS[:3], 7))
        assert holds(tier, 7)
        for salt in (8, 9):
            ingest(tier, KEYS[:3], some_rows(KEYS[:3], salt), records={"watermark": b"%d" % salt})
            assert holds(tier, salt)
        tier.compact_range()
        seen += scan
        np.testing.assert_array_equal(np.concatenate([rows for _, rows in seen]), some_rows(KEYS))
        ingest(tier, KEYS[:3], some_rows(KEYS[:3], 10))
        assert (holds(tier, 10), tier.watermark()) == (True, 9)
        tier.close()
        open_again(whole, readers).close()  # the lock was given back


def test_closing_ends_a_scan_of_before(whole: DiskTier, readers: ReaderPool) -> None:
    with full_disk() as disk:
        disk.full = True
        tier = open_again(whole, readers)
        scan = tier.scan(1, ROW_BYTES, batch_rows=100)
        next(scan)
        disk.full = False
        ingest(tier, KEYS[:3], some_rows(KEYS[:3], 7))
        tier.close()
        with pytest.raises(Closed):
            next(scan)


def test_a_new_one_needs_room(tmp_path: Path, readers: ReaderPool) -> None:
    with full_disk() as disk:
        disk.full = True
        with pytest.raises(DiskFull):
            DiskTier.create(tmp_path / "db", block_cache_bytes=CACHE, reader=readers)
