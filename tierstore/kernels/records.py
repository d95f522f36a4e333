"""Records in memory that Python and kernels share: a NumPy dtype defines the layout, and both use fields by name.

    STREAM = define("Stream", "a request on its way", {"number": "from 1 on", "window": "bytes that the client takes"})
    stream_at = at(STREAM)

Python makes such memory as an array of the dtype (`STREAM.new(n)`). In a kernel `stream_at(address)` is the record at an address, and
`stream_at(address, i)` the i-th of records that are end to end there; `stream.window` is read, and written by `stream.window = n`, with one
instruction. A field whose kind is another record holds its address, or 0, and reads as that record. A record can be used as its address, a number:
`row == 0`, `release(row)`. `place(row, "window")` is the address of a field, for `atomics`.

Neither addresses nor indexes are checked, not even with NUMBA_BOUNDSCHECK: the caller must pass valid ones. Records are at multiples of 8.
`docs/layouts.md` lists all of them (`tools/make_layouts_page.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.errors import TypingError
from numba.core.imputils import lower_cast, lower_getattr_generic, lower_setattr_generic
from numba.core.typeconv import Conversion
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_model
from numba.np.arrayobj import make_array, populate_array

_I64 = ir.IntType(64)
LINE_BYTES = 64  # of a cache line


class Record(types.Type):  # type: ignore[misc]
    """A record's layout: its dtype and the description of its fields; to numba, the type of its address."""

    mutable = True

    def __init__(self, name: str, says: str, dtype: np.dtype[Any], fields: Mapping[str, tuple[Any, str]]) -> None:
        self.says, self.dtype, self.fields = says, dtype, fields
        self.bytes = dtype.itemsize
        super().__init__(name)

    def new(self, shape: int | tuple[int, ...] = ()) -> npt.NDArray[Any]:
        """An array of records of zeros; without a shape, one record."""
        return np.zeros(shape, self.dtype)

    def row(self, **values: int) -> tuple[int, ...]:
        """The values of a record by field, zeros for the others, as a tuple for NumPy. Raises ValueError for an unknown field."""
        every = self._zeros | values
        if len(every) != len(self.fields):
            raise ValueError(f"{self.name} has no field {', '.join(values.keys() - self.fields.keys())}")
        return tuple(every.values())

    def make(self, **values: int) -> npt.NDArray[Any]:
        """A new record with these values, and zeros. Raises ValueError for an unknown field."""
        return np.array(self.row(**values), self.dtype)

    def view(self, address: int) -> Any:
        """The record at an address, with attributes that read and write its fields."""
        return self._structure.from_address(address)

    @cached_property
    def _zeros(self) -> dict[str, int]:
        return dict.fromkeys(self.fields, 0)

    @cached_property
    def _structure(self) -> Any:
        return np.ctypeslib.as_ctypes_type(self.dtype)

    def offset(self, field: str) -> int:
        return int(self.dtype.fields[field][1])  # type: ignore[index]

    def place(self, array: npt.NDArray[Any], field: str) -> int:
        """The address of a field of an array's first record."""
        return int(array.ctypes.data) + self.offset(field)

    @lru_cache  # noqa: B019 - records live as long as the process
    def resolve(self, field: str) -> tuple[int, Any, Any]:
        """A field: (its offset, numba's type in memory, the type that kernels see)."""
        if field not in self.fields:
            raise TypingError(f"{self.name} has no field {field}: it has {', '.join(self.fields)}")
        dtype, offset = self.dtype.fields[field][:2]  # type: ignore[index]
        if dtype.subdtype is not None:
            kind = nb.from_dtype(dtype.subdtype[0])
            return offset, types.NestedArray(kind, dtype.shape), types.Array(kind, len(dtype.shape), "C")
        kind = self.fields[field][0]
        return offset, nb.from_dtype(dtype), kind if isinstance(kind, Record) else nb.from_dtype(dtype)

    # numba calls these

    def can_convert_to(self, typingctx: Any, other: Any) -> Any:
        return Conversion.safe if other == types.int64 else None

    def unify(self, typingctx: Any, other: Any) -> Any:
        return self if isinstance(other, types.Integer) else None


