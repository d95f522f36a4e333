"""Shards as two plain tensors, `keys` and `vectors`: `.npz`, `.safetensors`, HugeCTR/HPS folders.

Read block by block with ordinary reads, so memory is bounded and a file that shrinks meanwhile is an
error and not a SIGBUS. Nothing is ever unpickled. One thread at a time a reader.

Layouts: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html,
https://huggingface.co/docs/safetensors, and HugeCTR's sparse model files: `key` (int64) and
`emb_vector` (float32), both raw and little-endian, row by row.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from tierstore.formats.columns import Malformed, as_vectors
from tierstore.formats.keys import as_codes
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.regular import open_regular
from tierstore.types import Keys, KeyType, TableSpec, Vectors

_MAX_HEADER = 100 << 20  # as the safetensors library has it
_BFLOAT16 = "bfloat16"
_SAFETENSORS_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. `open` gives a stream that stands at its first byte."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    is_bfloat16: bool = False

    @property
    def dtype_name(self) -> str:
        return _BFLOAT16 if self.is_bfloat16 else str(self.dtype)


def read_npz(
    path: Path, spec: TableSpec, batch_rows: int, with_vectors: bool
) -> Iterator[tuple[Keys, Vectors | None, None]]:
    """Blocks of at most `batch_rows` rows; without `with_vectors` only the keys are read. Raises Malformed."""
    _refuse_strings(spec)
    with zipfile.ZipFile(path) as archive:
        yield from _blocks(
            _npy_member(archive, "keys"), _npy_member(archive, "vectors"), spec, batch_rows, with_vectors
        )


def read_safetensors(
    path: Path, spec: TableSpec, batch_rows: int, with_vectors: bool
) -> Iterator[tuple[Keys, Vectors | None, None]]:
    """The same for `.safetensors`."""
    _refuse_strings(spec)
    tensors = safetensors_header(path)
    for name in ("keys", "vectors"):
        if name not in tensors:
            raise Malformed(f"expected tensors 'keys' and 'vectors', came {', '.join(map(repr, tensors)) or 'none'}")
    yield from _blocks(tensors["keys"], tensors["vectors"], spec, batch_rows, with_vectors)


def read_hugectr(
    path: Path, spec: TableSpec, batch_rows: int, with_vectors: bool
) -> Iterator[tuple[Keys, Vectors | None, None]]:
    """The same for a folder with the files `key` and `emb_vector`."""
    if spec.key is not KeyType.INT64:
        raise Malformed(f"expected {spec.key} keys, as the table has; a HugeCTR folder's are int64")
    sizes = {}
    for name in (HUGECTR_KEYS, HUGECTR_VECTORS):
        file = path / name
        if not file.is_file():
            raise Malformed(
                f"expected files {HUGECTR_KEYS!r} and {HUGECTR_VECTORS!r} in this folder; {name!r} is missing"
            )
        sizes[name] = file.stat().st_size
    rows, rest = divmod(sizes[HUGECTR_KEYS], 8)
    if rest:
        raise Malformed(f"{HUGECTR_KEYS}: expected a whole number of int64 keys, came {sizes[HUGECTR_KEYS]} bytes")
    expected = rows * spec.dim * 4
    if sizes[HUGECTR_VECTORS] != expected:
        raise Malformed(
            f"{HUGECTR_VECTORS}: expected {expected} bytes ({rows} rows of {spec.dim} float32), came {sizes[HUGECTR_VECTORS]}"
        )
    keys = Tensor(HUGECTR_KEYS, np.dtype("<i8"), (rows,), partial(_stream_at, path / HUGECTR_KEYS, 0))
    vectors = Tensor(HUGECTR_VECTORS, np.dtype("<f4"), (rows, spec.dim), partial(_stream_at, path / HUGECTR_VECTORS, 0))
    yield from _blocks(keys, vectors, spec, batch_rows, with_vectors)


def safetensors_header(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, once all of its header holds true. Raises Malformed."""
    size = path.stat().st_size
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise Malformed(f"not a safetensors file: its header would take {length} bytes of {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not a safetensors file: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise Malformed("not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors, ranges = {}, []
    for name, entry in header.items():
        tensor, start, end = _safetensor(path, begin, name, entry)
        tensors[name] = tensor
        ranges.append((start, end, name))
    reached = 0
    for start, end, name in sorted(ranges):
        if start != reached:
            raise Malformed(f"tensor {name!r}: expected its data to begin at {reached}, came {start}")
        reached = end
    if reached != size - begin:
        raise Malformed(f"expected {reached} bytes of data, as its header says, came {size - begin}")
    return tensors


def _safetensor(path: Path, begin: int, name: str, entry: Any) -> tuple[Tensor, int, int]:
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (_naturals(shape) and _naturals(offsets) and len(offsets) == 2 and isinstance(kind, str)):
        raise Malformed(f"tensor {name!r}: expected dtype, shape and data_offsets, came {str(entry)[:100]}")
    if kind not in _SAFETENSORS_DTYPES:
        raise Malformed(f"tensor {name!r}: dtype {kind!r} is not known here")
    dtype = np.dtype(_SAFETENSORS_DTYPES[kind])
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise Malformed(
            f"tensor {name!r}: expected {expected} bytes for {kind} {shape}, came {offsets[1] - offsets[0]}"
        )

    return (
        Tensor(name, dtype, tuple(shape), partial(_stream_at, path, begin + offsets[0]), kind == "BF16"),
        offsets[0],
        offsets[1],
    )


@contextlib.contextmanager
def _stream_at(path: Path, offset: int) -> Iterator[IO[bytes]]:
    with open_regular(path) as file:
        file.seek(offset)
        yield file


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def npy_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of a `.npy` stream, which is left at the first byte of data. Raises Malformed."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except Exception as error:  # NumPy takes it for Python, and raises what its tokenizer and parser do
        raise Malformed(f"not a .npy header: {error}") from error
    if dtype.hasobject:
        raise Malformed("holds Python objects, which would have to be unpickled: save plain arrays")
    if fortran and len(shape) > 1:
        raise Malformed("is in Fortran order: save numpy.ascontiguousarray(…) of it")
    return dtype, shape


def _npy_member(archive: zipfile.ZipFile, name: str) -> Tensor:
    member = name + ".npy"
    if member not in archive.namelist():
        raise Malformed(f"expected arrays 'keys' and 'vectors', came {', '.join(archive.namelist()) or 'none'}")
    try:
        with archive.open(member) as stream:
            dtype, shape = npy_header(stream)
    except Malformed as error:
        raise Malformed(f"{member}: {error.reason}") from error

    @contextlib.contextmanager
    def open_at_data() -> Iterator[IO[bytes]]:
        with archive.open(member) as stream:
            npy_header(stream)
            yield stream

    return Tensor(name, dtype, shape, open_at_data)


def _refuse_strings(spec: TableSpec) -> None:
    if spec.key is KeyType.STRING:
        raise Malformed("a table with string keys needs .parquet or .arrow shards: tensors hold numbers only")


def _blocks(
    keys: Tensor, vectors: Tensor, spec: TableSpec, batch_rows: int, with_vectors: bool
) -> Iterator[tuple[Keys, Vectors | None, None]]:
    _check(keys, vectors, spec)
    rows = keys.shape[0]
    with contextlib.ExitStack() as stack:
        key_stream = stack.enter_context(keys.open())
        vector_stream = stack.enter_context(vectors.open()) if with_vectors else None
        for start in range(0, rows, batch_rows):
            n = min(batch_rows, rows - start)
            codes = as_codes(_take(key_stream, keys, n), spec.key)
            if vector_stream is None:
                yield codes, None, None
            else:
                yield codes, _as_rows(_take(vector_stream, vectors, n * spec.dim), vectors, spec.dim), None


def _check(keys: Tensor, vectors: Tensor, spec: TableSpec) -> None:
    if len(keys.shape) != 1:
        raise Malformed(f"tensor {keys.name!r}: expected one dimension, came shape {list(keys.shape)}")
    if keys.dtype.kind not in "iu" or keys.is_bfloat16 or (keys.dtype.kind == "u") != (spec.key is KeyType.UINT64):
        raise Malformed(f"tensor {keys.name!r}: expected {spec.key}, as the table's keys are, came {keys.dtype_name}")
    if vectors.shape != (keys.shape[0], spec.dim):
        raise Malformed(
            f"tensor {vectors.name!r}: expected shape {[keys.shape[0], spec.dim]} (keys, dim), came {list(vectors.shape)}"
        )
    if not vectors.is_bfloat16 and (vectors.dtype.kind != "f" or vectors.dtype.itemsize > 8):
        raise Malformed(f"tensor {vectors.name!r}: expected float16, float32 or float64, came {vectors.dtype_name}")


def _take(stream: IO[bytes], tensor: Tensor, count: int) -> npt.NDArray[Any]:
    wanted = count * tensor.dtype.itemsize
    data = bytearray(wanted)
    view, reached = memoryview(data), 0
    while reached < wanted:
        got = stream.readinto(view[reached:])  # type: ignore[attr-defined]
        if not got:
            raise Malformed(f"tensor {tensor.name!r} ends early: the file was cut")
        reached += got
    return np.frombuffer(data, tensor.dtype)


def _as_rows(numbers: npt.NDArray[Any], tensor: Tensor, dim: int) -> Vectors:
    if tensor.is_bfloat16:  # the upper half of a float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return as_vectors(numbers).reshape(-1, dim)
