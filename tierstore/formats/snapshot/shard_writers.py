"""Writing one shard, batch by batch: `.arrow`, `.parquet`, `.safetensors`, `.npz`, a HugeCTR folder.

A shard writer belongs to one thread. `finish` publishes the shard (durable, whole) and returns its
XXH3-64; `discard` leaves nothing behind. Formats that keep keys and vectors apart spool the vectors
to a scratch file beside the shard, so memory stays bounded in every format.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tierstore.formats import files
from tierstore.formats.columns import KEY, VECTOR
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.row_times import Times
from tierstore.formats.snapshot.checksum import checksum
from tierstore.types import Vectors

_BLOCK = 4 << 20


class ShardFile(Protocol):
    """A shard being written.

    `keys` is a NumPy array of int64 or uint64, or an Arrow string array; `times` if it has a column of these.
    """

    def write(self, keys: Any, vectors: Vectors, times: Times | None) -> None: ...

    def finish(self) -> str: ...

    def discard(self) -> None: ...


class _Hashing:
    """A file for appending that computes the XXH3-64 of what is written."""

    def __init__(self, file: BinaryIO, digest: xxhash.xxh3_64) -> None:
        self._file, self._digest, self._reached = file, digest, 0
        self.closed = False
        self.discarding = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.discarding:  # a writer writes its footer when it is destroyed, even after an error
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

    def __init__(
        self, path: Path, key_type: pa.DataType, value_type: pa.DataType, dim: int, time_column: str | None
    ) -> None:
        self._publication = files.Publication(path)
        self._digest = xxhash.xxh3_64()
        self._schema = pa.schema(
            [
                pa.field(KEY, key_type, nullable=False),
                pa.field(VECTOR, pa.list_(pa.field("item", value_type, nullable=False), dim), nullable=False),
                *([] if time_column is None else [pa.field(time_column, pa.uint32(), nullable=False)]),
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

    def write(self, keys: Any, vectors: Vectors, times: Times | None) -> None:
        column = keys if isinstance(keys, pa.Array) else pa.array(keys)
        values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=self._schema.field(VECTOR).type)
        columns = [column, values] if times is None else [column, values, pa.array(times)]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def finish(self) -> str:
        self._writer.close()
        self._publication.commit()
        return str(self._digest.hexdigest())

    def discard(self) -> None:
        self._hashing.discarding = True
        with contextlib.suppress(pa.ArrowException, OSError, ValueError):
            self._writer.close()
        self._publication.abort()


class _Spooled(NamedTuple):
    """A tensor whose rows are written one after another."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]


class TensorShard:
    """`.safetensors` or `.npz`: all keys, then all vectors, then all times; they are spooled
    until their number is known.
    """

    def __init__(self, path: Path, key_dtype: str, value_dtype: str, dim: int, time_column: str | None) -> None:
        self._path, self._rows = path, 0
        self._tensors: list[_Spooled] = [
            _Spooled("keys", np.dtype(key_dtype), ()),
            _Spooled("vectors", np.dtype(value_dtype), (dim,)),
        ]
        if time_column is not None:
            self._tensors.append(_Spooled(time_column, np.dtype(np.uint32), ()))
        self._publication = files.Publication(path)
        self._spools = [files.scratch(path.parent) for _ in self._tensors]

    def write(self, keys: Any, vectors: Vectors, times: Times | None) -> None:
        for tensor, spool, values in zip(self._tensors, self._spools, (keys, vectors, times), strict=False):
            spool.write(np.ascontiguousarray(values, tensor.dtype).data)
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
        names = {"int64": "I64", "uint64": "U64", "uint32": "U32", "float32": "F32", "float16": "F16"}
        header, begin = {}, 0
        for tensor in self._tensors:
            shape = [self._rows, *tensor.row_shape]
            end = begin + math.prod(shape) * tensor.dtype.itemsize
            header[tensor.name] = {"dtype": names[tensor.dtype.name], "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        sink.write(len(text).to_bytes(8, "little") + text)
        for spool in self._spools:
            _copy(spool, sink.write)

    def _finish_npz(self, sink: Any) -> None:
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
            for tensor, spool in zip(self._tensors, self._spools, strict=True):
                with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as member:
                    shape = (self._rows, *tensor.row_shape)
                    header = {
                        "descr": np.lib.format.dtype_to_descr(tensor.dtype),
                        "fortran_order": False,
                        "shape": shape,
                    }
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

    def write(self, keys: npt.NDArray[np.int64], vectors: Vectors, times: Times | None) -> None:
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
