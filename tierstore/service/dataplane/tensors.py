"""Tensors of the Open Inference Protocol: shapes, and elements read from JSON or from bytes.

Pure functions and immutable values; any thread. They are independent of transports. Every error of a tensor is
InvalidInput, and names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.errors import InvalidInput, shown
from tierstore.service.dataplane.datatypes import BYTES, NUMPY_DTYPE
from tierstore.wire.bytes_tensor import join_prefixed, split_prefixed

Elements: TypeAlias = Any  # ndarray or pyarrow array; pyarrow has no types to check

_JSON_KINDS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
MAX_RANK = 8
_MAX_SIZE = (1 << 31) - 1  # of one dimension


@dataclass(slots=True)  # not frozen: that makes construction several times as slow
class TensorSpec:
    """The description of an input; immutable. Its elements are kept apart, flat and row-major.

    Elements are a `large_binary` array for BYTES, else an array of the datatype's dtype.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


def listed(names: Iterable[str]) -> str:
    """`names` for a message, in their order: the first twenty, and the number of all."""
    every = list(names)
    text = ", ".join(every[:20])
    return text if len(every) <= 20 else f"{text}, … ({len(every)} in all)"


def check_datatype(name: str, datatype: object) -> str:
    """`datatype` if the protocol has it."""
    if isinstance(datatype, str) and (datatype in NUMPY_DTYPE or datatype == BYTES):
        return datatype
    raise InvalidInput(
        f"input {shown(name)}: unknown datatype {shown(datatype)}; expected one of {', '.join(NUMPY_DTYPE)}, {BYTES}"
    )


