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
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from tierstore.errors import StorageError
from tierstore.formats.columns import Malformed, as_vectors
from tierstore.formats.keys import as_codes
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.objects import Location, size_of
from tierstore.formats.regular import open_regular
from tierstore.formats.row_times import Times, as_times
from tierstore.types import Keys, KeyType, TableSpec, Vectors

_MAX_HEADER = 100 << 20  # as in the safetensors library
# what NumPy lacks, as PyTorch names it
_BFLOAT16, _E4M3, _E5M2 = "bfloat16", "float8_e4m3fn", "float8_e5m2"
_NARROW = {"BF16": _BFLOAT16, "F8_E4M3": _E4M3, "F8_E5M2": _E5M2}
_SAFETENSORS_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2",
    "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip


Block = tuple[Keys, Vectors | None, None, Times | None]


@dataclass(frozen=True)
class ShardTensor:
    """A tensor in a file. `open` gives a stream at its first byte. `narrow`: the type of its floats, whose bits `dtype`
    holds, where NumPy lacks it.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    narrow: str = ""

    @property
    def dtype_name(self) -> str:
        """As NumPy or PyTorch has it; the byte order is the file's, and read as it is."""
        return self.narrow or str(self.dtype.newbyteorder("="))


def read_npz(
    path: Location, spec: TableSpec, batch_rows: int, with_vectors: bool, *, time: str | None = None
) -> Iterator[Block]:
    """Blocks of at most `batch_rows` rows; without `with_vectors` only the keys are read.

    `time` names the tensor of times.

    Raises Malformed.
    """
    _refuse_strings(spec)
    (tensors, unreadable), names = npz_header(path), _names(time)
    for name in names:
        if name in unreadable:
            raise Malformed(f"{name}.npy: {unreadable[name]}")
        if name not in tensors:
            wanted = "'keys' and 'vectors'" if name in ("keys", "vectors") else f"{name!r}, the table's time_column"
            raise Malformed(f"expected arrays {wanted}, got {', '.join(f'{one}.npy' for one in tensors) or 'none'}")
    yield from _blocks([tensors[name] for name in names], spec, batch_rows, with_vectors)


def read_safetensors(
    path: Location, spec: TableSpec, batch_rows: int, with_vectors: bool, *, time: str | None = None
) -> Iterator[Block]:
    """Read a shard of `.safetensors`."""
    _refuse_strings(spec)
    (tensors, unreadable, _), names = safetensors_header(path), _names(time)
    for name in names:
        if name in unreadable:
            raise Malformed(f"tensor {name!r}: {unreadable[name]}")
        if name not in tensors:
            wanted = " and ".join(map(repr, names))
            raise Malformed(f"expected tensors {wanted}, got {', '.join(map(repr, tensors)) or 'none'}")
    yield from _blocks([tensors[name] for name in names], spec, batch_rows, with_vectors)


def _names(time: str | None) -> list[str]:
    return ["keys", "vectors"] if time is None else ["keys", "vectors", time]


def read_hugectr_shard(path: Location, spec: TableSpec, batch_rows: int, with_vectors: bool) -> Iterator[Block]:
    """Read a shard of HugeCTR: a folder with the files `key` and `emb_vector`."""
    if spec.key is not KeyType.INT64:
        raise Malformed(f"expected {spec.key} keys, as the table has; a HugeCTR folder's are int64")
    for name in (HUGECTR_KEYS, HUGECTR_VECTORS):
        if not (path / name).is_file():
            raise Malformed(
                f"expected files {HUGECTR_KEYS!r} and {HUGECTR_VECTORS!r} in this folder; {name!r} is missing"
            )
    keys, vectors = raw_pair(path / HUGECTR_KEYS, path / HUGECTR_VECTORS, spec.dim)
    yield from _blocks([keys, vectors], spec, batch_rows, with_vectors)


def raw_pair(keys: Location, vectors: Location, dim: int | None = None) -> tuple[ShardTensor, ShardTensor]:
    """A file of int64 keys and one of as many float32 rows, both raw and little-endian.

    Without `dim` it follows from the sizes of the files. Raises Malformed.
    """
    key_bytes, vector_bytes = size_of(keys), size_of(vectors)
    rows, others = divmod(key_bytes, 8)
    if dim is None:
        dim, remainder = divmod(vector_bytes, 4 * max(rows, 1))
        if others or remainder or bool(rows) is not bool(dim):
            raise Malformed(
                f"expected int64 keys and as many rows of float32; got {key_bytes} bytes of keys and {vector_bytes} of "
                "vectors"
            )
    if others:
        raise Malformed(f"{keys.name}: expected a whole number of int64 keys, got {key_bytes} bytes")
    expected = rows * dim * 4
    if vector_bytes != expected:
        raise Malformed(
            f"{vectors.name}: expected {expected} bytes ({rows} rows of {dim} float32), got "
            f"{vector_bytes}{_narrower(key_bytes, vector_bytes, dim)}"
        )
    return (
        ShardTensor(keys.name, np.dtype("<i8"), (rows,), partial(_stream_at, keys, 0)),
        ShardTensor(vectors.name, np.dtype("<f4"), (rows, dim), partial(_stream_at, vectors, 0)),
    )


