"""Turn HugeCTR/HPS sparse-model folders into a snapshot.

    python tools/convert_hugectr.py out/ctr-1 --model ctr --version 1 \\
        --table item=model/0_sparse_1000.model:32 --table user=model/1_sparse_1000.model:16 --dtype float16

A folder holds `key` (int64) and `emb_vector` (float32, dim numbers a key). Each becomes a table, and a
feature of the same name with the combiner given, if any. Rows are streamed; a folder whose files do not
match each other is refused. (A snapshot may also name such folders as its shards, unconverted.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tierstore import SnapshotWriter, TierstoreError

KEYS, VECTORS = "key", "emb_vector"
BATCH_BYTES = 16 << 20


def rows_of(folder: Path, dim: int) -> Iterator[tuple[Any, Any]]:
    """Keys int64[n] and vectors float32[n, dim] of a folder, batch by batch. ValueError if its files do not match."""
    key_bytes, vector_bytes = ((folder / name).stat().st_size for name in (KEYS, VECTORS))
    if key_bytes % 8 or vector_bytes != key_bytes // 8 * dim * 4:
        raise ValueError(
            f"{folder}: {key_bytes} bytes of int64 keys need {key_bytes // 8 * dim * 4} bytes of vectors of {dim} float32, came {vector_bytes}; is dim right?"
        )
    size = max(1, BATCH_BYTES // (4 * dim))
    with open(folder / KEYS, "rb") as keys, open(folder / VECTORS, "rb") as vectors:
        while len(batch := np.fromfile(keys, "<i8", size)):
            yield batch, np.fromfile(vectors, "<f4", len(batch) * dim).reshape(-1, dim)


def named_folder(text: str) -> tuple[str, Path, int]:
    """`name=folder:dim`, taken apart."""
    name, equals, rest = text.partition("=")
    folder, colon, dim = rest.rpartition(":")
    if not (equals and colon and name and folder and dim.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER:DIM, came {text!r}")
    return name, Path(folder), int(dim)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--model", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--delta-seq", type=int, default=0)
    parser.add_argument("--table", type=named_folder, action="append", required=True, metavar="NAME=FOLDER:DIM")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16", "int8"], default="float32")
    parser.add_argument("--default", choices=["zeros", "mean"], default="zeros")
    parser.add_argument("--combiner", choices=["sum", "mean", "sqrtn"])
    parser.add_argument("--dense", type=Path, help="an ONNX file")
    given = parser.parse_args()

    try:
        with SnapshotWriter(
            given.directory, model=given.model, version=given.version, delta_seq=given.delta_seq
        ) as out:
            for name, folder, dim in given.table:
                table = out.table(name, dim=dim, dtype=given.dtype, default=given.default)
                for keys, vectors in rows_of(folder, dim):
                    table.write(keys, vectors)
                out.feature(name, table=name, combiner=given.combiner)
                print(f"{name}: {table.rows} rows of {dim}")
            if given.dense:
                out.dense(given.dense)
    except (TierstoreError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
