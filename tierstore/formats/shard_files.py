"""Writing one shard, batch by batch: `.arrow`, `.parquet`, `.safetensors`, `.npz`, a HugeCTR folder.

A shard writer belongs to one thread. `finish` publishes the shard (durable, whole) and returns its
XXH3-64; `discard` leaves nothing behind. Formats that keep keys and vectors apart spool the vectors
to a scratch file beside the shard, so memory stays bounded in every format.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tierstore.formats import files
from tierstore.formats.checksum import checksum
from tierstore.formats.columns import KEY, VECTOR
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.types import Vectors

_BLOCK = 4 << 20


class ShardFile(Protocol):
    """A shard being written. `keys` is a NumPy array of int64 or uint64, or an Arrow string array."""

    def write(self, keys: Any, vectors: Vectors) -> None: ...

    def finish(self) -> str: ...

    def discard(self) -> None: ...


class _Hashing:
    """A file that only appends, and knows the XXH3-64 of what went through it."""

    def __init__(self, file: BinaryIO, digest: xxhash.xxh3_64) -> None:
        self._file, self._digest, self._reached = file, digest, 0
        self.closed = False
        self.discarding = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.discarding:  # a writer writes its footer when it goes, wanted or not
            return len(view)
        self._digest.update(view)
        self._file.write(view)
        self._reached += len(view)
        return len(view)

    def tell(self) -> int:
        return self._reached

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def seekable(self) -> bool:
        return False

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


class ArrowShard:
    """`.arrow` (an IPC file) or `.parquet`: uncompressed, since float rows do not compress."""

    def __init__(self, path: Path, key_type: pa.DataType, value_type: pa.DataType, dim: int) -> None:
        self._publication = files.Publication(path)
        self._digest = xxhash.xxh3_64()
        self._schema = pa.schema(
            [
                pa.field(KEY, key_type, nullable=False),
                pa.field(VECTOR, pa.list_(pa.field("item", value_type, nullable=False), dim), nullable=False),
            ]
        )
        self._hashing = _Hashing(self._publication.file, self._digest)
        sink = pa.PythonFile(self._hashing, "w")
        if path.suffix == ".parquet":
            self._writer = pq.ParquetWriter(
                sink, self._schema, compression="none", use_dictionary=False, write_statistics=False
            )
        else:
            self._writer = pa.ipc.new_file(sink, self._schema)

    def write(self, keys: Any, vectors: Vectors) -> None:
        column = keys if isinstance(keys, pa.Array) else pa.array(keys)
        values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=self._schema.field(VECTOR).type)
        self._writer.write_batch(pa.record_batch([column, values], schema=self._schema))

    def finish(self) -> str:
        self._writer.close()
        self._publication.commit()
        return str(self._digest.hexdigest())

    def discard(self) -> None:
        self._hashing.discarding = True
        with contextlib.suppress(pa.ArrowException, OSError, ValueError):
            self._writer.close()
        self._publication.abort()


class TensorShard:
    """`.safetensors` or `.npz`: all keys, then all vectors; both are spooled until their number is known."""

    def __init__(self, path: Path, key_dtype: str, value_dtype: str, dim: int) -> None:
        self._path, self._dim, self._rows = path, dim, 0
        self._dtypes = (np.dtype(key_dtype), np.dtype(value_dtype))
        self._publication = files.Publication(path)
        self._spools = (files.scratch(path.parent), files.scratch(path.parent))

    def write(self, keys: Any, vectors: Vectors) -> None:
        self._spools[0].write(np.ascontiguousarray(keys, self._dtypes[0]).data)
        self._spools[1].write(np.ascontiguousarray(vectors, self._dtypes[1]).data)
        self._rows += len(keys)

    def finish(self) -> str:
        digest = xxhash.xxh3_64()
        sink = _Hashing(self._publication.file, digest)
        (self._finish_npz if self._path.suffix == ".npz" else self._finish_safetensors)(sink)
        self._publication.commit()
        self._close_spools()
        return digest.hexdigest()

    def discard(self) -> None:
        self._publication.abort()
        self._close_spools()

    def _finish_safetensors(self, sink: Any) -> None:
        names = {"int64": "I64", "uint64": "U64", "float32": "F32", "float16": "F16"}
        key_bytes, vector_bytes = (self._rows * width for width in (8, self._dim * self._dtypes[1].itemsize))
        header = {
            "keys": {"dtype": names[self._dtypes[0].name], "shape": [self._rows], "data_offsets": [0, key_bytes]},
            "vectors": {
                "dtype": names[self._dtypes[1].name],
                "shape": [self._rows, self._dim],
                "data_offsets": [key_bytes, key_bytes + vector_bytes],
            },
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        sink.write(len(text).to_bytes(8, "little") + text)
        for spool in self._spools:
            _copy(spool, sink.write)

    def _finish_npz(self, sink: Any) -> None:
        shapes = ((self._rows,), (self._rows, self._dim))
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
            for name, dtype, shape, spool in zip(("keys", "vectors"), self._dtypes, shapes, self._spools, strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    _copy(spool, member.write)

    def _close_spools(self) -> None:
        for spool in self._spools:
            spool.close()


class HugeCtrShard:
    """A folder with `key` (int64) and `emb_vector` (float32)."""

    def __init__(self, path: Path) -> None:
        files.make_dir(path)
        self._path = path
        self._keys = files.Publication(path / HUGECTR_KEYS)
        self._vectors = files.Publication(path / HUGECTR_VECTORS)

    def write(self, keys: npt.NDArray[np.int64], vectors: Vectors) -> None:
        self._keys.file.write(np.ascontiguousarray(keys, "<i8").data)
        self._vectors.file.write(np.ascontiguousarray(vectors, "<f4").data)

    def finish(self) -> str:
        self._keys.commit()
        self._vectors.commit()
        return checksum(self._path)

    def discard(self) -> None:
        self._keys.abort()
        self._vectors.abort()


def _copy(spool: BinaryIO, write: Callable[[bytes], Any]) -> None:
    spool.seek(0)
    while block := spool.read(_BLOCK):
        write(block)