def _narrower(key_bytes: int, vector_bytes: int, dim: int) -> str:
    """What the sizes of a pair speak for, where they do not fit int64 keys and float32 numbers."""
    for keys, numbers, what in ((4, 4, "keys of 32 bits"), (8, 2, "float16 numbers")):
        if key_bytes and key_bytes % keys == 0 and key_bytes // keys * dim * numbers == vector_bytes:
            return f", which is right for {what}: write int64 keys and float32 numbers"
    return ""


def safetensors_header(path: Location) -> tuple[dict[str, ShardTensor], dict[str, str], dict[str, Any]]:
    """The tensors of a safetensors file, why others in it cannot be read, and its metadata.

    All of its header is checked. Raises Malformed.
    """
    size = size_of(path)
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
    metadata = header.pop("__metadata__", None)
    begin = 8 + length
    tensors, unreadable, ranges = {}, {}, []
    for name, entry in header.items():
        tensor, start, end = _safetensor(path, begin, name, entry)
        if isinstance(tensor, str):
            unreadable[name] = tensor
        else:
            tensors[name] = tensor
        ranges.append((start, end, name))
    reached = 0
    for start, end, name in sorted(ranges):
        if start != reached:
            raise Malformed(f"tensor {name!r}: expected its data to begin at {reached}, got {start}")
        reached = end
    if reached != size - begin:
        raise Malformed(f"expected {reached} bytes of data, as its header says, got {size - begin}")
    return tensors, unreadable, metadata if isinstance(metadata, dict) else {}


