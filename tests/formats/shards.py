"""Shards made without the code under test, and snapshots around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEYS = np.array([5, -3, 100, 0, 7])
VECTORS = np.arange(10, dtype=np.float32).reshape(5, 2) / 4

Save = Callable[[Path], str]  # writes a shard into a directory and returns its path within


def snapshot_of(
    root: Path,
    save: Save,
    *,
    rows: int = 5,
    dim: int = 2,
    key: str = "int64",
    dtype: str = "float32",
    xxh3: str | None = None,
) -> Path:
    """A snapshot directory with one table, `item`, of the one shard that `save` writes."""
    root.mkdir(parents=True, exist_ok=True)
    path = save(root)
    shard: dict[str, Any] = {"path": path, "rows": rows}
    if xxh3 is not None:
        shard["xxh3"] = xxh3
    table = {"name": "item", "key": key, "dim": dim, "dtype": dtype, "rows": rows, "shards": [shard]}
    document = {"format": 1, "model": "ctr", "version": 1, "tables": [table]}
    (root / "snapshot.json").write_text(json.dumps(document), encoding="utf-8")
    return root


def save_shard(table: pa.Table, name: str) -> Save:
    """`.parquet`, or `.arrow` as a file."""

    def save(root: Path) -> str:
        if name.endswith(".parquet"):
            pq.write_table(table, root / name)
        else:
            with pa.ipc.new_file(str(root / name), table.schema) as writer:
                writer.write_table(table)
        return name

    return save


def save_npz(**arrays: Any) -> Save:
    def save(root: Path) -> str:
        np.savez(root / "p.npz", **(arrays or {"keys": KEYS, "vectors": VECTORS}))
        return "p.npz"

    return save


def save_safetensors(tensors: dict[str, tuple[str, np.ndarray]]) -> Save:
    def save(root: Path) -> str:
        header, data = {"__metadata__": {"made": "by hand"}}, b""
        for name, (dtype, array) in tensors.items():
            raw = array.tobytes()
            header[name] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }  # type: ignore[dict-item]
            data += raw
        return save_safetensors_raw(header, data)(root)

    return save


def save_safetensors_raw(header: Any, data: bytes) -> Save:
    def save(root: Path) -> str:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (root / "p.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        return "p.safetensors"

    return save


def save_hugectr(keys: bytes | None = None, vectors: bytes | None = None) -> Save:
    def save(root: Path) -> str:
        (root / "sparse").mkdir()
        (root / "sparse" / "key").write_bytes(KEYS.tobytes() if keys is None else keys)
        (root / "sparse" / "emb_vector").write_bytes(VECTORS.tobytes() if vectors is None else vectors)
        return "sparse"

    return save


def save_bytes(name: str, content: bytes) -> Save:
    def save(root: Path) -> str:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        return name

    return save
