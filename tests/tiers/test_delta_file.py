"""The sorted file of a fold, as RocksDB takes it in: read by the driver, never by what wrote it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rocksdict
import xxhash

from tierstore.errors import StorageError
from tierstore.tiers.disk.delta_file import write_delta_file

RECORDS = {"watermark": b"7", "long": b"x" * 300_000}


def opened(where: Path) -> rocksdict.Rdict:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    return rocksdict.Rdict(str(where), options)


def ingested(database: rocksdict.Rdict, file: Path) -> rocksdict.Rdict:
    options = rocksdict.IngestExternalFileOptions()
    options.set_move_files(True)
    database.ingest_external_file([str(file)], options)
    return database


def everything(database: rocksdict.Rdict) -> dict[bytes, bytes]:
    options = rocksdict.ReadOptions()
    options.set_verify_checksums(True)
    reader, found = database.iter(options), {}
    reader.seek_to_first()
    while reader.valid():
        found[reader.key()] = reader.value()
        reader.next()
    reader.status()
    return found


def stored(table_id: int, key: int) -> bytes:
    return struct.pack(">HQ", table_id, key + 2**63)


def some(count: int, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(row_bytes)
    limits = np.array([-(2**63), -1, 0, 1, 2**63 - 1])
    keys = np.unique(np.concatenate([limits, rng.integers(-(2**63), 2**63 - 1, count)]))
    return keys, rng.integers(0, 255, (len(keys), row_bytes)).astype(np.uint8)


@pytest.mark.parametrize("deleted", ["none", "some", "all", "first and last"])
@pytest.mark.parametrize("row_bytes", [1, 64, 127, 128, 16_384, 262_144])  # sizes take one to three bytes
def test_the_driver_reads_what_was_written(tmp_path: Path, row_bytes: int, deleted: str) -> None:
    keys, rows = some(10_000 if row_bytes < 1000 else 20, row_bytes)
    marks = {
        "none": np.zeros(len(keys), np.bool_),
        "some": np.random.default_rng(1).random(len(keys)) < 0.3,
        "all": np.ones(len(keys), np.bool_),
        "first and last": np.isin(np.arange(len(keys)), (0, len(keys) - 1)),
    }[deleted]
    tables: list[Any] = [(1, keys, rows, marks), (0x8001, keys[:3], rows[:3], None)]
    built = write_delta_file(tmp_path / "a.sst", records=RECORDS, tables=tables)
    assert (built.bytes, built.entries) == (built.path.stat().st_size, len(keys) + 5)
    assert built.xxh3 == xxhash.xxh3_64_hexdigest(built.path.read_bytes())
    expected = {b"\0\0" + name.encode(): value for name, value in RECORDS.items()}
    for key, row, gone in zip(keys.tolist(), rows, marks.tolist(), strict=True):
        expected[stored(1, key)] = b"" if gone else row.tobytes()
    for key, row in zip(keys[:3].tolist(), rows[:3], strict=True):
        expected[stored(0x8001, key)] = row.tobytes()
    database = opened(tmp_path / "db")
    ingested(database, built.path)
    names = sorted(expected)
    assert database.get(names) == [expected[name] for name in names]
    assert database.get([stored(1, 2), stored(2, 0), b"\0\0other"]) == [None, None, None]
    assert everything(database) == expected
    database.compact_range(None, None)
    assert everything(database) == expected, "as RocksDB writes it itself"
    assert database.property_value("rocksdb.background-errors") == "0"
    database.close()


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    keys, rows = some(1000, 16)
    database = opened(tmp_path / "db")
    for number, part in enumerate((slice(None), slice(0, None, 2))):
        tables: list[Any] = [(1, keys[part], rows[part] + np.uint8(number), None)]
        ingested(database, write_delta_file(tmp_path / "a.sst", records={}, tables=tables).path)
    now = rows.copy()
    now[::2] += np.uint8(1)
    expected = {stored(1, key): row.tobytes() for key, row in zip(keys.tolist(), now, strict=True)}
    assert everything(database) == expected
    database.close()


def test_any_changed_bit_of_rows_is_noticed(tmp_path: Path) -> None:
    """RocksDB compares each block with its checksum."""
    keys, rows = some(5000, 64)
    built = write_delta_file(tmp_path / "a.sst", records=RECORDS, tables=[(1, keys, rows, None)])
    whole = built.path.read_bytes()
    for number, at in enumerate(np.random.default_rng(2).integers(0, len(whole) // 2, 20).tolist()):
        built.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        database = opened(tmp_path / f"db-{number}")
        with pytest.raises(Exception, match="Corruption"):
            everything(ingested(database, built.path))
        database.close()
        shutil.rmtree(tmp_path / f"db-{number}")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "at least one"),
        ([(1, np.array([2, 1]), np.zeros((2, 4), np.uint8), None)], "ascending"),
        ([(1, np.array([1, 2]), np.zeros((1, 4), np.uint8), None)], "do not match"),
        ([(65536, np.array([1]), np.zeros((1, 4), np.uint8), None)], "out of range"),
    ],
)
def test_what_would_not_sort_is_refused_and_leaves_no_file(tmp_path: Path, tables: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write_delta_file(tmp_path / "bad.sst", records={}, tables=tables)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a\.sst"):
        write_delta_file(tmp_path / "nowhere" / "a.sst", records={"x": b"1"}, tables=[])


@pytest.mark.parametrize("deleted", [False, True])
def test_the_driver_reads_strings_of_any_length(tmp_path: Path, deleted: bool) -> None:
    keys, _ = some(100_000, 3)
    lengths = np.random.default_rng(2).integers(0, 40, len(keys))
    lengths[:6] = 0, 127, 128, 16_383, 16_384, 300_000
    values = [bytes([97 + i % 26]) * length for i, length in enumerate(lengths.tolist())]
    marks = np.arange(len(keys)) % 3 == 1 if deleted else None
    tables: list[Any] = [(1, keys[:2], np.ones((2, 4), np.uint8), None)]
    tables.append((0xC001, keys, pa.array(values, pa.large_binary()), marks))
    built = write_delta_file(tmp_path / "a.sst", records=RECORDS, tables=tables)
    assert built.entries == len(keys) + 4
    expected = {b"\0\0" + name.encode(): value for name, value in RECORDS.items()}
    expected |= {stored(1, key): b"\1" * 4 for key in keys[:2].tolist()}
    for i, (key, value) in enumerate(zip(keys.tolist(), values, strict=True)):
        expected[stored(0xC001, key)] = b"" if deleted and i % 3 == 1 else value
    database = ingested(opened(tmp_path / "db"), built.path)
    assert everything(database) == expected
    assert database.get(stored(0xC001, int(keys[5]))) == expected[stored(0xC001, int(keys[5]))]
    database.close()