def _safetensor(path: Location, begin: int, name: str, entry: Any) -> tuple[ShardTensor | str, int, int]:
    """A tensor, or why it cannot be read; and where its data begins and ends."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (_naturals(shape) and _naturals(offsets) and len(offsets) == 2 and isinstance(kind, str)):
        raise Malformed(f"tensor {name!r}: expected dtype, shape and data_offsets, got {str(entry)[:100]}")
    if kind not in _SAFETENSORS_DTYPES:
        if offsets[1] < offsets[0]:
            raise Malformed(f"tensor {name!r}: its data ends at {offsets[1]}, before it begins at {offsets[0]}")
        return f"is of dtype {kind!r}; expected one of {', '.join(_SAFETENSORS_DTYPES)}", offsets[0], offsets[1]
    dtype = np.dtype(_SAFETENSORS_DTYPES[kind])
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise Malformed(f"tensor {name!r}: expected {expected} bytes for {kind} {shape}, got {offsets[1] - offsets[0]}")

    return (
        ShardTensor(name, dtype, tuple(shape), partial(_stream_at, path, begin + offsets[0]), _NARROW.get(kind, "")),
        offsets[0],
        offsets[1],
    )


@contextlib.contextmanager
def _stream_at(path: Location, offset: int) -> Iterator[IO[bytes]]:
    with open_regular(path) as file:
        file.seek(offset)
        yield file


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)


def npy_header(stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of a `.npy` stream, which is then at the first byte of data. Raises Malformed."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except StorageError:
        raise
    except Exception as error:  # NumPy parses it as Python, and raises what its tokenizer and parser raise
        narrow = "'<f1'" in str(error)  # as ml_dtypes' float8_e5m2 is written
        hint = ", a type that NumPy does not have: save the array as float32" if narrow else ""
        raise Malformed(f"not a .npy header: {error}{hint}") from error
    if dtype.hasobject:
        raise Malformed("holds Python objects, which would have to be unpickled: save plain arrays")
    if fortran and len(shape) > 1:
        raise Malformed("is in Fortran order: save numpy.ascontiguousarray(…) of it")
    return dtype, shape


def npz_header(path: Location) -> tuple[dict[str, ShardTensor], dict[str, str]]:
    """The arrays of a `.npz` file, and why others in it cannot be read. Raises what zipfile raises."""
    tensors, unreadable = {}, {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            try:
                with archive.open(member) as stream:
                    dtype, shape = npy_header(stream)
            except Malformed as error:
                unreadable[name] = error.reason
            else:
                tensors[name] = ShardTensor(name, dtype, shape, partial(_stream_of_member, path, member))
    return tensors, unreadable


@contextlib.contextmanager
def _stream_of_member(path: Location, member: str) -> Iterator[IO[bytes]]:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive, archive.open(member) as stream:
        npy_header(stream)
        yield stream


def npy_tensor(path: Location, name: str) -> ShardTensor:
    """The array of a `.npy` file, under the name `name`. Raises Malformed."""
    with open_regular(path) as file:
        dtype, shape = npy_header(file)
        begin, size = file.tell(), size_of(path)
    expected = begin + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise Malformed(f"expected {expected} bytes for {list(shape)} of {dtype}, got {size}")
    return ShardTensor(name, dtype, shape, partial(_stream_at, path, begin))


def _refuse_strings(spec: TableSpec) -> None:
    if spec.key is KeyType.STRING:
        raise Malformed("a table with string keys needs .parquet or .arrow shards: tensors hold numbers only")


def _blocks(tensors: Sequence[ShardTensor], spec: TableSpec, batch_rows: int, with_vectors: bool) -> Iterator[Block]:
    """Blocks of rows from the tensors of keys, of vectors, and of times, if there is a third."""
    keys, vectors, *times = tensors
    _check(keys, vectors, spec)
    for time in times:
        if time.shape != keys.shape or time.narrow:
            raise Malformed(
                f"tensor {time.name!r}: expected a time for each of {keys.shape[0]} keys, got {list(time.shape)} of "
                f"{time.dtype_name}"
            )
    for codes, *parts in read_tensors(tensors if with_vectors else (keys,), batch_rows):
        vector = as_vectors(parts[0]) if parts else None
        yield as_codes(codes, spec.key), vector, None, as_times(parts[1]) if len(parts) > 1 else None


def read_tensors(
    tensors: Sequence[ShardTensor], batch_rows: int, begin: int = 0
) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """Tensors of one length in step: from each an array of its next `batch_rows` entries, from row `begin` on.

    bfloat16 and floats of 8 bits become float32.

    Raises Malformed if a file ends early.
    """
    rows = tensors[0].shape[0]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tensor.open()) for tensor in tensors]
        for stream, tensor in zip(streams, tensors, strict=True):
            if begin:
                stream.seek(begin * math.prod(tensor.shape[1:]) * tensor.dtype.itemsize, os.SEEK_CUR)
        for first in range(begin, rows, batch_rows):
            n = min(batch_rows, rows - first)
            yield tuple(_read_array(stream, tensor, n) for stream, tensor in zip(streams, tensors, strict=True))


def _check(keys: ShardTensor, vectors: ShardTensor, spec: TableSpec) -> None:
    if len(keys.shape) != 1:
        raise Malformed(f"tensor {keys.name!r}: expected one dimension, got shape {list(keys.shape)}")
    if keys.dtype.kind not in "iu" or keys.narrow or (keys.dtype.kind == "u") != (spec.key is KeyType.UINT64):
        raise Malformed(f"tensor {keys.name!r}: expected {spec.key}, as the table's keys are, got {keys.dtype_name}")
    if vectors.shape != (keys.shape[0], spec.dim):
        raise Malformed(
            f"tensor {vectors.name!r}: expected shape {[keys.shape[0], spec.dim]} (keys, dim), got "
            f"{list(vectors.shape)}"
        )
    if vectors.narrow != _BFLOAT16 and (vectors.dtype.kind != "f" or vectors.dtype.itemsize > 8):
        raise Malformed(f"tensor {vectors.name!r}: expected float16, float32 or float64, got {vectors.dtype_name}")


def _read_array(stream: IO[bytes], tensor: ShardTensor, rows: int) -> npt.NDArray[Any]:
    shape = (rows, *tensor.shape[1:])
    wanted = math.prod(shape) * tensor.dtype.itemsize
    data = bytearray(wanted)
    view, reached = memoryview(data), 0
    while reached < wanted:
        got = stream.readinto(view[reached:])  # type: ignore[attr-defined]
        if not got:
            raise Malformed(f"tensor {tensor.name!r} ends early: the file was cut")
        reached += got
    numbers = np.frombuffer(data, tensor.dtype).reshape(shape)
    if tensor.narrow == _BFLOAT16:  # the upper half of a float32
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    if tensor.narrow == _E5M2:  # the upper half of a float16
        return (numbers.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if tensor.narrow == _E4M3:
        return np.take(_OF_E4M3, numbers)
    return numbers.astype(tensor.dtype.newbyteorder("="), copy=False)


def _numbers_of_e4m3() -> npt.NDArray[np.float32]:
    """The numbers of the 256 codes of E4M3 ("FP8 Formats for Deep Learning", 2022): no infinities, one NaN a sign."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    numbers = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    numbers[codes & 127 == 127] = np.nan
    return np.where(codes < 128, numbers, -numbers).astype(np.float32)


_OF_E4M3 = _numbers_of_e4m3()
