"""RocksDB's settings, and its errors translated to ours. Only this module, `sst.py` and `database.py` import RocksDB.

Free functions; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import rocksdict

from tierstore.errors import Closed, Corruption, DiskFull, Locked, StorageError, TierstoreError
from tierstore.open_files import may_open

BLOOM_BITS = 10
_JOBS = 3
_NEVER = 1 << 30
_TARGET_FILE_BYTES = 64 << 20
_LEVEL_BASE_BYTES = 128 << 20
_READAHEAD_BYTES = 1 << 20


def table_options(*, bloom: bool, block_cache: rocksdict.Cache | None = None) -> rocksdict.Options:
    """Options for files and column families: raw bytes, no compression (floats do not shrink), XXH3 checksums.

    Index and filters of open files stay in memory, outside the block cache: a third of a byte for each row. `bloom` adds a filter of 10 bits a key,
    for files in which most keys are not found.
    """
    table = rocksdict.BlockBasedOptions()
    table.set_checksum_type(rocksdict.ChecksumType.xxh3())
    table.set_format_version(5)
    if bloom:
        table.set_bloom_filter(BLOOM_BITS, False)
    if block_cache is not None:
        table.set_block_cache(block_cache)
    options = rocksdict.Options(raw_mode=True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_block_based_table_factory(table)
    return options


def tier_options(block_cache: rocksdict.Cache, open_threads: int, merge_at: int, *, hold: int = 0) -> rocksdict.Options:
    """Settings of an open tier; docs/decisions/disk-tier.md has the measurements behind them.

    `merge_at`: so many unmerged files are merged, and fewer where they have `_LEVEL_BASE_BYTES`. `hold`: so many files are all opened at once and stay
    open, if this process may have them open.
    """
    options = table_options(bloom=True, block_cache=block_cache)
    options.set_optimize_filters_for_hits(True)  # no filters on the last level, whose keys mostly exist
    most = _open_files()
    options.set_max_open_files(-1 if 0 < hold <= most else most)
    options.set_max_file_opening_threads(open_threads)
    # merging of deltas: below the base in size, and never a reason to delay an ingest
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_level_zero_file_num_compaction_trigger(merge_at)
    options.set_level_zero_slowdown_writes_trigger(_NEVER)
    options.set_level_zero_stop_writes_trigger(_NEVER)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    options.set_max_bytes_for_level_base(_LEVEL_BASE_BYTES)
    options.set_target_file_size_base(_TARGET_FILE_BYTES)
    options.set_max_background_jobs(_JOBS)
    environment = rocksdict.Env()
    environment.lower_thread_pool_cpu_priority()  # look-ups come first
    options.set_env(environment)
    # small text files
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(4 << 20)
    options.set_max_manifest_file_size(16 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _open_files() -> int:
    most = may_open()
    return 4096 if most is None else max(64, min(4096, most // 4))


def scan_options() -> rocksdict.ReadOptions:
    # no bounds: rocksdict keeps the upper bound in memory that it frees, and takes the lower for the upper
    options = rocksdict.ReadOptions()
    options.set_verify_checksums(True)
    options.fill_cache(False)
    options.set_readahead_size(_READAHEAD_BYTES)
    return options


def translate(error: Exception, doing: str) -> TierstoreError:
    """Our error for an error of RocksDB: a bare exception, of which only the text differs, or a bare OSError."""
    text = str(error)
    if isinstance(error, OSError):  # from the binding itself, which reads a file of its own
        return StorageError(f"{doing}: {error.strerror or text}")
    if isinstance(error, rocksdict.DbClosedError):
        return Closed(f"{doing}: the disk tier was closed")
    if text.startswith("Corruption"):
        return Corruption(f"{doing}: {text}")
    if (
        "LOCK" in text and not any(why in text for why in ("Permission denied", "Too many open files"))
    ) or "lock hold by" in text:
        return Locked(f"{doing}: the database is open in another process or twice in this one ({text})")
    if "No space left" in text or "quota exceeded" in text:
        return DiskFull(f"{doing}: the disk is full; free some space and try again ({text})")
    return StorageError(f"{doing}: {text}")


@contextmanager
def driver_errors(doing: str) -> Iterator[None]:
    """Translate RocksDB's errors in the block; errors with a type of their own pass."""
    try:
        yield
    except Exception as error:
        foreign = isinstance(error, OSError) and not isinstance(error, TierstoreError)
        if foreign or type(error) is Exception or isinstance(error, rocksdict.DbClosedError):
            raise translate(error, doing) from error
        raise
