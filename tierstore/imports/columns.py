"""Keys and vectors in the columns of other tools' tables: choosing the columns, and reading them as arrays.

Pure functions; any thread may call them. InvalidInput says what was expected, what was there,
and which columns there are.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.errors import InvalidInput
from tierstore.formats.columns import key_type_of
from tierstore.formats.normalize import is_list, list_rows
from tierstore.types import KeyType

_ARROW_KEYS = {KeyType.INT64: pa.int64(), KeyType.UINT64: pa.uint64(), KeyType.STRING: pa.large_string()}
_SHOWN = 12  # columns in an error


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns that are read: the key's, the vector's or those of its numbers in order, and
    the time's, if there is one.
    """

    key: str
    vectors: tuple[str, ...]
    key_type: KeyType
    time: str | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([self.key, *self.vectors, *([] if self.time is None else [self.time])]))


def choose_columns(
    schema: pa.Schema, key: str, vector: str | Sequence[str], key_type: KeyType | None, time: str | None = None
) -> Chosen:
    """The columns named `key` and `vector`: a column of lists, a pattern such as `f*`, or the
    names of one column per number.

    key_type: None for the type of the key's column; else its keys are converted to this type. `time`: the column
    of times. Raises InvalidInput.
    """
    if time is not None and schema.get_field_index(time) < 0:
        raise InvalidInput(f"expected one column {time!r} for times; {_listed(schema)}")
    if schema.get_field_index(key) < 0:
        raise InvalidInput(f"expected one column {key!r} for keys; {_listed(schema)}; name it with `key`")
    kind = schema.field(key).type
    own = KeyType.INT64 if _is_whole_decimal(kind) else key_type_of(kind)
    if own is None:
        raise InvalidInput(f"column {key!r}: expected keys that are integers or strings, got {kind}; cast them first")
    if isinstance(vector, str) and schema.get_field_index(vector) >= 0 and _is_vector(schema.field(vector).type):
        return Chosen(key, (vector,), key_type or own, time)
    names = _matching(schema, vector) if isinstance(vector, str) else list(vector)
    if not names:
        raise InvalidInput(f"expected one column {vector!r} for vectors; {_listed(schema)}; name it with `vector`")
    for name in names:
        if schema.get_field_index(name) < 0:
            raise InvalidInput(f"expected one column {name!r} for vectors; {_listed(schema)}")
        kind = schema.field(name).type
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            what = "lists of numbers" if len(names) == 1 else "numbers"
            raise InvalidInput(f"column {name!r}: expected {what}, got {kind}")
    return Chosen(key, tuple(names), key_type or own, time)


def _matching(schema: pa.Schema, pattern: str) -> list[str]:
    """The columns that match a name or pattern, `f2` before `f10`."""
    names = [name for name in schema.names if fnmatch.fnmatchcase(name, pattern)]
    return sorted(names, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"([0-9]+)", name)])


def _listed(schema: pa.Schema) -> str:
    shown = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:_SHOWN])
    others = f" and {len(schema) - _SHOWN} more" if len(schema) > _SHOWN else ""
    return f"there are {shown or 'none'}{others}"


def _is_whole_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) and kind.scale == 0)


def _is_spark_vector(kind: pa.DataType) -> bool:
    """Whether this is how Spark stores an `ml.linalg.Vector`, sparse or dense by its field `type`."""
    return bool(pa.types.is_struct(kind) and {"type", "values"} <= {kind.field(i).name for i in range(kind.num_fields)})


def _is_vector(kind: pa.DataType) -> bool:
    return is_list(kind) or _is_spark_vector(kind)


def keys_of(batch: pa.RecordBatch, chosen: Chosen) -> pa.Array:
    """The keys, as the Arrow type of `chosen.key_type`. InvalidInput names the row of a null."""
    column = batch.column(chosen.key)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        raise InvalidInput(f"row {_first_null(column)}: expected a key, got null")
    if key_type_of(column.type) is chosen.key_type:
        return column
    try:
        return pc.cast(column, _ARROW_KEYS[chosen.key_type])
    except pa.ArrowException as error:
        raise InvalidInput(f"column {chosen.key!r}: expected {chosen.key_type} keys: {error}") from error


def vectors_of(batch: pa.RecordBatch, chosen: Chosen) -> npt.NDArray[Any]:
    """The vectors, numbers [n, dim]. InvalidInput names the row that does not fit."""
    if len(chosen.vectors) > 1 or not _is_vector(batch.column(chosen.vectors[0]).type):
        parts = []
        for name in chosen.vectors:
            column = batch.column(name)
            if column.null_count:
                raise InvalidInput(f"row {_first_null(column)}: column {name!r} is null")
            parts.append(column.to_numpy(zero_copy_only=False))
        return np.stack(parts, axis=1)
    column = batch.column(chosen.vectors[0])
    if _is_spark_vector(column.type):
        column = _dense(column, chosen.vectors[0])
    return list_rows(column)


def without_nulls(batch: pa.RecordBatch, chosen: Chosen) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
    """The rows that hold no null in the chosen columns, nor within a list there, and their numbers; None for all."""
    valid = np.ones(len(batch), bool)
    for name in chosen.names:
        column = batch.column(name)
        if column.null_count:
            valid &= column.is_valid().to_numpy(zero_copy_only=False)
        if _is_vector(column.type):
            lists = pc.struct_field(column, "values") if _is_spark_vector(column.type) else column
            if pc.list_flatten(lists).null_count:
                nulls = pc.list_flatten(lists).is_null().to_numpy(zero_copy_only=False)
                valid[pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)[nulls]] = False
    if valid.all():
        return batch, None
    return batch.filter(pa.array(valid)), np.flatnonzero(valid)


def _dense(column: pa.StructArray, name: str) -> pa.Array:
    if column.null_count:
        raise InvalidInput(f"row {_first_null(column)}: column {name!r} is null")
    sparse = pc.not_equal(pc.struct_field(column, "type"), 1)
    if pc.any(sparse).as_py():
        row = int(np.argmax(sparse.to_numpy(zero_copy_only=False)))
        raise InvalidInput(
            f"row {row}: column {name!r}: expected dense vectors, got a sparse one; convert it with vector_to_array"
        )
    return pc.struct_field(column, "values")


def _first_null(column: pa.Array) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
