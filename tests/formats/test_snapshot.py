"""Every shard format gives back the rows that went into it, in order, block by block."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tests.formats.shards import KEYS, VECTORS, save_npz, save_safetensors, save_shard, snapshot_of
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter

FORMATS = ["arrow", "parquet", "safetensors", "npz", "hugectr"]


def read(root: Path, table: str = "item", batch_rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """All rows of all shards; checks on the way that batches are consecutive and no larger than asked."""
    snapshot = open_snapshot(root)
    keys, vectors = [], []
    for shard_no in range(len(snapshot.manifest.table(table).shards)):
        snapshot.check_checksum(table, shard_no)
        expected_row = 0
        for batch in snapshot.batches(table, shard_no, batch_rows):
            assert batch.first_row == expected_row
            assert len(batch.keys) == len(batch.vectors) <= batch_rows
            assert batch.vectors.flags.c_contiguous
            expected_row += len(batch.keys)
            keys.append(batch.keys)
            vectors.append(batch.vectors)
        alone = list(snapshot.shard_keys(table, shard_no, batch_rows))
        assert sum(map(len, alone)) == expected_row
        assert np.array_equal(joined(alone), joined(keys)[-expected_row:] if expected_row else [])
    return joined(keys), np.concatenate(vectors)


def joined(keys: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *keys])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_what_the_writer_writes_is_read_back(tmp_path: Path, format: Any, dtype: str) -> None:
    rng = np.random.default_rng(5)
    keys = rng.permutation(np.arange(-500, 500, dtype=np.int64))
    vectors = rng.standard_normal((1000, 3)).astype(np.float16 if dtype == "float16" else np.float32)
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        table = snapshot.table("item", dim=3, dtype=dtype, format=format, rows_per_shard=400)
        for start in range(0, 1000, 90):
            table.write(keys[start : start + 90], vectors[start : start + 90])
    assert [shard.rows for shard in open_snapshot(tmp_path / "s").manifest.table("item").shards] == [400, 400, 200]
    got_keys, got_vectors = read(tmp_path / "s", batch_rows=64)
    assert np.array_equal(got_keys, keys)
    assert np.array_equal(got_vectors, vectors)


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_string_keys_come_with_their_text(tmp_path: Path, format: Any) -> None:
    texts = ["", "a", "käse", "x" * 300]
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("word", dim=1, key="string", format=format).write(texts, np.zeros((4, 1)))
    batches = list(open_snapshot(tmp_path / "s").batches("word", 0, 3))
    assert [text for batch in batches for text in batch.strings.to_pylist()] == texts
    expected = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
    assert np.concatenate([batch.keys for batch in batches]).view(np.uint64).tolist() == expected


@pytest.mark.parametrize("format", ["arrow", "parquet", "safetensors", "npz"])
def test_uint64_keys_keep_their_bits(tmp_path: Path, format: Any) -> None:
    keys = [0, 1 << 63, (1 << 64) - 1]
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=1, key="uint64", format=format).write(keys, np.zeros((3, 1)))
    assert read(tmp_path / "s")[0].view(np.uint64).tolist() == keys


def column(vectors: np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.array(list(vectors.astype(kind.value_type.to_pandas_dtype())), kind)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("value", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("make", [lambda v: pa.list_(v), lambda v: pa.large_list(v), lambda v: pa.list_(v, 2)])
def test_vectors_may_be_lists_of_any_kind_of_floats(tmp_path: Path, ending: str, value: pa.DataType, make: Any) -> None:
    kind = make(value)
    shard = pa.table({"other": ["ignored"] * 5, "vector": column(VECTORS, kind), "key": KEYS})
    root = snapshot_of(tmp_path, save_shard(shard, f"p.{ending}"))
    keys, vectors = read(root, batch_rows=2)
    assert np.array_equal(keys, KEYS)
    assert np.array_equal(vectors, VECTORS)
    assert vectors.dtype == (np.float16 if value == pa.float16() else np.float32)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32()])
@pytest.mark.parametrize("encoded", [False, True])
def test_narrow_keys_widen(tmp_path: Path, kind: pa.DataType, encoded: bool) -> None:
    keys = pa.array(KEYS).cast(kind)
    shard = pa.table({"key": keys.dictionary_encode() if encoded else keys, "vector": list(VECTORS)})
    assert np.array_equal(read(snapshot_of(tmp_path, save_shard(shard, "p.arrow")))[0], KEYS)


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_arrow_streams_and_compressed_files_are_read_too(tmp_path: Path, compression: str | None) -> None:
    shard = pa.table({"key": KEYS, "vector": list(VECTORS)})

    def save_stream(root: Path) -> str:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(str(root / "s.arrow"), shard.schema, options=options) as writer:
            writer.write_table(shard, max_chunksize=2)
        return "s.arrow"

    def save_file(root: Path) -> str:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(root / "f.arrow"), shard.schema, options=options) as writer:
            writer.write_table(shard, max_chunksize=2)
        return "f.arrow"

    for save in (save_stream, save_file):
        root = tmp_path / save.__name__
        keys, vectors = read(snapshot_of(root, save))
        assert np.array_equal(keys, KEYS)
        assert np.array_equal(vectors, VECTORS)


def test_dictionary_encoded_strings_are_read(tmp_path: Path) -> None:
    texts = pa.array(["b", "a", "c", "d", "e"])
    for ending in ("arrow", "parquet"):
        shard = pa.table({"key": texts.dictionary_encode(), "vector": list(VECTORS)})
        root = snapshot_of(tmp_path / ending, save_shard(shard, f"p.{ending}"), key="string")
        batch = next(open_snapshot(root).batches("item", 0))
        assert batch.strings.to_pylist() == texts.to_pylist()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_as_numpy_writes_it(tmp_path: Path, dtype: Any, save: Any) -> None:
    def write(root: Path) -> str:
        save(root / "p.npz", keys=KEYS, vectors=VECTORS.astype(dtype), extra=np.arange(3))
        return "p.npz"

    keys, vectors = read(snapshot_of(tmp_path, write))
    assert np.array_equal(keys, KEYS)
    assert np.array_equal(vectors, VECTORS)
    assert vectors.dtype == (np.float16 if dtype is np.float16 else np.float32)


@pytest.mark.parametrize(
    ("name", "dtype"), [("F16", np.float16), ("F32", np.float32), ("F64", np.float64), ("BF16", ml_dtypes.bfloat16)]
)
def test_safetensors_of_every_float(tmp_path: Path, name: str, dtype: Any) -> None:
    extra = {"bias": ("U8", np.arange(8, dtype=np.uint8))}
    tensors = {"vectors": (name, VECTORS.astype(dtype)), **extra, "keys": ("I64", KEYS)}
    keys, vectors = read(snapshot_of(tmp_path, save_safetensors(tensors)))
    assert np.array_equal(keys, KEYS)
    assert np.array_equal(vectors, VECTORS)


@pytest.mark.parametrize("format", FORMATS)
def test_keys_are_read_without_the_vectors(tmp_path: Path, format: Any) -> None:
    """A pass over the keys must cost what the keys cost; for tensors the vectors' bytes may even be gone."""
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=2, format=format).write(KEYS, VECTORS)
    assert np.concatenate(list(open_snapshot(tmp_path / "s").shard_keys("item", 0, 2))).tolist() == KEYS.tolist()


