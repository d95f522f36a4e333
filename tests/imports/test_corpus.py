"""The corpus of imports: each file's rows come out right, or it is refused with what is wrong and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.imports.make_corpus import CORPUS, KEYS, VECTORS, WORDS
from tests.imports.test_tables import rows_of
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.normalize import vector_rows
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.imports.hps import read_ps_json
from tierstore.imports.tables import LeftOut, import_table, import_tables

ITEMS = {"key": "item_id", "vector": "embedding"}
ROWS = dict(zip(KEYS.tolist(), VECTORS.tolist(), strict=True))
BY_WORD = dict(zip(WORDS, VECTORS.tolist(), strict=True))
BY_NUMBER = dict(enumerate(VECTORS.tolist()))
PAIRS = {key: [row[0], row[1]] for key, row in ROWS.items()}
GLOVE = {(". . of" if word == "of" else word): row for word, row in BY_WORD.items()}

READ: dict[str, tuple[str | list[str], dict[str, Any], dict[Any, list[float]]]] = {
    "raw pairs": ("pairs/tfra", {"dim": 3}, ROWS),
    "a part without rows": ("empty_part", ITEMS, ROWS),
    "categories": ("categories/categorical.arrow", {"key": "word", "vector": "embedding"}, BY_WORD),
    "an enumeration": ("categories/enum.arrow", {"key": "word", "vector": "embedding"}, BY_WORD),
    "views without nulls": (
        "categories/views.arrow",
        {"key": "word", "vector": "embedding", "on_null": "skip", "on_duplicate": "last"},
        BY_WORD,
    ),
    "columns by a pattern": ("many_columns", {"key": "item_id", "vector": "e*"}, ROWS),
    "one column of many": (
        "many_columns",
        {"key": "item_id", "vector": "e1", "dim": 1},
        {key: [row[1]] for key, row in ROWS.items()},
    ),
    "one column of numbers": (
        "many_columns",
        {"key": "item_id", "vector": "price"},
        {key: [row[0]] for key, row in ROWS.items()},
    ),
    "fields of a structure": (
        "structures/fields.parquet",
        {"key": "meta.id", "vector": "meta.features.embedding"},
        ROWS,
    ),
    "fields by a pattern": ("structures/fields.parquet", {"key": "meta.id", "vector": "meta.features.e[0-9]"}, PAIRS),
    "BigQuery's items": ("structures/bigquery_items.parquet", ITEMS, ROWS),
    "BigQuery's lists": ("structures/bigquery_list.parquet", ITEMS, ROWS),
    "capitals": ("capitals", ITEMS, ROWS),
    "an array of keys and one of rows": ("tensors/keys_and_rows.npz", {}, ROWS),
    "arrays that are named": ("tensors/two_keys.npz", {"key": "ids", "vector": "rows"}, ROWS),
    "an array of words": ("tensors/words.npz", {}, BY_WORD),
    "rows alone": ("tensors/rows.npz", {}, BY_NUMBER),
    "a folder of arrays": ("tensors/pair", {}, ROWS),
    "a pair of arrays": (["tensors/pair/ids.npy", "tensors/pair/embeddings.npy"], {"vector": "embeddings"}, ROWS),
    "a checkpoint in several files": ("tensors/folder", {"vector": "item.weight"}, BY_NUMBER),
    "a folder of shards": ("tensors/shards", {}, ROWS),
    "one of several files": ("tensors/ranks/rank-1.safetensors", {}, dict(enumerate(VECTORS[2:].tolist()))),
    "keys that become text": ("tensors/keys_and_rows.npz", {"key_type": "string"}, {str(k): r for k, r in ROWS.items()}),
    "word2vec": ("text/word2vec.txt", {"dim": 3}, BY_WORD),
    "fastText": ("text/fasttext.vec", {}, BY_WORD),
    "GloVe, with blanks in a key": ("text/glove.txt", {"dim": 3}, GLOVE),
    "tabs": ("text/tabs.txt", {}, BY_WORD),
}  # fmt: skip

LIVE = "its log says which files and rows are live"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a file of a delta table": ("delta/part-0.parquet", ITEMS, rf"/delta is a Delta table \(_delta_log\): {LIVE}.*delta_scan\('.*/delta'\)"),
    "the data of iceberg": ("iceberg/data", ITEMS, rf"/iceberg is an Iceberg table \(metadata\): {LIVE}.*iceberg_scan"),
    "hudi": ("hudi", ITEMS, rf"hudi is a Hudi table \(\.hoodie\): {LIVE}.*format\('hudi'\)"),
    "paimon": ("paimon", ITEMS, "paimon is a Paimon table"),
    "the data of paimon": ("paimon/bucket-0", ITEMS, "/paimon is a Paimon table"),
    "hive's transactions": ("hive_transactions", ITEMS, "hive_transactions is a table of Hive's with transactions"),
    "ducklake": ("ducklake", ITEMS, "ducklake is a DuckLake table"),
    "codes with scale and bias": (
        "quantized/scale_and_bias.safetensors",
        {},
        r"tensor 'w': expected rows of floats, got uint8: the codes .*w_qscale \[2\], w_qbias \[2\] beside it",
    ),
    "codes with scale and shift": (
        "quantized/scale_and_shift.safetensors",
        {"vector": "ebc.item.weight"},
        r"got uint8: the codes .*ebc.item.weight_qscaleshift \[2, 2\] beside it",
    ),
    "codes of a module": ("quantized/module.safetensors", {}, r"got int8: the codes .*item.scale \[2\] beside it"),
    "codes alone": ("quantized/alone.safetensors", {}, "tensor 'w': expected rows of floats, got int8; save the numbers"),
    "codes in arrays": ("quantized/codes.npz", {}, "tensor 'rows': expected rows of floats, got int8"),
    "codes in columns": ("quantized/columns.parquet", ITEMS, "with 'embedding_scale' beside it: these are codes"),
    "raw pairs of any types": ("pairs/tfra", {}, "item_mht_1of1-keys: does not say the types of its keys and numbers: .*--dim"),
    "keys of 32 bits": (
        "pairs/tfra_int32_keys",
        {"dim": 3},
        r"expected 12 bytes \(1 rows of 3 float32\), got 24, which is right for keys of 32 bits: write int64 keys",
    ),
    "numbers of 16 bits": (
        "pairs/tfra_float16",
        {"dim": 3},
        r"expected 48 bytes \(4 rows of 3 float32\), got 24, which is right for float16 numbers",
    ),
    "another dim than the columns'": (
        "many_columns",
        {"key": "item_id", "vector": "e*", "dim": 4},
        r"items.parquet, row 0: expected vectors of 4 numbers, as --dim \(dim=\) says, got 3",
    ),
    "another dim than the text's": ("text/word2vec.txt", {"dim": 4}, "as --dim says; the first line says 3"),
    "a part whose vectors are null": ("null_part", ITEMS, "part-2.parquet: column 'embedding': .*--on-null skip"),
    "one of many columns": (
        "many_columns",
        {"key": "item_id", "vector": "e0"},
        r"column 'e0' is one number a row, and one of 3 such columns: --vector 'e\[0-9\]\*' .*, --dim 1 this one alone",
    ),
    "a field that is not there": ("structures/fields.parquet", {"key": "meta.no", "vector": "x"}, "'meta.no' for keys"),
    "128 bits": ("int128", ITEMS, "items.parquet: .*64 bits.*; cast columns of 128 bits to Int64"),
    "ranks without keys": ("tensors/ranks", {}, r"'item.weight' is in .*rank-0.*rank-1.*--key \(key=\)"),
    "two arrays that may be keys": ("tensors/two_keys.npz", {}, r"--key \(key=\): ids \[4\], counts \[4\]"),
    "an array of objects": ("tensors/keys_and_rows.npz", {"key": "note"}, "'note': holds Python objects"),
    "text that was cut": ("text/cut.txt", {}, "cut.txt: expected 4 rows, as its first line says, got 3"),
    "a short line": ("text/short_line.txt", {}, r"short_line.txt, row 2: expected a key and 3 numbers, got .*counted from 0"),
    "text that is no number": ("text/no_number.txt", {}, r"no_number.txt, row 2: expected a number, got b'y'"),
    "prose": ("text/prose.txt", {}, "prose.txt, row 0: expected lines of a key and numbers"),
    "words that become numbers": ("text/word2vec.txt", {"key_type": "int64"}, r"row 0: column 'key': expected int64 .*--key-type string"),
}  # fmt: skip


def source(names: str | list[str]) -> Any:
    return [CORPUS / name for name in names] if isinstance(names, list) else CORPUS / names


@pytest.mark.parametrize(("names", "options", "rows"), READ.values(), ids=READ)
def test_it_is_read(tmp_path: Path, names: Any, options: dict[str, Any], rows: dict[Any, list[float]]) -> None:
    import_table(source(names), model="ctr", table="item", out=tmp_path / "s", **options)
    assert rows_of(tmp_path / "s") == rows


@pytest.mark.parametrize(("names", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_what_to_do(tmp_path: Path, names: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        import_table(source(names), model="ctr", table="item", out=tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_a_directory_above_a_table_with_a_log_is_refused(tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "delta", tmp_path / "lake/items")
    with pytest.raises(SnapshotError, match=r"lake/items is a Delta table"):
        import_table(tmp_path / "lake", model="ctr", table="item", out=tmp_path / "s", **ITEMS)


def test_a_directory_of_several_kinds_is_refused_with_one_of_each(tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "capitals", tmp_path / "items")
    shutil.copy(CORPUS / "tensors/pair/ids.npy", tmp_path / "items")
    with pytest.raises(SnapshotError, match=r"several kinds, as (ITEMS.PARQUET|ids.npy) and (ITEMS.PARQUET|ids.npy)"):
        import_table(tmp_path / "items", model="ctr", table="item", out=tmp_path / "s", **ITEMS)


def test_rows_of_a_part_that_is_null_are_left_out(tmp_path: Path) -> None:
    left: list[LeftOut] = []
    options: dict[str, Any] = {"on_null": "skip", "on_duplicate": "last", "left_out": left.append, **ITEMS}
    import_table(CORPUS / "null_part", model="ctr", table="item", out=tmp_path / "s", **options)
    assert rows_of(tmp_path / "s") == ROWS
    assert left == [LeftOut("item", nulls=2, duplicates=0)]


@pytest.mark.parametrize(("key", "keys"), [("site", ["a b"]), ("item_id", KEYS.tolist())])
def test_what_the_names_of_hives_folders_say_is_a_column(tmp_path: Path, key: str, keys: list[Any]) -> None:
    options: dict[str, Any] = {"key": key, "vector": "embedding", "ttl_s": "300d", "time_column": "day"}
    import_table(CORPUS / "hive", model="ctr", table="item", out=tmp_path / "s", **options)
    assert list(rows_of(tmp_path / "s")) == keys
    days = (np.array(["2026-11-20"] * 2 + ["2026-11-21"] * 2, "M8[s]")).astype(np.int64)
    times = [batch.times for batch in open_snapshot(tmp_path / "s").batches("item", 0)]
    assert [time for part in times if part is not None for time in part.tolist()] == days.tolist()


@pytest.mark.parametrize(
    ("folder", "time"),
    [
        ("ts=2026-11-20 10%3A00%3A00", "2026-11-20T10:00:00"),
        ("ts=2026-11-20%2010%3A00%3A00.5", "2026-11-20T10:00:00"),
        ("ts=2026-11-20T10%3A00%3A00%2B02%3A00", "2026-11-20T08:00:00"),
        ("ts=2026-11-20", "2026-11-20T00:00:00"), ("ts=1795168800", "2026-11-20T10:00:00"),
    ],
)  # fmt: skip
def test_times_of_hives_folders_are_taken_as_spark_writes_them(tmp_path: Path, folder: str, time: str) -> None:
    where = tmp_path / "items" / folder
    where.mkdir(parents=True)
    pq.write_table(pa.table({"item_id": [5], "embedding": [[1.0, 2.0]]}), where / "part-0.parquet")
    options: dict[str, Any] = {"ttl_s": "300d", "time_column": "ts"}
    import_table(tmp_path / "items", model="ctr", table="item", out=tmp_path / "s", **ITEMS, **options)
    (batch,) = open_snapshot(tmp_path / "s").batches("item", 0)
    assert batch.times.tolist() == [int(np.datetime64(time, "s").astype(np.int64))]
    named = unquote(folder.removeprefix("ts="))
    import_table(tmp_path / "items", model="ctr", table="item", out=tmp_path / "k", key="ts", vector="embedding")
    assert list(rows_of(tmp_path / "k")) == [int(named) if named.isdigit() else named], "as a key it is what it says"


@pytest.mark.parametrize("text", ["10%3A00%3A00", "yesterday", "2026-11-20 25%3A00%3A00"])
def test_a_folders_name_that_is_no_moment_is_refused_as_a_time(tmp_path: Path, text: str) -> None:
    where = tmp_path / f"items/ts={text}"
    where.mkdir(parents=True)
    pq.write_table(pa.table({"item_id": [5], "embedding": [[1.0, 2.0]]}), where / "part-0.parquet")
    with pytest.raises(SnapshotError, match=rf"'ts' of folders: expected a time .*, got '{unquote(text)}'"):
        import_table(
            tmp_path / "items", model="ctr", table="item", out=tmp_path / "s", ttl_s="9d", time_column="ts", **ITEMS
        )


def test_a_column_that_is_nowhere_is_refused_with_those_of_the_folders(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"'no' for keys; there are .*day \(date32\[day\], of folders\)"):
        import_table(CORPUS / "hive", model="ctr", table="item", out=tmp_path / "s", key="no", vector="embedding")


def test_sizes_that_hps_declares_are_those_of_the_files(tmp_path: Path) -> None:
    (model,) = read_ps_json(CORPUS / "hps/int64/ps.json")
    out = import_tables(model.tables, model=model.name, out=tmp_path / "s")
    assert rows_of(out) == dict(zip([7, 8, 9, 10], VECTORS.tolist(), strict=True))
    (model,) = read_ps_json(CORPUS / "hps/int32/ps.json")
    with pytest.raises(SnapshotError, match=r"\(2 rows of 3 float32\), got 48, which is right for keys of 32 bits"):
        import_tables(model.tables, model=model.name, out=tmp_path / "bad")


def test_the_files_are_small() -> None:
    sizes = {path: path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 4096
    assert sum(sizes.values()) < 1 << 17


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"key": KEYS[:, None], "vector": VECTORS}, r"'key' has 2 dimensions, expected 1: key \[4, 1\]"),
        ({"key": KEYS, "vector": VECTORS[:, 0]}, r"'vector' has 1 dimensions, expected 2: vector \[4\]"),
        ({"key": KEYS, "vector": VECTORS[:, None]}, r"'vector' has 3 dimensions, expected 2: vector \[4, 1, 3\]"),
        (
            {"key": KEYS.astype(np.float64), "vector": VECTORS},
            r"tensor 'key': expected integers or strings for keys, got float64",
        ),
    ],
    ids=["a column of keys", "a row of numbers", "blocks", "floats for keys"],
)
def test_an_array_of_another_form_is_refused_by_its_form(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(SnapshotError, match=reason):
        import_table(tmp_path / "a.npz", model="ctr", table="item", out=tmp_path / "s")


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", key=KEYS.astype(">i8"), vector=VECTORS.astype(">f4"))
    import_table(tmp_path / "a.npz", model="ctr", table="item", out=tmp_path / "s")
    assert rows_of(tmp_path / "s") == ROWS
    np.savez(tmp_path / "halves.npz", key=KEYS.astype(">i8"), vector=VECTORS.astype(">f2"))
    out = import_table(tmp_path / "halves.npz", model="ctr", table="item", out=tmp_path / "halves")
    assert open_snapshot(out).manifest.table("item").dtype == "float16"
    assert rows_of(out) == ROWS


def safetensors(file: Path, **entries: tuple[str, list[int], bytes]) -> Path:
    """A file of tensors, each of a type, a shape and bytes."""
    header, data = {}, b""
    for name, (kind, shape, of) in entries.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(of)]}
        data += of
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(("kind", "name"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")])
def test_floats_of_8_bits_are_the_numbers_that_they_are_in_every_way_in(tmp_path: Path, kind: str, name: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(64, 4)
    numbers = codes.view(getattr(ml_dtypes, name))
    finite = np.isfinite(numbers.astype(np.float32)).all(axis=1)
    codes, numbers = codes[finite], numbers[finite]
    expected = numbers.astype(np.float32)
    assert len(expected) > 50
    file = safetensors(tmp_path / "a.safetensors", w=(kind, list(codes.shape), codes.tobytes()))
    import_table(file, model="ctr", table="item", vector="w", out=tmp_path / "s")
    assert list(rows_of(tmp_path / "s").values()) == expected.tolist()
    for vectors in (numbers, list(numbers)):
        taken = vector_rows(vectors)
        assert taken.dtype == np.float32
        np.testing.assert_array_equal(taken, expected)


def test_pytorchs_floats_of_8_bits_are_taken_and_parts_of_blocks_are_not() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    wide = torch.tensor([[0.5, 1.0, -2.0], [448.0, 0.0, -0.25]])
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        np.testing.assert_array_equal(vector_rows(wide.to(kind)), wide.to(kind).float().numpy())
    for kind in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        with pytest.raises(InvalidInput, match=r"got float.*: parts of a block format"):
            vector_rows(torch.ones((2, 4), dtype=torch.uint8).view(kind))


def test_parts_of_blocks_and_types_that_numpy_did_not_name_are_refused_in_every_way_in(tmp_path: Path) -> None:
    for kind in (ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float8_e8m0fnu):
        with pytest.raises(InvalidInput, match=r"got float.*: parts of a block format, .* as float32"):
            vector_rows(np.ones((2, 4), kind))
    for kind in ("F4", "F8_E8M0"):
        file = safetensors(tmp_path / "a.safetensors", w=(kind, [2, 4], bytes(8)), item=("F32", [1, 1], bytes(4)))
        with pytest.raises(SnapshotError, match=rf"a.safetensors: 'w': is of dtype '{kind}'; .* I64, F16, F32"):
            import_table(file, model="ctr", table="item", vector="w", out=tmp_path / "refused")
    import_table(file, model="ctr", table="item", vector="item", out=tmp_path / "s")
    assert rows_of(tmp_path / "s") == {0: [0.0]}, "it hinders no other tensor"
    for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16):
        np.savez(tmp_path / "a.npz", key=KEYS, vector=VECTORS.astype(kind))
        with pytest.raises(SnapshotError, match=r"as NumPy writes types that it does not have .* save them as float32"):
            import_table(tmp_path / "a.npz", model="ctr", table="item", out=tmp_path / "refused")
    np.savez(tmp_path / "a.npz", key=KEYS, vector=VECTORS.astype(ml_dtypes.float8_e5m2))
    with pytest.raises(SnapshotError, match=r"'vector': .*<f1.* save .*float32"):
        import_table(tmp_path / "a.npz", model="ctr", table="item", out=tmp_path / "refused")
