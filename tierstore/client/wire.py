"""Tensors of the Open Inference Protocol v2 with the binary tensor data extension, on the client's side.

A request is a JSON header, then the bytes of each input in the order of the header. An answer has the same layout, and
the HTTP header `Inference-Header-Content-Length` says where the JSON ends. All numbers are little-endian; a BYTES
tensor is a sequence of (uint32 length, data). Sources: "Open Inference Protocol" (KServe) and "Binary Tensor Data
Extension" (Triton Inference Server).

Pure functions on values of the caller; any thread may call them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from tierstore.errors import InvalidInput, TierstoreError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from tierstore.lazy import np

HEADER_LENGTH = "inference-header-content-length"  # of both directions

_CODES = {
    "BOOL": "?",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}


@cache
def _dtypes() -> dict[str, np.dtype[Any]]:
    return {name: np.dtype(code) for name, code in _CODES.items()}


@cache
def _names() -> dict[np.dtype[Any], str]:
    return {dtype: name for name, dtype in _dtypes().items()}


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor. `data` are its bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Output:
    """One requested output. `parameters` are sent together with `binary_data`."""

    name: str
    parameters: dict[str, Any]


def dtype_of(datatype: str | None) -> np.dtype[Any] | None:
    """The NumPy dtype of a datatype of numbers; None for any other."""
    return _dtypes().get(datatype or "")


def name_of(dtype: np.dtype[Any]) -> str:
    """The protocol's datatype of a dtype of numbers."""
    return _names()[dtype]


def numbers(name: str, values: npt.NDArray[Any]) -> Input:
    """An input of numbers. Shares the memory of a C-contiguous array."""
    array = np.asarray(values, values.dtype.newbyteorder("="), order="C")
    datatype = _names().get(array.dtype)
    if datatype is None:
        raise InvalidInput(f"input {name!r}: expected integers, floats or booleans, got {array.dtype}")
    return Input(name, datatype, array.shape, array.reshape(-1).view(np.uint8).data)


def strings(name: str, array: Any) -> Input:
    """A BYTES input from an Arrow `large_string` array without nulls, without a loop over its keys."""
    n = len(array)
    if n == 0:
        return Input(name, "BYTES", (0,), memoryview(b""))
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + n + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    lengths = np.diff(offsets)
    if lengths.max() > np.iinfo(np.uint32).max:
        raise InvalidInput(f"input {name!r}: a string key has {lengths.max()} bytes, expected at most 2^32 - 1")
    # String i moves up by its own prefix and those before it; the prefixes are written into the holes.
    holes = (offsets[:-1] - offsets[0] + 4 * np.arange(n))[:, None] + np.arange(4)
    raw = np.empty(int(lengths.sum()) + 4 * n, np.uint8)
    is_data = np.ones(len(raw), np.bool_)
    is_data[holes] = False
    raw[holes] = lengths.astype("<u4").view(np.uint8).reshape(n, 4)
    raw[is_data] = data[offsets[0] : offsets[-1]]
    return Input(name, "BYTES", (n,), raw.data)


@dataclass(frozen=True, slots=True)
class Described:
    """An output as an answer's JSON describes it: `nbytes` follow the JSON, or `data`
    holds its elements, or neither.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int | None
    data: Any = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array; `object` for BYTES."""
        return np.dtype(object) if self.datatype == "BYTES" else _dtypes()[self.datatype]


def document(inputs: Sequence[Input], outputs: Sequence[Output]) -> bytes:
    """The JSON of a request whose tensors follow it as bytes."""
    described: list[dict[str, Any]] = [
        {
            "name": i.name,
            "shape": i.shape,
            "datatype": i.datatype,
            "parameters": {"binary_data_size": i.data.nbytes},
        }
        for i in inputs
    ]
    request: dict[str, Any] = {"inputs": described}
    if outputs:
        request["outputs"] = [{"name": o.name, "parameters": {"binary_data": True, **o.parameters}} for o in outputs]
    else:
        request["parameters"] = {"binary_data_output": True}
    return as_json(request)


def as_json(document: Any) -> bytes:
    """A request's document as it is sent. InvalidInput for what JSON cannot hold: a large integer, half a character."""
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidInput(f"the request cannot be sent as JSON: {error}") from error


def described(text: bytes | bytearray | memoryview) -> tuple[int | None, list[Described]]:
    """(the version that answered, its outputs) from an answer's JSON. TierstoreError if it is not of the protocol."""
    try:
        header = orjson.loads(text)
        outputs = []
        for output in header["outputs"]:
            nbytes = (output.get("parameters") or {}).get("binary_data_size")
            one = Described(output["name"], output["datatype"], tuple(output["shape"]), nbytes, output.get("data"))
            if not all(type(size) is int and size >= 0 for size in (0 if nbytes is None else nbytes, *one.shape)):
                raise ValueError(f"{nbytes} bytes of shape {list(one.shape)}")
            if nbytes is None:
                if one.data is None and one.datatype not in _CODES:
                    raise ValueError(f"output {one.name!r} has neither bytes nor data")
            elif one.datatype != "BYTES" and nbytes != math.prod(one.shape) * one.dtype.itemsize:
                raise ValueError(f"{nbytes} bytes for {one.datatype} of shape {one.shape}")
            outputs.append(one)
        version = header.get("model_version")
        return int(version) if version else None, outputs
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_of_the_protocol(error) from error


def not_of_the_protocol(why: object) -> TierstoreError:
    return TierstoreError(f"the service's answer is not one of the Open Inference Protocol: {why}")


def empty(output: Described) -> npt.NDArray[Any]:
    """An array for the bytes of an output."""
    try:
        return np.empty(output.shape, output.dtype)
    except ValueError as error:  # a shape that no array can have
        raise not_of_the_protocol(error) from error


def from_json(output: Described) -> npt.NDArray[Any]:
    """An output whose elements are in the JSON."""
    try:
        return np.array(output.data, dtype=output.dtype).reshape(output.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise not_of_the_protocol(error) from error


def from_length_prefixed(raw: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A BYTES output of a dense part (labels, say): few elements of any width, so they are read one by one."""
    items, begin = [], 0
    while begin < len(raw):
        end = begin + 4 + int.from_bytes(raw[begin : begin + 4], "little")
        if end > len(raw):
            raise not_of_the_protocol("a BYTES tensor is cut")
        items.append(raw[begin + 4 : end])
        begin = end
    array = np.empty(len(items), object)
    array[:] = items
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise not_of_the_protocol(error) from error