def test_a_table_without_rows_is_read(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("none", dim=2)
        snapshot.table("item", dim=2).write(KEYS[:0], VECTORS[:0])
    assert open_snapshot(tmp_path / "s").manifest.table("item").shards == ()
    empty = pa.table({"key": pa.array([], pa.int64()), "vector": pa.array([], pa.list_(pa.float32(), 2))})
    for ending in ("arrow", "parquet"):
        root = snapshot_of(tmp_path / ending, save_shard(empty, f"p.{ending}"), rows=0)
        assert sum(len(batch.keys) for batch in open_snapshot(root).batches("item", 0)) == 0
    root = snapshot_of(tmp_path / "npz", save_npz(keys=KEYS[:0], vectors=VECTORS[:0]), rows=0)
    assert list(open_snapshot(root).batches("item", 0)) == []


def test_wide_rows_come_in_small_batches(tmp_path: Path) -> None:
    dim, rows = 65536, 300
    root = snapshot_of(
        tmp_path, save_npz(keys=np.arange(rows), vectors=np.zeros((rows, dim), np.float16)), rows=rows, dim=dim
    )
    sizes = [len(batch.keys) for batch in open_snapshot(root).batches("item", 0)]
    assert sum(sizes) == rows
    assert max(sizes) * dim * 4 <= 64 << 20


@pytest.mark.parametrize(
    "spell",
    [str, Path, lambda p: p.as_uri(), lambda p: f"file://localhost{quote(str(p))}", lambda p: p / "snapshot.json"],
)
def test_a_snapshot_is_found_by_path_or_url(tmp_path: Path, spell: Any) -> None:
    root = snapshot_of(tmp_path / "a b%41", save_npz())
    snapshot = open_snapshot(spell(root))
    assert snapshot.root == root.resolve()


def test_warm_up_keys_and_dense_part(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=1)
        snapshot.table("word", dim=1, key="string")
        snapshot.table("cold", dim=1)
        snapshot.warmup("item", [3, 1, 2])
        snapshot.warmup("word", ["bé", "a"])
        snapshot.dense(b"onnx")
    opened = open_snapshot(tmp_path / "s")
    assert opened.warmup_keys("item").tolist() == [3, 1, 2]
    expected = [xxhash.xxh3_64_intdigest(text.encode()) for text in ("bé", "a")]
    assert opened.warmup_keys("word").view(np.uint64).tolist() == expected
    assert opened.warmup_keys("cold") is None
    assert opened.dense_path().read_bytes() == b"onnx"
    np.save(tmp_path / "s" / "warmup" / "word.npy", np.array(["bé", "a"]))
    assert open_snapshot(tmp_path / "s").warmup_keys("word").view(np.uint64).tolist() == expected


def test_symlinks_within_the_snapshot_are_followed(tmp_path: Path) -> None:
    root = snapshot_of(tmp_path, save_npz())
    (root / "p.npz").rename(root / "blob.npz")
    (root / "p.npz").symlink_to("blob.npz")
    assert np.array_equal(read(root)[0], KEYS)


def test_a_shard_without_a_checksum_is_taken(tmp_path: Path) -> None:
    root = snapshot_of(tmp_path, save_npz())
    document = json.loads((root / "snapshot.json").read_text())
    assert "xxh3" not in document["tables"][0]["shards"][0]
    open_snapshot(root).check_checksum("item", 0)


@settings(max_examples=few_or_many(8, 25))
@given(
    st.data(), st.integers(0, 40), st.integers(1, 5), st.sampled_from(FORMATS), st.integers(1, 17), st.integers(1, 9)
)
def test_any_rows_in_any_batches_and_shards(
    data: Any, rows: int, dim: int, format: Any, rows_per_shard: int, batch_rows: int
) -> None:
    keys = data.draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=rows, max_size=rows, unique=True))
    vectors = np.array(
        data.draw(
            st.lists(
                st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=rows * dim, max_size=rows * dim
            )
        ),
        np.float32,
    ).reshape(rows, dim)
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "s"
        with SnapshotWriter(root, model="ctr", version=1) as snapshot:
            table = snapshot.table("item", dim=dim, format=format, rows_per_shard=rows_per_shard)
            cut = data.draw(st.integers(0, rows))
            table.write(keys[:cut], vectors[:cut])
            table.write(keys[cut:], vectors[cut:])
        if rows:
            got_keys, got_vectors = read(root, batch_rows=batch_rows)
            assert got_keys.tolist() == keys
            assert np.array_equal(got_vectors, vectors)


