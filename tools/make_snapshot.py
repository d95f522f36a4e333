"""Write a random snapshot: for trying things out, and for benchmarks.

    python tools/make_snapshot.py out/ctr-1 --model ctr --version 1 --rows 1e6 --dim 32 --dtype float16

Keys are distinct and spread over the key type's range; vectors are normal with the seed arguments. Memory is
bounded by a batch. Whatever else a snapshot may hold is `tierstore.SnapshotWriter`'s to write.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tierstore import SnapshotWriter

BATCH_BYTES = 16 << 20
ODD = 0x9E3779B97F4A7C15  # multiplying by an odd number permutes the 64-bit integers


def batches(rows: int, dim: int, key: str, dense_keys: bool, seed: int) -> Iterator[tuple[Any, Any]]:
    """Keys and float32 vectors [n, dim], `rows` of them in all."""
    random = np.random.default_rng(seed)
    size = max(1, BATCH_BYTES // (4 * dim))
    for start in range(0, rows, size):
        numbers = np.arange(start, min(rows, start + size), dtype=np.uint64)
        spread = numbers if dense_keys else numbers * np.uint64(ODD)
        keys: Any = spread if key == "uint64" else spread.view(np.int64)
        if key == "string":
            keys = np.char.add("key-", keys.astype(str))
        yield keys, random.standard_normal((len(numbers), dim), dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--model", default="random")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--delta-seq", type=int, default=0)
    parser.add_argument("--table", default="item")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=1_000_000, help="such as 1000000 or 1e6")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16", "int8", "int4"], default="float32")
    parser.add_argument("--key", choices=["int64", "uint64", "string"], default="int64")
    parser.add_argument("--default", choices=["zeros", "mean"], default="zeros")
    parser.add_argument("--format", choices=["arrow", "parquet", "safetensors", "npz", "hugectr"], default="arrow")
    parser.add_argument("--rows-per-shard", type=lambda text: int(float(text)))
    parser.add_argument("--dense-keys", action="store_true", help="keys 0, 1, 2, … instead of spread ones")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    started = time.monotonic()
    with SnapshotWriter(
        arguments.directory, model=arguments.model, version=arguments.version, delta_seq=arguments.delta_seq
    ) as writer:
        table = writer.table(
            arguments.table,
            dim=arguments.dim,
            dtype=arguments.dtype,
            key=arguments.key,
            default=arguments.default,
            format=arguments.format,
            rows_per_shard=arguments.rows_per_shard,
        )
        for keys, vectors in batches(
            arguments.rows, arguments.dim, arguments.key, arguments.dense_keys, arguments.seed
        ):
            table.write(keys, vectors)
        writer.feature(f"{arguments.table}_id", table=arguments.table)
        writer.feature(f"{arguments.table}_bag", table=arguments.table, combiner="mean")
    print(f"{arguments.directory}: {arguments.rows} rows in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