def check_shape(name: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple of sizes, none negative."""
    if not isinstance(shape, (list, tuple)) or not shape or len(shape) > MAX_RANK:
        raise InvalidInput(f"input {shown(name)}: expected a shape of 1 to {MAX_RANK} sizes, got {shown(shape)}")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise InvalidInput(
                f"input {shown(name)}: a size must be an integer from 0 to {_MAX_SIZE}; the shape is {shown(shape)}"
            )
    sizes: tuple[int, ...] = tuple(shape)
    if 0 in sizes and math.prod(size or 1 for size in sizes) > _MAX_SIZE:  # no elements, yet too large for an array
        raise InvalidInput(f"input {shown(name)}: the sizes beside 0 are too large; the shape is {shown(shape)}")
    return sizes


def check_size(name: str, datatype: str, shape: tuple[int, ...], nbytes: int) -> None:
    """InvalidInput unless elements of `shape` need `nbytes`; BYTES may need any number."""
    dtype = NUMPY_DTYPE.get(datatype)
    if dtype is None:
        return
    needed = math.prod(shape) * dtype.itemsize  # of Python integers: no shape overflows
    if needed != nbytes:
        raise InvalidInput(
            f"input {shown(name)}: shape {shown(list(shape))} of {datatype} takes {shown(needed)} bytes, got {nbytes}"
        )


def elements_from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Elements:
    """Elements of a tensor in its binary form (little-endian; BYTES: a u32 length before each).

    A view of `data` if it is aligned, else a copy: compiled kernels need aligned arrays.
    """
    check_size(name, datatype, shape, len(data))
    dtype = NUMPY_DTYPE.get(datatype)
    if dtype is None:
        return _strings_from_bytes(name, math.prod(shape), data)
    elements = np.frombuffer(data, dtype)
    return elements if elements.flags.aligned else elements.copy()


def elements_from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Elements:
    """Elements of a tensor from a JSON list, flat in row-major order or nested as `shape` says."""
    if not isinstance(data, list):
        raise InvalidInput(f"input {shown(name)}: expected data as a list, got {type(data).__name__}")
    flat, nested = flatten(name, data, len(shape))
    count = math.prod(shape)
    if len(flat) != count or (len(nested) > 1 and nested != shape):
        raise InvalidInput(
            f"input {shown(name)}: shape {shown(list(shape))} does not match data of {shown(list(nested))}"
        )
    return elements_from_list(name, datatype, shape, flat)


def elements_from_list(name: str, datatype: str, shape: tuple[int, ...], flat: list[Any]) -> Elements:
    """Elements of a tensor of `shape` from a list of JSON values, flat in row-major order. null is NaN, of floats."""
    kinds = set(map(type, flat))
    dtype = NUMPY_DTYPE.get(datatype)
    allowed = {str} if dtype is None else _JSON_KINDS[dtype.kind]
    if type(None) in kinds and dtype is not None and dtype.kind == "f":  # as an answer says it
        flat = [math.nan if value is None else value for value in flat]
        kinds = set(map(type, flat))
    if not kinds <= allowed:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        first = next(i for i, value in enumerate(flat) if type(value) not in allowed)
        if allowed == {int} and type(flat[first]) is float and abs(flat[first]) >= 1 << 63:
            raise _misfit(name, datatype, shape, flat, first)  # as the parser has integers of more than 64 bits
        raise InvalidInput(
            f"input {shown(name)}: data of {datatype} holds {others}: {_element(shape, first)} is {shown(flat[first])}"
        )
    try:
        if dtype is None:
            return pa.array(flat, pa.large_string()).cast(pa.large_binary())
        with np.errstate(over="ignore"):
            elements = np.array(flat, dtype)
    except OverflowError:
        raise _beyond(name, datatype, shape, flat) from None
    except (ValueError, pa.ArrowException) as error:
        raise InvalidInput(f"input {shown(name)}: a value does not fit {datatype}: {error}") from error
    if (
        dtype.kind == "f"
        and (infinite := np.isinf(elements)).any()
        and not np.isinf(np.array(flat, np.float64))[infinite].all()
    ):
        raise _beyond(name, datatype, shape, flat)
    return elements


def _beyond(name: str, datatype: str, shape: tuple[int, ...], flat: list[Any]) -> InvalidInput:
    """The error for the first number out of its datatype's range."""
    dtype = NUMPY_DTYPE[datatype]
    low, high = _bounds(dtype)

    def is_beyond(value: Any) -> bool:
        if low <= value <= high or abs(value) == math.inf:
            return False
        try:
            return dtype.kind != "f" or bool(np.isinf(dtype.type(value)))  # what is rounded to the last one is not
        except OverflowError:
            return True

    with np.errstate(over="ignore"):
        first = next(i for i, value in enumerate(flat) if is_beyond(value))
    return _misfit(name, datatype, shape, flat, first)


def _misfit(name: str, datatype: str, shape: tuple[int, ...], flat: list[Any], number: int) -> InvalidInput:
    """The error for element `number`, which is out of its datatype's range."""
    low, high = _bounds(NUMPY_DTYPE[datatype])
    return InvalidInput(
        f"input {shown(name)}: {_element(shape, number)} is {shown(flat[number])}, which does not fit {datatype}, "
        f"{shown(low)} to {shown(high)}"
    )


def _bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The lowest and the highest number of a datatype; of integers exact."""
    if dtype.kind == "f":
        high = float(np.finfo(dtype).max)
        return -high, high
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _element(shape: tuple[int, ...], number: int) -> str:
    """The position of an element in a tensor, for a message."""
    place = [int(index) for index in np.unravel_index(number, shape)]
    return f"element {place[0] if len(place) == 1 else place}, counted from 0,"


def string_element(data: memoryview) -> pa.Array:
    """One BYTES element that is all of `data`."""
    return pa.array([bytes(data)], pa.large_binary())


def wire_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An output in its binary form, uint8[bytes]: its own memory, or for an object array of str a copy."""
    if not array.dtype.hasobject:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not array.size:
        return np.empty(0, np.uint8)
    texts = pa.array(array.reshape(-1), pa.large_string())
    offsets = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1)
    data = texts.buffers()[2]
    payload = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return join_prefixed(payload, offsets)


def _strings_from_bytes(name: str, count: int, data: memoryview) -> pa.Array:
    try:
        payload, offsets = split_prefixed(np.frombuffer(data, np.uint8), count)
    except ValueError as error:
        raise InvalidInput(f"input {shown(name)}: malformed BYTES data: {error}") from error
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(payload)])


def flatten(name: str, data: list[Any], rank: int) -> tuple[list[Any], tuple[int, ...]]:
    """Flatten evenly nested lists: (elements, sizes a level); one pass of C code for each level, none for each
    element.
    """
    sizes = [len(data)]
    while data and type(data[0]) is list:
        if len(sizes) == rank:
            raise InvalidInput(f"input {shown(name)}: data is nested deeper than its shape's {rank} dimensions")
        if set(map(type, data)) != {list} or len(widths := set(map(len, data))) != 1:
            raise InvalidInput(
                f"input {shown(name)}: data is nested unevenly; ragged bags go flat, with an input <feature>.offsets"
            )
        data = list(chain.from_iterable(data))
        sizes.append(widths.pop())
    return data, tuple(sizes)
