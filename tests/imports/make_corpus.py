"""Writes `tests/corpus/imports`: a small table, as each of the tools and formats leaves it that imports meet.

    python -m tests.imports.make_corpus

The files are kept, so that what is read does not change with the libraries that wrote them. Logs of lake formats are written
by hand, as their specifications have them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq

CORPUS = Path(__file__).parents[1] / "corpus/imports"
KEYS = np.array([7, 4711, -3, 2**62], np.int64)
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) / 4
WORDS = ["the", "of", "ünï", "and"]
HALVES = [slice(0, 2), slice(2, 4)]


def columns(rows: slice = slice(None), **others: Any) -> pa.Table:
    return pa.table({"item_id": KEYS[rows], "embedding": pa.array(VECTORS[rows].tolist()), **others})


def write_json(path: Path, *documents: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def parts_of(folder: Path, name: str = "part-{}.parquet") -> None:
    """Two files of columns, of which a log would say that only one counts."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(HALVES):
        pq.write_table(columns(rows), folder / name.format(number))


def safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    names = {"u1": "U8", "i1": "I8", "i4": "I32", "i8": "I64", "f2": "F16", "f4": "F32"}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.str[1:]], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# --- tables that a log describes


def delta(where: Path) -> None:
    parts_of(where)
    adds: list[Any] = [
        {"add": {"path": f"part-{i}.parquet", "partitionValues": {}, "size": 1000, "modificationTime": 0, "dataChange": True}}
        for i in (0, 1)
    ]  # fmt: skip
    write_json(
        where / "_delta_log/00000000000000000000.json",
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        *adds,
    )
    removed = {"path": "part-0.parquet", "deletionTimestamp": 0, "dataChange": True}
    write_json(where / "_delta_log/00000000000000000001.json", {"remove": removed})


def iceberg(where: Path) -> None:
    parts_of(where / "data", "0000{}-0-b4ae4e0d.parquet")
    write_json(where / "metadata/00001-0571d073.metadata.json", {"format-version": 2, "location": "file:///lake/items"})
    (where / "metadata/snap-8901806314607062418-0-0508d9cf.avro").write_bytes(b"Obj\x01")


def hudi(where: Path) -> None:
    parts_of(where, "0e2a-0_{}-1-0_20261120093000.parquet")
    (where / ".hoodie").mkdir()
    (where / ".hoodie/hoodie.properties").write_text("hoodie.table.name=items\nhoodie.table.type=COPY_ON_WRITE\n")
    write_json(where / ".hoodie/20261120093000.commit", {"operationType": "UPSERT"})


def paimon(where: Path) -> None:
    parts_of(where / "bucket-0", "data-6c1f-{}.parquet")
    for name in ("snapshot/snapshot-1", "schema/schema-0"):
        write_json(where / name, {"id": 1})
    (where / "manifest").mkdir()
    (where / "manifest/manifest-list-6c1f-0").write_bytes(b"Obj\x01")


def hive_transactions(where: Path) -> None:
    for folder in ("base_0000001", "delete_delta_0000002_0000002_0000"):
        (where / folder).mkdir(parents=True)
        orc.write_table(columns(), where / folder / "bucket_00000.orc")
        (where / folder / "_orc_acid_version").write_text("2")


def ducklake(where: Path) -> None:
    parts_of(where, "ducklake-0197c1f0-8b2d-7c3a-9f10-00000000000{}.parquet")


# --- codes


def quantized(where: Path) -> None:
    where.mkdir(parents=True)
    codes = np.array([[0, 128, 255], [1, 2, 3]], np.uint8)
    scale, shift = np.array([0.5, 0.25], np.float32), np.array([[0.5, -1], [0.25, 2]], np.float16)
    safetensors(where / "scale_and_bias.safetensors", {"w": codes, "w_qscale": scale, "w_qbias": -scale})
    safetensors(where / "scale_and_shift.safetensors", {"ebc.item.weight": codes, "ebc.item.weight_qscaleshift": shift})
    safetensors(where / "module.safetensors", {"item.weight": codes.view(np.int8), "item.scale": scale})
    safetensors(where / "alone.safetensors", {"w": codes.view(np.int8)})
    np.savez(where / "codes.npz", ids=KEYS[:2], rows=codes.view(np.int8))
    lists = pa.array(codes.tolist(), pa.list_(pa.uint8()))
    pq.write_table(
        pa.table({"item_id": KEYS[:2], "embedding": lists, "embedding_scale": scale}), where / "columns.parquet"
    )


# --- pairs of raw files, which say nothing of themselves


def pairs(where: Path) -> None:
    for folder, keys, rows in (("tfra", KEYS, VECTORS), ("tfra_int32_keys", KEYS[:2].astype("<i4"), VECTORS[:2]), ("tfra_float16", KEYS, VECTORS.astype("<f2"))):  # fmt: skip
        (where / folder).mkdir(parents=True)
        keys.tofile(where / folder / "item_mht_1of1-keys")
        rows.tofile(where / folder / "item_mht_1of1-values")


def hps(where: Path) -> None:
    for folder, kind in (("int64", "<i8"), ("int32", "<i4")):
        table = where / folder / "0_sparse.model"
        table.mkdir(parents=True)
        np.array([7, 8, 9, 10], kind).tofile(table / "key")
        VECTORS.tofile(table / "emb_vector")
        model = {"model": "wdl", "sparse_files": ["0_sparse.model"], "embedding_table_names": ["item"]}
        model |= {"embedding_vecsize_per_table": [3], "default_value_for_each_table": [0.0]}
        write_json(where / folder / "ps.json", {"supportlonglong": folder == "int64", "models": [model]})


# --- columns


