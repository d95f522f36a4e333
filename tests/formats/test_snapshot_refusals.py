"""Every bad snapshot is refused with one error that names file, row and reason."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.formats.shards import (
    KEYS,
    VECTORS,
    Save,
    save_bytes,
    save_hugectr,
    save_npz,
    save_safetensors,
    save_safetensors_raw,
    save_shard,
    snapshot_of,
)
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.reader import checksum, open_snapshot


def load(root: Path) -> None:
    snapshot = open_snapshot(root)
    for table in snapshot.manifest.tables:
        for shard_no in range(len(table.shards)):
            snapshot.check_checksum(table.name, shard_no)
            for _ in snapshot.batches(table.name, shard_no, 2):
                pass
        snapshot.warmup_keys(table.name)


def columns(keys: Any = KEYS, vectors: Any = None, **others: Any) -> pa.Table:
    return pa.table({"key": keys, "vector": list(VECTORS) if vectors is None else vectors, **others})


LISTS = [[1.0, 2.0]] * 5


def replaced(row: int, value: Any) -> list[Any]:
    return [*LISTS[:row], value, *LISTS[row + 1 :]]


ARROW: list[tuple[pa.Table, dict[str, Any], int | None, str]] = [
    (columns(), {"rows": 4}, None, "expected 4 rows, as snapshot.json says, got more"),
    (columns(), {"rows": 6}, None, "expected 6 rows, as snapshot.json says, got 5"),
    (columns(), {"dim": 3}, 0, "expected a vector of 3 numbers, got 2"),
    (columns(vectors=pa.array(LISTS, pa.list_(pa.float32(), 2))), {"dim": 3}, None, "column 'vector': expected vectors of 3 numbers, as dim says, got 2"),
    (columns(vectors=replaced(3, [1.0])), {}, 3, "expected a vector of 2 numbers, got 1"),
    (columns(vectors=replaced(4, [])), {}, 4, "expected a vector of 2 numbers, got 0"),
    (columns(vectors=replaced(3, None)), {}, 3, "vector is null"),
    (columns(vectors=pa.array(replaced(2, None), pa.list_(pa.float32(), 2))), {}, 2, "vector is null"),
    (columns(vectors=replaced(3, [1.0, None])), {}, 3, "number 1 of the vector is null"),
    (columns(vectors=pa.array(replaced(4, [None, 1.0]), pa.list_(pa.float16(), 2))), {}, 4, "number 0 of the vector is null"),
    (columns(keys=pa.array([1, 2, 3, None, 5])), {}, 3, "key is null"),
    (columns(keys=pa.array(KEYS.astype(np.float64))), {}, None, "column 'key': expected int64, as the table's keys are, got double"),
    (columns(keys=pa.array(KEYS)), {"key": "uint64"}, None, "column 'key': expected uint64, as the table's keys are, got int64"),
    (columns(keys=pa.array(np.arange(5, dtype=np.uint64))), {}, None, "column 'key': expected int64, as the table's keys are, got uint64"),
    (columns(keys=pa.array(KEYS)), {"key": "string"}, None, "column 'key': expected string, as the table's keys are, got int64"),
    (columns(keys=pa.array(list("abcde"))), {}, None, "column 'key': expected int64, as the table's keys are, got string"),
    (columns(keys=pa.array([True] * 5)), {}, None, "column 'key': expected int64, as the table's keys are, got bool"),
    (columns(keys=pa.array([b"a", b"b", b"c", b"\xff", b"e"])), {"key": "string"}, 3, "string keys must be UTF-8"),
    (columns(vectors=[[1, 2]] * 5), {}, None, "column 'vector': expected a list or fixed-size list of floats, got list<"),
    (columns(vectors=[1.0] * 5), {}, None, "column 'vector': expected a list or fixed-size list of floats, got double"),
    (pa.table({"key": KEYS}), {}, None, "expected one column 'key' and one column 'vector', got key"),
    (pa.table({"id": KEYS, "vector": LISTS}), {}, None, "expected one column 'key' and one column 'vector', got id, vector"),
]  # fmt: skip


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
@pytest.mark.parametrize(("shard", "entry", "row", "reason"), ARROW, ids=[case[-1][:60] for case in ARROW])
def test_columns(
    tmp_path: Path, ending: str, shard: pa.Table, entry: dict[str, Any], row: int | None, reason: str
) -> None:
    name = f"p.{ending}"
    root = snapshot_of(tmp_path, save_shard(shard, name), **entry)
    with pytest.raises(SnapshotError) as refusal:
        load(root)
    assert (refusal.value.file, refusal.value.row) == (name, row)
    assert reason in str(refusal.value)
    assert name in str(refusal.value)
    assert row is None or f"row {row}" in str(refusal.value)


KEY_BYTES, VECTOR_BYTES = KEYS.astype("<i8").tobytes(), VECTORS.astype("<f4").tobytes()
HEADER = {
    "keys": {"dtype": "I64", "shape": [5], "data_offsets": [0, 40]},
    "vectors": {"dtype": "F32", "shape": [5, 2], "data_offsets": [40, 80]},
}


def header(name: str, **fields: Any) -> Save:
    return save_safetensors_raw({**HEADER, name: {**HEADER[name], **fields}}, KEY_BYTES + VECTOR_BYTES)


def npz_of(**members: bytes) -> Save:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return save_bytes("p.npz", buffer.getvalue())


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


class Bomb:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


TENSORS: dict[str, tuple[Save, dict[str, Any], str]] = {
    "npz rows": (save_npz(), {"rows": 4}, "expected 4 rows, as snapshot.json says, got more"),
    "npz fewer": (save_npz(), {"rows": 9}, "expected 9 rows, as snapshot.json says, got 5"),
    "npz dim": (save_npz(), {"dim": 3}, "tensor 'vectors': expected shape [5, 3] (keys, dim), got [5, 2]"),
    "npz lengths": (save_npz(keys=KEYS[:4], vectors=VECTORS), {}, "tensor 'vectors': expected shape [4, 2] (keys, dim), got [5, 2]"),
    "npz flat": (save_npz(keys=KEYS, vectors=VECTORS.reshape(-1)), {}, "expected shape [5, 2] (keys, dim), got [10]"),
    "npz keys 2-D": (save_npz(keys=KEYS.reshape(1, 5), vectors=VECTORS), {}, "tensor 'keys': expected one dimension, got shape [1, 5]"),
    "npz float keys": (save_npz(keys=KEYS * 1.0, vectors=VECTORS), {}, "tensor 'keys': expected int64, as the table's keys are, got float64"),
    "npz int vectors": (save_npz(keys=KEYS, vectors=VECTORS.astype(int)), {}, "tensor 'vectors': expected float16, float32 or float64, got int64"),
    "npz long double": (save_npz(keys=KEYS, vectors=VECTORS.astype(np.longdouble)), {}, "expected float16, float32 or float64, got float128"),
    "npz uint64": (save_npz(), {"key": "uint64"}, "tensor 'keys': expected uint64, as the table's keys are, got int64"),
    "npz int64": (save_npz(keys=KEYS.astype(np.uint64), vectors=VECTORS), {}, "tensor 'keys': expected int64, as the table's keys are, got uint64"),
    "npz strings": (save_npz(), {"key": "string"}, "a table with string keys needs .parquet or .arrow shards"),
    "npz names": (save_npz(ids=KEYS, vectors=VECTORS), {}, "expected arrays 'keys' and 'vectors', got ids.npy, vectors.npy"),
    "npz objects": (npz_of(keys=npy(np.array([Bomb()], object), True), vectors=npy(VECTORS)), {}, "keys.npy: holds Python objects, which would have to be unpickled"),
    "npz fortran": (save_npz(keys=KEYS, vectors=np.asfortranarray(VECTORS)), {}, "vectors.npy: is in Fortran order"),
    "npz no npy": (npz_of(keys=b"garbage", vectors=npy(VECTORS)), {}, "keys.npy: not a .npy header"),
    "npz cut within": (npz_of(keys=npy(KEYS), vectors=npy(VECTORS)[:-4]), {}, "tensor 'vectors' ends early"),
    "npz no zip": (save_bytes("p.npz", pickle.dumps(KEYS)), {}, "cannot be read: File is not a zip file"),
    "npz empty": (save_bytes("p.npz", b""), {}, "cannot be read: File is not a zip file"),
    "safetensors rows": (header("keys"), {"rows": 4}, "expected 4 rows, as snapshot.json says, got more"),
    "safetensors dim": (header("keys"), {"dim": 1}, "tensor 'vectors': expected shape [5, 1] (keys, dim), got [5, 2]"),
    "safetensors strings": (header("keys"), {"key": "string"}, "a table with string keys needs .parquet or .arrow shards"),
    "safetensors uint64": (header("keys"), {"key": "uint64"}, "tensor 'keys': expected uint64, as the table's keys are, got int64"),
    "safetensors bf16 keys": (save_safetensors({"keys": ("BF16", KEYS.astype("u2")), "vectors": ("F32", VECTORS)}), {}, "tensor 'keys': expected int64, as the table's keys are, got bfloat16"),
    "safetensors dtype": (header("keys", dtype="I128"), {}, "tensor 'keys': is of dtype 'I128'; expected one of BOOL"),
    "safetensors dtype list": (header("keys", dtype=[]), {}, "tensor 'keys': expected dtype, shape and data_offsets"),
    "safetensors size": (header("keys", shape=[6]), {}, "tensor 'keys': expected 48 bytes for I64 [6], got 40"),
    "safetensors shape": (header("keys", shape=[-5]), {}, "tensor 'keys': expected dtype, shape and data_offsets"),
    "safetensors true": (header("keys", shape=[True]), {}, "tensor 'keys': expected dtype, shape and data_offsets"),
    "safetensors huge": (header("keys", shape=[1 << 62, 1 << 62]), {}, "tensor 'keys': expected "),
    "safetensors backwards": (header("keys", data_offsets=[40, 0]), {}, "tensor 'keys': expected 40 bytes for I64 [5], got -40"),
    "safetensors overlap": (header("vectors", data_offsets=[0, 40]), {}, "expected its data to begin at"),
    "safetensors beyond": (header("vectors", data_offsets=[80, 120]), {}, "tensor 'vectors': expected its data to begin at 40, got 80"),
    "safetensors cut": (save_safetensors_raw(HEADER, (KEY_BYTES + VECTOR_BYTES)[:-1]), {}, "expected 80 bytes of data, as its header says, got 79"),
    "safetensors longer": (save_safetensors_raw(HEADER, KEY_BYTES + VECTOR_BYTES + b"x"), {}, "expected 80 bytes of data, as its header says, got 81"),
    "safetensors no vectors": (save_safetensors({"keys": ("I64", KEYS)}), {}, "expected tensors 'keys' and 'vectors', got 'keys'"),
    "safetensors no json": (save_safetensors_raw(b"{", b""), {}, "its header is not JSON"),
    "safetensors deep json": (save_safetensors_raw(b"[" * 100_000, b""), {}, "its header is not JSON"),
    "safetensors list": (save_safetensors_raw([], b""), {}, "its header is not a JSON object"),
    "safetensors entry": (save_safetensors_raw({"keys": 3}, b""), {}, "tensor 'keys': expected dtype, shape and data_offsets, got 3"),
    "safetensors length": (save_bytes("p.safetensors", struct.pack("<Q", 1 << 63) + b"{}"), {}, "its header would take 9223372036854775808 bytes of 10"),
    "safetensors empty": (save_bytes("p.safetensors", b""), {}, "not a safetensors file"),
    "hugectr rows": (save_hugectr(), {"rows": 4}, "expected 4 rows, as snapshot.json says, got more"),
    "hugectr dim": (save_hugectr(), {"dim": 3}, "emb_vector: expected 60 bytes (5 rows of 3 float32), got 40"),
    "hugectr key size": (save_hugectr(keys=KEY_BYTES[:-1]), {}, "key: expected a whole number of int64 keys, got 39 bytes"),
    "hugectr cut": (save_hugectr(vectors=VECTOR_BYTES[:-1]), {}, "emb_vector: expected 40 bytes (5 rows of 2 float32), got 39"),
    "hugectr uint64": (save_hugectr(), {"key": "uint64"}, "expected uint64 keys, as the table has; a HugeCTR folder's are int64"),
    "hugectr strings": (save_hugectr(), {"key": "string"}, "expected string keys, as the table has; a HugeCTR folder's are int64"),
    "arrow garbage": (save_bytes("p.arrow", b"ARROW1 but not really"), {}, "cannot be read"),
    "arrow empty": (save_bytes("p.arrow", b""), {}, "cannot be read"),
    "parquet garbage": (save_bytes("p.parquet", b"PAR1 but not really"), {}, "cannot be read"),
    "parquet empty": (save_bytes("p.parquet", b""), {}, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("save", "entry", "reason"), TENSORS.values(), ids=TENSORS)
def test_tensors_and_files(tmp_path: Path, save: Save, entry: dict[str, Any], reason: str) -> None:
    root = snapshot_of(tmp_path, save, **entry)
    with pytest.raises(SnapshotError) as refusal:
        load(root)
    assert refusal.value.file in ("p.npz", "p.safetensors", "sparse", "p.arrow", "p.parquet")
    assert str(refusal.value).startswith(f"{refusal.value.file}: ")
    assert reason in str(refusal.value)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("ending", ["pkl", "pickle", "pt", "npy", "csv", ""])
def test_other_endings_are_refused(tmp_path: Path, ending: str) -> None:
    root = snapshot_of(tmp_path, save_bytes(f"part.{ending}".rstrip("."), pickle.dumps(Bomb())))
    with pytest.raises(
        SnapshotError,
        match=r"part.*: expected \.parquet, \.arrow, \.safetensors, \.npz, a HugeCTR folder or a dir.*, got",
    ):
        open_snapshot(root)


@pytest.mark.parametrize("save", [save_npz(), save_hugectr(), save_shard(columns(), "p.arrow")])
def test_a_checksum_that_is_given_is_checked(tmp_path: Path, save: Save) -> None:
    name = save(tmp_path / "once" if (tmp_path / "once").mkdir() is None else tmp_path)
    right = checksum(tmp_path / "once" / name)
    load(snapshot_of(tmp_path / "good", save, xxh3=right))
    wrong = f"{int(right, 16) ^ 1:016x}"
    with pytest.raises(SnapshotError, match=f"wrong checksum: expected xxh3 {wrong}, got {right}") as refusal:
        load(snapshot_of(tmp_path / "bad", save, xxh3=wrong))
    assert refusal.value.file == name


def missing(root: Path) -> None:
    (root / "p.npz").unlink()


def link_out(root: Path) -> None:
    (root / "p.npz").rename(root.parent / "outside.npz")
    (root / "p.npz").symlink_to(root.parent / "outside.npz")


def link_loop(root: Path) -> None:
    (root / "p.npz").unlink()
    (root / "p.npz").symlink_to("p.npz")


def pipe(root: Path) -> None:
    (root / "p.npz").unlink()
    os.mkfifo(root / "p.npz")


def folder(root: Path) -> None:
    (root / "p.npz").unlink()
    (root / "p.npz").mkdir()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (missing, "is missing"),
        (link_out, "leads outside the snapshot's directory"),
        (link_loop, "is missing|cannot be read"),
        (pipe, "expected a file"),
        (folder, "expected .parquet or .arrow files in this directory"),
    ],
)
def test_a_shard_that_is_not_a_file_inside_the_snapshot(tmp_path: Path, spoil: Any, reason: str) -> None:
    root = snapshot_of(tmp_path / "s", save_npz())
    spoil(root)
    with pytest.raises(SnapshotError, match=f"^p.npz.*: ({reason})"):
        open_snapshot(root)


def test_a_hugectr_folder_whose_file_is_a_link_out_of_the_snapshot(tmp_path: Path) -> None:
    root = snapshot_of(tmp_path / "s", save_hugectr())
    (root / "sparse" / "key").rename(tmp_path / "key")
    (root / "sparse" / "key").symlink_to(tmp_path / "key")
    with pytest.raises(SnapshotError, match=r"^sparse/key: leads outside"):
        open_snapshot(root)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("http://host/ctr", "expected a path, or a URL of file://, s3://"),
        ("simplecache::s3://bucket/ctr", "chained URLs are not allowed"),
        ("file::file:///tmp", "chained URLs are not allowed"),
        ("file://elsewhere/tmp", "without host"),
        ("file:///tmp?x=1", "query"),
        ("file://[/x", "cannot read"),
        ("/no/such/dir", "is not a directory: expected a snapshot"),
        ("a\0b", "NUL"),
        ("", "expected a path or a URL, got ''"),
    ],
)
def test_a_source_that_is_none(tmp_path: Path, source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SnapshotError) as refusal:
        open_snapshot(source)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy(np.array([1.5])), "expected int64 keys, got float64"),
        (npy(np.array(["a"])), "expected int64 keys, got <U1"),
        (npy(np.zeros((2, 2), np.int64)), "expected one dimension of keys"),
        (npy(np.arange(4))[:-1], "expected one dimension of keys"),
        (npy(np.array([Bomb()], object), True), "holds Python objects"),
        (b"", "not a .npy header"),
    ],
)
def test_warm_up_keys(tmp_path: Path, content: bytes, reason: str) -> None:
    root = snapshot_of(tmp_path, save_npz())
    (root / "w.npy").write_bytes(content)
    text = (root / "snapshot.json").read_text()
    (root / "snapshot.json").write_text(text[:-1] + ', "warmup": {"item": "w.npy"}}')
    with pytest.raises(SnapshotError) as refusal:
        load(root)
    assert refusal.value.file == "w.npy"
    assert reason in str(refusal.value)


@pytest.mark.parametrize("entry", ['"warmup": {"item": "w.npy"}', '"dense": {"path": "d.onnx"}'])
def test_other_files_that_are_missing(tmp_path: Path, entry: str) -> None:
    root = snapshot_of(tmp_path, save_npz())
    text = (root / "snapshot.json").read_text()
    (root / "snapshot.json").write_text(text[:-1] + f", {entry}}}")
    with pytest.raises(SnapshotError, match=r"^(w.npy|d.onnx): is missing"):
        open_snapshot(root)


@pytest.mark.parametrize("name", ["p.arrow", "p.parquet", "p.safetensors", "p.npz"])
def test_damaged_shards_are_refused_or_read_but_never_worse(tmp_path: Path, name: str) -> None:
    """Without a checksum damage in the numbers passes; damage in the structure must be a SnapshotError."""
    saves = {"p.npz": save_npz(), "p.safetensors": header("keys")}
    save = saves.get(name) or save_shard(columns(), name)
    root = snapshot_of(tmp_path, save)
    whole = (root / name).read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.2 else whole)
        for at in rng.integers(len(damaged), size=3) if damaged else ():
            damaged[at] = rng.integers(256)
        (root / name).write_bytes(damaged)
        try:
            load(root)
        except SnapshotError as refusal:
            refused += refusal.file == name  # anything else that is raised fails the test
    assert refused > 30
