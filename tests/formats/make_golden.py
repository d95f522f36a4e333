"""Writes the golden files in `schema/golden/`. Run once per format version, never by a test:

    python -m tests.formats.make_golden NEW_DIRECTORY

Files that readers out there rely on are not rewritten; a new case gets a new file.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.ingest.build import build_snapshot

MOMENT = "2026-11-20T02:00:00Z"
ONNX = b"stands for an ONNX model"


def snapshot(root: Path) -> None:
    """A table in each format; `numbers` and `words` are what `test_golden` compares with."""
    with SnapshotWriter(root, model="golden", version=20261120, delta_seq=41820, created_at=MOMENT) as writer:
        keys = np.array([-(1 << 63), -1, 0, 7, (1 << 63) - 1])
        vectors = np.arange(10, dtype=np.float32).reshape(5, 2) / 4 - 1
        formats: tuple[Any, ...] = ("arrow", "parquet", "safetensors", "npz", "hugectr")
        for format in formats:
            table = writer.table(format, dim=2, default="mean", format=format, rows_per_shard=3)
            table.write(keys, vectors)
        half = writer.table("half", dim=2, dtype="float16", default=[0.5, -2])
        half.write(keys, vectors)
        writer.table("unsigned", dim=1, key="uint64", dtype="bfloat16").write(
            [0, 1 << 63, (1 << 64) - 1], [[1], [2], [3]]
        )
        words = writer.table("words", dim=1, key="string", dtype="int8", format="parquet")
        words.write(["", "a", "käse"], [[1], [2], [3]])
        writer.feature("item_id", table="arrow")
        writer.feature("clicked", table="arrow", combiner="mean", padding_key=-1)
        writer.feature("query", table="words", combiner="sqrtn", padding_key="")
        writer.warmup("arrow", [7, 0])
        writer.warmup("words", ["käse"])
        writer.dense(ONNX)


def timed(root: Path) -> None:
    """A table a format whose rows have times, with a ttl of 1,000 weeks; and one whose rows have that of the snapshot.

    The first row is too old, and the others are not before the year 2125.
    """
    with SnapshotWriter(root, model="golden", version=20261123, created_at=MOMENT) as writer:
        keys, vectors = np.array([-1, 0, 7]), np.arange(6, dtype=np.float32).reshape(3, 2)
        for format in ("arrow", "parquet", "safetensors", "npz"):
            table = writer.table(format, dim=2, format=format, ttl_s="1000w", time_column="seen")  # type: ignore[arg-type]
            table.write(keys, vectors, [1, 4_294_967_294, 4_294_967_295])
        writer.table("snapshot", dim=2, ttl_s=3_162_240_000).write(keys, vectors)


def deltas(root: Path) -> None:
    """Each built by hand with pyarrow but the last, so that they do not inherit a mistake of the writer."""
    head = {"model": "golden", "event_time": MOMENT}
    lists = pa.schema([("key", pa.int64()), ("vector", pa.list_(pa.float32()))])
    rows = pa.record_batch(
        [pa.array([3, 1, 2, 3]), pa.array([[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32()))],
        schema=lists,
    )
    _save(
        root / "41821-upserts-and-deletes.arrow",
        [(lists, head | {"seq": "41821", "base_version": "20261120"}, [("arrow", rows)])],
    )
    wide = pa.schema([("key", pa.uint64()), ("vector", pa.list_(pa.float16(), 3))])
    wide_rows = pa.record_batch(
        [
            pa.array([(1 << 64) - 1], pa.uint64()),
            pa.array([np.array([1, 2, 3], np.float16)], pa.list_(pa.float16(), 3)),
        ],
        schema=wide,
    )
    head_2 = head | {"seq": "41822", "parts": "2"}
    _save(
        root / "41822-two-streams.arrow",
        [(lists, head_2, [("arrow", rows)]), (wide, head_2, [("unsigned", wide_rows)])],
    )
    text = pa.schema([("key", pa.string()), ("vector", pa.list_(pa.float32(), 1))])
    text_rows = pa.record_batch(
        [pa.array(["käse", "b"]), pa.array([[4.0], None], pa.list_(pa.float32(), 1))], schema=text
    )
    _save(root / "41823-strings-zstd.arrow", [(text, head | {"seq": "41823"}, [("words", text_rows)])], "zstd")
    onnx = pa.schema([("onnx", pa.binary())])
    dense = pa.record_batch([pa.array([ONNX])], schema=onnx)
    _save(root / "41824-dense.arrow", [(onnx, head | {"seq": "41824"}, [("__dense__", dense)])])
    gone = pa.record_batch([pa.array([None], pa.binary())], schema=onnx)
    heads = [("__dense__.cvr", dense), ("__dense__", gone)]
    _save(root / "41827-heads.arrow", [(onnx, head | {"seq": "41827"}, heads)])
    _save(root / "41825-empty.arrow", [(lists, head | {"seq": "41825"}, [])])
    with DeltaWriter(root / "41826-written.arrow", model="golden", seq=41826, event_time=MOMENT) as writer:
        writer.upsert("arrow", [10, 11], [[1, 2], [3, 4]])
        writer.upsert("half", [10], np.array([[5, 6]], np.float16))
        writer.delete("arrow", [11, 12])
        writer.delete("words", ["a"])
        writer.dense(ONNX)


def built_source(golden: Path, where: Path) -> Path:
    """The golden snapshot, but for its table of strings and most shard formats."""
    shutil.copytree(golden / "snapshot", where)
    document = json.loads((where / "snapshot.json").read_text())
    document["tables"] = [table for table in document["tables"] if table["name"] in ("arrow", "half", "unsigned")]
    document["features"] = document["features"][:2]
    del document["warmup"]["words"]
    (where / "snapshot.json").write_text(json.dumps(document))
    return where


def built(golden: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build_snapshot(built_source(golden, Path(scratch) / "s"), golden / "built-hashed", load_workers=1)


def timed_built(golden: Path, out: Path) -> None:
    build_snapshot(golden / "timed", out, load_workers=1)


def _save(path: Path, streams: list[Any], compression: str | None = None) -> None:
    with open(path, "xb") as file:
        for schema, metadata, batches in streams:
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(file, schema.with_metadata(metadata), options=options) as writer:
                for table, batch in batches:
                    writer.write_batch(batch, custom_metadata={"table": table})


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "deltas").mkdir(parents=True)
    snapshot(target / "snapshot")
    deltas(target / "deltas")
    built(target)
    timed(target / "timed")
    timed_built(target, target / "timed-built")