def empty_part(where: Path) -> None:
    """Dask's and pandas' partition without rows, whose columns have no type."""
    parts_of(where)
    pd.DataFrame({"item_id": [], "embedding": []}, dtype=object).to_parquet(where / "part-2.parquet")


def null_part(where: Path) -> None:
    """A partition whose vectors are null in every row."""
    parts_of(where)
    pd.DataFrame({"item_id": [1, 2], "embedding": [None, None]}).to_parquet(where / "part-2.parquet")


def categories(where: Path) -> None:
    where.mkdir(parents=True)
    frame = pl.DataFrame({"word": WORDS, "embedding": VECTORS.tolist()})
    for name, kind in (("categorical", pl.Categorical), ("enum", pl.Enum(WORDS))):
        frame.with_columns(pl.col("word").cast(kind)).write_ipc(
            where / f"{name}.arrow", compat_level=pl.CompatLevel.newest()
        )
    frame.write_ipc(where / "views.arrow", compat_level=pl.CompatLevel.newest())


def many_columns(where: Path) -> None:
    where.mkdir(parents=True)
    numbers = {f"e{i}": VECTORS[:, i] for i in range(3)}
    pq.write_table(pa.table({"item_id": KEYS, **numbers, "price": VECTORS[:, 0]}), where / "items.parquet")


def structures(where: Path) -> None:
    where.mkdir(parents=True)
    lists = pa.array(VECTORS.tolist(), pa.list_(pa.float32()))
    inner = pa.StructArray.from_arrays(
        [lists, pa.array(VECTORS[:, 0]), pa.array(VECTORS[:, 1])], ["embedding", "e0", "e1"]
    )
    meta = pa.StructArray.from_arrays([pa.array(KEYS), inner], ["id", "features"])
    pq.write_table(pa.table({"meta": meta}), where / "fields.parquet")
    items = [[{"item": number} for number in row] for row in VECTORS.tolist()]
    kind = pa.list_(pa.struct([("item", pa.float32())]))
    pq.write_table(pa.table({"item_id": KEYS, "embedding": pa.array(items, kind)}), where / "bigquery_items.parquet")
    wrapped = pa.array([{"list": row} for row in items], pa.struct([("list", kind)]))
    pq.write_table(pa.table({"item_id": KEYS, "embedding": wrapped}), where / "bigquery_list.parquet")


def capitals(where: Path) -> None:
    where.mkdir(parents=True)
    pq.write_table(columns(), where / "ITEMS.PARQUET")


def hive(where: Path) -> None:
    for day, rows in zip(("2026-11-20", "2026-11-21"), HALVES, strict=True):
        folder = where / f"day={day}" / "site=a%20b"
        folder.mkdir(parents=True)
        pq.write_table(columns(rows), folder / "part-0.parquet")


def int128(where: Path) -> None:
    where.mkdir(parents=True)
    frame = pl.DataFrame({"item_id": pl.Series(KEYS.tolist(), dtype=pl.Int128), "embedding": VECTORS.tolist()})
    frame.write_parquet(where / "items.parquet")


# --- tensors, arrays and text


def tensors(where: Path) -> None:
    where.mkdir(parents=True)
    np.savez(where / "keys_and_rows.npz", ids=KEYS, rows=VECTORS, note=np.array([{"a": 1}], object))
    np.savez(where / "words.npz", words=np.array(WORDS), rows=VECTORS)
    np.savez(where / "two_keys.npz", ids=KEYS, counts=KEYS, rows=VECTORS)
    np.savez(where / "rows.npz", rows=VECTORS)
    (where / "pair").mkdir()
    np.save(where / "pair/ids.npy", KEYS)
    np.save(where / "pair/embeddings.npy", VECTORS)
    safetensors(where / "folder/model-00001-of-00002.safetensors", {"item.weight": VECTORS})
    safetensors(where / "folder/model-00002-of-00002.safetensors", {"head.weight": VECTORS[:1]})
    write_json(where / "folder/config.json", {"architectures": ["Ranker"]})
    (where / "folder/vocab.txt").write_text("a\nb\n")
    for number, rows in enumerate(HALVES):
        safetensors(where / f"shards/part-{number}.safetensors", {"keys": KEYS[rows], "vectors": VECTORS[rows]})
        safetensors(where / f"ranks/rank-{number}.safetensors", {"item.weight": VECTORS[rows]})


def text(where: Path) -> None:
    where.mkdir(parents=True)
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in zip(WORDS, VECTORS.tolist(), strict=True)]
    (where / "word2vec.txt").write_text("\n".join(["4 3", *lines]) + "\n", encoding="utf-8")
    (where / "fasttext.vec").write_text("\n".join(["4 3", *(f"{line} " for line in lines)]) + "\n", encoding="utf-8")
    (where / "glove.txt").write_text("\n".join(lines).replace("of ", ". . of "), encoding="utf-8")
    (where / "tabs.txt").write_text("\n".join(lines).replace(" ", "\t") + "\n", encoding="utf-8")
    (where / "cut.txt").write_text("\n".join(["4 3", *lines[:3]]) + "\n", encoding="utf-8")
    (where / "short_line.txt").write_text("\n".join(["4 3", *lines[:2], "ü 1.0", lines[3]]) + "\n", encoding="utf-8")
    (where / "no_number.txt").write_text("\n".join([*lines[:2], "x 1.0 y 3.0"]) + "\n", encoding="utf-8")
    (where / "prose.txt").write_text("Readme\n")


WRITERS: tuple[Callable[[Path], None], ...] = (
    delta, iceberg, hudi, paimon, hive_transactions, ducklake, quantized, pairs, hps, empty_part, null_part, categories,
    many_columns, structures, capitals, hive, int128, tensors, text,
)  # fmt: skip


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    for write in WRITERS:
        write(CORPUS / write.__name__)


if __name__ == "__main__":
    main()