ALL: dict[str, Record] = {}  # by name
ITSELF = object()  # the kind of a field that holds the address of a record of the same kind


def define(name: str, says: str, fields: Mapping[str, Any], *, apart: bool = False, size: int = 0) -> Record:
    """Define a record. `fields`: names, several with spaces between them, and their description; or (kind, description).

    kind: int64 by default; a NumPy type, (type, shape), another record, ITSELF. `apart`: each field has its own cache line. `size`: bytes from one
    record to the next, if more than the fields take.
    """
    if name in ALL:
        raise ValueError(f"a record {name} is there already")
    every: dict[str, tuple[Any, str]] = {}
    for names, what in fields.items():
        kind, text = what if isinstance(what, tuple) else (np.int64, what)
        every |= dict.fromkeys(names.split(), (kind, text))
    kinds = [np.int64 if kind is ITSELF or isinstance(kind, Record) else kind for kind, _ in every.values()]
    layout: dict[str, Any] = {"names": list(every), "formats": kinds}
    if apart:
        layout |= {"offsets": [LINE_BYTES * i for i in range(len(every))], "itemsize": LINE_BYTES * len(every)}
    if size:
        layout["itemsize"] = size
    dtype: Any = np.dtype
    made = Record(name, says, dtype(layout, align=True), every)
    every |= {field: (made, text) for field, (kind, text) in every.items() if kind is ITSELF}
    ALL[name] = made
    return made


@register_model(Record)
class _Address(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _I64)


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Record

    def generic_resolve(self, kind: Any, field: str) -> Any:
        return kind.resolve(field)[2]


def _pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), kind.as_pointer())


@lower_getattr_generic(Record)
def _get(context: Any, builder: Any, kind: Any, address: Any, field: str) -> Any:
    offset, stored, seen = kind.resolve(field)
    if not isinstance(stored, types.NestedArray):
        return context.unpack_value(builder, stored, _pointer(builder, address, offset, context.get_data_type(stored)))
    array = make_array(seen)(context, builder)
    populate_array(
        array,
        data=_pointer(builder, address, offset, context.get_data_type(stored.dtype)),
        shape=[context.get_constant(types.intp, size) for size in stored.shape],
        strides=[context.get_constant(types.intp, size) for size in stored.strides],
        itemsize=context.get_constant(types.intp, stored.strides[-1]),
        meminfo=None,
        parent=None,
    )
    return array._getvalue()


@lower_setattr_generic(Record)
def _set(context: Any, builder: Any, signature: Any, args: Any, field: str) -> None:
    offset, stored, _ = signature.args[0].resolve(field)
    value = context.cast(builder, args[1], signature.args[1], stored)
    context.pack_value(builder, stored, value, _pointer(builder, args[0], offset, context.get_data_type(stored)))


@lower_cast(Record, types.Integer)
def _to_number(context: Any, builder: Any, kind: Any, wanted: Any, value: Any) -> Any:
    return context.cast(builder, value, types.int64, wanted)


@lower_cast(types.Integer, Record)
def _to_record(context: Any, builder: Any, kind: Any, wanted: Any, value: Any) -> Any:
    return context.cast(builder, value, kind, types.int64)


def at(kind: Record) -> Any:
    """The function, for kernels, that returns the record at an address (and an index, where there are several)."""

    @intrinsic
    def record_at(typingctx: Any, address: Any, index: Any = None) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            begin = context.cast(builder, args[0], signature.args[0], types.int64)
            if isinstance(signature.args[1], types.Omitted):
                return begin
            number = context.cast(builder, args[1], signature.args[1], types.int64)
            return builder.add(begin, builder.mul(number, ir.Constant(_I64, kind.bytes)))

        return kind(address, types.Omitted(None) if index is None else index), codegen

    return record_at


@intrinsic(prefer_literal=True)
def place(typingctx: Any, record: Any, field: Any) -> Any:
    """The address of a field, whose name is a constant."""
    offset = record.resolve(field.literal_value)[0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], ir.Constant(_I64, offset))

    return types.int64(record, field), codegen


TEXT = define("Text", "bytes somewhere in memory", {"at bytes": "the address and the number of bytes"})
text_at = at(TEXT)
