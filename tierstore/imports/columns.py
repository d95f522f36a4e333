"""Keys and vectors in the columns of other tools' tables: which columns they are, and how they become arrays.

Pure functions; any thread may call them. Whatever does not fit is InvalidInput and says what was expected, what came,
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
from tierstore.formats.given import is_list, list_rows
from tierstore.types import KeyType

_ARROW_KEYS = {KeyType.INT64: pa.int64(), KeyType.UINT64: pa.uint64(), KeyType.STRING: pa.large_string()}
_SHOWN = 12  # columns in an error


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns of a schema that are read: the key's, and the vector's or those of its numbers, in order."""

    key: str
    vectors: tuple[str, ...]
    key_type: KeyType

    @property
    def names(self) -> list[str]:
        return [self.key, *self.vectors]


def choose(schema: pa.Schema, key: str, vector: str | Sequence[str], key_type: KeyType | None) -> Chosen:
    """The columns named `key` and `vector`: one of lists, a pattern such as `f*`, or the names of one column a number.

    key_type: None for the type that the key's column has; else its keys are turned into that. Raises InvalidInput.
    """
    if schema.get_field_index(key) < 0:
        raise InvalidInput(f"there is no one column {key!r} for keys; {_listed(schema)}")
    kind = schema.field(key).type
    own = KeyType.INT64 if _is_whole_decimal(kind) else key_type_of(kind)
    if own is None:
        raise InvalidInput(f"column {key!r}: expected keys that are integers or strings, came {kind}; cast them first")
    if isinstance(vector, str) and schema.get_field_index(vector) >= 0 and _is_vector(schema.field(vector).type):
        return Chosen(key, (vector,), key_type or own)
    names = _matching(schema, vector) if isinstance(vector, str) else list(vector)
    if not names:
        raise InvalidInput(f"there is no one column {vector!r} for vectors; {_listed(schema)}")
    for name in names:
        if schema.get_field_index(name) < 0:
            raise InvalidInput(f"there is no one column {name!r} for vectors; {_listed(schema)}")
        kind = schema.field(name).type
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            what = "lists of numbers" if len(names) == 1 else "numbers"
            raise InvalidInput(f"column {name!r}: expected {what}, came {kind}")
    return Chosen(key, tuple(names), key_type or own)


def _matching(schema: pa.Schema, pattern: str) -> list[str]:
    """Columns of that name or pattern, `f2` before `f10`."""
    names = [name for name in schema.names if fnmatch.fnmatchcase(name, pattern)]
    return sorted(names, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"([0-9]+)", name)])


def _listed(schema: pa.Schema) -> str:
    shown = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:_SHOWN])
    more = f" and {len(schema) - _SHOWN} more" if len(schema) > _SHOWN else ""
    return f"there are {shown or 'none'}{more}"


def _is_whole_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) and kind.scale == 0)


def _is_spark_vector(kind: pa.DataType) -> bool:
    """Spark's `ml.linalg.Vector` as it is stored: sparse or dense, by its `type`."""
    return bool(pa.types.is_struct(kind) and {"type", "values"} <= {kind.field(i).name for i in range(kind.num_fields)})


def _is_vector(kind: pa.DataType) -> bool:
    return is_list(kind) or _is_spark_vector(kind)


def keys_of(batch: pa.RecordBatch, chosen: Chosen) -> pa.Array:
    """The keys, as Arrow has them for their type. Raises InvalidInput naming the row of one that is null."""
    column = batch.column(chosen.key)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        raise InvalidInput(f"row {_first_null(column)}: the key is null")
    if key_type_of(column.type) is chosen.key_type:
        return column
    try:
        return pc.cast(column, _ARROW_KEYS[chosen.key_type])
    except pa.ArrowException as error:
        raise InvalidInput(f"column {chosen.key!r}: not all keys are {chosen.key_type}: {error}") from error


def vectors_of(batch: pa.RecordBatch, chosen: Chosen) -> npt.NDArray[Any]:
    """The vectors, [n, dim] of numbers. Raises InvalidInput naming the row that does not fit."""
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


def _dense(column: pa.StructArray, name: str) -> pa.Array:
    if column.null_count:
        raise InvalidInput(f"row {_first_null(column)}: column {name!r} is null")
    sparse = pc.not_equal(pc.struct_field(column, "type"), 1)
    if pc.any(sparse).as_py():
        row = int(np.argmax(sparse.to_numpy(zero_copy_only=False)))
        raise InvalidInput(f"row {row}: column {name!r} holds a sparse vector; make it dense with vector_to_array")
    return pc.struct_field(column, "values")


def _first_null(column: pa.Array) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