def test_parquet_written_elsewhere_with_row_groups_is_read(tmp_path: Path) -> None:
    shard = pa.table(
        {"key": np.arange(1000), "vector": column(np.arange(2000).reshape(1000, 2), pa.list_(pa.float32()))}
    )

    def save(root: Path) -> str:
        pq.write_table(shard, root / "p.parquet", row_group_size=77, compression="zstd", store_schema=False)
        return "p.parquet"

    keys, vectors = read(snapshot_of(tmp_path, save, rows=1000), batch_rows=100)
    assert np.array_equal(keys, np.arange(1000))
    assert np.array_equal(vectors, np.arange(2000).reshape(1000, 2))


def test_npz_members_are_not_read_whole(tmp_path: Path) -> None:
    """The first batch comes although the file's end is missing from the vectors: reading is streaming."""
    buffer = io.BytesIO()
    np.savez(buffer, keys=np.arange(100_000), vectors=np.zeros((100_000, 8), np.float32))
    raw = bytearray(buffer.getvalue())
    with zipfile.ZipFile(io.BytesIO(bytes(raw))) as archive:
        end = archive.getinfo("vectors.npy").header_offset + archive.getinfo("vectors.npy").file_size
    raw[end - 100] ^= 0xFF  # its CRC, checked only at the very end, is wrong now

    def save(root: Path) -> str:
        (root / "p.npz").write_bytes(raw)
        return "p.npz"

    root = snapshot_of(tmp_path, save, rows=100_000, dim=8)
    batches = open_snapshot(root).batches("item", 0, 100)
    assert len(next(batches).keys) == 100
    shutil.rmtree(root)
