"""Tensors of the Open Inference Protocol v2 with the binary tensor data extension, as a client sees them.

A request is a JSON header, then the bytes of each input in the order of the header; an answer is laid
out the same way, and the HTTP header `Inference-Header-Content-Length` says where the JSON ends. All
numbers are little-endian; a BYTES tensor is a row of (uint32 length, data). Sources: "Open Inference
Protocol" (KServe) and "Binary Tensor Data Extension" (Triton Inference Server).

Pure functions on values of the caller; any thread may call them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput, TierstoreError

HEADER_LENGTH = "Inference-Header-Content-Length"
ALIGNMENT = 64  # bytes; what NumPy, numba and torch like best

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor; `data` are its bytes, of any type that has the buffer protocol."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Output:
    """One output that is asked for. `parameters` go out beside `binary_data`."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the version that answered, and each output by name. The arrays share one buffer."""

    version: int | None
    outputs: dict[str, npt.NDArray[Any]]


def numbers(name: str, values: npt.NDArray[Any]) -> Input:
    """An input of numbers. Shares the array's memory where it lies in order."""
    array = np.ascontiguousarray(values)
    datatype = _NAMES.get(array.dtype)
    if datatype is None:
        raise InvalidInput(f"input {name!r}: expected integers, floats or booleans, came {array.dtype}")
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
        raise InvalidInput(f"input {name!r}: a string key has {lengths.max()} bytes, more than 2^32 - 1")
    # String i moves up by its own prefix and those before it; the prefixes fill the holes.
    holes = (offsets[:-1] - offsets[0] + 4 * np.arange(n))[:, None] + np.arange(4)
    raw = np.empty(int(lengths.sum()) + 4 * n, np.uint8)
    is_data = np.ones(len(raw), np.bool_)
    is_data[holes] = False
    raw[holes] = lengths.astype("<u4").view(np.uint8).reshape(n, 4)
    raw[is_data] = data[offsets[0] : offsets[-1]]
    return Input(name, "BYTES", (n,), raw.data)


def request(inputs: Sequence[Input], outputs: Sequence[Output]) -> tuple[dict[str, str], bytes]:
    """HTTP headers and body of an inference request whose tensors all travel as bytes."""
    header: dict[str, Any] = {
        "inputs": [
            {
                "name": i.name,
                "shape": i.shape,
                "datatype": i.datatype,
                "parameters": {"binary_data_size": i.data.nbytes},
            }
            for i in inputs
        ],
    }
    if outputs:
        header["outputs"] = [{"name": o.name, "parameters": {"binary_data": True, **o.parameters}} for o in outputs]
    else:
        header["parameters"] = {"binary_data_output": True}
    text = json.dumps(header, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return headers, b"".join([text, *(i.data for i in inputs)])


def buffer(nbytes: int, header_nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialized uint8[nbytes] for an answer, placed so that what follows the JSON header is aligned."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -(memory.ctypes.data + header_nbytes) % ALIGNMENT
    return memory[skip : skip + nbytes]


def answer(body: npt.NDArray[np.uint8], header_nbytes: int) -> Answer:
    """Read an inference answer. Arrays of numbers share `body`'s memory, but for one that lies askew, which is copied."""
    try:
        header = json.loads(body[:header_nbytes].tobytes())
        outputs: dict[str, npt.NDArray[Any]] = {}
        at = header_nbytes
        for output in header["outputs"]:
            name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
            nbytes = output.get("parameters", {}).get("binary_data_size")
            if nbytes is None:
                outputs[name] = _from_json(datatype, shape, output["data"])
                continue
            outputs[name] = _from_bytes(datatype, shape, body[at : at + nbytes])
            at += nbytes
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes are left over")
        version = header.get("model_version")
        return Answer(int(version) if version else None, outputs)
    except (KeyError, TypeError, ValueError) as error:
        raise TierstoreError(f"the service's answer is not one of the Open Inference Protocol: {error}") from error


def _from_bytes(datatype: str, shape: tuple[int, ...], raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    if datatype == "BYTES":
        return _from_length_prefixed(raw.tobytes(), shape)
    dtype = _DTYPES[datatype]
    if raw.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes for {datatype} of shape {shape}")
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _from_json(datatype: str, shape: tuple[int, ...], data: Any) -> npt.NDArray[Any]:
    dtype = np.dtype(object) if datatype == "BYTES" else _DTYPES[datatype]
    return np.array(data, dtype=dtype).reshape(shape)


def _from_length_prefixed(raw: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """BYTES of a dense part's output (labels and the like): few, and of no fixed width, hence one by one."""
    items, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        items.append(raw[at + 4 : end])
        at = end
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)
